"""The search for a plan takes a bounded number of steps, however large the product is."""

import importlib
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from oocgemm.planning import Budgets, Chunked, Layouts, Writing, default_model, make_plan
from oocgemm.planning.cost import clock as clock_of
from oocgemm.planning.schedule.placement import SlotCache
from oocgemm.planning.search import planner, shapes
from tests.support.plan_cases import GIB, MIB, STORED, problem
from tests.support.suite import each_value, slow

plan_module: Any = importlib.import_module("oocgemm.planning.plan")


def test_counting_traffic_does_not_walk_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = SlotCache.acquire, 0

    def counted(self: SlotCache, key: tuple[int, int], next_use: int) -> tuple[int, bool]:
        nonlocal calls
        calls += 1
        return original(self, key, next_use)

    monkeypatch.setattr(SlotCache, "acquire", counted)
    case = problem(400_000, 400_000, 400_000, "float32")
    plan = make_plan(case, Budgets(GIB, 8 * GIB), default_model("cuda", 16))
    assert plan.steps > 50_000
    assert plan.traffic["h2d"] > 0
    assert calls < plan.steps


def test_leaving_hopeless_shapes_out_never_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = default_model("cuda", 16)
    cases = [
        (problem(m, n, k), Budgets(device * GIB, 3 * device * GIB))
        for m, n, k in ((32_768, 32_768, 524_288), (50_000, 9_000, 20_000), (16_384, 16_384, 16_384))
        for device in (1, 8)
    ]
    plans = [make_plan(p, budgets, machine, STORED) for p, budgets in cases]
    monkeypatch.setattr(shapes, "HOPELESS", float("inf"))
    planner._planned.cache_clear()
    for plan, (p, budgets) in zip(plans, cases, strict=True):
        every = make_plan(p, budgets, machine, STORED)
        assert every.candidate == plan.candidate


@pytest.mark.parametrize(
    ("extents", "budgets", "backend"),
    [
        ((10**7, 10**7, 10**7), (64 * MIB, 64 * MIB), "host"),
        *slow(
            ((10**7, 10**7, 3), (64 * MIB, 64 * MIB), "host"),
            ((10**6, 10**6, 10**7), (GIB, 50 * GIB), "cuda"),  # one operand has thousands of buffers
        ),
    ],
)
def test_planning_is_bounded_however_many_tiles_there_are(
    extents: tuple[int, int, int], budgets: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = SlotCache.acquire, 0

    def counted(self: SlotCache, key: tuple[int, int], next_use: int) -> tuple[int, bool]:
        nonlocal calls
        calls += 1
        return right(self, key, next_use)

    monkeypatch.setattr(SlotCache, "acquire", counted)
    monkeypatch.setattr(plan_module, "MAX_COUNTED", 20_000)
    p = problem(*extents, "float32")
    if extents[2] > 3:  # tracing makes a plan of thin tiles, which are many, take minutes
        tracemalloc.start()
    plan = make_plan(p, Budgets(*budgets), default_model(backend, 2))
    plan.to_dict()
    _, peak = tracemalloc.get_traced_memory()  # zeros if nothing is traced
    tracemalloc.stop()
    assert plan.steps > 10**7
    assert calls < 100_000
    assert peak < 50 * MIB


def test_the_search_counts_what_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of small tiles, the clock runs most. Running hundreds of candidates took half a minute."""
    ran = list[int]()

    def counted(*given: Any) -> Any:
        found = clock_of.predict(*given)
        ran.append(found.ran)
        return found

    monkeypatch.setattr(planner, "predict", counted)
    monkeypatch.setattr(planner, "_faster", lambda plan: None)
    make_plan(problem(131_072, 131_072, 1024), Budgets(160 * MIB, 128 * MIB), default_model("cuda", 16))
    assert len(ran) > 1
    assert sum(ran[:-1]) * planner.OPERATION_SECONDS < planner.MAX_EFFORT


@pytest.mark.parametrize("device", [64 * MIB, 200 * MIB])
def test_loads_too_many_to_count_are_nearly_as_counted(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(problem(100_000, 100_000, 100_000), Budgets(device, 200 * MIB), default_model("host", 2))
    half = frozenset(tile for tile in plan.schedule().tiles if tile[0] < plan.grid.shape[0] // 2)
    for p in (plan, replace(plan, done=half)):
        counted = p.schedule().loads()
        monkeypatch.setattr(plan_module, "MAX_COUNTED", 0)
        assert p.loads.a_read == pytest.approx(counted.a_read, rel=0.01)
        assert p.loads.b_read == pytest.approx(counted.b_read, rel=0.01)


@each_value
@pytest.mark.parametrize(
    ("extents", "budgets", "chunk"),
    [
        ((264_582, 28_434, 12_871), (2 * GIB, GIB), 2048),
        ((23_293, 169_879, 28_683), (2 * GIB, GIB), 2048),
        ((60_076, 150_308, 48_282), (256 * MIB, 512 * MIB), 1000),
        ((16_384, 16_384, 16_384), (GIB, 3 * GIB), 1000),
        ((2283, 1172, 13_012), (128 * MIB, 256 * MIB), 1000),
    ],
)
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_estimated_loads_are_as_near_as_the_plan_says(
    extents: tuple[int, int, int],
    budgets: tuple[int, int],
    chunk: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where panels and tiles do not divide the product, loads differ from the count by more than 1%."""
    layout = Chunked((chunk, chunk), decode_bytes=8 * chunk * chunk)
    layouts = Layouts(layout, layout, Chunked(writing=Writing(free=True)))
    plan = make_plan(problem(*extents), Budgets(*budgets), default_model(backend, 8), layouts)
    counted = plan.schedule().loads()
    monkeypatch.setattr(plan_module, "MAX_COUNTED", 0)
    found = plan.loads
    assert found.a_read + found.b_read == pytest.approx(counted.a_read + counted.b_read, rel=0.2)
    assert found.a_up + found.b_up == pytest.approx(counted.a_up + counted.b_up, rel=0.2)
    for name in ("a_read", "b_read", "a_up", "b_up"):
        assert 1 / 7 < getattr(found, name) / getattr(counted, name) < 7
