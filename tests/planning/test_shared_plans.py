"""Plans for several GPUs: predicted times agree with simulated schedules, and more GPUs are faster."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from oocgemm.planning import (
    Budgets,
    InMemory,
    Kind,
    Layouts,
    Plan,
    default_model,
    divided,
    make_plan,
    shared_plan,
)
from oocgemm.planning.cost import clock as clock_of
from oocgemm.planning.search import planner, shared_plans
from oocgemm.planning.setting import Setting
from tests.support.plan_cases import STORED
from tests.support.products import product_of
from tests.support.simulate import simulate
from tests.support.suite import each_value, slow

GIB = 1 << 30
# An H100 has 80 GB. Per GPU there are 16 cores and 120 GiB of host memory, of which runs use half.
DEVICE, HOST = 70 * GIB, 60 * GIB
IN_MEMORY = InMemory()


def setting_of(n: int, dtype: str, gpus: int, sessions: int = 1, *, stored: bool = False) -> Setting:
    """Return the setting of a product of n x n arrays in host memory, or stored. `sessions` share a GPU."""
    problem = product_of(n, n, n, dtype, dtype, dtype, dtype)
    layout = replace(IN_MEMORY, itemsize=problem.itemsizes["A"])
    machine = divided(default_model("cuda", 16 * gpus), sessions)
    budgets = Budgets(DEVICE // sessions, HOST * gpus)
    layouts = STORED if stored else Layouts(layout, layout, layout)
    return Setting(problem, machine, layouts, budgets, gpus * sessions)


def plan_for(setting: Setting) -> Plan:
    given = setting.problem, setting.budgets, setting.machine, setting.layouts, None
    return make_plan(*given) if setting.devices == 1 else shared_plan(*given, setting.devices)


def planned(n: int, dtype: str, gpus: int, sessions: int = 1) -> Plan:
    """Plan a product of n x n arrays in host memory. `sessions` share each GPU."""
    return plan_for(setting_of(n, dtype, gpus, sessions))


def forget_plans() -> None:
    """Make the planner search again."""
    for cached in (*(shared_plans.shared_plan, planner._plan_with_advice, planner._planned),):
        cached.cache_clear()


@pytest.mark.parametrize("gpus", [2, *slow((4,), (8,))])
@pytest.mark.parametrize("n", [40960, *slow((32768,), (65536,))])
def test_predictions_for_several_gpus_agree_with_simulated_schedules(n: int, gpus: int) -> None:
    plan = planned(n, "float64", gpus)
    # If each GPU has a single tile, the times at which the GPUs get their first panels differ visibly.
    error = 0.05 if plan.rounds > 1 else 0.07
    assert plan.prediction.total == pytest.approx(simulate(plan.schedule(), plan.setting), rel=error)


@each_value
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("gpus", "least"), [(2, 1.9), (4, 3.7), (8, 7.0)])
def test_a_large_product_scales_with_the_number_of_gpus(gpus: int, least: float, dtype: str) -> None:
    one, several = (planned(65536, dtype, count).prediction.total for count in (1, gpus))
    assert one / several >= least


@pytest.mark.parametrize("n", [40960, *slow((53248,), (65536,))])
def test_two_sessions_on_a_gpu_read_about_as_much_as_one(n: int) -> None:
    """Each computes half of C, and needs all of one operand. Most of it, it copies from the other one."""
    one, two = planned(n, "float64", 1), planned(n, "float64", 1, sessions=2)
    read, again = (plan.loads.a_read + plan.loads.b_read for plan in (one, two))
    assert again <= 1.1 * read < two.traffic["h2d"]
    assert two.prediction.lanes["compute"] <= 1.02 * one.prediction.lanes["compute"]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_device_ends_with_a_tile_that_drains_strip_by_strip(devices: int) -> None:
    plan = planned(45056, "float64", 2)
    assert (plan.candidate.ends, plan.slots.c) == (2, 2)
    multiplies = Counter(
        operation.tile
        for operation in replace(plan, devices=devices).schedule()  # also if it is resumed on fewer devices
        if operation.kind is Kind.MULTIPLY
    )
    ends = {tile for tile, count in multiplies.items() if count > plan.grid.steps}
    assert ends == set(plan.schedule().tiles[-2:])


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("gpus", "sessions"), [(1, 2), *slow((4, 1))])
def test_no_tile_shape_is_left_out_that_would_be_faster(gpus: int, sessions: int, stored: bool) -> None:
    """The bounds and estimates that prune shapes exceed no prediction by more than the planner allows for."""
    setting = setting_of(32768, "float64", gpus, sessions, stored=stored)
    search = shared_plans._ShareSearch(setting)
    shapes = search.shapes(0.0)
    assert len(shapes) > 3
    for shape in shapes:
        seconds = (1 + planner.CLOSE) * search.planned(shape).prediction.total
        alone = shared_plans._Alone(search, shape)
        assert alone.bound() <= seconds
        assert alone.reaches(seconds)
        assert not alone.reaches(0.9 * alone.bound())


@pytest.mark.parametrize("n", [28672, 40960, *slow((53248,))])
def test_a_quick_search_finds_a_plan_nearly_as_fast_as_a_thorough_one(n: int) -> None:
    quick, calls, found = planned(n, "float64", 1, sessions=2), 0, list[int]()
    run = clock_of.predict

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*given)

    with patch.object(planner, "predict", counted):
        for least in (shared_plans.MIN_THOROUGH_STREAMED, 0.0):
            forget_plans()
            calls = 0
            with patch.object(shared_plans, "MIN_THOROUGH_STREAMED", least):
                thorough = planned(n, "float64", 1, sessions=2)
            found.append(calls)
    assert quick.prediction.total <= 1.03 * thorough.prediction.total
    assert 1.5 * found[0] < found[1]
