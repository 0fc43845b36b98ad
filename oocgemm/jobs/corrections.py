"""Correct the product of int8 operands for centers, which are subtracted from C by a matrix of rank one.

With the centers u of A and v of B, both of length k:

    (A - 1 u^T) (B - v 1^T)  =  A B - (A v) 1^T - 1 (u^T B - u^T v)

A B is exact. What is subtracted is computed here in float64, in one more pass over A and one over B. If the
device measures X (`oocgemm.jobs.measuring`), it computes what is subtracted too.
"""

from functools import partial

import numpy as np

from oocgemm.backends.base import Correction
from oocgemm.jobs.streaming import reduced
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix
from oocgemm.stores.arrays import in_float64
from oocgemm.stores.transformed import SLAB, TransformedMatrix, is_missing, positions


def is_centered(*operands: Matrix) -> bool:
    """Return whether C must be corrected for the centers of an operand."""
    return any(isinstance(x, TransformedMatrix) and x.transform.corrects for x in operands)


def correction(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> Correction:
    """Return (rows, cols) for a `centered` problem: rows[i] + cols[j] is subtracted from C; otherwise None.

    None also if the device finds them.

    Args:
        problem: the product.
        a, b: its operands, which can be read.
        memory: upper bound in bytes for the passes over them.

    Raises:
        ExecutionError: an operand cannot be read.
    """
    if not problem.centered or not problem.depth or problem.measured:
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
    vectors = matrix.vectors if isinstance(matrix, TransformedMatrix) else None
    return None if vectors is None else vectors.corrected


def _product(matrix: Matrix, k_axis: int, vector: Array, memory: int) -> Array:
    """Return the products of a vector of length k and the rows (`k_axis` 1) or columns (0) of a matrix."""
    stored, code = (matrix.stored, matrix.code) if isinstance(matrix, TransformedMatrix) else (matrix, None)
    found = np.zeros(stored.shape[1 - k_axis])
    act = partial(_of_block, k_axis, vector, code)
    for rows, cols, part in reduced(stored, k_axis, memory, SLAB * 10, act):
        found[slice(*(rows if k_axis else cols))] += part
    return found


def _of_block(k_axis: int, vector: Array, code: float | None, rows: Range, cols: Range, raw: Array) -> Array:
    """Return what a block contributes to `_product`. Missing elements are 0."""
    found = np.zeros(raw.shape[1 - k_axis])
    height = max(1, SLAB // raw.shape[1])
    along = vector[slice(*(cols if k_axis else rows))]
    for top in range(0, len(raw), height):
        part = slice(top, top + height)
        x = in_float64(raw[part])
        absent = is_missing(x, code)
        if absent is not None:
            x[positions(absent)] = 0
        # Not by a BLAS: its result may depend on the number of threads.
        if k_axis:
            found[part] = np.einsum("ij,j->i", x, along)
        else:
            found += np.einsum("ij,i->j", x, along[part])
    return found
