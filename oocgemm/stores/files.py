"""Open, read, map and write local files.

*Opening.* Only regular files are opened, so that no open or read waits for another process. A file of an
array may be a symbolic link, since some tools store all files that way. What it leads to must be a regular
file, and none of /proc or /sys: an array from elsewhere could have a link to the environment of this process.
In a job of the service it must also lie below the same root as the link (`confine`).

*Reading.* Large reads choose the fastest way. Data that is in the page cache is read from there: on a few
cores by copying from a mapping, on many by preadv, since each unmapping interrupts all cores. Other data can
be read past the page cache by direct I/O, because filling the page cache can take more processor time than
the disk needs to deliver the data. In a virtual machine with an H200 and 16 cores, twelve threads copied 26
GB/s from mappings into pinned memory while a GPU copied from there. preadv alone gave 41 GB/s.

*Writing.* Files are written by direct I/O where the memory and the file system allow it. It takes less
processor time than writes to the page cache, and leaves the page cache to other data.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import sys
import threading
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from oocgemm.planning.layout import SHORT_LINE
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array
from oocgemm.system.resources import memory_limit

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
    from oocgemm.system.installed import compiled

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


# Direct I/O requires that memory addresses, file offsets and lengths are multiples of the sector size.
SECTOR = 512
# Buffers and files that this package creates are aligned to whole pages, which are whole sectors too.
PAGE = 4096
# Reads of at least this many bytes first check whether the page cache contains the data, to choose the
# fastest way to read it. Smaller reads use preadv, because the check would take too long.
MIN_DIRECT = 1 << 20
# With more cores than this, data in the page cache is read by preadv instead of through a mapping.
MAPPING_CORES = 4
# Linux accepts at most this many buffers per call of preadv or pwritev (IOV_MAX).
SEGMENTS = 1024
# Rows of a chunk that are shorter than this many bytes, and are not adjacent in their destination, are copied
# from a mapping of the file. preadv would be slower, because each row would be a separate buffer.
MIN_SEGMENT = SHORT_LINE

# RWF_DONTCACHE, a flag of preadv2 (Linux 6.14): after the read, the pages that it loaded are removed from the
# page cache. Python has no constant for it.
_RWF_DONTCACHE = 0x80 if sys.platform == "linux" else 0
# MADV_POPULATE_READ (Linux 5.14) faults in all pages of a mapping. Python has no constant for it. For
# mappings of fewer than MIN_POPULATED bytes, page faults during the copy are as fast.
POPULATE: int | None = 22 if sys.platform == "linux" else None
MIN_POPULATED = 8 << 20
WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
# MADV_DONTNEED is used on Linux only. On other systems it may discard writes to a mapped file.
DONT_NEED: int | None = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
# The number of pages that `resident` checks to estimate what share of a range of addresses is in memory.
SAMPLED_PAGES = 8
# The open(2) flag for direct I/O; 0 on systems without it, so that files are then opened normally.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Reads of an array may fill the page cache if its files take at most this share of the host memory that the
# process may use. The pages of a larger array would evict each other before they are read again.
MAX_CACHED_SHARE = 0.5
_of_thread = threading.local()


def scratch(size: int, use: str = "scratch") -> Array:
    """Return the scratch buffer of the calling thread for a use: a page-aligned array of `size` bytes.

    Every call in the same thread for the same use returns the same memory, so the content is valid only until
    the next call. Raises `MemoryError`.
    """
    buffer: Array | None = getattr(_of_thread, use, None)
    if buffer is None or buffer.size < size:
        buffer = None
        setattr(_of_thread, use, None)  # free the old buffer before the new one is allocated
        rounded = -(-max(size, 1) // PAGE) * PAGE
        try:
            block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {format_size(rounded)} of host memory for a chunk: "
                "pass a smaller --host-memory (or --memory)"
            ) from error
        buffer = np.frombuffer(block, np.uint8)
        setattr(_of_thread, use, buffer)
    return buffer[:size]


class OpenFile:
    """A local file that is open for reading. `size` is its length in bytes when it was opened."""

    def __init__(self, path: str | Path, opener: Opener | None = None) -> None:
        """Open a regular file, by `opener` if given. Raises `FileNotFoundError` or another `OSError`."""
        self.path, self._opener = path, opener
        if opener is not None:
            self.descriptor, self.size = opener.open(path)
        else:
            self.descriptor = open_regular(path)
            self.size = os.fstat(self.descriptor).st_size

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        (self._opener or os).close(self.descriptor)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.path)  # calls on a file descriptor raise errors without a file name

    def mapped(self, offset: int, length: int) -> Array:
        """Return `length` bytes of the file as an array that is mapped from it, not copied.

        The mapping exists until the array is deleted. All pages of a large mapping are requested at once,
        because callers read the whole array. Raises `EOFError` if the file is too short. If the file is
        truncated later, an access to the array kills the process (SIGBUS).
        """
        view, before = self._map(offset, length)
        if length >= MIN_DIRECT:
            advise(view, WILL_NEED)
        return np.frombuffer(view, np.uint8, length, before)

    def cached(self, offsets: list[int]) -> bool:
        """Return whether the page cache contains the pages at all these offsets of the file.

        The offsets are in ascending order. The check loads no page. Where the system cannot tell, the answer
        is True.
        """
        if _mincore is None or offsets[-1] >= self.size:
            return True
        view, before = self._map(offsets[0], offsets[-1] + 1 - offsets[0])
        page, start = (ctypes.c_ubyte * 1)(), _address(view) + before - offsets[0]
        for offset in offsets:
            place = (start + offset) // mmap.PAGESIZE * mmap.PAGESIZE
            if _mincore(place, 1, ctypes.addressof(page)) or not page[0] & 1:
                return False
        return True

    def _map(self, offset: int, length: int) -> tuple[mmap.mmap, int]:
        """Map a part of the file into memory. Return the mapping and the position of the part in it.

        A mapping begins at a multiple of the page size, so it may begin before the part.
        """
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            view = mmap.mmap(self.descriptor, offset + length - start, prot=mmap.PROT_READ, offset=start)
        except ValueError as error:  # mmap refuses a range beyond the end of the file
            raise EOFError(f"ends before byte {offset + length}") from error
        return view, offset - start

    def read(self, offset: int, out: Array, *, past_cache: bool) -> None:
        """Fill `out` with the bytes of the file from `offset` on. Each row of `out` must be contiguous.

        With `past_cache`, a read of at least `MIN_DIRECT` bytes adds no data to the page cache, if the system
        can avoid it: sector-aligned rows are read by direct I/O, and for other rows the system removes the
        pages after the read. Raises `EOFError` if the file is too short.
        """
        done = flags = 0
        large = MIN_DIRECT <= out.nbytes <= self.size - offset
        maps = not many_cores()
        if large and (past_cache or maps):
            view, before = self._map(offset, out.nbytes)
            found = resident(_address(view), len(view))
            past_cache = past_cache and not found
            if found and maps:
                if out.nbytes >= MIN_POPULATED:
                    advise(view, POPULATE)
                stored = np.frombuffer(view, np.uint8, out.nbytes, before)
                np.copyto(out.view(np.uint8), stored.reshape(out.shape[0], -1))
                return
        rows = segments(out)
        if large and not maps:
            # Another thread reads the next bytes. If this one read them ahead, both would have to wait.
            Opener.without_readahead(self.descriptor)
        if past_cache and large:
            flags = _RWF_DONTCACHE
            direct = _sectors(rows) if O_DIRECT and offset % SECTOR == 0 else []
            if direct:
                done = self._read_past_cache(direct, offset)
        try:
            done = _fill(self.descriptor, rows, offset, done, flags)
        except OSError:
            if not flags:
                raise
            done = _fill(self.descriptor, rows, offset, done)
        if done < out.nbytes:
            raise EOFError(f"ends {out.nbytes - done} bytes too early")

    def _read_past_cache(self, rows: list[Array], offset: int) -> int:
        """Fill rows by direct I/O. Return the number of bytes read, or 0 after any error.

        The caller reads the remaining bytes through the page cache. An error that is not caused by direct I/O
        occurs again there, and is raised.
        """
        with contextlib.suppress(OSError):
            descriptor = open_regular(self.path, os.O_RDONLY | O_DIRECT)
            try:
                return _fill(descriptor, rows, offset)
            finally:
                os.close(descriptor)
        return 0


def many_cores() -> bool:
    """Return whether the process may use more than `MAPPING_CORES` cores."""
    return len(os.sched_getaffinity(0)) > MAPPING_CORES


def advise(view: mmap.mmap, advice: int | None, start: int = 0, length: int | None = None) -> None:
    """Call madvise for a page-aligned part of a mapping. Do nothing if the system does not have this advice.

    Unlike `mmap.madvise`, this releases the GIL, since faulting in many pages takes milliseconds.
    """
    if _madvise is not None and advice is not None:
        _madvise(_address(view) + start, len(view) - start if length is None else length, advice)


def resident(address: int, size: int) -> bool:
    """Estimate whether at least half of the pages in a range of addresses are in memory.

    Pages of a mapped file are in memory if the page cache contains them. The function checks `SAMPLED_PAGES`
    pages of the range, and loads none. Where the system cannot tell, the answer is True.
    """
    if _mincore is None:
        return True
    flags = (ctypes.c_ubyte * SAMPLED_PAGES)()
    address_of_flags = ctypes.addressof(flags)
    step = size // SAMPLED_PAGES // mmap.PAGESIZE * mmap.PAGESIZE
    for number in range(SAMPLED_PAGES):
        if _mincore(address + number * step, 1, address_of_flags + number):
            return True
    return 2 * sum(flag & 1 for flag in flags) >= SAMPLED_PAGES


def worth_caching(size: int) -> bool:
    """Return whether files of `size` bytes are small enough to stay in the page cache for a second read."""
    return size <= MAX_CACHED_SHARE * memory_limit()


def folder_mtime(folder: str | Path) -> int | None:
    """Return the modification time of a folder in nanoseconds; None for a missing or unreadable folder.

    The time changes when a file in the folder is created, deleted or renamed.
    """
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def padded(size: int) -> int:
    """Round `size` up to whole pages. They consist of whole sectors, as direct I/O requires."""
    return -(-size // PAGE) * PAGE


def sector_aligned(data: Array) -> bool:
    """Return whether direct I/O can write all rows of an array without a copy to aligned memory."""
    if data.size == 0 or data.strides[-1] != data.itemsize:
        return False
    direct = _sectors(segments(data))
    return sum(row.nbytes for row in direct) == data.nbytes


def segments(data: Array) -> list[Array]:
    """Return the rows of an array as arrays of bytes. If the whole array is contiguous, return one array."""
    if data.flags.c_contiguous:
        return [data.reshape(-1).view(np.uint8)]
    return list(data.view(np.uint8))


def _sectors(rows: list[Array]) -> list[Array]:
    """Return the rows that direct I/O can fill or write; [] if it can use none.

    `rows` have equal lengths and equal distances in memory. In memory, direct I/O needs rows that begin and
    end at multiples of `SECTOR`. A single row is cut to whole sectors.
    """
    if rows[0].ctypes.data % SECTOR:
        return []
    if len(rows) == 1:
        whole = rows[0].nbytes // SECTOR * SECTOR
        return [rows[0][:whole]] if whole else []
    stride = rows[1].ctypes.data - rows[0].ctypes.data
    return rows if stride % SECTOR == 0 and rows[0].nbytes % SECTOR == 0 else []


def rest_of(rows: list[Array], done: int) -> list[Any]:
    """Return the buffers for the next call of preadv or pwritev. Earlier calls transferred `done` bytes.

    All rows have the same length. Rows that were transferred are left out, and so is the transferred part of
    the next row. At most `SEGMENTS` buffers are returned.
    """
    whole, part = divmod(done, rows[0].nbytes)
    rest = rows[whole : whole + SEGMENTS]
    return [rest[0][part:], *rest[1:]] if part else rest


def _fill(descriptor: int, rows: list[Array], offset: int, done: int = 0, flags: int = 0) -> int:
    """Fill rows of equal length with the bytes of a file from `offset` on.

    The first `done` bytes of the rows are filled already. Return the number of filled bytes, including these.
    It is less than the size of all rows only if the file is too short.
    """
    total = len(rows) * rows[0].nbytes
    while done < total:
        got = os.preadv(descriptor, rest_of(rows, done), offset + done, flags)
        if got == 0:
            break
        done += got
    return done


def read_fully(descriptor: int, buffer: Any, offset: int) -> None:
    """Fill an array of bytes from an offset of a file. Raises `EOFError` if the file is too short."""
    done = 0
    while done < buffer.nbytes:
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not got:
            raise EOFError(f"ends before byte {offset + buffer.nbytes}")
        done += got


def write_fully(descriptor: int, buffer: Any, offset: int) -> None:
    """Write an array of bytes at an offset of a file."""
    done = 0
    while done < buffer.nbytes:
        done += os.pwritev(descriptor, [buffer[done:]], offset + done)


def _address(view: mmap.mmap) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _function(library: type[ctypes.CDLL], name: str, *types: Any) -> Any:
    """Return a function of the C library with these argument types; None if the system does not have it."""
    try:
        found = getattr(library(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = types
    return found


# PyDLL calls a function without releasing the GIL. mincore takes a microsecond, less than releasing the GIL.
_mincore = _function(ctypes.PyDLL, "mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_madvise = _function(ctypes.CDLL, "madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def publish(path: Path, data: Array, size: int, root: Path) -> None:
    """Create or replace the file at `path` with the first `size` bytes of the rows of `data`, atomically.

    The file is first written under a temporary name, and then renamed. It is written past the page cache if
    `data` is sector-aligned and padded to whole sectors. Missing folders between `root` and the file are
    created. Raises `FileNotFoundError` if `root` does not exist: who removed it does not want the file.
    """
    _make_folder(path.parent, root)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(temporary, data, size)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def overwrite(path: Path, data: Array) -> bool:
    """Overwrite a file of the size of `data` in place, by direct I/O. Return whether that was possible.

    It keeps its blocks on the disk. To allocate others and free these can take as long as the write itself.
    It is not possible if `data` is not sector-aligned, or the file is not regular or has several names.
    """
    if not O_DIRECT or not sector_aligned(data):
        return False
    with contextlib.suppress(OSError):  # the caller's own way to write may raise it again
        # O_NONBLOCK: not to wait for the reader of a named pipe
        descriptor = os.open(path, os.O_WRONLY | O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if status.st_size != data.nbytes or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
                return False
            _put(descriptor, data)
            return True
        finally:
            os.close(descriptor)
    return False


def _make_folder(folder: Path, root: Path) -> None:
    """Create a folder and its parents below `root`. Raises `FileNotFoundError` if there is no `root`."""
    if folder == root:
        return
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        if folder.parent == root:
            raise
        _make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)


def _write(path: Path, data: Array, size: int) -> None:
    """Write the first `size` bytes of the rows of `data` to a new file.

    Use direct I/O if `data` is sector-aligned and the file system supports it.
    """
    past_cache = O_DIRECT if sector_aligned(data) else 0
    for extra in (past_cache, 0) if past_cache else (0,):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | extra, 0o666)
        except OSError as error:
            if extra and error.errno == errno.EINVAL:
                continue
            raise
        try:
            _put(descriptor, data)
            if size != data.nbytes:
                os.ftruncate(descriptor, size)
            return
        except OSError as error:
            if not (extra and error.errno == errno.EINVAL):
                raise
        finally:
            os.close(descriptor)


def _put(descriptor: int, data: Array) -> None:
    rows, done = segments(data), 0
    while done < data.nbytes:
        done += os.pwritev(descriptor, rest_of(rows, done), done)
