"""Standardize the rows of an operand for covariances and correlations: find their means and scales."""

from typing import Any

import numpy as np

from oocgemm.errors import InputError, warn_of_data
from oocgemm.jobs.norms import MIN_SQUARES
from oocgemm.jobs.stats import Stats, stats_of
from oocgemm.planning.units import counted
from oocgemm.stores import Array, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import StandardizedMatrix

# What the lines of each axis are called.
_LINES = ("row", "column")
# Maximum number of lines that a message lists.
_LISTED = 5


def standardized(matrix: Matrix, how: str, line_axis: int, kept: Array | None = None) -> Matrix:
    """Return an operand whose lines are standardized, which can be planned with but not read.

    Args:
        matrix: the operand.
        how: "center" to subtract the mean of each line; "scale" to also divide by the norm of the result.
        line_axis: the axis of the stored matrix that numbers the lines.
        kept: the lines that the operand has; None for all.

    Raises:
        InputError: the operand is complex.
    """
    if matrix.dtype.kind == "c":
        raise InputError(
            f"{matrix.name} is of dtype {matrix.dtype}: covariances and correlations are computed of real "
            "operands; pass its real or imaginary part"
        )
    if how == "scale" and matrix.shape[line_axis] and not matrix.shape[1 - line_axis]:
        raise InputError(
            f"{matrix.name} has shape {matrix.shape}, so that its {_LINES[line_axis]}s have no elements, and "
            "no correlations: pass an X with at least 1 element in each"
        )
    return StandardizedMatrix(matrix, line_axis, scaled=how == "scale", kept=kept)


def readable_lines(matrix: StandardizedMatrix, memory: int) -> Matrix:
    """Return a view that can be read. Means come from the cache, or from a pass in `memory` bytes.

    Raises:
        InputError: a line has elements that are Inf or NaN, or differ by too little: they could not be
            scaled, or its covariances would underflow.
        ExecutionError: the operand cannot be read.
    """
    axis = matrix.line_axis
    found = _stats(matrix.stored, axis, memory)
    squares = found.count * found.variance
    wrong = [(~np.isfinite(squares), "has elements that are Inf or NaN: replace them, or leave it out")]
    if matrix.scaled:
        small = ~_constant(found) & (squares < MIN_SQUARES)
        wrong.append((small, "has elements that differ by too little for float64: multiply X by 2.0**400"))
    else:
        wrong.append(_underflowing(found, matrix.dtype))
        wrong.append(_overflowing(squares, matrix.dtype))
    for lines, what in wrong:
        if (numbers := np.flatnonzero(lines)).size:
            raise InputError(
                f"{_LINES[axis]} {numbers[0]} of {matrix.name} {what} (one of {numbers.size} such "
                f"{_LINES[axis]}s)"
            )
    inverse = np.ones(len(squares))
    if matrix.scaled:
        with np.errstate(divide="ignore"):
            inverse = np.where(_constant(found), 0.0, 1 / np.sqrt(squares))
    lines = slice(None) if matrix.kept is None else matrix.kept
    return matrix.with_numbers(found.mean[lines], inverse[lines])


def _underflowing(found: Stats, dtype: np.dtype[Any]) -> tuple[Array, str]:
    """Return the lines whose variances are too small for the dtype of covariances, and what to do then."""
    limit, remedy = float(np.finfo(dtype).tiny), "pass X in float64"
    if dtype.itemsize == 8:
        limit, remedy = MIN_SQUARES, "multiply X by 2.0**400, which multiplies covariances by 2.0**800"
    small = ~_constant(found) & (found.variance < limit)
    return small, (
        f"has a variance below {limit:.2g}, so that its covariances underflow {dtype.name}: {remedy}"
    )


def _overflowing(squares: Array, dtype: np.dtype[Any]) -> tuple[Array, str]:
    """Return the lines whose sums of squares are too large for covariances, and what to do then.

    Elements of 2 bytes are summed in float32, whose range they cannot leave.
    """
    limit = float(np.finfo(dtype).max) if dtype.itemsize == 4 else np.inf
    return squares > limit, (
        f"has a sum of squares above {limit:.2g}, so that its covariances overflow {dtype.name}: "
        "pass X in float64"
    )


def varying_lines(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the numbers of the lines along an axis whose elements are not all equal; warn of the others.

    Raises `InputError` if there is none, and `ExecutionError` if the matrix cannot be read.
    """
    constant = _constant(_stats(matrix, axis, memory))
    if constant.all():
        raise InputError(f"all {_LINES[axis]}s of {matrix.name} have equal elements: none would be kept")
    if constant.any():
        warn_of_data(f"{_listed(matrix, axis, constant)}: left out, as constant='drop' says")
    return np.flatnonzero(~constant)


def check_constant(matrix: Matrix, constant: str) -> None:
    """Warn of lines of equal elements, or raise `InputError` if `constant` is "raise"."""
    if not isinstance(matrix, StandardizedMatrix) or 0 in matrix.shape:
        return
    if not (lines := np.isnan(matrix.factors)).any():
        return
    what = _listed(matrix, matrix.line_axis, lines)
    if constant == "raise":
        raise InputError(
            f"{what}, so that their correlations are not defined: pass constant='drop' (--constant drop) to "
            "leave them out, or constant='nan' for NaN"
        )
    warn_of_data(f"{what}: their correlations are NaN; constant='drop' (--constant drop) leaves them out")


def _stats(matrix: Matrix, axis: int, memory: int) -> Stats:
    return stats_of(matrix, 1 - axis, Transform(), memory, extremes=False)


def _constant(found: Stats) -> Array:
    """Return which lines have equal elements. A variance of others may underflow to 0."""
    return np.asarray(found.min == found.max)


def _listed(matrix: Matrix, axis: int, lines: Array) -> str:
    """Return a text that counts lines of equal elements, and lists the first ones."""
    numbers = np.flatnonzero(lines)
    which = ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")
    verb = "has" if len(numbers) == 1 else "have"
    found = f"{len(numbers)} of {counted(len(lines), _LINES[axis])} of {matrix.name}"
    return f"{found} {verb} equal elements ({which})"
