"""NumPy versions of the kernels in kernels/transforms/measure.cu."""

import ctypes
from typing import NamedTuple

import numpy as np

from tests.support.fake_cuda.memory import Array, Block, Memory, block_of
from tests.support.fake_cuda.work import Macros, Work, values

_LONG, _REAL, _POINTER, _INT = ctypes.c_longlong, ctypes.c_double, ctypes.c_void_p, ctypes.c_int


class Panel(NamedTuple):
    """A stored panel of X: its elements, a row per row of X, with 0 for missing ones; and which are not."""

    x: Array
    kept: Array
    block: Block

    @classmethod
    def of(cls, memory: Memory, macros: Macros, source: int, rows: int, cols: int, code: int) -> "Panel":
        assert cols % int(macros["OOC_WIDTH"]) == 0
        stored = memory.matrix(source, np.dtype(np.int8), rows, cols, cols)
        x = (stored if macros["OOC_K_AXIS"] == "1" else stored.T).astype(np.int64)
        kept = np.full(x.shape, True) if macros["OOC_MISSING"] == "0" else x != code
        return cls(np.where(kept, x, 0), kept, block_of(source, np.dtype(np.int8), rows, cols, cols))


def measure_sums(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that adds up columns of X."""
    *given, depth, to = values((_POINTER, _LONG, _LONG, _INT, _LONG, _POINTER), pointers)
    rows, cols = given[1:3]
    extent = cols if macros["OOC_K_AXIS"] == "1" else rows
    sums = memory.matrix(to, np.dtype(np.int64), 3, extent, depth)

    def run() -> None:
        panel = Panel.of(memory, macros, *given)
        sums[...] += np.stack((panel.kept.sum(0), panel.x.sum(0), (panel.x * panel.x).sum(0)))

    block = block_of(to, np.dtype(np.int64), 3, extent, depth)
    return Work(run, [block_of(given[0], np.dtype(np.int8), rows, cols, cols), block], [block])


def measure_numbers(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that finds the numbers of columns of X, or their weights."""
    first, columns, depth, rows, *at = values((*(_LONG,) * 4, *(_POINTER,) * 6), pointers)
    center, scale, fill, raises, corrects, missing = (
        int(macros[f"OOC_{name}"]) for name in ("CENTER", "SCALE", "FILL", "RAISES", "CORRECTS", "MISSING")
    )
    real = np.dtype(np.float64)
    sums = memory.matrix(at[0] + 8 * first, np.dtype(np.int64), 3, columns, depth)
    found = {4: 1} if corrects else {1: fill, 2: center, 3: scale}
    places = {i: (at[i] + 8 * first, real, 1, columns, columns) for i, used in found.items() if used}
    numbers = {i: memory.matrix(*place)[0] for i, place in places.items()}
    wrong = memory.matrix(at[5], np.dtype(np.int32), 1, 1, 1)

    def run() -> None:
        count, total, squares = sums
        with np.errstate(all="ignore"):
            mean, lacks = total / count, count != rows
            fails = bool(raises) & lacks | (count == 0) & (bool(center or scale) | bool(fill) & lacks)
            if corrects:
                numbers[4][:] = mean if missing else total
            else:
                if fill:
                    numbers[1][:] = np.where(lacks, mean, 0)
                if center:
                    numbers[2][:] = mean
                if scale:
                    variance = (count * squares - total * total) / (count.astype(float) * count)
                    divisor = np.sqrt(variance if scale == 1 else mean * (1 - mean / 2))
                    fails |= ~(divisor > 0) | (scale == 2) & ~((mean >= 0) & (mean <= 2))
                    numbers[3][:] = 1 / divisor
        if fails.any():
            wrong[...] = 1

    read = block_of(at[0] + 8 * first, np.dtype(np.int64), 3, columns, depth)
    written = [*(block_of(*place) for place in places.values()), block_of(at[5], np.dtype(np.int32), 1, 1, 1)]
    return Work(run, [read], written)


def measure_products(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that multiplies rows of X by weights."""
    *given, at, to = values((_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER), pointers)
    stored, real = given[1:3], np.dtype(np.float64)
    rows, cols = stored if macros["OOC_K_AXIS"] == "1" else stored[::-1]
    weights, products = memory.matrix(at, real, 1, cols, cols)[0], memory.matrix(to, real, 1, rows, rows)[0]

    def run() -> None:
        products[...] += Panel.of(memory, macros, *given).x @ weights

    panel = block_of(given[0], np.dtype(np.int8), stored[0], stored[1], stored[1])
    block = block_of(to, real, 1, rows, rows)
    return Work(run, [panel, block_of(at, real, 1, cols, cols), block], [block])


def measure_square(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that adds up the squares of the weights."""
    depth, at, to = values((_LONG, _POINTER, _POINTER), pointers)
    real = np.dtype(np.float64)
    weights, square = memory.matrix(at, real, 1, depth, depth)[0], memory.matrix(to, real, 1, 1, 1)

    def run() -> None:
        square[...] = weights @ weights

    return Work(run, [block_of(at, real, 1, depth, depth)], [block_of(to, real, 1, 1, 1)])


def measure_center(memory: Memory, macros: Macros, pointers: list[int]) -> Work:
    """Prepare the kernel that finds what is subtracted from C."""
    extent, alpha, divisor, *at = values((_LONG, _REAL, _REAL, *(_POINTER,) * 4), pointers)
    places = [
        (x, np.dtype(np.float64), 1, n, n) for x, n in zip(at, (extent, 1, extent, extent), strict=True)
    ]
    products, square, rows, cols = (memory.matrix(*place)[0] for place in places)

    def run() -> None:
        rows[...] = alpha * (products / divisor)
        cols[...] = alpha * (products / divisor - square / divisor**2)

    blocks = [block_of(*place) for place in places]
    return Work(run, blocks[:2], blocks[2:])
