"""Products that several processes compute have the bits of one process."""

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.planning import Plan
from oocgemm.planning.partition import Partition, divide, partition
from tests.support.clusters import (
    THREADS,
    all_ended,
    content,
    fresh,
    store_operands,
)
from tests.support.command import contents
from tests.support.small_runs import EXTENT, MEMORY, TILE, content_of, multiply, prepare
from tests.support.staying import Stay
from tests.support.suite import slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


def shuffled(plan: Plan, workers: int, **options: Any) -> Partition:
    """Divide a plan at random, and put the parts in random order."""
    rng = random.Random(repr(plan.problem))
    parts = list(divide(plan.grid, rng.randint(2, 3), rng.randint(1, 3)))
    rng.shuffle(parts)
    return replace(partition(plan, workers, keep_tile=True), parts=tuple(parts))


@pytest.mark.parametrize(
    ("dtype", "c", "beta"),
    [
        ("float32", "C.npy", 1),
        *slow(
            ("float64", "C.zarr", 0),
            ("float64", "C.zarr", 1),
            ("float64", "C.npy", 0),
            ("float64", "C.npy", -0.5),
            ("float32", "C.zarr", 0),
            ("float16", "C.zarr", 0),
            ("float16", "C.zarr", 1),
            ("complex64", "C.zarr", 1),
            ("complex128", "C.zarr", 0),
            ("complex128", "C.npy", 1j),
            ("int8", "C.zarr", 0),
        ),
    ],
)
def test_parts_in_any_order_give_the_bits_of_one_process(
    tmp_path: Path, stay: Stay, monkeypatch: pytest.MonkeyPatch, dtype: str, c: str, beta: complex
) -> None:
    stay(60)
    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    store_operands(tmp_path, EXTENT, dtype)
    found = []
    for workers in (1, 2):
        fresh(tmp_path, tmp_path / c, old=beta != 0)
        if workers == 2:
            monkeypatch.setattr("oocgemm.distributed.distribute.partition", shuffled)
        multiply(tmp_path, c, beta=beta, workers=workers)
        found.append(content(tmp_path / c))
    assert found[0] == found[1]


@pytest.mark.parametrize("verify", [False, *(pytest.param(True, marks=pytest.mark.slow),)])
def test_integers_are_exact_and_every_tile_is_reported_once(here: Path, verify: bool) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-9, 10, (EXTENT, EXTENT)).astype(np.float64) for _ in range(2))
    np.save(here / "a.npy", a)
    np.save(here / "b.npy", b)
    seen = []

    def progress(plan: Plan) -> Callable[[Any], None]:
        return lambda span: seen.append(span.tile)

    result = oocgemm.gemm(
        here / "a.npy",
        here / "b.npy",
        here / "C.zarr",
        trans_a="T",
        alpha=2,
        workers=2,
        tile=TILE,
        memory=MEMORY,
        backend="host",
        verify=verify,
        progress=progress,
        timeline=here / "log.jsonl",
    )
    assert np.array_equal(np.asarray(result), 2 * a.T @ b)
    down, across = result.plan.grid.shape
    assert sorted(seen) == [(i, j) for i in range(down) for j in range(across)]
    assert result.report.flops == result.plan.flops
    assert oocgemm.report(here / "log.jsonl").flops == result.plan.flops
    assert all_ended(here)


def test_an_executor_of_the_caller_computes(here: Path) -> None:
    expected = content_of(here, workers=1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert content_of(here, executor=executor) == expected


def test_a_complete_product_is_not_computed_again(here: Path) -> None:
    multiply(here)
    before = contents(here / "C.zarr")
    multiply(here, workers=2, resume=True)
    assert contents(here / "C.zarr") == before


@pytest.mark.slow
def test_a_plan_can_be_run_by_several_workers(here: Path) -> None:
    paths = [here / name for name in ("A.zarr", "B.zarr", "C.zarr")]
    plan = oocgemm.plan(*paths, tile=TILE, memory="150MiB", backend="host", chunks=(8, 8))
    assert plan.run(workers=2).plan.candidate == plan.candidate
    assert content(here / "C.zarr") == content_of(here, workers=1)


def test_a_dry_run_returns_the_plan_of_the_workers(here: Path) -> None:
    paths = [here / name for name in ("A.zarr", "B.zarr", "C.zarr")]
    options: dict[str, Any] = {"backend": "host", "memory": "600MiB", "workers": 3}
    plan = oocgemm.gemm(*paths, dry_run=True, **options)
    assert not paths[2].exists()
    assert plan.workers is not None
    assert plan.workers.available == 3
    assert f"workers: {plan.workers.workers} of 3 workers used" in str(plan)
    assert plan.footprint.host_total + plan.footprint.device_total <= 200 << 20
    result = oocgemm.gemm(*paths, **options)
    assert (result.plan.tile, result.plan.budgets.host) == (plan.tile, plan.budgets.host)
    gram = oocgemm.gram(here / "A.zarr", here / "G.zarr", dry_run=True, **options | {"tile": "16x16x16"})
    assert gram.workers is not None
    assert [part.rows for part in gram.workers.parts] == [(3, 5), (0, 3), (5, 6)]
    with pytest.raises(oocgemm.CombinationError, match="C would be in memory"):
        oocgemm.gemm(*paths[:2], dry_run=True, **options)
