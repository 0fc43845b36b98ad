"""Emulated products on a GPU: exact on integers, with the right residues and small errors."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from oocgemm.planning import Op
from oocgemm.planning.emulation import MODULI_COUNTS, pitch, plane_offsets, residues, work_bytes
from tests.support.backends_here import CUDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(60, method="thread"),
]

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def multiplier() -> Iterator[Any]:
    from oocgemm.backends.cuda.multiplier import Multiplier

    made = Multiplier(0)
    yield made
    made.close()


def multiplied(
    multiplier: Any,
    a: Array,
    b: Array,
    ops: tuple[Op, Op] = (Op.N, Op.N),
    scalars: tuple[float, float] = (1, 0),
    c: Array | None = None,
) -> tuple[int, Array, dict[str, Array]]:
    """Multiply on the GPU. Return the number of moduli, C, and the arrays of residues.

    C is unchanged if the number of moduli is 0, which means that the panels cannot be emulated.
    """
    import cupy

    dtype = a.dtype.name
    m, k = a.shape[::-1] if ops[0].swaps else a.shape
    n = b.shape[0] if ops[1].swaps else b.shape[1]
    most = MODULI_COUNTS[dtype][-1]
    offsets = plane_offsets(most, m, n, k)
    slot = cupy.full(offsets.end, 77, cupy.int8)
    work = cupy.full(work_bytes(most, m, n), 77, cupy.int8)
    left, right = cupy.asarray(a), cupy.asarray(b)
    out = cupy.full((m, n + 3), np.nan, dtype)
    if c is not None:
        out[:, :n] = cupy.asarray(c)
    emulated = multiplier.emulated(dtype)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        number = emulated.prepare(left.data.ptr, right.data.ptr, (m, n, k), *ops, slot.data.ptr, offsets)
        for span in ((0, m // 3), (m // 3, m)) if number else ():
            at = out.data.ptr + span[0] * out.strides[0]
            emulated.multiply(
                slot.data.ptr, offsets, work.data.ptr, span, (m, n, k), number, *scalars, at, n + 3
            )
        stream.synchronize()
    assert bool(cupy.isnan(out[:, n:]).all())
    held = slot.get()
    parts = {
        "a": held[offsets.a :][: number * m * pitch(k)].reshape(number, m, pitch(k)),
        "exponents": held[offsets.a_exponents :][: 4 * m].view(np.int32),
    }
    return number, out[:, :n].get(), parts


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_small_integers_are_exact(multiplier: Any, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for op_a, op_b, (m, n, k) in product(
        (Op.N, Op.T), (Op.N, Op.T), ((1, 1, 16), (37, 41, 43), (130, 67, 129), (64, 96, 256))
    ):
        a, b, c = (rng.integers(-9, 10, shape).astype(dtype) for shape in ((m, k), (k, n), (m, n)))
        left, right = (x.T.copy() if op.swaps else x for x, op in zip((a, b), (op_a, op_b), strict=True))
        number, got, _ = multiplied(multiplier, left, right, (op_a, op_b), scalars=(2, -1), c=c)
        assert number == MODULI_COUNTS[dtype][0]
        np.testing.assert_array_equal(got, 2 * (a @ b) - c)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_residues_are_those_of_the_scaled_integers(multiplier: Any, dtype: str, transposed: bool) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((50, 100)).astype(dtype) for _ in range(2))
    op = Op.T if transposed else Op.N
    number, _, parts = multiplied(multiplier, a.T.copy() if transposed else a, b, (op, Op.T))
    assert number
    for i, s in enumerate(parts["exponents"]):
        scaled = [int(x) for x in np.rint(np.ldexp(a[i].astype(np.float64), s))]
        for place, p in enumerate(residues(number).moduli):
            expected = [(x + p // 2) % p - p // 2 for x in scaled]
            assert parts["a"][place, i, :100].tolist() == expected
            assert not parts["a"][place, i, 100:].any()


@pytest.mark.parametrize(("dtype", "unit"), [("float64", 2.0**-53), ("float32", 2.0**-24)])
def test_errors_are_those_of_a_native_product(multiplier: Any, dtype: str, unit: float) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((96, 4096)).astype(dtype), rng.standard_normal((4096, 80)).astype(dtype)
    # Scaling by powers of two, which neither overflows nor underflows.
    for power in (0, 400 if dtype == "float64" else 40):
        number, got, _ = multiplied(multiplier, np.ldexp(a, power), np.ldexp(b, -power))
        assert number
        wide = np.longdouble
        exact, size = a.astype(wide) @ b.astype(wide), abs(a).astype(wide) @ abs(b).astype(wide)
        assert float((abs(got - exact) / size).max()) <= 2 * unit


def test_what_cannot_be_shown_to_do_falls_back(multiplier: Any) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((64, 256)), rng.standard_normal((256, 64))
    for bad in (np.nan, np.inf):
        spoilt = a.copy()
        spoilt[3, 5] = bad
        assert multiplied(multiplier, spoilt, b)[0] == 0
    assert multiplied(multiplier, a * np.exp(20 * rng.standard_normal(a.shape)), b)[0] == 0
    zero = a.copy()
    zero[7] = 0
    number, got, _ = multiplied(multiplier, zero, b)
    assert number
    assert not got[7].any()
