"""Check the product that a request asks for: its shapes, dtypes, scalars and tile."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from oocgemm.jobs.corrections import is_centered
from oocgemm.jobs.epilogue import CASTS
from oocgemm.jobs.options import Transpose
from oocgemm.planning import COMPUTES, DTYPES, DType, GemmProblem, Op, TileShape, integers
from oocgemm.planning.cover import COVERS
from oocgemm.planning.problem import same
from oocgemm.stores import Matrix
from oocgemm.stores.base import dtype_name, named_dtype
from oocgemm.stores.transformed import TransformedMatrix

# The default dtype of C if an operand is transformed to a narrow dtype: the cast is for the speed of the
# product, and C shall not be rounded to it.
_NARROW = {"float16": "float32", "bfloat16": "float32"}


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
    """Describe the product of two operands. Raises `InputError` if shapes, dtypes or scalars do not match."""
    trans_a, trans_b = op_of("trans_a", trans_a), op_of("trans_b", trans_b)
    stores.check_dtypes(a, b)
    m, k = a.shape[::-1] if trans_a.swaps else a.shape
    k_b, n = b.shape[::-1] if trans_b.swaps else b.shape
    if k != k_b:
        raise InputError(
            f"shapes do not match: op(A) is {m} x {k} and op(B) is {k_b} x {n}; op(A) must have as many "
            "columns as op(B) has rows"
        )
    dtype = DTYPES[dtype_name(a.dtype)]
    centered = is_centered(a, b)
    if out_dtype is None and any(isinstance(x, TransformedMatrix) for x in (a, b)):
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
        problem = replace(problem, centered=True)
    if problem.exact and problem.depth > integers.MAX_FLOAT64_DEPTH:
        raise InputError(
            f"op(A) has {k} columns; sums of more than {integers.MAX_FLOAT64_DEPTH} int8 products may not be "
            "exact: multiply parts with fewer columns, and add the results"
        )
    return problem


# The same object for the same product: comparing two equal ones takes longer, and each caches properties.
_problem = lru_cache(64)(GemmProblem.of)


def gram_problem(
    x: Matrix,
    gram: str,
    alpha: complex,
    beta: complex,
    trans_a: Op,
    trans_b: Op,
    compute: str = "native",
    out_dtype: Any = None,
) -> GemmProblem:
    """Describe the product of op(X) and its conjugate transpose.

    Raises `InputError` if X cannot be used, or for scalars with which C would not be Hermitian.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, complex) and value.imag != 0:
            raise InputError(
                f"{name} = {value} is complex, and a Gram matrix of complex X needs real scalars to be "
                f"Hermitian: pass a real {name}"
            )
    problem = problem_of(x, x, alpha, beta, trans_a, trans_b, compute, out_dtype)
    return replace(problem, b=same(problem.b), cover=COVERS[gram])


def _out_dtype(given: Any, operands: DType) -> str:
    """Return the name of C's dtype. Raises `InputError` if operands of this dtype cannot give it."""
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
    """Return the end of a message: how C gets a dtype that the product cannot have; "" if it cannot."""
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
    """Return alpha or beta as a number.

    Raises `InputError` if the number cannot be used with the dtypes of the operands and of C.
    """
    try:
        number = complex(value if np.ndim(value) == 0 else "an array")
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} = {value!r} is not a number") from None
    if operands.is_complex:
        _check_range(name, number, operands)
        return number
    if number.imag != 0:
        raise InputError(f"{name} = {value} is complex, but the operands are real")
    if c_dtype.startswith("int") and not (number.real.is_integer() and abs(number) < integers.EXACT_LIMIT):
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
    """Parse a tile shape, such as "4096x4096x512", and clip it to the product.

    Raises `InputError` for other text.
    """
    if value is None or isinstance(value, TileShape):
        return value and value.within(problem)
    parts = str(value).lower().split("x")
    if len(parts) != 3 or not all(p.strip().isdecimal() and int(p) for p in parts):
        raise InputError(f"cannot read {value!r} as a tile: write MxNxK, such as 8192x8192x512")
    return TileShape(*(int(p) for p in parts)).within(problem)
