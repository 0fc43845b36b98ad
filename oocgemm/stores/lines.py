"""Read and write blocks of a matrix in a file whose lines (its rows or its columns) are contiguous.

The part of a line that belongs to a block is called a segment. Segments are read by system calls. A memory
map would be slow, because each page fault also loads much unneeded data around the segment (readahead).

- Segments of short lines are read together with the gaps between them, and then copied.
- Segments of long lines are read straight into the destination, many per system call. Segments outside the
  page cache are all requested from the disk first. On a virtual disk, reading a segment of 2 to 8 KiB
  took 7 to 20 us with these requests, and 85 to 140 us without them.
- If the file is too large to stay in the page cache, segments are read past it by direct I/O.

Many reads are submitted in one system call by Linux's asynchronous I/O (io_submit). Reads through the page
cache are still synchronous: io_submit returns when they are done. They are faster than separate calls because
Python releases the GIL once for all of them. With eight threads on 16 cores, pieces of 8 KiB were read from
the page cache at 18 GB/s. With one preadv per piece, they were read at 0.9 GB/s. If the system does not
support io_submit, preadv is called for each read.

`read_parts` reads parts of many files. A part consists of lines that are equally far apart in the file, and
also in memory. The lines are the buffers of one vectored read. Short gaps between lines in the file are read
into a buffer whose content is not used.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.files import (
    MIN_SEGMENT,
    O_DIRECT,
    SAMPLES,
    SECTOR,
    SEGMENTS,
    Opener,
    OpenFile,
    open_regular,
    read_fully,
    scratch,
    write_fully,
)

# The maximum number of reads that one context (io_setup) has in flight, and that one call of `start` starts.
MAX_READS = _CAPACITY = 512
# The numbers of the system calls io_setup, io_getevents and io_submit, for which the C library has no
# functions.
_CALLS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}
# REQUEST is struct iocb of linux/aio_abi.h. Operation 0 is a read into one buffer, and 7 a read into several
# buffers. _EVENT is struct io_event.
READ_VECTOR = 7
REQUEST = np.dtype("u8, u4, i4, u2, i2, u4, u8, u8, i8, u8, u4, u4")
REQUEST.names = (
    *("number", "key", "flags", "operation", "priority", "descriptor"),
    *("address", "size", "offset", "reserved", "more_flags", "notify"),
)
_READ = ["flags", "operation", "descriptor", "address", "size", "offset"]
_EVENT = np.dtype("u8, u8, i8, i8")
_EVENT.names = ("number", "request", "result", "more")
# The C library's function `syscall`, in two forms: the first releases the GIL, the second keeps it.
_system, _system_with_gil = (kind(None, use_errno=True).syscall for kind in (ctypes.CDLL, ctypes.PyDLL))
_system.restype = _system_with_gil.restype = ctypes.c_long
# io_setup contexts that no thread uses now. A forked child forgets them: they belong to the parent process.
_contexts: list[int] = []
os.register_at_fork(after_in_child=_contexts.clear)


def start_reads(
    memory: Array, places: Array, size: int, descriptor: int, offsets: Array, flags: int = 0
) -> Callable[[], Array]:
    """Start up to `MAX_READS` reads, of `size` bytes each, from `offsets` of a file to `places` in `memory`.

    `places` are offsets in bytes from the start of `memory`. `flags` are those of preadv2(2). Returns a
    function like the one that `start` returns.
    """
    requests = np.zeros(len(places), REQUEST)
    requests["flags"], requests["descriptor"], requests["size"] = flags, descriptor, size
    requests["address"] = memory.ctypes.data + places
    requests["offset"] = offsets
    return start(requests)


def start(requests: Array) -> Callable[[], Array]:
    """Submit up to `MAX_READS` requests, an array of dtype `REQUEST`.

    Returns a function that waits for all reads. The caller must call this function exactly once, before the
    memory is reused or freed. The function returns an array with the number of bytes of each read, which is
    negative for a failed read.
    """
    count = len(requests)
    try:
        context = _free_context()
    except OSError:  # the system does not support io_submit
        results = np.array([_read(*request) for request in requests[_READ].tolist()], np.int64)
        return lambda: results
    results, events = np.full(count, -1, np.int64), np.zeros(count, _EVENT)
    requests["number"] = np.arange(count)
    addresses = requests.ctypes.data + REQUEST.itemsize * np.arange(count)
    _, get, submit = _CALLS[platform.machine()]
    submitted = 0
    try:
        while submitted < count:
            submitted += _call(submit, context, count - submitted, addresses.ctypes.data + 8 * submitted)
    except OSError:
        # The system refused a read, for example because of `flags`. This read and all later ones were not
        # submitted. They keep the result -1, which means that they failed.
        pass

    def wait() -> Array:
        # Reads from the page cache are complete already. Release the GIL only to wait for other reads.
        completed = _call(get, context, 0, submitted, events.ctypes.data, 0, keep_gil=True)
        while completed < submitted:
            left = submitted - completed
            completed += _call(get, context, left, left, events.ctypes.data + completed * _EVENT.itemsize, 0)
        _contexts.append(context)
        results[events["number"][:completed].astype(np.int64)] = events["result"][:completed]
        return results

    return wait


def read_rows(descriptor: int, rows: Array, numbers: Array, offsets: Array, flags: int = 0) -> Array:
    """Fill rows `numbers` of an array of bytes from `offsets` of a file. Return the bytes read per row."""
    places, size = rows.strides[0] * numbers, rows.shape[1]
    results = np.empty(len(numbers), np.int64)
    for first in range(0, len(numbers), MAX_READS):
        part = slice(first, first + MAX_READS)
        results[part] = start_reads(rows, places[part], size, descriptor, offsets[part], flags)()
    return results


def _read(flags: int, operation: int, descriptor: int, address: int, size: int, offset: int) -> int:
    """Perform a read request by one call of preadv. Return the number of bytes, or -1 for an error."""
    buffers = [(address, size)]
    if operation == READ_VECTOR:
        spans = (ctypes.c_uint64 * (2 * size)).from_address(address)
        buffers = list(zip(spans[::2], spans[1::2], strict=True))
    memory = [(ctypes.c_char * count).from_address(at) for at, count in buffers if count]
    try:
        return os.preadv(descriptor, memory, offset, flags)
    except OSError:
        return -1


def _free_context() -> int:
    """Return an io_setup context that no other thread uses. Raises `OSError` if the system provides none."""
    with suppress(IndexError):
        return _contexts.pop()
    context = ctypes.c_ulong(0)
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _call(_CALLS[platform.machine()][0], _CAPACITY, ctypes.addressof(context))
    return context.value


def _call(number: int, *arguments: int, keep_gil: bool = False) -> int:
    """Make a system call, and repeat it when a signal interrupts it. Raises `OSError` for other errors."""
    system = _system_with_gil if keep_gil else _system
    while (result := int(system(number, *map(ctypes.c_long, arguments)))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# If the lines of a part begin at most this many bytes apart in the file, the gaps between the lines are read,
# too. Otherwise each line is a separate read.
MAX_GAP = 8 << 10
# Maximum number of lines of a part: each line and its gap are two buffers of a vectored read.
MAX_PART_LINES = SEGMENTS // 2


class FilePart(NamedTuple):
    """Up to `MAX_PART_LINES` lines of `size` bytes, and where the first line is in a file and in memory."""

    descriptor: int
    offset: int
    address: int
    lines: int
    size: int


def read_parts(parts: Sequence[FilePart], stride: int, pitch: int) -> Array:
    """Read parts of files into memory. Return for each part whether all of it was read.

    The lines of a part begin `stride` bytes apart in its file, and `pitch` bytes apart in memory. Neither is
    less than the bytes of a line.
    """
    given = np.array(parts, np.int64).reshape(-1, len(FilePart._fields))
    owner, (descriptor, offset, address, lines, size) = np.arange(len(given)), given.T
    if stride > MAX_GAP:
        each = np.where(size < stride, lines, 1)
        owner, within = _repeated(each)
        lines = np.where(each > 1, 1, lines)[owner]
        descriptor, size = descriptor[owner], size[owner]
        offset, address = offset[owner] + within * stride, address[owner] + within * pitch
    line, within = _repeated(lines)
    gap = stride - size
    gaps = bool(((gap > 0) & (lines > 1)).any())
    buffers = np.empty((len(line), 1 + gaps, 2), np.uint64)  # struct iovec: address and bytes
    buffers[:, 0, 0] = address[line] + within * pitch
    buffers[:, 0, 1] = size[line]
    if gaps:
        buffers[:, 1, 0] = scratch(MAX_GAP, "gaps").ctypes.data
        buffers[:, 1, 1] = np.where(within + 1 < lines[line], gap[line], 0)
    requests = np.zeros(len(owner), REQUEST)
    requests["operation"], requests["descriptor"], requests["offset"] = READ_VECTOR, descriptor, offset
    requests["address"] = buffers.ctypes.data + buffers.strides[0] * (np.cumsum(lines) - lines)
    requests["size"] = lines * (1 + gaps)
    wanted, complete = lines * size + (lines - 1) * gap, np.ones(len(given), np.bool_)
    for first in range(0, len(requests), MAX_READS):
        some = slice(first, first + MAX_READS)
        found = start(requests[some])()
        complete[owner[some][found != wanted[some]]] = False
    return complete


def read_ranges(ranges: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Read ranges of files into memory. A range is (descriptor, offset in the file, memory address, bytes).

    Returns the number of bytes of each read, which is negative for a read that failed.
    """
    found = list[int]()
    for first in range(0, len(ranges), MAX_READS):
        given = np.array(ranges[first : first + MAX_READS], np.int64).T
        requests = np.zeros(given.shape[1], REQUEST)
        requests["descriptor"], requests["offset"], requests["address"], requests["size"] = given
        found += start(requests)().tolist()
    return found


def _repeated(counts: Array) -> tuple[Array, Array]:
    """Number `counts[i]` items for each i. Return the i of each item, and its number among the items of i.

    >>> [x.tolist() for x in _repeated(np.array([2, 1, 3]))]
    [[0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


# Lines of at most this many bytes are read whole, and the needed elements are copied from them. For lines of
# 8 KiB, this takes about as long as one read per line of only the needed elements.
MAX_LINE = 8 << 10
# The size of each thread's scratch memory, in bytes. Elements that cannot be read straight into their
# destination pass through it. 256 KiB fit into the processor's cache.
SCRATCH_BYTES = 256 << 10
# A block of more than SCRATCH_BYTES is cut into pieces of at least this many rows. The last pieces may have
# fewer rows.
SCRATCH_LINES = SCRATCH_BYTES // MAX_LINE
# Before segments of `size` bytes are read from the disk, they are requested with posix_fadvise. Each request
# is extended to multiples of a window, because nearby bytes are often read next. The window is the largest
# power of two up to WINDOW * size, or one page if WINDOW * size exceeds MAX_WINDOW. With WINDOW = 8 and a
# page cache of 300 MiB, pages were evicted before they were read.
WINDOW, MAX_WINDOW = 2, 64 << 10
# The size of each thread's scratch memory for direct I/O, in bytes. It limits how many disk reads are in
# flight. 128 reads of 8 to 16 KiB are enough: a virtual disk was not faster with 512.
DIRECT_BYTES = 8 << 20

# The flag with which a preadv2 fails instead of waiting for the disk; 0 on systems without this flag.
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def copies_bytes(dtype: np.dtype[Any], block: Array) -> bool:
    """Return whether elements of a stored dtype can be read straight into the rows of a block."""
    return dtype.isnative and block.strides[1] == dtype.itemsize


def scratch_bytes(*, past_cache: bool) -> int:
    """Return the bytes of scratch memory of a thread that reads or writes. `past_cache`: by direct I/O."""
    return max(SCRATCH_BYTES, DIRECT_BYTES if past_cache else 0)


class StoredLines(NamedTuple):
    """Where the lines of a matrix are in a file. Lines are rows, or columns if stored in Fortran order.

    Line 0 begins at the byte `offset`, and the others follow without gaps. A line has `elements` elements of
    `dtype`, in the stored byte order.
    """

    offset: int
    elements: int
    dtype: np.dtype[Any]

    @property
    def stride(self) -> int:
        """The number of bytes of a line."""
        return self.elements * self.dtype.itemsize

    def start(self, lines: Range, part: Range) -> int:
        """Return the byte in the file at which the elements `part` of the first of these lines begin."""
        return self.offset + lines[0] * self.stride + part[0] * self.dtype.itemsize


def read_block(
    file: OpenFile, stored: StoredLines, lines: Range, part: Range, out: Array, *, past_cache: bool = False
) -> None:
    """Read a block of a matrix from a file: the elements `part` of each of the lines `lines`.

    A line fills one row of `out`. For `past_cache` see `OpenFile.read`. Raises `EOFError` if the file is too
    short.
    """
    start, stride, dtype = stored.start(lines, part), stored.stride, stored.dtype
    if out.size == 0:
        return
    if part == (0, stored.elements) and copies_bytes(dtype, out):
        file.read(start, out, past_cache=past_cache)
    elif stride <= MAX_LINE:
        _read_with_gaps(file, start, stored, out)
    elif past_cache and _read_past_cache(file, start, stride, dtype, out):
        pass
    elif copies_bytes(dtype, out):
        _read_segments(file, start, stride, out.view(np.uint8))
    else:
        for top, left, piece in _pieces(out):
            copy = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
            _read_segments(file, start + top * stride + left * dtype.itemsize, stride, copy.view(np.uint8))
            np.copyto(piece, copy, casting="equiv")


def read_part(
    file: OpenFile, stored: StoredLines, lines: Range, part: Range, out: Array, *, past_cache: bool = False
) -> None:
    """Read a block of an uncompressed chunk of a file. The arguments are those of `read_block`."""
    # Whole lines that preadv cannot read in place, or only slowly, are copied: preadv cannot transpose or
    # byte-swap elements, and it is slow for lines of fewer than `MIN_SEGMENT` bytes that are not adjacent in
    # `out`. Short lines are copied from scratch memory, which stays in the processor's cache, and others from
    # a memory map.
    size, dtype = stored.stride, stored.dtype
    in_place = copies_bytes(dtype, out) and (out.flags.c_contiguous or size >= MIN_SEGMENT)
    if part != (0, stored.elements) or in_place:
        read_block(file, stored, lines, part, out, past_cache=past_cache)
    elif size < MIN_SEGMENT:
        _read_with_gaps(file, stored.start(lines, part), stored, out)
    else:
        mapped = file.mapped(stored.start(lines, part), out.shape[0] * size).view(dtype)
        np.copyto(out, mapped.reshape(out.shape), casting="equiv")


def write_block(descriptor: int, stored: StoredLines, lines: Range, part: Range, data: Array) -> None:
    """Write a block of a matrix to an open file. The arguments are those of `read_block`."""
    start, stride, dtype = stored.start(lines, part), stored.stride, stored.dtype
    if data.size == 0:
        return
    if copies_bytes(dtype, data):
        _write_segments(descriptor, start, stride, data)
        return
    for top, left, piece in _pieces(data):
        copy = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
        np.copyto(copy, piece, casting="equiv")
        _write_segments(descriptor, start + top * stride + left * dtype.itemsize, stride, copy)


def _read_with_gaps(file: OpenFile, start: int, stored: StoredLines, out: Array) -> None:
    """Fill `out` from the byte `start` on by large reads, which also read the gaps between short lines."""
    stride, dtype = stored.stride, stored.dtype
    height = max(1, SCRATCH_BYTES // stride)
    for top in range(0, len(out), height):
        block = out[top : top + height]
        # The last line is filled up to the end of `block` only: the file may end there.
        memory = scratch(len(block) * stride)
        size = (len(block) - 1) * stride + block.shape[1] * dtype.itemsize
        read_fully(file.descriptor, memory[:size], start + top * stride)
        lines = memory.view(dtype).reshape(len(block), stored.elements)
        np.copyto(block, lines[:, : block.shape[1]], casting="equiv")


def _read_segments(file: OpenFile, start: int, stride: int, rows: Array) -> None:
    """Fill rows of bytes from a file. The first row begins at the byte `start`, each next `stride` later."""
    # switch readahead off: it would load the unneeded bytes between the rows
    Opener.without_readahead(file.descriptor)
    size, left = rows.shape[1], np.arange(len(rows))
    left = left[read_rows(file.descriptor, rows, left, start + stride * left, _NOWAIT) < size]
    if not left.size:
        return
    _request(file, start + stride * left, size)
    # The rows were requested in ascending order. Read them in descending order: only the first read waits
    # long, and by then the disk has delivered most other rows.
    left = left[::-1]
    left = left[read_rows(file.descriptor, rows, left, start + stride * left) < size]
    # Repeat the incomplete reads with `read_fully`, which raises an error if a read fails again.
    for number in left.tolist():
        read_fully(file.descriptor, rows[number], start + stride * number)


def _read_past_cache(file: OpenFile, start: int, stride: int, dtype: np.dtype[Any], out: Array) -> bool:
    """Read rows of a file like `_read_segments`, but by direct I/O. Return whether all rows were read.

    Direct I/O may fail. It is not tried if the page cache seems to contain the rows already.
    """
    size, count = out.shape[1] * dtype.itemsize, len(out)
    # Each row is read by one read of `sectors` bytes, a multiple of SECTOR. Direct I/O needs each row at the
    # same offset within a sector in memory as in the file. So the distance of rows in memory, `pitch`, is
    # equal to `stride` modulo SECTOR.
    sectors = -(-(size + SECTOR - 1) // SECTOR) * SECTOR
    pitch = sectors + SECTOR + (stride - sectors) % SECTOR
    at_once = min(MAX_READS, DIRECT_BYTES // 2 // pitch)
    if not O_DIRECT or at_once < 1:
        return False
    if file.cached([start + stride * number for number in range(0, count, -(-count // SAMPLES))]):
        return False
    halves = scratch(DIRECT_BYTES).reshape(2, -1)
    try:
        descriptor = open_regular(file.path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return False

    def started(number: int) -> Callable[[], bool]:
        """Start to read batch `number` of the rows.

        Returns a function that waits for the reads, copies the rows, and returns whether all were read.
        """
        block, half = out[number * at_once : (number + 1) * at_once], halves[number % 2]
        begin = start + number * at_once * stride
        offsets = begin + stride * np.arange(len(block))
        before = offsets % SECTOR
        places = begin % SECTOR + pitch * np.arange(len(block)) - before
        stored = half[begin % SECTOR :][:size].view(dtype)
        segments = np.lib.stride_tricks.as_strided(stored, block.shape, (pitch, dtype.itemsize))
        wait = start_reads(half, places, sectors, descriptor, offsets - before)

        def copy() -> bool:
            if (wait() < before + size).any():
                return False
            np.copyto(block, segments, casting="equiv")
            return True

        return copy

    complete = True
    in_flight: deque[Callable[[], bool]] = deque()
    with os.fdopen(descriptor, "rb", buffering=0):
        try:
            for number in range(-(-count // at_once)):
                in_flight.append(started(number))
                if len(in_flight) == 2:
                    complete &= in_flight.popleft()()
        finally:  # also after an error, wait for all reads: they still write to the scratch memory
            while in_flight:
                complete &= in_flight.popleft()()
    return complete


def _request(file: OpenFile, offsets: Array, size: int) -> None:
    """Ask the system to load `size` bytes at each of the offsets, and bytes near them (`WINDOW`)."""
    window = 1 << (WINDOW * size).bit_length() - 1 if WINDOW * size <= MAX_WINDOW else mmap.PAGESIZE
    for offset in offsets.tolist():
        first, last = offset // window * window, -(-(offset + size) // window) * window
        os.posix_fadvise(file.descriptor, first, last - first, os.POSIX_FADV_WILLNEED)


def _write_segments(descriptor: int, start: int, stride: int, data: Array) -> None:
    """Write rows to a file. The first row begins at the byte `start`, each next one `stride` bytes later."""
    if data.flags.c_contiguous and stride * len(data) == data.nbytes:
        data = data.reshape(1, -1)
    size = data.shape[1] * data.itemsize
    for offset in range(start, start + stride * len(data), stride):
        # To write a part of a page, the system must first read that page from the disk. Request the first and
        # the last page of every row now, so that the writes below do not wait for one page after another.
        for edge in (offset, offset + size - 1):
            os.posix_fadvise(descriptor, edge, 1, os.POSIX_FADV_WILLNEED)
    for number, row in enumerate(data.view(np.uint8)):
        write_fully(descriptor, row, start + number * stride)


def _pieces(block: Array) -> list[tuple[int, int, Array]]:
    """Cut a block into views of at most `SCRATCH_BYTES`. Return (first row, first column, view) of each."""
    height, width = block.shape
    elements = SCRATCH_BYTES // block.itemsize
    across = max(1, min(width, elements // min(height, SCRATCH_LINES)))
    down = max(1, min(height, elements // across))
    return [
        (top, left, block[top : top + down, left : left + across])
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
