"""Read HDF5 datasets chunk by chunk, by the offsets of the chunks in the file, without HDF5.

HDF5 lists all chunks by one call. Versions up to 2.0 list wrong coordinates for a dataset whose only
unlimited axis is the second one, and some versions list addresses relative to the end of a user block. So the
list is verified: HDF5 reads some chunks by their coordinates, through the file object `_Observed`, which
notes whether HDF5 reads the bytes that the list states.

Chunks that are adjacent in the file and in a row of the grid form a run of up to `BATCH_BYTES`. A run is read
by one system call and copied by one call of NumPy, so that many small chunks, the default of h5py, take few
calls.
"""

import io
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import h5py
import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Chunked, Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, ReadOnly, described, file_identities, transient
from oocgemm.stores.declared import Declared
from oocgemm.stores.files import (
    MIN_DIRECT,
    SAMPLES,
    CachedChunks,
    OpenFile,
    fingerprints,
    in_page_cache,
    many_cores,
    scratch,
)
from oocgemm.stores.formats import MARK
from oocgemm.stores.hdf5_filters import Pipeline
from oocgemm.stores.lines import StoredLines, read_part, scratch_bytes
from oocgemm.values import dataclass

# At most this many chunks, chosen at random, are verified. In a list that permutes the chunks, at most half
# of the chunks have their right places.
COMPARED = 64
# The index of a dataset may have this many chunks in any file, and more in a file with at least
# `BYTES_PER_CHUNK` bytes on the disk for each of them. A sparse file could otherwise demand any memory.
MIN_CHUNKS, MAX_CHUNKS, BYTES_PER_CHUNK = 1 << 20, 1 << 24, 512
# Number of listed entries after which they are packed into arrays.
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
        return int(self.sizes.max(initial=0))

    def place(self, at: int) -> tuple[int, int]:
        i, j = divmod(int(self.numbers[at]), self.grid[1])
        return i, j

    def stored(self, i: int, first: int, last: int) -> range:
        """Return the entries of the stored chunks in row i of the grid, in columns `first` to `last` - 1."""
        ends = np.asarray([first, last], np.int64) + i * self.grid[1]
        start, stop = np.searchsorted(self.numbers, ends).tolist()
        return range(start, stop)


def listed(found: "h5py.Dataset", path: str) -> tuple[Index, str]:
    """Return the index of a dataset's chunks and ""; or an empty index and the reason why it is unknown.

    A dataset that is folded has methods that convert offsets in it to places in the matrix, and back.
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
        at, mask, offset, size = chunk
        if place is not None:
            every.append(found.number(at))
            if (at := place(at)) is None:
                return None
        top, left = (0, *at)[-2:]  # a dataset of one dimension is one row
        entries.extend((top, left, mask, offset, size))
        if len(entries) == 5 * _LISTED:
            pack()
            entries = array("Q")
            return True if outside or len(parts) * _LISTED > most else None  # True ends the list
        return None

    place: Callable[[Sequence[int]], tuple[int, int] | None] | None = getattr(found, "place", None)
    every = array("q")
    found.id.chunk_iter(add)
    pack()
    if sum(len(part[0]) for part in parts) > most:
        size = os.path.getsize(path)
        return nothing, f"it has more than {most} chunks in {size} bytes: store it in larger chunks"
    wrong = (
        "this version of HDF5 does not state where its chunks are: copy it into a dataset whose second "
        "axis is not unlimited, in a file without a user block"
    )
    if outside or -1 in every or len(set(every)) < len(every):
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
    return min(MAX_CHUNKS, max(MIN_CHUNKS, os.stat(path).st_blocks * 512 // BYTES_PER_CHUNK))


class _Observed(io.FileIO):
    """A file that notes whether a caller reads the range `expected`. The bytes of this range are not read."""

    expected = -1, 0
    seen = False

    def readinto(self, buffer: Any, /) -> int | None:
        if (self.tell(), len(buffer)) == self.expected:
            self.seen = True
            return len(buffer)
        return super().readinto(buffer)


def _is_right(found: "h5py.Dataset", path: str, index: Index) -> bool:
    """Return whether HDF5 reads some chunks at the offsets, and with the filter masks, in the index."""
    count, size = len(index.numbers), os.path.getsize(path)
    chosen = range(count)
    if count > COMPARED:
        chosen = np.random.default_rng(0).choice(count, COMPARED, replace=False).tolist()
    with _Observed(path) as file, h5py.File(file, "r") as opened:
        dataset = opened[found.name]
        for at in chosen:
            i, j = index.place(at)
            file.expected, file.seen = (int(index.offsets[at]), int(index.sizes[at])), False
            if sum(file.expected) > size:
                continue
            try:
                corner = (i * found.chunks[0], j * found.chunks[1])[-dataset.ndim :]
                if hasattr(found, "corner"):
                    corner = found.corner((i, j))
                mask, _ = dataset.id.read_direct_chunk(corner)
            except Exception:  # h5py raises exceptions of many types for a chunk that is not stored
                return False
            if not file.seen or mask != index.masks[at]:
                return False
    return True


# Chunks without filters that have at least this many bytes are read straight into their destination.
MIN_STRAIGHT = 256 << 10
# The chunks of a row of the grid are divided into runs this many at a time.
_SCANNED = 4096


# A range of columns of the grid of chunks, and the range of entries in the index for their chunks; None if
# none of these chunks is stored.
Run = tuple[Range, range | None]


@dataclass(frozen=True)
class HDF5Chunks:
    """The chunks of a dataset, and how to read them.

    `dtype` has the stored byte order. `fill` is the value of the elements of chunks that are not stored; None
    if the dataset has no fill value. If `past_cache`, large reads do not fill the page cache.
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
        """The layout for the planner. Chunks with filters are read whole, other chunks also in parts."""
        raw = not self.pipeline.filters
        return Chunked(
            read_chunk=self.chunk,
            partial_reads=raw,
            itemsize=self.dtype.itemsize,
            scratch_bytes=max(scratch_bytes(past_cache=self.past_cache), self._scratch_bytes) if raw else 0,
            decode_bytes=0 if raw else self._scratch_bytes + self.pipeline.decode_bytes,
            resident_bytes=self.index.nbytes,
        )

    @cached_property
    def _scratch_bytes(self) -> int:
        """The scratch memory of a thread in bytes: for a run, stored and decoded, and for the filters."""
        if not self.pipeline.filters:
            return MIN_DIRECT if self.pipeline.size < MIN_STRAIGHT else 0
        decoded = _rounded(max(BATCH_BYTES, self.pipeline.size))
        return MIN_DIRECT + decoded + self.pipeline.scratch_bytes(self.index.max_stored)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block into `out`. Raises `ExecutionError`, which names the chunk, for a damaged chunk."""
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
        """The chunks for compiled code; None if they have filters, or the page cache seems to lack them."""
        index = self.index
        raw = self.dtype.isnative and not self.pipeline.filters
        whole = raw and (index.sizes == self.pipeline.size).all()
        # Compiled code looks chunks up in an array of the whole grid.
        if not (whole and index.dense):
            return None
        some = np.sort(index.offsets[:: max(1, index.offsets.size // SAMPLES)]).tolist()
        if not (some and in_page_cache(self.path, some)):
            return None
        end, itemsize = int(index.offsets.max()) + self.pipeline.size, self.dtype.itemsize
        return CachedChunks(self.path, None, self.chunk, itemsize, end, offsets=index.grid_offsets())

    def _read_cached(self, rows: Range, cols: Range, out: Array) -> bool:
        """Read a block from the page cache by compiled code. Return whether all of it was read."""
        fast = self.pipeline.size < MIN_DIRECT or many_cores()
        return bool(fast and self._raw and self._raw.read(rows, cols, out) == [])

    def _runs(self, i: int, first: int, last: int) -> Iterator[Run]:
        """Yield the runs of row i of the grid: chunks that one call reads, or chunks that are not stored."""
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
        """Yield the runs of stored chunks of row i. Chunks of a run are adjacent in the grid and the file."""
        part = slice(entries.start, entries.stop)
        columns = (self.index.numbers[part] - i * self.index.grid[1]).tolist()
        offsets, sizes = self.index.offsets[part].tolist(), self.index.sizes[part].tolist()
        straight = not self.pipeline.filters and self.pipeline.size >= MIN_STRAIGHT
        start, size = 0, 0
        for at in range(len(columns)):
            if at > start:
                adjacent = (
                    columns[at] == columns[at - 1] + 1 and offsets[at] == offsets[at - 1] + sizes[at - 1]
                )
                decoded = (at + 1 - start) * self.pipeline.size
                if straight or not adjacent or max(size + sizes[at], decoded) > BATCH_BYTES:
                    yield (columns[start], columns[at - 1] + 1), entries[start:at]
                    start, size = at, 0
            size += sizes[at]
        yield (columns[start], columns[-1] + 1), entries[start:]

    def _read_run(self, file: OpenFile, i: int, run: Run, lines: slice, cols: Range, band: Array) -> None:
        """Read rows of the chunks of a run, which are in row `i` of the grid, into `band`.

        `lines` are the rows to read, counted from the first row of a chunk. `cols` are the columns of the
        matrix that `band` has.
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
            wrong = np.flatnonzero(sizes != self.pipeline.size)
            if len(wrong):
                number = int(wrong[0])
                self._damaged(i, first + number, f"has {sizes[number]} bytes instead of {self.pipeline.size}")
            if self.pipeline.size >= MIN_STRAIGHT:
                left, right = max(cols[0], first * width), min(cols[1], last * width)
                spans = (lines.start, lines.stop), (left - first * width, right - first * width)
                place = StoredLines(start, width, self.dtype)
                target = band[:, left - cols[0] : right - cols[0]]
                read_part(file, place, *spans, target, past_cache=self.past_cache)
                return
        memory = scratch(self._scratch_bytes)
        try:
            if end - start >= MIN_DIRECT:  # decode from the page cache without a copy
                stored = file.mapped(start, end - start)
            else:
                stored = memory[: end - start]
                file.read(start, stored.reshape(1, -1), past_cache=False)
        except EOFError as error:
            self._damaged(i, first, str(error), error)
        if self.pipeline.filters:
            # A single chunk that is the whole destination is decoded in place.
            alone = last - first == 1 and band.shape == self.chunk and first * width == cols[0]
            into = band if alone and band.flags.c_contiguous and self.dtype.isnative else None
            stored = self._decoded(i, first, part, stored, memory[MIN_DIRECT:], into)
            if into is not None:
                return
        elements = stored.view(self.dtype).reshape(last - first, *self.chunk)
        self._copy(elements[:, lines], (first, last), cols, band)

    def _decoded(
        self, i: int, first: int, part: slice, stored: Array, memory: Array, into: Array | None
    ) -> Array:
        """Return the decoded chunks of the entries `part`, which begin in column `first` of row i.

        The result is in `into` or, if that is None, in scratch memory. `stored` has the stored bytes.
        """
        sizes, masks = self.index.sizes[part].tolist(), self.index.masks[part].tolist()
        start, size = 0, self.pipeline.size
        decoded, rest = memory[: len(sizes) * size], memory[_rounded(max(BATCH_BYTES, size)) :]
        if into is not None:
            decoded = into.reshape(-1).view(np.uint8)
        for number, (length, mask) in enumerate(zip(sizes, masks, strict=True)):
            out = decoded[number * size : (number + 1) * size]
            try:
                self.pipeline.decode(stored[start : start + length], mask, out, rest)
            except MemoryError:
                raise
            except Exception as error:  # decompressors raise exceptions of many types
                self._damaged(i, first + number, f"cannot be decoded: {error}", error)
            start += length
        return decoded

    def _copy(self, elements: Array, run: Range, cols: Range, band: Array) -> None:
        """Copy `elements`, an array (chunks, rows, columns) for the columns `run` of the grid, to `band`."""
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
        place = f"[{i * self.chunk[0]}, {j * self.chunk[1]}]"
        raise ExecutionError(
            f"the chunk at {place} in {self.path} {how}: it is damaged or truncated"
        ) from error


def _rounded(size: int) -> int:
    return -(-size // 64) * 64


class Reader(Protocol):
    """A reader of the blocks of a dataset: our own code for chunks or contiguous elements, or h5py."""

    @property
    def layout(self) -> Layout:
        """The layout of the dataset, for the planner."""

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`."""


class Fill:
    """Read a dataset that stores no element: all elements have the fill value."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.layout = Layout()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        if self._value is None:
            raise ExecutionError("the dataset was never written, and it has no fill value: write it")
        out[...] = self._value


class HDF5Matrix(ReadOnly):
    """A matrix in an HDF5 dataset, whose blocks `reader` reads. The file must not change meanwhile."""

    what = "an HDF5 dataset"

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
        """Wrap a dataset. `stored` describes it for the fingerprint, `described` for the log."""
        self.name, self.shape, self.dtype, self.declared = name, shape, dtype, declared
        self.layout = reader.layout
        self._file, self._dataset, self._reader = Path(file), dataset, reader
        self._stored, self._described = stored, described
        self._status = self._present()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
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

    def fingerprint(self) -> dict[str, object]:
        path = f"{os.path.realpath(self._file)}{MARK}{self._dataset}"
        return {"path": path, "metadata": self._stored, **fingerprints([self._file])}

    def describe(self) -> dict[str, object]:
        return described(self, "hdf5", self._place) | self._described

    def identities(self) -> set[object]:
        return file_identities(self._file)

    @property
    def _place(self) -> str:
        return f"{self._file}{MARK}{self._dataset}"

    def _present(self) -> tuple[int, int, int]:
        status = os.stat(self._file)
        return status.st_ino, status.st_size, status.st_mtime_ns
