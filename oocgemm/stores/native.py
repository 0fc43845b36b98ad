"""Decompress zstd and blosc data with the C libraries inside numcodecs, past its Python layer.

For a chunk of 64 KiB, the Python layer takes 4 us. For zstd it also creates the library's working memory, a
decompression context, anew, which takes 8 us more. Here each thread keeps its context.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from oocgemm.stores.base import Array

T = TypeVar("T")
# Decompresses data into memory, and releases the GIL meanwhile. The arguments are the address and the size of
# the data, and the address and the size of the memory. Returns whether the memory was filled. It is not if
# the data is damaged or has another decompressed size.
Decompress = Callable[[int, int, int, int], bool]
# Does the same with several pieces of data that follow each other. The arguments are the address of the data,
# the size of each piece, the address of the memory, and the decompressed size of every piece.
DecompressMany = Callable[[int, Sequence[int], int, int], bool]
_of_thread = threading.local()


def decompresser(codec_id: str) -> Decompress | None:
    """Return the function that decompresses the data of a codec of numcodecs, for use in this thread only.

    Returns None for a codec other than zstd and blosc, or if the C library cannot be called.
    """
    make = {"zstd": _zstd, "blosc": _blosc}.get(codec_id)
    return _made(make) if make else None


def many_decompresser(codec_id: str) -> DecompressMany | None:
    """Return the function that decompresses many pieces of data, for use in this thread only.

    Returns None for a codec other than zstd and blosc, or if the C library cannot be called.
    """
    make = {"zstd": _zstd_frames, "blosc": _blosc_buffers}.get(codec_id)
    return _made(make) if make else None


def decompress(codec_id: str, stored: Array, out: Array) -> bool:
    """Decompress `stored` into `out`, both contiguous arrays of bytes. Return whether `out` was filled."""
    call = decompresser(codec_id)
    return call is not None and call(stored.ctypes.data, stored.nbytes, out.ctypes.data, out.nbytes)


def _made(make: Callable[[], T]) -> T:
    """Return what `make` returned when this thread first asked for it."""
    made: dict[str, Any] = _of_thread.__dict__
    if make.__name__ not in made:
        made[make.__name__] = make()
    found: T = made[make.__name__]
    return found


def _zstd() -> Decompress | None:
    library = _library("zstd")
    if library is None:
        return None
    context, call = _made(_context), library.ZSTD_decompressDCtx

    def decompress(stored: int, size: int, memory: int, expected: int) -> bool:
        # A failed call returns an error code, which is larger than any size.
        return bool(call(context.address, memory, expected, stored, size) == expected)

    return decompress


def _zstd_frames() -> DecompressMany | None:
    library, quick = _library("zstd"), _library("zstd", keep_gil=True)
    if library is None or quick is None:
        return None
    context, call = _made(_context), library.ZSTD_decompressDCtx
    content_size, frame_size = quick.ZSTD_getFrameContentSize, quick.ZSTD_findFrameCompressedSize

    def decompress(stored: int, sizes: Sequence[int], memory: int, expected: int) -> bool:
        # zstd decompresses frames that follow each other. First check that each piece is one frame.
        end = stored
        for size in sizes:
            if content_size(end, size) != expected or frame_size(end, size) != size:
                return False
            end += size
        total = expected * len(sizes)
        return bool(call(context.address, memory, total, stored, end - stored) == total)

    return decompress


def _context() -> "_Context":
    return _Context(_library("zstd"))


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


def _blosc_buffers() -> DecompressMany | None:
    one = _made(_blosc)
    if one is None:
        return None

    def decompress(stored: int, sizes: Sequence[int], memory: int, expected: int) -> bool:
        for number, size in enumerate(sizes):
            if not one(stored, size, memory + number * expected, expected):
                return False
            stored += size
        return True

    return decompress


@cache
def _library(name: str, *, keep_gil: bool = False) -> Any:
    """Return the C library in a module of numcodecs; None if the module does not export its functions.

    Calls release the GIL, unless `keep_gil`.
    """
    try:
        import numcodecs

        kind = ctypes.PyDLL if keep_gil else ctypes.CDLL
        found = kind(getattr(numcodecs, name).__file__)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        if name == "zstd":
            found.ZSTD_createDCtx.restype = found.ZSTD_decompressDCtx.restype = size
            found.ZSTD_freeDCtx.argtypes = [pointer]
            found.ZSTD_decompressDCtx.argtypes = [pointer, pointer, size, pointer, size]
            found.ZSTD_getFrameContentSize.restype = ctypes.c_ulonglong
            found.ZSTD_findFrameCompressedSize.restype = size
            found.ZSTD_getFrameContentSize.argtypes = [pointer, size]
            found.ZSTD_findFrameCompressedSize.argtypes = [pointer, size]
        else:
            found.blosc_cbuffer_validate.argtypes = [pointer, size, pointer]
            found.blosc_decompress_ctx.argtypes = [pointer, pointer, size, ctypes.c_int]
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return found
