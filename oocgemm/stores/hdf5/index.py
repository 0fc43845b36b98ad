"""Find where the chunks of an HDF5 dataset are stored, and prove it.

HDF5 lists all chunks by one call. Versions up to 2.0 list wrong coordinates for a dataset whose only
unlimited axis is the second one, and some versions list addresses relative to the end of a user block. So the
list is compared with where HDF5 itself reads chunks that are asked for by their coordinates: the file is
opened a second time through `_Observed`, which sees each read.
"""

import io
import os
from array import array
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from oocgemm.stores.base import Array

# At most this many chunks, chosen at random, are compared. A list that permutes chunks has some in their
# places, at most half of them.
SAMPLES = 64
# The index of a dataset may have this many chunks in any file, and more in a file with at least
# `BYTES_PER_CHUNK` bytes on the disk for each of them. A sparse file could otherwise demand any memory.
MIN_CHUNKS, MAX_CHUNKS, BYTES_PER_CHUNK = 1 << 20, 1 << 24, 512
# Entries that are listed before they are packed.
_LISTED = 1 << 16


@dataclass(frozen=True)
class Index:
    """Where the stored chunks of a dataset are, in the order of the grid of chunks, row by row.

    - `grid`: the rows and columns of the grid.
    - `numbers`: the number of each stored chunk in the grid, counted row by row, ascending.
    - `offsets`: the first byte of each stored chunk in the file.
    - `sizes`: the stored bytes of each chunk.
    - `masks`: the filter_mask of each chunk: bit i is set if filter i was not applied.
    """

    grid: tuple[int, int]
    numbers: Array
    offsets: Array
    sizes: Array
    masks: Array

    @property
    def nbytes(self) -> int:
        """The host memory that the index occupies, with the array of `grid_offsets`."""
        entries = self.numbers.nbytes + self.offsets.nbytes + self.sizes.nbytes + self.masks.nbytes
        return int(entries) + (8 * self.cells if self.dense else 0)

    @property
    def cells(self) -> int:
        """The number of chunks of the grid, stored or not."""
        return self.grid[0] * self.grid[1]

    @property
    def dense(self) -> bool:
        """Whether at least half of the chunks of the grid are stored."""
        return self.cells <= 2 * len(self.numbers)

    def grid_offsets(self) -> Array:
        """Return the first byte of each chunk of the grid in the file, -1 for those that are not stored."""
        out = np.full(self.cells, -1, np.int64)
        out[self.numbers] = self.offsets
        return out.reshape(self.grid)

    @property
    def max_stored(self) -> int:
        """The size of the largest stored chunk, in bytes."""
        return int(self.sizes.max(initial=0))

    def place(self, at: int) -> tuple[int, int]:
        """Return the row and column in the grid of the stored chunk `at`."""
        i, j = divmod(int(self.numbers[at]), self.grid[1])
        return i, j

    def stored(self, i: int, first: int, last: int) -> range:
        """Return which entries are stored chunks in row i of the grid, in the columns from first to last."""
        ends = np.asarray([first, last], np.int64) + i * self.grid[1]
        start, stop = np.searchsorted(self.numbers, ends).tolist()
        return range(start, stop)


def listed(found: "h5py.Dataset", path: str) -> tuple[Index, str]:
    """Return where the stored chunks of a dataset are, and "".

    If that is unknown, return an empty index and the reason why. One call lists all chunks: a call per chunk
    would take quadratic time.
    """
    (height, width), grid = found.chunks, _grid(found)
    nothing = Index(grid, *(np.zeros(0, dtype) for dtype in ("i8", "i8", "i8", "u4")))
    if 0 in grid:
        return nothing, ""
    most, entries, parts = _max_chunks(path), array("Q"), list[tuple[Array, ...]]()
    outside = False

    def pack() -> None:
        nonlocal outside
        top, left, mask, offset, size = np.frombuffer(entries, np.int64).reshape(-1, 5).T
        i, j = top // height, left // width
        aligned = (top % height == 0) & (left % width == 0)
        outside = outside or not (aligned & (i >= 0) & (j >= 0) & (i < grid[0]) & (j < grid[1])).all()
        parts.append((i * grid[1] + j, offset.copy(), size.copy(), mask.astype(np.uint32)))

    def add(chunk: Any) -> bool | None:
        nonlocal entries
        (top, left), mask, offset, size = chunk
        entries.extend((top, left, mask, offset, size))
        if len(entries) == 5 * _LISTED:
            pack()
            entries = array("Q")
            return True if outside or len(parts) * _LISTED > most else None  # True ends the list
        return None

    found.id.chunk_iter(add)
    pack()
    if sum(len(part[0]) for part in parts) > most:
        size = os.path.getsize(path)
        return nothing, f"it has more than {most} chunks in {size} bytes: store it in larger chunks"
    wrong = (
        "this version of HDF5 does not state where its chunks are: copy it into a dataset whose second "
        "axis is not unlimited, in a file without a user block"
    )
    if outside:
        return nothing, wrong
    numbers, offsets, sizes, masks = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (numbers[1:] <= numbers[:-1]).any():
        order = np.argsort(numbers, kind="stable")
        numbers, offsets, sizes, masks = numbers[order], offsets[order], sizes[order], masks[order]
    index = Index(grid, numbers, offsets, sizes, masks)
    if (numbers[1:] == numbers[:-1]).any() or not _is_right(found, path, index):
        return nothing, wrong
    return index, ""


def _grid(found: "h5py.Dataset") -> tuple[int, int]:
    return -(-found.shape[0] // found.chunks[0]), -(-found.shape[1] // found.chunks[1])


def _max_chunks(path: str) -> int:
    """Return how many chunks the index of a dataset in a file may have."""
    return min(MAX_CHUNKS, max(MIN_CHUNKS, os.stat(path).st_blocks * 512 // BYTES_PER_CHUNK))


class _Observed(io.FileIO):
    """A file that notes whether a range of bytes is read. It does not read that range."""

    expected = -1, 0
    seen = False

    def readinto(self, buffer: Any, /) -> int | None:
        if (self.tell(), len(buffer)) == self.expected:
            self.seen = True
            return len(buffer)
        return super().readinto(buffer)


def _is_right(found: "h5py.Dataset", path: str, index: Index) -> bool:
    """Return whether HDF5 reads chunks of the index where the index says that they are.

    A chunk that ends beyond the file is taken as right: the file is truncated, which is another error.
    """
    count, size = len(index.numbers), os.path.getsize(path)
    chosen = range(count)
    if count > SAMPLES:
        chosen = np.random.default_rng(0).choice(count, SAMPLES, replace=False).tolist()
    with _Observed(path) as file, h5py.File(file, "r") as opened:
        dataset = opened[found.name]
        for at in chosen:
            i, j = index.place(at)
            file.expected, file.seen = (int(index.offsets[at]), int(index.sizes[at])), False
            if sum(file.expected) > size:
                continue
            try:
                mask, _ = dataset.id.read_direct_chunk((i * found.chunks[0], j * found.chunks[1]))
            except Exception:  # h5py raises exceptions of many types for a chunk that is not stored
                return False
            if not file.seen or mask != index.masks[at]:
                return False
    return True
