"""Rates and latencies are fitted to what was measured, and impossible ones are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.planning import KernelRate, fit_line, fit_link
from oocgemm.planning.cost.machine import MAX_LINK


@given(st.floats(1e9, 1e15), st.floats(0, 2000), st.sets(st.integers(16, 8192), min_size=2))
def test_a_fit_recovers_the_rate_it_was_made_from(peak: float, half_depth: float, depths: set[int]) -> None:
    deepest = max(depths)
    fitted = KernelRate.fitted({r: peak / (1 + half_depth / r) for r in depths})
    # A fitted peak above four times the fastest measured rate is not believed.
    believed = half_depth < 3 * deepest
    if believed:
        apart = 1 / min(depths) - 1 / deepest
        assert fitted.peak == pytest.approx(peak, rel=1e-3 if apart > 1e-4 else 0.5)
    for r in depths:
        assert fitted.peak / (1 + fitted.half_depth / r) == pytest.approx(
            peak / (1 + half_depth / r), rel=0.1 if believed else 0.2
        )


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 1e3)), min_size=1))
def test_a_line_never_falls_nor_begins_below_its_least(points: list[tuple[float, float]]) -> None:
    intercept, slope = fit_line(points)
    assert intercept >= 0
    assert slope >= 0


@given(
    st.floats(0, 1e-3),
    st.floats(1e6, 0.99 * MAX_LINK),
    st.sets(st.integers(2**10, 2**30), min_size=2, max_size=6),
)
def test_a_link_is_fitted_by_latency_and_rate(latency: float, rate: float, sizes: set[int]) -> None:
    measured = {size: size / (latency + size / rate) for size in sizes}
    found_latency, found_rate = fit_link("h2d", measured)
    for size in sizes:
        assert size / (found_latency + size / found_rate) == pytest.approx(measured[size], rel=0.01)


LINK = {1 << 20: 40e9, 1 << 22: 50e9, 1 << 25: 54e9, 1 << 28: 55e9}


@pytest.mark.parametrize(
    ("changed", "limit", "part"),
    [
        (
            {1 << 20: 1.05e15},
            None,
            "d2h of 1 MiB came to 1.05 PB/s, which is impossible: any link carries at most 500 GB/s",
        ),
        (
            {1 << 20: 70e9},
            64e9,
            "70 GB/s, which is impossible: the link of this device carries at most 64 GB/s",
        ),
        ({1 << 20: float("nan")}, None, "d2h of 1 MiB came to nan"),
        ({1 << 22: 150e9}, None, "no fit explains what was measured of d2h (1 MiB: 40 GB/s, 4 MiB: 150 GB/s"),
        ({1 << 28: 5e9}, None, "no fit explains what was measured of d2h"),
        ({}, 54.9e9, "the link of this device carries at most 54.9 GB/s"),
    ],
)
def test_rates_that_a_link_cannot_have_are_refused(
    changed: dict[int, float], limit: float | None, part: str
) -> None:
    assert fit_link("d2h", LINK)[1] == pytest.approx(55e9, rel=0.02)
    with pytest.raises(ValueError, match=re.escape(part)):
        fit_link("d2h", LINK | changed, limit)
