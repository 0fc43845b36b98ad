"""Read and write chunks of local zarr arrays without zarr.

This is faster: zarr copies all chunks in a single thread of the process, and this module works in the calling
threads. Where possible, it reads or decodes a chunk straight into its destination. Small uncompressed chunks,
and those in the page cache, are read many at a time (`oocgemm.stores.gather`).

In a sharded array, one file (a shard) contains several chunks, and an index of them at its start or end.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.cached import CachedChunks, chunk_files
from oocgemm.stores.files import MIN_DIRECT, OpenFile, folder_mtime, many_cores, padded
from oocgemm.stores.lines import MAX_LINE, SCRATCH_BYTES, copies_bytes, read_part
from oocgemm.stores.opener import Opener
from oocgemm.stores.publish import overwrite, publish
from oocgemm.stores.zarr.codecs import CHECKSUM_BYTES, Encoding, add_checksum, checked_content
from oocgemm.stores.zarr.together import (
    MAX_COPIED,
    MAX_DECODED,
    MAX_OPEN,
    STORED_BYTES,
    Place,
    decode,
    gather,
    min_line,
    view,
)

# If a shard does not contain a chunk, its index has this number as the chunk's offset and length.
MISSING = (1 << 64) - 1
# The number of files that `DirectChunks.in_page_cache` checks.
SAMPLED_FILES = 8


@dataclass(frozen=True)
class Shards:
    """The format of an array's shards: files of several chunks with an index of their offsets and lengths.

    - `chunks`: the number of chunks in a shard, as (rows of chunks, columns of chunks).
    - `at_end`: whether the index is at the end of the file rather than at its start.
    - `dtype`: the dtype of the numbers in the index.
    - `checksum`: whether a CRC (crc32c) follows the index.
    """

    chunks: tuple[int, int]
    at_end: bool = True
    dtype: np.dtype[Any] = np.dtype("<u8")  # noqa: RUF009  # a dtype is immutable
    checksum: bool = True

    @property
    def index_bytes(self) -> int:
        """The size of the index in the file, in bytes, with its CRC if it has one."""
        return 16 * self.chunks[0] * self.chunks[1] + CHECKSUM_BYTES * self.checksum

    def index(self, file: OpenFile) -> Array:
        """Read the offset and length of every chunk from the index of a shard.

        Returns an array of shape (rows of chunks, columns of chunks, 2). Raises `ValueError` for a damaged
        index.
        """
        if file.size < self.index_bytes:
            raise ValueError(f"it has {file.size} bytes, and its index alone has {self.index_bytes}")
        return self.parsed(file.mapped(file.size - self.index_bytes if self.at_end else 0, self.index_bytes))

    def parsed(self, stored: Array) -> Array:
        """Do the work of `index`, given the bytes of the index."""
        content = checked_content(stored) if self.checksum else stored
        return content.view(self.dtype).reshape(*self.chunks, 2)


@dataclass(frozen=True)
class DirectChunks:
    """The chunk files of a local zarr array, and how to read and write them.

    - `root`: the array's folder.
    - `key`: returns the file name of a chunk or shard, given its indices in the grid.
    - `shape`, `chunk`: the shapes of the array and of a chunk.
    - `encoding`: the format of a chunk's bytes.
    - `fill`: the value of all elements of a chunk that is not stored.
    - `shards`: the format of the shards; None if each chunk has its own file.
    - `worth_caching`: whether the array is small enough to stay in the page cache. If false, reads of
      uncompressed chunks bypass the page cache. If true, only the first read of whole rows bypasses it, since
      a single read is fastest that way. A second read fills the page cache.
    - `cached`: whether the page cache contains the files, so that many are read together.
    - `unchanging`: promises that nobody writes to the array during the run. A missing chunk file then is an
      error if files were created or deleted in its folders since the array was opened. Otherwise it means
      that the chunk has only the fill value.
    """

    root: Path
    key: Callable[[tuple[int, int]], str]
    shape: tuple[int, int]
    chunk: tuple[int, int]
    encoding: Encoding
    fill: Any
    shards: Shards | None = None
    worth_caching: bool = True
    cached: bool = False
    _seen: set[tuple[tuple[int, int], int]] = field(default_factory=set, compare=False, repr=False)
    unchanging: bool = False
    _mtimes: dict[str, int | None] = field(default_factory=dict, compare=False, repr=False)
    opener: Opener = field(default_factory=Opener, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.unchanging or self._mtimes:  # `replace` keeps them
            return
        folders = self._folders((0, 0))
        self._mtimes.update({folder: folder_mtime(folder) for folder in folders})
        # With file names such as "c/0/1", each row of chunks has its own folder. Record all these too.
        if folders[0] != self._folders((1, 0))[0]:
            with suppress(OSError), os.scandir(folders[1]) as entries:
                paths = [entry.path for entry in entries if entry.is_dir()]
                self._mtimes.update({path: folder_mtime(path) for path in paths})

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk before compression. Chunks at the edges of the array have this size too."""
        return self.chunk[0] * self.chunk[1] * self.encoding.dtype.itemsize

    @property
    def readable_in_place(self) -> bool:
        """Whether rows of chunks can be read straight into rows of the destination."""
        return self.encoding.raw and self.encoding.in_place

    @property
    def line_bytes(self) -> int:
        """The size of a line of a chunk before compression, in bytes. Its elements are contiguous."""
        return self.chunk[self.encoding.order == "C"] * self.encoding.dtype.itemsize

    @property
    def decodes_together(self) -> bool:
        """Whether the stored bytes of several chunks are read together, and then decoded one by one."""
        if self.encoding.raw:
            return self.chunk_bytes <= MAX_COPIED and self.line_bytes < min_line()
        return self.chunk_bytes <= MAX_DECODED and self.encoding.compressor is not None

    @property
    def stored_bytes(self) -> int:
        """The scratch memory of a thread for stored bytes of chunks that are read together."""
        # An encoded chunk can be a little larger than its elements. Few cores read one chunk at a time.
        alone = 1 if self.encoding.raw else 2
        together = padded((MAX_OPEN if many_cores() else alone) * self.chunk_bytes)
        return min(STORED_BYTES, together) if self.decodes_together else 0

    @property
    def scratch_bytes(self) -> int:
        """The scratch memory of a thread that reads uncompressed chunks."""
        return min(SCRATCH_BYTES, max(MAX_LINE, padded(self.chunk_bytes))) + self.stored_bytes

    @property
    def _file_extents(self) -> tuple[int, int]:
        """The extents of a file: those of a chunk or of a shard."""
        across = self.shards.chunks if self.shards else (1, 1)
        return self.chunk[0] * across[0], self.chunk[1] * across[1]

    def in_page_cache(self) -> bool:
        """Return whether the page cache seems to contain the files. At most `SAMPLED_FILES` are checked."""
        grid = [-(-extent // of) for extent, of in zip(self.shape, self._file_extents, strict=True)]
        count = grid[0] * grid[1]
        for at in range(0, count, -(-count // SAMPLED_FILES)):
            try:
                with OpenFile(self.root / self.key(divmod(at, grid[1]))) as file:
                    if file.size and not file.cached([0, file.size // 2, file.size - 1]):
                        return False
            except FileNotFoundError:
                continue  # the chunk has only the fill value
            except (OSError, EOFError):
                return False  # a read of the file will say what is wrong
        return True

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`.

        Raises `ExecutionError`, which names the file, for a damaged chunk. Raises `MemoryError` if there is
        too little memory to decode a chunk.
        """
        left = self._read_cached(rows, cols, out)
        if left == []:
            return
        needed = list(_cut((rows, cols), self._file_extents))
        if left is not None:
            needed = [needed[number] for number in left]
        if self._gathers(out):
            needed = gather(self, needed, (rows, cols), out)
        elif self.decodes_together:
            needed = decode(self, needed, (rows, cols), out)
        for number, block in needed:
            target = view(out, (rows, cols), block)
            try:
                file = OpenFile(self.root / self.key(number))
            except FileNotFoundError:
                self._check_not_deleted(number)
                target[...] = self.fill  # zarr need not store a chunk of fill values
                continue
            with file:
                try:
                    self._read_file(number, file, block, target)
                except EOFError as error:
                    self._damaged(number, str(error), error)

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Write a block that consists of whole chunks.

        An uncompressed chunk is overwritten in place, if it has a file already. The file of any other chunk
        is created or replaced atomically. A chunk that extends beyond the edge of the matrix counts as whole.
        """
        for number, block in _cut((rows, cols), self.chunk):
            part, path = view(data, (rows, cols), block), self.root / self.key(number)
            stored, size = self.encoding.encode(part, self.chunk, self.fill)
            if size != stored.nbytes or not self.encoding.raw or not overwrite(path, stored):
                publish(path, stored, size, self.root)

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        """Write a chunk that is compressed already: the first `size` bytes of `frame`.

        Behind these, `frame` has room for a checksum, which is added where chunks have one, and for a padding
        to whole sectors.
        """
        if self.encoding.checksum:
            size = add_checksum(frame, size)
        publish(self.root / self.key(number), frame[: padded(size)], size, self.root)

    @cached_property
    def cached_files(self) -> CachedChunks | None:
        """The chunks for compiled code; None if it cannot read them, or not straight into a destination."""
        if self.shards or not (self.cached and self.readable_in_place):
            return None
        return chunk_files(self.root, self.key, self.chunk, self.encoding.dtype.itemsize)

    def _read_cached(self, rows: Range, cols: Range, out: Array) -> list[int] | None:
        """Read what the page cache contains of a block by compiled code.

        Returns the numbers of the other chunks, counted row by row; None if such code cannot read the block,
        or is not the fastest way.
        """
        if not (self.cached_files and copies_bytes(self.encoding.dtype, out) and out.size):
            return None
        if self.chunk_bytes >= MIN_DIRECT and not many_cores():
            return None  # on few cores, a mapping is faster
        return self.cached_files.read(rows, cols, out)

    def _gathers(self, out: Array) -> bool:
        """Return whether `gather` can read chunks into an array, and is the fastest way to do so."""
        if not (self.readable_in_place and copies_bytes(self.encoding.dtype, out) and out.size):
            return False
        if self.chunk_bytes >= MIN_DIRECT and not (self.cached and many_cores()):
            return False  # on few cores, a mapping is faster
        return self.line_bytes >= min_line() or out.strides[0] == self.line_bytes

    def places(self, number: tuple[int, int], file: OpenFile, block: tuple[Range, Range]) -> Iterator[Place]:
        """Find the chunks of a block in the open file of the chunk or shard `number`, which contains it.

        Yields for each chunk its offset in the file (None if it is not stored), its length, and the part of
        the block in it. Raises `ExecutionError` for a damaged shard.
        """
        try:
            index = self.shards.index(file) if self.shards else None
        except ValueError as error:
            self._damaged(number, f"is a shard whose index cannot be read ({error})", error)
        for chunk, part in _cut(block, self.chunk):
            offset, length = 0, file.size
            if index is not None and self.shards:
                place = index[chunk[0] % self.shards.chunks[0], chunk[1] % self.shards.chunks[1]]
                offset, length = int(place[0]), int(place[1])
                if offset == length == MISSING:
                    yield None, 0, part
                    continue
                if offset + length > file.size:
                    self._damaged(
                        number, f"has {file.size} bytes, and by its index a chunk ends at {offset + length}"
                    )
            if self.encoding.raw and length != self.chunk_bytes:
                self._damaged(number, f"has {length} bytes instead of {self.chunk_bytes}")
            yield offset, length, part

    def _read_file(
        self, number: tuple[int, int], file: OpenFile, block: tuple[Range, Range], out: Array
    ) -> None:
        """Read a block into `out` from the open file of the chunk or shard `number`, which contains it."""
        for offset, length, part in self.places(number, file, block):
            target = view(out, block, part)
            if offset is None:
                target[...] = self.fill
                continue
            wanted = self.inside(part)
            if self.encoding.raw:
                self._read_raw(number, file, offset, wanted, target)
            else:
                self._decode(number, file.mapped(offset, length), wanted, target)

    def inside(self, block: tuple[Range, Range]) -> tuple[slice, slice]:
        """Return the rows and columns of a chunk that a block of the matrix, inside this chunk, has."""
        (r0, r1), (c0, c1) = block
        top, left = r0 % self.chunk[0], c0 % self.chunk[1]
        return slice(top, top + r1 - r0), slice(left, left + c1 - c0)

    def _read_raw(
        self,
        number: tuple[int, int],
        file: OpenFile,
        offset: int,
        wanted: tuple[slice, slice],
        out: Array,
    ) -> None:
        """Read the rows and columns `wanted` of the uncompressed chunk at the byte `offset` into `out`."""
        encoding, (height, width) = self.encoding, self.chunk
        by_rows = encoding.order == "C"
        (lines, part), line, block = (wanted, width, out) if by_rows else (wanted[::-1], height, out.T)
        past_cache = not self.worth_caching
        if block.shape[1] == line:
            start = offset + lines.start * line * encoding.dtype.itemsize
            past_cache = not ((number, start) in self._seen and self.worth_caching)
            self._seen.add((number, start))
        spans = (lines.start, lines.stop), (part.start, part.stop)
        read_part(file, offset, line, encoding.dtype, *spans, block, past_cache=past_cache)

    def _decode(
        self, number: tuple[int, int], stored: Array, wanted: tuple[slice, slice], out: Array
    ) -> None:
        """Decode a compressed chunk from its bytes `stored`. Copy its rows and columns `wanted` to `out`."""
        try:
            self.encoding.decode_part(stored, self.chunk, wanted, out)
        except ValueError as error:
            self._damaged(number, str(error), error)

    def _folders(self, number: tuple[int, int]) -> list[str]:
        """Return the folder of a chunk's file, and the folders above it up to the array's folder."""
        parents = list((self.root / self.key(number)).parents)
        return list(map(str, parents[: parents.index(self.root) + 1]))

    def _check_not_deleted(self, number: tuple[int, int]) -> None:
        """Raise `ExecutionError` if the missing file of a chunk may have been deleted during the run."""
        if self.unchanging and any(
            folder_mtime(folder) != self._mtimes.get(folder) for folder in self._folders(number)
        ):
            raise ExecutionError(
                f"chunk {self.key(number)} is missing in {self.root}, where files were added or removed "
                "since it was opened: do not change operands while a run reads them"
            )

    def _damaged(self, number: tuple[int, int], how: str, error: Exception | None = None) -> NoReturn:
        """Raise the `ExecutionError` for a damaged file. `how` says what is wrong with it."""
        raise ExecutionError(
            f"chunk {self.key(number)} in {self.root} {how}: it is damaged or truncated"
        ) from error


def _cut(
    block: tuple[Range, Range], chunk: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[Range, Range]]]:
    """Cut a block of the matrix along chunk borders.

    Yield for each part the indices of its chunk in the grid of chunks, and the part's rows and columns in the
    matrix.
    """
    for i, rows in _chunks(block[0], chunk[0]):
        for j, cols in _chunks(block[1], chunk[1]):
            yield (i, j), (rows, cols)


def _chunks(span: Range, chunk: int) -> list[tuple[int, Range]]:
    """Cut a range of one axis along chunk borders. Return each part as (index of its chunk, part)."""
    start, stop = span
    return [
        (i, (max(start, i * chunk), min(stop, (i + 1) * chunk)))
        for i in range(start // chunk, -(-stop // chunk))
    ]
