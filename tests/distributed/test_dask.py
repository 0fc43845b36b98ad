"""Products on the workers of dask clusters that are started by hand, as users start them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.distributed import crew
from tests.support.clusters import (
    all_ended,
    children,
    cluster,
    content,
    environment,
    fresh,
    processes,
    store_operands,
)
from tests.support.command import command, contents
from tests.support.small_runs import EXTENT, MEMORY, TILE, multiply

distributed = pytest.importorskip("distributed")

# Errors must come within 10 s on a machine with nothing else to do. Tests run beside others.
MAX_SECONDS = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cluster")
    store_operands(found, EXTENT)
    return found


@pytest.fixture(scope="module")
def scheduler(folder: Path) -> Iterator[Path]:
    with cluster(folder, 2, "--no-nanny") as file:  # slow tests have workers with nannies
        yield file


@pytest.fixture
def client(scheduler: Path) -> Iterator[Any]:
    with distributed.Client(scheduler_file=str(scheduler), set_as_default=False) as found:
        found.wait_for_workers(2, timeout=60)
        yield found


def test_the_workers_of_a_client_compute(folder: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    found = []
    for options in ({"workers": 1}, {"client": client}):
        fresh(folder, folder / "C.zarr", old=True)
        multiply(folder, beta=1, tile="16x16x16", **options)
        found.append(content(folder / "C.zarr"))
    assert found[0] == found[1]
    assert all_ended(folder)


def test_the_command_line_uses_the_workers_of_a_scheduler(
    folder: Path, scheduler: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # workers have other working directories, and paths may be relative
    fresh(folder, folder / "D.zarr", old=False)
    options = ["--tile", TILE, "--memory", MEMORY, "--chunks", "8x8", "--backend", "host"]
    done = command("run", "A.zarr", "B.zarr", "D.zarr", "--scheduler-file", scheduler, "--json", *options)
    assert done.code == 0, done.err
    assert done.json()["report"]["flops"] == 2 * EXTENT**3
    a, b = (zarr.open_array(folder / f"{name}.zarr", mode="r")[:] for name in "AB")
    d = zarr.open_array(folder / "D.zarr", mode="r")[:]
    assert np.allclose(d, np.asarray(a) @ np.asarray(b))


@pytest.mark.slow
def test_a_worker_that_joins_takes_part_and_one_that_vanishes_is_replaced(tmp_path: Path) -> None:
    extent = 960
    store_operands(tmp_path, extent)
    with cluster(tmp_path, 1) as file, distributed.Client(scheduler_file=str(file)) as client:
        client.wait_for_workers(1, timeout=60)
        (first,) = client.scheduler_info()["workers"]
        seen: list[Any] = []

        def progress(plan: Any) -> Any:
            def observe(span: Any) -> None:
                seen.append(span)
                if len(seen) == 3:  # the nanny starts another worker, with another address
                    (one,) = processes(tmp_path, "multiprocessing", "spawn_main")
                    one.kill()

            return observe

        multiply(tmp_path, client=client, tile="80x80x80", chunks=(80, 80), progress=progress)
        assert first not in client.scheduler_info()["workers"]
    assert len(seen) == (extent // 80) ** 2
    assert not children(tmp_path)


@pytest.mark.slow
def test_a_worker_that_is_stopped_until_the_scheduler_drops_it_cannot_damage_c(tmp_path: Path) -> None:
    """A worker and its child process are stopped. When another worker computes their part, both go on."""
    extent = 960
    # With many steps, a part takes far longer than it takes to notice that one of its tiles is written.
    options: dict[str, Any] = {"tile": "40x40x40", "chunks": (40, 40)}
    store_operands(tmp_path, extent)
    multiply(tmp_path, workers=1, **options)
    c = tmp_path / "C.zarr"
    expected = content(c)
    fresh(tmp_path, c, old=False)
    dropped = threading.Event()

    def stop_until_dropped(scheduler: Any) -> None:
        until = time.monotonic() + 60
        while not any(c.glob("c/*/*")) and time.monotonic() < until:
            time.sleep(0.002)
        child = children(tmp_path)[0]
        # The parent of a child process is a worker: without a nanny, there is no other process.
        stopped = [child, child.parent()]
        for process in stopped:
            process.suspend()
        while len(scheduler.scheduler_info()["workers"]) == 2 and time.monotonic() < until:
            time.sleep(0.05)
        if len(scheduler.scheduler_info()["workers"]) == 1:
            dropped.set()
        for process in stopped:
            process.resume()

    ttl = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "2s"}
    with (
        cluster(tmp_path, 2, "--no-nanny", **ttl) as file,
        distributed.Client(scheduler_file=str(file), set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        thread = threading.Thread(target=stop_until_dropped, args=(client,))
        thread.start()
        result = multiply(tmp_path, client=client, **options)
        thread.join()
        assert content(c) == expected
        assert dropped.is_set()
        assert any(part["lost"] for one in result.timeline.header["workers"] for part in one["parts"])
        assert all_ended(tmp_path)
    assert content(c) == expected


def test_a_scheduler_without_workers_is_refused(tmp_path: Path) -> None:
    store_operands(tmp_path, EXTENT)
    with (
        cluster(tmp_path, 0) as file,
        distributed.Client(scheduler_file=str(file), set_as_default=False) as client,
    ):
        names = sorted(path.name for path in tmp_path.iterdir())
        before = time.monotonic()
        with pytest.raises(oocgemm.InputError, match="scheduler has no worker: start one with dask worker"):
            multiply(tmp_path, client=client)
        assert time.monotonic() - before < MAX_SECONDS
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_scheduler_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "MAX_CONNECT", 1.0)
    store_operands(tmp_path, EXTENT)
    before, began = contents(tmp_path), time.monotonic()
    paths = [tmp_path / name for name in ("A.zarr", "B.zarr", "C.zarr")]
    done = command("run", *paths, "--scheduler", "tcp://127.0.0.1:9", "--backend", "host")
    assert done.code == 2
    assert "no dask scheduler at tcp://127.0.0.1:9 answers" in done.err
    assert time.monotonic() - began < MAX_SECONDS
    assert contents(tmp_path) == before
