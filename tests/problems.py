"""Small exact problems: integer-valued operands whose products every dtype here holds without rounding."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import numpy_dtype
from oocgemm.plan import Op

Array = NDArray[Any]

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def integers(rng: np.random.Generator, shape: tuple[int, int], dtype: str, most: int = 3) -> Array:
    """A matrix of small integers (Gaussian integers for complex dtypes), exact in any dtype."""
    values = rng.integers(-most, most + 1, shape).astype(np.float64)
    if numpy_dtype(dtype).kind == "c":
        return (values + 1j * rng.integers(-most, most + 1, shape)).astype(dtype)
    return values.astype(numpy_dtype(dtype))


def applied(op: Op, x: Array) -> Array:
    """op(X)."""
    return {Op.N: x, Op.T: x.T, Op.C: x.conj().T}[op]


def stored(op: Op, rows: int, cols: int) -> tuple[int, int]:
    """Shape of X as it is stored, op(X) being rows x cols."""
    return (cols, rows) if op.swaps else (rows, cols)


def reference(
    alpha: complex, op_a: Op, a: Array, op_b: Op, b: Array, beta: complex, c: Array | None
) -> Array:
    """alpha op(A) op(B) + beta C, in the widest precision."""
    wide = np.complex128
    product = alpha * (applied(op_a, a).astype(wide) @ applied(op_b, b).astype(wide))
    return product if c is None or beta == 0 else product + beta * c.astype(wide)


def assert_same(actual: Array, expected: Array) -> None:
    """Equal bit for bit, once the reference is in the result's dtype."""
    narrowed = expected if actual.dtype.kind == "c" else expected.real
    np.testing.assert_array_equal(actual, narrowed.astype(actual.dtype))
