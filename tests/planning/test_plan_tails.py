"""Plans end early: rows of the last tile are written while it is multiplied."""

from dataclasses import replace

import pytest

from oocgemm.planning import Budgets, TileShape, default_model, make_plan
from tests.planning.test_clock import PAGEABLE
from tests.support.plan_cases import GIB, STORED, problem
from tests.support.simulate import simulate


def test_no_plan_ends_in_a_thin_tile_that_waits_for_panels() -> None:
    p, machine = problem(32_768, 32_768, 524_288), default_model("cuda", 16)
    budgets = Budgets(8 * GIB, 24 * GIB)
    plan = make_plan(p, budgets, machine, STORED)
    thin = make_plan(p, budgets, machine, STORED, TileShape(28_672, 16_384, 4096))
    assert plan.prediction.total < 0.95 * thin.prediction.total
    assert simulate(plan.schedule(), plan.setting) < 0.95 * simulate(thin.schedule(), thin.setting)


def test_streams_end_early_also_where_the_hosts_copies_limit_all_plans() -> None:
    p, machine, budgets = (
        problem(196_608, 2048, 2048),
        default_model("cuda", 16),
        Budgets(100 * GIB, 50 * GIB),
    )
    plan = make_plan(p, budgets, machine, PAGEABLE)
    halves = make_plan(p, budgets, machine, PAGEABLE, TileShape(98_304, 2048, 2048))
    assert plan.prediction.total == pytest.approx(halves.prediction.total, rel=1e-3)
    assert plan.prediction.streams < 0.98 * halves.prediction.streams < halves.prediction.total
    quick = replace(machine, memory=1e12)  # only streams limit these plans
    one = make_plan(p, budgets, quick, PAGEABLE).prediction
    assert one.streams == one.total
