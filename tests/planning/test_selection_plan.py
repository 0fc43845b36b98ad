"""Plans of products of which only some elements are kept: their schedules, memory, traffic and times."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.errors import BudgetError
from oocgemm.planning import (
    Budgets,
    GemmProblem,
    InMemory,
    Kind,
    Layouts,
    Op,
    Operation,
    Plan,
    default_model,
    make_plan,
)
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.tiling import TileShape
from oocgemm.values import dataclass
from tests.support.products import product_of
from tests.support.schedule_check import ScheduleError, verify
from tests.support.simulate import simulate
from tests.support.suite import examples

MEMORY = InMemory(itemsize=4, zero_copy_width=8192)
LAYOUTS = Layouts(MEMORY, MEMORY, InMemory())
HOW: tuple[dict[str, Any], ...] = ({"topk": 20}, {"sparse": True, "threshold": 0.5})


def problem(rows: int, depth: int, how: dict[str, Any]) -> GemmProblem:
    dtypes = "float32", "float32", "float32", "void64"
    return product_of(
        rows, rows, depth, *dtypes, trans_b=Op.T, gram="lower", scaled=True, excludes_self=True, **how
    )


def planned(given: GemmProblem, backend: str, device: int, host: int, tile: TileShape | None = None) -> Plan:
    machine = default_model(backend, 16)
    return make_plan(given, Budgets(device, host), machine, LAYOUTS, tile)


@settings(max_examples=examples(40, quick=8), deadline=None)
@given(st.data())
def test_every_schedule_finds_what_it_needs(data: st.DataObject) -> None:
    rows, depth = data.draw(st.integers(2, 60)), data.draw(st.integers(1, 20))
    backend, how = data.draw(st.sampled_from(["cuda", "host"])), data.draw(st.sampled_from(HOW))
    how = {"topk": data.draw(st.integers(1, rows))} if "topk" in how else how
    side, k = data.draw(st.integers(1, rows)), data.draw(st.integers(1, depth))
    plan = planned(problem(rows, depth, how), backend, 1 << 30, 1 << 30, TileShape(side, side, k))
    verify(plan.schedule())


# The host backend finds pairs in the store of C, so that its products are not sparse.
@pytest.mark.parametrize(("backend", "how"), [("cuda", HOW[0]), ("cuda", HOW[1]), ("host", HOW[0])])
def test_plans_keep_to_their_budgets_and_predict_the_simulated_time(
    backend: str, how: dict[str, Any]
) -> None:
    plan = planned(problem(150_000, 200, how), backend, 9 << 30, 2 << 30)
    used, budgets = plan.footprint, plan.budgets
    assert used.device_total <= budgets.device
    assert used.host_total <= budgets.host
    simulated = simulate(plan.schedule(), plan.setting)
    assert plan.prediction.total == pytest.approx(simulated, rel=0.1)


def test_only_selected_elements_are_downloaded() -> None:
    plan = planned(problem(60_000, 200, {"topk": 20}), "cuda", 3 << 30, 2 << 30)
    assert plan.grid.count > 1
    assert plan.traffic["d2h"] == plan.required["d2h"] == 60_000 * 20 * 8
    downloads = [op for op in plan.schedule() if op.kind is Kind.DOWNLOAD]
    assert sum(op.bytes for op in downloads) == 60_000 * 20 * 8
    assert plan.footprint.device["finish"] >= 60_000 * 20 * 8


def test_the_kernel_that_selects_takes_time() -> None:
    given = problem(60_000, 200, {"topk": 20})
    plan = planned(given, "cuda", 30 << 30, 8 << 30)
    flops = plan.machine.kernels["float32"].peak
    assert plan.prediction.total > given.flops / flops + 4 * 60_000**2 / plan.machine.select


def test_elements_of_all_rows_must_fit_into_the_device() -> None:
    with pytest.raises(BudgetError, match="device memory"):
        planned(problem(60_000, 200, {"topk": 2000}), "cuda", 900 << 20, 2 << 30)


@dataclass(frozen=True)
class _Without(Schedule):
    """A schedule that lacks its Finish operation of this number."""

    lost: int = 0

    def __iter__(self) -> Any:
        number = -1
        for op in super().__iter__():
            number += op.kind is Kind.FINISH
            if not (op.kind is Kind.FINISH and number == self.lost):
                yield op


@pytest.mark.parametrize("lost", range(3))
def test_a_tile_that_is_not_searched_is_noticed(lost: int) -> None:
    plan = planned(problem(40, 8, {"topk": 3}), "cuda", 1 << 30, 1 << 30, TileShape(20, 20, 8))
    whole = plan.schedule()
    fields = whole.problem, whole.grid, whole.tiles, whole.slots
    operations: list[Operation] = list(_Without(*fields, last=whole.last, lost=9))
    assert sum(op.kind is Kind.FINISH for op in operations) == 3
    with pytest.raises(ScheduleError):
        verify(_Without(*fields, last=whole.last, lost=lost))
