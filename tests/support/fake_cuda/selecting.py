"""NumPy versions of the kernels that select elements of C, and what prepares a launch of each (`kernels`)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from oocgemm.backends.base import SEGMENTS, SELECTED, Factors, numpy_dtype
from oocgemm.backends.host.selection import select
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning.device_memory import MIN_SEGMENT
from tests.support.fake_cuda.memory import Block, Memory, block_of
from tests.support.fake_cuda.work import Macros, Work, values

_LONG, _REAL, _POINTER = ctypes.c_longlong, ctypes.c_double, ctypes.c_void_p
WIDTHS = {"0": "void64", "1": "void128"}  # dtypes of selected elements, by the macro OOC_WIDE
_DTYPES = {c: name for name, c in C_TYPES.items()}


def topk(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare topk of kernels/selection/topk.cu, which selects the largest elements of rows of C."""
    kinds = (_POINTER, *(_LONG for _ in range(6)), *(_POINTER for _ in range(3)))
    source, rows, width, top, left, count, excludes_self, *factors, kept = values(kinds, pointers)
    strip = source, (rows, width), (top, left), factors
    return _selecting(memory, macros, strip, kept, (rows, count), excludes_self=bool(excludes_self))


def topk_columns(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare topk_columns, which selects those of columns."""
    kinds = (_POINTER, *(_LONG for _ in range(6)), *(_POINTER for _ in range(3)))
    source, rows, width, top, left, columns, count, *factors, kept = values(kinds, pointers)
    strip = source, (rows, width), (top, left), factors
    return _selecting(memory, macros, strip, kept, (columns, count), excludes_self=None)


def _selecting(
    memory: Memory,
    macros: Macros,
    strip: tuple[int, tuple[int, int], tuple[int, int], Sequence[int]],
    kept: int,
    shape: tuple[int, int],
    excludes_self: bool | None,
) -> Work:
    """Prepare the selection of the rows of a strip, or of its columns if `excludes_self` is None."""
    source, (rows, width), (top, left), places = strip
    summed, element = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]]), SELECTED[WIDTHS[macros["OOC_WIDE"]]]
    pitch = width * int(macros.get("OOC_PITCH", "1"))
    sums, best = (
        memory.matrix(source, summed, rows, width, pitch),
        memory.matrix(kept, element, *shape, shape[1]),
    )
    factors, read = _factors(memory, macros, places, element["score"], (top + rows, left + width))
    read.append(block_of(source, summed, rows, width, pitch))

    def run() -> None:
        if excludes_self is None:
            turned = factors and factors._replace(rows=factors.cols, cols=factors.rows)
            select(best, sums[:, : shape[0]].T, turned, (left, top), False)
        else:
            select(best, sums, factors, (top, left), excludes_self)

    written = block_of(kept, element, *shape, shape[1])
    return Work(run, [*read, written], [written])


def _factors(
    memory: Memory, macros: Macros, places: Sequence[int], dtype: np.dtype[Any], ends: tuple[int, int]
) -> tuple[Factors | None, list[Block]]:
    """Return the factors of the rows and columns of a strip, which end at `ends`, and their blocks."""
    if macros["OOC_RULE"] == "0":
        return None, []
    found = [memory.matrix(place, dtype, 1, end, end)[0] for place, end in zip(places, ends, strict=True)]
    blocks = [block_of(place, dtype, 1, end, end) for place, end in zip(places, ends, strict=True)]
    return Factors(found[0], found[1], macros["OOC_RULE"] == "2"), blocks


def threshold(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare kernels/selection/threshold.cu, which finds the elements of a strip that are large enough.

    Its elements are in segments of one or two, which are not in the order of rows.
    """
    kinds = _POINTER, *(_LONG for _ in range(5)), _REAL, *(_POINTER for _ in range(5))
    source, rows, width, top, left, excludes_self, least, *places = values(kinds, pointers)
    to = places[2:]
    summed, element = numpy_dtype(_DTYPES[macros["OOC_ACCUMULATED"]]), SELECTED[WIDTHS[macros["OOC_WIDE"]]]
    pitch = width * int(macros.get("OOC_PITCH", "1"))
    sums = memory.matrix(source, summed, rows, width, pitch)
    factors, reads = _factors(memory, macros, places[:2], element["score"], (top + rows, left + width))
    room = rows * (width // MIN_SEGMENT + 1)
    counters = memory.matrix(to[0], np.uint64, 1, 2, 2)
    segments = memory.matrix(to[1], SEGMENTS, 1, room, room)
    elements = memory.matrix(to[2], element, 1, rows * width, rows * width)

    def run() -> None:
        assert not counters.any()
        scores = sums.astype(element["score"])
        if factors is not None:
            u, v = factors.rows[top : top + rows, None], factors.cols[left : left + width]
            scores = 2 * scores - (u + v) if factors.nearness else scores * (u * v)
            scores = np.clip(scores, None if factors.nearness else -1, 0 if factors.nearness else 1)
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
