"""NumPy arrays, memory maps and .npy files as matrices."""

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import InputError
from oocgemm.plan import Layout, Op
from oocgemm.plan.tiling import Span
from oocgemm.stores.base import Array, Matrix, checked
from oocgemm.stores.durable import saved_block, saved_blocks, stamp, stamps, sync_files, sync_path
from oocgemm.stores.files import WILL_NEED, advise, publish

# Blocks of mapped files are asked for beforehand if they span so many bytes, and no more times their own size.
LEAST_ASKED = 1 << 20
SPARSEST = 16
# Memory of others is locked, for a device to copy from, if an array has so many bytes and is not much less than what it spans.
LEAST_LOCKED = 256 << 20
SPARSEST_LOCKED = 2
# Beside a multiplication an H200 copies rows of 16 KiB that lie apart at 31 to 36 GB/s, of 32 KiB at 48 to 53, of 96 KiB at 54.
WIDE = 32 << 10
MOST_APART = 1 << 31  # as its driver takes rows


class ArrayMatrix:
    """Memory, mapped or not: read and written by plain copies. One at a `path` is durable (`stores.durable`); where it
    is created it may have another `place` to go to when it is finished."""

    def __init__(self, name: str, array: Array, path: str | None = None, place: Path | None = None) -> None:
        self.shape, self.dtype = checked(name, array.shape, array.dtype)
        self.name = name
        self.array = array
        self._path = path
        self._place = place
        self._redirected: Path | None = None
        self._map = _map_under(array)
        self._file_bytes = self._map.size() if self._map is not None else 0
        self.layout = Layout(
            in_memory=path is None, wide=_wide(array) if path is None and self._map is None else 0
        )

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        self._check_length()
        block = self.array[slice(*rows), slice(*cols)]
        if self._map is not None:
            _ask_for(self._map, block)
        np.copyto(out, block, casting="equiv")

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        self._check_length()
        if self._redirected is not None:
            publish(saved_block(self._redirected, rows, cols), data, data.nbytes)
            return
        np.copyto(self.array[slice(*rows), slice(*cols)], data, casting="equiv")

    def sync(self) -> None:
        if isinstance(self.array, np.memmap):
            self.array.flush()

    def redirect(self, folder: Path) -> None:
        self._redirected = folder

    def sync_block(self, rows: Span, cols: Span) -> None:
        if self._redirected is not None:
            blocks = saved_blocks(self._redirected, rows, cols)
            sync_files(self._redirected, [path.name for path, _, _ in blocks])
        else:
            self._sync_file()

    def adopt(self, rows: Span, cols: Span) -> None:
        assert self._redirected is not None
        blocks = saved_blocks(self._redirected, rows, cols)
        for path, r, c in blocks:
            saved = np.fromfile(path, self.array.dtype).reshape(r[1] - r[0], c[1] - c[0])
            np.copyto(self.array[slice(*r), slice(*c)], saved)
        self._sync_file()
        for path, _, _ in blocks:
            path.unlink()

    def set_finished(self, finished: bool) -> None:
        if not finished or self._path is None or self._place is None:
            return
        _name(Path(self._path), self._place)
        sync_path(self._place.parent)
        self._path = str(self._place)
        if isinstance(self.array, np.memmap):  # which knows the file it is mapped from by name
            self.array = np.load(self._place, mmap_mode="r+")

    def sweep(self) -> None:
        pass

    def stamp(self) -> str:
        assert self._path is not None
        return stamp([Path(self._path)])

    def block_stamp(self, rows: Span, cols: Span) -> str | None:
        return None

    def fingerprint(self) -> dict[str, object] | None:
        if self._path is None:
            return None
        order = "columns" if self.array.flags.f_contiguous and not self.array.flags.c_contiguous else "rows"
        said = f"{self.shape} {self.array.dtype.str} by {order}"
        return {"path": os.path.realpath(self._path), "metadata": said, **stamps([self._path])}

    def _sync_file(self) -> None:
        assert self._path is not None
        if sys.platform != "linux":
            self.sync()
        # Of what was written to a map too, and without keeping the interpreter, as flushing the map does.
        sync_path(Path(self._path))

    def describe(self) -> dict[str, object]:
        kind = "npy" if self._path else "memory"
        return {"store": kind, "path": self._path, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        mapped = _mapped_file(self.array)
        return {mapped} if mapped else set()

    def reserve(self) -> None:
        """Have the disk hold room for all of a mapped file: in a hole of it a disk found full would end the process
        (SIGBUS), where it is an `OSError` here. Other threads must not write meanwhile."""
        if self._map is not None and isinstance(self.array, np.memmap) and self.array.filename is not None:
            with open(self.array.filename, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self._file_bytes)

    def _check_length(self) -> None:
        """Raises `EOFError` for a mapped file that has been cut short. Should that happen while a block is copied, the
        system ends the process (SIGBUS)."""
        if self._map is not None and (size := self._map.size()) < self._file_bytes:
            raise EOFError(f"the file has been cut short, from {self._file_bytes} bytes to {size}")


def by_rows(matrix: Matrix, op: Op) -> tuple[Matrix, Op]:
    """An array in memory that lies by columns, such as X.T, as its transpose, and what makes up for that; others as they are."""
    if isinstance(matrix, ArrayMatrix) and matrix.layout.in_memory and op is not Op.C:
        flags = matrix.array.flags
        if flags.f_contiguous and not flags.c_contiguous:
            return ArrayMatrix(matrix.name, matrix.array.T), Op.N if op.swaps else Op.T
    return matrix, op


def memory(matrix: Matrix) -> Array:
    """The array of a matrix that is in memory."""
    assert isinstance(matrix, ArrayMatrix)
    return matrix.array


def span(matrix: Matrix) -> tuple[int, int]:
    """Where the memory of a matrix that is in memory begins, and how many bytes it is to the end of its last element."""
    low, high = np.lib.array_utils.byte_bounds(memory(matrix))
    return low, high - low


def _wide(array: Array) -> int:
    """How many elements a panel must have in a row to be worth copying to a device from where it lies; 0 if none is."""
    rows, cols = map(int, array.shape)
    (apart, step), size = array.strides, int(array.itemsize)
    lies = step == size and cols * size <= apart < MOST_APART and array.ctypes.data % size == 0
    if (
        not lies
        or array.nbytes < LEAST_LOCKED
        or rows * apart > SPARSEST_LOCKED * array.nbytes
        or not array.dtype.isnative
    ):
        return 0
    return min(cols, -(-WIDE // size))


def open_npy(name: str, path: Path, *, writable: bool = False, place: Path | None = None) -> ArrayMatrix:
    """A .npy file, mapped, that goes to `place` when it is finished. Raises `InputError` if it is none."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if writable and isinstance(array, np.ndarray):  # not at once: that would lengthen a file cut short
            array = np.load(path, mmap_mode="r+", allow_pickle=False)
    except Exception as error:  # NumPy's reader of headers raises of every kind
        if path.exists() and path.stat().st_size and _is_empty_npy(path):
            array = np.load(path, allow_pickle=False)  # nothing to map
        else:
            raise InputError(f"{name}: {path} cannot be opened as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):  # np.load opens archives by their content
        array.close()
        raise InputError(f"{name}: {path} cannot be opened as a .npy file: it is an archive of arrays")
    return ArrayMatrix(name, array, str(path), place)


def create_npy(
    name: str, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], place: Path | None = None
) -> ArrayMatrix:
    """A new .npy file of that shape, mapped for writing; nothing is left of one that cannot be made. It goes to `place`
    when it is finished."""
    open(path, "xb").close()
    try:
        if 0 in shape:
            array = np.empty(shape, dtype)
            np.save(path, array)
        else:
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        matrix = ArrayMatrix(name, array, str(path), place)
        matrix.reserve()
        sync_files(path.parent, [path.name])  # what it comes to hold is synced block by block
    except BaseException:
        path.unlink()
        raise
    return matrix


def _name(path: Path, place: Path) -> None:
    """Give a finished file its name, unless another file has got it meanwhile. Raises `OSError`."""
    if path != place and place.exists():
        raise FileExistsError(
            errno.EEXIST, f"something else was put at its place; it is in {path}", str(place)
        )
    os.replace(path, place)


def _is_empty_npy(path: Path) -> bool:
    try:
        return bool(np.load(path, allow_pickle=False).size == 0)
    except Exception:
        return False


def _ask_for(mapped: mmap.mmap, block: Array) -> None:
    """Have the system read what a block of a mapped array spans, at once and not fault by fault: on a cold cache that
    takes a fraction of the processor time. Not where most of the span is none of the block."""
    low, high = np.lib.array_utils.byte_bounds(block)
    if LEAST_ASKED <= high - low <= SPARSEST * block.nbytes:
        start = low - np.frombuffer(mapped, np.uint8).ctypes.data
        page = start % mmap.PAGESIZE
        advise(mapped, WILL_NEED, start - page, high - low + page)


def _map_under(array: Any) -> mmap.mmap | None:
    """The mapped file that an array looks into, if it is known to."""
    named = False
    while array is not None and not isinstance(array, mmap.mmap):
        named = named or (isinstance(array, np.memmap) and array.filename is not None)
        array = getattr(array, "base", None)
    return array if named else None


def _mapped_file(array: Any) -> object | None:
    """Device and inode of the file that an array is mapped from, if any."""
    base = array
    while base is not None and not isinstance(base, mmap.mmap):
        filename = getattr(base, "filename", None)
        if isinstance(base, np.memmap) and filename is not None:
            try:
                status = os.stat(filename)
            except OSError:  # no path leads to it any more
                return None
            return ("file", status.st_dev, status.st_ino)
        base = getattr(base, "base", None)
    return None
