"""The choice of parts and workers, compared with a simulation of the workers and with brute force."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import settings

from oocgemm.errors import InputError
from oocgemm.planning import Budgets, InMemory, MachineModel, Plan, TileShape, default_model, make_plan
from oocgemm.planning.partition import (
    CLOSE,
    MIN_GAIN,
    UNSURE,
    Partition,
    Storage,
    divisions,
    finer_tiles,
    k_range,
    partition,
    scaling,
)
from tests.support.part_runs import simulated_seconds
from tests.support.plan_cases import GIB, STORED, problem
from tests.support.products import changed
from tests.support.suite import ALL, examples, slow

CPU = default_model("host", 16)
# A GPU whose storage reads and writes 20 GB/s.
GPU = replace(default_model("cuda", 16), read=20e9, write=20e9)
THOROUGH = settings().max_examples >= ALL
TABLE = range(1, 65) if THOROUGH else (1, 3, 16)  # numbers of workers


def plan_for(
    size: tuple[int, int, int],
    dtype: str = "float64",
    beta: float = 0,
    machine: MachineModel = GPU,
    device: float = 16,
    tile: TileShape | None = None,
) -> Plan:
    budgets = Budgets(int(device * GIB), int(device * GIB))
    return make_plan(problem(*size, dtype, beta), budgets, machine, STORED, tile)


def error(found: Partition, storage: Storage) -> float:
    """Return the relative error of the predicted seconds."""
    return found.seconds / simulated_seconds(found, storage) - 1


# Shapes, dtypes, budgets and storages of a table each: compute-bound and storage-bound, square, tall and wide
# C, and a small C with a huge k.
CASES: dict[str, Callable[[], tuple[Plan, float]]] = {
    "square, slow storage": lambda: (plan_for((131072, 131072, 131072), device=100), 20e9),
    "square, fast storage": lambda: (plan_for((65536, 65536, 65536), device=80), 100e9),
    "long, compute-bound": lambda: (plan_for((196608, 196608, 196608), device=100), 150e9),
    "small C, huge k": lambda: (plan_for((8192, 8192, 2097152), device=60), 100e9),
    "tall C": lambda: (plan_for((300000, 3000, 50000)), 200e9),
    "half precision": lambda: (plan_for((90000, 70000, 60000), "float16", device=8), 60e9),
    "single precision, little memory": lambda: (plan_for((60000, 60000, 60000), "float32", device=2), 40e9),
    "CPU, storage for all": lambda: (plan_for((30000, 30000, 30000), machine=CPU, device=4), 64 * CPU.read),
}


@cache
def planned(case: str) -> tuple[Plan, float]:
    return CASES[case]()


@cache
def table_of(case: str) -> tuple[Partition, ...]:
    """Return what is chosen for each number of workers."""
    plan, rate = planned(case)
    return scaling(plan, TABLE, rate)


@cache
def simulated(case: str) -> dict[int, float]:
    """Return the simulated seconds of a case by number of workers used."""
    (plan, rate), chosen = planned(case), {found.workers: found for found in table_of(case)}
    storage = Storage.of(plan.machine, rate)
    return {workers: simulated_seconds(found, storage) for workers, found in chosen.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_table_agrees_with_the_simulated_workers(case: str) -> None:
    errors = {found.workers: found.seconds / simulated(case)[found.workers] - 1 for found in table_of(case)}
    assert max(map(abs, errors.values())) <= 0.04, errors


def test_most_random_products_agree_with_the_simulated_workers() -> None:
    """The model takes workers to be in step, so that it errs where they wait for C or for a slot by turns."""
    draw, errors = random.Random(28), list[float]()
    while len(errors) < examples(20, quick=10):
        size = tuple(int(4000 * 2 ** draw.uniform(0, 4)) for _ in range(3))
        read = 10 ** draw.uniform(9, 10.5)
        machine = replace(GPU, read=read, write=read * draw.uniform(0.1, 1))
        dtype = draw.choice(("float64", "float32", "float16"))
        plan = plan_for((size[0], size[1], size[2]), dtype, 0, machine, draw.choice((0.5, 4, 80)))
        rate = read * draw.choice((1, 1.5, 4, 20))
        found = partition(plan, draw.choice((2, 3, 4, 8, 16, 24)), rate)
        errors.append(abs(error(found, Storage.of(machine, rate))))
    assert sorted(errors)[int(0.9 * len(errors))] <= 0.03, sorted(errors)
    assert max(errors) <= 0.1


@pytest.mark.parametrize("dtype", ["float64", *slow(["float16"])])
def test_reading_c_or_sharing_cores_costs_accuracy_only_if_the_storage_limits(dtype: str) -> None:
    """With one slot for C, the model of a worker takes its tiles to be up to 7% faster than they are."""
    for machine, beta in ((GPU, 1), (CPU, 1), *([(CPU, 0)] if dtype == "float16" else [])):
        plan = plan_for((40000, 30000, 20000), dtype, beta, machine, 4)
        for workers in (2, 7, 16) if THOROUGH else (7,):
            enough, scarce = 64 * machine.read, 2 * machine.read
            for rate, accuracy in ((enough, 0.07), (scarce, 0.3)):
                found = partition(plan, workers, rate)
                assert abs(error(found, Storage.of(machine, rate))) <= accuracy


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_workers_are_never_slower_than_fewer(case: str) -> None:
    for fewer, more in pairwise(table_of(case)):
        assert fewer.workers <= more.workers <= more.available
        assert more.seconds < fewer.seconds or more.workers == fewer.workers
    seconds = list(simulated(case).values())
    assert seconds == sorted(seconds, reverse=True)


def test_no_grid_is_faster_than_the_chosen_one() -> None:
    """Compare with slices of k and with all rectangles for all numbers of workers, simulated."""
    plan, rate = plan_for((40000, 20000, 16000), machine=replace(GPU, read=5e9, write=5e9)), 10e9
    storage, found = Storage.of(plan.machine, rate), partition(plan, 6, rate)
    best = simulated_seconds(found, storage)
    tried = 0
    for workers in range(1, 7) if THOROUGH else (1, 6):
        pairs = [(down, workers // down) for down in range(1, workers + 1) if workers % down == 0]
        every = [*divisions(plan, workers), *(finer_tiles(plan, pair) for pair in pairs)]
        for division in filter(None, every):
            parts = tuple(division.parts)
            other = replace(found, plan=division.plan, grid=division.grid, parts=parts, workers=workers)
            assert best <= simulated_seconds(other, storage) * (1 + CLOSE + 0.03) + MIN_GAIN
            tried += 1
    assert tried >= 5


def test_the_figures_of_the_design() -> None:
    """Seconds of the design's model, whose kernel is slower, and whose writes take a share of all rates."""
    square = plan_for((131072, 131072, 131072), device=100)
    one, four = scaling(square, (1, 64), 20e9)
    assert 80 < one.seconds < 90
    assert four.workers in (3, 4)
    assert 30 < four.seconds < 40
    # Storage and compute take about as long, so that either may be the bottleneck of a plan.
    assert four.bottleneck in ("storage", "compute")
    used = f"{four.workers} of 64 workers used: {four.bottleneck}-bound, each more costs 1."
    assert used in four.reason
    long = partition(plan_for((8192, 8192, 8388608), device=60), 64, 100e9)
    assert long.grid[2] > 1
    assert 11 < long.seconds < 12


@pytest.mark.parametrize("case", CASES)
def test_parts_cover_every_step_of_every_tile_once(case: str) -> None:
    for found in table_of(case):
        grid = found.plan.grid
        seen = Counter(
            (tile, step)
            for part in found.parts
            for tile in part.tiles(grid)
            for step in range(*found.slices[part.k_slice])
        )
        assert set(seen.values()) == {1}
        assert len(seen) == grid.shape[0] * grid.shape[1] * grid.steps


def test_slices_of_k_end_where_steps_do() -> None:
    found = partition(plan_for((8192, 8192, 1000000), device=60), 7, 200e9)
    grid = found.plan.grid
    ranges = [k_range(grid, steps) for steps in found.slices]
    assert len(ranges) == found.grid[2] > 1
    assert all(start % grid.tile.k == 0 for start, _ in ranges)
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, 1000000)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_the_parts_fits_the_budgets(case: str) -> None:
    budgets = planned(case)[0].budgets
    for found in table_of(case):
        used = found.plan.footprint
        assert used.device_total <= budgets.device
        assert used.host_total <= budgets.host


def test_parts_of_a_minute_or_more_are_divided_and_the_longest_come_first() -> None:
    found = partition(plan_for((524288, 524288, 524288), device=100), 8, 200e9)
    assert len(found.parts) in (24, 32)
    sizes = [part.tiles(found.plan.grid).coverage.elements for part in found.parts]
    assert sizes == sorted(sizes, reverse=True)
    assert len(partition(plan_for((65536, 65536, 65536)), 4, 200e9).parts) == 4


def test_a_given_tile_is_kept() -> None:
    plan = plan_for((40000, 40000, 4000), tile=TileShape(16384, 16384, 2048))
    found = partition(plan, 64, 1e12, keep_tile=True)
    assert found.plan is plan
    assert found.workers <= 9 * 2
    assert "cannot be divided into 64 parts" in found.reason


def test_products_whose_k_may_not_be_split() -> None:
    plan = plan_for((8192, 8192, 1000000), device=60)
    checked = replace(plan, problem=changed(plan.problem, checked="device"))
    in_memory = replace(plan, layouts=replace(plan.layouts, c=InMemory()))
    no_sum = replace(plan, problem=changed(plan.problem, alpha=0.0))
    assert any(one.grid[2] > 1 for one in divisions(plan, 4))
    for other in (checked, in_memory, no_sum):
        assert not any(one.grid[2] > 1 for one in divisions(other, 4))
        assert partition(other, 8, 200e9).grid[2] == 1


@pytest.mark.parametrize("size", [(0, 100, 100), (100, 100, 0), (1, 1, 1)])
def test_small_and_empty_products(size: tuple[int, int, int]) -> None:
    found = partition(plan_for(size), 8)
    assert (found.workers, found.grid) == (1, (1, 1, 1))
    assert len(found.parts) == (0 if 0 in size[:2] else 1)


def test_arguments_out_of_range() -> None:
    plan = plan_for((1000, 1000, 1000))
    with pytest.raises(InputError, match="from 1 to 1024, not 0"):
        partition(plan, 0)
    with pytest.raises(InputError, match="from 1 to 1024, not 1025"):
        partition(plan, 1025)
    with pytest.raises(InputError, match="must be positive, not -1"):
        partition(plan, 2, -1.0)


@pytest.mark.parametrize("workers", [2, 8])
def test_writes_that_nobody_has_measured_do_not_keep_workers_idle(workers: int) -> None:
    """C has as many bytes as A and B, and is predicted to be written for longer than it is computed."""
    default = default_model("cuda", 16)
    measured = replace(default, write=0.9 * default.write)
    size = 65536, 65536, 32768
    assumed, known = (partition(plan_for(size, machine=x, device=60), workers) for x in (default, measured))
    assert (assumed.workers, known.workers) == (workers, 1)
    assert assumed.seconds <= UNSURE * assumed.one_worker
    # A rate that the user gives is that of all workers.
    given = partition(plan_for(size, machine=default, device=60), workers, default.read)
    assert given.workers == 1
