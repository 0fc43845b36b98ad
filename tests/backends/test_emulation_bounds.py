"""Error bounds of emulated products hold, and decide how many moduli suffice."""

from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.backends.host.residues import measure_rows, split, views
from oocgemm.planning.emulation import (
    LEVELS,
    MODULI_COUNTS,
    UNITS,
    PanelFacts,
    max_error,
    min_cosine,
    residues,
    suffices,
)
from tests.support.emulated import DTYPES, Array, exact, integers_of, prepared, product, room_bytes, rows
from tests.support.suite import examples


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
