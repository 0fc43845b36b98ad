"""Standardize the rows of an operand for covariances and correlations: find their means and scales."""

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.stats import stats_of
from oocgemm.stores import Matrix
from oocgemm.stores.standardized import StandardizedMatrix
from oocgemm.stores.transform import Transform

# What the lines of each axis are called.
_LINES = ("row", "column")


def standardized(matrix: Matrix, how: str, line_axis: int) -> Matrix:
    """Return an operand whose lines are standardized, which can be planned with but not read.

    Args:
        matrix: the operand.
        how: "center" to subtract the mean of each line; "scale" to also divide by the norm of the result.
        line_axis: the axis of the stored matrix that numbers the lines.

    Raises:
        InputError: the operand is complex.
    """
    if matrix.dtype.kind == "c":
        raise InputError(
            f"{matrix.name} is of dtype {matrix.dtype}: covariances and correlations are computed of real "
            "operands; pass its real or imaginary part"
        )
    return StandardizedMatrix(matrix, line_axis, scaled=how == "scale")


def readable_lines(matrix: StandardizedMatrix, memory: int) -> Matrix:
    """Return a view that can be read. Means come from the cache, or from a pass in `memory` bytes.

    Raises:
        InputError: a line has elements that are Inf or NaN, or one that is scaled has equal elements.
        ExecutionError: the operand cannot be read.
    """
    axis = matrix.line_axis
    found = stats_of(matrix.stored, 1 - axis, Transform(), memory, extremes=False)
    wrong = [
        (~np.isfinite(found.variance), "has elements that are Inf or NaN: replace them, or leave it out")
    ]
    if matrix.scaled:
        equal = "has equal elements, so that its correlations are not defined: leave it out"
        wrong.append((found.variance == 0, equal))
    for lines, what in wrong:
        if (numbers := np.flatnonzero(lines)).size:
            raise InputError(
                f"{_LINES[axis]} {numbers[0]} of {matrix.name} {what} (one of {numbers.size} such "
                f"{_LINES[axis]}s)"
            )
    if not matrix.scaled:
        return matrix.with_numbers(found.mean, np.ones(len(found.mean)))
    return matrix.with_numbers(found.mean, 1 / np.sqrt(found.count * found.variance))
