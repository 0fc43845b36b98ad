"""Products that several processes compute have the bits of one process. Errors come before any write."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.distributed import worker
from oocgemm.planning import Plan
from oocgemm.planning.parts.part import Part, divide
from tests.clusters import (
    THREADS,
    all_ended,
    children,
    content,
    environment,
    fresh,
    store_operands,
)
from tests.command import command, contents
from tests.suite import slow

EXTENT, TILE = 96, "24x16x16"
MEMORY = "400MiB"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with operands. Child processes multiply with one thread."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    store_operands(tmp_path, EXTENT)
    return tmp_path


def multiply(folder: Path, c: str = "C.zarr", **options: Any) -> oocgemm.Result:
    defaults: dict[str, Any] = {"tile": TILE, "memory": MEMORY, "backend": "host"}
    if not (folder / c).exists() and c.endswith(".zarr"):
        defaults["chunks"] = (8, 8)
    return oocgemm.gemm(folder / "A.zarr", folder / "B.zarr", folder / c, **(defaults | options))


def shuffled_parts(plan: Plan, workers: int) -> tuple[Part, ...]:
    """Divide a plan at random, and put the parts in random order."""
    rng = random.Random(repr(plan.problem))
    parts = list(divide(plan.grid, rng.randint(1, 4), rng.randint(1, 4)))
    rng.shuffle(parts)
    return tuple(parts)


@pytest.mark.parametrize(
    ("dtype", "c", "beta"),
    [
        ("float64", "C.zarr", 0),
        ("float32", "C.npy", 1),
        *slow(
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, c: str, beta: complex
) -> None:
    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    store_operands(tmp_path, EXTENT, dtype)
    found = []
    for workers in (1, 2):
        fresh(tmp_path, tmp_path / c, old=beta != 0)
        if workers == 2:
            monkeypatch.setattr("oocgemm.distributed.run.parts_of", shuffled_parts)
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


def content_of(folder: Path, **options: Any) -> bytes:
    fresh(folder, folder / "C.zarr", old=False)
    multiply(folder, **options)
    return content(folder / "C.zarr")


def test_a_complete_product_is_not_computed_again(here: Path) -> None:
    multiply(here, workers=1)
    before = contents(here / "C.zarr")
    multiply(here, workers=2, resume=True)
    assert contents(here / "C.zarr") == before


# Errors.


class Edited(Executor):
    """An executor whose probes give answers that a test has edited."""

    _max_workers = 2

    def __init__(self, *edits: dict[str, Any]) -> None:
        self._edits = list(edits)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="oocgemm-test")

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        edit = self._edits.pop(0) if self._edits else {}

        def call() -> Any:
            answer = function(*arguments, **named)
            return answer | edit

        return self._pool.submit(call)

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


GPU = {"backend": "cuda", "kernel": "cublas", "library": "H200, CUDA 13000"}


@pytest.mark.parametrize(
    ("edits", "error", "message"),
    [
        (
            [{"version": "0.0.9"}],
            oocgemm.InputError,
            r"worker 1 on \S+ has oocgemm 0.0.9, .* install the same",
        ),
        (
            [{"sees": None}],
            oocgemm.InputError,
            r"worker 1 on \S+ does not see \S+, where C would be: give paths",
        ),
        (
            [{}, GPU],
            oocgemm.InputError,
            r"worker 1 .* multiplies by host .*, worker 2 .* by cuda .*use workers",
        ),
        ([{}, {"available": 1 << 20}], oocgemm.BudgetError, "worker gets 1/2 of the host memory"),
        (
            [{"error": "BackendError", "message": "no NVIDIA device is visible", "fatal": False}],
            oocgemm.BackendError,
            r"worker 1 on \S+: no NVIDIA device is visible",
        ),
    ],
    ids=["version", "path", "arithmetic", "memory", "device"],
)
def test_workers_that_cannot_take_part_are_named_before_anything_is_written(
    here: Path, edits: list[dict[str, Any]], error: type[Exception], message: str
) -> None:
    before = contents(here)
    with Edited(*edits) as executor, pytest.raises(error, match=message):
        multiply(here, executor=executor, memory=None)
    assert contents(here) == before


def test_a_budget_that_a_worker_cannot_meet_is_refused(here: Path) -> None:
    before = contents(here)
    with (
        Edited({}, {"available": 1 << 20}) as executor,
        pytest.raises(oocgemm.OutOfMemoryError, match=r"2 workers on \S+ \(worker 2 is one of them\) need"),
    ):
        multiply(here, executor=executor)
    with pytest.raises(oocgemm.BudgetError, match="each worker gets 1/2 of the host memory"):
        multiply(here, workers=2, memory="40MiB")
    assert contents(here) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers = 0: a run needs at least 1"),
        ({"client": "tcp://nowhere:8786"}, "client has type str: pass a dask.distributed.Client"),
        ({"executor": "pool"}, "executor has type str: pass a concurrent.futures.Executor"),
        ({"executor": Executor()}, "Executor does not say how many workers it has: pass workers=N"),
        ({"executor": Executor(), "client": 1}, "client and executor both name workers"),
    ],
)
def test_workers_that_make_no_sense_are_refused(here: Path, options: dict[str, Any], message: str) -> None:
    before = contents(here)
    with pytest.raises(oocgemm.InputError, match=message):
        multiply(here, **options)
    assert contents(here) == before


def test_operands_in_memory_are_refused(here: Path) -> None:
    array = np.ones((4, 4))
    with pytest.raises(
        oocgemm.InputError, match="A is a ndarray, which other processes cannot read: store it"
    ):
        oocgemm.gemm(array, array, here / "C.zarr", workers=2)
    with pytest.raises(oocgemm.InputError, match=r"C would be in memory, .*: pass a local path"):
        oocgemm.gemm(here / "A.zarr", here / "B.zarr", workers=2)
    with pytest.raises(oocgemm.NotFoundError, match="B: there is nothing at"):
        oocgemm.gemm(here / "A.zarr", here / "no.zarr", here / "C.zarr", workers=2)


def test_a_damaged_operand_fails_with_its_worker_and_chunk(here: Path) -> None:
    (here / "A.zarr" / "c" / "0" / "0").write_bytes(b"damaged")
    with pytest.raises(
        oocgemm.ExecutionError, match=r"failed 3 times, .* worker \d: .*chunk c/0/0 in .*A.zarr"
    ):
        multiply(here, workers=2)
    assert all_ended(here)


FULL_DISK = """
import errno, os, sys
def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")
if "oocgemm.distributed.part" in sys.orig_argv:
    os.pwritev = full
"""


def test_a_full_disk_ends_the_run_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = here / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(FULL_DISK)  # Python imports it when a child process starts
    monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)
    before, began = contents(here), time.monotonic()
    with pytest.raises(
        oocgemm.ExecutionError, match=r"worker \d: .*No space left on device: C at .* Make room"
    ):
        multiply(here, workers=2)
    assert time.monotonic() - began < 30  # 10 s, on a machine with nothing else to do
    assert all_ended(here)
    assert contents(here) == before


@pytest.mark.slow
def test_a_plan_can_be_run_by_several_workers(here: Path) -> None:
    paths = [here / name for name in ("A.zarr", "B.zarr", "C.zarr")]
    plan = oocgemm.plan(*paths, tile=TILE, memory="150MiB", backend="host", chunks=(8, 8))
    assert plan.run(workers=2).plan.candidate == plan.candidate
    assert content(here / "C.zarr") == content_of(here, workers=1)


def test_options_that_name_workers_exclude_each_other(here: Path) -> None:
    paths = here / "A.zarr", here / "B.zarr", here / "C.zarr"
    done = command("run", *paths, "--workers", "2", "--scheduler", "tcp://127.0.0.1:1", "--backend", "host")
    assert (done.code, "exclude each other" in done.err) == (2, True)


# Faults.


def test_ctrl_c_ends_all_processes_and_leaves_a_product_that_can_be_resumed(here: Path) -> None:
    expected = content_of(here, workers=1)
    fresh(here, here / "C.zarr", old=False)
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
    done = start(here, "--resume", tile="8x8x8")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, out + err
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


def test_child_processes_end_soon_after_a_killed_coordinator_and_its_tiles_are_kept(here: Path) -> None:
    process = start(here, "--workers", "2", tile="8x8x8")
    wait_for_tiles(here / "C.zarr", 3)
    process.kill()
    process.communicate()
    assert all_ended(here)
    done = start(here, "--workers", "1", "--resume", tile="8x8x8")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, out + err
    assert content(here / "C.zarr") == content_of(here, workers=1, tile="8x8x8")


@pytest.mark.parametrize("stays", [True, False], ids=["after a retry", "after another run"])
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
        if self.stopped is None and function is worker.run and json.loads(arguments[0])["task"] == "part":
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
        return {"error": worker.DIED, "message": "the worker was lost", "fatal": False}

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


def _computes(process: Any, folder: Path) -> bool:
    """Tell whether a child process has the journal of this attempt open."""
    return any(Path(file.path) == folder / "journal" for file in process.open_files())
