"""Prepare operands whose squared distances are computed from inner products, so that these do not cancel.

The squared distance of two rows is ``|x|^2 + |y|^2 - 2 x y``. Its rounding error grows with the norms of
rows, which may be far larger than the distances. So a common center is subtracted from all rows when they are
read, which leaves distances as they are. If a Gaussian would still have a relative error of more than
`MAX_ERROR`, rows are multiplied in float64.
"""

from dataclasses import replace

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.norms import squares
from oocgemm.jobs.stats import Stats, stats_of
from oocgemm.jobs.transforms import readable
from oocgemm.planning import DTYPES, GemmProblem
from oocgemm.stores import Array, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import TransformedMatrix, Vectors

# Largest estimate, gamma times eps times the largest squared norm, of the relative error of a Gaussian.
MAX_ERROR = 1e-4


def centered(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> tuple[GemmProblem, Matrix, Matrix]:
    """Return a product and its operands with a common center subtracted, if its epilogue has a Gaussian.

    Rows of op(A) and columns of op(B) are multiplied in float32, or in float64 if that is not enough. C's
    dtype stays. The operands are read, in `memory` bytes; statistics of files are cached. Products of int8
    are exact, and returned as they are.

    Raises:
        InputError: `compute` rounds too much, or there are missing elements that are not allowed.
        ExecutionError: an operand cannot be read.
    """
    if not problem.epilogue or problem.epilogue[0].kind != "gaussian" or problem.exact or not problem.depth:
        return problem, a, b
    same = a is b
    a = readable(a, memory)
    sides = [(a, int(not problem.trans_a.swaps))]
    if not same:
        sides.append((readable(b, memory), int(problem.trans_b.swaps)))
    found = [stats_of(x, 1 - k_axis, Transform(missing=np.nan), memory) for x, k_axis in sides]
    center = _center(found)
    doubled = _needs_double(problem, sides, found, center, memory)
    dtype = "float64" if doubled else DTYPES[problem.a_dtype].accumulator
    if dtype == "float64" and problem.compute in ("tf32", "bf16"):
        raise InputError(
            f"compute = {problem.compute!r} rounds rows, and gamma = {problem.epilogue[0].value} needs their "
            "distances from products in float64: drop compute"
        )
    moved = [_moved(x, k_axis, center, dtype) for x, k_axis in sides]
    wide = replace(problem, a_dtype=dtype, b_dtype=dtype, acc_dtype=dtype)
    return wide, moved[0], moved[-1]


def _center(found: list[Stats]) -> Array:
    """Return the mean of all rows, 0 where it is not finite. NaN is left out."""
    with np.errstate(all="ignore"):
        totals = [np.where(each.count > 0, each.mean * each.count, 0) for each in found]
        mean = sum(totals) / np.maximum(sum(each.count for each in found), 1)
    return np.asarray(np.where(np.isfinite(mean), mean, 0.0))


def _needs_double(
    problem: GemmProblem, sides: list[tuple[Matrix, int]], found: list[Stats], center: Array, memory: int
) -> bool:
    """Return whether float32 would round too much. Extremes decide it if they can, otherwise a pass."""
    if DTYPES[problem.a_dtype].accumulator == "float64":
        return True
    gamma, limits = problem.epilogue[0].value, np.finfo(np.float32)
    if gamma * problem.depth * float(limits.tiny) > MAX_ERROR:  # products may underflow
        return True
    limit = min(MAX_ERROR / (gamma * float(limits.eps)), float(limits.max) / 16)
    with np.errstate(all="ignore"):
        farthest = (np.fmax(each.max - center, center - each.min) for each in found)
        if all(np.square(far[~np.isnan(far)]).sum() <= limit for far in farthest):
            return False
    norms = (squares(_moved(x, k_axis, center, "float64"), k_axis, memory) for x, k_axis in sides)
    return any((each[np.isfinite(each)] > limit).any() for each in norms)


def _moved(matrix: Matrix, k_axis: int, center: Array, dtype: str) -> TransformedMatrix:
    """Return a view of a matrix that can be read, with a center subtracted."""
    if not isinstance(matrix, TransformedMatrix):
        none = np.zeros(len(center))
        vectors = Vectors(none, center, none + 1)
        return TransformedMatrix(
            matrix, Transform(center=center, cast=dtype), k_axis, ("rows", "columns")[k_axis], vectors
        )
    given = matrix.vectors
    assert given is not None
    vectors = Vectors(given.fill - center, given.center + center / given.inverse, given.inverse)
    transform = replace(matrix.transform, center=vectors.center, cast=dtype)
    return TransformedMatrix(matrix.stored, transform, k_axis, matrix.lines, vectors)
