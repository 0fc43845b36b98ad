"""Read rows of local files into given memory, map files, and publish new files atomically.

*What the page cache has* is mapped and copied. On 16 cores, twelve reader threads beside copies to a GPU read
44 GB/s when the pages of 32 MiB are mapped in one call, 38 GB/s with a page fault for every few pages, and 35
GB/s when rows are read straight into their destination. One core of another Xeon copied 7.9 GB/s and read 4.2
GB/s; one of an EPYC, 3.9 and 4.6.

*What the page cache lacks*, and need not keep, bypasses it. To fill the cache can take more processor time
than the disk takes time.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array
from oocgemm.system.memory import memory_limit

# Direct I/O takes addresses, offsets and lengths that are multiples of a sector. Ours are multiples of a
# page.
SECTOR = 512
PAGE = 4096
# Smaller reads do not repay the system calls that choose a path.
MIN_DIRECT = 1 << 20
# Buffers per preadv call, and the row length in bytes below which a mapped copy is faster.
SEGMENTS = 1024
MIN_SEGMENT = 4096

# Drop the pages after the read (Linux 6.14). Python has no constant for it.
_RWF_DONTCACHE = 0x80 if sys.platform == "linux" else 0
# The advice to fault in all pages of a memory map (Linux 5.14). Python has no constant for it. Maps of
# fewer than MIN_POPULATED bytes are faulted in as fast by reading them.
POPULATE: int | None = 22 if sys.platform == "linux" else None
MIN_POPULATED = 8 << 20
WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
# On Linux only: elsewhere it may discard writes to a map.
DONT_NEED: int | None = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
SAMPLED_PAGES = 8
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Share of the process's memory limit that an array's files may have to be kept in the page cache.
MAX_CACHED_SHARE = 0.5
_of_thread = threading.local()


def scratch(size: int) -> Array:
    """Return `size` page-aligned bytes that belong to the calling thread, and are reused by its next call.

    Raises `MemoryError`.
    """
    buffer: Array | None = getattr(_of_thread, "scratch", None)
    if buffer is None or buffer.size < size:
        _of_thread.scratch = buffer = None  # before the allocation, so that both never exist together
        rounded = -(-max(size, 1) // PAGE) * PAGE
        try:
            block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {format_size(rounded)} of host memory for a chunk: "
                "pass a smaller --host-memory"
            ) from error
        _of_thread.scratch = buffer = np.frombuffer(block, np.uint8)
    return buffer[:size]


class OpenFile:
    """A file of `size` bytes, open for reading. Raises `FileNotFoundError` or `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self.descriptor)
        if isinstance(error, OSError) and error.filename is None:  # the failed call knew only the descriptor
            error.filename = str(self.path)

    def mapped(self, offset: int, length: int) -> Array:
        """Return bytes of the file as a map, which lives as long as the array.

        All pages are prefetched at once, since every caller reads all of them. Raises `EOFError` if the file
        is shorter. If it is truncated later, an access kills the process (SIGBUS).
        """
        view, before = self._map(offset, length)
        if length >= MIN_DIRECT:
            advise(view, WILL_NEED)
        return np.frombuffer(view, np.uint8, length, before)

    def cached(self, offsets: list[int]) -> bool:
        """Return whether the page cache has the pages at all of these ascending offsets.

        It does not load any.
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
        """Map a part of the file. Return the map and the bytes in it before that part."""
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            view = mmap.mmap(self.descriptor, offset + length - start, prot=mmap.PROT_READ, offset=start)
        except ValueError as error:  # mmap checks the size again
            raise EOFError(f"ends before byte {offset + length}") from error
        return view, offset - start

    def read(self, offset: int, out: Array, *, past_cache: bool) -> None:
        """Fill `out`, whose rows are contiguous, with the bytes from `offset` on.

        With `past_cache`, bytes that the page cache lacks bypass it where the system can: by direct I/O into
        rows that are sector-aligned, otherwise by reads that leave no pages behind. Raises `EOFError` if the
        file is shorter.
        """
        done = flags = 0
        large = MIN_DIRECT <= out.nbytes <= self.size - offset
        if large:
            view, before = self._map(offset, out.nbytes)
            if resident(_address(view), len(view)):
                if out.nbytes >= MIN_POPULATED:
                    advise(view, POPULATE)
                stored = np.frombuffer(view, np.uint8, out.nbytes, before)
                np.copyto(out.view(np.uint8), stored.reshape(out.shape[0], -1))
                return
        rows = _segments(out)
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
        """Return the number of bytes read by direct I/O: 0 where the system refuses.

        Other errors are left to the buffered read that follows.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | O_DIRECT)
            try:
                return _fill(descriptor, rows, offset)
            finally:
                os.close(descriptor)
        return 0


def advise(view: mmap.mmap, advice: int | None, start: int = 0, length: int | None = None) -> None:
    """Pass madvise advice on a page-aligned part of a map, where the system knows it.

    Unlike the method of `mmap`, this releases the GIL: to make pages resident takes milliseconds.
    """
    if _madvise is not None and advice is not None:
        _madvise(_address(view) + start, len(view) - start if length is None else length, advice)


def resident(address: int, size: int) -> bool:
    """Return whether at least half of a range's pages are in memory, or in the page cache for a mapped file.

    Only `SAMPLED_PAGES` are checked: checking them all takes as long as copying some. It does not load any.
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


def publish(path: Path, data: Array, size: int) -> None:
    """Create a file at `path` atomically, from the first `size` bytes of the rows of `data`.

    The file is written past the page cache if `data` is sector-aligned and padded to whole sectors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(temporary, data, size)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def worth_caching(size: int) -> bool:
    """Return whether files of `size` bytes fit into the page cache beside all else."""
    return size <= MAX_CACHED_SHARE * memory_limit()


def folder_mtime(folder: Path) -> int | None:
    """Return when a folder's entries last changed, in nanoseconds; None for an unreadable folder."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def padded(size: int) -> int:
    """Return `size` rounded up to whole pages, which direct I/O can write."""
    return -(-size // PAGE) * PAGE


def sector_aligned(data: Array) -> bool:
    """Return whether direct I/O can write the rows of an array in place."""
    if data.size == 0 or data.strides[-1] != data.itemsize:
        return False
    direct = _sectors(_segments(data))
    return sum(row.nbytes for row in direct) == data.nbytes


def _write(path: Path, data: Array, size: int) -> None:
    """Write past the page cache where the file system can, which saves processor time and page cache."""
    rows = _segments(data)
    past_cache = O_DIRECT if sector_aligned(data) else 0
    for extra in (past_cache, 0) if past_cache else (0,):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | extra, 0o666)
        except OSError as error:
            if extra and error.errno == errno.EINVAL:
                continue
            raise
        try:
            done = 0
            while done < data.nbytes:
                done += os.pwritev(descriptor, _after(rows, done), done)
            os.ftruncate(descriptor, size)
            return
        except OSError as error:
            if not (extra and error.errno == errno.EINVAL):
                raise
        finally:
            os.close(descriptor)


def _segments(data: Array) -> list[Array]:
    """Return the rows of an array as bytes, or one segment if they are contiguous."""
    if data.flags.c_contiguous:
        return [data.reshape(-1).view(np.uint8)]
    return list(data.view(np.uint8))


def _sectors(rows: list[Array]) -> list[Array]:
    """Return the leading part of the rows that direct I/O can take: whole sectors, all rows or none."""
    if rows[0].ctypes.data % SECTOR:
        return []
    if len(rows) == 1:
        whole = rows[0].nbytes // SECTOR * SECTOR
        return [rows[0][:whole]] if whole else []
    stride = rows[1].ctypes.data - rows[0].ctypes.data
    return rows if stride % SECTOR == 0 and rows[0].nbytes % SECTOR == 0 else []


def _after(rows: list[Array], done: int) -> list[Any]:
    """Return the buffers of the next call, for rows of equal length whose first `done` bytes are done."""
    whole, part = divmod(done, rows[0].nbytes)
    rest = rows[whole : whole + SEGMENTS]
    return [rest[0][part:], *rest[1:]] if part else rest


def _fill(descriptor: int, rows: list[Array], offset: int, done: int = 0, flags: int = 0) -> int:
    """Read into rows of equal length whose first `done` bytes are done, and return the bytes done then.

    That is less than all only at the end of the file.
    """
    total = len(rows) * rows[0].nbytes
    while done < total:
        got = os.preadv(descriptor, _after(rows, done), offset + done, flags)
        if got == 0:
            break
        done += got
    return done


def _address(view: mmap.mmap) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _function(library: type[ctypes.CDLL], name: str, *types: Any) -> Any:
    try:
        found = getattr(library(None), name)
    except (AttributeError, OSError, TypeError):  # a system without it
        return None
    found.argtypes = types
    return found


# mincore takes a microsecond, less than releasing the GIL: hence PyDLL, which keeps it.
_mincore = _function(ctypes.PyDLL, "mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_madvise = _function(ctypes.CDLL, "madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
