"""Open and close files without releasing the GIL, as long as that is fast."""

import ctypes
import os
from pathlib import Path
from time import perf_counter
from typing import Any

# A call that takes more seconds than this is slow. After this many slow calls in a row, the GIL is released.
SLOW, MAX_SLOW = 0.2e-3, 8


class Opener:
    """Opens and closes files for reading.

    To open a file whose pages are in the page cache takes a few microseconds. If the call released the GIL,
    the thread would wait ten times as long for the GIL afterwards, while other threads copy. But a network
    file system may need milliseconds to open a file. If calls are slow, later ones release the GIL.
    """

    def __init__(self) -> None:
        self._slow = 0

    def open(self, path: str | Path) -> tuple[int, int]:
        """Open a file. Return its descriptor and its length in bytes. Raises `OSError`."""
        if _library is None or self._slow >= MAX_SLOW:
            descriptor = os.open(path, os.O_RDONLY)
            return descriptor, os.fstat(descriptor).st_size
        started = perf_counter()
        descriptor = _library.open(os.fsencode(path), os.O_RDONLY | os.O_CLOEXEC)
        if descriptor < 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number), str(path))
        size: int = _library.lseek(descriptor, 0, os.SEEK_END)
        self._slow = self._slow + 1 if perf_counter() - started > SLOW else 0
        return descriptor, size

    @staticmethod
    def without_readahead(descriptor: int) -> None:
        """Switch readahead off for an open file. This takes less than a microsecond."""
        if _library is None:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        else:
            _library.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    @staticmethod
    def close(descriptor: int) -> None:
        """Close a file."""
        (os if _library is None else _library).close(descriptor)


def _c_library() -> Any:
    """Return the C library, whose functions keep the GIL; None if the system has no such library."""
    try:
        found = ctypes.PyDLL(None, use_errno=True)
        found.open.argtypes = [ctypes.c_char_p, ctypes.c_int]
        found.lseek.argtypes, found.lseek.restype = (
            [ctypes.c_int, ctypes.c_int64, ctypes.c_int],
            ctypes.c_int64,
        )
        found.close.argtypes = [ctypes.c_int]
        found.posix_fadvise.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    except (AttributeError, OSError, TypeError):
        return None
    return found


_library = _c_library()
