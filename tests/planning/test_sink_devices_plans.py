"""Plans of several devices for products that keep something of each row: dealt rows, budgets and times."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.planning import (
    Budgets,
    GemmProblem,
    InMemory,
    Layouts,
    Op,
    TileShape,
    Traversal,
    default_model,
    make_plan,
    shared_plan,
)
from oocgemm.planning.schedule.dealing import SharedSchedule, deal_rows
from oocgemm.planning.schedule.operation import Kind
from tests.support.products import product_of
from tests.support.schedule_check import verify
from tests.support.simulate import simulate
from tests.support.suite import each_value, examples

PLAIN = InMemory(itemsize=4, zero_copy_width=8192)
LAYOUTS = Layouts(PLAIN, PLAIN, InMemory())
GIB = 1 << 30
# Each with its dtype and whether C is symmetric.
SINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "top": ("void64", {"topk": 4}),
    "symmetric top": ("void64", {"topk": 4, "gram": "lower"}),
    "threshold": ("void64", {"sparse": True, "threshold": 0.5, "gram": "lower"}),
    "sum": ("float64", {"reduction": "sum"}),
    "max": ("float64", {"reduction": "max"}),
    "applied": ("float32", {"applied": 3}),
}
# Of which something is kept per row, and rows are not shared.
WHOLE_ROWS = ("top", "sum", "max", "applied")


def problem(m: int, n: int, k: int, name: str) -> GemmProblem:
    dtype, how = SINKS[name]
    return product_of(m, m if "gram" in how else n, k, *3 * ("float32",), dtype, trans_b=Op.T, **how)


def planned(
    given: GemmProblem, backend: str, devices: int, tile: TileShape | None = None, **budgets: int
) -> Any:
    sizes = Budgets(budgets.get("device", GIB), budgets.get("host", GIB))
    machine = default_model(backend, 16)
    if devices == 1:
        return make_plan(given, sizes, machine, LAYOUTS, tile)
    return shared_plan(given, sizes, machine, LAYOUTS, tile, devices)


@given(
    devices=st.integers(1, 6),
    shape=st.tuples(st.integers(0, 15), st.integers(0, 5)),
    axis=st.integers(0, 1),
    band=st.integers(1, 5),
    turns=st.booleans(),
    left=st.sets(st.tuples(st.integers(0, 14), st.integers(0, 4))) | st.none(),
)
@settings(max_examples=examples(200), deadline=None)
def test_whole_rows_are_dealt_evenly(
    devices: int, shape: tuple[int, int], axis: int, band: int, turns: bool, left: Any
) -> None:
    traversal = Traversal(axis, band, turns)
    dealt = deal_rows(devices, shape, traversal, left)
    every = {(i, j) for i in range(shape[0]) for j in range(shape[1])}
    assert sorted(tile for own in dealt for tile in own) == sorted(every if left is None else every & left)
    rows = [{i for i, _ in own} for own in deal_rows(devices, shape, traversal)]
    assert sum(map(len, rows)) == (shape[0] if shape[1] else 0), "each tile row belongs to one device"
    counts = list(map(len, rows))
    assert max(counts) - min(counts) <= 1
    if traversal.ascends:
        for own in dealt:
            for row in {i for i, _ in own}:
                cols = [j for i, j in own if i == row]
                assert cols == sorted(cols)


@settings(max_examples=examples(60, quick=15), deadline=None)
@given(st.data())
def test_every_schedule_finds_what_it_needs(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(2, 40)) for _ in range(3))
    name, backend = data.draw(st.sampled_from(sorted(SINKS))), data.draw(st.sampled_from(["cuda", "host"]))
    tile = TileShape(*(data.draw(st.integers(1, extent)) for extent in (m, m if name == "top" else n, k)))
    given_ = problem(m, n, k, name)
    if given_.cover.square:
        tile = TileShape(tile.m, tile.m, tile.k)
    plan = planned(given_, backend, data.draw(st.integers(2, 5)), tile)
    schedule = plan.schedule()
    verify(schedule)
    moved = sum(op.bytes for op in schedule if op.kind in (Kind.DOWNLOAD, Kind.WRITE))
    assert SINKS[name][1].get("sparse") or moved == schedule.elements_stored * given_.itemsizes["C"]
    if name in WHOLE_ROWS:
        finishes = [op for op in schedule if op.kind is Kind.FINISH]
        owners = {(op.tile[0], op.device) for op in finishes}
        assert len(owners) == plan.grid.shape[0], "one device computes the tiles of a row"
    if name in ("sum", "applied"):
        for row in range(plan.grid.shape[0]):
            cols = [op.tile[1] for op in finishes if op.tile[0] == row]
            assert cols == sorted(cols), "sums are added in ascending order of columns"


@each_value
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_plans_keep_to_their_budgets_and_predict_the_simulated_time(
    backend: str, name: str, devices: int
) -> None:
    given_ = problem(60_000, 50_000, 4000, name)
    plan = planned(given_, backend, devices, device=2 * GIB, host=2 * GIB)
    used = plan.footprint
    assert used.device_total <= plan.budgets.device
    assert used.host_total <= plan.budgets.host
    schedule = plan.schedule()
    assert isinstance(schedule, SharedSchedule)
    simulated = simulate(schedule, plan.setting)
    assert plan.prediction.total == pytest.approx(simulated, rel=0.15)
    if backend == "cuda":
        alone = planned(given_, backend, 1, device=2 * GIB, host=2 * GIB)
        assert plan.prediction.total < 0.8 * alone.prediction.total


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_what_is_kept_of_all_rows_is_in_the_budget_of_each_device(name: str) -> None:
    """The rows of a device's share take a third of the memory of all of them."""
    given_ = problem(3_000_000, 2_000, 64, name)
    kept = 3_000_000 * given_.sink.per_row * given_.itemsizes["C"]
    plan = planned(given_, "cuda", 3, device=kept + (120 << 20))
    assert plan.footprint.device["finish"] >= kept
    assert plan.footprint.device_total <= plan.budgets.device
