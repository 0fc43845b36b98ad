"""Read parts of many files, whose bytes are scattered in memory, with few system calls.

A part consists of lines that are equally far apart in its file, and equally far apart in memory. Its lines
are the buffers of one vectored read. Short gaps between lines in the file are read too, and dropped. All
parts are submitted together (`oocgemm.stores.aio`), so that Python releases the GIL once for all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oocgemm.stores.aio import MAX_READS, READ_VECTOR, REQUEST, start
from oocgemm.stores.base import Array
from oocgemm.stores.files import SEGMENTS, scratch

# Gaps of lines of at most this many bytes are read with the lines. Parts of longer lines are separate reads.
MAX_LINE = 8 << 10
# A part has at most this many lines: a line and a gap are two buffers of a vectored read.
MAX_PART_LINES = SEGMENTS // 2


class Part(NamedTuple):
    """Lines of a file, and where they go.

    `offset` is the first byte of the first line in the file, `address` the memory for it. Every line has
    `size` bytes. There are at most `MAX_PART_LINES` lines.
    """

    descriptor: int
    offset: int
    address: int
    lines: int
    size: int


def read_parts(parts: Sequence[Part], stride: int, pitch: int) -> Array:
    """Read parts of files into memory. Return for each part whether it was read as a whole.

    The lines of a part begin `stride` bytes apart in its file, and `pitch` bytes apart in memory. Both are at
    least as large as the lines. Raises `OSError` if the system does not support io_submit.
    """
    given = np.array(parts, np.int64).reshape(-1, len(Part._fields))
    owner, (descriptor, offset, address, lines, size) = np.arange(len(given)), given.T
    if stride > MAX_LINE:
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
        buffers[:, 1, 0] = scratch(MAX_LINE, "gaps").ctypes.data
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
    """Read ranges of files into memory, at most `MAX_READS` of them.

    A range is (descriptor, offset in the file, address of the memory, bytes). Returns the number of bytes of
    each read, which is negative for a read that failed. Raises `OSError` if the system does not support
    io_submit.
    """
    if not ranges:
        return []
    requests = np.zeros(len(ranges), REQUEST)
    given = np.array(ranges, np.int64).T
    requests["descriptor"], requests["offset"], requests["address"], requests["size"] = given
    found: list[int] = start(requests)().tolist()
    return found


def _repeated(counts: Array) -> tuple[Array, Array]:
    """Number `counts[i]` items for each i: return the i of every item, and its number among those of i.

    >>> [x.tolist() for x in _repeated(np.array([2, 1, 3]))]
    [[0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
