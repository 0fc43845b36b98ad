"""Find norms of the rows of operands, and corrections for centers that their product has not subtracted.

The product of int8 operands is corrected for their centers, which are subtracted from C by a matrix of rank
one. With the centers u of A and v of B, both of length k:

    (A - 1 u^T) (B - v 1^T)  =  A B - (A v) 1^T - 1 (u^T B - u^T v)

A B is exact. What is subtracted is computed here in float64, in one more pass over A and one over B. If the
device measures X (`oocgemm.jobs.prepare`), it computes what is subtracted too.
"""

import logging
from functools import partial

import numpy as np

from oocgemm.backends.base import Correction
from oocgemm.errors import InputError
from oocgemm.jobs.findings import once
from oocgemm.jobs.streaming import reduced
from oocgemm.planning import GemmProblem, Op
from oocgemm.planning.elements import missing_code
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix
from oocgemm.stores.arrays import in_float64
from oocgemm.stores.element_forms import is_missing, positions
from oocgemm.stores.transformed import SLAB, StandardizedMatrix, chain_of

# Inner products of rows of such norms neither overflow in float32 nor lose digits by underflow.
MIN_NORM, MAX_NORM = 2.0**-40, 2.0**60
# Smallest sum of squares, except 0, that is as exact as float64 is.
MIN_SQUARES = 2.0**-968

logger = logging.getLogger("oocgemm")


def inverse_norms(matrix: Matrix, op: Op, memory: int, remedy: str, *, right: bool = False) -> Array:
    """Return 1 / norm of each row of op(matrix), or of each column if it is the `right` operand.

    They are found by a pass over the matrix in `memory` bytes. That of a zero row is 0, so that its cosines
    are 0, as those of scikit-learn. `remedy` says what else the user can do about a row with Inf or NaN.

    Squares are added up in float64, in an order that depends on the matrix alone.

    Raises:
        InputError: a row has elements that are Inf or NaN, or is so small that its square underflows.
        ExecutionError: the matrix cannot be read.
    """
    line = "column" if right else "row"
    sizes = squares(matrix, int(op.swaps == right), memory)
    if (lines := np.flatnonzero(~np.isfinite(sizes))).size:
        raise InputError(
            f"{line} {lines[0]} of {matrix.name} has elements that are Inf or NaN, so that its cosine with "
            f"other {line}s is not defined (one of {lines.size} such {line}s): leave them out, or {remedy}"
        )
    small = sizes < MIN_SQUARES
    if matrix.dtype.itemsize == 8 and small.any():
        small &= largest(matrix, int(op.swaps == right), memory) > 0
        if (lines := np.flatnonzero(small)).size:
            raise InputError(
                f"{line} {lines[0]} of {matrix.name} has elements that are too small to be squared in "
                f"float64 (one of {lines.size} such {line}s): multiply {matrix.name} by 2.0**400, or {remedy}"
            )
    with np.errstate(divide="ignore"):
        return np.where(sizes > 0, 1 / np.sqrt(sizes), 0.0)


def check_range(problem: GemmProblem, rows: Array, cols: Array) -> None:
    """Raise `InputError` if products of rows of these inverse norms may leave the range of their sums."""
    name = problem.acc_dtype
    found = [np.sort(1 / x[x > 0]) for x in (rows, cols)]
    if not name.startswith("float") or not all(x.size for x in found):
        return
    limits, (a, b) = np.finfo(name), found
    remedy = "multiply these rows and columns by powers of two, which does not change cosines"
    for end, leaves, what in (
        (0, a[0] * b[0] < limits.tiny, "underflows"),
        (-1, a[-1] / limits.max * b[-1] > 1, "overflows"),
    ):
        if leaves:
            raise InputError(
                f"a row of A has the norm {a[end]:.3g} and a column of B the norm {b[end]:.3g}, whose "
                f"product {what} {name}: {remedy}"
                + (", or pass A and B in float64" if name == "float32" else "")
            )


def factors(matrix: Matrix) -> Array:
    """Return what correlations of each line of a `standardized` matrix are multiplied by.

    It is 1, or NaN for a line of equal elements.
    """
    chain = chain_of(matrix)
    inverse = None if chain is None else chain.number("scale")
    assert inverse is not None, "lines are not scaled"
    return np.where(inverse == 0, np.nan, 1.0)


def cosine_scales(problem: GemmProblem, e: Matrix, memory: int) -> tuple[Matrix, Array]:
    """Return E and 1 / norm of each of its rows, by which rows and columns of E E^T are multiplied.

    If products of rows could leave the range of float32, each row is multiplied by a power of 2 when it is
    read, which rounds nothing. `memory`, and the errors that are raised, are those of `inverse_norms`.
    """
    scales = inverse_norms(e, problem.trans_a, memory, "pass metric='dot' (--metric dot)")
    inside = (scales == 0) | ((scales > 1 / MAX_NORM) & (scales < 1 / MIN_NORM))
    if problem.acc_dtype != "float32" or inside.all():
        return e, scales
    scales, exponents = np.frexp(scales)
    axis, numbers = int(problem.trans_a.swaps), (np.ldexp(1.0, exponents),)
    return StandardizedMatrix(e, axis, scaled=True, centered=False, numbers=numbers, dtype=e.dtype), scales


def squared_norms(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> tuple[Array, Array]:
    """Return the squared norms of the rows of op(A) and of the columns of op(B), as `inverse_norms` does."""
    rows = squares(a, int(not problem.trans_a.swaps), memory)
    return rows, rows if b is a else squares(b, int(problem.trans_b.swaps), memory)


def identities(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> tuple[Array, Array]:
    """Return a number for each row of op(A) and each column of op(B). Those of equal ones are equal.

    They are equal if hashes of 64 bits are, so that others have the same number with a probability of 2^-64.
    """
    rows = _hashes(a, int(not problem.trans_a.swaps), memory)
    cols = rows if b is a else _hashes(b, int(problem.trans_b.swaps), memory)
    numbers = np.unique(np.concatenate((rows, cols)), return_inverse=True)[1].astype(np.float64)
    return numbers[: len(rows)], numbers[len(rows) :]


@once
def squares(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the sums of squares along an axis of a matrix, by a pass over it."""
    logger.info("reading %s for the norms of its %s", matrix.name, ("columns", "rows")[axis])
    found = np.zeros(matrix.shape[1 - axis])
    with np.errstate(all="ignore"):
        for rows, cols, part in reduced(matrix, axis, memory, SLAB * 8, partial(_squares_of_block, axis)):
            found[slice(*(rows if axis else cols))] += part
    return found


@once
def _hashes(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return a hash of the elements along an axis of a matrix, by a pass over it.

    It is a sum of hashes of the elements and their indices, so that it does not depend on blocks.
    """
    found = np.zeros(matrix.shape[1 - axis], np.uint64)
    for rows, cols, part in reduced(matrix, axis, memory, SLAB * 32, partial(_hashes_of_block, axis)):
        found[slice(*(rows if axis else cols))] += part
    return found


def _hashes_of_block(axis: int, rows: Range, cols: Range, raw: Array) -> Array:
    """Return the hashes of a block along an axis, by the finalizer of SplitMix64 (Steele et al., 2014)."""
    found = np.zeros(raw.shape[1 - axis], np.uint64)
    height = max(1, SLAB // raw.shape[1])
    index = np.arange(*(cols if axis else rows), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for top in range(0, len(raw), height):
        part = slice(top, top + height)
        x = np.ascontiguousarray(in_float64(raw[part]))
        x += 0.0  # makes -0 equal to 0
        bits = x.view(np.uint64)
        bits += index if axis else index[part, None]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        if axis:
            bits.sum(1, out=found[part])
        else:
            found += bits.sum(0)
    return found


@once
def largest(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the largest magnitudes along an axis of a matrix, by a pass over it; NaN where it has NaN."""
    found = np.zeros(matrix.shape[1 - axis])

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        return np.asarray(np.maximum(raw.max(axis), -raw.min(axis)), np.float64)

    for rows, cols, part in reduced(matrix, axis, memory, SLAB * 8, act):
        at = slice(*(rows if axis else cols))
        np.maximum(found[at], part, out=found[at])
    return found


def _squares_of_block(axis: int, rows: Range, cols: Range, raw: Array) -> Array:
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


def correction(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> Correction:
    """Return (rows, cols) if C is corrected: rows[i] + cols[j] is subtracted from it; otherwise None.

    None also if the device finds them.

    Args:
        problem: the product.
        a, b: its operands, which can be read.
        memory: upper bound in bytes for the passes over them.

    Raises:
        ExecutionError: an operand cannot be read.
    """
    if not problem.is_corrected or not problem.depth or problem.finds_numbers:
        return None
    u, v = _centers(a), _centers(b)
    rows, cols = np.zeros(problem.m), np.zeros(problem.n)
    if v is not None:
        rows = _product(a, int(not problem.trans_a.swaps), v, memory)
    if u is not None:
        cols = rows.copy() if problem.b.shares else _product(b, int(problem.trans_b.swaps), u, memory)
        if v is not None:
            cols -= np.einsum("i,i", u, v)
    alpha = problem.applied_alpha.real
    return alpha * rows, alpha * cols


def _centers(matrix: Matrix) -> Array | None:
    chain = chain_of(matrix)
    return None if chain is None else chain.number("correct")


@once
def _product(matrix: Matrix, k_axis: int, vector: Array, memory: int) -> Array:
    """Return the products of a vector of length k and the rows (`k_axis` 1) or columns (0) of a matrix."""
    chain = chain_of(matrix)
    stored, code = (matrix, None) if chain is None else (chain.source, missing_code(chain.steps))
    found = np.zeros(stored.shape[1 - k_axis])
    act = partial(_products_of_block, k_axis, vector, code)
    for rows, cols, part in reduced(stored, k_axis, memory, SLAB * 10, act):
        found[slice(*(rows if k_axis else cols))] += part
    return found


def _products_of_block(
    k_axis: int, vector: Array, code: float | None, rows: Range, cols: Range, raw: Array
) -> Array:
    """Return what a block contributes to `_product`. Missing elements are 0."""
    found = np.zeros(raw.shape[1 - k_axis])
    height = max(1, SLAB // raw.shape[1])
    along = vector[slice(*(cols if k_axis else rows))]
    for top in range(0, len(raw), height):
        part = slice(top, top + height)
        x = in_float64(raw[part])
        if code is not None:
            x[positions(is_missing(x, code))] = 0
        # Not by a BLAS: its result may depend on the number of threads.
        if k_axis:
            found[part] = np.einsum("ij,j->i", x, along)
        else:
            found += np.einsum("ij,i->j", x, along[part])
    return found
