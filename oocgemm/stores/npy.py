"""A .npy file as a matrix: read and written by system calls, so that its pages are never in the process's resident set."""

import errno
import os
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Span
from oocgemm.stores.base import Array, checked
from oocgemm.stores.durable import saved_block, saved_blocks, stamp, stamps, sync_files, sync_path
from oocgemm.stores.files import OpenFile, publish, worth_caching
from oocgemm.stores.lines import read_block, scratch_bytes, write_block

ARCHIVE = b"PK\x03\x04"  # as .npz files begin


class NpyMatrix:
    """A .npy file, durable (`stores.durable`). One that is created may have a `place` to go to when it is finished."""

    def __init__(
        self,
        name: str,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        offset: int,
        *,
        by_columns: bool = False,
        place: Path | None = None,
    ) -> None:
        """Elements of a `dtype` of the stored byte order begin at the byte `offset`, in rows or `by_columns`."""
        self.shape, self.dtype = checked(name, shape, dtype)
        self.name = name
        self._path = path
        self._place = place
        self._redirected: Path | None = None
        self._offset = offset
        self._stored = dtype
        self._by_columns = by_columns
        self._line = self.shape[0 if by_columns else 1]
        self._size = offset + prod(shape) * dtype.itemsize
        self._past_cache = not worth_caching(self._size)
        self.layout = Layout(
            contiguous=0 if by_columns else 1,
            line=self._line,
            itemsize=self.dtype.itemsize,
            scratch_bytes=scratch_bytes(past_cache=self._past_cache),
        )

    @property
    def array(self) -> Array:
        """The file as a memory map, for the caller of a run."""
        mode: Literal["r+"] | None = "r+" if prod(self.shape) else None
        mapped: Array = np.load(self._path, mmap_mode=mode)
        return mapped

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        with OpenFile(self._path) as file:
            self._check_length(file.size)
            lines, part, block = self._oriented(rows, cols, out)
            read_block(
                file, self._offset, self._line, self._stored, lines, part, block, past_cache=self._past_cache
            )

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        if self._redirected is not None:
            publish(saved_block(self._redirected, rows, cols), data, data.nbytes)
        else:
            self._write(rows, cols, data)

    def _write(self, rows: Span, cols: Span, data: Array) -> None:
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            self._check_length(os.fstat(descriptor).st_size)
            lines, part, block = self._oriented(rows, cols, data)
            write_block(descriptor, self._offset, self._line, self._stored, lines, part, block)
        finally:
            os.close(descriptor)

    def _oriented(self, rows: Span, cols: Span, block: Array) -> tuple[Span, Span, Array]:
        """A block as the lines that it lies in, what it takes of each, and an array with a row for each line."""
        return (cols, rows, block.T) if self._by_columns else (rows, cols, block)

    def _check_length(self, size: int) -> None:
        """Raises `EOFError` for a file that has been cut short: a write would lengthen it again, with zeros before."""
        if size < self._size:
            raise EOFError(f"the file has been cut short, from {self._size} bytes to {size}")

    def sync(self) -> None:
        sync_path(self._path)

    def redirect(self, folder: Path) -> None:
        self._redirected = folder

    def sync_block(self, rows: Span, cols: Span) -> None:
        if self._redirected is not None:
            blocks = saved_blocks(self._redirected, rows, cols)
            sync_files(self._redirected, [path.name for path, _, _ in blocks])
        else:
            self.sync()

    def adopt(self, rows: Span, cols: Span) -> None:
        assert self._redirected is not None
        blocks = saved_blocks(self._redirected, rows, cols)
        for path, r, c in blocks:
            saved = np.fromfile(path, self.dtype).reshape(r[1] - r[0], c[1] - c[0])
            self._write(r, c, saved)
        self.sync()
        for path, _, _ in blocks:
            path.unlink()

    def set_finished(self, finished: bool) -> None:
        if finished and self._place is not None:
            _name(self._path, self._place)
            sync_path(self._place.parent)
            self._path, self._place = self._place, None

    def sweep(self) -> None:
        pass

    def stamp(self) -> str:
        return stamp([self._path])

    def block_stamp(self, rows: Span, cols: Span) -> str | None:
        """Return None: no file belongs to a block alone."""
        return None

    def fingerprint(self) -> dict[str, object] | None:
        order = "columns" if self._by_columns else "rows"
        said = f"{self.shape} {self._stored.str} by {order}"
        return {"path": os.path.realpath(self._path), "metadata": said, **stamps([self._path])}

    def describe(self) -> dict[str, object]:
        path = str(self._path)
        return {"store": "npy", "path": path, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        try:
            status = os.stat(self._path)
        except OSError:  # no path leads to it any more
            return set()
        return {("file", status.st_dev, status.st_ino)}

    def reserve(self) -> None:
        """Allocate disk space for the whole file. Raises `OSError` if the disk has too little."""
        with open(self._path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self._size))


def open_npy(name: str, path: Path, *, writable: bool = False, place: Path | None = None) -> NpyMatrix:
    """Open a .npy file that goes to `place` when it is finished. Raises `InputError` for any other file."""
    try:
        with open(path, "r+b" if writable else "rb") as file:
            shape, by_columns, dtype = _read_header(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
        if dtype.hasobject:
            raise ValueError("its elements are Python objects")
        if size < (whole := offset + prod(shape) * dtype.itemsize):
            raise ValueError(f"it has {size} bytes instead of {whole}")
    except Exception as error:  # NumPy's reader of headers raises of every kind
        raise InputError(f"{name}: {path} cannot be opened as a .npy file: {error}") from error
    return NpyMatrix(name, path, shape, dtype, offset, by_columns=by_columns, place=place)


def create_npy(
    name: str, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], place: Path | None = None
) -> NpyMatrix:
    """Create a .npy file of zeros. It goes to `place` when it is finished. A file that cannot be made leaves nothing."""
    open(path, "xb").close()
    try:
        with open(path, "wb") as file:
            said = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, said)
            offset = file.tell()
        matrix = NpyMatrix(name, path, shape, dtype, offset, place=place)
        matrix.reserve()
        sync_files(path.parent, [path.name])  # what it comes to hold is synced block by block
    except BaseException:
        path.unlink()
        raise
    return matrix


def _name(path: Path, place: Path) -> None:
    """Rename a finished file to its place, unless another file is there. Raises `OSError`."""
    if path != place and place.exists():
        raise FileExistsError(
            errno.EEXIST, f"something else was put at its place; it is in {path}", str(place)
        )
    os.replace(path, place)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns are contiguous, and stored dtype of the array that begins at the position of the file then.
    Raises `ValueError`."""
    if file.read(len(ARCHIVE)) == ARCHIVE:
        raise ValueError("it is an archive of arrays")
    file.seek(0)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
