"""Decode the stored bytes of a zarr chunk into its elements, and encode elements into bytes.

Zarr formats 2 and 3 encode a chunk by the same steps. The last two are optional:

1. The elements are brought into the stored order (row-major or column-major) and byte order.
2. A compressor compresses them.
3. A CRC (crc32c) is appended.

Arrays with other codecs are read and written by zarr.
"""

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from oocgemm.stores.base import Array
from oocgemm.stores.compressors import INTO_MEMORY, decompressed, decompresses_in_place
from oocgemm.stores.files import padded, scratch, sector_aligned

# The compressors of zarr format 2 that this module calls directly, without zarr. All are lossless.
_KNOWN = ("zstd", "blosc", "lz4", "gzip", "zlib", "bz2", "lzma")
# The size of a CRC (crc32c).
CHECKSUM_BYTES = 4
# A CRC (crc32c) is computed in parts of this many bytes, if a call keeps the GIL: a single call for a whole
# chunk would stop all other threads for too long.
_CHECKSUM_PART = 1 << 20
# If the rows of a chunk are not adjacent in memory and have fewer bytes than this, they are copied together
# before they are written: direct I/O takes a segment per row. On two Zen 5 cores with a virtual disk, rows of
# 2 KiB were written at 1.4 GB/s, and after a copy at 2.9; on a host of an H100 at 1.2 and 1.8. Rows of 8 KiB
# were written as fast without the copy.
MIN_DIRECT_ROW = 8 << 10


def unavailable(stated: Any) -> str:
    """Return the compressor within blosc that metadata states and numcodecs lacks, such as "snappy", or "".

    `stated` is the metadata as JSON, or a codec.
    """
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
    - `compressor`: the numcodecs codec; None if the chunk is not compressed.
    - `checksum`: whether a CRC (crc32c) follows the bytes.
    """

    dtype: np.dtype[Any]
    order: Literal["C", "F"] = "C"
    compressor: Any = None
    checksum: bool = False

    @property
    def raw(self) -> bool:
        """Whether the stored bytes are just the elements, so that parts of a chunk can be read alone."""
        return self.compressor is None and not self.checksum

    @property
    def in_place(self) -> bool:
        """Whether the decompressed bytes are a C-contiguous array in native byte order.

        Then a chunk can be decompressed straight into its destination.
        """
        return self.order == "C" and self.dtype.isnative

    def decode_bytes(self, size: int) -> int:
        """Return the bytes of temporary memory that decoding a chunk takes, without the destination.

        `size` is the size of the decoded chunk in bytes.
        """
        if self.compressor is None:
            return 0
        # bz2 and lzma decode parts of a chunk and then join them, so that the chunk is in memory twice.
        return size if self.compressor.codec_id in (*INTO_MEMORY, "gzip", "zlib") else 2 * size

    def encode_bytes(self, size: int) -> int:
        """Return the bytes of temporary memory that encoding and writing a chunk takes, without the input.

        `size` is the size of the chunk before compression, in bytes.
        """
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
            direct = into is not None and self.in_place
            elements = into.reshape(-1).view(np.uint8) if into is not None and direct else scratch(size)
            if not decompresses_in_place(self.compressor, stored, elements):
                elements = decompressed(self.compressor, stored, size)
            elif into is not None and direct:
                return into
        else:
            elements = decompressed(self.compressor, stored, size)
        if elements.nbytes != size:
            raise ValueError(f"{elements.nbytes} bytes instead of {size}")
        return elements.view(self.dtype).reshape(shape, order=self.order)

    def decode_part(
        self, stored: Array, shape: tuple[int, int], wanted: tuple[slice, slice], out: Array
    ) -> None:
        """Decode a chunk of shape `shape` from its bytes `stored`, and copy a part of it to `out`.

        `wanted` are the rows and columns of the part. Raises `ValueError` if it cannot be decoded.
        """
        into = out if out.shape == shape and out.flags.c_contiguous else None
        try:
            elements = self.decode(stored, shape, into)
        except MemoryError:
            raise
        except Exception as error:  # compressors raise exceptions of many types
            raise ValueError(f"cannot be decoded: {error}") from error
        if elements is not into:
            np.copyto(out, elements[wanted], casting="equiv")

    def encode(self, part: Array, shape: tuple[int, int], fill: Any) -> tuple[Array, int]:
        """Encode a chunk. Return an array that begins with the bytes to store, and the number of these bytes.

        `shape` is the shape of the chunk. `part` contains the elements of the chunk that are inside the
        matrix. All others get the value `fill`.

        The returned array is `part` itself, or scratch memory of this thread that is valid only until the
        next call. Direct I/O can write it.
        """
        size = shape[0] * shape[1] * self.dtype.itemsize
        unchanged = part.shape == shape and self.in_place
        long = part.flags.c_contiguous or part.shape[1] * part.itemsize >= MIN_DIRECT_ROW
        if unchanged and self.raw and long and sector_aligned(part):
            return part, size
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
    """Return the encoding of an array of zarr format 2, given its metadata; None for unknown codecs.

    `dtype` has the stored byte order.
    """
    if metadata.get("filters") or metadata.get("order") not in ("C", "F"):
        return None
    config = metadata.get("compressor")
    if config is None:
        return Encoding(dtype, metadata["order"])
    if not isinstance(config, Mapping):
        config = config.get_config()
    if config.get("id") not in _KNOWN:
        return None
    import numcodecs

    return Encoding(dtype, metadata["order"], numcodecs.get_codec(dict(config)))


def from_v3(codecs: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]) -> Encoding | None:
    """Return the encoding that a chain of codecs of zarr format 3 describes; None for unknown codecs.

    `dtype` is the dtype of the elements. Its byte order is ignored, since the codecs state that.
    """
    order: Literal["C", "F"] = "C"
    names = [codec["name"] for codec in codecs]
    if names[:1] == ["transpose"]:
        match list(codecs[0]["configuration"]["order"]):
            case [0, 1]:
                pass
            case [1, 0]:
                order = "F"
            case _:
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
    import numcodecs

    match name:
        case "zstd":
            return numcodecs.Zstd(level=settings["level"], checksum=settings.get("checksum", False))
        case "gzip":
            return numcodecs.GZip(level=settings["level"])
        case "blosc":
            shuffle = ("noshuffle", "shuffle", "bitshuffle").index(settings["shuffle"])
            # The setting "typesize" is not passed on: the codec takes it from the array that it encodes.
            return numcodecs.Blosc(settings["cname"], settings["clevel"], shuffle, settings["blocksize"])
    return None


def add_checksum(memory: Array, size: int) -> int:
    """Write the CRC of the first `size` bytes behind them. Return the bytes of both."""
    memory[size : size + CHECKSUM_BYTES] = np.frombuffer(_checksum(memory[:size]), np.uint8)
    return size + CHECKSUM_BYTES


def checked_content(stored: Array) -> Array:
    """Return the stored bytes without the CRC at their end. Raises `ValueError` if the CRC does not match."""
    content = stored[:-CHECKSUM_BYTES]
    if _checksum(content) != stored[-CHECKSUM_BYTES:].tobytes():
        raise ValueError("its checksum (crc32c) does not match its content")
    return content


def _checksum(content: Array) -> bytes:
    """Return the CRC (crc32c) of an array of bytes as four bytes, in little-endian order."""
    return _extend(content).to_bytes(CHECKSUM_BYTES, "little")


def _extend(content: Array) -> int:
    """Return the CRC of a contiguous array of bytes as a number."""
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
