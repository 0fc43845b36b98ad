"""Read and write blocks of a matrix in a file whose lines (its rows or its columns) are contiguous.

A block contains a part of each of several lines. Such a part is called a segment. A memory map would be slow
here: a page fault reads a segment together with the readahead of the operating system, which can be a hundred
times as long as the segment, and adds all these pages to the resident set. System calls read the segments
instead:

- If lines are short, the segments are read together with the gaps between them into the thread's scratch
  memory, and copied from there.
- Otherwise they are read straight into the destination, many per call. First, all segments that are not in
  the page cache are requested, so that the disk has many requests in flight.
- If the file is too large to stay in the page cache, segments that are not in the page cache are read by
  direct I/O into the thread's scratch memory, and copied from there.

On two Zen 5 cores with a virtual disk, reading a segment of 2 to 8 KiB took 2 to 3 us from the page cache,
and 7 to 20 us from the disk. It took 85 to 140 us from the disk if each read waited for its own request.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.aio import MAX_READS, read_rows, start_reads
from oocgemm.stores.base import Array
from oocgemm.stores.files import O_DIRECT, SECTOR, OpenFile, scratch

# A line of a file is one row of the matrix, or one column if the file is in Fortran order. Lines of at most
# this many bytes are read whole, and the needed elements are copied from them. For lines of 8 KiB, this takes
# about as long as to read only the needed elements of each line, one read per line.
MAX_LINE = 8 << 10
# The size of each thread's scratch memory, in bytes. Elements pass through it if they must be transposed or
# byte-swapped, or if they are read from lines of at most MAX_LINE bytes, which are read whole. 256 KiB fit
# into the processor's cache.
SCRATCH_BYTES = 256 << 10
# A block that does not fit into SCRATCH_BYTES is cut into pieces. Each piece has at least this many rows, or
# all rows if the block has fewer.
SCRATCH_LINES = SCRATCH_BYTES // MAX_LINE
# Segments that are not in the page cache are requested with posix_fadvise before they are read. The range of
# each request is extended to multiples of a power of two, the window. It then includes bytes nearby, which
# are often read next. This saves a fifth of the processor time. For segments of `size` bytes, the window is
# the largest power of two that is at most WINDOW * size bytes. But if WINDOW * size is more than MAX_WINDOW
# bytes, the window is one page. A larger WINDOW would load too much: with WINDOW = 8 and a page cache of
# 300 MiB, pages were evicted before they were read.
WINDOW, MAX_WINDOW = 2, 64 << 10
# The size of each thread's scratch memory for direct I/O, in bytes. It limits how many disk reads are in
# flight. 128 reads of 8 to 16 KiB are enough: a virtual disk was not faster with 512.
DIRECT_BYTES = 8 << 20
# At most this many rows of a block (or columns, if the file is in Fortran order) are checked to estimate
# whether the block is in the page cache.
SAMPLES = 8

# The flag of preadv2 for a read that fails instead of waiting for the disk; 0 on systems without it.
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def copies_bytes(dtype: np.dtype[Any], block: Array) -> bool:
    """Return whether elements of a stored dtype can be read into the rows of a block without conversion.

    This requires native byte order and contiguous rows.
    """
    return dtype.isnative and block.strides[1] == dtype.itemsize


def scratch_bytes(*, past_cache: bool) -> int:
    """Return the bytes of scratch memory that each thread needs to read or write blocks.

    With `past_cache`, reads use direct I/O, which needs more scratch memory.
    """
    return max(SCRATCH_BYTES, DIRECT_BYTES if past_cache else 0)


def read_block(
    file: OpenFile,
    offset: int,
    line: int,
    dtype: np.dtype[Any],
    lines: Range,
    part: Range,
    out: Array,
    *,
    past_cache: bool = False,
) -> None:
    """Read a block of a matrix from a file: the same range of elements from each of several lines.

    A line is a row of the matrix, or a column if the file is in Fortran order. It fills one row of `out`.

    Arguments:
        offset: the byte of the file at which line 0 begins
        line: the number of elements in a line; each line begins where the previous one ends
        dtype: the dtype in stored byte order; `out` has the same dtype in native byte order
        lines: the range of lines
        part: the range of elements within each line
        out: the destination
        past_cache: do not add the data to the page cache, as in `OpenFile.read`

    Raises `EOFError` if the file is too short.
    """
    start, stride = offset + (lines[0] * line + part[0]) * dtype.itemsize, line * dtype.itemsize
    if out.size == 0:
        return
    if part == (0, line) and copies_bytes(dtype, out):
        file.read(start, out, past_cache=past_cache)
    elif stride <= MAX_LINE:
        _read_with_gaps(file, start, line, dtype, out)
    elif past_cache and _read_past_cache(file, start, stride, dtype, out):
        pass
    elif copies_bytes(dtype, out):
        _read_segments(file, start, stride, out.view(np.uint8))
    else:
        for top, left, piece in _pieces(out):
            stored = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
            _read_segments(file, start + top * stride + left * dtype.itemsize, stride, stored.view(np.uint8))
            np.copyto(piece, stored, casting="equiv")


def write_block(
    descriptor: int, offset: int, line: int, dtype: np.dtype[Any], lines: Range, part: Range, data: Array
) -> None:
    """Write a block of a matrix to a file: the same range of elements in each of several lines.

    A line is a row of the matrix, or a column if the file is in Fortran order. It receives one row of `data`.
    `descriptor` is the open file. The other arguments are as for `read_block`.
    """
    start, stride = offset + (lines[0] * line + part[0]) * dtype.itemsize, line * dtype.itemsize
    if data.size == 0:
        return
    if copies_bytes(dtype, data):
        _write_segments(descriptor, start, stride, data)
        return
    for top, left, piece in _pieces(data):
        stored = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
        np.copyto(stored, piece, casting="equiv")
        _write_segments(descriptor, start + top * stride + left * dtype.itemsize, stride, stored)


def _read_with_gaps(file: OpenFile, start: int, line: int, dtype: np.dtype[Any], out: Array) -> None:
    """Fill `out` from short lines of a file: read them with the gaps between the needed elements.

    Everything is read into the thread's scratch memory, and only the needed elements are copied to `out`.

    A line is a row of the matrix, or a column if the file is in Fortran order. It has `line` elements, and
    fills one row of `out`. `start` is the byte of the file at which the first needed element begins.
    """
    stride, height = line * dtype.itemsize, max(1, SCRATCH_BYTES // (line * dtype.itemsize))
    for top in range(0, len(out), height):
        block = out[top : top + height]
        lines = scratch((len(block) - 1) * stride + block.shape[1] * dtype.itemsize)
        _fill(file, lines, start + top * stride)
        stored = np.lib.stride_tricks.as_strided(lines.view(dtype), block.shape, (stride, dtype.itemsize))
        np.copyto(block, stored, casting="equiv")


def _read_segments(file: OpenFile, start: int, stride: int, rows: Array) -> None:
    """Fill each row of an array of bytes from its own place in a file.

    Row 0 is at the byte `start` of the file, and each further row `stride` bytes later.
    """
    # switch readahead off: it would load the unneeded bytes between the rows
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    size, left = rows.shape[1], np.arange(len(rows))
    some = left[:: -(-len(rows) // SAMPLES)]
    if (read_rows(file.descriptor, rows, some, start + stride * some, _NOWAIT) == size).all():
        left = left[read_rows(file.descriptor, rows, left, start + stride * left, _NOWAIT) < size]
    _request(file, start + stride * left, size)
    # `_request` asked the disk for the remaining rows in ascending order. Read them in descending order. The
    # first read then waits for the row that was requested last. By then the disk has delivered most other
    # rows, so most later reads do not wait.
    left = left[::-1]
    left = left[read_rows(file.descriptor, rows, left, start + stride * left) < size]
    # `_fill` repeats the reads that failed or returned too few bytes. At the end of the file it raises
    # `EOFError`, and after a disk error `OSError`.
    for number in left.tolist():
        _fill(file, rows[number], start + stride * number)


def _read_past_cache(file: OpenFile, start: int, stride: int, dtype: np.dtype[Any], out: Array) -> bool:
    """Fill each row of `out` from its own place in a file by direct I/O, past the page cache.

    Row 0 is at the byte `start` of the file, and each further row `stride` bytes later. Direct I/O reads
    whole sectors into one half of the thread's scratch memory, while rows are copied from the other half.

    Return True if all rows were read. Return False if direct I/O is impossible or fails, or if the page cache
    seems to contain the rows already: copying them from there is faster. After False, the caller must read
    all rows in another way.
    """
    size, count = out.shape[1] * dtype.itemsize, len(out)
    # There is one read per row. It has `sectors` bytes: as many whole sectors as a row can touch. In the
    # file, rows are `stride` bytes apart, and in the scratch memory `pitch` bytes. Both are equal modulo
    # SECTOR. A row therefore begins at the same offset within a sector in memory as in the file, as direct
    # I/O requires.
    sectors = -(-(size + SECTOR - 1) // SECTOR) * SECTOR
    pitch = sectors + SECTOR + (stride - sectors) % SECTOR
    at_once = min(MAX_READS, DIRECT_BYTES // 2 // pitch)
    if not O_DIRECT or at_once < 1:
        return False
    if file.cached([start + stride * number for number in range(0, count, -(-count // SAMPLES))]):
        return False
    halves = scratch(DIRECT_BYTES).reshape(2, -1)
    try:
        descriptor = os.open(file.path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return False

    def started(number: int) -> Callable[[], bool]:
        """Start to read the batch `number`: up to `at_once` rows of `out`, from row `number * at_once` on.

        Even batches are read into the first half of the scratch memory, odd batches into the second half.
        Return a function that waits for the reads and copies the rows to `out`. If any read failed, that
        function copies nothing and returns False. Otherwise it returns True.
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
    """Ask the system to load the `size` bytes at each of these offsets into the page cache. Do not wait.

    Each request is extended to nearby bytes, since these are often read next. `WINDOW` and `MAX_WINDOW`
    define how many bytes are added.
    """
    window = 1 << (WINDOW * size).bit_length() - 1 if WINDOW * size <= MAX_WINDOW else mmap.PAGESIZE
    for offset in offsets.tolist():
        first, last = offset // window * window, -(-(offset + size) // window) * window
        os.posix_fadvise(file.descriptor, first, last - first, os.POSIX_FADV_WILLNEED)


def _fill(file: OpenFile, buffer: Any, offset: int) -> None:
    """Fill a buffer with the bytes at an offset of a file. Raises `EOFError` if the file is too short."""
    done = 0
    while done < buffer.nbytes:
        got = os.preadv(file.descriptor, [buffer[done:]], offset + done)
        if not got:
            raise EOFError(f"ends before byte {offset + buffer.nbytes}")
        done += got


def _write_segments(descriptor: int, start: int, stride: int, data: Array) -> None:
    """Write each row of an array to its own place in a file.

    Row 0 begins at the byte `start` of the file, and each further row `stride` bytes later.
    """
    if data.flags.c_contiguous and stride * len(data) == data.nbytes:
        data = data.reshape(1, -1)
    size = data.shape[1] * data.itemsize
    for offset in range(start, start + stride * len(data), stride):
        # If the first or the last page of a row is written only in part, the system must read that page from
        # the disk first. Request these pages for all rows before the first write. Otherwise each write would
        # wait for its own pages.
        for edge in (offset, offset + size - 1):
            os.posix_fadvise(descriptor, edge, 1, os.POSIX_FADV_WILLNEED)
    for number, row in enumerate(data.view(np.uint8)):
        done = 0
        while done < row.nbytes:
            done += os.pwritev(descriptor, [row[done:]], start + number * stride + done)


def _pieces(block: Array) -> list[tuple[int, int, Array]]:
    """Cut a block into pieces of at most `SCRATCH_BYTES`, the size of the scratch memory.

    Return for each piece the indices of its first row and first column in `block`, and its view of `block`.
    """
    height, width = block.shape
    elements = SCRATCH_BYTES // block.itemsize
    across = max(1, min(width, elements // min(height, SCRATCH_LINES)))
    down = max(1, min(height, elements // across))
    return [
        (top, left, block[top : top + down, left : left + across])
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
