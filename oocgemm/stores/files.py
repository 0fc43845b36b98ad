"""Open, read, map and write local files.

*Opening.* Only regular files are opened, so that no open or read waits for another process. A file of an
array may be a symbolic link, since some tools store all files that way. The target of a link must be a
regular file, and must not be in /proc or /sys: an array from elsewhere could have a link to the environment
of this process. In a job of the service, the target must also be below the same root as the link (`confine`).

*Reading.* Large reads choose the fastest way. Data that is in the page cache is read from there: on a few
cores by copying from a mapping, on many by preadv, since each unmapping interrupts all cores. Other data can
be read past the page cache by direct I/O, because filling the page cache can take more processor time than
the disk needs to deliver the data. In a virtual machine with an H200 and 16 cores, twelve threads copied 26
GB/s from mappings into pinned memory while a GPU copied from that memory. With preadv, they copied 41 GB/s.

*Page cache.* Compiled code reads uncompressed chunks from the page cache, without the GIL: one call reads a
block of any number of chunks (`CachedChunks`). The call skips chunks that are not in the page cache, and
files that do not have the expected size. The caller must read these.

*Writing.* Files are written by direct I/O where the memory and the file system allow it. Direct I/O takes
less processor time than writes to the page cache, and leaves the page cache to other data. Files are flushed
(`sync_files`), and fingerprinted by size and modification time, to notice later changes.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import stat
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from oocgemm.planning.layout import SHORT_LINE
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array
from oocgemm.system.installed import compiled
from oocgemm.system.resources import RECENT, available_memory, memory_limit

# A call that takes more seconds than this is slow. After this many slow calls in a row, the GIL is released.
SLOW, MAX_SLOW = 0.2e-3, 8
# The open(2) flags of every file. O_NONBLOCK has no effect on regular files, and opens a named pipe at once.
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
# The mount points of file systems whose files the kernel generates.
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
    """Raised for an existing file that this module refuses to open. The module docstring says why."""


def confine(roots: Iterable[str]) -> None:
    """From now on, refuse to open any link below one of these folders that leads out of the folder."""
    _roots[:] = roots
    if (library := compiled()) is not None:
        library.ooc_refuse_links(bool(_roots))  # compiled code then leaves links to this module


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return its descriptor. Raises `RefusedFileError`, or another `OSError`."""
    try:
        mode = (0o666,) if flags & os.O_CREAT else ()
        descriptor = os.open(path, flags | FLAGS, *mode)
    except OSError as error:
        raise _error(error.errno or 0, path) from None
    status = os.fstat(descriptor)
    _check(descriptor, status.st_mode, status.st_dev, path)
    return descriptor


def check_regular(path: str | Path) -> None:
    """Raise `RefusedFileError` or `IsADirectoryError` if a path must not be passed to another library."""
    try:
        os.close(open_regular(path))
    except (RefusedFileError, IsADirectoryError):
        raise
    except OSError:
        pass  # the other library's error says what is wrong


def read_regular(path: str | Path) -> bytes:
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
        (_library or os).posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    @staticmethod
    def close(descriptor: int) -> None:
        (_library or os).close(descriptor)


def _check(descriptor: int, mode: int, device: int, path: str | Path) -> None:
    """If an open file may not be read, close the file and raise `RefusedFileError` or `IsADirectoryError`."""
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
    if number == errno.ENXIO:  # the path is a socket, or a named pipe that is opened for writing
        return RefusedFileError(errno.EACCES, "it is a socket, not a regular file: replace it", str(path))
    if number == errno.ENOENT and os.path.islink(path):  # which is not a missing chunk
        why = f"it is a symbolic link to {os.readlink(path)}, which does not exist: fetch that file"
        return RefusedFileError(errno.EACCES, why, str(path))
    return OSError(number, os.strerror(number), str(path))


def _refuse(descriptor: int, path: str | Path, why: str) -> None:
    os.close(descriptor)
    raise RefusedFileError(errno.EACCES, why, str(path))


@cache
def _pseudo_devices() -> frozenset[int]:
    """Return the device numbers of those file systems of `PSEUDO` that are mounted."""
    found = {os.stat(place).st_dev for place in PSEUDO if os.path.ismount(place)}
    return frozenset(found)


# The flags and the structure of statx(2), from linux/stat.h. The structure is the same on all architectures.
_EMPTY_PATH, _BASIC = 0x1000, 0x7FF


class _Status(ctypes.Structure):
    """`struct statx`. Only the fields that are used have names."""

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
# The number of pages that `resident` checks to estimate whether a range of addresses is in memory.
SAMPLED_PAGES = 8
# The open(2) flag for direct I/O; 0 on systems without it, so that files are then opened normally.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Reads of an array may fill the page cache if its files take at most this share of the host memory that the
# process may use. The pages of a larger array would evict each other before they are read again.
MAX_CACHED_SHARE = 0.5
_of_thread = threading.local()


def scratch(size: int, use: str = "scratch") -> Array:
    """Return `size` page-aligned bytes. The thread's next call with this `use` returns the same memory."""
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
        """Return `length` bytes of the file as a mapped array, without a copy.

        The mapping exists until the array is deleted. All pages of a large mapping are requested at once,
        because callers read the whole array. Raises `EOFError` if the file is too short. If the file is
        truncated later, an access to the array kills the process (SIGBUS).
        """
        view, before = self._map(offset, length)
        if length >= MIN_DIRECT:
            advise(view, WILL_NEED)
        return np.frombuffer(view, np.uint8, length, before)

    def cached(self, offsets: list[int]) -> bool:
        """Return whether the page cache has the pages at all ascending `offsets`; True if that is unknown."""
        if _mincore is None or offsets[-1] >= self.size:
            return True
        view, before = self._map(offsets[0], offsets[-1] + 1 - offsets[0])
        start = _address(view) + before - offsets[0]
        return all(_is_resident(start + offset, on_error=False) for offset in offsets)

    def _map(self, offset: int, length: int) -> tuple[mmap.mmap, int]:
        """Map a part of the file. Return the mapping, which begins at a page, and the part's offset there."""
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
        flags, direct = 0, list[Array]()
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
            # Another thread reads the next bytes. Readahead of the same bytes would make both threads wait.
            Opener.without_readahead(self.descriptor)
        if past_cache and large:
            flags = _RWF_DONTCACHE
            direct = _sectors(rows) if O_DIRECT and offset % SECTOR == 0 else []
        done = self._read_past_cache(direct, offset) if direct else 0
        try:
            done = _fill(self.descriptor, rows, offset, done, flags)
        except OSError:
            if not flags:
                raise
            done = _fill(self.descriptor, rows, offset, done)
        if done < out.nbytes:
            raise EOFError(f"ends {out.nbytes - done} bytes too early")

    def _read_past_cache(self, rows: list[Array], offset: int) -> int:
        """Fill rows by direct I/O. Return the number of bytes read."""
        # After an error, the caller reads everything through the page cache. A lasting error recurs there.
        with suppress(OSError), os.fdopen(open_regular(self.path, os.O_RDONLY | O_DIRECT), "rb", 0) as file:
            return _fill(file.fileno(), rows, offset)
        return 0


def many_cores() -> bool:
    return len(os.sched_getaffinity(0)) > MAPPING_CORES


def advise(view: mmap.mmap, advice: int | None, start: int = 0, length: int | None = None) -> None:
    """Call madvise for a page-aligned part of a mapping, if the system has this advice. Releases the GIL."""
    if _madvise is not None and advice is not None:
        _madvise(_address(view) + start, len(view) - start if length is None else length, advice)


def resident(address: int, size: int) -> bool:
    """Estimate, by a sample, whether at least half of the pages in a range of addresses are in memory."""
    step = size // SAMPLED_PAGES // mmap.PAGESIZE * mmap.PAGESIZE
    found = [_is_resident(address + number * step, on_error=True) for number in range(SAMPLED_PAGES)]
    return 2 * sum(found) >= SAMPLED_PAGES


def _is_resident(address: int, *, on_error: bool) -> bool:
    """Return whether the page at an address is in memory; `on_error` if mincore fails."""
    if _mincore is None:
        return True
    flag = ctypes.c_ubyte()
    failed = _mincore(address // mmap.PAGESIZE * mmap.PAGESIZE, 1, ctypes.addressof(flag))
    return on_error if failed else bool(flag.value & 1)


def worth_caching(size: int) -> bool:
    """Return whether files of `size` bytes are small enough to stay in the page cache for a second read."""
    recent = MAX_CACHED_SHARE * available_memory(RECENT)
    return size <= recent or size <= MAX_CACHED_SHARE * memory_limit()


def folder_mtime(folder: str | Path) -> int | None:
    """Return the modification time of a folder in nanoseconds; None if it is missing or unreadable."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def padded(size: int) -> int:
    """Return `size` rounded up to whole pages. Pages consist of whole sectors, as direct I/O requires."""
    return -(-size // PAGE) * PAGE


def sector_aligned(data: Array) -> bool:
    """Return whether direct I/O can write all rows of an array without a copy to aligned memory."""
    if data.size == 0 or data.strides[-1] != data.itemsize:
        return False
    direct = _sectors(segments(data))
    return sum(row.nbytes for row in direct) == data.nbytes


def segments(data: Array) -> list[Array]:
    """Return the rows of an array as arrays of bytes, or the whole array as one if it is contiguous."""
    if data.flags.c_contiguous:
        return [data.reshape(-1).view(np.uint8)]
    return list(data.view(np.uint8))


def _sectors(rows: list[Array]) -> list[Array]:
    """Return the rows that direct I/O can transfer: all, or none. A single row is cut to whole sectors."""
    if rows[0].ctypes.data % SECTOR:
        return []
    if len(rows) == 1:
        whole = rows[0].nbytes // SECTOR * SECTOR
        return [rows[0][:whole]] if whole else []
    stride = rows[1].ctypes.data - rows[0].ctypes.data
    return rows if stride % SECTOR == 0 and rows[0].nbytes % SECTOR == 0 else []


def rest_of(rows: list[Array], done: int) -> list[Any]:
    """Return the buffers for the next preadv or pwritev, after `done` bytes. All rows have equal length."""
    whole, part = divmod(done, rows[0].nbytes)
    rest = rows[whole : whole + SEGMENTS]
    return [rest[0][part:], *rest[1:]] if part else rest


def _fill(descriptor: int, rows: list[Array], offset: int, done: int = 0, flags: int = 0) -> int:
    """Fill rows of equal length from a file, after the first `done` bytes. Return the filled bytes."""
    total = len(rows) * rows[0].nbytes
    while done < total:
        got = os.preadv(descriptor, rest_of(rows, done), offset + done, flags)
        if got == 0:
            break
        done += got
    return done


def read_fully(descriptor: int, buffer: Any, offset: int) -> None:
    """Fill an array of bytes from an offset of a file. Raises `EOFError` if the file is too short."""
    if buffer.nbytes and _fill(descriptor, [buffer], offset) < buffer.nbytes:
        raise EOFError(f"ends before byte {offset + buffer.nbytes}")


def write_fully(descriptor: int, data: Array, offset: int = 0) -> None:
    """Write the bytes of an array at an offset of a file. Each row of the array must be contiguous."""
    rows, done = segments(data), 0
    while done < data.nbytes:
        done += os.pwritev(descriptor, rest_of(rows, done), offset + done)


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

    Missing folders between `root` and the file are created. Raises `FileNotFoundError` if `root` does not
    exist: a user who deleted that folder does not want the file.
    """
    _make_folder(path.parent, root)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(temporary, data, size)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def overwrite(path: Path, data: Array) -> bool:
    """Overwrite a file in place by direct I/O, if it has the size of `data`. Return whether that worked."""
    if not O_DIRECT or not sector_aligned(data):
        return False
    with suppress(OSError):  # the caller then writes in another way; a lasting error recurs there
        # O_NONBLOCK: do not wait until another process opens a named pipe for reading.
        descriptor = os.open(path, os.O_WRONLY | O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if status.st_size != data.nbytes or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
                return False
            write_fully(descriptor, data)
            return True
        finally:
            os.close(descriptor)
    return False


def _make_folder(folder: Path, root: Path) -> None:
    """Create a folder and its parents below `root`. Raises `FileNotFoundError` if `root` is missing."""
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
    """Write the first `size` bytes of the rows of `data` to a new file, by direct I/O if possible."""
    past_cache = O_DIRECT if sector_aligned(data) else 0
    for extra in (past_cache, 0) if past_cache else (0,):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | extra, 0o666)
            try:
                write_fully(descriptor, data)
                if size != data.nbytes:
                    os.ftruncate(descriptor, size)
                return
            finally:
                os.close(descriptor)
        except OSError as error:  # EINVAL: the file system has no direct I/O
            if not extra or error.errno != errno.EINVAL:
                raise


# The fingerprint of a zarr array covers at most this many chunk files. If there are more, it covers a sample
# of evenly spread files, since reading the status of every file would take too long.
MAX_FINGERPRINTED = 10_000
# More than MIN_SYNCED files and folders are flushed by up to MAX_SYNCED threads. To flush fewer takes less
# time than to start the threads.
MIN_SYNCED, MAX_SYNCED = 12, 16


def sync_files(root: Path, names: Collection[str], *, contents: bool = True) -> None:
    """Flush files and their folders up to `root`, or without `contents` only the folders. Raises `OSError`.

    The `names` are relative to `root`.
    """
    folders = {root}
    for parent in {(root / name).parent for name in names}:
        folders |= {folder for folder in (parent, *parent.parents) if root in folder.parents}
    paths = [*(root / name for name in names if contents), *sorted(folders)]

    def sync(path: Path) -> None:
        with suppress(FileNotFoundError):  # zarr need not store a chunk of fill values
            sync_path(path)

    # Flush many files at the same time. The system then merges the requests to the disk to write out its
    # cache. Each such request takes milliseconds, and delays writes of other blocks.
    if len(paths) > MIN_SYNCED:
        # If the system cannot start a thread, the calling thread flushes all files.
        with suppress(RuntimeError), ThreadPoolExecutor(MAX_SYNCED, "oocgemm-sync") as pool:
            deque(pool.map(sync, paths), maxlen=0)  # raises the first error
            return
    for path in paths:
        sync(path)


def sync_path(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder. Raises an `OSError` with the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def fingerprint_of(paths: Iterable[str | Path]) -> str:
    """Return a digest of the sizes and modification times of files, and of which files are missing."""
    return fingerprints(paths)["content"]


def fingerprints(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return digests of sizes and modification times ("content"), and of inode change times ("changes").

    A program can write to a file and restore its modification time, but it cannot set the ctime, which also
    changes on chmod. So if only "changes" differs, the user must decide whether the content is the same.
    """
    content, changes = list[bytes](), list[bytes]()
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:  # "-" stands for a missing or inaccessible file
            content.append(b"-")
            changes.append(b"-")
        else:
            content.append(b"%d %d;" % (status.st_size, status.st_mtime_ns))
            changes.append(b"%d;" % status.st_ctime_ns)
    return _digests(b"".join(content), b"".join(changes))


def _digests(content: bytes, changes: bytes) -> dict[str, str]:
    texts = {"content": content, "changes": changes}
    return {name: hashlib.sha256(text).hexdigest()[:32] for name, text in texts.items()}


# `OOC_STATUS_BYTES` of `kernels/host/chunks.h`.
STATUS_BYTES = 48
# Each thread reads the status of at least this many files. To read as many takes 1 to 2 ms.
MIN_FILES = 512


def chunk_fingerprints(
    folder: Path, key: Callable[[tuple[int, int]], str], grid: tuple[int, int]
) -> dict[str, str]:
    """Return the `fingerprints` of the files of all chunks, or of a sample. `key` returns a file's name."""
    library, parts, count = compiled(), name_parts(key), grid[0] * grid[1]
    chosen = range(0, count, max(1, -(-count // MAX_FINGERPRINTED)))
    if library is None or parts is None:
        return fingerprints(f"{folder}/{key(divmod(number, grid[1]))}" for number in chosen)
    path, separator = os.fsencode(f"{folder}/{parts[0]}"), parts[1].encode()

    def statuses(some: range) -> tuple[bytes, bytes]:
        content, changes = (ctypes.create_string_buffer(STATUS_BYTES * len(some) + 1) for _ in range(2))
        numbers = map(ctypes.c_int64, (some.start, some.stop, some.step, grid[1]))
        library.ooc_stat_chunks(path, separator, *numbers, content, changes)
        return content.value, changes.value

    threads = min(len(os.sched_getaffinity(0)), len(chosen) // MIN_FILES)
    if threads > 1:
        each = -(-len(chosen) // threads)
        # If the system cannot start a thread, the calling thread does all the work.
        with suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:
            found = pool.map(statuses, (chosen[at : at + each] for at in range(0, len(chosen), each)))
            content, changes = (b"".join(texts) for texts in zip(*found, strict=True))
            return _digests(content, changes)
    return _digests(*statuses(chosen))


# About this many places are checked to estimate whether the page cache contains a block or a file.
SAMPLES = 8
# Rows of a chunk that are not adjacent in the block are read straight into the block, many by one system
# call, if each has at least this many bytes. Shorter rows are read into a buffer first. In a virtual machine
# with an H100 and 16 cores, 12 threads read rows of 1 KiB at 55 GB/s without the buffer, and at 42 GB/s with
# it. On two Zen 5 cores, a thread read such rows at 5 GB/s without the buffer, and at 8 GB/s with it, and
# rows of 16 KiB at 7 and 8 GB/s.
MIN_SCATTERED_ON_MANY_CORES, MIN_SCATTERED = 512, 32 << 10
_Int = ctypes.c_int64


class _Chunks(ctypes.Structure):
    """`struct ooc_chunks` of `kernels/host/chunks.h`."""

    _fields_ = (
        *(("path", ctypes.c_char_p), ("separator", ctypes.c_char_p)),
        *((name, _Int) for name in ("height", "width", "bytes", "offset")),
        *(("offsets", ctypes.c_void_p), ("across", _Int), ("min_scattered", _Int)),
    )


class _Area(ctypes.Structure):
    """`struct ooc_area` of `kernels/host/chunks.h`."""

    _fields_ = (
        *((name, _Int) for name in ("top", "bottom", "left", "right")),
        *(("to", ctypes.c_void_p), ("pitch", _Int)),
    )


class CachedChunks:
    """The chunks of a matrix that compiled code can read: their stored bytes are their elements, row by row.

    Attributes:
        address: of the `struct ooc_chunks`, for compiled code that reads blocks itself.
        incomplete: whether compiled code could not read a block, for example because a chunk is missing.
            Further blocks are likely to have such chunks, too. So Python reads these blocks, with `read`.
    """

    def __init__(
        self,
        path: str | Path,
        separator: str | None,
        chunk: tuple[int, int],
        itemsize: int,
        size: int,
        *,
        offset: int = 0,
        offsets: Array | None = None,
    ) -> None:
        """Describe where the chunks are.

        Args:
            path: the path of the single file with all chunks; or, with `separator`, the beginning of the path
                of each chunk's file, which ends with the chunk's row and column in the grid.
            separator: the text between this row and this column; None for a single file.
            chunk, itemsize: rows and columns of a chunk, and the bytes of an element.
            size: the size of a chunk's file in bytes, or the minimum size of the single file.
            offset: the first byte of a chunk in its file.
            offsets: the first byte of each chunk of the grid in the single file; negative if it is missing.
        """
        self._chunk, self.itemsize = chunk, itemsize
        across = 0 if offsets is None else offsets.shape[1]
        self._offsets = None if offsets is None else np.ascontiguousarray(offsets, np.int64)
        place = None if self._offsets is None else self._offsets.ctypes.data
        self._chunks = _Chunks(
            *(os.fsencode(path), None if separator is None else separator.encode()),
            *(chunk[0], chunk[1] * itemsize, size, offset, place, across),
            MIN_SCATTERED_ON_MANY_CORES if many_cores() else MIN_SCATTERED,
        )
        self.address = ctypes.addressof(self._chunks)
        self.incomplete = False

    def read(self, rows: Range, cols: Range, out: Array) -> list[int] | None:
        """Read a block. Return the numbers, row by row, of unread chunks; None if no chunk was read."""
        library = compiled()
        if library is None or out.strides[1] != self.itemsize or not out.size:
            return None
        (top, bottom), (left, right), (height, width), size = rows, cols, self._chunk, self.itemsize
        area = _Area(top, bottom, left * size, right * size, out.ctypes.data, out.strides[0])
        count = (-(-bottom // height) - top // height) * (-(-right // width) - left // width)
        failed = (_Int * count)()
        found = library.ooc_read_chunks(ctypes.byref(self._chunks), ctypes.byref(area), failed)
        return failed[:found]


class CachedBlock(NamedTuple):
    """A block that begins at `row` and `column` of a matrix. The page cache seems to contain its chunks."""

    chunks: CachedChunks
    row: int
    column: int

    @property
    def left(self) -> int:
        """The first byte of the block in each of its rows."""
        return self.column * self.chunks.itemsize


def in_page_cache(path: str | Path, offsets: Sequence[int]) -> bool:
    """Return whether the page cache seems to contain a file. Checks some of the ascending `offsets`."""
    chosen = offsets[:: max(1, len(offsets) // SAMPLES)]
    try:
        with OpenFile(path) as file:
            return file.cached(list(chosen))
    except (OSError, EOFError):
        return False  # a read of the file raises an error that says what is wrong


def chunk_files(
    root: Path, key: Callable[[tuple[int, int]], str], chunk: tuple[int, int], itemsize: int
) -> CachedChunks | None:
    """Return the chunks of a zarr array whose files `key` names; None if their naming is not supported."""
    parts, size = name_parts(key), chunk[0] * chunk[1] * itemsize
    return parts and CachedChunks(f"{root}/{parts[0]}", parts[1], chunk, itemsize, size)


def name_parts(key: Callable[[tuple[int, int]], str]) -> tuple[str, str] | None:
    """Return the texts before and between a chunk's row and column in its file name; None for other names."""
    before, _, rest = key((1, 2)).partition("1")
    separator, _, after = rest.partition("2")
    alike = not after and key((30, 456)) == f"{before}30{separator}456"
    return (before, separator) if alike else None
