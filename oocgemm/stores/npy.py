"""Use a .npy file as a matrix.

The file is read and written by system calls, not through a memory map. So its pages are not counted as
memory of the process.
"""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar
from zlib import crc32

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem, Layout, Lines
from oocgemm.planning.tiling import Range, length
from oocgemm.stores.base import (
    Array,
    Matrix,
    NewArray,
    Store,
    checked,
    described,
    file_identities,
    is_path,
    refuse_zarr_options,
)
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.capabilities import (
    DATA,
    SIDECAR,
    check_room,
    found_locally,
)
from oocgemm.stores.files import (
    MIN_DIRECT,
    SAMPLES,
    CachedChunks,
    Opener,
    OpenFile,
    fingerprint_of,
    fingerprints,
    in_page_cache,
    many_cores,
    open_regular,
    publish,
    sync_files,
    sync_path,
    worth_caching,
)
from oocgemm.stores.folding import Fold, Folding, rectangles
from oocgemm.stores.formats import check_found
from oocgemm.stores.lines import (
    StoredLines,
    read_block,
    scratch_bytes,
    write_block,
)

MAX_HEADER = 64 << 10
# Number of bytes that are read at a time for the checksum of a block.
SUMMED = 1 << 20
ARCHIVE = b"PK\x03\x04"  # the first bytes of a .npz file, which may have been renamed to .npy


M = TypeVar("M", bound="NpyMatrix")


class NpyFiles(Store):
    """Open and create .npy files. A path belongs to this store if it ends in .npy."""

    kind = "npy"
    has_chunks = False

    def matches(self, operand: Any) -> bool:
        return is_path(operand) and os.fspath(operand).endswith(".npy") and "://" not in os.fspath(operand)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if journal is not None and (journal / DATA).exists():
            return self._opened(name, journal / DATA, writable=writable, place=Path(operand))
        check_found(name, operand)
        return self._opened(name, Path(operand), writable=writable)

    def _opened(self, name: str, path: Path, *, writable: bool, place: Path | None = None) -> Matrix:
        """Open a file. If it is an unfinished result, `place` is its final path."""
        return open_npy(name, path, writable=writable, place=place)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        check_found(name, operand)
        return fold_npy(name, Path(operand), folding)

    def exists(self, path: str) -> bool:
        return found_locally(path)

    def check_dtype(self, name: str, path: str, dtype: str) -> None:
        if dtype == "bfloat16":
            raise InputError(
                f"{name} at {path} would have dtype bfloat16, which .npy files cannot store: pass "
                "out_dtype='float32' (--out-dtype float32), or the path of a zarr array"
            )

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        refuse_zarr_options("a .npy file", chunks, compressor)
        return Lines(problem.n, itemsize=problem.itemsizes["C"])

    def create(self, new: NewArray, journal: Path | None = None) -> Matrix:
        check_room(new.name, new.path, self._bytes(new))
        place = Path(new.path)
        try:
            place.absolute().parent.mkdir(parents=True, exist_ok=True)
            return self._created(new, place if journal is None else journal / DATA, place)
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(f"{new.name}: cannot create {new.path}: {error}") from error

    def _bytes(self, new: NewArray) -> int:
        return prod(new.shape) * new.dtype.itemsize

    def _created(self, new: NewArray, path: Path, place: Path) -> Matrix:
        """Create a result in the file `path`. Its final path is `place`."""
        return create_npy(new.name, path, new.shape, new.dtype, place)

    def journal_folder(self, operand: Any) -> Path | None:
        return Path(os.path.realpath(operand) + SIDECAR)


class NpyMatrix:
    """A matrix in a .npy file. It is `Resumable`.

    A new file may be written in another folder first. Then `place` is its final path, to which `set_finished`
    renames it.
    """

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
        """Wrap a file whose elements, of the stored `dtype`, begin at the byte `offset`."""
        self.shape, self.dtype = checked(name, shape, dtype)
        self.name = name
        self._path = path
        self._place = place
        self._redirected: Path | None = None
        self._stored = StoredLines(offset, self.shape[0 if by_columns else 1], dtype)
        self._by_columns = by_columns
        self._size = offset + prod(shape) * dtype.itemsize
        self._past_cache = not worth_caching(self._size)
        self._opener = Opener()
        self._file = self._cached()
        self.layout: Layout = Lines(
            contiguous=0 if by_columns else 1,
            line=self._stored.elements,
            itemsize=self.dtype.itemsize,
            scratch_bytes=scratch_bytes(past_cache=self._past_cache),
            # Blocks are read piece by piece, and pieces consist of rows.
            page_cached=not (self._past_cache or by_columns),
        )

    @property
    def array(self) -> Array:
        """The matrix as a memory map of the file. A run returns this as its result."""
        mode: Literal["r+"] | None = "r+" if prod(self.shape) else None
        mapped: Array = np.load(self._path, mmap_mode=mode)
        return mapped

    def _cached(self) -> CachedChunks | None:
        """Return the file as one chunk for compiled code; None if the page cache seems not to contain it."""
        offsets = range(self._stored.offset, self._size, max(1, self._size // SAMPLES))
        if not (self._stored.dtype.isnative and offsets and in_page_cache(self._path, offsets)):
            return None
        offset, count, dtype = self._stored
        chunk = self.shape[1 if self._by_columns else 0], count
        return CachedChunks(self._path, None, chunk, dtype.itemsize, self._size, offset=offset)

    def memory(self) -> None:
        """Return None: the elements are in a file."""

    def is_mapped(self) -> bool:
        return False

    def cached_chunks(self) -> CachedChunks | None:
        return None if self._by_columns else self._file

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        lines, part, block = self._oriented(rows, cols, out)
        # On few cores, a mapping is faster for whole lines.
        mapped = part == (0, self._stored.elements) and out.nbytes >= MIN_DIRECT and not many_cores()
        if self._file and not mapped and self._file.read(lines, part, block) == []:
            return
        self._read_back(rows, cols, out, past_cache=self._past_cache)

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        if self._redirected is not None:
            publish(saved_block(self._redirected, rows, cols), data, data.nbytes, self._redirected)
        else:
            self._write(rows, cols, data)

    def _write(self, rows: Range, cols: Range, data: Array) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY)
        try:
            self._check_length(os.fstat(descriptor).st_size)
            write_block(descriptor, self._stored, *self._oriented(rows, cols, data))
        finally:
            os.close(descriptor)

    def _oriented(self, rows: Range, cols: Range, block: Array) -> tuple[Range, Range, Array]:
        """Return the lines of a block, the range of elements of each line, and a view with a row per line."""
        return (cols, rows, block.T) if self._by_columns else (rows, cols, block)

    def _check_length(self, size: int) -> None:
        """Raise `EOFError` if the file was truncated: a write would extend the file again, with zeros."""
        if size < self._size:
            raise EOFError(f"the file was truncated from {self._size} bytes to {size}")

    def sync(self) -> None:
        sync_path(self._path)

    def redirect_writes(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._redirected = folder

    def sync_blocks(self, blocks: Sequence[tuple[Range, Range]]) -> None:
        if (folder := self._redirected) is not None:
            saved = [path.name for block in blocks for path, _, _ in saved_blocks(folder, *block)]
            sync_files(folder, saved)
        else:
            self.sync()

    def apply_redo(self, rows: Range, cols: Range) -> None:
        assert self._redirected is not None
        blocks = saved_blocks(self._redirected, rows, cols)
        for path, r, c in blocks:
            self._write(r, c, self._saved(path, r, c))
        self.sync()
        for path, _, _ in blocks:
            path.unlink()

    def redo_fingerprint(self, folder: Path, rows: Range, cols: Range) -> str:
        return fingerprint_of(sorted(path for path, _, _ in saved_blocks(folder, rows, cols)))

    def adopt(self, folder: Path, rows: Range, cols: Range) -> None:
        for path, r, c in saved_blocks(folder, rows, cols):
            if self._redirected is not None:
                os.replace(path, self._redirected / path.name)
            else:
                self._write(r, c, self._saved(path, r, c))
                path.unlink()

    def _saved(self, path: Path, rows: Range, cols: Range) -> Array:
        return np.fromfile(path, self.dtype).reshape(rows[1] - rows[0], cols[1] - cols[0])

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        if finished and self._place is not None:
            _rename_into_place(self._path, self._place)
            sync_path(self._place.parent)
            self._path, self._place = self._place, None
            self._file = None

    def delete_partial_files(self) -> None:
        pass

    def files_fingerprint(self) -> str:
        return fingerprint_of([self._path])

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        """Return a checksum of the elements: the status of the file says nothing about a single block."""
        height, found = max(1, SUMMED // max(1, length(cols) * self.dtype.itemsize)), 0
        for top in range(*rows, height):
            part = top, min(top + height, rows[1])
            block = np.empty((length(part), length(cols)), self.dtype)
            self._read_back(part, cols, block)
            found = crc32(block.tobytes(), found)
        return f"{found:08x}"

    def _read_back(self, rows: Range, cols: Range, out: Array, *, past_cache: bool = False) -> None:
        """Read a block. Without `past_cache`, read through the page cache, which has a block just written."""
        block = self._oriented(rows, cols, out)
        with OpenFile(self._path, self._opener) as file:
            self._check_length(file.size)
            read_block(file, self._stored, *block, past_cache=past_cache)

    def fingerprint(self) -> dict[str, object]:
        order = "columns" if self._by_columns else "rows"
        metadata = f"{self.shape} {self._stored.dtype.str} by {order}"
        return {"path": os.path.realpath(self._path), "metadata": metadata, **fingerprints([self._path])}

    def describe(self) -> dict[str, object]:
        return described(self, "npy", str(self._path))

    def identities(self) -> set[object]:
        return file_identities(self._path)

    def reserve(self) -> None:
        """Allocate disk space for the whole file. Raises `OSError` if the disk has too little."""
        with open(self._path, "r+b", opener=open_regular) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self._size))

    def missing_bytes(self) -> int:
        """Return 0: all disk space of the file is allocated already."""
        return 0


def saved_block(folder: Path, rows: Range, cols: Range) -> Path:
    """Return the path of the redo file with the new content of a block. The file name has the ranges."""
    return folder / "-".join(map(str, (*rows, *cols)))


def saved_blocks(folder: Path, rows: Range, cols: Range) -> list[tuple[Path, Range, Range]]:
    """Return the redo files of all blocks inside a block, each as (path, rows, columns)."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        parts = path.name.split("-")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            top, bottom, left, right = map(int, parts)
            if rows[0] <= top and bottom <= rows[1] and cols[0] <= left and right <= cols[1]:
                found.append((path, (top, bottom), (left, right)))
    return found


def open_npy(name: str, path: Path, *, writable: bool = False, place: Path | None = None) -> NpyMatrix:
    """Open a .npy file. If it is an unfinished result, `place` is its final path. Raises `InputError`."""
    shape, by_columns, dtype, offset = _described(name, path, writable=writable)
    return NpyMatrix(name, path, shape, dtype, offset, by_columns=by_columns, place=place)


def _described(
    name: str, path: Path, *, writable: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape, whether the order is Fortran's, the dtype and the offset. Raises `InputError`."""
    try:
        with open(path, "r+b" if writable else "rb", opener=open_regular) as file:
            shape, by_columns, dtype = _read_header(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
        if dtype.hasobject:
            raise ValueError("its elements are Python objects")
        if size < (whole := offset + prod(shape) * dtype.itemsize):
            raise ValueError(f"it has {size} bytes instead of {whole}")
    except Exception as error:  # NumPy's header reader raises exceptions of many types
        raise InputError(f"{name}: {path} cannot be opened as a .npy file: {error}") from error
    return shape, by_columns, dtype, offset


def fold_npy(name: str, path: Path, folding: Folding) -> Matrix:
    """Return the matrix that is folded from the array in a .npy file. Raises `InputError`."""
    shape, by_columns, dtype, offset = _described(name, path)
    fold = folding.fold(f"{name} at {path}", shape)
    order: Literal["C", "F"] = "F" if by_columns else "C"
    lines = fold_lines(name, path, fold, shape, dtype, offset, order)
    if lines is not None:
        return lines

    def fingerprint() -> dict[str, object]:
        metadata = f"{shape} {dtype.str} {order}"
        return {"path": os.path.realpath(path), "metadata": metadata, **fingerprints([path])}

    array: Array = np.load(path, mmap_mode="r" if prod(shape) else None)
    return BoxMatrix(
        *(name, fold, array),
        store="npy",
        path=str(path),
        fingerprint=fingerprint,
        identities=partial(file_identities, path),
    )


def fold_lines(
    name: str,
    path: Path,
    fold: Fold,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    offset: int,
    order: Literal["C", "F"] = "C",
) -> "NpyMatrix | None":
    """Return the matrix that is folded from contiguous elements in a file; None if it has no lines there.

    The elements begin at the byte `offset`, in the order C or Fortran's.
    """
    axes = fold.axes if order == "C" else fold.axes[::-1]
    first = next((at for at, axis in enumerate(axes) if axis.extent > 1), len(axes))
    if any(axis.extent != shape[axis.position] for axis in axes[first + 1 :]):
        return None  # the used elements are not contiguous
    stride = dtype.itemsize
    for axis in reversed(axes):
        offset += axis.start * stride
        stride *= shape[axis.position]
    found = rectangles(fold.at_start, [axis.extent for axis in fold.axes], order)
    if found is None or 0 in fold.shape:
        return None
    return NpyMatrix(name, path, fold.shape, dtype, offset, by_columns=found.order == "F")


def create_npy(
    name: str, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], place: Path | None = None
) -> NpyMatrix:
    """Create a .npy file of zeros, with the final path `place`. Raises `OSError` if the disk is too full."""

    def made() -> NpyMatrix:
        with open(path, "wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            offset = file.tell()
        return NpyMatrix(name, path, shape, dtype, offset, place=place)

    return in_new_file(path, made)


def in_new_file(path: Path, made: Callable[[], M]) -> M:
    """Create a file with its space, and return its matrix, from `made`. After an error, delete the file."""
    open(path, "xb").close()
    try:
        matrix = made()
        matrix.reserve()
        sync_files(path.parent, [path.name])  # make the name and header durable; blocks are flushed later
    except BaseException:
        path.unlink()
        raise
    return matrix


def _rename_into_place(path: Path, place: Path) -> None:
    if path != place and place.exists():
        raise FileExistsError(
            errno.EEXIST, f"another file was put at C's path; the result is in {path}", str(place)
        )
    os.replace(path, place)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the order is Fortran's, and the stored dtype. Raises `ValueError`."""
    if file.read(len(ARCHIVE)) == ARCHIVE:
        raise ValueError("it is an archive of arrays")
    file.seek(0)
    version = np.lib.format.read_magic(file)
    start = file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if length > MAX_HEADER:  # NumPy checks this after it has read the header
        raise ValueError(f"its header has {length} bytes, of at most {MAX_HEADER}: it is damaged")
    file.seek(start)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
