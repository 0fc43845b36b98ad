"""Call nvCOMP, NVIDIA's library of decompressors, through its batched C interface (extra `nvcomp`)."""

import ctypes
import importlib
import importlib.util
from functools import cache
from typing import Any

from oocgemm.errors import BackendError

_INT, _SIZE, _AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
# NVCOMP_DECOMPRESS_BACKEND_CUDA. Some GPUs have a decompression engine, which reports no damaged data.
_CUDA = 2
_NAMES = {"zstd": "Zstd", "lz4": "LZ4"}


# Device addresses of arrays with an entry per stream: the address and the size of a stream, the address and
# the length of its content; and what the decoder fills: the length that it found, and a status, which is 0 if
# all went well. A status has four bytes; all others have eight.
Tables = tuple[int, int, int, int, int, int]


class _Options(ctypes.Structure):
    """The options of nvcompBatched*DecompressAsync, 64 bytes. The first ones select how to decode."""

    _fields_ = (("backend", _INT), ("rest", ctypes.c_char * 60))


def available() -> bool:
    """Return whether nvCOMP is installed."""
    try:
        return importlib.util.find_spec("nvidia.libnvcomp") is not None
    except ModuleNotFoundError:
        return False


class Decompressor:
    """Decodes many streams of one compressor, "zstd" or "lz4", together."""

    def __init__(self, compressor: str) -> None:
        library = _library()
        name = f"nvcompBatched{_NAMES[compressor]}Decompress"
        self._size = getattr(library, f"{name}GetTempSize")
        self._size.argtypes = [_SIZE, _SIZE, _Options, _AT, _SIZE, _AT]
        self._decode = getattr(library, f"{name}Async")
        self._decode.argtypes = [_AT, _AT, _AT, _AT, _SIZE, _AT, _SIZE, _AT, _Options, _AT, _AT]
        self._options = _Options(_CUDA, b"")

    def temporary(self, count: int, largest: int, total: int) -> int:
        """Return the bytes of temporary device memory to decode `count` streams.

        Their content has at most `largest` bytes each, and `total` bytes together.
        """
        found = _SIZE()
        _check(self._size(count, largest, self._options, ctypes.addressof(found), total, None))
        return found.value

    def decode(self, tables: Tables, first: int, count: int, temporary: tuple[int, int], stream: Any) -> None:
        """Enqueue on a stream to decode `count` streams from number `first` on.

        `temporary` is the address and the size of temporary device memory.
        """
        sources, sizes, targets, lengths, found, statuses = (
            address + first * width for address, width in zip(tables, (8, 8, 8, 8, 8, 4), strict=True)
        )
        _check(
            self._decode(
                *(sources, sizes, lengths, found, count, *temporary, targets),
                *(self._options, statuses, stream.ptr),
            )
        )


@cache
def _library() -> ctypes.CDLL:
    try:
        found = importlib.import_module("nvidia.libnvcomp").load_library()
    except ImportError:
        found = None
    if found is None:
        raise BackendError("nvCOMP cannot be loaded: reinstall oocgemm[nvcomp]")
    library: ctypes.CDLL = found
    return library


def _check(status: int) -> None:
    if status:
        raise BackendError(
            f"nvCOMP fails with the status {status}: uninstall nvidia-libnvcomp, so that the host decodes"
        )
