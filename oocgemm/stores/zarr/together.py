"""Read blocks of many chunk files together, so that Python releases the GIL once for all of them.

`gather` reads uncompressed chunks straight into their destination. `decode` reads the stored bytes of small
encoded chunks into scratch memory, and then decodes one after the other. Both leave unusual files, such as
missing or damaged ones, to the caller.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores.aio import MAX_READS
from oocgemm.stores.base import Array
from oocgemm.stores.files import MIN_SEGMENT, OpenFile, many_cores, scratch
from oocgemm.stores.gather import MAX_PART_LINES, Part, read_parts, read_ranges
from oocgemm.stores.native import decompresser
from oocgemm.stores.opener import Opener

if TYPE_CHECKING:
    from oocgemm.stores.zarr.chunks import DirectChunks

# Files that a thread has open when it reads many together.
MAX_OPEN = 32
# Lines (rows of chunks) that are read together. Their addresses take 32 bytes each.
MAX_LINES = 4096
# Encoded chunks of at most MAX_DECODED bytes before compression, and uncompressed ones of at most MAX_COPIED,
# are read into scratch memory, and decoded or copied from there. It has at most STORED_BYTES per thread.
MAX_DECODED, MAX_COPIED, STORED_BYTES = 512 << 10, 1 << 20, 1 << 20
# On many cores, stored bytes of about this size are read by one call, because the GIL is contended. On few
# cores, each chunk is decoded as soon as it is read, while its stored bytes are in the processor's cache.
BATCH_BYTES_ON_MANY_CORES = 512 << 10
# On many cores, lines of at least this many bytes are read straight into a destination with gaps. On few
# cores, this is `MIN_SEGMENT`: a copy is faster than many buffers in one system call.
MIN_LINE_ON_MANY_CORES = 256
# Rows and columns of the matrix.
Block = tuple[Range, Range]
# A file of the array (a chunk or a shard), by its number, and the block of the matrix that is needed of it.
Needed = tuple[tuple[int, int], Block]
# The offset of a chunk in its file, None if it is not stored; its length; and what is needed of it.
Place = tuple[int | None, int, Block]


def min_line() -> int:
    """Return the length in bytes from which lines are read straight into a destination with gaps."""
    return MIN_LINE_ON_MANY_CORES if many_cores() else MIN_SEGMENT


def gather(chunks: "DirectChunks", needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read blocks of uncompressed chunks from many files together.

    `out` is for the rows and columns `block`. Returns what must be read from one file at a time, because
    something about the file is unusual.
    """
    line, pitch = chunks.chunk[1] * out.itemsize, out.strides[0]
    waiting, owners, lines, failed = list[Part](), list[int](), 0, set[int]()

    def read() -> None:
        nonlocal lines
        if waiting:
            complete = read_parts(waiting, line, pitch)
            failed.update(owners[part] for part in np.flatnonzero(~complete))
        waiting.clear()
        owners.clear()
        lines = 0

    try:
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
    except OSError:  # the system does not support such reads
        return list(needed)
    return [needed[at] for at in sorted(failed)]


def _lines(
    chunk: tuple[int, int], block: Block, out: Array, part: Block, offset: int, descriptor: int
) -> Iterator[Part]:
    """Yield the parts of a file, and their places in `out`, that one chunk of a block consists of.

    `out` is for the rows and columns `block`, and the chunk at the byte `offset` of the file has the block
    `part` of it.
    """
    (height, width), ((r0, r1), (c0, c1)) = chunk, part
    line, pitch = width * out.itemsize, out.strides[0]
    start = offset + r0 % height * line + c0 % width * out.itemsize
    to = out.ctypes.data + (r0 - block[0][0]) * pitch + (c0 - block[1][0]) * out.itemsize
    size, left = (c1 - c0) * out.itemsize, r1 - r0
    if size == line == pitch:
        size, left = left * line, 1
    while left:
        count = min(left, MAX_PART_LINES)
        yield Part(descriptor, start, to, count, size)
        start, to, left = start + count * line, to + count * pitch, left - count


def decode(chunks: "DirectChunks", needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read and decode blocks of small chunks of many files.

    The arguments and the result are those of `gather`. Of a chunk that is stored by rows and not encoded,
    only the needed rows are read.
    """
    failed = set[int]()
    batch = _Batch(chunks, block, out, failed)
    by_rows, line = chunks.encoding.raw and chunks.encoding.order == "C", chunks.line_bytes
    try:
        for at, file, (offset, length, part) in _stored(chunks, needed, failed, batch.decode):
            if offset is None:
                view(out, block, part)[...] = chunks.fill
            elif by_rows:
                first, last = part[0]
                start, size = offset + first % chunks.chunk[0] * line, (last - first) * line
                batch.add(at, part, file.descriptor, start, size)
            else:
                batch.add(at, part, file.descriptor, offset, length)
    except OSError:  # the system does not support such reads
        return list(needed)
    return [needed[at] for at in sorted(failed)]


class _Batch:
    """Stored bytes of chunks that are read together into scratch memory, and decoded from there."""

    def __init__(self, chunks: "DirectChunks", block: Block, out: Array, failed: set[int]) -> None:
        """Create an empty batch. `out` is for the rows and columns `block`. `decode` adds to `failed`."""
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
        """Add the stored bytes of a chunk, or of rows of it, with the block `part` of the matrix.

        `at` is the index of the file, which is added to `failed` if something is unusual.
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
        """Read and decode the chunks of the batch, and empty it."""
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
        """Decode `size` bytes at the address `place` into a block of the matrix. Return whether it worked."""
        encoding, shape = self._chunks.encoding, self._chunks.chunk
        wanted, target = self._chunks.inside(part), view(self._out, self._block, part)
        if self._decompress is not None:
            in_place = target.shape == shape and target.flags.c_contiguous
            to = target.ctypes.data if in_place else self._to
            if self._decompress(place, size, to, self._elements.nbytes):
                if not in_place:
                    target[...] = self._elements[wanted]
                return True
        stored = self._memory[place - self._address :][:size]
        if encoding.raw and encoding.order == "C":
            elements = stored.view(encoding.dtype).reshape(-1, shape[1])[:, wanted[1]]
            np.copyto(target, elements, casting="equiv")
            return True
        try:
            encoding.decode_part(stored, shape, wanted, target)
        except ValueError:
            return False
        return True


def _stored(
    chunks: "DirectChunks", needed: Sequence[Needed], failed: set[int], read: Callable[[], None]
) -> Iterator[tuple[int, OpenFile, Place]]:
    """Open files, and yield where the chunks in them are.

    Yields the index of each file in `needed`, the open file, and the place of each needed chunk in it. Adds
    to `failed` the index of a file that cannot be opened or is damaged. Calls `read`, which reads what was
    yielded, before files are closed.
    """
    opened = list[int]()
    try:
        for at, (number, wanted) in enumerate(needed):
            if len(opened) == MAX_OPEN:
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


def view(array: Array, block: Block, part: Block) -> Array:
    """Return the view of `array` with the rows and columns `part` of the matrix.

    `array` has the rows and columns `block` of the matrix, which include `part`.
    """
    (top, _), (left, _) = block
    (r0, r1), (c0, c1) = part
    return array[r0 - top : r1 - top, c0 - left : c1 - left]
