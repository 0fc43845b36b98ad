"""Plans of products whose A, B and C are pinned arrays."""

import pickle
from dataclasses import replace

import pytest

from oocgemm.engine.executor import is_brief, is_short
from oocgemm.planning import Budgets, InMemory, Layouts, Plan, TileShape, default_model, make_plan
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.search.slot_counts import STRIP_WAVES, TENSOR_BLOCK
from tests.support.plan_cases import GIB, problem

GPU = default_model("cuda", 16)


def planned(
    m: int, n: int, k: int, dtype: str, *, pinned: bool = True, tile: TileShape | None = None
) -> Plan:
    p = problem(m, n, k, dtype)
    a, b, c = (
        InMemory(itemsize=p.itemsizes[x], zero_copy_width=min(1024, cols), pinned=pinned)
        for x, cols in (("A", k), ("B", n), ("C", n))
    )
    return make_plan(p, Budgets(8 * GIB, 8 * GIB), GPU, Layouts(a, b, c), tile)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strips_keep_tensor_cores_busy(dtype: str) -> None:
    plan = planned(20480, 20480, 20480, dtype)
    assert (plan.tile.n, plan.tile.k) == (20480, 20480)
    assert plan.tile.m <= 4096
    waves = plan.slots.strip * plan.tile.n / (GPU.multiprocessors * TENSOR_BLOCK)
    assert STRIP_WAVES <= waves < 2 * STRIP_WAVES


def test_a_vector_is_multiplied_in_several_steps() -> None:
    """The last one, which nothing hides, is short then."""
    plan = planned(65536, 1, 16384, "float32")
    assert plan.steps > 2


def test_brief_products_stay_in_the_thread_of_the_caller() -> None:
    assert is_brief(planned(2048, 2048, 2048, "float64"))
    assert not is_brief(planned(2048, 2048, 2048, "float64", pinned=False))
    assert not is_brief(planned(32768, 32768, 32768, "float64"))


def test_many_steps_of_pinned_arrays_are_enqueued_by_one_thread() -> None:
    """In the threads of a long run, each operation would take longer than the GPU takes for it."""
    tile = TileShape(1024, 2048, 2048)
    plan = planned(196608, 2048, 2048, "float64", tile=tile)
    assert plan.steps == 192
    assert is_short(plan)
    assert is_brief(plan)
    assert not is_short(planned(196608, 2048, 2048, "float64", pinned=False, tile=tile))


def test_the_hash_of_a_setting_stays_in_its_process() -> None:
    """It is computed from texts, whose hashes differ from process to process."""
    setting = planned(2048, 2048, 2048, "float64").setting
    copied = pickle.loads(pickle.dumps(setting))
    assert hash(setting) == hash(replace(setting))
    assert "_hash" in vars(setting)
    assert "_hash" not in vars(copied)
    assert copied == setting


def copying(plan: Plan, rows: int, cols: int) -> float:
    """Return the rate at which a block of A is uploaded, relative to the link."""
    return Prices(plan.setting).rate("h2d", "A", rows, cols) / plan.machine.h2d


def test_short_rows_of_wide_arrays_are_copied_slowly_while_the_gpu_multiplies() -> None:
    """Measured: 16 KiB of rows of 128 KiB at half the rate, of rows of 64 KiB at nearly the full one."""
    busy = planned(16384, 16384, 16384, "float64")
    assert copying(busy, 1024, 16384) == 1
    assert copying(busy, 1024, 2048) == pytest.approx(0.5)
    assert copying(busy, 1024, 8192) > 0.95
    idle = planned(16384, 8, 16384, "float64")
    assert 0.8 < copying(idle, 1024, 2048) < 0.9
    assert copying(planned(8192, 8192, 8192, "float64"), 1024, 2048) > 0.85
    rates = [copying(busy, 1024, cols) for cols in range(16, 16385, 16)]
    assert rates == sorted(rates)


def test_outer_products_have_long_rows_where_memory_is_scarce() -> None:
    """Short parts of rows of C would be copied at less than half the rate."""
    p, budgets = problem(10304, 37272, 128, "bfloat16"), Budgets(GIB // 4, 8 * GIB)
    a, c = (InMemory(itemsize=2, zero_copy_width=width, pinned=True) for width in (128, 16384))
    layouts = Layouts(a, c, c)
    plan = make_plan(p, budgets, GPU, layouts)
    assert plan.tile.n >= 16384
    whole = (make_plan(p, budgets, GPU, layouts, TileShape(m, p.n, p.k)) for m in (368, 448, 576))
    assert plan.prediction.total <= 1.02 * min(one.prediction.total for one in whole)


def test_tiles_of_wide_arrays_have_long_rows() -> None:
    """With panels of 2048 columns, 16384^3 took 275 ms on an H100, with panels of 4096 columns 209 ms."""
    n = 16384
    layout = InMemory(itemsize=8, zero_copy_width=1024, pinned=True)
    p, budgets = problem(n, n, n), Budgets(GIB, 8 * GIB)
    plan = make_plan(p, budgets, GPU, Layouts(layout, layout, layout))
    assert plan.tile.k >= 4096
    assert plan.tile.n >= 4096
