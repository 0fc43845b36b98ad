"""Local files: reading rows of them into given memory, mapping them, and putting new ones in place.

What the page cache holds is mapped and copied: on sixteen cores, twelve threads of them reading beside copies to a GPU, that
measured at 44 GB/s where the pages of 32 MiB are mapped at once, at 38 with a fault for every few of them, and reading row by
row into the destination at 35. One core of another Xeon copied 7.9 GB/s so and read 4.2; of an EPYC, 3.9 and 4.6. What the cache
does not hold, and need not keep, is read past it: filling the cache can take more processor time than the disk takes time.
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

# Addresses, offsets and lengths of direct I/O are multiples of this; of a page where we choose them ourselves.
SECTOR = 512
PAGE = 4096
# Less is not worth the questions that have to be asked first.
MIN_DIRECT = 1 << 20
# Segments that one call may take, and the length under which a mapped copy is faster than so many of them.
SEGMENTS = 1024
MIN_SEGMENT = 4096

# Reads through the page cache and leaves nothing behind (Linux 6.14); no constant of Python yet.
_RWF_DONTCACHE = 0x80 if sys.platform == "linux" else 0
# Brings all pages of a map in at once (Linux 5.14); no constant of Python yet. Worth a call of its own from so many bytes up.
POPULATE: int | None = 22 if sys.platform == "linux" else None
MIN_POPULATED = 8 << 20
WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
# On Linux only: elsewhere it may discard what was written to a map.
DONT_NEED: int | None = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
PAGES_ASKED = 8
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Files that take more of the memory that the process may use than this are not worth keeping in its page cache.
CACHED_SHARE = 0.5
_own = threading.local()


def scratch(size: int) -> Array:
    """`size` bytes of memory, page-aligned, of the calling thread: the same at its next call. Raises `MemoryError`."""
    held: Array | None = getattr(_own, "scratch", None)
    if held is None or held.size < size:
        _own.scratch = held = None  # first, so that both are never there together
        rounded = -(-max(size, 1) // PAGE) * PAGE
        try:
            block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {format_size(rounded)} of host memory, for a chunk: pass a smaller --host-memory"
            ) from error
        _own.scratch = held = np.frombuffer(block, np.uint8)
    return held[:size]


class OpenFile:
    """A file open for reading, `size` bytes long. Raises `FileNotFoundError`, `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self.descriptor)
        if isinstance(error, OSError) and error.filename is None:  # what failed was told its descriptor only
            error.filename = str(self.path)

    def mapped(self, offset: int, length: int) -> Array:
        """Bytes of the file as they lie in the page cache, mapped for as long as they are looked at.

        They are asked for at once, since whoever maps them will go through them all. Raises `EOFError` if the file
        ends before; should it be cut short while it is looked at, the system ends the process (SIGBUS).
        """
        view, before = self._map(offset, length)
        if length >= MIN_DIRECT:
            advise(view, WILL_NEED)
        return np.frombuffer(view, np.uint8, length, before)

    def cached(self, offsets: list[int]) -> bool:
        """Whether the page cache holds the pages at all of these ascending offsets. Asking does not change it."""
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
        """A map that has a part of the file in it, and how many bytes before it."""
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            view = mmap.mmap(self.descriptor, offset + length - start, prot=mmap.PROT_READ, offset=start)
        except ValueError as error:  # which looks at the size once more
            raise EOFError(f"ends before byte {offset + length}") from error
        return view, offset - start

    def read(self, offset: int, out: Array, *, past_cache: bool) -> None:
        """Fill `out`, whose rows are contiguous each, with as many bytes from `offset` on.

        With `past_cache` what the page cache does not hold is read past it, by DMA to where it belongs if that lies
        on sectors, otherwise in a way that leaves nothing there; as far as the system knows how. Raises `EOFError` if
        the file ends before.
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
        """Bytes that could be read so: none of them where the system refuses. What else is wrong with the file shows when
        it is read otherwise."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | O_DIRECT)
            try:
                return _fill(descriptor, rows, offset)
            finally:
                os.close(descriptor)
        return 0


def advise(view: mmap.mmap, advice: int | None, start: int = 0, length: int | None = None) -> None:
    """Advise the system on a part of a map that begins on a page, if it takes such advice. The interpreter is let go
    meanwhile, which it is not by mmap's own method: to bring pages in takes milliseconds."""
    if _madvise is not None and advice is not None:
        _madvise(_address(view) + start, len(view) - start if length is None else length, advice)


def resident(address: int, size: int) -> bool:
    """Whether at least half of these pages are in memory, those of a mapped file in the page cache, going by a few of them: to look
    all of them up takes as long as copying a part of them. Asking does not change it."""
    if _mincore is None:
        return True
    held = (ctypes.c_ubyte * PAGES_ASKED)()
    answer = ctypes.addressof(held)
    step = size // PAGES_ASKED // mmap.PAGESIZE * mmap.PAGESIZE
    for number in range(PAGES_ASKED):
        if _mincore(address + number * step, 1, answer + number):
            return True
    return 2 * sum(page & 1 for page in held) >= PAGES_ASKED


def publish(path: Path, data: Array, size: int) -> None:
    """A new file at `path`, of the first `size` bytes of the rows of `data`: whole or not at all.

    Where `data` goes on to the end of the sector, and lies on sectors, the file is written past the page cache.
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
    """Whether so many bytes of files fit into the page cache beside all else."""
    return size <= CACHED_SHARE * memory_limit()


def modified(folder: Path) -> int | None:
    """When names in a folder last came or went, in nanoseconds; None if it cannot be looked at."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def padded(size: int) -> int:
    """`size` rounded up to what can be written past the page cache."""
    return -(-size // PAGE) * PAGE


def lies_on_sectors(data: Array) -> bool:
    """Whether rows can be written past the page cache from where they lie."""
    if data.size == 0 or data.strides[-1] != data.itemsize:
        return False
    direct = _sectors(_segments(data))
    return sum(row.nbytes for row in direct) == data.nbytes


def _write(path: Path, data: Array, size: int) -> None:
    """Past the page cache where the file system can: that leaves the processor to those who compute, and memory to
    those who read."""
    rows = _segments(data)
    past_cache = O_DIRECT if lies_on_sectors(data) else 0
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
    """The rows of an array as bytes; one segment if they follow on one another."""
    if data.flags.c_contiguous:
        return [data.reshape(-1).view(np.uint8)]
    return list(data.view(np.uint8))


def _sectors(rows: list[Array]) -> list[Array]:
    """The leading part of the rows that direct I/O can take: whole sectors, all but the last row in full."""
    if rows[0].ctypes.data % SECTOR:
        return []
    if len(rows) == 1:
        whole = rows[0].nbytes // SECTOR * SECTOR
        return [rows[0][:whole]] if whole else []
    stride = rows[1].ctypes.data - rows[0].ctypes.data
    return rows if stride % SECTOR == 0 and rows[0].nbytes % SECTOR == 0 else []


def _after(rows: list[Array], done: int) -> list[Any]:
    """What one call takes of rows of one length, their first `done` bytes being done."""
    whole, part = divmod(done, rows[0].nbytes)
    rest = rows[whole : whole + SEGMENTS]
    return [rest[0][part:], *rest[1:]] if part else rest


def _fill(descriptor: int, rows: list[Array], offset: int, done: int = 0, flags: int = 0) -> int:
    """Read into rows of one length, whose first `done` bytes are done; how many are then, fewer than they hold only
    at the end of the file."""
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


# The first takes a microsecond: to let the interpreter go meanwhile would take longer.
_mincore = _function(ctypes.PyDLL, "mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_madvise = _function(ctypes.CDLL, "madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
