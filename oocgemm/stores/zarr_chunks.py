"""Read and write chunks of local zarr arrays without zarr.

This module is faster than zarr: zarr copies all chunks in a single thread of the process, and this module
works in the calling threads. Where possible, it reads or decodes a chunk straight into its destination.

In a sharded array, one file (a shard) contains several chunks, and an index of them at its start or end.

Blocks of many chunk files are read together, so that Python releases the GIL once for all of them. `gather`
reads uncompressed chunks straight into their destination. `decode` reads the stored bytes of small chunks
into scratch memory, and then decodes chunk after chunk. Both leave unusual files, such as missing or damaged
files, to `DirectChunks.read`. `DirectChunks.fetch` reads compressed chunks as they are stored, for a
GPU that decodes them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Coding
from oocgemm.planning.cost.coding import ITEM_BYTES, MAX_CHUNK
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, pieces
from oocgemm.stores.codecs import (
    CHECKSUM_BYTES,
    NO_ROOM,
    Codec,
    Encoding,
    Fetched,
    add_checksum,
    checked_content,
    decompresser,
    frame_of,
)
from oocgemm.stores.files import (
    MIN_DIRECT,
    MIN_SEGMENT,
    CachedChunks,
    Opener,
    OpenFile,
    chunk_files,
    folder_mtime,
    many_cores,
    overwrite,
    padded,
    publish,
    scratch,
    sector_aligned,
    worth_caching,
)
from oocgemm.stores.lines import (
    MAX_LINE,
    MAX_PART_LINES,
    MAX_READS,
    SCRATCH_BYTES,
    FilePart,
    StoredLines,
    copies_bytes,
    read_part,
    read_parts,
    read_ranges,
)
from oocgemm.values import dataclass

# Maximum number of files that a thread has open when it reads many files together.
MAX_OPEN = 32
# Number of lines (rows of chunks) that are read together. The addresses of a line take 32 bytes.
MAX_LINES = 4096
# Encoded chunks of at most MAX_DECODED bytes before compression, and uncompressed chunks of at most
# MAX_COPIED bytes, are read into scratch memory, and decoded or copied from there. A thread has at most
# STORED_BYTES of this memory.
MAX_DECODED, MAX_COPIED, STORED_BYTES = 512 << 10, 1 << 20, 1 << 20
# On many cores, stored bytes of about this size are read by one call, because the GIL is contended. On few
# cores, each chunk is decoded as soon as it is read, while its stored bytes are in the processor's cache.
BATCH_BYTES_ON_MANY_CORES = 512 << 10
# On many cores, lines of at least this many bytes are read straight into a destination with gaps. On few
# cores, this is `MIN_SEGMENT`: a copy is faster than many buffers in one system call.
MIN_LINE_ON_MANY_CORES = 256
# If the rows of a chunk are not adjacent in memory and have fewer bytes than this, they are copied together
# before they are written: direct I/O takes a segment per row. On two Zen 5 cores with a virtual disk, rows of
# 2 KiB were written at 1.4 GB/s without the copy, and at 2.9 GB/s with it. On the host of an H100, the rates
# were 1.2 and 1.8 GB/s. Rows of 8 KiB were written as fast without the copy.
MIN_DIRECT_ROW = 8 << 10
# Maximum number of files that a thread has open when it fetches compressed chunks: it reads them together.
MAX_FETCHED = 48
_SHUFFLED = 1  # the number of the byte shuffle in numcodecs
# Rows and columns of the matrix.
Block = tuple[Range, Range]
# The number of a file of the array (a chunk or a shard), and the block of the matrix that is needed of it.
Needed = tuple[tuple[int, int], Block]
# The offset of a chunk in its file, None if the chunk is not stored; the length of the chunk; and the block
# of the matrix that is needed of the chunk.
Place = tuple[int | None, int, Block]
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
    dtype: np.dtype[Any] = np.dtype("<u8")  # a dtype is immutable
    checksum: bool = True

    @property
    def index_bytes(self) -> int:
        return 16 * self.chunks[0] * self.chunks[1] + CHECKSUM_BYTES * self.checksum

    def index(self, file: OpenFile) -> Array:
        """Return the offset and length of each chunk, an array (rows, columns, 2). Raises `ValueError`."""
        if file.size < self.index_bytes:
            raise ValueError(f"it has {file.size} bytes, and its index alone has {self.index_bytes}")
        return self.parsed(file.mapped(file.size - self.index_bytes if self.at_end else 0, self.index_bytes))

    def parsed(self, stored: Array) -> Array:
        """Return the array that `index` returns, given the stored bytes of the index."""
        content = checked_content(stored) if self.checksum else stored
        return content.view(self.dtype).reshape(*self.chunks, 2)


@dataclass(frozen=True, kw_only=True)
class StoredChunks:
    """How the chunks of a zarr array are stored.

    - `key`: returns the key or file name of a chunk or shard, given its indices in the grid.
    - `shape`, `chunk`: the shapes of the array and of a chunk.
    - `encoding`: the format of a chunk's bytes.
    - `fill`: the value of all elements of a chunk that is not stored.
    - `shards`: the format of the shards; None if each chunk has its own file or object.
    """

    key: Callable[[tuple[int, int]], str]
    shape: tuple[int, int]
    chunk: tuple[int, int]
    encoding: Encoding
    fill: Any
    shards: Shards | None = None

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk before compression. Chunks at the edges of the array have as many."""
        return self.chunk[0] * self.chunk[1] * self.encoding.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class DirectChunks(StoredChunks):
    """The chunk files of a local zarr array, and how to read and write them.

    - `root`: the array's folder.
    - `worth_caching`: whether the array is small enough to stay in the page cache. If false, reads of
      uncompressed chunks bypass the page cache. If true, only the first read of whole rows bypasses it: a
      single read is fastest if it bypasses the page cache. A second read fills the page cache.
    - `cached`: whether the page cache contains the files, so that many are read together.
    - `unchanging`: promises that nobody writes to the array during the run. A missing chunk file then is an
      error if files were created or deleted in its folders since the array was opened. Otherwise it means
      that the chunk has only the fill value.
    """

    root: Path
    worth_caching: bool = True
    cached: bool = False
    _seen: set[tuple[tuple[int, int], int]] = field(default_factory=set, compare=False, repr=False)
    unchanging: bool = False
    _mtimes: dict[str, int | None] = field(default_factory=dict, compare=False, repr=False)
    opener: Opener = field(default_factory=Opener, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.unchanging or self._mtimes:  # `replace` keeps the times
            return
        folders = self._folders((0, 0))
        self._mtimes.update({folder: folder_mtime(folder) for folder in folders})
        # With file names such as "c/0/1", each row of chunks has its own folder. Record these folders, too.
        level = [str(self.root)]
        for _ in folders[1:]:
            level = [path for folder in level for path in _subfolders(folder)]
            self._mtimes.update({path: folder_mtime(path) for path in level})

    @cached_property
    def stored_as_is(self) -> bool:
        """Whether the stored bytes are the elements, row by row, so that reads can fill a block directly."""
        return self.encoding.raw and self.encoding.in_place

    @property
    def line_bytes(self) -> int:
        """The bytes, before compression, of a line of a chunk: a row, or a column in Fortran order."""
        return self.chunk[self.encoding.order == "C"] * self.encoding.dtype.itemsize

    @property
    def decodes_together(self) -> bool:
        """Whether the stored bytes of several chunks are read together, and then decoded one by one."""
        if self.encoding.raw:
            return self.chunk_bytes <= MAX_COPIED and self.line_bytes < min_line()
        return self.chunk_bytes <= MAX_DECODED and self.encoding.compressor is not None

    @property
    def stored_bytes(self) -> int:
        """The bytes of scratch memory of a thread for stored bytes of chunks that are read together."""
        # An encoded chunk can be a little larger than its elements. On few cores, one is read at a time.
        alone = 1 if self.encoding.raw else 2
        together = padded((MAX_OPEN if many_cores() else alone) * self.chunk_bytes)
        return min(STORED_BYTES, together) if self.decodes_together else 0

    @property
    def scratch_bytes(self) -> int:
        """The bytes of scratch memory of a thread that reads uncompressed chunks."""
        return min(SCRATCH_BYTES, max(MAX_LINE, padded(self.chunk_bytes))) + self.stored_bytes

    @property
    def _file_extents(self) -> tuple[int, int]:
        across = self.shards.chunks if self.shards else (1, 1)
        return self.chunk[0] * across[0], self.chunk[1] * across[1]

    def in_page_cache(self) -> bool:
        """Return whether the page cache seems to contain the files. Checks `SAMPLED_FILES` of the files."""
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
                return False  # a read of the file raises an error that says what is wrong
        return True

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block into `out`. Raises `ExecutionError`, which names the file, for a damaged chunk."""
        left = self._read_cached(rows, cols, out)
        if left == []:
            return
        needed = list(cut((rows, cols), self._file_extents))
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
        """Write a block of whole chunks.

        An uncompressed chunk is overwritten in place, if it has a file already. The file of any other chunk
        is created or replaced atomically.
        """
        for number, block in cut((rows, cols), self.chunk):
            part, path = view(data, (rows, cols), block), self.root / self.key(number)
            long = part.flags.c_contiguous or part.shape[1] * part.itemsize >= MIN_DIRECT_ROW
            if self.stored_as_is and part.shape == self.chunk and long and sector_aligned(part):
                stored, size = part, part.nbytes
            else:
                stored, size = self.encoding.encode(part, self.chunk, self.fill)
            if size != stored.nbytes or not self.encoding.raw or not overwrite(path, stored):
                publish(path, stored, size, self.root)

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        """Write a compressed chunk: `size` bytes of `frame`, which has room for a CRC and padding."""
        if self.encoding.checksum:
            size = add_checksum(frame, size)
        publish(self.root / self.key(number), frame[: padded(size)], size, self.root)

    @property
    def coding(self) -> Coding | None:
        """How chunks are compressed; None if a GPU cannot decode them. This reads the first chunk."""
        encoding = self.encoding
        decoded, itemsize = _name(encoding.compressor), encoding.dtype.itemsize
        if not (decoded and encoding.in_place and itemsize in ITEM_BYTES and self.chunk_bytes <= MAX_CHUNK):
            return None
        codec = Codec.of(decoded, itemsize)
        rows, cols = (min(pair) for pair in zip(self.chunk, self.shape, strict=True))
        frame = np.empty(2 * self.chunk_bytes, np.uint8)
        found = self.fetch((0, rows), (0, cols), frame)[0]
        if found.size <= 0:
            return None
        stored = frame_of(frame[found.start :][: found.size].tobytes(), self.chunk_bytes, codec)
        if stored is None or all(stream.raw for stream in stored.streams):
            return None
        share = found.size / self.chunk_bytes
        # A panel that is used several times is read as often: the page cache must have room for the files.
        if not worth_caching(int(share * self.shape[0] * self.shape[1] * itemsize)):
            return None
        return Coding(decoded, max(stream.length for stream in stored.streams), share)

    @property
    def codec(self) -> str:
        """How a GPU can compress new chunks, which it pads with 0 at edges; "" if it cannot."""
        encoding, compressor = self.encoding, self.encoding.compressor
        shuffled = getattr(compressor, "shuffle", _SHUFFLED) == _SHUFFLED
        fast = getattr(compressor, "cname", "") != "lz4hc"  # lz4hc is chosen for small chunks
        return _name(compressor) if encoding.in_place and shuffled and fast and self.fill == 0 else ""

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        """Read the stored bytes of the chunks of a block, one after another, into `out`.

        The size in the result is 0 for a chunk that is not stored or cannot be read: `read` then says what is
        wrong. The size excludes a CRC behind the chunk, which is not verified.
        """
        found, end = {part: (0, 0) for _, part in cut((rows, cols), self.chunk)}, 0
        crc = CHECKSUM_BYTES if self.encoding.checksum else 0
        waiting, blocks = list[tuple[int, int, int, int]](), list[Block]()

        def read() -> None:
            for size, block, (_, _, place, wanted) in zip(read_ranges(waiting), blocks, waiting, strict=True):
                if size == wanted:
                    found[block] = place - out.ctypes.data, max(0, size - crc)
            waiting.clear()
            blocks.clear()

        needed = list(cut((rows, cols), self._file_extents))
        for _, file, (offset, length, part) in _stored(self, needed, set(), read, MAX_FETCHED):
            if offset is not None and end + length > out.size:
                found[part] = 0, NO_ROOM
            elif offset is not None:
                waiting.append((file.descriptor, offset, out.ctypes.data + end, length))
                blocks.append(part)
                end += length
        high, wide = self.chunk
        return [Fetched(r, c, (r[0] % high, c[0] % wide), *place, crc > 0) for (r, c), place in found.items()]

    @cached_property
    def cached_files(self) -> CachedChunks | None:
        """The chunks for compiled code; None if it cannot read them straight into a destination."""
        if self.shards or not (self.cached and self.stored_as_is):
            return None
        return chunk_files(self.root, self.key, self.chunk, self.encoding.dtype.itemsize)

    def _read_cached(self, rows: Range, cols: Range, out: Array) -> list[int] | None:
        """Read by compiled code. Return the numbers, row by row, of unread chunks; None if all are unread."""
        if self.cached_files is None:
            return None
        if self.chunk_bytes >= MIN_DIRECT and not many_cores():
            return None  # on few cores, a mapping is faster
        return self.cached_files.read(rows, cols, out)

    def _gathers(self, out: Array) -> bool:
        """Return whether `gather` can read chunks into `out`, and is the fastest way to read them."""
        if not (self.stored_as_is and copies_bytes(self.encoding.dtype, out) and out.size):
            return False
        if self.chunk_bytes >= MIN_DIRECT and not (self.cached and many_cores()):
            return False  # on few cores, a mapping is faster
        return self.line_bytes >= min_line() or out.strides[0] == self.line_bytes

    def places(self, number: tuple[int, int], file: OpenFile, block: tuple[Range, Range]) -> Iterator[Place]:
        """Yield the places of the chunks of a block in the open file of a chunk or shard.

        Raises `ExecutionError` for a damaged file.
        """
        try:
            index = self.shards.index(file) if self.shards else None
        except ValueError as error:
            self._damaged(number, f"is a shard whose index cannot be read ({error})", error)
        for chunk, part in cut(block, self.chunk):
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
        for offset, length, part in self.places(number, file, block):
            target = view(out, block, part)
            if offset is None:
                target[...] = self.fill
                continue
            wanted = inside(part, self.chunk)
            if self.encoding.raw:
                self._read_raw(number, file, offset, wanted, target)
            else:
                self._decode(number, file.mapped(offset, length), wanted, target)

    def _read_raw(
        self,
        number: tuple[int, int],
        file: OpenFile,
        offset: int,
        wanted: tuple[slice, slice],
        out: Array,
    ) -> None:
        """Read the rows and columns `wanted` of the uncompressed chunk at the byte `offset`."""
        encoding, (height, width) = self.encoding, self.chunk
        by_rows = encoding.order == "C"
        (lines, part), line, block = (wanted, width, out) if by_rows else (wanted[::-1], height, out.T)
        past_cache = not self.worth_caching
        if block.shape[1] == line:
            start = offset + lines.start * line * encoding.dtype.itemsize
            past_cache = not ((number, start) in self._seen and self.worth_caching)
            self._seen.add((number, start))
        spans = (lines.start, lines.stop), (part.start, part.stop)
        stored = StoredLines(offset, line, encoding.dtype)
        read_part(file, stored, *spans, block, past_cache=past_cache)

    def _decode(
        self, number: tuple[int, int], stored: Array, wanted: tuple[slice, slice], out: Array
    ) -> None:
        try:
            self.encoding.decode_part(stored, self.chunk, wanted, out)
        except ValueError as error:
            self._damaged(number, str(error), error)

    def _folders(self, number: tuple[int, int]) -> list[str]:
        """Return the folder of a chunk's file, and the folders above it up to the array's folder."""
        root, inner = str(self.root), self.key(number).split("/")[:-1]
        return [os.path.join(root, *inner[:depth]) for depth in range(len(inner), -1, -1)]

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
        raise ExecutionError(
            f"chunk {self.key(number)} in {self.root} {how}: it is damaged or truncated"
        ) from error


def _subfolders(folder: str) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if entry.is_dir()]
    return []


def min_line() -> int:
    """Return the length in bytes from which lines are read straight into a destination with gaps."""
    return MIN_LINE_ON_MANY_CORES if many_cores() else MIN_SEGMENT


def gather(chunks: DirectChunks, needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read blocks of uncompressed chunks from many files together. `out` is the destination of `block`.

    Returns the files, and the blocks needed of them, that must be read one at a time: they are unusual.
    """
    line, pitch = chunks.chunk[1] * out.itemsize, out.strides[0]
    waiting, owners, lines, failed = list[FilePart](), list[int](), 0, set[int]()

    def read() -> None:
        nonlocal lines
        if waiting:
            complete = read_parts(waiting, line, pitch)
            failed.update(owners[part] for part in np.flatnonzero(~complete))
        waiting.clear()
        owners.clear()
        lines = 0

    for at, file, (offset, _, part) in _stored(chunks, needed, failed, read):
        if offset is None:
            view(out, block, part)[...] = chunks.fill
            continue
        for each in _lines(chunks.chunk, block, out, part, offset, file.descriptor):
            waiting.append(each)
            owners.append(at)
            lines += each.lines
        if lines >= MAX_LINES:
            read()
    return [needed[at] for at in sorted(failed)]


def _lines(
    chunk: tuple[int, int], block: Block, out: Array, part: Block, offset: int, descriptor: int
) -> Iterator[FilePart]:
    """Yield the parts of a file from which the block `part` of a chunk is read into `out`."""
    (height, width), ((r0, r1), (c0, c1)) = chunk, part
    line, pitch = width * out.itemsize, out.strides[0]
    start = offset + r0 % height * line + c0 % width * out.itemsize
    to = out.ctypes.data + (r0 - block[0][0]) * pitch + (c0 - block[1][0]) * out.itemsize
    size, left = (c1 - c0) * out.itemsize, r1 - r0
    if size == line == pitch:
        size, left = left * line, 1
    while left:
        count = min(left, MAX_PART_LINES)
        yield FilePart(descriptor, start, to, count, size)
        start, to, left = start + count * line, to + count * pitch, left - count


def decode(chunks: DirectChunks, needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read small chunks like `gather`, but through scratch memory. Of raw chunks, read only needed lines."""
    failed = set[int]()
    batch = _Batch(chunks, block, out, failed)
    for at, file, (offset, length, part) in _stored(chunks, needed, failed, batch.decode):
        if offset is None:
            view(out, block, part)[...] = chunks.fill
            continue
        first, last = 0, length
        if chunks.encoding.raw:
            first, last = chunks.encoding.lines_of(chunks.chunk, inside(part, chunks.chunk))
        batch.add(at, part, file.descriptor, offset + first, last - first)
    return [needed[at] for at in sorted(failed)]


class _Batch:
    """Stored bytes of chunks that are read together into scratch memory, and decoded from there."""

    def __init__(self, chunks: DirectChunks, block: Block, out: Array, failed: set[int]) -> None:
        """Create an empty batch. `decode` adds the index of each unreadable or damaged file to `failed`."""
        self._chunks, self._block, self._out, self._failed = chunks, block, out, failed
        self._memory = scratch(chunks.stored_bytes, "stored")
        self._address, self._filled = self._memory.ctypes.data, 0
        self._limit = BATCH_BYTES_ON_MANY_CORES if many_cores() else 1
        self._reads = list[tuple[int, int, int, int]]()
        self._owners = list[tuple[int, Block]]()
        self._decompress, encoding = None, chunks.encoding
        if encoding.compressor is not None and encoding.in_place and not encoding.checksum:
            self._elements = scratch(chunks.chunk_bytes).view(encoding.dtype).reshape(chunks.chunk)
            self._to = self._elements.ctypes.data
            self._decompress = decompresser(encoding.compressor.codec_id)

    def add(self, at: int, part: Block, descriptor: int, offset: int, size: int) -> None:
        """Add a read to the batch: of all stored bytes of a chunk, or of the needed lines of a raw chunk.

        It reads `size` bytes at `offset` from the open file `descriptor`. If it fails, or the decoding fails,
        `at`, the index of the file, is added to `failed`. `part` is the block that is needed of the chunk.
        """
        if size > self._memory.nbytes:
            self._failed.add(at)
            return
        full = self._filled >= self._limit or self._filled + size > self._memory.nbytes
        if full or len(self._reads) == MAX_READS:
            self.decode()
        self._reads.append((descriptor, offset, self._address + self._filled, size))
        self._owners.append((at, part))
        self._filled += size

    def decode(self) -> None:
        sizes = self._read()
        for (*_, place, size), (at, part), found in zip(self._reads, self._owners, sizes, strict=True):
            if found != size or not self._decoded(place, size, part):
                self._failed.add(at)
        self._reads.clear()
        self._owners.clear()
        self._filled = 0

    def _read(self) -> list[int]:
        """Read the stored bytes. Return the size of each read, which is negative for a failed one."""
        if len(self._reads) > 1:
            return read_ranges(self._reads)
        memory: Any = self._memory
        try:
            return [os.preadv(d, [memory[:size]], offset) for d, offset, _, size in self._reads]
        except OSError:
            return [-1]

    def _decoded(self, place: int, size: int, part: Block) -> bool:
        """Decode the `size` bytes at the address `place` into the block `part`. Return False on failure."""
        encoding, shape = self._chunks.encoding, self._chunks.chunk
        wanted, target = inside(part, self._chunks.chunk), view(self._out, self._block, part)
        if self._decompress is not None:
            in_place = target.shape == shape and target.flags.c_contiguous
            to = target.ctypes.data if in_place else self._to
            if self._decompress(place, size, to, self._elements.nbytes):
                if not in_place:
                    target[...] = self._elements[wanted]
                return True
        stored = self._memory[place - self._address :][:size]
        if encoding.raw:
            encoding.copy_lines(stored, shape, wanted, target)
            return True
        try:
            encoding.decode_part(stored, shape, wanted, target)
        except ValueError:
            return False
        return True


def _stored(
    chunks: DirectChunks,
    needed: Sequence[Needed],
    failed: set[int],
    read: Callable[[], None],
    most: int | None = None,
) -> Iterator[tuple[int, OpenFile, Place]]:
    """Open files, at most `most` at a time, and yield the places of the chunks in the files.

    Yields the index of each file in `needed`, the open file, and the place of each needed chunk in it. Adds
    to `failed` the index of a file that cannot be opened or is damaged. Before it closes files,
    it calls `read`, which reads the chunks that were yielded.
    """
    opened = list[int]()
    try:
        for at, (number, wanted) in enumerate(needed):
            if len(opened) == (most or MAX_OPEN):
                read()
                while opened:
                    Opener.close(opened.pop())
            try:
                file = OpenFile(f"{chunks.root}/{chunks.key(number)}", chunks.opener)
                opened.append(file.descriptor)
                places: Iterable[Place] = ((0, file.size, wanted),)
                if chunks.shards or (chunks.encoding.raw and file.size != chunks.chunk_bytes):
                    places = list(chunks.places(number, file, wanted))
            except (OSError, ExecutionError):
                failed.add(at)
                continue
            for place in places:
                yield at, file, place
        read()
    finally:
        for descriptor in opened:
            Opener.close(descriptor)


def inside(block: Block, chunk: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns, in a chunk, of a block of the matrix that is inside this chunk."""
    (r0, r1), (c0, c1) = block
    top, left = r0 % chunk[0], c0 % chunk[1]
    return slice(top, top + r1 - r0), slice(left, left + c1 - c0)


def view(array: Array, block: Block, part: Block) -> Array:
    """Return a view of `array`, which has the elements of `block`, with the rows and columns `part`."""
    (top, _), (left, _) = block
    (r0, r1), (c0, c1) = part
    return array[r0 - top : r1 - top, c0 - left : c1 - left]


def _name(compressor: object) -> str:
    match getattr(compressor, "codec_id", ""), getattr(compressor, "cname", ""):
        case "zstd", _:
            return "zstd"
        case "blosc", "zstd":
            return "blosc-zstd"
        case "blosc", "lz4" | "lz4hc":
            return "blosc-lz4"
    return ""


def cut(block: Block, chunk: tuple[int, int]) -> Iterator[Needed]:
    """Cut a block of the matrix along chunk borders. Yield each part with the number of its chunk."""
    for rows, cols in pieces(*block, chunk, 1):
        yield (rows[0] // chunk[0], cols[0] // chunk[1]), (rows, cols)
