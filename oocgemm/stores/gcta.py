"""Use GCTA's file of a genetic relationship matrix, X.grm.bin, as a symmetric matrix of float32.

The file has the elements on and below the diagonal, row by row, in little-endian float32, without a header.
So element (i, j) is number ``i (i + 1) / 2 + j``. Two more files belong to it: X.grm.id has the family ID and
the individual ID of each row, and X.grm.N.bin the number of variants that each element was computed from.

https://yanglab.westlake.edu.cn/software/gcta/#MakingaGRM describes the format.
"""

import os
from collections.abc import Callable, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout, Lines
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix, NewArray, Store, is_path, refuse_zarr_options
from oocgemm.stores.durable import (
    DATA,
    SIDECAR,
    check_room,
    fingerprints,
    found_locally,
    sync_path,
)
from oocgemm.stores.files import OpenFile, open_regular, read_fully, write_fully
from oocgemm.stores.formats import check_found
from oocgemm.stores.npy import NpyMatrix, in_new_file

SUFFIX, COUNTS = ".grm.bin", ".grm.N.bin"
_STORED = np.dtype("<f4")
# Elements of X.grm.N.bin that are written at a time.
_BATCH = 1 << 18


class GrmFiles(Store):
    """Open and create .grm.bin files. A path belongs to this store if it ends in .grm.bin.

    Only the lower triangle of a Gram matrix can be stored in such a file.
    """

    kind = "a .grm.bin file"
    has_chunks = False
    default_uplo = "lower"

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and (is_grm(os.fspath(operand)) or _is_counts(os.fspath(operand)))

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        path = Path(operand)
        if journal is not None and (journal / DATA).exists():
            return _opened(name, journal / DATA, place=path)
        check_found(name, operand)
        if writable and journal is None:
            raise InputError(f"{name} exists at {path}, and .grm.bin files are not overwritten: remove it")
        return _opened(name, path)

    def exists(self, path: str) -> bool:
        return found_locally(path)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        refuse_zarr_options(self.kind, chunks, compressor)
        if problem.triangle != "lower":
            raise InputError(
                f"C at {path} would be {self.kind}, which stores the lower triangle of a Gram matrix: use "
                "grm, or gram with uplo='lower' (--uplo lower), or give a path that ends in .zarr or .npy"
            )
        if problem.c_dtype != "float32":
            raise InputError(
                f"C at {path} would be {self.kind}, which stores float32, and C has dtype {problem.c_dtype}: "
                "pass another cast, or give a path that ends in .zarr or .npy"
            )
        return Lines(problem.n, itemsize=_STORED.itemsize)

    def create(self, new: NewArray, journal: Path | None = None) -> Matrix:
        place, extent = Path(new.path), new.shape[0]
        at = place if journal is None else journal / DATA
        check_room(new.name, new.path, _bytes(extent))
        try:
            place.absolute().parent.mkdir(parents=True, exist_ok=True)
            return in_new_file(at, lambda: GrmMatrix(new.name, at, extent, place))
        except OSError as error:
            raise InputError(f"{new.name}: cannot create {new.path}: {error}") from error

    def journal_folder(self, operand: Any) -> Path | None:
        return Path(os.path.realpath(operand) + SIDECAR)


class GrmMatrix(NpyMatrix):
    """The symmetric matrix in a .grm.bin file. Elements above the diagonal are read from below, not written.

    A new file is written in the folder of the journal first. `place` is its final path then.
    """

    def __init__(self, name: str, path: Path, extent: int, place: Path | None = None) -> None:
        super().__init__(name, path, (extent, extent), _STORED, 0, place=place)
        self._size = _bytes(extent)

    @property
    def array(self) -> Array:
        """The elements on and below the diagonal, row by row, as a memory map of the file."""
        count = self._size // _STORED.itemsize
        if not count:
            return np.empty(0, _STORED)
        return np.memmap(self._path, _STORED, "r", shape=(count,))

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        with OpenFile(self._path, self._opener) as file:
            self._check_length(file.size)
            for i in range(*rows):  # the elements on and below the diagonal
                stop = min(cols[1], i + 1)
                if stop > cols[0]:
                    out[i - rows[0], : stop - cols[0]] = _read(file.descriptor, i, (cols[0], stop))
            for j in range(max(cols[0], rows[0] + 1), cols[1]):  # those above it
                stop = min(rows[1], j)
                out[: stop - rows[0], j - cols[0]] = _read(file.descriptor, j, (rows[0], stop))

    def _read_back(self, rows: Range, cols: Range, out: Array) -> None:
        self.read(rows, cols, out)

    def _write(self, rows: Range, cols: Range, data: Array) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY)
        try:
            self._check_length(os.fstat(descriptor).st_size)
            for i in range(max(rows[0], cols[0]), rows[1]):  # other rows end left of the block
                line = np.ascontiguousarray(data[i - rows[0], : i + 1 - cols[0]], _STORED)
                write_fully(descriptor, line.view(np.uint8), _offset(i, cols[0]))
        finally:
            os.close(descriptor)

    def fingerprint(self) -> dict[str, object]:
        return {
            "path": os.path.realpath(self._path),
            "metadata": f"{self.shape} lower triangle",
            **fingerprints([self._path]),
        }

    def describe(self) -> dict[str, object]:
        return super().describe() | {"store": "grm"}


def is_grm(path: str) -> bool:
    """Return whether a path is that of a .grm.bin file, by its suffix."""
    return path.endswith(SUFFIX) and "://" not in path


def _is_counts(path: str) -> bool:
    return path.endswith(COUNTS) and "://" not in path


def companions(path: Path) -> tuple[Path, Path]:
    """Return the paths of the files X.grm.id and X.grm.N.bin for the path X.grm.bin."""
    stem = os.fspath(path).removesuffix(".bin")
    return Path(f"{stem}.id"), Path(f"{stem}.N.bin")


def write_companions(path: Path, individuals: Sequence[tuple[str, str]], variants: int | None) -> None:
    """Write X.grm.id and X.grm.N.bin beside X.grm.bin. Files there are replaced.

    Args:
        path: of the .grm.bin file.
        individuals: the family ID and the individual ID of each row.
        variants: the number of variants that every element was computed from; None if the numbers differ,
            and have been written already.

    Raises:
        InputError: a file cannot be written.
    """
    ids, counts = companions(path)

    def write_ids(file: BinaryIO) -> None:
        text = "".join(f"{family}\t{individual}\n" for family, individual in individuals)
        file.write(text.encode("utf-8", "surrogateescape"))

    def write_counts(file: BinaryIO) -> None:
        assert variants is not None
        left, batch = _bytes(len(individuals)) // _STORED.itemsize, np.full(_BATCH, variants, _STORED)
        while left:
            file.write(batch[:left].data)
            left -= min(left, _BATCH)

    _replace(ids, write_ids)
    if variants is not None:
        _replace(counts, write_counts)


def _replace(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Create or replace a file atomically."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            write(file)
        sync_path(temporary)
        os.replace(temporary, path)
        sync_path(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}; then run again with resume") from error


def _opened(name: str, path: Path, place: Path | None = None) -> GrmMatrix:
    """Open a .grm.bin file, or an unfinished one that belongs at `place`. Raises `InputError`."""
    try:
        with OpenFile(path) as file:
            size = file.size
    except OSError as error:
        raise InputError(f"{name}: {path} cannot be opened: {error.strerror}") from error
    count = size // _STORED.itemsize
    extent = (isqrt(8 * count + 1) - 1) // 2
    if _bytes(extent) != size:
        raise InputError(
            f"{name}: {path} has {size} bytes, and the triangle of {extent} x {extent} elements takes "
            f"{_bytes(extent)}, the next one {_bytes(extent + 1)}: it is truncated, or not a .grm.bin file"
        )
    return GrmMatrix(name, path, extent, place)


def _offset(i: int, j: int) -> int:
    """Return the byte at which element (i, j) on or below the diagonal begins."""
    return (i * (i + 1) // 2 + j) * _STORED.itemsize


def _bytes(extent: int) -> int:
    return _offset(extent, 0)


def _read(descriptor: int, i: int, part: Range) -> Array:
    """Return elements of row `i` on or below the diagonal. Raises `EOFError` if the file is too short."""
    line = np.empty(part[1] - part[0], _STORED)
    read_fully(descriptor, line.view(np.uint8), _offset(i, part[0]))
    return line
