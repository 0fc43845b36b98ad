"""Read the chunks of an HDF5 dataset by their offsets in the file, without HDF5.

A run of chunks that are adjacent in the file, and in a row of the grid, is read by one system call and copied
by one call of NumPy, up to `BATCH_BYTES`. So small chunks, the default of h5py, cost few calls each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array
from oocgemm.stores.cached import SAMPLES, CachedChunks, in_page_cache
from oocgemm.stores.files import MIN_DIRECT, OpenFile, many_cores, scratch
from oocgemm.stores.hdf5.filters import Pipeline
from oocgemm.stores.lines import copies_bytes, read_part, scratch_bytes

# Chunks without filters that have at least this many bytes are read straight into their destination.
MIN_STRAIGHT = 256 << 10


@dataclass(frozen=True)
class Index:
    """Where the chunks of a dataset are stored: arrays of the shape of the grid of chunks.

    - `offsets`: the first byte of each chunk in the file; -1 for a chunk that is not stored.
    - `sizes`: the stored bytes of each chunk.
    - `masks`: the filter_mask of each chunk: bit i is set if filter i was not applied.
    """

    offsets: Array
    sizes: Array
    masks: Array

    @property
    def max_stored(self) -> int:
        """The size of the largest stored chunk, in bytes."""
        return int(self.sizes.max(initial=0))


@dataclass(frozen=True)
class Chunks:
    """The chunks of a dataset, and how to read them.

    `dtype` has the stored byte order. `fill` is the value of the elements of chunks that are not stored; None
    if they have none. If `past_cache`, large reads do not fill the page cache.
    """

    path: Path
    shape: tuple[int, int]
    chunk: tuple[int, int]
    dtype: np.dtype[Any]
    pipeline: Pipeline
    index: Index
    fill: Any
    past_cache: bool = False

    @property
    def layout(self) -> Layout:
        """The layout for the planner: chunks with filters are read whole, others also in parts."""
        raw = not self.pipeline.filters
        return Layout(
            read_chunk=self.chunk,
            partial_reads=raw,
            itemsize=self.dtype.itemsize,
            scratch_bytes=max(scratch_bytes(past_cache=self.past_cache), self._scratch_bytes) if raw else 0,
            decode_bytes=0 if raw else self._scratch_bytes + self.pipeline.decode_bytes,
        )

    @property
    def _decoded_bytes(self) -> int:
        return self.pipeline.size

    @cached_property
    def _scratch_bytes(self) -> int:
        """The scratch memory of a thread: a run as stored and as decoded, and what the filters need."""
        if not self.pipeline.filters:
            return MIN_DIRECT if self._decoded_bytes < MIN_STRAIGHT else 0
        decoded = _rounded(max(BATCH_BYTES, self._decoded_bytes))
        return MIN_DIRECT + decoded + self.pipeline.scratch_bytes(self.index.max_stored)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`.

        Raises `ExecutionError`, which names the chunk, for a damaged chunk.
        """
        height, width = self.chunk
        if out.size == 0 or self._read_cached(rows, cols, out):
            return
        columns = cols[0] // width, -(-cols[1] // width)
        with OpenFile(self.path) as file:
            for i in range(rows[0] // height, -(-rows[1] // height)):
                top, bottom = max(rows[0], i * height), min(rows[1], (i + 1) * height)
                band = out[top - rows[0] : bottom - rows[0]]
                lines = slice(top - i * height, bottom - i * height)
                for first, last in self._runs(i, *columns):
                    self._read_run(file, i, (first, last), lines, cols, band)

    @cached_property
    def _raw(self) -> CachedChunks | None:
        """The chunks for compiled code, if they are not encoded and the page cache seems to contain them."""
        offsets, sizes = self.index.offsets, self.index.sizes
        stored = offsets[offsets >= 0]
        whole = not self.pipeline.filters and (sizes[offsets >= 0] == self._decoded_bytes).all()
        some = np.sort(stored[:: max(1, stored.size // SAMPLES)]).tolist()
        if not (whole and some and in_page_cache(self.path, some)):
            return None
        end, itemsize = int(stored.max()) + self._decoded_bytes, self.dtype.itemsize
        return CachedChunks(self.path, None, self.chunk, itemsize, end, offsets=offsets)

    def _read_cached(self, rows: Range, cols: Range, out: Array) -> bool:
        """Read a block from the page cache by compiled code. Return whether that was possible.

        On few cores, large chunks are read faster from a mapping.
        """
        fast = self._decoded_bytes < MIN_DIRECT or many_cores()
        if not (fast and self._raw and copies_bytes(self.dtype, out)):
            return False
        return self._raw.read(rows, cols, out) == []

    def _runs(self, i: int, first: int, last: int) -> Iterator[Range]:
        """Cut columns of the grid into runs of chunks that one call reads, or that are all not stored."""
        offsets, sizes = self.index.offsets[i, first:last].tolist(), self.index.sizes[i, first:last].tolist()
        straight = not self.pipeline.filters and self._decoded_bytes >= MIN_STRAIGHT
        start, size = 0, 0
        for j in range(len(offsets)):
            follows = j > start and (offsets[start] < 0) == (offsets[j] < 0)
            if follows and offsets[j] >= 0:
                adjacent = not straight and offsets[j] == offsets[j - 1] + sizes[j - 1]
                decoded = (j + 1 - start) * self._decoded_bytes
                follows = adjacent and max(size + sizes[j], decoded) <= BATCH_BYTES
            if not follows:
                if j > start:
                    yield first + start, first + j
                start, size = j, 0
            size += sizes[j]
        yield first + start, last

    def _read_run(self, file: OpenFile, i: int, run: Range, lines: slice, cols: Range, band: Array) -> None:
        """Read the rows `lines` of the chunks `run` in row `i` of the grid.

        `band` has these rows, and the columns `cols` of the dataset.
        """
        width = self.chunk[1]
        first, last = run
        start = int(self.index.offsets[i, first])
        if start < 0:
            if self.fill is None:
                self._damaged(i, first, "was never written, and the dataset has no fill value")
            band[:, max(0, first * width - cols[0]) : last * width - cols[0]] = self.fill
            return
        end = int(self.index.offsets[i, last - 1] + self.index.sizes[i, last - 1])
        if end > file.size:
            self._damaged(i, last - 1, f"ends at byte {end}, and the file has {file.size} bytes")
        if not self.pipeline.filters:
            sizes = self.index.sizes[i, first:last]
            wrong = np.flatnonzero(sizes != self._decoded_bytes)
            if len(wrong):
                number = int(wrong[0])
                self._damaged(
                    i, first + number, f"has {sizes[number]} bytes instead of {self._decoded_bytes}"
                )
            if self._decoded_bytes >= MIN_STRAIGHT:
                self._read_straight(file, start, first, lines, cols, band)
                return
        memory = scratch(self._scratch_bytes)
        try:
            if end - start >= MIN_DIRECT:  # use the bytes where they are in the page cache
                stored = file.mapped(start, end - start)
            else:
                stored = memory[: end - start]
                file.read(start, stored.reshape(1, -1), past_cache=False)
        except EOFError as error:
            self._damaged(i, first, str(error), error)
        if self.pipeline.filters:
            self._decode(i, run, stored, memory[MIN_DIRECT:], lines, cols, band)
        else:
            elements = stored.view(self.dtype).reshape(last - first, *self.chunk)
            self._copy(elements[:, lines], run, cols, band)

    def _read_straight(
        self, file: OpenFile, start: int, j: int, lines: slice, cols: Range, band: Array
    ) -> None:
        """Read a large chunk without filters, which begins at the byte `start` of the file, into `band`."""
        width = self.chunk[1]
        left, right = max(cols[0], j * width), min(cols[1], (j + 1) * width)
        part = (left - j * width, right - j * width)
        target = band[:, left - cols[0] : right - cols[0]]
        spans = (lines.start, lines.stop), part
        read_part(file, start, width, self.dtype, *spans, target, past_cache=self.past_cache)

    def _decode(
        self, i: int, run: Range, stored: Array, memory: Array, lines: slice, cols: Range, band: Array
    ) -> None:
        """Decode the chunks `run` from their bytes `stored`, and copy their rows `lines`."""
        first, last = run
        size = self._decoded_bytes
        decoded, rest = memory[: (last - first) * size], memory[_rounded(max(BATCH_BYTES, size)) :]
        # A single chunk that is the whole destination is decoded in place.
        alone = last - first == 1 and band.shape == self.chunk and first * self.chunk[1] == cols[0]
        place = alone and band.flags.c_contiguous and self.dtype.isnative
        if place:
            decoded = band.reshape(-1).view(np.uint8)
        start = 0
        sizes, masks = self.index.sizes[i, first:last].tolist(), self.index.masks[i, first:last].tolist()
        for number, (length, mask) in enumerate(zip(sizes, masks, strict=True)):
            out = decoded[number * size : (number + 1) * size]
            try:
                self.pipeline.decode(stored[start : start + length], mask, out, rest)
            except MemoryError:
                raise
            except Exception as error:  # decompressors raise exceptions of many types
                self._damaged(i, first + number, f"cannot be decoded: {error}", error)
            start += length
        if not place:
            elements = decoded.view(self.dtype).reshape(last - first, *self.chunk)
            self._copy(elements[:, lines], run, cols, band)

    def _copy(self, elements: Array, run: Range, cols: Range, band: Array) -> None:
        """Copy the elements of the chunks `run`, an array (chunks, rows, columns), to `band`."""
        width = self.chunk[1]
        first, last = run
        while first < last:
            left, right = first * width - cols[0], (first + 1) * width - cols[0]
            whole = (cols[1] - first * width) // width
            if left >= 0 and whole > 0:  # the chunks that are whole within `cols` are copied by one call
                count = min(last - first, whole)
                target = band[:, left : left + count * width].reshape(len(band), count, width)
                np.copyto(target.transpose(1, 0, 2), elements[first - run[0] :][:count], casting="equiv")
                first += count
            else:
                target = band[:, max(0, left) : right]
                skipped = max(0, -left)
                part = elements[first - run[0], :, skipped : skipped + target.shape[1]]
                np.copyto(target, part, casting="equiv")
                first += 1

    def _damaged(self, i: int, j: int, how: str, error: Exception | None = None) -> NoReturn:
        """Raise the `ExecutionError` for a damaged chunk. `how` says what is wrong with it."""
        place = f"[{i * self.chunk[0]}, {j * self.chunk[1]}]"
        raise ExecutionError(
            f"the chunk at {place} in {self.path} {how}: it is damaged or truncated"
        ) from error


def _rounded(size: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-size // 64) * 64
