"""Undo HDF5's filters shuffle, LZ4 and bitshuffle with the decoder of blosc, whose loops use vector instructions.

blosc data is a *frame*: a header of 16 bytes, the position of each block, and then the blocks. A block is the
size of its compressed data, and this data. A size that equals the size of the decoded block means that the
block is not compressed. The format is that of c-blosc, README_CHUNK_FORMAT.rst.

The filters LZ4 and bitshuffle store the same blocks without positions, and with sizes in big-endian order. So
their data becomes a frame by adding a header and positions. The data of the filter shuffle becomes frames of
blocks that are shuffled but not compressed.

All functions use the scratch memory that the caller passes. The decoder releases the GIL.
"""

import struct
from typing import Any

import numpy as np

from oocgemm.stores.base import Array

# Numbers of compressors in the flags of a frame.
LZ4, ZSTD = 1, 4
# Flags: how the bytes of a block are shuffled, and that a block is one stream for all bytes of its elements.
_SHUFFLED, _BIT_SHUFFLED, _NOT_SPLIT = 0x01, 0x04, 0x10
_HEADER_BYTES = 16
# Shuffled data is gathered and unshuffled in parts of about this many bytes, which fit the processor's cache.
UNSHUFFLE_BYTES = 256 << 10
# The header of data of the filters LZ4 and bitshuffle: decoded size of the data, and of a block, in bytes.
_PREFIX = struct.Struct(">QI")
_SIZE = struct.Struct(">I")
# Blocks have at least this many bytes, except in tiny chunks. `scratch_bytes` depends on it.
_MIN_BLOCK = 128


def scratch_bytes(size: int, max_stored: int) -> int:
    """Return how much scratch memory any function here needs.

    `size` is the size of a decoded chunk, and `max_stored` the size of the largest stored one, in bytes.
    """
    return max(UNSHUFFLE_BYTES, max_stored + 4 * (size // _MIN_BLOCK + 2)) + 2 * _HEADER_BYTES


def unshuffle(data: Array, itemsize: int, out: Array, memory: Array) -> None:
    """Undo the filter shuffle, which stores the first bytes of all elements, then all second bytes, and so on.

    Arguments:
        data: the shuffled bytes
        itemsize: bytes per element; bytes after the last whole element are not shuffled
        out: receives as many bytes
        memory: scratch memory of `scratch_bytes`
    """
    count = data.nbytes // itemsize
    whole = count * itemsize
    planes = data[:whole].reshape(itemsize, count)
    step = max(1, UNSHUFFLE_BYTES // itemsize)
    for first in range(0, count, step):
        part = planes[:, first : first + step]
        frame = _frame(memory, _SHUFFLED, itemsize, part.size, part.size, [4 + _HEADER_BYTES])
        frame = frame[: 8 + _HEADER_BYTES + part.size]
        frame[4 + _HEADER_BYTES : 8 + _HEADER_BYTES] = np.frombuffer(
            part.size.to_bytes(4, "little"), np.uint8
        )
        np.copyto(frame[8 + _HEADER_BYTES :].reshape(part.shape), part)
        _decode(frame, out[first * itemsize :][: part.size])
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
    size, block = _PREFIX.unpack_from(data)
    if size != out.nbytes:
        raise ValueError(f"{size} bytes instead of {out.nbytes}")
    # The filter bitshuffle stores groups of 8 elements in blocks. Up to 7 elements follow, as they are.
    encoded = size - size % (8 * itemsize) if itemsize else size
    if not 0 < block <= max(size, 1 << 30) or block % (8 * itemsize or 1):
        raise ValueError(f"blocks of {block} bytes")
    block = min(block, encoded) or 1
    lengths = [min(block, encoded - start) for start in range(0, encoded, block)]
    if block < _MIN_BLOCK and len(lengths) > 1:
        raise ValueError(f"blocks of {block} bytes")
    starts, at = [], _PREFIX.size
    stored = memoryview(data)
    for _ in lengths:
        if at + 4 > data.nbytes:
            raise ValueError("it is truncated")
        starts.append(at)
        at += 4 + _SIZE.unpack_from(stored, at)[0]
    if at + size - encoded > data.nbytes:
        raise ValueError("it is truncated")
    if lengths:
        flags = compressor << 5 | (_BIT_SHUFFLED if itemsize else 0)
        moved = _HEADER_BYTES + 4 * len(starts) - _PREFIX.size
        positions = np.asarray(starts) + moved
        frame = _frame(memory, flags, itemsize or 1, encoded, block, positions)[: at + moved]
        frame[_PREFIX.size + moved :] = data[_PREFIX.size : at]
        sizes = positions[:, np.newaxis] + np.arange(4)
        frame[sizes] = frame[sizes[:, ::-1]]
        if itemsize:
            _store_plain(frame, positions, lengths, compressor)
        _decode(frame, out[:encoded])
    out[encoded:] = data[at : at + size - encoded]


def _store_plain(frame: Array, positions: Array, lengths: list[int], compressor: int) -> None:
    """Decompress the blocks of a frame whose compressed data has the size of the decoded block, in place.

    In a frame this size means that the block is not compressed, but the filter bitshuffle compresses always.
    """
    sizes = frame[positions[:, np.newaxis] + np.arange(4)].view("<u4")[:, 0]
    for number in np.flatnonzero(sizes == np.asarray(lengths)).tolist():
        start, length = int(positions[number]) + 4, lengths[number]
        data = frame[start : start + length]
        data[:] = _decompressed(data.tobytes(), length, compressor)


def _decompressed(data: bytes, size: int, compressor: int) -> Array:
    """Return one decompressed block. Raises `ValueError` if it has another size, `RuntimeError` if damaged."""
    from numcodecs import lz4, zstd

    if compressor == LZ4:
        found = lz4.decompress(size.to_bytes(4, "little") + data)
    else:
        found = zstd.decompress(data)
    if len(found) != size:
        raise ValueError(f"a block of {len(found)} bytes instead of {size}")
    return np.frombuffer(found, np.uint8)


def _frame(memory: Array, flags: int, itemsize: int, size: int, block: int, positions: Any) -> Array:
    """Write the header and the positions of a frame to the start of scratch memory. Return this memory.

    `size` and `block` are the decoded bytes of all blocks and of one, `positions` those of the blocks in it.
    """
    frame = memory[: memory.nbytes // 4 * 4]
    numbers = frame.view("<u4")
    # Format 2 of frames, format 1 of the compressed data.
    frame[:4] = 2, 1, flags | _NOT_SPLIT, itemsize
    numbers[1:4] = size, block, memory.nbytes
    numbers[4 : 4 + len(positions)] = positions
    return frame


def _decode(frame: Array, out: Array) -> None:
    """Decode a frame of blosc. Raises `RuntimeError` for damaged data."""
    from numcodecs import blosc

    frame[12:16] = np.frombuffer(frame.nbytes.to_bytes(4, "little"), np.uint8)
    blosc.decompress(frame, out)
