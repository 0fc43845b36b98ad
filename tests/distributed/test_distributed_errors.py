"""Workers, operands and options that cannot be used are refused, most of them before anything is written."""

import os
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from tests.support.clusters import (
    all_ended,
)
from tests.support.command import command, contents
from tests.support.small_runs import multiply, prepare
from tests.support.staying import Stay


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


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


# What probes answer instead, the error, and its text.
UNFIT: dict[str, tuple[list[dict[str, Any]], type[Exception], str]] = {
    "version": (
        [{"version": "0.0.9"}],
        oocgemm.InputError,
        r"worker 1 on \S+ has oocgemm 0.0.9, .* install the same",
    ),
    "path": (
        [{"sees": None}],
        oocgemm.InputError,
        r"worker 1 on \S+ does not see \S+, where C would be: give paths",
    ),
    "arithmetic": (
        [{}, GPU],
        oocgemm.InputError,
        r"worker 1 .* multiplies by host .*, worker 2 .* by cuda .*use workers",
    ),
    "memory": ([{}, {"available": 1 << 20}], oocgemm.BudgetError, "worker gets 1/2 of the host memory"),
    "device": (
        [{"error": "BackendError", "message": "no NVIDIA device is visible", "fatal": False}],
        oocgemm.BackendError,
        r"worker 1 on \S+: no NVIDIA device is visible",
    ),
}


def test_workers_that_cannot_take_part_are_named_before_anything_is_written(
    here: Path, stay: Stay, subtests: pytest.Subtests
) -> None:
    stay(60)
    before = contents(here)
    for name, (edits, error, message) in UNFIT.items():
        with subtests.test(name):
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


NO_WORKERS: list[tuple[dict[str, Any], str]] = [
    ({"workers": 0}, "workers = 0: a run needs at least 1"),
    ({"client": "tcp://nowhere:8786"}, "client has type str: pass a dask.distributed.Client"),
    ({"executor": "pool"}, "executor has type str: pass a concurrent.futures.Executor"),
    ({"executor": Executor()}, "Executor does not say how many workers it has: pass workers=N"),
    ({"executor": Executor(), "client": 1}, "client and executor both name workers"),
]


def test_workers_that_make_no_sense_are_refused(here: Path) -> None:
    before = contents(here)
    for options, message in NO_WORKERS:
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
if "oocgemm.distributed.child" in sys.orig_argv:
    os.pwritev = full
"""


def test_a_full_disk_ends_the_run_at_once(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path_factory.mktemp("code")
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


def test_options_that_name_workers_exclude_each_other(here: Path) -> None:
    paths = here / "A.zarr", here / "B.zarr", here / "C.zarr"
    done = command("run", *paths, "--workers", "2", "--scheduler", "tcp://127.0.0.1:1", "--backend", "host")
    assert (done.code, "exclude each other" in done.err) == (2, True)
