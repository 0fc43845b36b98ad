"""Emulated products: residues, ranges, error bounds and fallbacks, checked with exact integers."""

import tracemalloc
from fractions import Fraction
from itertools import chain
from math import log2, prod, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocgemm.backends.host.residues import (
    Prepared,
    measure_rows,
    multiply,
    prepare,
    split,
    views,
    workspace_bytes,
)
from oocgemm.planning.emulation import (
    LEVELS,
    MODULI_COUNTS,
    UNITS,
    PanelFacts,
    max_error,
    min_cosine,
    plane_offsets,
    residues,
    suffices,
)
from tests.suite import examples

Array = NDArray[Any]

DTYPES = ["float64", "float32"]

ALL_NUMBERS = list(chain(*MODULI_COUNTS.values()))
GUARD = 77


def room_bytes(m: int, n: int, depth: int, dtype: str) -> int:
    """Return the bytes of the buffer for the residues of two panels."""
    return plane_offsets(MODULI_COUNTS[dtype][-1], m, n, depth).end


def prepared(a: Array, b: Array) -> Prepared:
    """Prepare panels in a buffer of exactly the needed size, and check that no bytes behind it change."""
    size = room_bytes(a.shape[0], b.shape[1], a.shape[1], a.dtype.name)
    slot = np.full(size + 512, GUARD, np.uint8)
    found = prepare(a, b, slot[:size], a.dtype.name)
    assert (slot[size:] == GUARD).all()
    return found


def product(
    found: Prepared,
    dtype: str,
    alpha: float = 1,
    beta: float = 0,
    c: Array | None = None,
    step: int | None = None,
) -> Array:
    """Compute alpha A B + beta C, `step` rows at a time, in a workspace of exactly the needed size."""
    m, n = len(found.a.exponents), len(found.b.exponents)
    c = np.full((m, n), np.nan, dtype) if c is None else c.copy()
    workspace = np.full(workspace_bytes(n, found.a.residues.shape[2]), GUARD, np.uint8)
    for top in range(0, m, step or max(m, 1)):
        rows = slice(top, min(top + (step or m), m))
        multiply(found, rows, alpha, beta, c[rows], workspace)
    return c


def exact(a: Array, b: Array) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """Return A B and |A||B| as exact fractions."""
    left, right = ([[Fraction(float(e)) for e in row] for row in x] for x in (a, b.T))
    return (
        [[sum((x * y for x, y in zip(r, c, strict=True)), Fraction()) for c in right] for r in left],
        [[sum((abs(x * y) for x, y in zip(r, c, strict=True)), Fraction()) for c in right] for r in left],
    )


def integers_of(x: Array, exponents: Array) -> list[list[int]]:
    """Scale each row of a panel by its power of two, and round to integers."""
    return [
        [round(Fraction(float(e)) * Fraction(2) ** int(s)) for e in row]
        for row, s in zip(x, exponents, strict=True)
    ]


def assert_residues(residue: Array, numbers: list[list[int]], moduli: tuple[int, ...]) -> None:
    """Check that residues are those of `numbers` closest to 0, and that they are padded with zeros."""
    k = len(numbers[0])
    for plane, p in zip(residue, moduli, strict=False):
        wanted = [[(x + p // 2) % p - p // 2 for x in row] for row in numbers]
        np.testing.assert_array_equal(plane[:, :k], np.array(wanted))
        assert not plane[:, k:].any()


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_sums_over_residues_are_exact(number: int) -> None:
    how = residues(number)
    whole = prod(how.moduli)
    assert all(np.gcd(p, q) == 1 for i, p in enumerate(how.moduli) for q in how.moduli[:i])
    exact_weights = [whole // p * pow(whole // p, -1, p) for p in how.moduli]
    assert [sum(map(int, parts)) for parts in how.weights] == exact_weights
    assert sum(map(int, how.modulus)) == whole
    most = [p // 2 for p in how.moduli]
    # S is the weighted sum of residues, P the product of the moduli, and Q the integer quotient of S by P.
    # For a number below P/2, S / P is within 1/2 of Q.
    quotient = sum(c * w for c, w in zip(most, exact_weights, strict=True)) // whole + 1
    assert quotient <= 2**11
    for rank in range(3):
        parts = [*(int(parts[rank]) for parts in how.weights), int(how.modulus[rank])]
        bits = int(np.gcd.reduce(np.array([p for p in parts if p] or [1], dtype=object)))
        unit = bits & -bits
        total = sum(c * part for c, part in zip(most, parts, strict=False))
        assert total <= 2**53 * unit
        # The product is exact in float64 without a fused multiply-add.
        assert quotient * parts[-1] <= 2**53 * unit
        if rank:  # the first difference is below P, so the later ones are sums of fewer units
            assert total + quotient * parts[-1] <= 2**53 * unit
        else:
            rest = sum(c * (w - int(p[0])) for c, w, p in zip(most, exact_weights, how.weights, strict=True))
            assert whole + rest + quotient * (whole - parts[-1]) <= 2**53 * unit
            # Q is computed from the first parts of the weights only. The other parts and rounding are too
            # small to change it.
            assert rest / whole + 4 * quotient * 2.0**-53 < 0.5 - 2.0 ** (2 * how.exponent) / whole


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_numbers_are_reconstructed_from_their_residues(number: int) -> None:
    """Numbers in (-P/2, P/2), except near the ends, are reconstructed. P is the product of the moduli."""
    how = residues(number)
    most = int(2 ** (2 * how.exponent))
    rng = np.random.default_rng(number)
    small = [x for x in (0, 1, 127, 128, 255, 256, 2**31, 2**52 + 1, 2**53) if x < most]
    large = [most, most - 1, most // 3, *(int(most * x) for x in rng.random(80))]
    near = [2**e + d for e in range(20, most.bit_length() - 1) for d in (-1, 0, 1)]
    numbers = [s * x for x in [*small, *large, *near] for s in (1, -1)]
    planes = views(
        np.zeros(room_bytes(len(numbers), 1, 16, "float64"), np.uint8), len(numbers), 1, 16, "float64"
    )
    for rank, p in enumerate(how.moduli):
        planes[0].residues[rank, :, 3] = [(x + p // 2) % p - p // 2 for x in numbers]
    planes[1].residues[:, :, 3] = 1
    found = product(Prepared(number, *planes), "float64")[:, 0]
    for x, y in zip(numbers, found.tolist(), strict=True):
        assert abs(int(y) - x) <= (0 if abs(x) <= 2**53 else abs(x) / 2**52)


rows = st.lists(
    st.one_of(
        st.floats(-1, 1, allow_subnormal=False),
        st.sampled_from([0.0, 1.0, -1.0, 1 / 3, 0.75, 1 - 2.0**-53]),
        st.builds(lambda x, e: x * 2.0**e, st.floats(1, 2), st.integers(-80, 0)),
    ),
    min_size=16,
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(row=rows, far=st.integers(-1000, 960), number=st.sampled_from(MODULI_COUNTS["float64"]))
def test_products_stay_below_half_the_modulus(row: list[float], far: int, number: int) -> None:
    """The product of a row with itself is the largest that the Cauchy-Schwarz inequality allows."""
    x = np.ldexp(np.array([row]), far)
    planes, _ = views(
        np.full(room_bytes(1, 0, len(row), "float64"), GUARD, np.uint8), 1, 0, len(row), "float64"
    )
    how = residues(number)
    split(x, planes, how, measure_rows(x, planes.norms))
    numbers = integers_of(x, planes.exponents)
    assert sum(e * e for e in numbers[0]) * 2 < prod(how.moduli)
    assert max(map(abs, numbers[0])) < 2**63
    assert_residues(planes.residues, numbers, how.moduli)
    norm = sqrt(sum(Fraction(e) ** 2 for e in x[0])) if 1e-100 < np.abs(x).max() < 1e100 else 0
    if norm:  # the scale is the largest power of two that is allowed
        assert 2 ** (how.exponent - 1.001) < norm * 2.0 ** int(planes.exponents[0])


@pytest.mark.parametrize("number", ALL_NUMBERS)
@pytest.mark.parametrize("k", [16, 1000, 1 << 17])
def test_norms_at_exponent_steps_stay_below_half_the_modulus(k: int, number: int) -> None:
    how = residues(number)
    for factor, exponent in ((1 - 2.0**-30, 0), (1 + 2.0**-30, -1), (1.001, -1), (1.003, -1)):
        value = 2**how.exponent / sqrt(k) * factor
        x = np.full((1, k), value)
        planes, _ = views(np.zeros(room_bytes(1, 0, k, "float64"), np.uint8), 1, 0, k, "float64")
        split(x, planes, how, measure_rows(x, planes.norms))
        assert planes.exponents[0] == exponent
        integer = round(Fraction(value) * Fraction(2) ** exponent)
        assert 2 * k * integer**2 < prod(how.moduli)


@settings(max_examples=examples(100), deadline=None)
@given(a=rows, b=rows)
def test_the_cosine_is_bounded_from_below(a: list[float], b: list[float]) -> None:
    k = min(len(a), len(b))
    panels = [np.array([x[:k]]) for x in (a, b)]
    if not all(x.any() for x in panels):
        return
    facts = [measure_rows(x, np.zeros(1)) for x in panels]
    x, y = (np.abs(p[0]) for p in panels)
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    # The second panel in its own order, and in the order that gives the smallest product.
    for right in (y, np.sort(y)[np.argsort(np.argsort(-x))]):
        assert min_cosine(facts[0].above, facts[1].above, k) <= x @ right / norms * (1 + 1e-8)
    for fact, sizes in zip(facts, (x, y), strict=True):
        assert fact.max_ratio == pytest.approx(sizes.sum() / np.linalg.norm(sizes), rel=1e-12)
        assert fact.min_ratio == pytest.approx(fact.max_ratio)
        levels = np.linalg.norm(sizes) / sqrt(k) * np.array(LEVELS)
        assert all(
            np.sum(sizes >= v * (1 - 1e-8)) >= n >= np.sum(sizes > v)
            for n, v in zip(fact.above, levels, strict=True)
        )


def test_facts_of_a_panel_are_those_of_its_worst_rows() -> None:
    """A panel's facts are those of its worst rows. Rows of zeros do not count.

    In a row whose elements have equal magnitudes, each is equal to the root mean square.
    """
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 64)) * np.exp2(rng.integers(-3, 1, (5, 64)))
    x[2] = 0
    x[4] = np.sign(x[4]) / 3
    x[0, 1:] *= 0.01
    how, seen = residues(14), []
    for some in (x, x[:1], x[1:2], x[3:4], x[4:]):
        planes, _ = views(np.zeros(room_bytes(5, 0, 64, "float64"), np.uint8), len(some), 0, 64, "float64")
        seen.append(split(some, planes, how, measure_rows(some, planes.norms)))
    panel, *one = seen
    assert panel.max_ratio == max(f.max_ratio for f in one)
    assert panel.min_ratio == min(f.min_ratio for f in one)
    assert panel.grain == max(f.grain for f in one)
    assert panel.above == tuple(min(f.above[i] for f in one) for i in range(len(LEVELS)))
    assert one[-1].above == (64, 64, 64, 0)
    assert len({f.above for f in one}) == 4


def test_the_cosine_bound_agrees_with_sums_done_by_hand() -> None:
    """If half of each row is nonzero, the nonzeros of two rows need not meet in a product.

    If three quarters are nonzero, half of them must meet.
    """
    assert min_cosine((8, 8, 8, 0), (8, 8, 8, 0), 16) == 0
    assert min_cosine((12, 12, 12, 0), (12, 12, 12, 0), 16) == 0.5
    assert min_cosine((16, 16, 16, 0), (16, 16, 16, 0), 16) == 1
    assert min_cosine((16, 16, 0, 0), (16, 4, 4, 4), 16) == pytest.approx(
        (12 * 0.5 * 0.25 + 4 * 0.5 * 1.5) / 16
    )


@st.composite
def hard_panels(draw: st.DrawFn) -> tuple[Array, Array]:
    """Draw panels with few rows, whose elements may be correlated."""
    dtype = draw(st.sampled_from(DTYPES))
    k, seed = draw(st.integers(16, 200)), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)

    def panel() -> Array:
        kind = draw(
            st.sampled_from(["normal", "uniform", "few values", "constant", "integers", "wide", "sorted"])
        )
        spread = draw(st.sampled_from([0, 1, 2, 4, 8]))
        x = rng.standard_normal((3, k))
        match kind:
            case "uniform":
                x = rng.random((3, k))
            case "few values":
                x = rng.choice(rng.random(3), (3, k))
            case "constant":
                x = np.full((3, k), rng.random())
            case "integers":
                x = rng.integers(-9, 10, (3, k)).astype(float)
            case "wide":
                x *= np.exp2(rng.uniform(-spread, 0, (3, k)))
            case "sorted":
                x = np.sort(rng.random((3, k)), axis=1)[:, :: draw(st.sampled_from([-1, 1]))]
        x = x * np.exp2(rng.uniform(-spread, 0, k)) * np.exp2(rng.integers(-20, 20, (3, 1)))
        x[:, rng.random(k) < draw(st.sampled_from([0, 0, 0.1, 0.5]))] = 0
        return x.astype(dtype)

    return panel(), panel().T


@settings(max_examples=examples(120), deadline=None)
@given(panels=hard_panels())
def test_no_error_is_above_the_bound(panels: tuple[Array, Array]) -> None:
    """Errors are below k u (|A||B|), the bound of a native product, and below 6 sqrt(k) u (|A||B|).

    The latter is what verification uses. u is the unit roundoff.
    """
    a, b = panels
    found = prepared(a, b)
    if not found.number:
        return
    made, (wanted, sizes) = product(found, a.dtype.name), exact(a, b)
    k = a.shape[1]
    for i in range(len(wanted)):
        for j in range(len(wanted)):
            off = abs(Fraction(float(made[i, j])) - wanted[i][j])
            assert off <= Fraction(min(k, 6 * sqrt(k)) * UNITS[a.dtype.name]) * sizes[i][j]


@pytest.mark.parametrize("number", [2, 3, 8, 14])
def test_the_error_before_final_roundings_meets_its_bound(number: int) -> None:
    """The error equals the bound if every element is rounded by 1/2. It is 0 for panels of integers."""
    rng = np.random.default_rng(3)
    how, k = residues(number), 40
    even = 2**how.exponent / sqrt(k) // 2 * 2
    halves, whole = np.full((1, k), even - 0.5), rng.choice([-1.0, 1.0], (1, k))
    wide = rng.standard_normal((1, k)) * np.exp2(-rng.integers(0, 30, k))
    for a in (halves, whole, wide):
        for b in (halves, whole, wide):
            planes = views(np.zeros(room_bytes(1, 1, k, "float64"), np.uint8), 1, 1, k, "float64")
            found = [
                split(x, held, how, measure_rows(x, held.norms))
                for x, held in zip((a, b), planes, strict=True)
            ]
            norms = np.linalg.norm(a) * np.linalg.norm(b)
            numbers = [integers_of(x, plane.exponents)[0] for x, plane in zip((a, b), planes, strict=True)]
            value = Fraction(sum(x * y for x, y in zip(*numbers, strict=True)))
            value /= Fraction(2) ** int(planes[0].exponents[0] + planes[1].exponents[0])
            off = float(abs(value - exact(a, b.T)[0][0][0])) / norms
            bound = max_error(found[0], found[1], k)
            assert [fact.exact for fact in found] == [x is whole for x in (a, b)]
            assert off <= bound * (1 + 1e-12)
            assert (off == 0) == (bound == 0)
            if a is b is halves:
                assert off == pytest.approx(bound, rel=1e-12)


def facts(**changes: Any) -> PanelFacts:
    """Return the facts of a panel with rows of equal elements that must be rounded."""
    k = changes.pop("k", 1024)
    given = {"finite": True, "exact": False, "grain": 2.0**-56, "max_ratio": sqrt(k), "min_ratio": sqrt(k)}
    return PanelFacts(**(given | {"above": (k, k, k, 0)} | changes))


def test_emulation_suffices_for_deep_finite_even_panels() -> None:
    u = 2.0**-53
    good = facts()
    assert suffices(good, good, 1024, u)
    assert not suffices(facts(finite=False), good, 1024, u)
    assert not suffices(good, facts(finite=False), 1024, u)
    assert suffices(facts(k=16), facts(k=16), 16, u)
    # Too shallow: the last roundings alone exceed the bound.
    assert not suffices(facts(k=15), facts(k=15), 15, u)
    # Too deep: sums in int32 would overflow.
    assert not suffices(facts(k=1 << 18), facts(k=1 << 18), 1 << 18, u)
    assert not suffices(facts(grain=2.0**-50), good, 1024, u)  # the rounding of elements is too coarse
    assert not suffices(good, facts(grain=2.0**-50), 1024, u)
    assert suffices(facts(grain=2.0**-50, exact=True), good, 1024, u)
    # So few elements are large that those of A and B need not meet in a product.
    sparse = facts(above=(500, 0, 0, 0))
    assert not suffices(sparse, sparse, 1024, u)
    wide = facts(above=(0, 0, 0, 0), exact=True)
    assert suffices(wide, wide, 1024, u)  # panels of integers have no error, however wide their range is
    nothing = PanelFacts(True, True, 0.0, 0.0, 0.0, (0,) * len(LEVELS))
    assert suffices(nothing, facts(grain=1.0), 1024, u)
    assert suffices(nothing, nothing, 1024, u)
    # Only the standard deviation of the error is too large, not its maximum.
    assert not suffices(facts(grain=2.0**-52.5), facts(grain=2.0**-52.5), 1 << 17, u)


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


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_the_largest_residues_at_depth_are_summed_exactly(number: int) -> None:
    """The sums are larger than the integers that float32 represents exactly."""
    how, k = residues(number), 5999
    whole = prod(how.moduli)
    planes = views(np.zeros(room_bytes(1, 1, k, "float64"), np.uint8), 1, 1, k, "float64")
    for plane in planes:
        plane.residues[:number, :, :k] = np.array([(p - 1) // 2 for p in how.moduli])[:, None, None]
    wanted = sum(k * ((p - 1) // 2) ** 2 * (whole // p) * pow(whole // p, -1, p) for p in how.moduli) % whole
    wanted -= whole if wanted > whole // 2 else 0
    assert abs(int(product(Prepared(number, *planes), "float64")[0, 0]) - wanted) <= abs(wanted) // 2**52


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("operand", [0, 1])
def test_nonfinite_panels_fall_back(operand: int, value: float, dtype: str) -> None:
    panels = [np.ones((20, 64), dtype), np.ones((64, 20), dtype)]
    assert prepared(*panels).number
    panels[operand][3, 5] = value
    assert prepared(*panels).number == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_cosines_need_more_moduli_until_none_suffice(dtype: str) -> None:
    """Fewer and fewer elements of each row and column are large, until they need not meet in a product."""
    rng = np.random.default_rng(11)
    numbers = []
    for more in (2000, 1000, 200, 50, 20, 8, 4, 2, 0):
        a, b = rng.uniform(0.9, 1.1, (2, 10, 4000))
        for x in (a, b):
            x[rng.permuted(np.tile(np.arange(4000), (10, 1)), axis=1) >= 2000 + more] *= 2.0**-20
        numbers.append(prepared(a.astype(dtype), b.T.astype(dtype)).number)
    assert [n or 99 for n in numbers] == sorted(n or 99 for n in numbers)
    assert set(numbers) == {0, *MODULI_COUNTS[dtype]}
    assert numbers[-2] > 0


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


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_the_largest_exponent_is_used(number: int) -> None:
    """A larger exponent would break the bound on products, and the exponent used is not much smaller."""
    how = residues(number)
    assert 2 * how.exponent + 1 == pytest.approx(log2(prod(how.moduli)), abs=0.003)
    assert 2 * how.exponent + 1 < log2(prod(how.moduli)) - 2.0**-10
    assert how.exponent < 62.5  # so that a rounded element fits into int64
