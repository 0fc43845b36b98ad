"""Compiler options and launch shapes of the kernels in kernels/transforms, without importing cupy."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import isnan

from oocgemm.kernels.spec import C_TYPES, blocks
from oocgemm.planning.elements import MAX_STEPS, ElementStep, missing_code

# Elements of a row that a thread loads and stores together, if rows consist of whole groups of them.
WIDTH = 4
# Threads across a row in a thread block, rows that a block transforms, and CUDA's limit on blocks along y.
_ACROSS, _ROWS, _MAX_GRID = 64, 64, 65535
# Rows, or columns, of the parts into which the kernels moments_columns and moments_rows cut a line, and how
# many numbers they find of each.
_PART_ROWS, _PART_COLS, MOMENTS = 128, 4096, 5
# Rows per thread block of the kernels measure_sums and measure_products, if k is along columns.
_SUMMED, _BLOCK_ROWS = 1024, 32


class ElementNumbers(ctypes.Structure):
    """The argument `step_t` of a kernel: the address of the numbers of a panel, and the constants."""

    _fields_ = (("numbers", ctypes.c_void_p), ("first", ctypes.c_double), ("second", ctypes.c_double))


class Elements(ctypes.Structure):
    """The argument `elements_t` of a kernel."""

    _fields_ = (("steps", ElementNumbers * MAX_STEPS),)


# How the kernel counts the axis of the numbers of a step.
AXES = ("", "rows", "cols")


@lru_cache
def expand_options(stored: str, result: str, steps: tuple[ElementStep, ...], width: int) -> tuple[str, ...]:
    """Return the compiler options of the kernel.

    Args:
        stored, result: dtypes of the elements before and after the steps.
        steps: what happens to each element.
        width: elements per thread, 1 or `WIDTH`.
    """
    macros = {
        "STORED": C_TYPES[stored],
        "RESULT": C_TYPES[result],
        "CHAIN": _chain(steps),
        "WIDTH": width,
    }
    # Logarithms take so many registers that those of two rows would be spilled.
    macros["UNROLL"] = 1 if any(step.kind == "log1p" for step in steps) else 2
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def _chain(steps: Sequence[ElementStep]) -> str:
    return "".join(
        f"OOC_STEP({_form(step)},{number},{AXES.index(step.axis)})" for number, step in enumerate(steps)
    )


def _form(step: ElementStep) -> str:
    """Return the name of the function that does a step, in kernels/transforms/steps.cuh."""
    return f"{step.kind}_nan" if any(map(isnan, step.constants)) else step.kind


def expand_grid(rows: int, cols: int, width: int) -> tuple[int, int, int]:
    """Return the number of thread blocks along x, y and z for a panel of this shape."""
    return blocks(cols, _ACROSS * width), min(blocks(rows, _ROWS), _MAX_GRID), 1


@lru_cache
def measure_options(by_column: bool, steps: tuple[ElementStep, ...], width: int) -> tuple[str, ...]:
    """Return the compiler options of the kernels in kernels/transforms/measure.cu.

    Args:
        by_column: whether indices along k are columns of the panel, rather than rows.
        steps: of the elements of X. The kernels find the numbers whose source is the panel.
        width: elements per thread, 1 or `WIDTH`.
    """
    rules = {step.kind: step.rule for step in steps if step.in_panel}
    macros = {
        "K_AXIS": by_column,
        "MISSING": missing_code(steps) is not None,
        "WIDTH": width,
        "CENTER": "center" in rules or "correct" in rules,
        "SCALE": ("", "k", "hwe").index(rules.get("scale", "")),
        "FILL": rules.get("impute") == "mean",
        "RAISES": rules.get("impute") == "raise",
        "CORRECTS": any(step.is_deferred for step in steps),
    }
    return tuple(f"-DOOC_{name}={int(value)}" for name, value in macros.items())


@lru_cache
def moments_options(stored: str, steps: tuple[ElementStep, ...], code: float | None) -> tuple[str, ...]:
    """Return the compiler options of the kernels in kernels/transforms/moments.cu.

    Args:
        stored: dtype of the elements.
        steps: what happens to each element before.
        code: that of missing elements, which may be NaN; None if no element is missing.
    """
    missing = 0 if code is None else 2 if isnan(code) else 1
    macros = {"STORED": C_TYPES[stored], "CHAIN": _chain(steps), "MISSING": missing}
    return tuple(f"-DOOC_{name}={value}" for name, value in macros.items())


def parts_of(rows: int, cols: int, axis: int) -> int:
    """Return into how many parts the lines of a block along an axis are cut."""
    return blocks(rows, _PART_ROWS) if axis == 0 else blocks(cols, _PART_COLS)


def moments_grid(rows: int, cols: int, axis: int) -> tuple[int, int, int]:
    """Return the thread blocks of the kernels for the columns (`axis` 0) or rows (1) of a block."""
    return blocks(cols, 256) if axis == 0 else blocks(rows, 8), parts_of(rows, cols, axis), 1


def sums_grid(rows: int, cols: int, width: int, *, by_column: bool) -> tuple[int, int, int]:
    """Return the thread blocks of the kernel measure_sums for a stored panel of this shape."""
    return (blocks(cols, _ACROSS * width), blocks(rows, _SUMMED), 1) if by_column else (rows, 1, 1)


def products_grid(rows: int, cols: int, width: int, *, by_column: bool) -> tuple[int, int, int]:
    """Return the thread blocks of the kernel measure_products for a stored panel of this shape."""
    return (blocks(rows, _BLOCK_ROWS) if by_column else blocks(cols, _ACROSS * width)), 1, 1
