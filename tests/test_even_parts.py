"""Parts of a plan cover C once, and tiles are made smaller where workers would have nothing to do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.distributed.partition import MAX_IMBALANCE, even_tile, parts_of
from oocgemm.planning import Budgets, GemmProblem, Plan, TileShape, default_model, make_plan
from oocgemm.planning.tiling import ceil_div


def plan_of(m: int, n: int, tile: TileShape | None = None) -> Plan:
    problem = GemmProblem(m, n, 256, "float64", "float64", "float64", "float64")
    return make_plan(problem, Budgets(1 << 30, 1 << 30), default_model("host", 2), tile=tile)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70))
def test_parts_cover_every_tile_once_the_largest_first(down: int, across: int, workers: int) -> None:
    plan = plan_of(16 * down, 16 * across, TileShape(16, 16, 256))
    parts = parts_of(plan, workers)
    tiles = [list(part.tiles(plan.grid)) for part in parts]
    every = [tile for each in tiles for tile in each]
    assert sorted(every) == [(i, j) for i in range(down) for j in range(across)]
    assert [len(each) for each in tiles] == sorted((len(each) for each in tiles), reverse=True)


def test_long_parts_are_divided_further() -> None:
    plan = plan_of(320, 320, TileShape(16, 16, 256))
    assert len(parts_of(plan, 4)) == 4
    slow = replace(
        plan.machine, kernels={name: replace(rate, peak=1.0) for name, rate in plan.machine.kernels.items()}
    )
    assert len(parts_of(replace(plan, machine=slow), 4)) >= 10


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 64])
def test_every_worker_gets_as_many_tiles(workers: int) -> None:
    plan = plan_of(6000, 5000)
    tile = even_tile(plan, workers)
    assert tile is not None or plan.grid.shape[0] * plan.grid.shape[1] % workers == 0
    even = plan
    if tile is not None:
        assert tile.m <= plan.tile.m
        assert tile.n <= plan.tile.n
        even = plan_of(6000, 5000, tile)
    assert even_tile(even, workers) is None
    parts = parts_of(even, workers)
    sizes = [part.tiles(even.grid).count for part in parts]
    assert max(sizes) * workers <= MAX_IMBALANCE * sum(sizes) or max(sizes) == ceil_div(sum(sizes), workers)
