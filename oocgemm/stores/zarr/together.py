"""Read blocks of many chunk files together, so that Python releases the GIL once for all of them.

`gather` reads uncompressed chunks straight into their destination. `decode` reads the stored bytes of small
encoded chunks into scratch memory, and then decodes one after the other. Both leave unusual files, such as
missing or damaged ones, to the caller.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores.aio import MAX_READS
from oocgemm.stores.base import Array
from oocgemm.stores.files import OpenFile, scratch
from oocgemm.stores.gather import MAX_PART_LINES, Part, read_parts, read_ranges
from oocgemm.stores.opener import Opener

if TYPE_CHECKING:
    from oocgemm.stores.zarr.chunks import DirectChunks

# Files that a thread has open when it reads many together.
MAX_OPEN = 32
# Lines (rows of chunks) that are read together. Their addresses take 32 bytes each.
MAX_LINES = 4096
# Chunks of at most MAX_DECODED bytes before compression are read together, and decoded. The scratch memory of
# a thread for their stored bytes has at most STORED_BYTES.
MAX_DECODED, STORED_BYTES = 512 << 10, 1 << 20
# Rows and columns of the matrix.
Block = tuple[Range, Range]
# A file of the array (a chunk or a shard), by its number, and the block of the matrix that is needed of it.
Needed = tuple[tuple[int, int], Block]
# The offset of a chunk in its file, None if it is not stored; its length; and what is needed of it.
Place = tuple[int | None, int, Block]


def gather(chunks: "DirectChunks", needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read blocks of uncompressed chunks from many files together.

    `out` is for the rows and columns `block`. Returns what must be read from one file at a time, because
    something about the file is unusual.
    """
    itemsize, (height, width) = out.itemsize, chunks.chunk
    line, pitch, address = width * itemsize, out.strides[0], out.ctypes.data
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
            (r0, r1), (c0, c1) = part
            start = offset + r0 % height * line + c0 % width * itemsize
            to = address + (r0 - block[0][0]) * pitch + (c0 - block[1][0]) * itemsize
            size, left = (c1 - c0) * itemsize, r1 - r0
            if size == line == pitch:
                size, left = left * line, 1
            while left:
                count = min(left, MAX_PART_LINES)
                waiting.append(Part(file.descriptor, start, to, count, size))
                owners.append(at)
                start, to = start + count * line, to + count * pitch
                left, lines = left - count, lines + count
            if lines >= MAX_LINES:
                read()
    except OSError:  # the system does not support such reads
        return list(needed)
    return [needed[at] for at in sorted(failed)]


def decode(chunks: "DirectChunks", needed: Sequence[Needed], block: Block, out: Array) -> list[Needed]:
    """Read and decode blocks of small encoded chunks of many files.

    The arguments and the result are those of `gather`.
    """
    memory = scratch(chunks.stored_bytes, "stored")
    address, filled, failed = memory.ctypes.data, 0, set[int]()
    reads, owners = list[tuple[int, int, int, int]](), list[tuple[int, Block]]()

    def read() -> None:
        nonlocal filled
        start = 0
        for (*_, size), (at, part), found in zip(reads, owners, read_ranges(reads), strict=True):
            content = memory[start : start + size]
            start += size
            if found != size:
                failed.add(at)
                continue
            try:
                target = view(out, block, part)
                chunks.encoding.decode_part(content, chunks.chunk, chunks.inside(part), target)
            except ValueError:
                failed.add(at)
        reads.clear()
        owners.clear()
        filled = 0

    try:
        for at, file, (offset, size, part) in _stored(chunks, needed, failed, read):
            if offset is None:
                view(out, block, part)[...] = chunks.fill
                continue
            if filled + size > memory.nbytes or len(reads) == MAX_READS:
                read()
            if size > memory.nbytes:
                failed.add(at)
                continue
            reads.append((file.descriptor, offset, address + filled, size))
            owners.append((at, part))
            filled += size
    except OSError:  # the system does not support such reads
        return list(needed)
    return [needed[at] for at in sorted(failed)]


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
