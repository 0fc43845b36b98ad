"""Processes that are interrupted, killed or stopped leave no other process, and do not damage C."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm.distributed import processes
from tests.support.clusters import all_ended, children, content, environment, fresh
from tests.support.small_runs import MEMORY, TILE, content_of, multiply, prepare
from tests.support.suite import slow

# Tiles that a process works on at a time, at most: it multiplies one and writes those before.
IN_FLIGHT = 4


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of C that an undisturbed worker stores with these tiles. All tests have equal operands."""
    with pytest.MonkeyPatch.context() as patch:
        return content_of(prepare(tmp_path_factory.mktemp("undisturbed"), patch), workers=1, tile="8x8x8")


def test_ctrl_c_ends_all_processes_and_leaves_a_product_that_can_be_resumed(
    here: Path, expected: bytes
) -> None:
    process = start(here, "--workers", "2", tile="8x8x8")
    wait_for_tiles(here / "C.zarr", 3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10  # 2 s, on a machine with nothing else to do
    assert process.returncode == 130, err
    assert err.splitlines()[-1].endswith("the same command with --resume computes the others")
    assert all_ended(here)
    # A run in one process can complete what several processes began.
    multiply(here, tile="8x8x8", resume=True)
    assert np.allclose(
        np.frombuffer(content(here / "C.zarr")), np.frombuffer(expected), rtol=1e-12, atol=1e-12
    )


def start(folder: Path, *options: str, tile: str = TILE, program: str = "") -> "subprocess.Popen[str]":
    """Start the command in a process. `program` is Python code that runs before it."""
    code = f"{program}\nfrom oocgemm.__main__ import process\nprocess()"
    paths = (str(folder / name) for name in ("A.zarr", "B.zarr", "C.zarr"))
    line = [sys.executable, "-c", code, "run", *paths, "--tile", tile, "--chunks", "8x8", "--quiet", *options]
    return subprocess.Popen(
        [*line, "--memory", MEMORY, "--backend", "host"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_tiles(c: Path, count: int) -> None:
    """Wait until the journal of C has this many tiles."""
    journal, until = c / ".oocgemm" / "journal", time.monotonic() + 60
    while time.monotonic() < until:
        if journal.exists() and journal.read_bytes().count(b'{"done"') >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no tile was finished in 60 s")


def test_child_processes_end_soon_after_a_killed_coordinator_and_its_tiles_are_kept(
    here: Path, expected: bytes
) -> None:
    process = start(here, "--workers", "2", tile="8x8x8")
    wait_for_tiles(here / "C.zarr", 3)
    process.kill()
    process.communicate()
    assert all_ended(here)
    multiply(here, workers=1, tile="8x8x8", resume=True)
    assert content(here / "C.zarr") == expected


def test_a_kill_costs_only_the_tiles_in_flight(here: Path) -> None:
    """A child process dies when a third of C is done. Only tiles that were not done are computed again."""
    seen: list[Any] = []

    def progress(plan: Any) -> Any:
        def observe(span: Any) -> None:
            seen.append(span.tile)
            if len(seen) == plan.tiles.count // 3:
                (child,) = children(here)
                child.kill()

        return observe

    result = multiply(here, workers=1, tile="8x8x8", progress=progress)
    (worker,) = result.timeline.header["workers"]
    lost, last = worker["parts"]
    assert (lost["lost"], last["lost"]) == (True, False)
    computed = {span.tile for span in result.timeline.spans if span.id >= last["first"]}
    assert len(seen) == len(set(seen)) == result.plan.tiles.count
    assert not computed & set(seen[: result.plan.tiles.count // 3])
    assert len(lost["thrown_away"]) <= IN_FLIGHT


@pytest.mark.parametrize("stays", [False, *slow([True])], ids=["after another run", "after a retry"])
def test_a_process_that_was_stopped_cannot_damage_c(here: Path, stays: bool) -> None:
    """A child process is stopped, its worker counts as lost, and another one computes the part.

    Then the process goes on. With `stays` false, another product is stored in C before that.
    """
    expected = content_of(here, workers=1)
    fresh(here, here / "C.zarr", old=False)
    executor = Losing()
    with executor:
        try:
            multiply(here, executor=executor)
            assert content(here / "C.zarr") == expected
            assert executor.stopped is not None
            if not stays:
                multiply(here, alpha=2, overwrite=True)
                expected = content(here / "C.zarr")
        finally:
            if executor.stopped is not None:
                executor.stopped.send_signal(signal.SIGCONT)
        assert all_ended(here)
    assert content(here / "C.zarr") == expected


class Losing(Executor):
    """An executor that stops the first child process that computes a part, and says that its worker died."""

    _max_workers = 2

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="oocgemm-test")
        self.stopped: Any = None

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        if self.stopped is None and function is processes.run and json.loads(arguments[0])["task"] == "part":
            self.stopped = False
            return self._pool.submit(self._lose, function, arguments[0])
        return self._pool.submit(function, *arguments, **named)

    def _lose(self, function: Any, text: str) -> Any:
        self._pool.submit(function, text)
        folder = Path(json.loads(text)["folder"])
        until = time.monotonic() + 60
        while not (folder / "journal").exists() and time.monotonic() < until:
            time.sleep(0.001)
        (self.stopped,) = [
            p for p in children(folder.parents[3]) if (folder.exists() and _computes(p, folder))
        ]
        self.stopped.suspend()
        return {"error": processes.DIED, "message": "the worker was lost", "fatal": False}

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


def _computes(process: Any, folder: Path) -> bool:
    """Tell whether a child process has the journal of this attempt open."""
    return any(Path(file.path) == folder / "journal" for file in process.open_files())
