"""Blocks of files that store lines (rows, or columns) one after another, where a block takes a part of each line.

Such a block is many segments. Page faults on a mapping would read each with the system's readahead, which can be a
hundred times its size, and keep its pages in the resident set. Segments are read into their place instead:

- across short gaps in one sweep, which throws the gaps away;
- otherwise one by one. A first pass takes what the page cache holds and requests the rest, so that the disk has many
  requests in flight. A second pass waits for them.

On two Zen 5 cores and a virtual disk a segment of 2 to 8 KiB took 2 to 3 us from the page cache. On a cold cache it took
9 to 12 us, and 85 to 140 us if each read waited for its own request.
"""

import os
from typing import Any

import numpy as np

from oocgemm.plan.tiling import Span
from oocgemm.stores.base import Array
from oocgemm.stores.files import SEGMENTS, OpenFile, scratch

# Copying a gap of this size takes as long as a system call: 1 to 2 us.
MAX_GAP = 8 << 10
# Where stored and wanted order or byte order differ, a block passes through so much memory of the thread, in pieces of
# that many lines.
SCRATCH_BYTES = 1 << 20
SCRATCH_LINES = 64

_GAP = np.empty(MAX_GAP, np.uint8)  # every thread reads gaps into it, and none uses what it holds
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def straight(dtype: np.dtype[Any], block: Array) -> bool:
    """Whether the bytes of lines of a stored dtype are those of the rows of a block."""
    return dtype.isnative and block.strides[1] == dtype.itemsize


def read_block(
    file: OpenFile,
    offset: int,
    line: int,
    dtype: np.dtype[Any],
    lines: Span,
    part: Span,
    out: Array,
    *,
    past_cache: bool = False,
) -> None:
    """Fill `out` with the elements `part` of some lines, one in each row.

    The file holds lines of `line` elements from the byte `offset` on. `dtype` has the stored byte order, `out` that of
    the machine. Whole lines are read past the page cache with `past_cache`, as in `OpenFile.read`. Raises `EOFError` if
    the file ends before.
    """
    start, stride = offset + (lines[0] * line + part[0]) * dtype.itemsize, line * dtype.itemsize
    if out.size == 0:
        return
    if not straight(dtype, out):
        for top, left, piece in _pieces(out):
            held = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
            read_lines(file, start + top * stride + left * dtype.itemsize, stride, held)
            np.copyto(piece, held, casting="equiv")
    elif part == (0, line):
        file.read(start, out, past_cache=past_cache)
    else:
        read_lines(file, start, stride, out)


def write_block(
    descriptor: int, offset: int, line: int, dtype: np.dtype[Any], lines: Span, part: Span, data: Array
) -> None:
    """Write the rows of `data` as the elements `part` of some lines. The arguments are those of `read_block`."""
    start, stride = offset + (lines[0] * line + part[0]) * dtype.itemsize, line * dtype.itemsize
    if data.size == 0:
        return
    if not straight(dtype, data):
        for top, left, piece in _pieces(data):
            held = scratch(piece.size * dtype.itemsize).view(dtype).reshape(piece.shape)
            np.copyto(held, piece, casting="equiv")
            _write_lines(descriptor, start + top * stride + left * dtype.itemsize, stride, held)
    else:
        _write_lines(descriptor, start, stride, data)


def read_lines(file: OpenFile, offset: int, stride: int, out: Array) -> None:
    """Fill the rows of `out`, contiguous each, with segments that begin `stride` bytes apart, the first at `offset`.
    Raises `EOFError` if the file ends before."""
    segments = _segments(out, stride)
    gap = stride - segments[0].nbytes
    done = _sweep(file.descriptor, offset, stride, segments) if gap <= MAX_GAP and len(segments) > 1 else 0
    if done == len(segments):
        return
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    missed = []
    for number, segment in enumerate(segments[done:], done):
        at = offset + number * stride
        try:
            got = os.preadv(file.descriptor, [segment], at, _NOWAIT)
        except OSError:  # nothing of it is cached, or the file system always waits; other errors come again
            got = 0
        if got < segment.nbytes:
            os.posix_fadvise(file.descriptor, at, segment.nbytes, os.POSIX_FADV_WILLNEED)
            missed.append((segment, at))
    for segment, at in missed:
        done = 0
        while done < segment.nbytes:
            got = os.preadv(file.descriptor, [segment[done:]], at + done)
            if not got:
                raise EOFError(f"ends before byte {at + segment.nbytes}")
            done += got


def _sweep(descriptor: int, offset: int, stride: int, segments: list[Any]) -> int:
    """Read segments and the gaps between them. Returns how many segments are complete: the others had a short read."""
    gap = _GAP[: stride - segments[0].nbytes]
    each = SEGMENTS // 2
    for first in range(0, len(segments), each):
        some = segments[first : first + each]
        buffers: list[Any] = [buffer for segment in some for buffer in (segment, gap)][:-1]
        size = (len(some) - 1) * stride + some[0].nbytes
        if os.preadv(descriptor, buffers, offset + first * stride) < size:
            return first
    return len(segments)


def _write_lines(descriptor: int, offset: int, stride: int, data: Array) -> None:
    for number, segment in enumerate(_segments(data, stride)):
        done = 0
        while done < segment.nbytes:
            done += os.pwritev(descriptor, [segment[done:]], offset + number * stride + done)


def _segments(block: Array, stride: int) -> list[Any]:
    """The rows of a block as bytes; one segment if they follow on one another, here and in the file."""
    if block.flags.c_contiguous and stride * block.shape[0] == block.nbytes:
        return [block.reshape(-1).view(np.uint8)]
    return list(block.view(np.uint8))


def _pieces(block: Array) -> list[tuple[int, int, Array]]:
    """Cut a block into pieces that fit into the scratch: for each its first row and column, and itself."""
    height, width = block.shape
    elements = SCRATCH_BYTES // block.itemsize
    across = max(1, min(width, elements // min(height, SCRATCH_LINES)))
    down = max(1, min(height, elements // across))
    return [
        (top, left, block[top : top + down, left : left + across])
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
