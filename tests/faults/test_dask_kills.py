"""A process is killed in the middle of a product on a dask cluster: the product continues, or is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import oocgemm
from oocgemm.distributed import coordinator
from tests.support.backends_here import needs_gpu
from tests.support.clusters import all_ended, children, cluster, content, fresh, processes, store_operands
from tests.support.small_runs import multiply
from tests.support.suite import slow

distributed = pytest.importorskip("distributed")

EXTENT, TILE = 240, 40
TILES = (EXTENT // TILE) ** 2
SEEN = 3  # tiles that are finished when the process is killed
Found = Callable[[], psutil.Process]
BACKENDS = ["host", pytest.param("cuda", marks=needs_gpu)]


def product(folder: Path, backend: str, **options: Any) -> oocgemm.Result:
    given: dict[str, Any] = {"tile": f"{TILE}x{TILE}x{TILE}", "backend": backend}
    given |= {"memory": "400MiB"} if backend == "host" else {"memory": None, "device_memory": "200MiB"}
    return multiply(folder, **(given | options))


class Killing:
    """Progress of a run that kills a process when `SEEN` tiles are finished."""

    def __init__(self, find: Found) -> None:
        self._find = find
        self.killed: psutil.Process | None = None
        self.tiles = 0

    def __call__(self, plan: Any) -> Any:
        def observe(span: Any) -> None:
            self.tiles += 1
            if self.tiles == SEEN:
                self.killed = self._find()
                self.killed.kill()

        return observe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store_operands(tmp_path, EXTENT)
    return tmp_path


def child_of(folder: Path) -> Found:
    """Return what finds a process that computes a part."""
    return lambda: children(folder)[0]


def worker_of(folder: Path) -> Found:
    """Return what finds a worker whose child process computes a part. Workers have no nannies here."""
    return lambda: children(folder)[0].parent() or processes(folder, "dask_worker")[0]


@pytest.mark.parametrize("victim", [worker_of, *slow([child_of])])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_continues_when_a_process_is_killed_and_fails_without_workers(
    folder: Path,
    backend: str,
    victim: Callable[[Path], Found],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = folder / "C.zarr"
    product(folder, backend, workers=1)
    expected = content(c)
    fresh(folder, c, old=False)
    killing = Killing(victim(folder))
    with (
        cluster(folder, 2, "--no-nanny") as file,
        distributed.Client(scheduler_file=str(file), set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        product(folder, backend, client=client, progress=killing)
        assert content(c) == expected
        assert killing.killed is not None
        assert "failed (attempt 1)" in caplog.text
        assert killing.tiles == TILES  # none is finished twice
        assert all_ended(folder)
        if victim is child_of:
            return
        # The worker that is left is killed during the next product, which is resumed without a cluster.
        fresh(folder, c, old=False)
        monkeypatch.setattr(coordinator, "MAX_ALONE", 1.0)
        with pytest.raises(
            oocgemm.ExecutionError, match="no worker has been left for 1 s: start one with dask worker"
        ):
            product(folder, backend, client=client, progress=Killing(worker_of(folder)))
    assert all_ended(folder)
    result = product(folder, backend, workers=1, resume=True)
    assert content(c) == expected
    assert len(result.plan.done) >= SEEN
