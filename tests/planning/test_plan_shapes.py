"""Tiles and panels follow the chunks, the memory and the device, and plans explain the choice."""

from dataclasses import replace
from typing import Any

import pytest

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning import (
    Budgets,
    Chunked,
    InMemory,
    Layout,
    Layouts,
    Lines,
    Op,
    Plan,
    TileShape,
    Writing,
    default_model,
    make_plan,
)
from oocgemm.planning.search import planner, shapes
from oocgemm.planning.setting import CHUNK_BYTES
from tests.support.plan_cases import GIB, MIB, STORED, problem
from tests.support.products import changed
from tests.support.schedule_check import verify


def test_tiles_and_strips_never_share_a_chunk_of_c() -> None:
    for chunk in ((1000, 700), (333, 4096)):
        on = Layouts(c=Chunked(writing=Writing(chunk, encode_bytes=8 * chunk[0] * chunk[1])))
        plan = make_plan(
            problem(9001, 9001, 3000), Budgets(300 * MIB, 300 * MIB), default_model("cuda", 4), on
        )
        verify(plan.schedule(), chunk)


def test_a_new_c_gets_chunks_that_divide_the_tile() -> None:
    on = Layouts(c=Chunked(writing=Writing(free=True, encode_bytes=2 * CHUNK_BYTES)))
    plan = make_plan(
        problem(30_000, 30_000, 3000), Budgets(800 * MIB, 800 * MIB), default_model("cuda", 4), on
    )
    rows, cols = plan.chunks
    assert plan.tile.m >= plan.problem.m or plan.tile.m % rows == 0
    assert plan.tile.n >= plan.problem.n or plan.tile.n % cols == 0
    assert CHUNK_BYTES / 8 <= rows * cols * 8 <= CHUNK_BYTES * 4


def test_panels_follow_the_chunks_of_compressed_operands() -> None:
    on = Layouts(*(Chunked((1000, 1000), partial_reads=False, decode_bytes=16_000_000),) * 2)
    plan = make_plan(
        problem(20_000, 20_000, 20_000), Budgets(2 * GIB, 8 * GIB), default_model("cuda", 16), on
    )
    assert plan.tile.k % 1000 == 0
    assert all(factor < 1.1 for factor in plan.amplification.values())


def test_a_tile_passed_by_the_caller_is_used_or_refused() -> None:
    p, machine = problem(1000, 1000, 1000), default_model("host", 2)
    assert make_plan(p, Budgets(GIB, GIB), machine, tile=TileShape(300, 200, 70)).tile == TileShape(
        300, 200, 70
    )
    with pytest.raises(BudgetError, match="tile 300x200x70"):
        make_plan(p, Budgets(16 * MIB + MIB // 2, GIB), machine, tile=TileShape(300, 200, 70))
    with pytest.raises(InputError, match="multiple of 64"):
        make_plan(
            p,
            Budgets(GIB, GIB),
            machine,
            Layouts(c=Chunked(writing=Writing((64, 64)))),
            TileShape(300, 128, 70),
        )


def test_explanations_name_what_each_candidate_loses() -> None:
    plan = make_plan(problem(24_576, 24_576, 24_576), Budgets(3 * GIB, 8 * GIB), default_model("cuda", 16))
    rows: list[dict[str, Any]] = plan.explain()
    assert rows[0]["why"] == "chosen"
    assert rows[0]["tile"] == str(plan.tile)
    assert len(rows) > 2
    assert all(row["why"] for row in rows)


@pytest.mark.parametrize(
    ("backend", "size", "budgets"),
    [
        ("cuda", 24_576, Budgets(2 * GIB, 8 * GIB)),  # all other work is hidden behind writing C
        ("host", 7_000, Budgets(640 * MIB, 64 * MIB)),
    ],
)
def test_of_equally_fast_plans_the_one_with_least_work_wins(
    backend: str, size: int, budgets: Budgets
) -> None:
    stored = Chunked((1000, 1000))
    layouts = Layouts(stored, stored, Chunked(writing=Writing(free=True)))
    plan = make_plan(problem(size, size, size, "float32"), budgets, default_model(backend, 2), layouts)
    chosen, *others = (s.prediction for s in plan.considered)
    fastest = min(other.total for other in (chosen, *others))
    assert chosen.total <= 1.011 * fastest
    alike = chosen.serial / (1 + planner.ALIKE)
    assert all(other.serial >= alike for other in others if other.total <= 1.009 * fastest)


def test_a_tile_fills_the_multiprocessors() -> None:
    memory = InMemory(zero_copy_width=8192, pinned=True)
    plan = make_plan(
        problem(49_152, 49_152, 49_152, "float32"),
        Budgets(2 * GIB, 8 * GIB),
        default_model("cuda", 16),
        Layouts(memory, memory, memory),
    )
    assert plan.machine.wave_quantization("float32", plan.tile.m, plan.tile.n) < 1.005
    assert plan.tile.m % 32 == plan.tile.n % 32 == 0  # so that rows begin at multiples of 128 bytes


def test_narrow_tiles_of_pinned_arrays_are_tried_where_strips_do_not_fit() -> None:
    rows = InMemory(zero_copy_width=16_384, pinned=True)  # tiles of half a row are too narrow
    budgets, machine = Budgets(GIB, 8 * GIB), default_model("cuda", 16)
    plan = make_plan(problem(16_384, 16_384, 16_384), budgets, machine, Layouts(rows, rows, rows))
    assert plan.tile.m * plan.tile.n > 1024 * 2048


def test_a_tile_is_not_divided_into_many_strips() -> None:
    """A tile is downloaded in few blocks of rows, since each needs several operations.

    This holds although the host has room for few rows.
    """
    plan = make_plan(problem(8192, 8192, 16_384), Budgets(GIB, 384 * MIB), default_model("cuda", 16), STORED)
    assert -(-plan.tile.m // plan.slots.strip) <= 32


def test_a_plan_is_the_same_every_time() -> None:
    def once() -> Plan:
        planner._planned.cache_clear()
        return make_plan(problem(5000, 7000, 3000), Budgets(GIB, GIB), default_model("cuda", 16))

    assert once() == once()


@pytest.mark.parametrize("c", [Chunked(writing=Writing(free=True)), InMemory()])
def test_scarce_memory_gets_shallow_panels_not_tiny_tiles(c: Layout) -> None:
    """Deep panels suit the chunks better, but would leave room for tiny tiles only."""
    stored = Chunked((400, 400))
    budgets = Budgets(18 * MIB, 24 * MIB)
    plan = make_plan(
        problem(2400, 2400, 2400, "float32"), budgets, default_model("host", 2), Layouts(stored, stored, c)
    )
    assert plan.steps < 1000


def npy(rows: int, cols: int, op: Op = Op.N) -> Layout:
    return Lines(cols).oriented(op)


@pytest.mark.parametrize(
    ("trans_a", "trans_b", "cut"),
    [(Op.N, Op.T, "both along k"), (Op.N, Op.N, "B along n"), (Op.T, Op.T, "A along m")],
)
def test_panels_of_files_take_long_parts_of_rows(trans_a: Op, trans_b: Op, cut: str) -> None:
    m, n, k = 4000, 4000, 40_000
    p = changed(problem(m, n, k, "float64"), trans_a=trans_a, trans_b=trans_b)
    a = npy(k, m, trans_a) if trans_a.swaps else npy(m, k)
    b = npy(n, k, trans_b) if trans_b.swaps else npy(k, n)
    budgets, machine = Budgets(64 * MIB, 64 * MIB), default_model("host", 2)
    memory = InMemory()
    there, here = (make_plan(p, budgets, machine, Layouts(*of, memory)) for of in ((a, b), (memory, memory)))

    def reading(plan: Plan) -> float:
        tile, panels = plan.tile, plan.loads
        return sum(
            loaded / layout.read_rate(machine, panel)
            for loaded, layout, panel in (
                (panels.a_read, a, (tile.m, tile.k)),
                (panels.b_read, b, (tile.k, tile.n)),
            )
        )

    assert reading(there) < 0.6 * reading(here), cut


@pytest.mark.parametrize(
    "on",
    [
        Layouts(*(InMemory(),) * 3),
        Layouts(Chunked((1, 1000)), Chunked((1000, 1), contiguous=0)),
    ],
)
@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("m", [1, 16])
def test_panels_of_few_rows_are_deep(m: int, backend: str, on: Layouts) -> None:
    """Issuing operations is not the bottleneck."""
    machine = default_model(backend, 2)
    plan = make_plan(problem(m, 1, 1 << 26, "float32"), Budgets(4 * GIB, 4 * GIB), machine, on)
    lanes = plan.prediction.lanes
    assert lanes["issue"] <= max(lanes[lane] for lane in lanes if lane != "issue")


def test_chunks_are_read_whole_by_deep_panels() -> None:
    chunk = Chunked((4, 3000), partial_reads=False, decode_bytes=4 * 3000 * 4)
    on = Layouts(chunk, replace(chunk, read_chunk=(3000, 4)))
    plan = make_plan(problem(4, 4, 10**8, "float32"), Budgets(GIB, GIB), default_model("host", 2), on)
    assert plan.tile.k > max(shapes.DEPTHS)
    assert plan.tile.k % 3000 == 0


def test_a_search_does_not_end_in_a_shape_that_only_several_changes_improve() -> None:
    """From 1368 x 4096 x 4096, every single change makes this product slower."""
    memory = InMemory(itemsize=4, zero_copy_width=4096)
    of = problem(4096, 4096, 4096, "float32"), Budgets(70 * GIB, 60 * GIB), default_model("cuda", 16)
    plan, other = (
        make_plan(*of, Layouts(memory, memory, memory), tile=x) for x in (None, TileShape(1024, 4096, 4096))
    )
    assert plan.prediction.total <= 1.02 * other.prediction.total
