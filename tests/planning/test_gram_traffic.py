"""Plans of Gram matrices move hardly more bytes than the best triangle tiling, and none moves fewer."""

import importlib
from typing import Any

import pytest

from oocgemm.planning import Budgets, GemmProblem, Op, TileShape, default_model, make_plan
from oocgemm.planning.cost.bound import min_bytes
from oocgemm.planning.layout import InMemory, Layouts
from tests.support.plan_cases import GIB, MIB
from tests.support.products import product_of
from tests.support.suite import slow

bench_traffic: Any = importlib.import_module("bench_traffic")
traffic_oracle: Any = importlib.import_module("traffic_oracle")


def problem(n: int, k: int, gram: str = "lower", beta: float = 0) -> GemmProblem:
    dtypes = ("float64",) * 4
    return product_of(n, n, k, *dtypes, beta=beta, trans_b=Op.T, gram=gram)


@pytest.mark.parametrize(
    ("n", "k", "device", "host", "link"),
    [
        (1500, 160, 2, 1, "h2d"),
        (1500, 400, 2, 1, "unified"),
        *slow((2048, 512, 5, 2, "h2d"), (3000, 500, 8, 4, "h2d"), (3000, 500, 8, 4, "read")),
        *slow((1500, 400, 2, 1, "read"), (3000, 500, 8, 4, "unified")),
    ],
)
def test_traffic_is_near_the_minimum_over_triangle_tilings(
    n: int, k: int, device: int, host: int, link: str
) -> None:
    """`device` and `host` are MiB besides the reserves."""
    p = problem(n, k)
    on = bench_traffic.machine(link, p)
    budgets = Budgets(device * MIB + on.device_reserve, host * MIB + on.host_reserve)
    plan = make_plan(p, budgets, on)
    moved = plan.traffic["h2d" if link == "h2d" else "read"]
    free = bench_traffic.net(plan, link)
    case = traffic_oracle.Triangle(n, k, 8, plan.tile.k, *free, max_lines=10)
    assert moved <= 1.02 * traffic_oracle.min_triangle_panels(case)[0]


@pytest.mark.parametrize("memory", [200, 500, 1500, 6000])
def test_no_triangle_tiling_moves_fewer_bytes_than_the_lower_bound(memory: int) -> None:
    case = traffic_oracle.Triangle(24, 12, 8, 1, memory, max_lines=24)
    assert min_bytes(problem(24, 12), memory) <= traffic_oracle.min_triangle_panels(case)[0]


@pytest.mark.parametrize("gram", ["lower", "upper", "full"])
def test_x_is_read_once_while_its_triangle_fits(gram: str) -> None:
    """8 GiB hold the triangle of 44,000 rows in float64, and a square C of 32,768 rows."""
    p = problem(44_000, 1_000_000, gram)
    budgets = Budgets(8 * GIB, 8 * GIB)
    plan = make_plan(p, budgets, bench_traffic.machine("read", p))
    assert plan.grid.shape == (1, 1)
    assert plan.traffic["read"] == plan.required["read"] == 44_000 * 1_000_000 * 8


@pytest.mark.parametrize(("n", "k"), [(1000, 25_000), (300, 60_000), (2000, 20_000)])
def test_a_triangle_in_memory_with_a_long_k_is_one_product(n: int, k: int) -> None:
    """BLAS computes the triangle as fast as NumPy does, which strips of it would not."""
    x = InMemory(itemsize=8, zero_copy_width=8192, in_place=True)
    plan = make_plan(
        problem(n, k, "full"),
        Budgets(GIB, GIB),
        default_model("host", 2),
        Layouts(x, x, InMemory(itemsize=8)),
    )
    assert (plan.tile.m, plan.slots.strip) == (n, n)
    assert plan.prediction.lanes["read"] < 1e-6


def test_a_plan_of_many_steps_is_estimated() -> None:
    p = problem(100_000, 900_000)
    plan = make_plan(
        p, Budgets(8 * GIB, 8 * GIB), default_model("cuda", 16), tile=TileShape(20_000, 20_000, 512)
    )
    assert plan.least["h2d"] <= plan.traffic["h2d"] < 3 * plan.least["h2d"]
    assert plan.flops < 0.53 * 2 * p.m * p.m * p.k


@pytest.mark.parametrize("budgets", [Budgets(100 * MIB, 70 * MIB), Budgets(2 * GIB, GIB)])
def test_a_plan_stays_within_its_budgets(budgets: Budgets) -> None:
    plan = make_plan(problem(10_007, 3001, "full", beta=1), budgets, default_model("cuda", 8))
    assert plan.footprint.device_total <= budgets.device
    assert plan.footprint.host_total <= budgets.host
