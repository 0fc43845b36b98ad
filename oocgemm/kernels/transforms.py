"""Compiler options and launch shapes of the kernel kernels/transforms/expand.cu, without importing cupy."""

from functools import lru_cache
from math import isnan

from oocgemm.kernels.spec import C_TYPES, blocks

# Elements of a row that a thread loads and stores together, if rows consist of whole groups of them.
WIDTH = 4
# Threads across a row in a thread block, rows that a block transforms, and CUDA's limit on blocks along y.
_ACROSS, _ROWS, _MAX_GRID = 64, 64, 65535


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
