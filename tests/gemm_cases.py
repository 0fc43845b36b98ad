"""Products for kernels: the reference, and operands inside larger arrays whose surroundings must stay as
they are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import numpy_dtype
from oocgemm.kernels.spec import summed_in
from oocgemm.planning import DTYPES, Op
from tests.problems import applied, integers, stored

Array = NDArray[Any]

OP_PAIRS = [(op_a, op_b) for op_a in Op for op_b in Op]
# One element, edges one off every tile size of the ladder, thin, flat, and a k of 0.
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
# Unit roundoff by what is computed in; native is the accumulator's.
ROUNDOFF = {"tf32": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """Stored operands, C before the product, and scalars."""

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
    """Small integers, whose product every dtype holds exactly. C is NaN where it must not be read."""
    m, n, k = shape
    a, b = integers(rng, stored(ops[0], m, k), dtype), integers(rng, stored(ops[1], k, n), dtype)
    c = integers(rng, (m, n), summed_in(dtype))
    if scalars[1] == 0 and c.dtype.kind in "fc":
        c[...] = np.nan
    return Case(*ops, a, b, c, *scalars)


def random_case(
    rng: np.random.Generator, dtype: str, ops: tuple[Op, Op], shape: tuple[int, int, int]
) -> Case:
    """Normal numbers, and scalars that round."""
    m, n, k = shape

    def normal(rows: int, cols: int, name: str) -> Array:
        values: Array = rng.standard_normal((rows, cols))
        if DTYPES[name].is_complex:
            values = values + 1j * rng.standard_normal((rows, cols))
        return values.astype(numpy_dtype(name))

    a, b = normal(*stored(ops[0], m, k), dtype), normal(*stored(ops[1], k, n), dtype)
    return Case(*ops, a, b, normal(m, n, summed_in(dtype)), 0.7, -1.3)


def triple_loop(case: Case) -> Array:
    """The product by definition, in Python's own numbers."""
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
    """|dC| <= 2 (k + 4) u (|alpha| |A| |B| + |beta| |C|), element by element, against a wider product; four
    times that for complex numbers. NaN does not pass.
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
