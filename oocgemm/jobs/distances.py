"""Prepare operands whose squared distances are computed from inner products, so that these do not cancel.

The squared distance of two rows is ``|x|^2 + |y|^2 - 2 x y``. Its rounding error grows with the norms of
rows, which may be far larger than the distances. So a common center is subtracted from all rows when they are
read, which leaves distances as they are. If a Gaussian would still have a relative error of more than
`MAX_ERROR`, rows are multiplied in float64. If that is not enough either, the product is refused.
"""

from dataclasses import replace

import numpy as np

from oocgemm.errors import InputError
from oocgemm.jobs.norms import largest, squares
from oocgemm.jobs.problem import op_of
from oocgemm.jobs.request import Request
from oocgemm.jobs.stats import Stats, stats_of
from oocgemm.jobs.transforms import memory_of, readable
from oocgemm.planning import DTYPES, GemmProblem
from oocgemm.stores import Array, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import TransformedMatrix, Vectors

# Largest estimate, gamma times eps times the largest squared norm, of the relative error of a Gaussian.
MAX_ERROR = 1e-4
# Largest squared norm whose products do not overflow float64.
MAX_SQUARE = float(np.finfo(np.float64).max) / 16


def centered(
    problem: GemmProblem, a: Matrix, b: Matrix, request: Request
) -> tuple[GemmProblem, Matrix, Matrix]:
    """Return a product and its operands with a common center subtracted, if its epilogue has a Gaussian.

    Rows of op(A) and columns of op(B) are multiplied in float32, or in float64 if that is not enough. C's
    dtype stays. The operands are read, in the memory of the request; statistics of files are cached. Products
    of int8 are exact, and returned as they are.

    Raises:
        InputError: rows lie so far apart that float64 rounds too much, `compute` rounds too much, or there
            are missing elements that are not allowed.
        ExecutionError: an operand cannot be read.
    """
    if not problem.epilogue or problem.epilogue[0].kind != "gaussian" or problem.exact or not problem.depth:
        return problem, a, b
    same, memory = a is b, memory_of(request)
    a = readable(a, memory)
    sides = [(a, int(not problem.trans_a.swaps))]
    if not same:
        sides.append((readable(b, memory), int(problem.trans_b.swaps)))
    found = [stats_of(x, 1 - k_axis, Transform(missing=np.nan), memory) for x, k_axis in sides]
    center = _center(found)
    # What the user calls rows of op(A) and columns of op(B).
    columns = op_of("trans_a", request.a.op).swaps, not op_of("trans_b", request.b.op).swaps
    dtype = _dtype(problem, sides, found, center, memory, [("row", "column")[each] for each in columns])
    if dtype == "float64" and problem.compute in ("tf32", "bf16"):
        raise InputError(
            f"compute = {problem.compute!r} rounds rows, and gamma = {problem.epilogue[0].value} needs their "
            "distances from products in float64: drop compute"
        )
    moved = [_moved(x, k_axis, center, dtype) for x, k_axis in sides]
    wide = replace(problem, a=replace(problem.a, dtype=dtype), b=replace(problem.b, dtype=dtype))
    wide = wide.with_sums(dtype)
    return wide, moved[0], moved[-1]


def _center(found: list[Stats]) -> Array:
    """Return the mean of all rows, 0 where it is not finite. NaN is left out."""
    with np.errstate(all="ignore"):
        totals = [np.where(each.count > 0, each.mean * each.count, 0) for each in found]
        mean = sum(totals) / np.maximum(sum(each.count for each in found), 1)
    return np.asarray(np.where(np.isfinite(mean), mean, 0.0))


def _dtype(
    problem: GemmProblem,
    sides: list[tuple[Matrix, int]],
    found: list[Stats],
    center: Array,
    memory: int,
    lines: list[str],
) -> str:
    """Return the dtype in which rows are multiplied. Extremes decide it if they can, otherwise a pass.

    Raises `InputError` if float64 rounds too much. `lines` says what the user calls the rows of each side.
    """
    dtypes = list(dict.fromkeys((DTYPES[problem.a_dtype].accumulator, "float64")))
    limits = [_limit(problem, dtype) for dtype in dtypes]
    with np.errstate(all="ignore"):
        farthest = (np.fmax(each.max - center, center - each.min) for each in found)
        bound = max(np.square(far[~np.isnan(far)]).sum() for far in farthest)
    if bound <= limits[0] or (not limits[0] and bound <= limits[-1]):
        return dtypes[0] if limits[0] else dtypes[-1]
    norms = [_norms(x, k_axis, center, memory) for x, k_axis in sides]
    sizes = [float(each.max(initial=0)) for each in norms]
    for dtype, limit in zip(dtypes, limits, strict=True):
        if limit and max(sizes) <= limit:
            return dtype
    side = int(np.argmax(sizes))
    gamma, eps = problem.epilogue[0].value, float(np.finfo(np.float64).eps)
    size = sizes[side] if sizes[side] <= MAX_SQUARE else np.inf
    smaller = f", or pass a gamma of at most {0.9 * MAX_ERROR / eps / size:.2g}" if size < np.inf else ""
    raise InputError(
        f"{lines[side]}s lie too far apart for gamma = {gamma:g}: gamma * eps * max |x - c|^2 is "
        f"{gamma * eps * size:.3g} for the eps of float64, at {lines[side]} {norms[side].argmax()} of "
        f"{sides[side][0].name}, with the mean c of all {lines[side]}s. Above {MAX_ERROR:g}, small "
        f"distances are lost in rounding errors: leave out {lines[side]}s that are far from all others, "
        f"compute clusters apart{smaller}"
    )


def _limit(problem: GemmProblem, dtype: str) -> float:
    """Return the largest squared norm of rows that can be multiplied in a dtype; 0 if none can."""
    gamma, limits = problem.epilogue[0].value, np.finfo(dtype)
    if dtype == "float32" and gamma * problem.depth * float(limits.tiny) > MAX_ERROR:  # may underflow
        return 0.0
    scale = gamma * float(limits.eps)
    return min(MAX_ERROR / scale if scale > 1e-300 else np.inf, float(limits.max) / 16)


def _norms(matrix: Matrix, k_axis: int, center: Array, memory: int) -> Array:
    """Return |x - c|^2 of each row, Inf if it overflows, and 0 for rows with NaN or Inf."""
    found = squares(_moved(matrix, k_axis, center, "float64"), k_axis, memory)
    if np.isinf(found).any():
        sizes = largest(_moved(matrix, k_axis, np.zeros(len(center)), "float64"), k_axis, memory)
        found[~np.isfinite(sizes)] = 0
    found[np.isnan(found)] = 0
    return found


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
