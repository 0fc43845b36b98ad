"""Decompress zstd data with the C library inside numcodecs, and keep its working memory between chunks.

The codec of numcodecs creates this memory, a decompression context, anew for every chunk. Its pages are then
faulted in again, which took 10 of the 69 us for a chunk of 64 KiB.
"""

import ctypes
import threading
from functools import cache
from typing import Any

from oocgemm.stores.base import Array

_of_thread = threading.local()


def decompress_zstd(stored: Array, out: Array) -> bool:
    """Decompress `stored` into `out`, both contiguous arrays of bytes. Release the GIL meanwhile.

    Returns whether `out` was filled. It is not if the data is damaged or has another decompressed size, or if
    the C library cannot be called.
    """
    context: _Context | None = getattr(_of_thread, "context", None)
    if context is None:
        library = _library()
        if library is None:
            return False
        _of_thread.context = context = _Context(library)
    return context.decompress(stored, out)


class _Context:
    """A decompression context. One thread at a time may use it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._address = library.ZSTD_createDCtx()
        if not self._address:
            raise MemoryError("the system refuses memory to decompress zstd data")

    def decompress(self, stored: Array, out: Array) -> bool:
        # A failed call returns an error code, which is larger than any size.
        found: int = self._library.ZSTD_decompressDCtx(
            self._address, out.ctypes.data, out.nbytes, stored.ctypes.data, stored.nbytes
        )
        return found == out.nbytes

    def __del__(self) -> None:
        self._library.ZSTD_freeDCtx(self._address)  # does nothing for address 0


@cache
def _library() -> Any:
    """Return the C library; None if numcodecs does not export its functions."""
    try:
        from numcodecs import zstd

        found = ctypes.CDLL(zstd.__file__)
        found.ZSTD_createDCtx.restype = found.ZSTD_decompressDCtx.restype = ctypes.c_size_t
        found.ZSTD_freeDCtx.argtypes = [ctypes.c_size_t]
        found.ZSTD_decompressDCtx.argtypes = [ctypes.c_size_t, *(ctypes.c_void_p, ctypes.c_size_t) * 2]
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return found
