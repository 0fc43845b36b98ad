"""Frames, which are the stored bytes of chunks, and the compressed streams in them.

A GPU decodes streams, many at a time. The kernels in `kernels/decoding` find them in the frames. Here, one
frame tells whether and how fast a GPU can decode an array.

A blosc frame consists of a header of 16 bytes, the offsets of its blocks, and the blocks. A block is stored
as one stream or, if it is split, as one stream per byte of an element. The length of each stream precedes it.
A stream that is as long as its content is stored raw. A chunk of the codec zstd is a frame of one stream.

Sources: the format of c-blosc 1.21 (README_CHUNK_FORMAT.rst, blosc.c) and RFC 8878 for zstd.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.compressors import zstd_header

# How the elements of a block are stored: as they are, byte by byte, or bit by bit.
PLAIN, BYTES, BITS = 0, 1, 2
# Numbers of compressors in the header of a blosc frame.
NUMBERS = {"lz4": 1, "zstd": 4}
_HEADER, _VERSION, _STREAM_VERSION = 16, 2, 1
# Bits of the flags in this header.
_SHUFFLED, _STORED_RAW, _RESERVED, _BITSHUFFLED, _UNSPLIT = 1, 2, 8, 4, 16
# Blosc splits a block if elements have at most so many bytes, and streams then have at least so many.
_MAX_SPLITS, _MIN_STREAM = 16, 128


class Codec(NamedTuple):
    """How chunks are compressed: the compressor of the streams, "zstd" or "lz4", and whether in blosc frames.

    `itemsize` is the number of bytes of an element.
    """

    compressor: str
    blosc: bool
    itemsize: int

    @classmethod
    def of(cls, decoded: str, itemsize: int) -> "Codec":
        """Return the codec that `oocgemm.planning.Layout.decoded` names."""
        return cls(decoded.removeprefix("blosc-"), decoded.startswith("blosc-"), itemsize)


NO_ROOM = -1


class Fetched(NamedTuple):
    """A stored chunk in a buffer.

    - `rows`, `cols`: the part of a block that the chunk contains.
    - `corner`: row and column of the first element of this part in the chunk.
    - `start`, `size`: the bytes of the chunk in the buffer. The size is 0 if the host must read it, and
      `NO_ROOM` if the buffer is full.
    - `checksum`: whether a CRC (crc32c) of four bytes follows them.
    """

    rows: Range
    cols: Range
    corner: tuple[int, int]
    start: int
    size: int
    checksum: bool = False

    def counted_from(self, top: int, left: int) -> "Fetched":
        """Count rows and columns from those of a block."""
        rows, cols = ((first - at, end - at) for (first, end), at in ((self.rows, top), (self.cols, left)))
        return self._replace(rows=rows, cols=cols)


class Stream(NamedTuple):
    """A stream: where it begins in its frame, its bytes, and those of its content. `raw`: stored as it is."""

    source: int
    size: int
    length: int
    raw: bool = False


class Frame(NamedTuple):
    """The streams of a chunk, in the order of their content.

    A block of the chunk has `block` bytes, and consists of `split` streams. The last one, if it is shorter,
    is one stream. `order` is PLAIN, BYTES or BITS.
    """

    streams: list[Stream]
    split: int
    block: int
    order: int


def index_of(slot: Array, chunks: int) -> list[tuple[int, int]]:
    """Return where the frame of each chunk of a strip begins in a host slot, and its bytes.

    A GPU that compresses C writes these numbers to the start of the slot.
    """
    return [(start, size) for start, size in slot[: 16 * chunks].view(np.uint64).reshape(chunks, 2).tolist()]


def frame_of(stored: bytes, chunk: int, codec: Codec) -> Frame | None:
    """Find the streams in a frame; None if a GPU does not decode it, since it is damaged or unusual.

    Args:
        stored: the frame.
        chunk: bytes of the decoded chunk.
        codec: how the chunk is compressed.
    """
    if codec.blosc:
        return _blosc(stored, chunk, codec)
    head = zstd_header(stored)
    if head is None or head.checksum or head.dictionary or head.size != chunk:
        return None
    return Frame([Stream(0, len(stored), chunk)], 1, chunk, PLAIN)


def _blosc(stored: bytes, chunk: int, codec: Codec) -> Frame | None:
    if len(stored) < _HEADER:
        return None
    version, stream_version, flags, typesize = stored[:4]
    size, block, length = (_number(stored, at) for at in (4, 8, 12))
    raw, shuffled, bits = (bool(flags & bit) for bit in (_STORED_RAW, _SHUFFLED, _BITSHUFFLED))
    order = PLAIN if raw else BITS if bits else BYTES if shuffled and typesize > 1 else PLAIN
    damaged = (version, stream_version, size, length) != (_VERSION, _STREAM_VERSION, chunk, len(stored))
    damaged |= bool(flags & _RESERVED) or not typesize or (shuffled and bits)
    damaged |= order != PLAIN and typesize != codec.itemsize
    if raw and not damaged and length == chunk + _HEADER:
        return Frame([Stream(_HEADER, chunk, chunk, raw=True)], 1, chunk, PLAIN)
    damaged |= raw or flags >> 5 != NUMBERS[codec.compressor] or not 0 < block <= chunk
    if damaged or block % typesize or block % codec.itemsize or _HEADER + 4 * -(-chunk // block) > length:
        return None
    splits = not flags & _UNSPLIT and typesize <= _MAX_SPLITS and block >= _MIN_STREAM * typesize
    split = typesize if splits else 1
    streams = list(_walk(stored, chunk, block, split))
    return None if None in streams else Frame([x for x in streams if x], split, block, order)


def _walk(stored: bytes, chunk: int, block: int, split: int) -> Iterator[Stream | None]:
    """Yield the streams of the blocks of a blosc frame, and None when one is not within the frame."""
    for number, start in enumerate(range(0, chunk, block)):
        content = min(block, chunk - start)
        parts = split if content == block else 1
        at = _number(stored, _HEADER + 4 * number)
        if at < _HEADER + 4 * -(-chunk // block):
            yield None
            return
        for _ in range(parts):
            size = _number(stored, at)
            if at + 4 > len(stored) or not 0 < size <= len(stored) - at - 4:
                yield None
                return
            yield Stream(at + 4, size, content // parts, raw=size == content // parts)
            at += 4 + size


def _number(stored: bytes, at: int) -> int:
    return int.from_bytes(stored[at : at + 4], "little")
