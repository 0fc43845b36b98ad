"""Use an HDF5 dataset as a matrix, read-only."""

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, transient
from oocgemm.stores.declared import Declared
from oocgemm.stores.durable import fingerprints
from oocgemm.stores.hdf5.address import MARK


class Reader(Protocol):
    """What reads the blocks of a dataset: our own code for chunks or contiguous elements, or h5py."""

    @property
    def layout(self) -> Layout:
        """The layout of the dataset, for the planner."""

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`."""


class Fill:
    """Read a dataset without any stored element: all have the fill value."""

    def __init__(self, value: Any) -> None:
        """Set the fill value; None if the dataset has none."""
        self._value = value
        self.layout = Layout()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Fill `out`. Raises `ExecutionError` if the dataset has no fill value."""
        if self._value is None:
            raise ExecutionError("the dataset was never written, and it has no fill value: write it")
        out[...] = self._value


class HDF5Matrix:
    """A matrix in an HDF5 dataset, whose blocks `reader` reads. The file must not change meanwhile."""

    def __init__(
        self,
        name: str,
        file: str,
        dataset: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        reader: Reader,
        *,
        stored: str,
        declared: Declared,
        described: dict[str, object],
    ) -> None:
        """Wrap a dataset.

        `name` is its name in messages. `stored` describes shape, dtype and storage, for the fingerprint.
        `declared` is what the attributes declare about elements. `described` is added to what `describe`
        returns.
        """
        self.name, self.shape, self.dtype, self.declared = name, shape, dtype, declared
        self.layout = reader.layout
        self._file, self._dataset, self._reader = Path(file), dataset, reader
        self._stored, self._described = stored, described
        self._status = self._present()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block into `out`.

        Raises `ExecutionError` for a damaged chunk, and if the file has changed since it was opened. Raises
        `EOFError` if the file is too short.
        """
        if self._present() != self._status:
            raise ExecutionError(f"{self._file} was changed since it was opened: do not write to operands")
        try:
            self._reader.read(rows, cols, out)
        except (ExecutionError, EOFError, MemoryError):
            raise
        except Exception as error:  # h5py raises exceptions of many types
            if transient(error):
                raise
            raise ExecutionError(f"{self._place} cannot be read, it may be damaged: {error}") from error

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Raise `ExecutionError`: HDF5 datasets are read-only."""
        raise ExecutionError(f"{self.name} is an HDF5 dataset, which is read-only")

    def sync(self) -> None:
        """Do nothing: the dataset is read-only."""

    def set_finished(self, finished: bool) -> None:
        """Do nothing: the dataset is never the result of a run."""

    def fingerprint(self) -> dict[str, object]:
        """Return the real path, the shape and storage, and digests of the file's status."""
        path = f"{os.path.realpath(self._file)}{MARK}{self._dataset}"
        return {"path": path, "metadata": self._stored, **fingerprints([self._file])}

    def describe(self) -> dict[str, object]:
        """Return facts for the log. "direct" is false if h5py reads the dataset."""
        facts = {"store": "hdf5", "path": self._place, "shape": list(self.shape), "dtype": self.dtype.name}
        return facts | self._described

    def identities(self) -> set[object]:
        """Return the identity of the file. Two datasets of one file share it."""
        try:
            status = os.stat(self._file)
        except OSError:  # the file was deleted or renamed: its identity is unknown
            return set()
        return {("file", status.st_dev, status.st_ino)}

    @property
    def _place(self) -> str:
        return f"{self._file}{MARK}{self._dataset}"

    def _present(self) -> tuple[int, int, int]:
        """Return the inode, the size and the modification time of the file. Raises `OSError`."""
        status = os.stat(self._file)
        return status.st_ino, status.st_size, status.st_mtime_ns
