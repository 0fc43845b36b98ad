"""Decompress data, find the streams of compressed frames, and decode and encode zarr chunks.

zstd and blosc data is decompressed with the C libraries inside numcodecs, past its Python layer. For a chunk
of 64 KiB, this layer takes 4 us. For zstd, the layer also creates a new decompression context (the working
memory of the library), which takes 8 us more. Here each thread keeps its context. Importing this layer takes
50 ms, so `Zstd`, the codec of new arrays in zarr, does not need it.

Frames are the stored bytes of chunks. A GPU decodes the compressed streams in frames (`kernels/decoding`).
`frame_of` inspects one frame of an array to find whether, and how fast, a GPU can decode the array.

A blosc frame consists of a header of 16 bytes, the offsets of its blocks, and the blocks. A block is stored
as one stream or, if it is split, as one stream per byte of an element. The length of each stream precedes it.
A stream that is as long as its content is stored raw. A chunk of the codec zstd is a frame of one stream.

Sources: the format of c-blosc 1.21 (README_CHUNK_FORMAT.rst, blosc.c) and RFC 8878 for zstd.

Zarr formats 2 and 3 encode a chunk by the same steps. The last two are optional:

1. The elements are brought into the stored order (row-major or column-major) and byte order.
2. A compressor compresses them.
3. A CRC (crc32c) is appended.

Arrays with other codecs are read and written by zarr.
"""

import ctypes
import importlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.machinery import PathFinder
from typing import Any, Literal, NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.files import padded, scratch
from oocgemm.values import dataclass

# Decompresses data into memory, and releases the GIL meanwhile. The arguments are the address and the size of
# the data, and the address and the size of the memory. Returns whether the memory was filled. It is not if
# the data is damaged or has another decompressed size.
Decompress = Callable[[int, int, int, int], bool]
_of_thread = threading.local()


def decompresser(codec_id: str) -> Decompress | None:
    """Return this thread's function that decompresses zstd or blosc data; None if it is not available."""
    made: dict[str, Decompress | None] = _of_thread.__dict__
    if codec_id not in made:
        make = {"zstd": _zstd, "blosc": _blosc}.get(codec_id)
        made[codec_id] = make() if make else None
    return made[codec_id]


def decompress(codec_id: str, stored: Array, out: Array) -> bool:
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
        package = PathFinder.find_spec("numcodecs")
        module = package and PathFinder.find_spec(f"numcodecs.{name}", package.submodule_search_locations)
        found = ctypes.CDLL(module.origin) if module and module.origin else None
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        if found is None:
            return None
        if name == "zstd":
            found.ZSTD_createDCtx.restype = found.ZSTD_decompressDCtx.restype = size
            found.ZSTD_freeDCtx.argtypes = [pointer]
            found.ZSTD_decompressDCtx.argtypes = [pointer, pointer, size, pointer, size]
            found.ZSTD_createCCtx.restype = found.ZSTD_compress2.restype = size
            found.ZSTD_compressBound.argtypes, found.ZSTD_compressBound.restype = [size], size
            found.ZSTD_CCtx_setParameter.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
            found.ZSTD_CCtx_setParameter.restype = size
            found.ZSTD_freeCCtx.argtypes = found.ZSTD_isError.argtypes = [size]
            found.ZSTD_compress2.argtypes = [size, pointer, size, pointer, size]
        else:
            found.blosc_cbuffer_validate.argtypes = [pointer, size, pointer]
            found.blosc_decompress_ctx.argtypes = [pointer, pointer, size, ctypes.c_int]
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return found


# Numbers of parameters of zstd: ZSTD_c_compressionLevel and ZSTD_c_checksumFlag.
_LEVEL, _CHECKSUM = 100, 201
# numcodecs refuses to compress more bytes than this.
_MAX_SIZE = 0x7E000000


@dataclass(frozen=True, slots=True)
class Zstd:
    """The codec zstd of numcodecs, by the same calls of the same library. Its errors come from numcodecs."""

    level: int = 0
    checksum: bool = False

    @property
    def codec_id(self) -> str:
        return "zstd"

    def get_config(self) -> dict[str, Any]:
        return {"id": "zstd", "level": self.level, "checksum": self.checksum}

    def encode(self, content: Array) -> Any:
        """Return the compressed bytes of a contiguous array as a buffer."""
        library, size = _library("zstd"), content.nbytes
        if library is None or size > _MAX_SIZE:
            return self._layer().encode(content)
        out = np.empty(library.ZSTD_compressBound(size), np.uint8)
        context = library.ZSTD_createCCtx()
        if not context:
            raise MemoryError("the system refuses memory to compress zstd data")
        try:
            library.ZSTD_CCtx_setParameter(context, _LEVEL, min(self.level, library.ZSTD_maxCLevel()))
            library.ZSTD_CCtx_setParameter(context, _CHECKSUM, int(self.checksum))
            found = library.ZSTD_compress2(context, out.ctypes.data, out.nbytes, content.ctypes.data, size)
        finally:
            library.ZSTD_freeCCtx(context)
        return self._layer().encode(content) if library.ZSTD_isError(found) else out[:found]

    def decode(self, stored: Array, out: Array | None = None) -> Any:
        return self._layer().decode(stored, out)

    def _layer(self) -> Any:
        import numcodecs

        return numcodecs.Zstd(self.level, self.checksum)


# The compressors that can decode into a given buffer, and whose data states the decoded size.
INTO_MEMORY = ("zstd", "blosc", "lz4")
# The argument `wbits` of zlib for data with the header of gzip or of zlib.
GZIP, ZLIB = 31, 15


def decompress_into(compressor: Any, stored: Array, out: Array) -> None:
    """Fill all of `out` by decompressing `stored`. Raises `ValueError`, and whatever the codec raises."""
    if decompress(compressor.codec_id, stored, out):
        return
    if compressor.codec_id in INTO_MEMORY and decoded_size(compressor, stored) == out.nbytes:
        compressor.decode(stored, out=out)
        return
    data = decompressed(compressor, stored, out.nbytes)
    if data.nbytes != out.nbytes:
        raise ValueError(f"{data.nbytes} bytes instead of {out.nbytes}")
    out[:] = data


def decoded_size(compressor: Any, stored: Array) -> int | None:
    """Return the decoded size in bytes that the header of a compressed chunk states; None if it has none."""
    head = stored[:18].tobytes()
    match compressor.codec_id:
        case "blosc":  # its decoder would read beyond the end of truncated data
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
    """Return the header of a zstd frame, given its first 18 bytes; None if `head` is no such header."""
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
    """Return decompressed gzip or zlib data (`wbits`), about `size` bytes long. Raises `zlib.error`."""
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
# Blosc splits a block if an element has at most _MAX_SPLITS bytes and a stream at least _MIN_STREAM bytes.
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
        return cls(decoded.removeprefix("blosc-"), decoded.startswith("blosc-"), itemsize)


NO_ROOM = -1


class Fetched(NamedTuple):
    """A stored chunk in a buffer.

    - `rows`, `cols`: the part of a block that the chunk contains.
    - `corner`: row and column of the first element of this part in the chunk.
    - `start`, `size`: the bytes of the chunk in the buffer. The size is 0 if the host must read it, and
      `NO_ROOM` if the buffer is full.
    - `checksum`: whether a CRC (crc32c) of four bytes follows these bytes.
    """

    rows: Range
    cols: Range
    corner: tuple[int, int]
    start: int
    size: int
    checksum: bool = False

    def counted_from(self, top: int, left: int) -> "Fetched":
        """Return the same chunk with rows counted from `top`, and columns from `left`."""
        rows, cols = ((first - at, end - at) for (first, end), at in ((self.rows, top), (self.cols, left)))
        return self._replace(rows=rows, cols=cols)


def entries_at(lines: int, entries: int, index_bytes: int, item_bytes: int) -> tuple[int, int, int]:
    """Return where the indices and the values of lines of a sparse matrix begin in a buffer, and its end.

    The buffer begins with the starts of the lines, and the end of the last one, in eight bytes each.
    """
    indices = -(-8 * (lines + 1) // 64) * 64
    values = indices + -(-entries * index_bytes // 64) * 64
    return indices, values, values + entries * item_bytes


class FrameStream(NamedTuple):
    """A stream: its offset in the frame, its stored size, its decoded size, and whether it is stored raw."""

    source: int
    size: int
    length: int
    raw: bool = False


class Frame(NamedTuple):
    """The streams of a chunk, in the order of their content.

    A block of the chunk has `block` bytes, and consists of `split` streams. The last block, if it is shorter
    than the others, is one stream. `order` is PLAIN, BYTES or BITS.
    """

    streams: list[FrameStream]
    split: int
    block: int
    order: int


def index_of(slot: Array, chunks: int) -> list[tuple[int, int]]:
    """Return the offset and size of each chunk's frame, from the index that a GPU wrote to a host slot."""
    return [(start, size) for start, size in slot[: 16 * chunks].view(np.uint64).reshape(chunks, 2).tolist()]


def frame_of(stored: bytes, chunk: int, codec: Codec) -> Frame | None:
    """Return the streams in the frame of a chunk of `chunk` bytes; None if a GPU cannot decode the frame."""
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
    """Yield the streams of a blosc frame, block by block. At a stream that exceeds the frame, yield None."""
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


# The compressors of zarr format 2 that this module calls directly, without zarr. All are lossless.
_KNOWN = ("zstd", "blosc", "lz4", "gzip", "zlib", "bz2", "lzma")
# The size of a CRC (crc32c).
CHECKSUM_BYTES = 4
# A CRC (crc32c) is computed in parts of this many bytes, if a call keeps the GIL: a single call for a whole
# chunk would stop all other threads for too long.
_CHECKSUM_PART = 1 << 20


def unavailable(stated: Any) -> str:
    """Return the first compressor of blosc in metadata (JSON or a codec) that numcodecs lacks; "" if none."""
    if isinstance(stated, Mapping):
        name = stated.get("cname")
        if isinstance(name, str) and name not in _inside_blosc():
            return name
        stated = stated.values()
    elif hasattr(stated, "to_dict"):
        return unavailable(stated.to_dict())
    elif not isinstance(stated, list | tuple):
        return ""
    return next(filter(None, map(unavailable, stated)), "")


@cache
def _inside_blosc() -> list[str]:
    found: list[str] = importlib.import_module("numcodecs.blosc").list_compressors()
    return found


@dataclass(frozen=True)
class Encoding:
    """How the elements of a chunk are stored as bytes.

    - `dtype`: the dtype with its stored byte order.
    - `order`: C (row-major) or Fortran (column-major) order.
    - `compressor`: a codec of numcodecs, or `Zstd`; None if the chunk is not compressed.
    - `checksum`: whether a CRC (crc32c) follows the bytes.
    """

    dtype: np.dtype[Any]
    order: Literal["C", "F"] = "C"
    compressor: Any = None
    checksum: bool = False

    @cached_property
    def raw(self) -> bool:
        """Whether the stored bytes are just the elements, so that parts of a chunk can be read alone."""
        return self.compressor is None and not self.checksum

    @cached_property
    def in_place(self) -> bool:
        """Whether the decompressed bytes are the elements of a C-contiguous array in native byte order."""
        return self.order == "C" and self.dtype.isnative

    def decode_bytes(self, size: int) -> int:
        """Return the bytes of temporary memory to decode a chunk of `size` bytes, without the destination."""
        if self.compressor is None:
            return 0
        # bz2 and lzma decode parts of a chunk and then join them, so that the chunk is in memory twice.
        return size if self.compressor.codec_id in (*INTO_MEMORY, "gzip", "zlib") else 2 * size

    def encode_bytes(self, size: int) -> int:
        """Return the bytes of memory to encode and write a chunk of `size` bytes, besides the chunk."""
        # Every chunk needs a buffer for the content of its file. A compressed chunk needs two more: for the
        # elements in stored order, and for the output of the compressor.
        return padded(size + CHECKSUM_BYTES * self.checksum) * (1 if self.compressor is None else 3)

    def decode(self, stored: Array, shape: tuple[int, int], into: Array | None) -> Array:
        """Return the elements of a chunk, decoded from its bytes `stored`, as an array of shape `shape`.

        If `into`, a C-contiguous array of this shape, is given, it is filled and returned where possible.
        Otherwise the result may be scratch memory of this thread, which is valid only until the next call.
        Raises `ValueError` for a wrong size or CRC, and whatever the compressor raises.
        """
        if self.checksum:
            stored = checked_content(stored)
        size = shape[0] * shape[1] * self.dtype.itemsize
        if self.compressor is None:
            elements = stored
        elif self.compressor.codec_id in INTO_MEMORY:
            direct = into if self.in_place else None
            elements = scratch(size) if direct is None else direct.reshape(-1).view(np.uint8)
            decompress_into(self.compressor, stored, elements)
            if direct is not None:
                return direct
        else:
            elements = decompressed(self.compressor, stored, size)
        if elements.nbytes != size:
            raise ValueError(f"{elements.nbytes} bytes instead of {size}")
        return elements.view(self.dtype).reshape(shape, order=self.order)

    def decode_part(
        self, stored: Array, shape: tuple[int, int], wanted: tuple[slice, slice], out: Array
    ) -> None:
        """Decode a chunk of shape `shape`, and copy the part `wanted` to `out`. Raises `ValueError`."""
        into = out if out.shape == shape and out.flags.c_contiguous else None
        try:
            elements = self.decode(stored, shape, into)
        except MemoryError:
            raise
        except Exception as error:  # compressors raise exceptions of many types
            raise ValueError(f"cannot be decoded: {error}") from error
        if elements is not into:
            np.copyto(out, elements[wanted], casting="equiv")

    def lines_of(self, shape: tuple[int, int], wanted: tuple[slice, slice]) -> tuple[int, int]:
        """Return the range of bytes, in a raw chunk, of the lines that contain a part.

        A line is contiguous: a row of the chunk, or a column if the chunk is stored in Fortran order.
        """
        axis = self.order == "F"
        lines, line = wanted[axis], shape[1 - axis] * self.dtype.itemsize
        return lines.start * line, lines.stop * line

    def copy_lines(
        self, stored: Array, shape: tuple[int, int], wanted: tuple[slice, slice], out: Array
    ) -> None:
        """Copy a part of a raw chunk to `out`. `stored` has the bytes of the lines that contain the part."""
        axis = self.order == "F"
        lines = stored.view(self.dtype).reshape(-1, shape[1 - axis])
        np.copyto(out.T if axis else out, lines[:, wanted[1 - axis]], casting="equiv")

    def encode(self, part: Array, shape: tuple[int, int], fill: Any) -> tuple[Array, int]:
        """Encode a chunk. Return an array that begins with the stored bytes, and the number of these bytes.

        `shape` is the shape of the chunk. `part` has its elements inside the matrix; the others are `fill`.
        The array is scratch memory of this thread, valid until the next call, and aligned for direct I/O.
        """
        size = shape[0] * shape[1] * self.dtype.itemsize
        unchanged = part.shape == shape and self.in_place
        if unchanged and self.compressor is not None and part.flags.c_contiguous:
            elements = part
        else:
            memory = scratch(padded(size + CHECKSUM_BYTES * self.checksum))
            elements = memory[:size].view(self.dtype).reshape(shape, order=self.order)
            if part.shape != shape:
                elements[...] = fill
            elements[: part.shape[0], : part.shape[1]] = part
        if self.compressor is not None:
            flat = elements.reshape(-1, order=self.order)
            if flat.dtype.kind == "V":  # bfloat16, for which NumPy does not support the buffer protocol
                flat = flat.view(np.uint16)
            encoded = np.frombuffer(self.compressor.encode(flat), np.uint8)
            size = encoded.nbytes
            memory = scratch(padded(size + CHECKSUM_BYTES * self.checksum))
            memory[:size] = encoded
        if self.checksum:
            size = add_checksum(memory, size)
        return memory[: padded(size)], size


def from_v2(metadata: Mapping[str, Any], dtype: np.dtype[Any]) -> Encoding | None:
    """Return the encoding of an array of zarr format 2, of the stored `dtype`; None for unknown codecs."""
    if metadata.get("filters") or metadata.get("order") not in ("C", "F"):
        return None
    config = metadata.get("compressor")
    if config is None:
        return Encoding(dtype, metadata["order"])
    if not isinstance(config, Mapping):
        config = config.get_config()
    if config.get("id") not in _KNOWN:
        return None
    if config["id"] == "zstd":
        settings = {name: value for name, value in config.items() if name != "id"}
        return Encoding(dtype, metadata["order"], Zstd(**settings))
    import numcodecs

    return Encoding(dtype, metadata["order"], numcodecs.get_codec(dict(config)))


def from_v3(codecs: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]) -> Encoding | None:
    """Return the encoding that a chain of codecs of zarr format 3 describes; None for unknown codecs.

    `dtype` is the dtype of the elements. Its byte order is ignored: the codecs state the byte order.
    """
    order: Literal["C", "F"] = "C"
    names = [codec["name"] for codec in codecs]
    if names[:1] == ["transpose"]:
        axes = list(codecs[0]["configuration"]["order"])
        if axes == sorted(axes, reverse=True):
            order = "F"
        elif axes != sorted(axes):
            return None
        codecs, names = codecs[1:], names[1:]
    if names[:1] != ["bytes"]:
        return None
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    # dtype.kind is "V" for bfloat16. NumPy cannot swap the bytes of bfloat16, so a big-endian array is not
    # supported. `open_zarr` raises the `InputError` for it.
    if dtype.kind == "V" and endian != "little":
        return None
    dtype = dtype.newbyteorder(">" if endian == "big" else "<")
    compressor = None
    if len(names) > 1 and names[1] != "crc32c":
        compressor = _v3_compressor(names[1], codecs[1].get("configuration", {}))
        if compressor is None:
            return None
        names = [names[0], *names[2:]]
    if names[1:] not in ([], ["crc32c"]):
        return None
    return Encoding(dtype, order, compressor, checksum=names[1:] == ["crc32c"])


def _v3_compressor(name: str, settings: Mapping[str, Any]) -> Any:
    if name == "zstd":
        return Zstd(settings["level"], settings.get("checksum", False))
    import numcodecs

    match name:
        case "gzip":
            return numcodecs.GZip(level=settings["level"])
        case "blosc":
            shuffle = ("noshuffle", "shuffle", "bitshuffle").index(settings["shuffle"])
            # The setting "typesize" is not passed on: the codec takes it from the array that it encodes.
            return numcodecs.Blosc(settings["cname"], settings["clevel"], shuffle, settings["blocksize"])
    return None


def add_checksum(memory: Array, size: int) -> int:
    """Write the CRC of the first `size` bytes behind these bytes. Return `size` plus the bytes of the CRC."""
    memory[size : size + CHECKSUM_BYTES] = np.frombuffer(_checksum(memory[:size]), np.uint8)
    return size + CHECKSUM_BYTES


def checked_content(stored: Array) -> Array:
    """Return the stored bytes without the CRC at their end. Raises `ValueError` if the CRC does not match."""
    content = stored[:-CHECKSUM_BYTES]
    if _checksum(content) != stored[-CHECKSUM_BYTES:].tobytes():
        raise ValueError("its checksum (crc32c) does not match its content")
    return content


def _checksum(content: Array) -> bytes:
    return _extend(content).to_bytes(CHECKSUM_BYTES, "little")


def _extend(content: Array) -> int:
    if (function := _without_gil()) is not None:
        found: int = function(0, content.ctypes.data, content.nbytes)
        return found
    import google_crc32c

    value = 0
    for start in range(0, content.nbytes, _CHECKSUM_PART):
        value = google_crc32c.extend(value, content[start : start + _CHECKSUM_PART])
    return value


@cache
def _without_gil() -> Any:
    """Return the C function that google_crc32c calls, which ctypes calls without the GIL; None without it."""
    try:
        library = ctypes.CDLL(importlib.import_module("google_crc32c._crc32c").__file__)
        function = library.crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    return function
