"""Undo HDF5's filters shuffle, LZ4 and bitshuffle with the decoder of blosc, which is vectorized.

blosc data is a *frame*: a header of 16 bytes, the position of each block, and then the blocks. A block is the
size of its compressed data, and this data. A size that equals the size of the decoded block means that the
block is not compressed. The format is that of c-blosc, README_CHUNK_FORMAT.rst.

The filters LZ4 and bitshuffle store the same blocks without positions, and with sizes in big-endian order. So
their data becomes a frame by adding a header and positions. The data of the filter shuffle becomes frames of
blocks that are shuffled but not compressed.

All functions use the scratch memory that the caller passes. The decoder releases the GIL.
"""

import struct

import numpy as np
from numcodecs import blosc, lz4, zstd

from oocgemm.stores.base import Array

# Numbers of compressors in the flags of a frame.
LZ4, ZSTD = 1, 4
# Flags: how the bytes of a block are shuffled, and that a block is one stream for all bytes of its elements.
_SHUFFLED, _BIT_SHUFFLED, _NOT_SPLIT = 0x01, 0x04, 0x10
# A frame begins with its format, that of its compressed data, flags, and bytes per element. Then come the
# decoded size of all blocks, the decoded size of one, and the size of the frame, all in bytes.
_HEADER = struct.Struct("<4B3I")
_FORMATS = 2, 1
# The header of data of the filters LZ4 and bitshuffle: decoded size of the data, and of a block, in bytes.
_PREFIX = struct.Struct(">QI")
_SIZE, _SIZE_IN_FRAME = struct.Struct(">I"), struct.Struct("<I")
# Shuffled data is gathered and unshuffled in parts of about this many bytes, which fit the processor's cache.
UNSHUFFLE_BYTES = 256 << 10
# Blocks have at least this many bytes, unless the parameters of the filter state fewer.
MIN_BLOCK = 128


def scratch_bytes(size: int, max_stored: int, block: int = MIN_BLOCK) -> int:
    """Return how much scratch memory any function here needs.

    `size` is the size of a decoded chunk, `max_stored` the size of the largest stored one, and `block` that
    of the smallest block, in bytes.
    """
    # The size of each block is stored in 4 bytes, which limits the number of blocks, too.
    blocks = min(size // block, max_stored // _SIZE.size) + 2
    return max(UNSHUFFLE_BYTES, max_stored + _SIZE_IN_FRAME.size * blocks) + 2 * _HEADER.size


def unshuffle(data: Array, itemsize: int, out: Array, memory: Array) -> None:
    """Undo the filter shuffle, which stores all first bytes of elements, then all second bytes, and so on.

    Arguments:
        data: the shuffled bytes
        itemsize: bytes per element; bytes after the last whole element are not shuffled
        out: receives as many bytes
        memory: scratch memory of `scratch_bytes`
    """
    count = data.nbytes // itemsize
    whole, step = count * itemsize, max(1, UNSHUFFLE_BYTES // itemsize)
    planes = data[:whole].reshape(itemsize, count)
    # Each part becomes a frame of one block, which is stored as it is.
    start = _HEADER.size + 8
    for first in range(0, count, step):
        part = planes[:, first : first + step]
        size = part.size
        frame = memory[: start + size]
        _HEADER.pack_into(
            frame.data, 0, *_FORMATS, _SHUFFLED | _NOT_SPLIT, itemsize, size, size, start + size
        )
        _SIZE_IN_FRAME.pack_into(frame.data, _HEADER.size, start - 4)
        _SIZE_IN_FRAME.pack_into(frame.data, start - 4, size)
        frame[start:].reshape(part.shape)[...] = part
        blosc.decompress(frame, out[first * itemsize :][:size])
    out[whole:] = data[whole:]


def decode_blocks(data: Array, compressor: int, itemsize: int, out: Array, memory: Array) -> None:
    """Decode data of the filter LZ4 or, with `itemsize` > 0, of the filter bitshuffle.

    Arguments:
        data: the bytes that the filter stored
        compressor: `LZ4` or `ZSTD`
        itemsize: bytes per element of bitshuffled data; 0 for the filter LZ4
        out: receives the decoded bytes
        memory: scratch memory of `scratch_bytes`

    Raises `ValueError` for damaged data, and whatever the decoder raises.
    """
    if data.nbytes < _PREFIX.size:
        raise ValueError(f"{data.nbytes} bytes are too few for a header")
    size, block = _PREFIX.unpack_from(data.data)
    if size != out.nbytes:
        raise ValueError(f"{size} bytes instead of {out.nbytes}")
    # The filter bitshuffle stores groups of 8 elements in blocks. Up to 7 elements follow, as they are.
    group = 8 * itemsize or 1
    encoded = size - size % group
    if block == 0 or block % group:
        raise ValueError(f"blocks of {block} bytes")
    block = min(block, encoded)
    count = -(-encoded // block) if block else 0
    sizes, at, view = [], _PREFIX.size, data.data
    for _ in range(count):
        if at + 4 > data.nbytes:
            raise ValueError("it is truncated")
        (stored,) = _SIZE.unpack_from(view, at)
        sizes.append(stored)
        at += 4 + stored
    if at + size - encoded > data.nbytes:
        raise ValueError("it is truncated")
    if count:
        start = _HEADER.size + 4 * count
        if start + at - _PREFIX.size > memory.nbytes:
            raise ValueError(f"blocks of {block} bytes, which are smaller than its filter states")
        frame = memory[: start + at - _PREFIX.size]
        frame[start:] = data[_PREFIX.size : at]
        flags = compressor << 5 | _NOT_SPLIT | (_BIT_SHUFFLED if itemsize else 0)
        _HEADER.pack_into(frame.data, 0, *_FORMATS, flags, itemsize or 1, encoded, block, frame.nbytes)
        lengths = np.asarray(sizes, "<u4")
        positions = start + 4 * np.arange(count) + np.cumsum(lengths, dtype=np.int64) - lengths
        frame[_HEADER.size : start].view("<u4")[:] = positions
        frame[positions[:, np.newaxis] + np.arange(4)] = lengths.view(np.uint8).reshape(-1, 4)
        if itemsize:
            # In a frame the size of a decoded block means that the block is not compressed. The filter
            # bitshuffle compresses every block, so put the decompressed block in its place.
            whole = np.minimum(block, encoded - block * np.arange(count))
            for number in np.flatnonzero(lengths == whole).tolist():
                data_of_block = frame[positions[number] + 4 :][: sizes[number]]
                data_of_block[:] = _decompressed(data_of_block, compressor)
        blosc.decompress(frame, out[:encoded])
    out[encoded:] = data[at : at + size - encoded]


def _decompressed(data: Array, compressor: int) -> Array:
    """Return a block that decompresses to as many bytes as it has.

    Raises `ValueError` if it has another size, and `RuntimeError` if it is damaged.
    """
    size = data.nbytes
    if compressor == LZ4:
        found = lz4.decompress(_SIZE_IN_FRAME.pack(size) + data.tobytes())
    else:
        found = zstd.decompress(data.tobytes())
    if len(found) != size:
        raise ValueError(f"a block of {len(found)} bytes instead of {size}")
    return np.frombuffer(found, np.uint8)
