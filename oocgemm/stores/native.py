"""Decompress zstd and blosc data with the C libraries inside numcodecs, past its Python layer.

For a chunk of 64 KiB, the Python layer takes 4 us. For zstd it also creates the library's working memory, a
decompression context, anew, which takes 8 us more. Here each thread keeps its context.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

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
