"""No hand-made tile of a small set is predicted to be faster than the planner's own choice.

The set holds strips of rows or columns of C, the whole of C, and squares, each with panels of several depths.
A tile passed by hand goes through the same planner, which then only chooses slots.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning import (
    Budgets,
    Chunked,
    InMemory,
    Layouts,
    MachineModel,
    TileShape,
    Writing,
    default_model,
    make_plan,
)
from oocgemm.planning.problem import GemmProblem
from tests.support.plan_cases import GIB, MIB, STORED, problem

GAIN = 0.02  # a hand-made tile may be predicted this much faster
GPU, HOST = default_model("cuda", 16), default_model("host", 2)
SLOW_LINK = replace(GPU, h2d=20e9, d2h=20e9)
FAST_WRITES = replace(GPU, write=20e9)
SMALL_CHUNKS = Layouts(Chunked((512, 512)), Chunked((512, 512)), Chunked(writing=Writing((512, 512))))
PAGEABLE = Layouts(*(InMemory(zero_copy_width=4096),) * 3)


def pinned(p: GemmProblem) -> Layouts:
    """Return layouts of pinned NumPy arrays in row-major order."""
    a, b = (InMemory(zero_copy_width=width, pinned=True) for width in (p.k, p.n))
    return Layouts(a, b, b)


def hand_made(p: GemmProblem) -> Iterator[TileShape]:
    """Yield the small set of tiles: extents that a person would try first."""
    sides = (256, 1024, 4096, 22_528)
    shapes = {
        (min(p.m, m), min(p.n, n)) for m in (*sides, p.m) for n in (*sides, p.n) if m >= p.m or n >= p.n
    }
    squares = {(min(p.m, side), min(p.n, side)) for side in sides}
    for m, n in sorted(shapes | squares):
        for k in sorted({min(p.k, depth) for depth in (1024, 2048, 8192)}):
            yield TileShape(m, n, k)


@pytest.mark.parametrize(
    ("product", "budgets", "machine", "layouts"),
    [
        (problem(254, 67_352, 155_718, "int8"), Budgets(120 * GIB, 8 * GIB), GPU, STORED),
        (problem(211, 19_496, 42_526), Budgets(120 * GIB, 8 * GIB), GPU, STORED),
        (problem(4000, 1, 4000), Budgets(256 * MIB, 256 * MIB), HOST, STORED),
        (problem(8000, 8000, 120_000, "int8"), Budgets(120 * GIB, 60 * GIB), GPU, None),
        (problem(8192, 8192, 8192), Budgets(2 * GIB, 4 * GIB), GPU, STORED),
        (problem(30_000, 300, 300), Budgets(2 * GIB, 4 * GIB), GPU, None),
        (problem(40_000, 30_000, 20_000, beta=1), Budgets(4 * GIB, 4 * GIB), SLOW_LINK, PAGEABLE),
        (problem(16_384, 16_384, 16_384), Budgets(4 * GIB, 4 * GIB), FAST_WRITES, SMALL_CHUNKS),
    ],
    ids=[
        "few-rows-int8",
        "few-rows-float64",
        "matrix-vector",
        "long-k-pinned",
        "square",
        "tall",
        "slow-link",
        "small-chunks",
    ],
)
def test_no_hand_made_tile_is_predicted_faster(
    product: GemmProblem, budgets: Budgets, machine: MachineModel, layouts: Layouts | None
) -> None:
    layouts = layouts or pinned(product)
    own = make_plan(product, budgets, machine, layouts).considered[0].prediction.total
    faster = {}
    for tile in (*hand_made(product), TileShape(1024, 16_384, 4096), TileShape(5632, 8192, 1024)):
        try:
            total = make_plan(product, budgets, machine, layouts, tile).considered[0].prediction.total
        except (BudgetError, InputError):
            continue
        if total < (1 - GAIN) * own:
            faster[str(tile)] = total / own
    assert not faster
