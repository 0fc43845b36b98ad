"""Decompress data with the codecs of numcodecs, and gzip or zlib data with isal where it is installed.

zstd and blosc data is decompressed with the C libraries inside numcodecs, past its Python layer. For a chunk
of 64 KiB, this layer takes 4 us. For zstd it also creates the library's working memory, a decompression
context, anew, which takes 8 us more. Here each thread keeps its context.

Frames are the stored bytes of chunks. A GPU decodes the compressed streams in them, many at a time. The
kernels in `kernels/decoding` find the streams. Here, one frame tells whether and how fast a GPU can decode an
array.

A blosc frame consists of a header of 16 bytes, the offsets of its blocks, and the blocks. A block is stored
as one stream or, if it is split, as one stream per byte of an element. The length of each stream precedes it.
A stream that is as long as its content is stored raw. A chunk of the codec zstd is a frame of one stream.

Sources: the format of c-blosc 1.21 (README_CHUNK_FORMAT.rst, blosc.c) and RFC 8878 for zstd.
"""

import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array

# Decompresses data into memory, and releases the GIL meanwhile. The arguments are the address and the size of
# the data, and the address and the size of the memory. Returns whether the memory was filled. It is not if
# the data is damaged or has another decompressed size.
Decompress = Callable[[int, int, int, int], bool]
_of_thread = threading.local()


def decompresser(codec_id: str) -> Decompress | None:
    """Return the function that decompresses the data of a codec of numcodecs, for use in this thread only.

    Returns None for a codec other than zstd and blosc, or if the C library cannot be called.
    """
    made: dict[str, Decompress | None] = _of_thread.__dict__
    if codec_id not in made:
        make = {"zstd": _zstd, "blosc": _blosc}.get(codec_id)
        made[codec_id] = make() if make else None
    return made[codec_id]


def decompress(codec_id: str, stored: Array, out: Array) -> bool:
    """Decompress `stored` into `out`, both contiguous arrays of bytes. Return whether `out` was filled."""
    call = decompresser(codec_id)
    return call is not None and call(stored.ctypes.data, stored.nbytes, out.ctypes.data, out.nbytes)


def _zstd() -> Decompress | None:
    library = _library("zstd")
    if library is None:
        return None
    context, call = _Context(library), library.ZSTD_decompressDCtx

    def decompress(stored: int, size: int, memory: int, expected: int) -> bool:
        # A failed call returns an error code, which is larger than any size.
        return bool(call(context.address, memory, expected, stored, size) == expected)

    return decompress


class _Context:
    """A decompression context of zstd. One thread at a time may use it."""

    def __init__(self, library: Any) -> None:
        self._free = library.ZSTD_freeDCtx
        self.address: int = library.ZSTD_createDCtx()
        if not self.address:
            raise MemoryError("the system refuses memory to decompress zstd data")

    def __del__(self) -> None:
        self._free(self.address)  # does nothing for address 0


def _blosc() -> Decompress | None:
    library = _library("blosc")
    if library is None:
        return None
    validate, call, found = library.blosc_cbuffer_validate, library.blosc_decompress_ctx, ctypes.c_size_t()
    place = ctypes.addressof(found)

    def decompress(stored: int, size: int, memory: int, expected: int) -> bool:
        # The decoder itself would read beyond the end of truncated data.
        valid = validate(stored, size, place) == 0 and found.value == expected
        return bool(valid and call(stored, memory, expected, 1) == expected)

    return decompress


@cache
def _library(name: str) -> Any:
    """Return the C library in a module of numcodecs; None if the module does not export its functions."""
    try:
        import numcodecs

        found = ctypes.CDLL(getattr(numcodecs, name).__file__)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        if name == "zstd":
            found.ZSTD_createDCtx.restype = found.ZSTD_decompressDCtx.restype = size
            found.ZSTD_freeDCtx.argtypes = [pointer]
            found.ZSTD_decompressDCtx.argtypes = [pointer, pointer, size, pointer, size]
        else:
            found.blosc_cbuffer_validate.argtypes = [pointer, size, pointer]
            found.blosc_decompress_ctx.argtypes = [pointer, pointer, size, ctypes.c_int]
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return found


# The compressors that can decode into a given buffer, and whose data states the decoded size.
INTO_MEMORY = ("zstd", "blosc", "lz4")
# The argument `wbits` of zlib for data with the header of gzip or of zlib.
GZIP, ZLIB = 31, 15


def decompress_into(compressor: Any, stored: Array, out: Array) -> None:
    """Decompress `stored` with a codec of numcodecs, and fill `out`, a contiguous array of bytes.

    Raises `ValueError` if the result has another size than `out`, and whatever the codec raises.
    """
    if decompresses_in_place(compressor, stored, out):
        return
    data = decompressed(compressor, stored, out.nbytes)
    if data.nbytes != out.nbytes:
        raise ValueError(f"{data.nbytes} bytes instead of {out.nbytes}")
    out[:] = data


def decompresses_in_place(compressor: Any, stored: Array, out: Array) -> bool:
    """Decompress `stored` straight into `out`, a contiguous array of bytes, if the compressor can do so.

    Returns whether `out` was filled. If not, `decompressed` says what is wrong with the data. Raises
    `ValueError` for truncated blosc data, and whatever the codec raises.
    """
    if decompress(compressor.codec_id, stored, out):
        return True
    if compressor.codec_id in INTO_MEMORY and decoded_size(compressor, stored) == out.nbytes:
        compressor.decode(stored, out=out)
        return True
    return False


def decoded_size(compressor: Any, stored: Array) -> int | None:
    """Return the decoded size in bytes that the header of a compressed chunk states; None if it states none.

    Raises `ValueError` for truncated blosc data. The blosc decoder does not check this, and would read beyond
    the end of the data.
    """
    head = stored[:18].tobytes()
    match compressor.codec_id:
        case "blosc":
            if len(head) < 16 or int.from_bytes(head[12:16], "little") > stored.nbytes:
                raise ValueError(f"blosc data of {stored.nbytes} bytes is truncated")
            return int.from_bytes(head[4:8], "little")
        case "lz4":
            return int.from_bytes(head[:4], "little")
        case "zstd":
            found = zstd_header(head)
            return found.size if found is not None else None
    return None


class ZstdHeader(NamedTuple):
    """The decoded size that the header of a zstd frame states (None if it states none), and its flags."""

    size: int | None
    checksum: bool
    dictionary: bool


def zstd_header(head: bytes) -> ZstdHeader | None:
    """Read the header of a zstd frame, of which `head` has the first 18 bytes; None if it is none."""
    if len(head) <= 5 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flags = head[4]
    single, width = bool(flags & 0x20), (0, 2, 4, 8)[flags >> 6]
    width = width or int(single)
    start = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(head[start : start + width], "little") + 256 * (width == 2)
    return ZstdHeader(size if width else None, bool(flags & 4), bool(flags & 3))


def decompressed(compressor: Any, stored: Array, size: int) -> Array:
    """Decompress a chunk into new memory. `size` is the number of bytes that a valid chunk decodes to."""
    if compressor.codec_id == "gzip":
        # Decompressing in one call allocates the whole result at once. The gzip codec of numcodecs would
        # decode in parts and join the parts.
        data = inflate(stored, GZIP, size)
        if len(data) == size:
            return np.frombuffer(data, np.uint8)
    elif compressor.codec_id == "zlib":
        return np.frombuffer(inflate(stored, ZLIB, size), np.uint8)
    return np.frombuffer(compressor.decode(stored), np.uint8)


def inflate(stored: Array, wbits: int, size: int) -> bytes:
    """Decompress gzip or zlib data, whose decoded size is expected to be `size` bytes.

    `wbits` is `GZIP` or `ZLIB`. Raises `zlib.error` for damaged data.
    """
    found: bytes = _inflater()(stored.data, wbits, size + 1)
    return found


@cache
def _inflater() -> Any:
    """Return `decompress` of isal if it is installed, or that of zlib. isal is up to twice as fast."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompress
    return isal_zlib.decompress


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


class FrameStream(NamedTuple):
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

    streams: list[FrameStream]
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
        return _blosc_frame(stored, chunk, codec)
    head = zstd_header(stored)
    if head is None or head.checksum or head.dictionary or head.size != chunk:
        return None
    return Frame([FrameStream(0, len(stored), chunk)], 1, chunk, PLAIN)


def _blosc_frame(stored: bytes, chunk: int, codec: Codec) -> Frame | None:
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
        return Frame([FrameStream(_HEADER, chunk, chunk, raw=True)], 1, chunk, PLAIN)
    damaged |= raw or flags >> 5 != NUMBERS[codec.compressor] or not 0 < block <= chunk
    if damaged or block % typesize or block % codec.itemsize or _HEADER + 4 * -(-chunk // block) > length:
        return None
    splits = not flags & _UNSPLIT and typesize <= _MAX_SPLITS and block >= _MIN_STREAM * typesize
    split = typesize if splits else 1
    streams = list(_walk(stored, chunk, block, split))
    return None if None in streams else Frame([x for x in streams if x], split, block, order)


def _walk(stored: bytes, chunk: int, block: int, split: int) -> Iterator[FrameStream | None]:
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
            yield FrameStream(at + 4, size, content // parts, raw=size == content // parts)
            at += 4 + size


def _number(stored: bytes, at: int) -> int:
    return int.from_bytes(stored[at : at + 4], "little")
