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
from oocgemm.stores.hdf5.index import Index
from oocgemm.stores.lines import copies_bytes, read_part, scratch_bytes

# Chunks without filters that have at least this many bytes are read straight into their destination.
MIN_STRAIGHT = 256 << 10
# Runs are found in this many chunks of a row of the grid at a time.
_SCANNED = 4096


# A range of columns of the grid, and the stored chunks in it by their entries in the index; None if no chunk
# in the range is stored.
Run = tuple[Range, range | None]


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
            resident_bytes=self.index.nbytes,
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
                for run in self._runs(i, *columns):
                    self._read_run(file, i, run, lines, cols, band)

    @cached_property
    def _raw(self) -> CachedChunks | None:
        """The chunks for compiled code, if they are not encoded and the page cache seems to contain them."""
        index = self.index
        whole = not self.pipeline.filters and (index.sizes == self._decoded_bytes).all()
        # Compiled code looks chunks up in an array of the whole grid.
        if not (whole and index.dense):
            return None
        some = np.sort(index.offsets[:: max(1, index.offsets.size // SAMPLES)]).tolist()
        if not (some and in_page_cache(self.path, some)):
            return None
        end, itemsize = int(index.offsets.max()) + self._decoded_bytes, self.dtype.itemsize
        return CachedChunks(self.path, None, self.chunk, itemsize, end, offsets=index.grid_offsets())

    def _read_cached(self, rows: Range, cols: Range, out: Array) -> bool:
        """Read a block from the page cache by compiled code. Return whether that was possible.

        On few cores, large chunks are read faster from a mapping.
        """
        fast = self._decoded_bytes < MIN_DIRECT or many_cores()
        if not (fast and self._raw and copies_bytes(self.dtype, out)):
            return False
        return self._raw.read(rows, cols, out) == []

    def _runs(self, i: int, first: int, last: int) -> Iterator[Run]:
        """Cut columns of row i of the grid into runs that one call reads, or that are not stored."""
        index, at = self.index, first
        stored = index.stored(i, first, last)
        for start in range(stored.start, stored.stop, _SCANNED):
            some = range(start, min(start + _SCANNED, stored.stop))
            for columns, entries in self._stored_runs(i, some):
                if columns[0] > at:
                    yield (at, columns[0]), None
                yield columns, entries
                at = columns[1]
        if last > at:
            yield (at, last), None

    def _stored_runs(self, i: int, entries: range) -> Iterator[tuple[Range, range]]:
        """Cut stored chunks of row i of the grid into runs that are adjacent in the grid and in the file."""
        part = slice(entries.start, entries.stop)
        columns = (self.index.numbers[part] - i * self.index.grid[1]).tolist()
        offsets, sizes = self.index.offsets[part].tolist(), self.index.sizes[part].tolist()
        straight = not self.pipeline.filters and self._decoded_bytes >= MIN_STRAIGHT
        start, size = 0, 0
        for at in range(len(columns)):
            if at > start:
                adjacent = (
                    columns[at] == columns[at - 1] + 1 and offsets[at] == offsets[at - 1] + sizes[at - 1]
                )
                decoded = (at + 1 - start) * self._decoded_bytes
                if straight or not adjacent or max(size + sizes[at], decoded) > BATCH_BYTES:
                    yield (columns[start], columns[at - 1] + 1), entries[start:at]
                    start, size = at, 0
            size += sizes[at]
        yield (columns[start], columns[-1] + 1), entries[start:]

    def _read_run(self, file: OpenFile, i: int, run: Run, lines: slice, cols: Range, band: Array) -> None:
        """Read the rows `lines` of the chunks `run` in row `i` of the grid.

        `band` has these rows, and the columns `cols` of the dataset.
        """
        width = self.chunk[1]
        (first, last), entries = run
        if entries is None:
            if self.fill is None:
                self._damaged(i, first, "was never written, and the dataset has no fill value")
            band[:, max(0, first * width - cols[0]) : last * width - cols[0]] = self.fill
            return
        part = slice(entries.start, entries.stop)
        start = int(self.index.offsets[entries[0]])
        end = int(self.index.offsets[entries[-1]] + self.index.sizes[entries[-1]])
        if end > file.size:
            self._damaged(i, last - 1, f"ends at byte {end}, and the file has {file.size} bytes")
        if not self.pipeline.filters:
            sizes = self.index.sizes[part]
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
            self._decode(i, first, part, stored, memory[MIN_DIRECT:], lines, cols, band)
        else:
            elements = stored.view(self.dtype).reshape(last - first, *self.chunk)
            self._copy(elements[:, lines], (first, last), cols, band)

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
        self,
        i: int,
        first: int,
        part: slice,
        stored: Array,
        memory: Array,
        lines: slice,
        cols: Range,
        band: Array,
    ) -> None:
        """Decode chunks from their bytes `stored`, and copy their rows `lines`.

        They are the entries `part` of the index, and begin at the column `first` of row i of the grid.
        """
        sizes, masks = self.index.sizes[part].tolist(), self.index.masks[part].tolist()
        size, last = self._decoded_bytes, first + len(sizes)
        decoded, rest = memory[: len(sizes) * size], memory[_rounded(max(BATCH_BYTES, size)) :]
        # A single chunk that is the whole destination is decoded in place.
        alone = last - first == 1 and band.shape == self.chunk and first * self.chunk[1] == cols[0]
        place = alone and band.flags.c_contiguous and self.dtype.isnative
        if place:
            decoded = band.reshape(-1).view(np.uint8)
        start = 0
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
            self._copy(elements[:, lines], (first, last), cols, band)

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
