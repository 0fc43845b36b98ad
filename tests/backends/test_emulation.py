"""Emulated products of panels: exact cases, scalars, ranges of exponents, and fallbacks."""

import tracemalloc

import numpy as np
import pytest

from oocgemm.backends.host.residues import measure_rows, multiply, prepare, split, views, workspace_bytes
from oocgemm.planning.emulation import MODULI_COUNTS, UNITS, residues
from tests.support.emulated import DTYPES, prepared, product, room_bytes
from tests.support.suite import each_value


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (7, 33, 17), (300, 5, 100), (3, 300, 1040), (257, 258, 64), (0, 3, 20), (3, 0, 20)]
)
def test_small_integers_are_exact(shape: tuple[int, int, int], dtype: str) -> None:
    m, n, k = shape
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-9, 10, s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
    found = prepared(a, b)
    assert found.number == MODULI_COUNTS[dtype][0]
    np.testing.assert_array_equal(product(found, dtype), a @ b)
    np.testing.assert_array_equal(product(found, dtype, -0.5, 3, c), -0.5 * (a @ b) + 3 * c)
    np.testing.assert_array_equal(product(found, dtype, 0, 1, c), c)
    np.testing.assert_array_equal(product(found, dtype, 1, 0, c * np.nan), a @ b)  # beta = 0 does not read C


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_by_strips_and_from_any_strides(dtype: str) -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((300, 90)).astype(dtype), rng.standard_normal((90, 270)).astype(dtype)
    found = prepared(a, b)
    whole = product(found, dtype, 1.5)
    np.testing.assert_array_equal(whole, product(found, dtype, 1.5, step=17))
    for left, right in (
        (np.asfortranarray(a), b),
        (a, np.asfortranarray(b)),
        (np.repeat(a, 2, 1)[:, ::2], b),
    ):
        other = prepared(left, right)
        assert other.number == found.number
        np.testing.assert_array_equal(whole, product(other, dtype, 1.5))


def test_scalars_have_the_dtype_and_float32_is_rounded_once() -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-999, 1000, s).astype("float32") for s in ((20, 64), (64, 30)))
    c = 1e7 * rng.standard_normal((20, 30)).astype("float32")
    alpha, beta = 0.1, 0.7
    wide = np.float64(np.float32(alpha)) * (a.astype(float) @ b.astype(float))
    wide += np.float64(np.float32(beta)) * c.astype(float)
    np.testing.assert_array_equal(product(prepared(a, b), "float32", alpha, beta, c), wide.astype("float32"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_lone_elements_are_exact_or_fall_back(dtype: str) -> None:
    rng = np.random.default_rng(8)
    b = rng.standard_normal((50, 40)).astype(dtype)
    zeros, some = np.zeros((30, 50), dtype), np.zeros((30, 50), dtype)
    found = prepared(zeros, b)
    assert found.number == MODULI_COUNTS[dtype][0]
    assert not found.a.exponents.any()
    assert not product(found, dtype).any()
    some[np.arange(30), rng.integers(0, 50, 30)] = np.exp2(rng.integers(-30, 30, 30))
    some[7] = 0
    # The one nonzero element of a row may meet an element of b whose bits are all lost.
    assert prepared(some, b).number == 0
    exact_b = np.rint(b * 100)
    np.testing.assert_array_equal(product(prepared(some, exact_b), dtype), some @ exact_b)


@pytest.mark.parametrize(("dtype", "far"), [("float64", 1000), ("float32", 100)])
def test_neither_overflow_nor_underflow_changes_products(dtype: str, far: int) -> None:
    """Rows and columns near 1e300 and 1e-300, whose squares overflow or underflow, are scaled correctly."""
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((40, 100)).astype(dtype), rng.standard_normal((100, 30)).astype(dtype)
    rows, cols = (np.ldexp(np.ones(n, dtype), rng.choice([-far, far], n)).astype(dtype) for n in (40, 30))
    plain, scaled = prepared(a, b), prepared(a * rows[:, None], b * cols)
    assert plain.number == scaled.number != 0
    np.testing.assert_array_equal(plain.a.residues, scaled.a.residues)
    with np.errstate(over="ignore", under="ignore"):
        wanted = product(plain, "float64").astype(float) * rows.astype(float)[:, None] * cols
        np.testing.assert_array_equal(product(scaled, dtype), wanted.astype(dtype))
    assert np.isinf(wanted.astype(dtype) if dtype == "float64" else product(scaled, dtype)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_rows_are_exact_and_lost_bits_are_noticed(dtype: str) -> None:
    """Subnormal rows are scaled up, so that their products are exact.

    A subnormal element beside large ones is lost, and the panel is marked as inexact.
    """
    rng = np.random.default_rng(10)
    least = float(np.finfo(dtype).smallest_subnormal)
    large = float(np.finfo(dtype).max) / 1000
    a = (rng.integers(-9, 10, (20, 64)) * least).astype(dtype)
    b = rng.integers(-9, 10, (64, 30)).astype(dtype)
    np.testing.assert_array_equal(product(prepared(a, b), dtype), a @ b)
    b[3, 4] = least
    planes, _ = views(np.zeros(room_bytes(30, 0, 64, dtype), np.uint8), 30, 0, 64, dtype)
    how = residues(MODULI_COUNTS[dtype][-1])
    assert not split(b.T, planes, how, measure_rows(b.T, planes.norms)).exact
    b[3, 4] = 0
    assert split(b.T, planes, how, measure_rows(b.T, planes.norms)).exact
    b[:, 4] *= large
    b[3, 4] = least  # after scaling it is too small to be represented
    assert not split(b.T, planes, how, measure_rows(b.T, planes.norms)).exact


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("operand", [0, 1])
def test_nonfinite_panels_fall_back(operand: int, value: float, dtype: str) -> None:
    panels = [np.ones((20, 64), dtype), np.ones((64, 20), dtype)]
    assert prepared(*panels).number
    panels[operand][3, 5] = value
    assert prepared(*panels).number == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_preparing_allocates_nothing_of_a_panels_size(dtype: str) -> None:
    """The panels have 16 and 8 MiB, so an allocation of a panel's size would exceed the limits."""
    rng = np.random.default_rng(12)
    a, b = rng.random((1024, 2048)).astype(dtype), rng.random((512, 2048)).astype(dtype).T
    room = np.zeros(room_bytes(1024, 512, 2048, dtype), np.uint8)
    workspace, c = np.zeros(workspace_bytes(512, 2048), np.uint8), np.zeros((256, 512), dtype)
    tracemalloc.start()
    try:
        found = prepare(a, b, room, dtype)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.reset_peak()
        multiply(found, slice(100, 356), 1, 0, c, workspace)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert workspace.nbytes < 8 << 20
    assert np.abs(c - a[100:356] @ b).max() < 2048**2 * UNITS[dtype]
