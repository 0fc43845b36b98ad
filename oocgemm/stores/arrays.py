"""NumPy arrays and memory maps as matrices."""

import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from oocgemm.planning import Layout, Op
from oocgemm.planning.tiling import Span
from oocgemm.stores.base import Array, Matrix, checked
from oocgemm.stores.files import DONT_NEED, WILL_NEED, advise

# Blocks of mapped files are asked for beforehand if they span so many bytes, and no more times their own size.
MIN_ASKED = 1 << 20
SPARSEST = 16
# A map is copied in parts that span so many bytes, since the pages around those that fault become resident, too.
BAND_BYTES = 4 << 20
# Memory of others is locked, for a device to copy from, if an array has so many bytes and is not much less than what it spans.
MIN_LOCKED = 256 << 20
SPARSEST_LOCKED = 2
# Beside a multiplication an H200 copies rows of 16 KiB that lie apart at 31 to 36 GB/s, of 32 KiB at 48 to 53, of 96 KiB at 54.
WIDE = 32 << 10
MAX_APART = 1 << 31  # as its driver takes rows


class ArrayMatrix:
    """An array in memory or a memory map, read and written by plain copies."""

    def __init__(self, name: str, array: Array) -> None:
        self.shape, self.dtype = checked(name, array.shape, array.dtype)
        self.name = name
        self.array = array
        self._map = _map_under(array)
        self._file_bytes = self._map.size() if self._map is not None else 0
        self._droppable = None if _is_private(array) else self._map
        self.layout = Layout(in_memory=True, wide=_wide(array) if self._map is None else 0)

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        self._check_length()
        for source, target in self._bands(self.array[slice(*rows), slice(*cols)], out):
            if self._map is not None:
                _ask_for(self._map, source)
            np.copyto(target, source, casting="equiv")
            self._drop(source)

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        self._check_length()
        for target, source in self._bands(self.array[slice(*rows), slice(*cols)], data):
            np.copyto(target, source, casting="equiv")
            self._drop(target)

    def _bands(self, block: Array, other: Array) -> Iterator[tuple[Array, Array]]:
        """A block and another array of its shape, cut alike into parts that span few pages of a map."""
        axis = 0 if abs(block.strides[0]) >= abs(block.strides[1]) else 1
        extent = block.shape[axis]
        count = extent if self._map is None else max(1, BAND_BYTES // max(1, abs(block.strides[axis])))
        for first in range(0, extent, max(1, count)):
            part = (slice(None),) * axis + (slice(first, first + count),)
            yield block[part], other[part]

    def sync(self) -> None:
        if isinstance(self.array, np.memmap):
            self.array.flush()

    def set_finished(self, finished: bool) -> None:
        pass

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return {"store": "memory", "path": None, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        mapped = _mapped_file(self.array)
        return {mapped} if mapped else set()

    def _check_length(self) -> None:
        """Raises `EOFError` for a mapped file that has been cut short. If that happens during a copy, the system ends
        the process (SIGBUS)."""
        if self._map is not None and (size := self._map.size()) < self._file_bytes:
            raise EOFError(f"the file has been cut short, from {self._file_bytes} bytes to {size}")

    def _drop(self, block: Array) -> None:
        """Take the pages that a block spans out of the resident set. They stay in the page cache, with what was written
        to them."""
        if self._droppable is not None:
            _advise(self._droppable, DONT_NEED, block)


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
    lies = step == size and cols * size <= apart < MAX_APART and array.ctypes.data % size == 0
    if (
        not lies
        or array.nbytes < MIN_LOCKED
        or rows * apart > SPARSEST_LOCKED * array.nbytes
        or not array.dtype.isnative
    ):
        return 0
    return min(cols, -(-WIDE // size))


def _ask_for(mapped: mmap.mmap, block: Array) -> None:
    """Prefetch what a block of a mapped array spans, at once and not fault by fault: on a cold cache that takes a
    fraction of the processor time. Not where most of the span is outside the block."""
    low, high = np.lib.array_utils.byte_bounds(block)
    if MIN_ASKED <= high - low <= SPARSEST * block.nbytes:
        _advise(mapped, WILL_NEED, block)


def _advise(mapped: mmap.mmap, advice: int | None, block: Array) -> None:
    """Advise the system on the pages that a block of a mapped array spans."""
    low, high = np.lib.array_utils.byte_bounds(block)
    start = low - np.frombuffer(mapped, np.uint8).ctypes.data
    page = start % mmap.PAGESIZE
    advise(mapped, advice, start - page, high - low + page)


def _map_under(array: Any) -> mmap.mmap | None:
    """The mapped file that an array looks into, if it is known to."""
    named = False
    while array is not None and not isinstance(array, mmap.mmap):
        named = named or (isinstance(array, np.memmap) and array.filename is not None)
        array = getattr(array, "base", None)
    return array if named else None


def _is_private(array: Any) -> bool:
    """Whether what is written to an array stays in its own copies of a file's pages (`mmap_mode="c"`)."""
    while array is not None:
        if isinstance(array, np.memmap) and array.mode == "c":
            return True
        array = getattr(array, "base", None)
    return False


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
