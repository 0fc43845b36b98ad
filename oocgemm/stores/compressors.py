"""Decompress data with the codecs of numcodecs, and gzip or zlib data with isal where it is installed."""

import zlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from oocgemm.stores.base import Array
from oocgemm.stores.native import decompress

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
