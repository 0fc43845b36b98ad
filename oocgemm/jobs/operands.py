"""Open the operands of a request, and describe their product: its shapes, dtypes, scalars and tile.

For a Gaussian, squared distances are computed from inner products. The operands are prepared so that
no digits are lost by cancellation. The squared distance of two rows is ``|x|^2 + |y|^2 - 2 x y``. Its
rounding error grows with the norms of rows, which may be far larger than the distances. So a common center is
subtracted from all rows when they are read, which leaves distances as they are. If a Gaussian would still
have a relative error of more than `MAX_ERROR`, rows are multiplied in float64. If that is not enough either,
the product is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from oocgemm.jobs import support
from oocgemm.jobs.option_groups import Transpose
from oocgemm.jobs.request import Chain, Gram, Reduction, Request, Selection, Source
from oocgemm.jobs.stats import Stats, largest, moved_squares, squares, stats_of
from oocgemm.jobs.steps import CASTS, Cast, check_mirrored, is_symmetric, with_epilogue
from oocgemm.jobs.transforming import (
    by_rows,
    completed,
    deferred_steps,
    filled_lines,
    memory_of,
    opened,
    readable,
    standardized,
    transformed,
    with_missing,
)
from oocgemm.planning import COMPUTES, DTYPES, DType, GemmProblem, Op, TileShape, emulation
from oocgemm.planning.cover import Halved, Triangle, cover_of
from oocgemm.planning.problem import Updated, same
from oocgemm.planning.sinks import SELECTED, Applied, AtLeast, Largest, Reduced
from oocgemm.planning.terms import ONE
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import counted
from oocgemm.stores import Array, Matrix
from oocgemm.stores.base import ConstantRows, RowsMatrix, SlicedMatrix, dtype_name, named_dtype
from oocgemm.stores.kept import KeptMatrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import (
    ConvertedMatrix,
    KnownMatrix,
    TransformedMatrix,
    as_multiplied,
    chain_of,
    code_in,
)
from oocgemm.stores.unpacked import accepting

# The default dtype of C if an operand is transformed to a narrow dtype: that cast only speeds up the product,
# so C is not rounded to the narrow dtype.
_NARROW = {"float16": "float32", "bfloat16": "float32"}

# Largest relative error of a Gaussian. The estimate is gamma times eps times the largest squared norm.
MAX_ERROR = 1e-4
# Distances that are only ranked need a center that is near the mean. It is the mean of at most so many lines.
SAMPLED_LINES, SAMPLED_RUN = 1 << 16, 1 << 10
# Largest squared norm whose products do not overflow float64.
MAX_SQUARE = float(np.finfo(np.float64).max) / 16

# Largest number of ones whose sum is exact in float32.
_MAX_EXACT = 1 << 24
# Dtypes whose small elements a GPU multiplies as int8.
_BYTES = "int8", "uint8", "bool"
# Largest sum in int32.
_MAX_INT32 = (1 << 31) - 1
# dtypes of scores, by the dtype of E, where the default dtype of C does not fit.
_SCORES = {
    **dict.fromkeys(("float16", "bfloat16"), "float32"),
    **dict.fromkeys(("int8", "uint8", "int16"), "float64"),
}


def problem_of(
    a: Matrix,
    b: Matrix,
    alpha: complex,
    beta: complex,
    trans_a: Transpose,
    trans_b: Transpose,
    compute: str = "native",
    out_dtype: Any = None,
) -> GemmProblem:
    """Return the product of two operands of one dtype (`as_multiplied`).

    Raises `InputError` if shapes, dtypes or scalars do not match.
    """
    trans_a, trans_b = op_of("trans_a", trans_a), op_of("trans_b", trans_b)
    m, k = a.shape[::-1] if trans_a.swaps else a.shape
    k_b, n = b.shape[::-1] if trans_b.swaps else b.shape
    if k != k_b:
        raise InputError(
            f"shapes do not match: op(A) is {m} x {k} and op(B) is {k_b} x {n}; op(A) must have as many "
            "columns as op(B) has rows"
        )
    dtype = DTYPES[dtype_name(a.dtype)]
    deferred = deferred_steps(a), deferred_steps(b)
    centered = any(deferred)
    if out_dtype is None and any(map(chain_of, (a, b))):
        out_dtype = "float64" if centered else _NARROW.get(dtype.name)
    names = dtype.name, dtype.name, dtype.accumulator, _out_dtype(out_dtype, dtype)
    alpha, beta = (_scalar(*s, dtype, names[-1]) for s in (("alpha", alpha), ("beta", beta)))
    if dtype.name not in COMPUTES.get(compute, ()):
        fitting = ", ".join(name for name, dtypes in COMPUTES.items() if dtype.name in dtypes)
        raise InputError(f"{dtype.name} operands cannot be computed in {compute!r}: choose one of {fitting}")
    if centered and names[-1] != "float64":
        raise InputError(
            f"C cannot have dtype {names[-1]}: centers are subtracted from the product of int8 in float64; "
            "pass out_dtype='float64' (--out-dtype float64), or a cast other than int8"
        )
    problem = _problem(m, n, k, *names, alpha, beta, trans_a, trans_b, compute)
    if centered and problem.depth:
        left, right = (replace(x, elements=y) for x, y in zip((problem.a, problem.b), deferred, strict=True))
        problem = replace(problem, a=left, b=right)
    if problem.exact and problem.depth > (most := (emulation.EXACT_LIMIT - 1) // dtype.largest**2):
        raise InputError(
            f"op(A) has {k} columns; sums of more than {most} {dtype.name} products may not "
            "be exact: multiply parts with fewer columns, and add the results"
        )
    return problem


# Equal products share one object: comparing two equal objects takes longer, and each caches its properties.
_problem = lru_cache(64)(GemmProblem.of)


def _out_dtype(given: Any, operands: DType) -> str:
    """Return the name of C's dtype. Raises `InputError` if a product of these operands cannot have it."""
    if given is None:
        return operands.results[0]
    name = named_dtype(given)
    if name not in operands.results:
        raise InputError(
            f"C cannot have dtype {name} with {operands.name} operands: choose one of "
            f"{', '.join(operands.results)}{_casts(name, operands)}"
        )
    return name


def _casts(name: str, operands: DType) -> str:
    """Return the end of a message: how to get C in a dtype that the product cannot have; "" if impossible."""
    if operands.is_complex or name not in CASTS:
        return ""
    found = f"; or round C with epilogue=[oocgemm.Cast({name!r})]"
    if operands.name.startswith("int"):
        return found
    return (
        f"{found}, or A and B with a Transform(cast={name!r}) for each (--transform-a cast={name} "
        f"--transform-b cast={name})"
    )


def _scalar(name: str, value: complex, operands: DType, c_dtype: str) -> complex:
    """Return alpha or beta as a number. Raises `InputError` if it does not fit the operands' or C's dtype."""
    try:
        number = complex(value if np.ndim(value) == 0 else "an array")
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} = {value!r} is not a number") from None
    if operands.is_complex:
        _check_range(name, number, operands)
        return number
    if number.imag != 0:
        raise InputError(f"{name} = {value} is complex, but the operands are real")
    if c_dtype.startswith("int") and not (number.real.is_integer() and abs(number) < emulation.EXACT_LIMIT):
        raise InputError(
            f"the product has dtype {c_dtype}, so {name} must be an integer of magnitude below 2^53, not "
            f"{value}: pass such an integer, or out_dtype='float64' (--out-dtype float64)"
        )
    _check_range(name, number.real, operands)
    return number.real


def _check_range(name: str, number: complex, operands: DType) -> None:
    """Raise `InputError` for a scalar that overflows, or rounds to 0, in the dtype in which C is summed."""
    if number in (0, 1):
        return
    accumulator = numpy_dtype(operands.accumulator)
    limits = np.finfo(accumulator)
    with np.errstate(all="ignore"):
        rounded = accumulator.type(number)
    if np.isinf(rounded) and not np.isinf(number):
        limit = f"is beyond {accumulator} (at most {limits.max:.8g})"
    elif number and not rounded:
        limit = f"rounds to 0 in {accumulator} (at least {limits.smallest_subnormal:.8g})"
    else:
        return
    wider = "complex128" if operands.is_complex else "float64"
    raise InputError(
        f"{name} = {number:g} {limit}, the dtype in which {operands.name} operands are multiplied: convert "
        f"A, B and C to {wider}"
    )


def op_of(name: str, value: Transpose) -> Op:
    """Return the op for a value of trans_a or trans_b. Raises `InputError` for an invalid value."""
    if isinstance(value, bool):
        return Op.T if value else Op.N
    try:
        return Op(value)
    except ValueError:
        raise InputError(f"{name} = {value!r} is not an op: write 'N', 'T' or 'C'") from None


def tile_of(value: TileShape | str | None, problem: GemmProblem) -> TileShape | None:
    """Parse a tile shape, such as "4096x4096x512", and return it clipped to the product."""
    if value is None or isinstance(value, TileShape):
        return value and value.within(problem)
    parts = str(value).lower().split("x")
    if len(parts) != 3 or not all(p.strip().isdecimal() and int(p) for p in parts):
        raise InputError(f"cannot read {value!r} as a tile: write MxNxK, such as 8192x8192x512")
    return TileShape(*(int(p) for p in parts)).within(problem)


def centered(
    problem: GemmProblem, a: Matrix, b: Matrix, request: Request
) -> tuple[GemmProblem, Matrix, Matrix]:
    """Return a product and its operands, less a common center if the epilogue begins with distances.

    Rows of op(A) and columns of op(B) are multiplied in float32, or in float64 if that is not enough. C's
    dtype does not change. Products of int8 are exact, and returned as they are. Raises `InputError` if rows
    lie so far apart that float64, or the arithmetic `compute`, rounds too much.
    """
    if not problem.measures_distances or problem.exact or not problem.depth:
        return problem, a, b
    same, memory = a is b, memory_of(request)
    a = readable(a, memory)
    sides = [(a, int(not problem.trans_a.swaps))]
    if not same:
        sides.append((readable(b, memory), int(problem.trans_b.swaps)))
    ranks = problem.epilogue[0].value < 0
    found, center = ([], _near_mean(sides, memory)) if ranks else _mean(sides, memory)
    # Whether the rows of op(A), and the columns of op(B), are columns of the arrays that the user passed.
    columns = op_of("trans_a", request.a.op).swaps, not op_of("trans_b", request.b.op).swaps
    lines = [("row", "column")[each] for each in columns]
    dtype = _dtype(problem, sides, found, center, memory, lines)
    if dtype == "float64" and problem.compute in ("tf32", "bf16"):
        raise InputError(
            f"compute = {problem.compute!r} rounds rows, and {_purpose(problem)} needs their distances from "
            "products in float64: drop compute"
        )
    moved = [_moved(x, k_axis, center, dtype) for x, k_axis in sides]
    wide = replace(problem, a=replace(problem.a, dtype=dtype), b=replace(problem.b, dtype=dtype))
    wide = wide.with_sums(dtype)
    return wide, moved[0], moved[-1]


def _purpose(problem: GemmProblem) -> str:
    first = problem.epilogue[0]
    return f"gamma = {first.value}" if first.kind == "gaussian" else "the result"


def squared_norms(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> list[Array]:
    """Return |x - c|^2 for all rows x of op(A) and columns of op(B), and the center c of ranked distances.

    The rows x - c are those that are multiplied, so that one pass finds their norms for all.
    """
    sides = [(a, int(not problem.trans_a.swaps)), (b, int(problem.trans_b.swaps))]
    sides = sides[:1] if a is b else sides
    center, dtype = _near_mean(sides, memory), DTYPES[problem.a_dtype].accumulator
    found = [_norms(x, k_axis, center, memory, dtype, moved_squares) for x, k_axis in sides]
    return [found[0], found[-1]]


def _near_mean(sides: list[tuple[Matrix, int]], memory: int) -> Array:
    """Return a center for distances that are ranked: the mean of some rows, in the dtype of all operands."""
    _, center = _mean([(_sampled(*each), each[1]) for each in sides], memory)
    narrow = all(x.dtype == np.float32 for x, _ in sides)
    return center.astype(np.float32).astype(float) if narrow else center


def _sampled(x: Matrix, k_axis: int) -> Matrix:
    """Return lines of a matrix, spread over all of it, which number the axis that is not k."""
    count = x.shape[1 - k_axis]
    if count <= SAMPLED_LINES:
        return x
    runs = SAMPLED_LINES // SAMPLED_RUN
    starts = np.arange(runs) * ((count - SAMPLED_RUN) // (runs - 1))
    return KeptMatrix(x, 1 - k_axis, (starts[:, None] + np.arange(SAMPLED_RUN)).ravel())


def _mean(sides: list[tuple[Matrix, int]], memory: int) -> tuple[list[Stats], Array]:
    """Return statistics along k of each side, and the mean of all rows."""
    found = [stats_of(x, 1 - k_axis, Transform(missing=np.nan), memory) for x, k_axis in sides]
    return found, _center(found)


def _center(found: list[Stats]) -> Array:
    """Return the mean of all rows without NaN elements; 0 where the mean is not finite."""
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
    """Return the dtype in which rows are multiplied. It depends on the largest norm of a row.

    If there is no bound from extremes, or it does not decide, a pass computes the norms. `lines` says
    whether the user calls the rows of each side "row" or "column".
    """
    dtypes = list(dict.fromkeys((DTYPES[problem.a_dtype].accumulator, "float64")))
    limits = [_limit(problem, dtype) for dtype in dtypes]
    if found:
        with np.errstate(all="ignore"):
            farthest = (np.fmax(each.max - center, center - each.min) for each in found)
            bound = max(np.square(far[~np.isnan(far)]).sum() for far in farthest)
        if bound <= limits[0] or (not limits[0] and bound <= limits[-1]):
            return dtypes[0] if limits[0] else dtypes[-1]
    how = ("float64", squares) if found else (dtypes[0], moved_squares)
    norms = [_norms(x, k_axis, center, memory, *how) for x, k_axis in sides]
    sizes = [float(each.max(initial=0)) for each in norms]
    for dtype, limit in zip(dtypes, limits, strict=True):
        if limit and max(sizes) <= limit:
            return dtype
    side = int(np.argmax(sizes))
    if problem.epilogue[0].kind == "distance":
        raise InputError(
            f"{lines[side]} {norms[side].argmax()} of {sides[side][0].name} has elements so large that its "
            f"squared distances overflow float64: multiply all {lines[side]}s by 2.0**-400"
        )
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
    if problem.epilogue[0].kind == "distance":  # distances that are stored need float64
        return float(limits.max) / 16 if gamma < 0 or dtype == "float64" else 0.0
    if dtype == "float32" and gamma * problem.depth * float(limits.tiny) > MAX_ERROR:  # may underflow
        return 0.0
    scale = gamma * float(limits.eps)
    return min(MAX_ERROR / scale if scale > 1e-300 else np.inf, float(limits.max) / 16)


def _norms(
    matrix: Matrix,
    k_axis: int,
    center: Array,
    memory: int,
    dtype: str,
    norms: Callable[[Matrix, int, int], Array],
) -> Array:
    """Return |x - c|^2 of each row x: Inf if it overflows, and 0 if the row has a NaN or Inf.

    Rows x - c are those that are multiplied in a dtype. `norms` sums their squares.
    """
    found = norms(_moved(matrix, k_axis, center, dtype), k_axis, memory)
    if np.isinf(found).any():
        sizes = largest(_moved(matrix, k_axis, np.zeros(len(center)), "float64"), k_axis, memory)
        found[~np.isfinite(sizes)] = 0
    found[np.isnan(found)] = 0
    return found


def _moved(matrix: Matrix, k_axis: int, center: Array, dtype: str) -> TransformedMatrix:
    moves = Transform(center=center, cast=dtype)
    return TransformedMatrix(matrix, moves, k_axis, ("rows", "columns")[k_axis], (center,))


def open_operands(request: Request, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open and return A and B, with the description of their product on a backend.

    Raises `InputError` if A and B do not fit.
    """
    match request.into:
        case Gram():
            return _open_gram(request, backend)
        case Selection() as selection:
            return _open_selection(request, selection, backend)
        case Chain() as chain:
            return _open_chain(request, chain)
        case Reduction() as reduction:
            return _open_reduced(request, reduction, backend)
    a, b = _opened_pair(request, request.into.names)
    a, trans_a = _multiplied(a, request.a, left=True)
    b, trans_b = _multiplied(b, request.b, left=False)
    if request.slicing is not None:
        a = SlicedMatrix(a, request.slicing, transposed=trans_a.swaps)
        b = SlicedMatrix(b, request.slicing, transposed=trans_b.swaps)
    a, b = as_multiplied(*_exact(request, backend, a, b))
    scalars = request.alpha, request.beta
    problem = problem_of(a, b, *scalars, trans_a, trans_b, request.compute, request.out_dtype)
    return _stored(request, _with_terms(request, problem), a, b, backend)


def _exact(request: Request, backend: str, *matrices: Matrix) -> tuple[Matrix, ...]:
    """Return operands in the dtype in which a backend sums small integers without rounding, and fast."""
    if not request.terms.largest:
        return matrices
    if backend == "cuda" and all(matrix.dtype.name in _BYTES for matrix in matrices):
        return tuple(
            matrix if matrix.dtype == np.int8 else ConvertedMatrix(matrix, np.dtype(np.int8))
            for matrix in matrices
        )
    most = request.terms.largest * max(max(matrix.shape) for matrix in matrices)
    wide = np.dtype(np.float32 if most <= _MAX_EXACT else np.float64)
    return tuple(ConvertedMatrix(matrix, wide) for matrix in matrices)


def _with_terms(request: Request, problem: GemmProblem) -> GemmProblem:
    """Return the problem with the terms of its request. Raises `InputError` if they cannot be computed."""
    if request.terms != ONE and problem.planes:
        raise InputError(
            "compute = 'emulated' computes one product, and the result is made of several: drop compute "
            "(--compute)"
        )
    return replace(problem, terms=request.terms)


def _stored(
    request: Request, problem: GemmProblem, a: Matrix, b: Matrix, backend: str
) -> tuple[Matrix, Matrix, GemmProblem]:
    """Return A, B and a product that is stored, with its epilogue and its checksums."""
    problem = _accumulated(problem, backend)
    problem = with_epilogue(problem, request.epilogue, casts=request.out_dtype is None)
    if request.into.uplo == "full":
        check_mirrored(request.epilogue)
    problem, a, b = centered(problem, a, b, request)
    problem, a, b = _widened(problem, a, b, backend)
    return a, b, _checked(request, problem, checksum_tier(backend, problem))


def _widened(problem: GemmProblem, a: Matrix, b: Matrix, backend: str) -> tuple[GemmProblem, Matrix, Matrix]:
    """Return a product and its operands, in the dtype in which a GPU can multiply them without rounding."""
    wide = DTYPES[problem.a_dtype].wide
    if backend != "cuda" or not wide:
        return problem, a, b
    left = ConvertedMatrix(a, numpy_dtype(wide))
    right = left if b is a else ConvertedMatrix(b, numpy_dtype(wide))
    return replace(problem, a=replace(problem.a, dtype=wide), b=replace(problem.b, dtype=wide)), left, right


def _open_gram(request: Request, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open the operand of a Gram matrix, which is returned as A and as B, and describe the product.

    Raises `InputError` also for scalars with which C would not be Hermitian.
    """
    x, trans = _rows(opened("X", request), request.a.rows), op_of("trans_a", request.a.op)
    change = _of_rows(with_missing(x, request.a), request.a.rows)
    if request.a.standardize:
        x, change = _standardized(x, request.a, trans, left=True), None
    if request.a.known is not None:
        known = request.a.known
        # Tensor cores multiply int8 fastest, and CPUs float32, in which such sums are exact.
        narrow = backend == "cuda" or len(known.used) > _MAX_EXACT
        dtype = "int8" if narrow else str(request.out_dtype)
        x = accepting(x, known.code)
        code = code_in(x, Transform(missing=known.code))
        x = KnownMatrix(x, int(not trans.swaps), code, known.used, dtype)
    if x.dtype.kind != "c":
        x, trans = by_rows(x, change, trans, left=not request.a.of_lines)
        other = Op.N if trans.swaps else Op.T
    else:
        x = transformed(x, change, trans, left=True)
        trans, other = (Op.C, Op.N) if trans.swaps else (Op.N, Op.C)
    (x,) = as_multiplied(*_exact(request, backend, x))
    scalars = request.alpha, request.beta
    for name, value in zip(("alpha", "beta"), scalars, strict=True):
        if isinstance(value, complex) and value.imag != 0:
            raise InputError(
                f"{name} = {value} is complex, and a Gram matrix of complex X needs real scalars to be "
                f"Hermitian: pass a real {name}"
            )
    problem = problem_of(x, x, *scalars, trans, other, request.compute, request.out_dtype)
    problem = replace(problem, b=same(problem.b), cover=cover_of(request.into.uplo))
    return _stored(request, _with_terms(request, problem), x, x, backend)


def _opened_pair(request: Request, names: tuple[str, str]) -> tuple[Matrix, Matrix]:
    """Open and return A and B, with missing genotypes replaced if the request asks for that."""
    sources, decode = (request.a, request.b), request.decode
    found = stores.open_pair(*zip(names, (each.given for each in sources), strict=True), decode=decode)
    a, b = (completed(x, source, request) for x, source in zip(found, sources, strict=True))
    return a, b


def _multiplied(x: Matrix, source: Source, *, left: bool) -> tuple[Matrix, Op]:
    """Return an operand, A if `left` and otherwise B, as it is multiplied, and its op."""
    op = op_of("trans_a" if left else "trans_b", source.op)
    if source.standardize:
        return by_rows(_standardized(x, source, op, left=left), None, op, left=left)
    kept = _kept(x, source, op, left=left)
    whole = (
        x if left == op.swaps and kept is not x else None
    )  # columns that are left out count in sums of rows
    change = _of_kept(x, source, int(left == op.swaps))
    return by_rows(kept, change, op, left=left and not source.of_lines, whole=whole)


def _of_kept(x: Matrix, source: Source, axis: int) -> Transform | None:
    """Return the transform of an operand, with the factors of the rows that are kept (`axis` 0)."""
    change = with_missing(x, source)
    if change is None or source.kept is None or axis or not isinstance(change.target_sum, np.ndarray):
        return change
    return replace(change, target_sum=change.target_sum[source.kept])


def _kept(x: Matrix, source: Source, op: Op, *, left: bool) -> Matrix:
    """Return the rows of op(A), or the columns of op(B), that are used."""
    return x if source.kept is None else KeptMatrix(x, int(left == op.swaps), source.kept)


def of_lines(x: Matrix, source: Source, op: Op, *, left: bool) -> Matrix:
    """Return an operand before its lines, the rows of op(A) or the columns of op(B), are standardized."""
    axis, kept = int(left == op.swaps), _kept(x, source, op, left=left)
    whole = x if axis else kept  # rows that are left out need no sums
    found, change = filled_lines(kept, source, _of_kept(x, source, axis), op, left=left, whole=whole)
    return transformed(found, change, op, left=left, whole=whole)


def _standardized(x: Matrix, source: Source, op: Op, *, left: bool) -> Matrix:
    """Return an operand with the rows of op(A), or the columns of op(B), transformed and standardized."""
    return standardized(of_lines(x, source, op, left=left), source.standardize, int(left == op.swaps))


def _open_selection(
    request: Request, selection: Selection, backend: str
) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open and return A and B, with the description of a selection from their product."""
    a, b, problem = _open_pair(request, selection.names, backend, same=selection.same)
    if selection.topk and not selection.same:
        _check_most(selection.topk, problem.n)
    if not problem.epilogue or problem.terms != ONE:
        problem = _accumulated(problem, backend)
    if selection.same and is_symmetric(request.epilogue):
        cover = Triangle() if selection.band is None else Halved(band=selection.band)
        problem = replace(problem, b=same(problem.b), cover=cover)
    if selection.topk or backend == "cuda":
        of_each = (
            SELECTED[problem.combined_dtype],
            problem.epilogue,
            selection.cosine,
            selection.excludes_self,
        )
        least = selection.least(problem)
        sink = (
            Largest(*of_each, selection.topk)
            if selection.topk
            else AtLeast(*of_each, least, selection.absolute)
        )
        problem = replace(problem, sink=sink)
    # The host backend searches tiles of C when it writes them (`oocgemm.stores.arrays`).
    return a, b, _checked(request, problem, "host")


def _open_pair(
    request: Request, names: tuple[str, str], backend: str, *, same: bool
) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open and return A and B, with their product, which is not stored. With `same`, op(B) is op(A)^T."""
    name = "X" if request.a.standardize else names[0]
    trans = op_of("trans_a", request.a.op)
    if same:
        a = b = opened(name, request)
    else:
        a, b = _opened_pair(request, (name, names[1]))
    if a.dtype.kind == "c":
        raise InputError(
            f"{name} is of dtype {a.dtype}, and complex numbers have no order: pass a real {name}"
        )
    selection = request.into
    if same and isinstance(selection, Selection) and selection.topk:
        rows = a.shape[int(trans.swaps)] if request.a.kept is None else len(request.a.kept)
        _check_topk(name, selection, rows)
    a, trans = _multiplied(a, request.a, left=True)
    b, other = (a, Op.N if trans.swaps else Op.T) if same else _multiplied(b, request.b, left=False)
    a, b = (
        as_multiplied(*_exact(request, backend, a)) * 2
        if same
        else as_multiplied(*_exact(request, backend, a, b))
    )
    score = _SCORES.get(a.dtype.name)
    problem = _with_terms(request, problem_of(a, b, 1, 0, trans, other, request.compute, score))
    if problem.is_corrected:
        raise InputError(
            f"cast = 'int8' with centers corrects a C that is stored, and this one is not: pass another cast "
            f"for {name}, such as cast='float32'"
        )
    problem = with_epilogue(problem, request.epilogue, casts=False)
    if problem.sink.merges or any(isinstance(step, Cast) for step in request.epilogue):
        raise InputError("Add, Divide and Cast need a C that is stored: drop them")
    problem, a, b = centered(problem, a, b, request)
    problem, a, b = _widened(problem, a, b, backend)
    return a, b, _wide(problem) if problem.measures_distances else problem


def _wide(problem: GemmProblem) -> GemmProblem:
    return replace(problem, sink=replace(problem.sink, dtype=problem.acc_dtype))


def _of_rows(change: Transform | None, rows: Range | None) -> Transform | None:
    """Return the transform of some rows of X: with their factors, if it has a factor for each row."""
    if rows is None or change is None or not isinstance(change.target_sum, np.ndarray):
        return change
    return replace(change, target_sum=change.target_sum[slice(*rows)])


def _rows(x: Matrix, rows: Range | None) -> Matrix:
    """Return the matrix of these rows of X, or X if `rows` is None."""
    if rows is None:
        return x
    whole = stores.in_memory(x)
    return RowsMatrix(x, rows) if whole is None else stores.open_matrix("X", whole[slice(*rows)])


def _open_chain(request: Request, chain: Chain) -> tuple[Matrix, Matrix, GemmProblem]:
    """Return X, opened, the matrix that is added to X Q, and the description of ``X^T (X Q + 1 row)``."""
    x = _rows(stores.open_matrix("X", request.a.given, decode=request.decode), request.a.rows)
    count = x.shape[0]
    x, trans = by_rows(x, _of_rows(request.a.transform, request.a.rows), Op.T, left=not request.a.of_lines)
    added = ConstantRows("the row", chain.row.astype(x.dtype), count, chain.resident_bytes)
    problem = problem_of(x, added, 1, 0, trans, Op.N)
    b = Updated(problem.b.dtype, problem.b.op, columns=chain.columns)
    return x, added, replace(problem, b=b)


def _open_reduced(request: Request, reduction: Reduction, backend: str) -> tuple[Matrix, Matrix, GemmProblem]:
    """Open and return A and B, with the reduction of the rows of their product, or its product with V."""
    a, b, problem = _open_pair(request, reduction.names, backend, same=reduction.same)
    if reduction.kind:
        if reduction.kind == "max" and not problem.n:
            raise InputError("C has no elements, so that none is the largest: pass a larger A and B")
        problem = problem if problem.epilogue else _accumulated(problem, backend)
        problem = replace(problem, sink=Reduced("float64", problem.epilogue, reduction.kind))
        if reduction.band is not None:
            problem = replace(problem, b=same(problem.b), cover=reduction.band)
        return a, b, _checked(request, problem, "host")
    assert reduction.factor is not None
    rows, columns = reduction.factor.shape
    if rows != problem.n:
        raise InputError(f"V has {rows} rows, and C has {problem.n} columns: pass a row of V for each")
    problem = replace(problem, sink=Applied(problem.acc_dtype, problem.epilogue, columns))
    return a, b, _checked(request, problem, "host")


def _check_most(topk: int, most: int) -> None:
    """Raise `InputError` if rows of C have fewer elements than the number to find per row."""
    if most < 1:
        raise InputError("C has no columns, so that no element is the largest: pass a B with columns")
    if topk > most:
        raise InputError(f"topk = {topk}, but C has {most} columns: pass a topk from 1 to {most}")


def _check_topk(name: str, selection: Selection, rows: int) -> None:
    """Raise `InputError` if a row can be compared with fewer rows than the number to find per row."""
    most, besides = rows - selection.excludes_self, " besides itself" if selection.excludes_self else ""
    if most < 1:
        raise InputError(f"{name} has {counted(rows, 'row')}, and none to compare it with: pass more rows")
    if not 1 <= selection.topk <= most:
        raise InputError(
            f"topk = {selection.topk}, but a row of {name} can be compared with {most} rows{besides}: pass a "
            f"topk from 1 to {most}"
        )


def _accumulated(problem: GemmProblem, backend: str) -> GemmProblem:
    """Return the problem with the dtype of its sums: int32 for int8 on a GPU, if no sum can overflow."""
    narrow, largest = problem.exact and not DTYPES[problem.a_dtype].wide, problem.terms.largest
    depth = emulation.MAX_INT32_DEPTH if not largest else _MAX_INT32 // largest
    if narrow and backend == "cuda" and problem.depth <= depth:
        return problem.with_sums("int32")
    return problem


def _checked(request: Request, problem: GemmProblem, tier: str) -> GemmProblem:
    """Return the problem with its checksums, which `tier` computes, if the request asks for them."""
    if not request.verify:
        return problem
    if request.terms != ONE:
        raise support.refusal(support.ONE, "verify of terms")
    if problem.updates_c and (problem.epilogue or problem.is_corrected):
        remedy = "pass a copy of it as D of a step Add(D, value=beta), with beta = 0, or drop verify"
        if problem.is_corrected:  # no step can follow the centers
            remedy = "drop verify, and check C afterwards with oocgemm verify --c-before a copy of the old C"
        raise InputError(
            f"beta = {problem.beta}, and verify computes elements of C again, but the run overwrites the old "
            f"C: {remedy}"
        )
    return problem.checked_on(tier)


def checksum_tier(backend: str, problem: GemmProblem) -> str:
    """Return where the checksums of panels are computed: "device" or "host".

    On cuda, the device computes them, because its memory is faster. But the device has no checksum kernels
    for integers, nor for panels that are panels of both A and B, and cannot check elements that an epilogue
    has changed (`GemmProblem.checks_sums`).
    """
    host = problem.exact or problem.b.shares or problem.epilogue
    return "device" if backend == "cuda" and not host else "host"
