"""Plans for several GPUs: predicted times agree with simulated schedules, and more GPUs are faster."""

from dataclasses import replace

import pytest

from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Layout,
    Layouts,
    Plan,
    default_model,
    divided,
    guarded_plan,
    shared_plan,
)
from oocgemm.planning.cost.simulate import simulate
from tests.suite import slow

GIB = 1 << 30
# An H100 has 80 GB. Per GPU there are 16 cores and 120 GiB of host memory, of which runs use half.
DEVICE, HOST = 70 * GIB, 60 * GIB
IN_MEMORY = Layout(in_memory=True)


def planned(n: int, dtype: str, gpus: int, sessions: int = 1) -> Plan:
    """Plan a product of n x n arrays in host memory. `sessions` share each GPU."""
    problem = GemmProblem(n, n, n, dtype, dtype, dtype, dtype)
    layout = replace(IN_MEMORY, itemsize=problem.itemsizes["A"])
    machine = divided(default_model("cuda", 16 * gpus), sessions)
    budgets, devices = Budgets(DEVICE // sessions, HOST * gpus), gpus * sessions
    given = problem, budgets, (machine,), frozenset[str](), Layouts(layout, layout, layout), None
    return guarded_plan(*given) if devices == 1 else shared_plan(*given, devices)


@pytest.mark.parametrize("gpus", [2, *slow((4,), (8,))])
@pytest.mark.parametrize("n", [40960, *slow((32768,), (65536,))])
def test_predictions_for_several_gpus_agree_with_simulated_schedules(n: int, gpus: int) -> None:
    plan = planned(n, "float64", gpus)
    assert plan.prediction.total == pytest.approx(simulate(plan.schedule(), plan.setting), rel=0.05)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("gpus", "least"), [(2, 1.9), (4, 3.7), (8, 7.0)])
def test_a_large_product_scales_with_the_number_of_gpus(gpus: int, least: float, dtype: str) -> None:
    one, several = (planned(65536, dtype, count).prediction.total for count in (1, gpus))
    assert one / several >= least


@pytest.mark.parametrize("n", [40960, *slow((53248,), (65536,))])
def test_two_sessions_on_a_gpu_upload_at_most_half_as_much_again(n: int) -> None:
    """Each computes half of C, and needs all of one operand."""
    one, two = planned(n, "float64", 1), planned(n, "float64", 1, sessions=2)
    assert two.traffic["h2d"] <= 1.55 * one.traffic["h2d"]
    assert two.prediction.lanes["compute"] <= 1.02 * one.prediction.lanes["compute"]
