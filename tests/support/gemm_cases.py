"""Products for tests of kernels, with references.

Operands are parts of larger arrays, and kernels must not change the elements around them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import numpy_dtype
from oocgemm.kernels.spec import summed_in
from oocgemm.planning import DTYPES, Op
from tests.support.problems import applied, integers, stored

Array = NDArray[Any]

OP_PAIRS = [(op_a, op_b) for op_a in Op for op_b in Op]
# One element, extents one off the tile sizes of every kernel, thin and flat matrices, and k = 0.
ODD_SHAPES = [
    (1, 1, 1),
    (7, 33, 17),
    (33, 7, 65),
    (65, 31, 9),
    (1, 70, 5),
    (70, 1, 31),
    (16, 64, 32),
    (5, 9, 0),
]
# Unit roundoff of reduced precisions, by `compute`. For native products it is that of the accumulator's
# dtype.
ROUNDOFF = {"tf32": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """A and B as they are stored, C before the product, and the scalars."""

    op_a: Op
    op_b: Op
    a: Array
    b: Array
    c: Array
    alpha: complex
    beta: complex

    @property
    def shape(self) -> tuple[int, int, int]:
        m, n = self.c.shape
        return m, n, applied(self.op_a, self.a).shape[1]


def integer_case(
    rng: np.random.Generator,
    dtype: str,
    ops: tuple[Op, Op],
    shape: tuple[int, int, int],
    scalars: tuple[int, int],
) -> Case:
    """Return a case of small integers, whose product is exact in every dtype.

    C is NaN if it must not be read.
    """
    m, n, k = shape
    a, b = integers(rng, stored(ops[0], m, k), dtype), integers(rng, stored(ops[1], k, n), dtype)
    c = integers(rng, (m, n), summed_in(dtype))
    if scalars[1] == 0 and c.dtype.kind in "fc":
        c[...] = np.nan
    return Case(*ops, a, b, c, *scalars)


def random_case(
    rng: np.random.Generator, dtype: str, ops: tuple[Op, Op], shape: tuple[int, int, int]
) -> Case:
    """Return a case of normal random numbers, and of scalars with which products are rounded."""
    m, n, k = shape

    def normal(rows: int, cols: int, name: str) -> Array:
        values: Array = rng.standard_normal((rows, cols))
        if DTYPES[name].is_complex:
            values = values + 1j * rng.standard_normal((rows, cols))
        return values.astype(numpy_dtype(name))

    a, b = normal(*stored(ops[0], m, k), dtype), normal(*stored(ops[1], k, n), dtype)
    return Case(*ops, a, b, normal(m, n, summed_in(dtype)), 0.7, -1.3)


def triple_loop(case: Case) -> Array:
    """Return the product by its definition, in Python's own numbers."""
    (m, n, k), result = case.shape, case.c.astype(complex)
    a, b = applied(case.op_a, case.a).tolist(), applied(case.op_b, case.b).tolist()
    for i in range(m):
        for j in range(n):
            total = 0
            for p in range(k):
                total += a[i][p] * b[p][j]
            old = case.beta * result[i, j] if case.beta else 0
            result[i, j] = case.alpha * total + old
    return (result if case.c.dtype.kind == "c" else result.real).astype(case.c.dtype)


def assert_close(actual: Array, case: Case, compute: str = "native") -> None:
    """Check a product element by element: |dC| <= 2 (k + 4) u (|alpha| |A| |B| + |beta| |C|).

    dC is the difference to a product in a wider dtype, and u is the unit roundoff. Complex numbers may have
    four times the error. NaN never passes.
    """
    real, single = case.c.dtype.kind != "c", case.c.dtype in (np.float32, np.complex64)
    wide: Any = (
        (np.float64 if real else np.complex128) if single else (np.longdouble if real else np.clongdouble)
    )
    a, b = (applied(op, x).astype(wide) for op, x in ((case.op_a, case.a), (case.op_b, case.b)))
    expected = case.alpha * (a @ b) + case.beta * case.c.astype(wide)
    scale = abs(case.alpha) * (np.abs(a) @ np.abs(b)) + abs(case.beta) * np.abs(case.c)
    u = ROUNDOFF.get(compute, float(np.finfo(case.c.dtype).eps))
    bound = (2 if real else 8) * (case.shape[2] + 4) * u * scale
    error = np.abs(actual.astype(wide) - expected)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - bound)), error.shape)
    assert np.all(error <= bound), (
        f"at {worst}: {actual[worst]} for {expected[worst]}, off by {error[worst]:.3g}"
    )
