"""NumPy versions of the kernels that select elements of C, and what prepares a launch of each (`kernels`)."""

import ctypes

import numpy as np

from oocgemm.backends.base import SEGMENTS, SELECTED, numpy_dtype
from oocgemm.backends.host.selection import select
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning.device_memory import MIN_SEGMENT
from tests.support.fake_cuda.memory import Memory, block_of
from tests.support.fake_cuda.work import Macros, Work, values

_LONG, _REAL, _POINTER = ctypes.c_longlong, ctypes.c_double, ctypes.c_void_p
WIDTHS = {"0": "void64", "1": "void128"}  # dtypes of selected elements, by the macro OOC_WIDE
_DTYPES = {c: name for name, c in C_TYPES.items()}


def topk(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare topk of kernels/selection/topk.cu, which selects the largest elements of rows of C."""
    kinds = (_POINTER, *(_LONG for _ in range(6)), _POINTER, _POINTER)
    source, rows, width, top, left, count, excludes_self, scales, kept = values(kinds, pointers)
    strip = source, (rows, width), (top, left), scales
    return _selecting(memory, macros, strip, kept, (rows, count), excludes_self=bool(excludes_self))


def topk_columns(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare topk_columns, which selects those of columns."""
    kinds = (_POINTER, *(_LONG for _ in range(6)), _POINTER, _POINTER)
    source, rows, width, top, left, columns, count, scales, kept = values(kinds, pointers)
    strip = source, (rows, width), (top, left), scales
    return _selecting(memory, macros, strip, kept, (columns, count), excludes_self=None)


def _selecting(
    memory: Memory,
    macros: Macros,
    strip: tuple[int, tuple[int, int], tuple[int, int], int],
    kept: int,
    shape: tuple[int, int],
    excludes_self: bool | None,
) -> Work:
    """Prepare the selection of the rows of a strip, or of its columns if `excludes_self` is None."""
    source, (rows, width), (top, left), scales = strip
    summed, element = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]]), SELECTED[WIDTHS[macros["OOC_WIDE"]]]
    pitch = width * int(macros.get("OOC_PITCH", "1"))
    sums, best = (
        memory.matrix(source, summed, rows, width, pitch),
        memory.matrix(kept, element, *shape, shape[1]),
    )
    read, factors = [block_of(source, summed, rows, width, pitch)], None
    if macros["OOC_SCALED"] == "1":
        extent = max(top + rows, left + width)
        factors = memory.matrix(scales, element["score"], 1, extent, extent)[0]
        read.append(block_of(scales, element["score"], 1, extent, extent))

    def run() -> None:
        if excludes_self is None:
            select(best, sums[:, : shape[0]].T, factors, (left, top), False)
        else:
            select(best, sums, factors, (top, left), excludes_self)

    written = block_of(kept, element, *shape, shape[1])
    return Work(run, [*read, written], [written])


def threshold(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/selection/threshold.cu, which finds the elements of a strip that are large enough.

    Its elements are in segments of one or two, which are not in the order of rows.
    """
    kinds = _POINTER, *(_LONG for _ in range(5)), _REAL, *(_POINTER for _ in range(4))
    source, rows, width, top, left, excludes_self, least, scales, *to = values(kinds, pointers)
    summed, element = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]]), SELECTED[WIDTHS[macros["OOC_WIDE"]]]
    pitch = width * int(macros.get("OOC_PITCH", "1"))
    sums, reads = memory.matrix(source, summed, rows, width, pitch), []
    factors, extent = np.ones(1), max(top + rows, left + width)
    if macros["OOC_SCALED"] == "1":
        factors = memory.matrix(scales, element["score"], 1, extent, extent)[0]
        reads = [block_of(scales, element["score"], 1, extent, extent)]
    room = rows * (width // MIN_SEGMENT + 1)
    counters = memory.matrix(to[0], np.uint64, 1, 2, 2)
    segments = memory.matrix(to[1], SEGMENTS, 1, room, room)
    elements = memory.matrix(to[2], element, 1, rows * width, rows * width)

    def run() -> None:
        assert not counters.any()
        scores = sums.astype(element["score"])
        if reads:
            scores *= factors[top : top + rows, None] * factors[left : left + width]
            np.clip(scores, -1, 1, out=scores)
        kept = (np.abs(scores) if macros["OOC_ABSOLUTE"] == "1" else scores) >= element["score"].type(least)
        across, down = np.arange(left, left + width), np.arange(top, top + rows)[:, None]
        if macros["OOC_TRIANGLE"] == "1":
            kept &= across <= down - bool(excludes_self)
        elif excludes_self:
            kept &= across != down
        for row in reversed(range(rows)):
            columns = np.flatnonzero(kept[row])
            for part in np.array_split(columns, room // rows) if columns.size else ():
                first, number = map(int, counters[0])
                segments[0, number] = row, part.size, first
                elements["score"][0, first : first + part.size] = scores[row, part]
                elements["index"][0, first : first + part.size] = part + left
                counters[0] += np.array([part.size, 1], np.uint64)

    written = [
        block_of(at, dtype, 1, count, count)
        for at, dtype, count in zip(
            to, (np.dtype(np.uint64), SEGMENTS, element), (2, room, rows * width), strict=True
        )
    ]
    return Work(run, [block_of(source, summed, rows, width, pitch), *reads, written[0]], written)
