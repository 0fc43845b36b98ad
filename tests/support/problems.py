"""Operands for tests: small integers, which have exact products, and numbers of all magnitudes."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocgemm.backends.base import numpy_dtype
from oocgemm.planning import DTYPES as OPERAND_TYPES
from oocgemm.planning import Op

Array = NDArray[Any]

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")
ALL_DTYPES = (*DTYPES, "int8")
KINDS = ("normal", "wide", "large", "small", "root", "constant", "zero", "rows")
EXTENTS = st.one_of(st.integers(1, 40), st.sampled_from([130, 257, 300]))


def integers(rng: np.random.Generator, shape: tuple[int, int], dtype: str, most: int = 3) -> Array:
    """Draw a matrix of integers up to `most` in magnitude (Gaussian integers for complex dtypes)."""
    values = rng.integers(-most, most + 1, shape).astype(np.float64)
    if numpy_dtype(dtype).kind == "c":
        return (values + 1j * rng.integers(-most, most + 1, shape)).astype(dtype)
    return values.astype(numpy_dtype(dtype))


def integer_c(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Array:
    """Draw a C of small integers, in the default dtype of results for operands of `dtype`."""
    return integers(rng, shape, OPERAND_TYPES[dtype].results[0])


def spoil(c: Array) -> None:
    """Fill a C with NaN, or with the largest integer. The product is wrong if a run reads it."""
    c[...] = np.iinfo(c.dtype).max if c.dtype.kind == "i" else np.nan


def applied(op: Op, x: Array) -> Array:
    """Return op(X)."""
    return {Op.N: x, Op.T: x.T, Op.C: x.conj().T}[op]


def stored(op: Op, rows: int, cols: int) -> tuple[int, int]:
    """Return the shape in which X is stored if op(X) is rows x cols."""
    return (cols, rows) if op.swaps else (rows, cols)


def reference(
    alpha: complex, op_a: Op, a: Array, op_b: Op, b: Array, beta: complex, c: Array | None
) -> Array:
    """Compute alpha op(A) op(B) + beta C in complex128."""
    wide = np.complex128
    product = alpha * (applied(op_a, a).astype(wide) @ applied(op_b, b).astype(wide))
    return product if c is None or beta == 0 else product + beta * c.astype(wide)


def assert_same(actual: Array, expected: Array) -> None:
    """Assert that a result equals the reference cast to its dtype, bit for bit."""
    narrowed = expected if actual.dtype.kind == "c" else expected.real
    np.testing.assert_array_equal(actual, narrowed.astype(actual.dtype))


def scaled(rng: np.random.Generator, shape: tuple[int, int], dtype: str, kind: str) -> Array:
    """Draw a matrix of one of `KINDS`: for example zeros, or elements of all magnitudes of the dtype."""
    x = rng.standard_normal(shape)
    limits = np.finfo(dtype)
    with np.errstate(all="ignore"):
        if kind == "wide":
            x *= 10.0 ** rng.uniform(np.log10(limits.tiny), np.log10(limits.max), shape)
        elif kind == "large":
            x *= float(limits.max) / 100
        elif kind == "small":
            x *= float(limits.tiny)
        elif kind == "root":
            x *= float(limits.tiny) ** 0.5
        elif kind == "constant":
            x[...] = 0.1
        elif kind == "zero":
            x[...] = 0
        elif kind == "rows":
            x *= 10.0 ** rng.uniform(np.log10(limits.tiny) / 2, np.log10(limits.max) / 2, (shape[0], 1))
        return (x if np.dtype(dtype).kind != "c" else x + 1j * x[::-1]).astype(dtype)


def drawn_product(data: st.DataObject) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Draw A, B, C and the options of a product, with some nonfinite elements."""
    m, n, k = (data.draw(EXTENTS, label) for label in "mnk")
    dtype = data.draw(st.sampled_from(DTYPES))
    op_a, op_b = (data.draw(st.sampled_from(list(Op))) for _ in "AB")
    large = 1e300 if dtype in ("float64", "complex128") else 1e30
    alpha = data.draw(st.sampled_from([1, 0, -2.5, 1 / large, large]), "alpha")
    beta = data.draw(st.sampled_from([0, 1, -0.3]), "beta")
    kinds = [data.draw(st.sampled_from(KINDS), f"kind of {x}") for x in "ABC"]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shapes = stored(op_a, m, k), stored(op_b, k, n), (m, n)
    a, b, c = (scaled(rng, shape, dtype, kind) for shape, kind in zip(shapes, kinds, strict=True))
    for x in (a, b, c):
        for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=2)):
            x[rng.integers(x.shape[0]), rng.integers(x.shape[1])] = value
    return a, b, c, {"alpha": alpha, "beta": beta, "trans_a": op_a, "trans_b": op_b}
