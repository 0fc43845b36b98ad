"""Decode the stored bytes of an HDF5 chunk: undo its filters, the last one first.

This module supports at most one compressor, the filter shuffle at most once and before the compressor, and
any number of checksums (fletcher32). Datasets with other filters are read by h5py.

The filters shuffle, LZ4 and bitshuffle are undone with the decoder of blosc, which is vectorized, and
releases the GIL. This decoder needs frames (`oocgemm.stores.codecs`). The data of LZ4 and bitshuffle consists
of the same blocks as a frame, but without their positions, and with their sizes in big-endian order. So this
module makes a frame of the data by adding a header and positions. The data of the filter shuffle becomes
frames of blocks that are shuffled but not compressed.
"""

import struct
from collections.abc import Sequence

import numpy as np
from numcodecs import blosc, lz4, zstd

from oocgemm.stores.base import Array
from oocgemm.stores.codecs import ZLIB, decompress_into, inflate
from oocgemm.values import dataclass

# The numbers that the flags of a frame have for compressors.
LZ4_BLOCKS, ZSTD_BLOCKS = 1, 4
# Flags: how the bytes of a block are shuffled, and that a block is one stream for all bytes of its elements.
_SHUFFLED, _BIT_SHUFFLED, _NOT_SPLIT = 0x01, 0x04, 0x10
# A frame begins with the version of its format, the version of the compressor's format, flags, and the bytes
# per element. Then come the decoded size of all blocks, the decoded size of a block, and the size of the
# frame, in bytes.
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
    """Return the maximum scratch memory of the functions below, in bytes.

    `size` is the decoded size of a chunk, `max_stored` its maximum stored size, and `block` that of a block.
    """
    # The size of each block is stored in 4 bytes, which limits the number of blocks, too.
    blocks = min(size // block, max_stored // _SIZE.size) + 2
    return max(UNSHUFFLE_BYTES, max_stored + _SIZE_IN_FRAME.size * blocks) + 2 * _HEADER.size


def unshuffle(data: Array, itemsize: int, out: Array, memory: Array) -> None:
    """Undo the filter shuffle, which stores all first bytes of elements, then all second bytes, and so on."""
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
    """Decode data of the filter LZ4, or of bitshuffle if `itemsize` > 0, into `out`. Raises `ValueError`."""
    if data.nbytes < _PREFIX.size:
        raise ValueError(f"{data.nbytes} bytes are too few for a header")
    size, block = _PREFIX.unpack_from(data.data)
    if size != out.nbytes:
        raise ValueError(f"{size} bytes instead of {out.nbytes}")
    # The filter bitshuffle stores groups of 8 elements in blocks. Up to 7 unchanged elements follow.
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
    """Return the decompressed bytes of a block whose stored size is its decoded size. Raises `ValueError`."""
    size = data.nbytes
    if compressor == LZ4_BLOCKS:
        found = lz4.decompress(_SIZE_IN_FRAME.pack(size) + data.tobytes())
    else:
        found = zstd.decompress(data.tobytes())
    if len(found) != size:
        raise ValueError(f"a block of {len(found)} bytes instead of {size}")
    return np.frombuffer(found, np.uint8)


# The registered numbers of the supported filters, and their names in messages.
DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
BLOSC, LZ4, BITSHUFFLE, ZSTD = 32001, 32004, 32008, 32015
SUPPORTED = {
    DEFLATE: "gzip",
    SHUFFLE: "shuffle",
    FLETCHER32: "fletcher32",
    BLOSC: "blosc",
    LZ4: "lz4",
    BITSHUFFLE: "bitshuffle",
    ZSTD: "zstd",
}
NOT_COMPRESSORS = (SHUFFLE, FLETCHER32)
# The compressors that the filter bitshuffle can apply, by their number in its parameters. h5py reads data
# that bitshuffle has not compressed.
_OF_BITSHUFFLE = {2: LZ4_BLOCKS, 3: ZSTD_BLOCKS}
# The compressors of blosc, by their numbers in its parameters. numcodecs is usually built without snappy.
_OF_BLOSC = "blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd"
CHECKSUM_BYTES = 4
_ZSTD = zstd.Zstd()
# In the header of blosc data: decoded size, size of a block, and size of the data, in bytes.
_BLOSC = struct.Struct("<3I")
# Larger chunks do not fit the 32-bit sizes of blosc's
_MAX_BYTES = 1 << 30
# A checksum is computed in parts of this many words, so that the sums are exact in double precision.
_WORDS = 1 << 15
_WEIGHTS = np.arange(_WORDS, 0, -1, dtype=np.float64)


@dataclass(frozen=True)
class Filter:
    """One filter of a dataset: its registered number, its name, and its parameters (cd_values)."""

    number: int
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """The filters of a dataset, in the order in which they were applied, and the bytes of a decoded chunk."""

    filters: tuple[Filter, ...]
    size: int

    @property
    def supported(self) -> bool:
        """Whether `decode` can undo these filters. Raises `ValueError` for damaged parameters of a filter."""
        numbers = [each.number for each in self.filters]
        compressors = [i for i, number in enumerate(numbers) if number not in NOT_COMPRESSORS]
        if not self.filters:
            return True
        if self.size > _MAX_BYTES or not set(numbers) <= set(SUPPORTED):
            return False
        if len(compressors) > 1 or numbers.count(SHUFFLE) > 1:
            return False
        if SHUFFLE in numbers and compressors and numbers.index(SHUFFLE) > compressors[0]:
            return False
        for each in self.filters:
            if each.number in (SHUFFLE, BITSHUFFLE) and not 0 < _itemsize(each) < 256:
                raise ValueError(f"the parameters {each.values} of its filter {each.name} are not valid")
        return all(
            _bit_compressor(each) if each.number == BITSHUFFLE else each.number != BLOSC or _decodes(each)
            for each in self.filters
        )

    def scratch_bytes(self, max_stored: int) -> int:
        """Return the bytes of scratch memory for `decode`. `max_stored` is the size of the largest chunk."""
        if not self.filters:
            return 0
        block = min([MIN_BLOCK, *filter(None, map(_block_bytes, self.filters))])
        return 2 * self._room + scratch_bytes(self._room, max_stored, block)

    @property
    def decode_bytes(self) -> int:
        """The bytes that decoding a chunk allocates besides scratch memory: zlib allocates its output."""
        return self.size if any(each.number == DEFLATE for each in self.filters) else 0

    @property
    def _room(self) -> int:
        """The maximum size of a partly decoded chunk, rounded up to a multiple of 64 bytes."""
        checksums = sum(each.number == FLETCHER32 for each in self.filters)
        return -(-(self.size + CHECKSUM_BYTES * checksums) // 64) * 64

    def decode(self, stored: Array, mask: int, out: Array, memory: Array) -> None:
        """Decode a chunk into `out`. If bit i of `mask` is set, skip filter i. Raises `ValueError`."""
        rest, data = memory[2 * self._room :], stored
        steps, parts = [each for i, each in enumerate(self.filters) if not mask >> i & 1], [0, 1]
        while steps:
            step = steps.pop()
            if step.number == FLETCHER32:
                data = checked_content(data)
                continue
            size = self.size + CHECKSUM_BYTES * sum(each.number == FLETCHER32 for each in steps)
            target = memory[parts.pop() * self._room :][:size] if steps else out
            data = _undone(step, data, target, rest)
        if data is not out:
            if data.nbytes != self.size:
                raise ValueError(f"{data.nbytes} bytes instead of {self.size}")
            out[:] = data


def pipeline(filters: Sequence[tuple[int, tuple[int, ...], bytes]], size: int) -> Pipeline:
    """Return the pipeline of filters, each given by number, parameters and the name that the file states."""
    return Pipeline(
        tuple(
            Filter(number, SUPPORTED.get(number) or name.decode(errors="replace") or str(number), values)
            for number, values, name in filters
        ),
        size,
    )


def checked_content(stored: Array) -> Array:
    """Return stored bytes without the checksum at their end. Raises `ValueError` if it does not match.

    As HDF5 does, accept checksums whose bytes are swapped in pairs: HDF5 before 1.6.3 wrote them.
    """
    content = stored[:-CHECKSUM_BYTES]
    if stored.nbytes >= CHECKSUM_BYTES:
        found = int.from_bytes(stored[-CHECKSUM_BYTES:].tobytes(), "little")
        low, high = fletcher32(content)
        for swapped in (False, True):
            parts = (found & 0xFFFF, found >> 16)
            one, other = (part << 8 & 0xFFFF | part >> 8 if swapped else part for part in parts)
            if (one - low) % 0xFFFF == (other - high) % 0xFFFF == 0:
                return content
    raise ValueError("its checksum (fletcher32) does not match its content")


def fletcher32(content: Array) -> tuple[int, int]:
    """Return the two sums of Fletcher's checksum over 16-bit big-endian words, modulo 65535.

    Source: J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", IEEE Trans. Comm. 30 (1982). As
    in HDF5, a last odd byte counts as the high byte of a word.
    """
    words = content[: content.nbytes // 2 * 2].view("<u2")
    low = high = 0
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS].astype(np.float64)
        high += len(part) * low + int(np.dot(part, _WEIGHTS[-len(part) :]))
        low += int(part.sum())
    # To swap the bytes of a word is to multiply it by 256 modulo 65535.
    low, high = low * 256, high * 256
    if content.nbytes % 2:
        low += int(content[-1]) << 8
        high += low
    return low % 0xFFFF, high % 0xFFFF


def _undone(step: Filter, data: Array, out: Array, memory: Array) -> Array:
    """Undo a filter. Return the result: `out`, or new memory of this size. `memory` is scratch memory."""
    if step.number == DEFLATE:
        found = inflate(data, ZLIB, out.nbytes)
        if len(found) != out.nbytes:
            raise ValueError(f"{len(found)} bytes instead of {out.nbytes}")
        return np.frombuffer(found, np.uint8)
    if step.number == SHUFFLE:
        if data.nbytes != out.nbytes:
            raise ValueError(f"{data.nbytes} bytes instead of {out.nbytes}")
        unshuffle(data, _itemsize(step), out, memory)
    elif step.number == BLOSC:
        _decode_blosc(data, out)
    elif step.number == ZSTD:
        decompress_into(_ZSTD, data, out)
    elif step.number == BITSHUFFLE:
        decode_blocks(data, _bit_compressor(step), _itemsize(step), out, memory)
    else:
        decode_blocks(data, LZ4_BLOCKS, 0, out, memory)
    return out


def _decode_blosc(data: Array, out: Array) -> None:
    # The decoder does not get the size of `data`, and would read beyond its end.
    if data.nbytes < 16:
        raise ValueError(f"blosc data of {data.nbytes} bytes is truncated")
    size, _, stored = _BLOSC.unpack_from(data.data, 4)
    if size != out.nbytes or stored > data.nbytes:
        raise ValueError(f"blosc data of {stored} bytes for {size}, where {data.nbytes} and {out.nbytes} are")
    blosc.decompress(data, out)


def _itemsize(step: Filter) -> int:
    """Return the bytes per element that a filter shuffles, from its parameters; 0 if they do not state it."""
    values = step.values[2:] if step.number == BITSHUFFLE else step.values
    return values[0] if values else 0


def _block_bytes(step: Filter) -> int:
    """Return the bytes of a block of LZ4 or bitshuffle, from its parameters; 0 for the default."""
    values = {LZ4: step.values[:1], BITSHUFFLE: step.values[3:4]}.get(step.number, ())
    return values[0] * (_itemsize(step) if step.number == BITSHUFFLE else 1) if values else 0


def _decodes(step: Filter) -> bool:
    """Return whether numcodecs has the compressor that the parameters of the filter blosc state."""
    number = step.values[6] if len(step.values) > 6 else 0
    name = _OF_BLOSC[number] if number < len(_OF_BLOSC) else ""
    return name in blosc.list_compressors()


def _bit_compressor(step: Filter) -> int:
    """Return the number in frames of the compressor of bitshuffle; 0 for none, or an unsupported one."""
    return _OF_BITSHUFFLE.get(step.values[4], 0) if len(step.values) > 4 else 0
