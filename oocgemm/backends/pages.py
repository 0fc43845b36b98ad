"""Locks the pages of arrays that the caller holds, so that a device copies straight from where they are.

Locking takes a thirtieth of the time that copying does, but it takes it in one go and holds up other calls of the
driver. So pages are locked in bands, by a thread of its own, in the order in which they are needed; what is needed
before its band is locked goes through host slots instead. A copy must not cross from one band into another.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

from oocgemm.backends.base import Array

PAGE = 4096
BAND = 128 << 20


class PageLocker:
    """Bands of pages on a fixed grid over the memory of some arrays; `register` and `unregister` lock and unlock."""

    def __init__(
        self,
        arrays: Iterable[Array],
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._extents = _merged(_extent(array) for array in arrays)
        self._starts = [start for start, _ in self._extents]
        self._locked: set[int] = set()  # addresses of bands
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.refusal: str | None = None

    def start(self, blocks: Iterable[Array]) -> None:
        """Lock what these blocks lie in, in that order, in the background."""
        self._thread = threading.Thread(target=self._run, args=(blocks,), name="oocgemm-locker")
        self._thread.start()

    def owns(self, address: int) -> bool:
        """Whether an address is in the arrays, locked or not."""
        return self._extent_of(address) is not None

    def reaches(self, block: Array) -> bool:
        """Whether all pages of a block are locked by now."""
        return all(band in self._locked for band, _ in self._bands(*_extent(block)))

    def borders(self, start: int, stop: int) -> list[int]:
        """Addresses between `start` and `stop` at which one band ends and another begins."""
        return [band for band, _ in self._bands(start, stop) if start < band < stop]

    @property
    def locked_bytes(self) -> int:
        """Bytes locked by now."""
        return len(self._locked) * BAND

    def close(self) -> None:
        """Stop locking, and unlock everything. Nothing must be in flight."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while self._locked:
            self._unregister(self._locked.pop())

    def _run(self, blocks: Iterable[Array]) -> None:
        total = sum(-(-(stop - start) // BAND) for start, stop in self._extents)
        try:
            for block in blocks:
                for band, stop in self._bands(*_extent(block)):
                    if self._stop.is_set():
                        return
                    if band not in self._locked:
                        self._register(band, stop - band)
                        self._locked.add(band)
                if len(self._locked) == total:
                    return
        except Exception as error:  # the system refuses: the rest goes through host slots
            self.refusal = str(error)

    def _extent_of(self, address: int) -> tuple[int, int] | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._extents[index][1]:
            return None
        return self._extents[index]

    def _bands(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Bands that a range of addresses touches, each with where it ends."""
        extent = self._extent_of(start)
        assert extent is not None
        first, last = extent
        for band in range(first + (start - first) // BAND * BAND, stop, BAND):
            yield band, min(band + BAND, last)


def _extent(array: Array) -> tuple[int, int]:
    """Addresses from the first byte of an array to behind its last."""
    start = array.ctypes.data
    rows, cols = array.shape
    return start, start + (rows - 1) * array.strides[0] + cols * array.itemsize


def _merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Whole pages of these ranges, those that touch made one: no page can be locked twice."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((s // PAGE * PAGE, -(-e // PAGE) * PAGE) for s, e in extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def straight_copies(block: Array, borders: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """The copies that bring a block over without crossing a border: address, offset among the block's bytes side by
    side, bytes of a row, and rows.

    >>> import numpy as np
    >>> x = np.zeros((4, 8), np.uint8)[:, :6]
    >>> at = x.ctypes.data
    >>> [(a - at, o, w, h) for a, o, w, h in straight_copies(x, [at + 10, at + 24])]
    [(0, 0, 6, 1), (8, 6, 2, 1), (10, 8, 4, 1), (16, 12, 6, 1), (24, 18, 6, 1)]
    """
    rows, width = block.shape[0], block.shape[1] * block.itemsize
    start, pitch = block.ctypes.data, max(block.strides[0], width)
    row = 0
    for border in borders:
        cut, inside = divmod(border - start, pitch)
        if inside >= width:  # between two rows
            cut, inside = cut + 1, 0
        if cut > row:
            yield start + row * pitch, row * width, width, cut - row
        row = cut
        if inside:
            at = start + cut * pitch
            yield at, cut * width, inside, 1
            yield at + inside, cut * width + inside, width - inside, 1
            row = cut + 1
    if row < rows:
        yield start + row * pitch, row * width, width, rows - row
