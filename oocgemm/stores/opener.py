"""Open and close files. Only regular files are opened, so that no open or read waits for another process.

A file of an array may be a symbolic link, since some tools store all files that way. What it leads to must
be a regular file, and none of /proc or /sys: an array from elsewhere could have a link to the environment of
this process. In a job of the service it must also lie below the same root as the link (`confine`).
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

# A call that takes more seconds than this is slow. After this many slow calls in a row, the GIL is released.
SLOW, MAX_SLOW = 0.2e-3, 8
# The open(2) flags of every file. O_NONBLOCK has no effect on regular files, and opens a named pipe at once.
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
# The file systems whose files are made by the kernel.
PSEUDO = ("/proc", "/sys")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# The folders below which links of arrays must stay; [] for no such limit.
_roots: list[str] = []


class RefusedFileError(PermissionError):
    """Raised for a file that exists and is not opened: see the module."""


def confine(roots: Iterable[str]) -> None:
    """Refuse, in this process from now on, files below one of these folders that are links out of it."""
    from oocgemm.system.compiled import compiled

    _roots[:] = roots
    if (library := compiled()) is not None:
        library.ooc_refuse_links(bool(_roots))  # it leaves them to this module


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return its descriptor. It can be the `opener` of Python's `open`.

    Raises `RefusedFileError`, or another `OSError`.
    """
    try:
        mode = (0o666,) if flags & os.O_CREAT else ()
        descriptor = os.open(path, flags | FLAGS, *mode)
    except OSError as error:
        raise _error(error.errno or 0, path) from None
    status = os.fstat(descriptor)
    _check(descriptor, status.st_mode, status.st_dev, path)
    return descriptor


def check_regular(path: str | Path) -> None:
    """Raise `RefusedFileError` or `IsADirectoryError` for what is at a path and is not a regular file.

    This is for files that another library opens. That it finds the same file is not certain.
    """
    try:
        os.close(open_regular(path))
    except (RefusedFileError, IsADirectoryError):
        raise
    except OSError:
        pass  # the library says what is wrong


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises `OSError`."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


class Opener:
    """Opens and closes files for reading.

    To open a file whose pages are in the page cache takes a few microseconds. If the call released the GIL,
    the thread would wait ten times as long for the GIL afterwards, while other threads copy. But a network
    file system may need milliseconds to open a file. If calls are slow, later ones release the GIL.
    """

    def __init__(self) -> None:
        self._slow = 0

    def open(self, path: str | Path) -> tuple[int, int]:
        """Open a regular file. Return its descriptor and its length in bytes. Raises `OSError`."""
        if _library is None or self._slow >= MAX_SLOW:
            descriptor = open_regular(path)
            return descriptor, os.fstat(descriptor).st_size
        started = perf_counter()
        descriptor = _library.open(os.fsencode(path), os.O_RDONLY | FLAGS)
        if descriptor < 0:
            raise _error(ctypes.get_errno(), path)
        status = _Status()
        if _library.statx(descriptor, b"", _EMPTY_PATH, _BASIC, ctypes.byref(status)):
            found = os.fstat(descriptor)  # some containers forbid statx
            mode, device, size = found.st_mode, found.st_dev, found.st_size
        else:
            mode, device, size = status.mode, os.makedev(status.major, status.minor), status.size
        _check(descriptor, mode, device, path)
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


def _check(descriptor: int, mode: int, device: int, path: str | Path) -> None:
    """Close an open file and raise `RefusedFileError` if it may not be read."""
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        _refuse(descriptor, path, f"it is {kind}, not a regular file: replace it")
    if device in _pseudo_devices():
        _refuse(descriptor, path, "it leads to a file of the kernel, in /proc or /sys: remove it")
    if _roots:
        named = os.path.abspath(os.fsdecode(path))
        inside = [root for root in _roots if named.startswith(f"{root}/")]
        if inside and not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{max(inside, key=len)}/"):
            _refuse(descriptor, path, "it is a symbolic link out of the root: copy the file into the root")


def _error(number: int, path: str | Path) -> OSError:
    """Return the error for a file that open(2) does not open."""
    if number == errno.ENXIO:  # of a socket; of a named pipe that is opened for writing
        return RefusedFileError(errno.EACCES, "it is a socket, not a regular file: replace it", str(path))
    if number == errno.ENOENT and os.path.islink(path):  # it does not stand for a chunk of fill values
        why = f"it is a symbolic link to {os.readlink(path)}, which does not exist: fetch that file"
        return RefusedFileError(errno.EACCES, why, str(path))
    return OSError(number, os.strerror(number), str(path))


def _refuse(descriptor: int, path: str | Path, why: str) -> None:
    os.close(descriptor)
    raise RefusedFileError(errno.EACCES, why, str(path))


@cache
def _pseudo_devices() -> frozenset[int]:
    """Return the device numbers of the file systems `PSEUDO`. The one of / is none of them."""
    found = {os.stat(place).st_dev for place in PSEUDO if os.path.ismount(place)}
    return frozenset(found)


# Of linux/stat.h: the flags and the structure of statx(2), which is the same on all architectures.
_EMPTY_PATH, _BASIC = 0x1000, 0x7FF


class _Status(ctypes.Structure):
    """`struct statx`, as far as it is used."""

    _fields_ = (
        ("_", ctypes.c_uint8 * 28),
        ("mode", ctypes.c_uint16),
        ("_more", ctypes.c_uint8 * 10),
        ("size", ctypes.c_uint64),
        ("_times", ctypes.c_uint8 * 88),
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("_spare", ctypes.c_uint8 * 112),
    )


def _c_library() -> Any:
    """Return the C library, whose functions keep the GIL; None if the system has no such library."""
    try:
        found = ctypes.PyDLL(None, use_errno=True)
        found.open.argtypes = [ctypes.c_char_p, ctypes.c_int]
        found.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
        found.close.argtypes = [ctypes.c_int]
        found.posix_fadvise.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    except (AttributeError, OSError, TypeError):
        return None
    return found


_library = _c_library()
