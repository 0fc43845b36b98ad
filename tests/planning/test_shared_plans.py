"""Plans for several GPUs: predicted times agree with simulated schedules, and more GPUs are faster."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from oocgemm.planning import (
    Budgets,
    InMemory,
    Kind,
    Layouts,
    Plan,
    TileShape,
    default_model,
    divided,
    make_plan,
    shared_plan,
)
from oocgemm.planning.schedule.dealing import SharedSchedule
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


@pytest.mark.parametrize("gpus", [2, *slow((4,), (8,))])
@pytest.mark.parametrize("n", [40960, *slow((32768,), (65536,))])
def test_predictions_for_several_gpus_agree_with_simulated_schedules(n: int, gpus: int) -> None:
    plan = planned(n, "float64", gpus)
    # If each GPU has a single tile, the times at which the GPUs get their first panels differ visibly.
    error = 0.05 if plan.rounds > 1 else 0.07
    assert plan.prediction.total == pytest.approx(simulate(plan.schedule(), plan.setting), rel=error)


def thin(gpus: int) -> Setting:
    """Return the setting of a product with a long k, of pinned arrays in host memory."""
    problem = product_of(4000, 4000, 400_000, "float32", "float32", "float32", "float32")
    layout = InMemory(itemsize=4, pinned=True, zero_copy_width=1)
    given = Budgets(DEVICE, HOST * gpus), gpus
    return Setting(problem, default_model("cuda", 16 * gpus, True), Layouts(layout, layout, layout), *given)


def test_gpus_with_one_tile_each_pass_panels_on() -> None:
    plan, setting = plan_for(thin(2)), thin(2)
    assert (plan.rounds, plan.candidate.traversal.alternates) == (1, False)
    once = setting.problem.depth * (setting.problem.m + setting.problem.n) * 4
    assert plan.loads.a_read + plan.loads.b_read == once < plan.loads.a_up + plan.loads.b_up
    one = simulate(plan_for(thin(1)).schedule(), thin(1))
    assert one >= 1.85 * simulate(plan.schedule(), setting)


def test_a_run_that_is_resumed_on_one_gpu_sums_in_the_same_order() -> None:
    plan = plan_for(thin(2))
    for tile in plan.tiles:
        multiplies = [
            [(op.step, op.m) for op in which.schedule() if (op.kind, op.tile) == (Kind.MULTIPLY, tile)]
            for which in (plan, replace(plan, devices=1))
        ]
        assert multiplies[0] == multiplies[1]
        assert multiplies[0][0][0] == 0


def test_a_tile_that_is_given_has_the_order_of_steps_of_one_gpu() -> None:
    """Otherwise, the bits of C would depend on the number of GPUs."""
    setting, tile = thin(2), plan_for(thin(2)).tile
    given = setting.problem, setting.budgets, setting.machine, setting.layouts, tile
    plans = make_plan(*given), shared_plan(*given, 2)
    assert {plan.candidate.traversal.alternates for plan in plans} == {True}
    assert plans[0].slots.last_steps == plans[1].slots.last_steps


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


@pytest.mark.parametrize("stored", [False, *slow((True,))])
@pytest.mark.parametrize(("gpus", "sessions"), [(1, 2), *slow((4, 1))])
def test_no_tile_that_is_given_by_hand_is_much_faster(gpus: int, sessions: int, stored: bool) -> None:
    setting = setting_of(32768, "float64", gpus, sessions, stored=stored)
    own = plan_for(setting).prediction.total
    for m, n in ((16384, 16384), (8192, 16384), (8192, 8192), (4096, 8192), (4096, 4096)):
        tile = TileShape(m, n, 4096)
        given = setting.problem, setting.budgets, setting.machine, setting.layouts, tile, setting.devices
        assert own <= 1.03 * shared_plan(*given).prediction.total


def test_shapes_are_ranked_without_counting_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the loads of one plan of many steps takes seconds."""

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(SharedSchedule, "loads_within", refuse)
    setting = setting_of(30_000, "float32", 2, stored=True)
    assert len(plan_for(setting).considered) > 1
