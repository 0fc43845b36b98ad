"""Compiler options and launch shapes of the kernels in kernels/transforms, without importing cupy."""

from functools import lru_cache
from math import isnan

from oocgemm.kernels.spec import C_TYPES, blocks
from oocgemm.planning.expansion import Measure

# Elements of a row that a thread loads and stores together, if rows consist of whole groups of them.
WIDTH = 4
# Threads across a row in a thread block, rows that a block transforms, and CUDA's limit on blocks along y.
_ACROSS, _ROWS, _MAX_GRID = 64, 64, 65535
# Rows per thread block of the kernels measure_sums and measure_products, if k is along columns.
_SUMMED, _BLOCK_ROWS = 1024, 32


@lru_cache
def expand_options(
    stored: str, result: str, by_column: bool, code: float | None, log1p: bool, width: int
) -> tuple[str, ...]:
    """Return the compiler options of the kernel.

    Args:
        stored, result: dtypes of the elements before and after the transform.
        by_column: whether indices along k are columns of the panel, rather than rows.
        code: the code of missing elements, which may be NaN; None if no element is missing.
        log1p: whether x is replaced by log(1 + x).
        width: elements per thread, 1 or `WIDTH`.
    """
    macros = {
        "STORED": C_TYPES[stored],
        "RESULT": C_TYPES[result],
        "K_AXIS": int(by_column),
        "MISSING": 0 if code is None else 2 if isnan(code) else 1,
        "LOG1P": int(log1p),
        "WIDTH": width,
    }
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def expand_grid(rows: int, cols: int, width: int) -> tuple[int, int, int]:
    """Return the number of thread blocks along x, y and z for a panel of this shape."""
    return blocks(cols, _ACROSS * width), min(blocks(rows, _ROWS), _MAX_GRID), 1


@lru_cache
def measure_options(
    by_column: bool, code: float | None, width: int, measure: Measure, corrects: bool
) -> tuple[str, ...]:
    """Return the compiler options of the kernels in kernels/transforms/measure.cu.

    Args:
        by_column, code, width: as for `expand_options`.
        measure: what is found.
        corrects: whether C is corrected, instead of panels.
    """
    macros = {
        "K_AXIS": by_column,
        "MISSING": code is not None,
        "WIDTH": width,
        "CENTER": measure.center,
        "SCALE": ("", "k", "hwe").index(measure.scale),
        "FILL": measure.fill,
        "RAISES": measure.raises,
        "CORRECTS": corrects,
    }
    return tuple(f"-DOOC_{name}={int(value)}" for name, value in macros.items())


def sums_grid(rows: int, cols: int, width: int, *, by_column: bool) -> tuple[int, int, int]:
    """Return the thread blocks of the kernel measure_sums for a stored panel of this shape."""
    return (blocks(cols, _ACROSS * width), blocks(rows, _SUMMED), 1) if by_column else (rows, 1, 1)


def products_grid(rows: int, cols: int, width: int, *, by_column: bool) -> tuple[int, int, int]:
    """Return the thread blocks of the kernel measure_products for a stored panel of this shape."""
    return (blocks(rows, _BLOCK_ROWS) if by_column else blocks(cols, _ACROSS * width)), 1, 1
