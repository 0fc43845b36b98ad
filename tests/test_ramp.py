"""Thin first steps are used only if they shorten the time that multiplications wait."""

from dataclasses import replace

import pytest

from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Layout,
    Layouts,
    Setting,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.plan import schedule_of
from oocgemm.planning.search.ramp import MIN_THIN_DEPTH, best_ramp

CUDA = default_model("cuda", 16)


def cube(n: int, k: int, dtype: str) -> GemmProblem:
    return GemmProblem(n, n, k, dtype, dtype, dtype, dtype)


def pinned(dtype: str) -> Layouts:
    layout = Layout(
        in_memory=True, pinned=True, zero_copy_width=(32 << 10) // {"float64": 8, "float32": 4}[dtype]
    )
    return Layouts(layout, layout, layout)


def stored(unit: int = 1) -> Layouts:
    layout = Layout((unit, unit))
    return Layouts(layout, layout, Layout(free_chunks=True))


@pytest.mark.parametrize(
    ("dtype", "n", "k", "gibibytes", "ramp"),
    [
        # Loading panels takes about as long as multiplying, and thin panels of A would have short rows: no
        # thin steps.
        ("float64", 8192, 16_384, 2, 0),
        ("float64", 16_384, 16_384, 8, 0),
        ("float64", 24_576, 24_576, 3, 0),
        # Multiplying takes longer than loading: the first step is halved twice.
        ("float64", 16_384, 65_536, 8, 2),
        ("float32", 24_576, 24_576, 2, 2),
        ("float32", 8192, 65_536, 8, 2),
    ],
)
def test_the_chosen_ramp_is_fastest_on_the_virtual_clock(
    dtype: str, n: int, k: int, gibibytes: int, ramp: int
) -> None:
    p, layouts = cube(n, k, dtype), pinned(dtype)
    plan = make_plan(p, Budgets(gibibytes << 30, 16 << 30), CUDA, layouts)
    assert plan.grid.ramp == ramp
    seconds = [
        simulate(schedule_of(plan.setting, replace(plan.candidate, ramp=halvings)), plan.setting)
        for halvings in range(3)
    ]
    # The simulation models thin panels of A slightly differently from the formula.
    assert seconds[ramp] < min(seconds) + 1e-3
    assert max(seconds) > min(seconds) + 1e-3


def test_thin_steps_are_whole_chunks_and_deep_enough() -> None:
    p, tile = cube(32_768, 262_144, "float64"), TileShape(16_384, 16_384, 4096)

    def ramp(layouts: Layouts, problem: GemmProblem = p, depth: int = 4096) -> int:
        setting = Setting(problem, CUDA, layouts, Budgets(1 << 30, 1 << 30))
        return best_ramp(setting, replace(tile, k=depth))

    assert ramp(stored()) == ramp(stored(1024)) == 2
    assert ramp(stored(2048)) == 1
    assert ramp(stored(4096)) == ramp(stored(3000)) == 0
    assert ramp(stored(), depth=2 * MIN_THIN_DEPTH) == 1
    assert ramp(stored(), depth=2 * MIN_THIN_DEPTH - 2) == 0
    assert ramp(stored(), cube(32_768, 4096, "float64")) == 0  # there is only one step
    assert ramp(stored(), cube(32_768, 0, "float64")) == 0


def test_of_equals_the_first_step_is_the_thinnest() -> None:
    """If loading takes longer than multiplying, thin steps make no difference. The thinnest ones are used."""
    slow = replace(CUDA, read=5e9, read_scattered=5e9)
    setting = Setting(cube(32_768, 262_144, "float64"), slow, stored(), Budgets(1 << 30, 1 << 30))
    assert best_ramp(setting, TileShape(4096, 4096, 4096)) == 2
