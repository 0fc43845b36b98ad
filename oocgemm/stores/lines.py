"""Read and write blocks of files that store lines (rows or columns) contiguously.

A block takes a part of each line, so it consists of many segments. Page faults on a mapping would read each
segment with the kernel's readahead, which can be a hundred times its size, and keep its pages in the resident
set. Segments are read by system calls instead:

- Segments of short lines are read with the gaps between them into the thread's scratch memory, and copied
  from there.
- Other segments are read into their places, many per call. Before the first wait, the pages of all segments
  that the page cache lacks are requested, so that the disk has many requests in flight.
- Segments of a file that the page cache cannot hold bypass it. They are read into the thread's scratch
  memory.

On two Zen 5 cores and a virtual disk a segment of 2 to 8 KiB took 2 to 3 us from the page cache. On a cold
cache it took 7 to 20 us, and 85 to 140 us if each read waited for its own request.
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

# Lines of up to this many bytes are read with their gaps: a copy takes about as long as a separate read.
MAX_LINE = 8 << 10
# Scratch memory of a thread, in which segments are gathered, and transposed or byte-swapped if need be. It
# takes SCRATCH_LINES of the longest lines, and fits into the processor's cache.
SCRATCH_BYTES = 256 << 10
SCRATCH_LINES = SCRATCH_BYTES // MAX_LINE
# Uncached segments are requested in windows of up to WINDOW times their length, and at most MAX_WINDOW bytes,
# since the bytes that follow are often read next. This saves a fifth of the processor time. Windows of eight
# times the length thrashed a page cache of 300 MiB.
WINDOW, MAX_WINDOW = 2, 64 << 10
# Scratch memory of a thread for reads past the page cache. It bounds the requests in flight. With 128 of 8 to
# 16 KiB a virtual disk is as fast as with 512.
DIRECT_BYTES = 8 << 20
SAMPLES = 8  # segments checked to estimate whether a block is cached

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def copies_bytes(dtype: np.dtype[Any], block: Array) -> bool:
    """Return whether rows of a block have the same bytes as lines of a stored dtype."""
    return dtype.isnative and block.strides[1] == dtype.itemsize


def scratch_bytes(*, past_cache: bool) -> int:
    """Return the scratch memory that a thread needs to read or write blocks."""
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
    """Fill `out` with the elements `part` of a range of lines, one line per row.

    Arguments:
        offset, line: the file has lines of `line` elements from the byte `offset` on
        dtype: the elements, in stored byte order; `out` has the native one
        past_cache: bytes that the page cache lacks bypass it, as in `OpenFile.read`

    Raises `EOFError` if the file is shorter.
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
    """Write the rows of `data` as the elements `part` of a range of lines.

    The arguments are those of `read_block`.
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
    """Fill the rows of `out` from lines of `line` elements, the first at the byte `start`, gaps included."""
    stride, height = line * dtype.itemsize, max(1, SCRATCH_BYTES // (line * dtype.itemsize))
    for top in range(0, len(out), height):
        block = out[top : top + height]
        lines = scratch((len(block) - 1) * stride + block.shape[1] * dtype.itemsize)
        _fill(file, lines, start + top * stride)
        stored = np.lib.stride_tricks.as_strided(lines.view(dtype), block.shape, (stride, dtype.itemsize))
        np.copyto(block, stored, casting="equiv")


def _read_segments(file: OpenFile, start: int, stride: int, rows: Array) -> None:
    """Fill rows of bytes with segments that begin `stride` bytes apart, the first at `start`."""
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    size, left = rows.shape[1], np.arange(len(rows))
    some = left[:: -(-len(rows) // SAMPLES)]
    if (read_rows(file.descriptor, rows, some, start + stride * some, _NOWAIT) == size).all():
        left = left[read_rows(file.descriptor, rows, left, start + stride * left, _NOWAIT) < size]
    _request(file, start + stride * left, size)
    left = left[::-1]  # once the last request is done most others are, so few reads wait
    left = left[read_rows(file.descriptor, rows, left, start + stride * left) < size]
    for number in left.tolist():  # at the end of the file, or after an error, which a retry raises
        _fill(file, rows[number], start + stride * number)


def _read_past_cache(file: OpenFile, start: int, stride: int, dtype: np.dtype[Any], out: Array) -> bool:
    """Fill the rows of `out`, past the page cache, from segments that begin `stride` bytes apart.

    Returns False if the page cache has them, or if the system refuses. Whole sectors are read into one half
    of the thread's scratch memory while segments are copied from the other half.
    """
    size, count = out.shape[1] * dtype.itemsize, len(out)
    # Each read takes `sectors` bytes. Segments are `pitch` bytes apart in memory. `pitch` and `stride` are
    # equal modulo a sector, so a segment has the same offset within its sector in memory as in the file.
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
        """Start to read a batch. Return a function that waits, copies, and returns whether all was read."""
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
        finally:  # after an error too: reads must end before the scratch memory is used again
            while in_flight:
                complete &= in_flight.popleft()()
    return complete


def _request(file: OpenFile, offsets: Array, size: int) -> None:
    """Ask the system to load segments of `size` bytes into the page cache.

    Each request is extended to an aligned window of the file, since what follows is often wanted next.
    """
    window = 1 << (WINDOW * size).bit_length() - 1 if WINDOW * size <= MAX_WINDOW else mmap.PAGESIZE
    for offset in offsets.tolist():
        first, last = offset // window * window, -(-(offset + size) // window) * window
        os.posix_fadvise(file.descriptor, first, last - first, os.POSIX_FADV_WILLNEED)


def _fill(file: OpenFile, buffer: Any, offset: int) -> None:
    """Fill a buffer with the bytes from an offset on. Raises `EOFError` if the file is shorter."""
    done = 0
    while done < buffer.nbytes:
        got = os.preadv(file.descriptor, [buffer[done:]], offset + done)
        if not got:
            raise EOFError(f"ends before byte {offset + buffer.nbytes}")
        done += got


def _write_segments(descriptor: int, start: int, stride: int, data: Array) -> None:
    """Write rows as segments that begin `stride` bytes apart, the first at `start`."""
    if data.flags.c_contiguous and stride * len(data) == data.nbytes:
        data = data.reshape(1, -1)
    size = data.shape[1] * data.itemsize
    for offset in range(start, start + stride * len(data), stride):
        # The kernel reads each page that is written in part, and waits for it unless it was requested before.
        for edge in (offset, offset + size - 1):
            os.posix_fadvise(descriptor, edge, 1, os.POSIX_FADV_WILLNEED)
    for number, row in enumerate(data.view(np.uint8)):
        done = 0
        while done < row.nbytes:
            done += os.pwritev(descriptor, [row[done:]], start + number * stride + done)


def _pieces(block: Array) -> list[tuple[int, int, Array]]:
    """Cut a block into pieces that fit into the scratch memory. Return each with its first row and column."""
    height, width = block.shape
    elements = SCRATCH_BYTES // block.itemsize
    across = max(1, min(width, elements // min(height, SCRATCH_LINES)))
    down = max(1, min(height, elements // across))
    return [
        (top, left, block[top : top + down, left : left + across])
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
