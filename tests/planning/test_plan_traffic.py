"""Plans move at least as many bytes as the lower bound, and hardly more than the best plan."""

import importlib
import itertools
from typing import Any

import pytest

from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Schedule,
    Slots,
    TileGrid,
    TileShape,
    Traversal,
    default_model,
    make_plan,
)
from oocgemm.planning.cost.bound import min_bytes
from oocgemm.planning.schedule.traversal import walk
from tests.support.plan_cases import GIB, MIB, problem
from tests.support.suite import each_value, slow

bench_traffic: Any = importlib.import_module("bench_traffic")
traffic_oracle: Any = importlib.import_module("traffic_oracle")


def test_tiles_fill_the_memory_and_panels_are_thin() -> None:
    plan = make_plan(problem(100_000, 100_000, 900_000), Budgets(8 * GIB, 8 * GIB), default_model("cuda", 16))
    accumulators = plan.slots.c * plan.tile.m * plan.tile.n * 8
    assert accumulators > 0.3 * plan.budgets.device
    assert plan.traffic["h2d"] < 2.2 * plan.least["h2d"]


def test_the_lower_bound_holds_for_a_brute_force_oracle() -> None:
    """No tile with panels of depth 1 moves fewer bytes than the lower bound."""
    p = problem(60, 50, 40)
    for memory in (200, 800, 3000, 20_000):
        elements = memory // 8
        best = min(
            (p.m * p.k * -(-p.n // n) + p.k * p.n * -(-p.m // m)) * 8
            for m in range(1, p.m + 1)
            for n in range(1, p.n + 1)
            if m * n + m + n <= elements
        )
        assert min_bytes(p, memory) <= best


def fewest_by_simulation(p: GemmProblem, k: int, memory: int) -> float:
    """Return the fewest bytes of panels that must be uploaded, by simulating every plan.

    Every tiling, traversal and division of the memory into buffers is simulated.
    """
    best = float("inf")
    for down, across in itertools.product(range(1, p.m + 1), range(1, p.n + 1)):
        tile = TileShape(-(-p.m // down), -(-p.n // across), k)
        grid = TileGrid.of(p, tile)
        free = memory // 8 - tile.m * tile.n
        for axis, a in itertools.product((0, 1), range(2, max(2, free // (tile.m * k)) + 1)):
            b = (free - a * tile.m * k) // (tile.n * k)
            if b < 2 or a > grid.shape[0] * grid.steps + 2:
                continue
            for band in range(1, grid.shape[axis] + 1):
                tiles = walk(Traversal(axis, band), *grid.shape)
                loads = Schedule(p, grid, tiles, Slots(a, b, host_a=1, host_b=1)).loads()
                best = min(best, loads.a_up + loads.b_up)
    return best


@pytest.mark.parametrize(
    ("m", "n", "k", "memory"),
    [
        (5, 3, 4, 180),
        *slow((8, 3, 4, 250), (6, 6, 6, 200), (5, 5, 5, 250), (4, 9, 3, 240), (5, 4, 9, 300)),
    ],
)
def test_the_traffic_oracle_agrees_with_simulation(m: int, n: int, k: int, memory: int) -> None:
    least, _ = traffic_oracle.min_panels(traffic_oracle.Case(m, n, k, 8, 1, memory))
    found = fewest_by_simulation(problem(m, n, k), 1, memory)
    assert 0.93 * found <= least <= found


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *slow((4096, 4096, 4096)),
        (10_007, 10_009, 10_037),
        *slow((2048, 100_003, 8192), (32_768, 32_768, 1024)),
    ],
)
@pytest.mark.parametrize("link", ["h2d", "read", "unified"])
def test_traffic_is_near_the_minimum_that_a_search_finds(m: int, n: int, k: int, link: str) -> None:
    p = problem(m, n, k)
    plan = make_plan(p, Budgets(256 * MIB, GIB), bench_traffic.machine(link, p))
    moved = plan.traffic["h2d" if link == "h2d" else "read"]
    assert moved <= 1.02 * bench_traffic.oracle(plan, link, moved)[0]


@each_value
@pytest.mark.parametrize(
    ("extent", "beta", "device", "host"),
    [(4096, 1, 3 * GIB, 8 * GIB), (10_007, 0, 3 * GIB, 8 * GIB), (16_384, 0, 8 * GIB, 64 * GIB)],
)
@pytest.mark.parametrize("link", ["h2d", "read"])
def test_a_slow_link_carries_once_what_a_tier_can_cache(
    extent: int, beta: int, device: int, host: int, link: str
) -> None:
    """The first panels are as deep as all others.

    Otherwise the link would carry them twice: also as parts of the whole panels that other tiles use.
    """
    p = problem(extent, extent, extent, beta=beta)
    plan = make_plan(p, Budgets(device, host), bench_traffic.machine(link, p))
    assert plan.traffic[link] == plan.required[link]


def test_the_host_caches_panels_not_c_where_the_store_is_fast() -> None:
    p = problem(24_576, 24_576, 24_576)
    plan = make_plan(p, Budgets(128 * MIB, 128 * MIB), bench_traffic.machine("read", p))
    assert plan.slots.host_c <= 3


@pytest.mark.parametrize("beta", [0, 1])
def test_operands_that_fit_are_moved_once(beta: int) -> None:
    p, tile = problem(2000, 2000, 2000, beta=beta), TileShape(2000, 2000, 500)
    plan = make_plan(p, Budgets(4 * GIB, 4 * GIB), default_model("cuda", 16), tile=tile)
    assert plan.traffic == plan.required
