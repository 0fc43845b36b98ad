"""A band of a square C: its tiles, their order on any number of devices, and plans that compute no more."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.planning import (
    Budgets,
    GemmProblem,
    InMemory,
    Kind,
    Layouts,
    Op,
    Slots,
    TileGrid,
    TileSet,
    TileShape,
    default_model,
    make_plan,
    shared_plan,
)
from oocgemm.planning.cover import Band, Halved, Triangle, Windows, cover_of
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.schedule.placement import Placing, cached_of_lines
from tests.support.problems import integers
from tests.support.products import product_of
from tests.support.schedule_check import verify
from tests.support.simulate import simulate
from tests.support.simulator import Simulator
from tests.support.suite import each_value, examples

PLAIN = InMemory(itemsize=4, zero_copy_width=8192)
LAYOUTS = Layouts(PLAIN, PLAIN, InMemory())
GIB = 1 << 30
WIDTHS = st.integers(0, 14)


def summed(n: int, k: int, width: int) -> GemmProblem:
    dtypes = "float32", "float32", "float32", "float64"
    return product_of(n, n, k, *dtypes, trans_b=Op.T, gram=f"band {width}", reduction="sum")


def planned(problem: GemmProblem, backend: str, devices: int = 1, tile: TileShape | None = None) -> Any:
    budgets, machine = Budgets(GIB, GIB), default_model(backend, 16)
    if devices == 1:
        return make_plan(problem, budgets, machine, LAYOUTS, tile)
    return shared_plan(problem, budgets, machine, LAYOUTS, tile, devices)


@given(n=st.integers(1, 40), width=WIDTHS, side=st.integers(1, 12), band=st.integers(1, 4))
@settings(max_examples=examples(200), deadline=None)
def test_tiles_are_those_with_an_element_of_the_band(n: int, width: int, side: int, band: int) -> None:
    problem = summed(n, 3, width)
    grid = TileGrid.of(problem, TileShape(side, side, 1).within(problem))
    rows, cols = np.indices((n, n))
    inside = abs(rows - cols) <= width
    found = {(int(i) // side, int(j) // side) for i, j in np.argwhere(inside)}
    tiles, cover = TileSet.of(grid), problem.cover
    assert set(tiles) == found
    assert tiles.count == grid.count == len(found)
    assert cover.elements(n, n) == np.count_nonzero(inside)
    order = cover.order(grid.shape[0], band, grid.tile.m)
    assert len(order) == len(found)
    assert set(order) == found
    for row in range(grid.shape[0]):
        own = [j for i, j in order if i == row]
        assert own == sorted(own)


@given(data=st.data(), n=st.integers(1, 40), block=st.integers(1, 9), side=st.integers(1, 12))
@settings(max_examples=examples(200), deadline=None)
def test_tiles_are_those_with_an_element_of_the_windows(
    data: st.DataObject, n: int, block: int, side: int
) -> None:
    tops = range(0, n, block)
    drawn = sorted(data.draw(st.lists(st.integers(0, n), min_size=len(tops), max_size=len(tops))))
    firsts = tuple(min(*pair) for pair in zip(drawn, tops, strict=True))
    windows, rows = Windows(block=block, firsts=firsts), np.arange(n)
    first = np.array(firsts)[rows // block]
    lower = (first[:, None] <= rows) & (rows <= rows[:, None])
    for cover, inside in ((windows, lower | lower.T), (Halved(band=windows), lower)):
        assert cover_of(cover.name) == cover
        assert cover.elements(n, n) == np.count_nonzero(inside)
        lines = -(-n // side)
        needed = {(int(i) // side, int(j) // side) for i, j in np.argwhere(inside)}
        columns = [cover.columns(i, lines, side) for i in range(lines)]
        assert {(i, j) for i, span in enumerate(columns) for j in range(*span)} == needed
        assert cover.count(lines, lines, side) == len(needed)
        for band in (1, 3):
            order = cover.order(lines, band, side)
            assert len(order) == len(needed)
            assert set(order) == needed


@given(n=st.integers(1, 40), width=WIDTHS, side=st.integers(1, 12))
@settings(max_examples=examples(100), deadline=None)
def test_half_of_a_band_has_its_lower_triangle(n: int, width: int, side: int) -> None:
    rows, cols = np.indices((n, n))
    cover, inside, lines = Halved(band=Band(width)), (rows >= cols) & (rows - cols <= width), -(-n // side)
    assert cover.elements(n, n) == np.count_nonzero(inside)
    needed = {(int(i) // side, int(j) // side) for i, j in np.argwhere(inside)}
    assert sorted(cover.order(lines, 2, side)) == sorted(needed)
    assert cover.count(lines, lines, side) == len(needed)


def test_bands_have_names() -> None:
    assert cover_of("band 7") == Band(7)
    assert cover_of("lower band 7") == Halved(band=Band(7))
    assert (Windows(block=2, firsts=(0, 1)).name, Windows().label) == ("windows 2 0 1", "windows")
    problem = summed(9, 4, 7)
    assert GemmProblem.recorded(problem.record()) == problem
    assert problem.record()["gram"] == "band 7"


@given(st.data())
@settings(max_examples=examples(60, quick=6), deadline=None)
def test_every_schedule_finds_what_it_needs_and_adds_in_order(data: st.DataObject) -> None:
    n, k, side = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
    problem, backend = summed(n, k, data.draw(WIDTHS)), data.draw(st.sampled_from(["cuda", "host"]))
    tile = TileShape(side, side, data.draw(st.integers(1, k))).within(problem)
    plan = planned(problem, backend, data.draw(st.integers(1, 4)), tile)
    verify(plan.schedule())
    finishes = [op for op in plan.schedule() if op.kind is Kind.FINISH]
    assert {op.tile for op in finishes} == set(TileSet.of(plan.grid))
    for row in range(plan.grid.shape[0]):
        own = [op for op in finishes if op.tile[0] == row]
        assert len({op.device for op in own}) == 1
        assert [op.tile[1] for op in own] == sorted(op.tile[1] for op in own)
    rest = plan.tiles.remaining([finishes[0].tile])
    assert rest.count == plan.tiles.count - 1
    assert rest.part((0, 1), (0, plan.grid.shape[1])).coverage.rows <= min(n, 2 * side + plan.problem.m)


@given(n=st.integers(1, 14), width=WIDTHS, side=st.integers(1, 5), seed=st.integers(0, 999))
@settings(max_examples=examples(60, quick=20), deadline=None)
def test_no_legal_order_breaks_a_stored_band(n: int, width: int, side: int, seed: int) -> None:
    stored = "float64", "float64", "float64", "float64"
    problem = product_of(n, n, 5, *stored, trans_b=Op.T, gram=f"band {width}")
    grid = TileGrid.of(problem, TileShape(side, side, 2).within(problem))
    slots = Slots(4, 0, 1, 2, 0, 1, strip=2, planes=0)
    schedule = Schedule(problem, grid, problem.cover.order(grid.shape[0], 2, grid.tile.m), slots)
    verify(schedule)
    x, c = integers(np.random.default_rng(seed), (n, 5), "float64"), np.full((n, n), -1.0)
    right = c.copy()
    for tile in schedule.tiles:
        at = slice(*grid.rows(tile[0])), slice(*grid.cols(tile[1]))
        right[at] = x[at[0]] @ x[at[1]].T
    Simulator(schedule, x, x.T, c).run(seed)
    np.testing.assert_array_equal(c, right)


def test_the_estimate_of_loads_is_near_the_count() -> None:
    """Where slots hold few panels, the estimate of some covers is far off. Of 200 covers, few may be."""
    drawn, off = random.Random(11), []
    for _ in range(200):
        lines, steps, band = drawn.randint(1, 60), drawn.randint(1, 4), drawn.randint(1, 6)
        slots = drawn.randint(4, 120)
        cover = drawn.choice([Band(drawn.randint(0, 9)), Triangle(True), Triangle(False)])
        tiles = cover.order(lines, band, 1)
        placing = Placing(tiles, steps, Slots(a=slots, b=0, host_a=0, host_b=0))
        counted = placing.loads([1] * steps, lambda i: 1, lambda j: 1)
        assert counted is not None
        found = cached_of_lines(tiles, steps, slots)
        estimated = sum(
            steps - cached for tile, both in zip(tiles, found, strict=True) for cached in both[: len({*tile})]
        )
        assert estimated == pytest.approx(counted[0][0], rel=2.0, abs=2 * steps)
        if estimated != pytest.approx(counted[0][0], rel=0.25, abs=2 * steps):
            off.append((lines, str(cover), steps, slots, band, estimated, counted[0][0]))
    assert len(off) <= 6, off


@each_value
@pytest.mark.parametrize(("n", "width"), [(20_000, 50), (200_000, 2_000), (30_000, 29_999)])
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_no_tile_that_is_given_by_hand_is_much_faster(backend: str, n: int, width: int) -> None:
    problem = summed(n, 4000, width)
    plan = planned(problem, backend)
    used = plan.footprint
    assert used.device_total <= plan.budgets.device
    assert used.host_total <= plan.budgets.host
    tiles = [TileShape(side, side, k) for side in (250, 1000, 2000, 4000) for k in (1000, 4000)]
    best = min(planned(problem, backend, tile=tile).prediction.total for tile in tiles)
    assert plan.prediction.total <= 1.02 * best
    if plan.steps < 1000:
        assert plan.prediction.total == pytest.approx(simulate(plan.schedule(), plan.setting), rel=0.35)
