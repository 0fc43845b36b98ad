"""Read and write blocks of a matrix in a file whose lines (its rows or its columns) are contiguous.

The part of a line that belongs to a block is called a segment. Segments are read by system calls. A memory
map would be slow, because each page fault also loads much unneeded data around the segment (readahead).

- Segments of short lines are read together with the gaps between them, and then copied.
- Segments of long lines are read straight into the destination, many per system call. Segments outside the
  page cache are all requested from the disk first. On a virtual disk, reading a segment of 2 to 8 KiB then
  took 7 to 20 us. Without these requests it took 85 to 140 us.
- If the file is too large to stay in the page cache, segments are read past it by direct I/O.
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
from oocgemm.stores.files import MIN_SEGMENT, O_DIRECT, SECTOR, OpenFile, scratch
from oocgemm.stores.opener import Opener, open_regular

# Lines of at most this many bytes are read whole, and the needed elements are copied from them. For lines of
# 8 KiB, this takes about as long as one read per line of only the needed elements.
MAX_LINE = 8 << 10
# The size of each thread's scratch memory, in bytes. Elements that cannot be read straight into their
# destination pass through it. 256 KiB fit into the processor's cache.
SCRATCH_BYTES = 256 << 10
# A block of more than SCRATCH_BYTES is cut into pieces of at least this many rows. The last pieces may have
# fewer.
SCRATCH_LINES = SCRATCH_BYTES // MAX_LINE
# Before segments of `size` bytes are read from the disk, they are requested with posix_fadvise. Each request
# is extended to multiples of a window, because nearby bytes are often read next. The window is the largest
# power of two up to WINDOW * size, or one page if WINDOW * size exceeds MAX_WINDOW. With WINDOW = 8 and a
# page cache of 300 MiB, pages were evicted before they were read.
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


def read_part(
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
    """Read a block of an uncompressed chunk, which begins at the byte `offset` of a file.

    The arguments are those of `read_block`. Whole lines that preadv cannot read in place, or only slowly, are
    copied: preadv cannot transpose or byte-swap elements, and it is slow for lines of fewer than
    `MIN_SEGMENT` bytes that are not adjacent in `out`. Short lines are copied from scratch memory, which
    stays in the processor's cache, and others from a memory map.
    """
    size = line * dtype.itemsize
    in_place = copies_bytes(dtype, out) and (out.flags.c_contiguous or size >= MIN_SEGMENT)
    if part == (0, line) and not in_place and size < MIN_SEGMENT:
        _read_with_gaps(file, offset + lines[0] * size, line, dtype, out)
    elif part == (0, line) and not in_place:
        stored = file.mapped(offset + lines[0] * size, out.shape[0] * size).view(dtype)
        np.copyto(out, stored.reshape(out.shape), casting="equiv")
    else:
        read_block(file, offset, line, dtype, lines, part, out, past_cache=past_cache)


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
    """Fill `out` from short lines of a file, one row per line, by large reads that include unneeded elements.

    `line` is the number of elements in a line. `start` is the byte of the file at which the first needed
    element begins.
    """
    stride, height = line * dtype.itemsize, max(1, SCRATCH_BYTES // (line * dtype.itemsize))
    for top in range(0, len(out), height):
        block = out[top : top + height]
        # The last line is filled up to the end of `block` only: the file may end there.
        stored = scratch(len(block) * stride)
        _fill(
            file, stored[: (len(block) - 1) * stride + block.shape[1] * dtype.itemsize], start + top * stride
        )
        np.copyto(block, stored.view(dtype).reshape(len(block), line)[:, : block.shape[1]], casting="equiv")


def _read_segments(file: OpenFile, start: int, stride: int, rows: Array) -> None:
    """Fill each row of an array of bytes from its own place in a file.

    Row 0 is at the byte `start` of the file, and each further row `stride` bytes later.
    """
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
    # Repeat the incomplete reads with `_fill`, which raises an error if a read fails again.
    for number in left.tolist():
        _fill(file, rows[number], start + stride * number)


def _read_past_cache(file: OpenFile, start: int, stride: int, dtype: np.dtype[Any], out: Array) -> bool:
    """Fill each row of `out` from its own place in a file by direct I/O, past the page cache.

    Row 0 is at the byte `start` of the file, and each further row `stride` bytes later.

    Return True if all rows were read. Return False if direct I/O fails, or if the page cache seems to contain
    the rows already. The caller must then read all rows in another way.
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
        """Start to read batch `number` of the rows of `out`, into one half of the scratch memory.

        Return a function that waits for the reads and copies the rows to `out`. If a read failed, it copies
        nothing and returns False.
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

    Each request is extended to nearby bytes, which are often read next: see `WINDOW`.
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
        # To write a part of a page, the system must first read that page from the disk. Request the first and
        # the last page of every row now, so that the writes below do not wait for one page after another.
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
