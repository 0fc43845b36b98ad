"""The choice of parts and workers, compared with a simulation of the workers and with brute force."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.planning import Budgets, MachineModel, Plan, TileShape, default_model, make_plan
from oocgemm.planning.parts.partition import partition
from oocgemm.planning.parts.storage import Storage
from tests.part_runs import simulated_seconds
from tests.plan_cases import GIB, STORED, problem

GPU, CPU = default_model("cuda", 16), default_model("host", 16)
# The predicted seconds differ from the simulated ones by at most this fraction.
ACCURACY = 0.03
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def plan_for(
    m: int,
    n: int,
    k: int,
    dtype: str = "float64",
    beta: float = 0,
    machine: MachineModel = GPU,
    device: float = 16,
    tile: TileShape | None = None,
) -> Plan:
    budgets = Budgets(int(device * GIB), int(device * GIB))
    return make_plan(problem(m, n, k, dtype, beta), budgets, machine, STORED, tile)


@st.composite
def products(draw: st.DrawFn) -> tuple[Plan, float]:
    """Draw a plan for one GPU, and the total rate of the storage."""
    m, n, k = (int(1000 * 2 ** draw(st.floats(0, 7))) for _ in range(3))
    read = 10 ** draw(st.floats(9, 11))
    machine = replace(GPU, read=read, write=read * draw(st.floats(0.1, 1)))
    dtype, beta = draw(st.sampled_from(("float64", "float32", "float16"))), draw(st.sampled_from((0, 1)))
    plan = plan_for(m, n, k, dtype, beta, machine, draw(st.sampled_from((0.5, 4, 80))))
    return plan, read * draw(st.sampled_from((1, 1.5, 4, 20)))


@given(products(), st.sampled_from(COUNTS))
def test_predictions_agree_with_the_simulated_workers(product: tuple[Plan, float], workers: int) -> None:
    plan, rate = product
    found = partition(plan, workers, rate)
    assert found.seconds == pytest.approx(
        simulated_seconds(found, Storage.of(plan.machine, rate)), rel=ACCURACY
    )
