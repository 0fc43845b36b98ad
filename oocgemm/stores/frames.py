"""Find the compressed streams in the frames (the stored bytes) of many chunks at once.

A GPU decodes streams, and knows no frames of blosc. A blosc frame consists of a header of 16 bytes, the
offsets of its blocks, and the blocks. A block is stored as one stream or, if it is split, as one stream per
byte of an element. The length of each stream precedes it. A stream that is as long as its content is stored
raw. The chunks of the codec zstd are frames of one stream each.

Every field that is read is checked, since the decoder of the GPU does not check much. A frame that is damaged
is refused, and so is one that is valid but unusual. The host then decodes its chunk, or reports the damage.

Sources: the format of c-blosc 1.21 (README_CHUNK_FORMAT.rst, blosc.c) and RFC 8878 for zstd. All functions
work on all frames, blocks or streams together, because a Python call for each would take too long.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array

# How the elements of a block are stored: as they are, byte by byte, or bit by bit.
PLAIN, BYTES, BITS = 0, 1, 2
# Numbers of compressors in the header of a blosc frame.
_BLOSC_CODES = {"lz4": 1, "zstd": 4}
_BLOSC_HEADER, _BLOSC_VERSION, _STREAM_VERSION = 16, 2, 1
# Bits of the flags in this header.
_SHUFFLED, _STORED_RAW, _RESERVED, _BITSHUFFLED, _UNSPLIT = 1, 2, 8, 4, 16
# Blosc splits a block if elements have at most so many bytes, and streams then have at least so many.
_MAX_SPLITS, _MIN_STREAM = 16, 128
_ZSTD_MAGIC, _ZSTD_BLOCK = 0xFD2FB528, 128 << 10
# A zstd stream may have one block per so many bytes of content, and _ZSTD_MORE more. Compressors write blocks
# of 128 KiB, or of several KiB.
_ZSTD_PER_BLOCK, _ZSTD_MORE = 1 << 10, 16


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
    """

    rows: Range
    cols: Range
    corner: tuple[int, int]
    start: int
    size: int

    def counted_from(self, top: int, left: int) -> "Fetched":
        """Count rows and columns from those of a block."""
        rows, cols = ((first - at, end - at) for (first, end), at in ((self.rows, top), (self.cols, left)))
        return self._replace(rows=rows, cols=cols)


@dataclass(frozen=True)
class Streams:
    """The streams of the chunks of a batch, and how each chunk is composed of them.

    Of each stream:

    - `source`, `size`: where it begins in the buffer of the frames, and its bytes.
    - `target`, `length`: where its content belongs in the decoded chunks, which follow each other without
      gaps, and the bytes of its content.
    - `raw`: whether it is stored as it is.

    Of each chunk:

    - `first`: its first stream; `streams` is their number.
    - `split`: streams per block. The last block, if it is shorter, is one stream.
    - `block`: bytes of a block.
    - `order`: PLAIN, BYTES or BITS.
    - `refused`: the host must decode the chunk. It has no streams then.
    """

    source: Array
    size: Array
    target: Array
    length: Array
    raw: Array
    first: Array
    streams: Array
    split: Array
    block: Array
    order: Array
    refused: Array


def find_streams(buffer: Array, start: Array, length: Array, chunk: int, codec: Codec) -> Streams:
    """Find the streams of frames in a buffer.

    Args:
        buffer: the bytes of all frames.
        start, length: of each frame in the buffer, int64; of length 0 if a chunk shall be refused.
        chunk: bytes of a decoded chunk.
        codec: how the chunks are compressed.
    """
    if codec.blosc:
        return _find_blosc(buffer, start, length, chunk, codec)
    number = len(start)
    owner, ones = np.arange(number), np.ones(number, np.int64)
    refused = (length <= 0) | (start + length > buffer.size)
    whole = np.full(number, chunk)
    found = _Found(owner, start, np.where(refused, 0, length), owner * chunk, whole, np.zeros(number, bool))
    return found.checked(buffer, refused, codec, ones, whole, np.zeros(number, np.int64))


@dataclass(frozen=True)
class _Found:
    """Streams before they are checked. `owner` is the chunk of each. Other arrays are those of `Streams`."""

    owner: Array
    source: Array
    size: Array
    target: Array
    length: Array
    raw: Array

    def checked(
        self, buffer: Array, refused: Array, codec: Codec, split: Array, block: Array, order: Array
    ) -> Streams:
        """Refuse the chunks of damaged streams, and drop the streams of refused chunks."""
        if codec.compressor == "zstd":
            compressed = np.flatnonzero(~self.raw & ~refused[self.owner])
            whole = _whole_zstd(buffer, *(x[compressed] for x in (self.source, self.size, self.length)))
            refused[self.owner[compressed[~whole]]] = True
        kept = ~refused[self.owner]
        owner = self.owner[kept]
        counts = np.bincount(owner, minlength=len(refused))
        source, size, target, length, raw = (
            x[kept] for x in (self.source, self.size, self.target, self.length, self.raw)
        )
        first = np.cumsum(counts) - counts
        return Streams(source, size, target, length, raw, first, counts, split, block, order, refused)


def _find_blosc(buffer: Array, start: Array, length: Array, chunk: int, codec: Codec) -> Streams:
    """Find the streams of blosc frames."""
    refused = (length < _BLOSC_HEADER) | (start + length > buffer.size)
    start = np.where(refused, 0, start)
    header = _gather(buffer, start, _BLOSC_HEADER)
    version, kind, flags, typesize = header[:, :4].astype(np.int64).T
    size, block, stored = (_gather_int(header.reshape(-1), _BLOSC_HEADER * np.arange(len(start)) + at)
                           for at in (4, 8, 12))  # fmt: skip
    raw = (flags & _STORED_RAW) > 0
    order = np.where(flags & _SHUFFLED, np.where(typesize > 1, BYTES, PLAIN), PLAIN)
    order = np.where(flags & _BITSHUFFLED, BITS, order)
    order, block = np.where(raw, PLAIN, order), np.where(raw, chunk, block)
    refused |= (version != _BLOSC_VERSION) | (kind != _STREAM_VERSION) | (flags & _RESERVED > 0)
    refused |= (size != chunk) | (stored != length)
    refused |= (flags & _SHUFFLED > 0) & (flags & _BITSHUFFLED > 0)
    refused |= (typesize == 0) | ((order != PLAIN) & (typesize != codec.itemsize))
    refused |= raw & (length != chunk + _BLOSC_HEADER)
    refused |= ~raw & (flags >> 5 != _BLOSC_CODES[codec.compressor])
    refused |= (block <= 0) | (block > chunk) | (block % np.maximum(typesize, 1) != 0)
    refused |= block % codec.itemsize != 0
    # The offsets of the blocks follow the header.
    count = np.where(refused, 0, -(-chunk // np.maximum(block, 1)))
    refused |= ~raw & (_BLOSC_HEADER + 4 * count > length)
    count[refused] = 0
    splits = ~raw & (flags & _UNSPLIT == 0) & (typesize <= _MAX_SPLITS) & (block >= _MIN_STREAM * typesize)
    split = np.where(splits, typesize, 1)
    owner = np.repeat(np.arange(len(start)), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    content = np.minimum(block[owner], chunk - number * block[owner])
    parts = np.where(content < block[owner], 1, split[owner])
    place = start[owner] + _BLOSC_HEADER + 4 * number
    offset = np.where(raw[owner], 0, _gather_int(buffer, np.where(raw[owner], 0, place)))
    refused[
        owner[~raw[owner] & ((offset < (_BLOSC_HEADER + 4 * count)[owner]) | (offset >= length[owner]))]
    ] = True
    found = _walk(buffer, start + length, raw, refused, (owner, start[owner] + offset, content, parts))
    target = owner * chunk + number * block[owner]
    stream, part = np.repeat(np.arange(len(owner)), parts), found[0]
    each = (content // parts)[stream]
    return _Found(
        owner[stream], found[1], found[2], target[stream] + part * each, each, found[2] == each
    ).checked(buffer, refused, codec, split, block, order)


def _walk(
    buffer: Array, end: Array, raw: Array, refused: Array, blocks: tuple[Array, Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Walk through the streams of all blocks: the length of a stream tells where the next one begins.

    Args:
        buffer: the bytes of all frames.
        end, raw: of each chunk, where its frame ends, and whether it is one raw stream behind the header.
        refused: of each chunk; chunks whose streams are not within their frames are added.
        blocks: the chunk of each block, where it begins, the bytes of its content, and its streams.

    Returns:
        The number within its block, the start and the size of each stream.
    """
    owner, at, content, parts = blocks
    first = np.cumsum(parts) - parts
    total = int(parts.sum())
    part, source, size = (np.zeros(total, np.int64) for _ in range(3))
    simple = raw[owner]
    source[first[simple]], size[first[simple]] = at[simple] + _BLOSC_HEADER, content[simple]
    active = np.flatnonzero(~simple & ~refused[owner])
    for j in range(int(parts.max(initial=0))):
        active = active[(parts[active] > j) & ~refused[owner[active]]]
        if not active.size:
            break
        inside = at[active] + 4 < end[owner[active]]
        refused[owner[active[~inside]]] = True
        active = active[inside]
        length = _gather_int(buffer, at[active])
        begin = at[active] + 4
        inside = (length > 0) & (begin + length <= end[owner[active]])
        refused[owner[active[~inside]]] = True
        stream = first[active] + j
        part[stream], source[stream], size[stream] = j, begin, length
        at[active] = begin + length
    return part, source, size


def _whole_zstd(buffer: Array, source: Array, size: Array, length: Array) -> Array:
    """Return for each zstd stream whether its structure is valid, and its header gives `length` as its size.

    That is: one frame without a dictionary or a checksum, whose blocks end exactly where the stream ends.
    """
    end = source + size
    whole: Array = size >= 9  # the shortest frame that states the size of its content and has a block
    magic = _gather_int(buffer, np.where(whole, source, 0)) & 0xFFFFFFFF
    flags = buffer[np.where(whole, source + 4, 0)].astype(np.int64)
    single = flags >> 5 & 1
    # Bits 0 and 1 tell of a dictionary, bit 2 of a checksum, and bit 3 is reserved.
    whole &= (magic == _ZSTD_MAGIC) & (flags & 0b1111 == 0)
    width = np.array([0, 2, 4, 8])[flags >> 6]
    width = np.where(width == 0, single, width)
    at = source + 6 - single
    whole &= (width > 0) & (at + width + 3 <= end)
    stated = np.zeros(len(source), np.int64)
    fields = _gather(buffer, np.where(whole, at, 0), 8).astype(np.int64)
    for byte in range(8):
        stated += np.where(byte < width, fields[:, byte], 0) << (8 * byte)
    whole &= stated + np.where(width == 2, 256, 0) == length
    at = at + width
    left = np.flatnonzero(whole)
    for _ in range(int(length.max(initial=0)) // _ZSTD_PER_BLOCK + _ZSTD_MORE):
        left = left[at[left] + 3 <= end[left]]
        if not left.size:
            break
        head = _gather(buffer, at[left], 3).astype(np.int64)
        number = head[:, 0] | head[:, 1] << 8 | head[:, 2] << 16
        last, kind, bytes_ = number & 1 > 0, number >> 1 & 3, number >> 3
        at[left] += 3 + np.where(kind == 1, 1, bytes_)
        # Kind 1 is a repeated byte, and kind 3 is reserved.
        fine = (kind != 3) & (bytes_ <= _ZSTD_BLOCK) & ((kind != 2) | (bytes_ >= 2)) & (at[left] <= end[left])
        ended = fine & last & (at[left] == end[left])
        done = left[ended]
        at[done] = -1  # marks it
        left = left[fine & ~last]
    whole &= at == -1
    return whole


def _gather(buffer: Array, at: Array, count: int) -> Array:
    """Return `count` bytes from each place of a buffer on, clipped to its end."""
    found: Array = buffer[np.minimum(at[:, None] + np.arange(count), buffer.size - 1)]
    return found


def _gather_int(buffer: Array, at: Array) -> Array:
    """Return the little-endian int32 at each place of a buffer, as int64."""
    return _gather(buffer, at, 4).view("<i4")[:, 0].astype(np.int64)
