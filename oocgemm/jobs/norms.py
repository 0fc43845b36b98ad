"""The norms of the rows of a matrix, by which cosine similarities are divided."""

import logging
from functools import partial

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.streaming import reduced
from oocgemm.planning import GemmProblem, Op
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix
from oocgemm.stores.scratch import in_float64
from oocgemm.stores.standardized import StandardizedMatrix
from oocgemm.stores.transformed import SLAB

# Inner products of rows of such norms neither overflow in float32 nor lose digits by underflow.
MIN_NORM, MAX_NORM = 2.0**-40, 2.0**60

logger = logging.getLogger("oocgemm")


def inverse_norms(matrix: Matrix, op: Op, memory: int, remedy: str, *, right: bool = False) -> Array:
    """Return 1 / norm of each row of op(matrix), or of each column if it is the `right` operand.

    They are found by a pass over the matrix in `memory` bytes. `remedy` says what else the user can do about
    a row that is zero.

    Squares are added up in float64, in an order that depends on the matrix alone.

    Raises:
        InputError: a row is zero, or has elements that are Inf or NaN.
        ExecutionError: the matrix cannot be read.
    """
    line = "column" if right else "row"
    squares = _squares(matrix, int(op.swaps == right), memory)
    for wrong, what in (
        (squares == 0, "is zero"),
        (~np.isfinite(squares), "has elements that are Inf or NaN"),
    ):
        if (lines := np.flatnonzero(wrong)).size:
            raise InputError(
                f"{line} {lines[0]} of {matrix.name} {what}, so that its cosine with other {line}s is not "
                f"defined (one of {lines.size} such {line}s): leave them out, or {remedy}"
            )
    return np.asarray(1 / np.sqrt(squares))


def cosine_scales(problem: GemmProblem, e: Matrix, memory: int) -> tuple[Matrix, Array]:
    """Return E and 1 / norm of each of its rows, by which rows and columns of E E^T are multiplied.

    If products of rows could leave the range of float32, each row is multiplied by a power of 2 when it is
    read, which rounds nothing. `memory`, and the errors that are raised, are those of `inverse_norms`.
    """
    scales = inverse_norms(e, problem.trans_a, memory, "pass metric='dot' (--metric dot)")
    inside = (scales > 1 / MAX_NORM) & (scales < 1 / MIN_NORM)
    if problem.acc_dtype != "float32" or inside.all():
        return e, scales
    scales, exponents = np.frexp(scales)
    numbers = {"mean": np.zeros(len(scales)), "inverse": np.ldexp(1.0, exponents)}
    axis = int(problem.trans_a.swaps)
    return StandardizedMatrix(e, axis, scaled=True, dtype=e.dtype, **numbers), scales


def squared_norms(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> tuple[Array, Array]:
    """Return the squared norms of the rows of op(A) and of the columns of op(B), as `inverse_norms` does."""
    rows = _squares(a, int(not problem.trans_a.swaps), memory)
    return rows, rows if b is a else _squares(b, int(problem.trans_b.swaps), memory)


def _squares(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the sums of squares along an axis of a matrix, by a pass over it."""
    logger.info("reading %s for the norms of its %s", matrix.name, ("columns", "rows")[axis])
    squares = np.zeros(matrix.shape[1 - axis])
    with np.errstate(all="ignore"):
        for rows, cols, part in reduced(matrix, axis, memory, SLAB * 8, partial(_of_block, axis)):
            squares[slice(*(rows if axis else cols))] += part
    return squares


def _of_block(axis: int, rows: Range, cols: Range, raw: Array) -> Array:
    """Return the sums of squares of a block along an axis."""
    found = np.zeros(raw.shape[1 - axis])
    height = max(1, SLAB // raw.shape[1])
    with np.errstate(all="ignore"):
        for top in range(0, len(raw), height):
            part = slice(top, top + height)
            # Not by a BLAS: its result may depend on the number of threads.
            x = in_float64(raw[part])
            x *= x
            if axis:
                x.sum(1, out=found[part])
            else:
                found += x.sum(0)
    return found
