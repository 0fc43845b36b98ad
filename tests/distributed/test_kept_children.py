"""A child process that has opened a GPU stays for another task. In these tests, one with a CPU stays, too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import oocgemm
from oocgemm.distributed import processes
from oocgemm.distributed.processes import EXIT_IDLE
from tests.support.clusters import all_ended, children, environment
from tests.support.small_runs import content_of, prepare
from tests.support.staying import Stay

# A program that multiplies twice, and prints the number of its child processes.
RUN = """
import sys, psutil, oocgemm
for alpha in (1, 2):
    oocgemm.gemm(*sys.argv[1:], workers=1, backend="host", memory="400MiB", alpha=alpha, overwrite=alpha > 1)
print(len(psutil.Process().children()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def pids(here: Path) -> set[int]:
    return {process.pid for process in children(here)}


def test_child_processes_that_stay_compute_the_next_product(
    here: Path, stay: Stay, executor: Executor
) -> None:
    expected = content_of(here, executor=executor)
    assert all_ended(here)
    stay(60)
    assert content_of(here, executor=executor) == expected
    first = pids(here)
    assert len(first) == 2  # one had BLAS threads for the survey, the other one those for parts
    assert content_of(here, executor=executor) == expected
    assert pids(here) == first


def test_child_processes_that_were_killed_while_they_waited_are_replaced(
    here: Path, stay: Stay, executor: Executor
) -> None:
    stay(60)
    expected = content_of(here, executor=executor)
    first = children(here)
    for process in first:
        process.kill()
    psutil.wait_procs(first, timeout=0.1)
    assert content_of(here, executor=executor) == expected
    assert not pids(here) & {process.pid for process in first}


def test_child_processes_end_when_no_task_comes(here: Path, stay: Stay, executor: Executor) -> None:
    stay(0.5)
    expected = content_of(here, executor=executor)
    assert all_ended(here)
    assert content_of(here, executor=executor) == expected


def test_a_task_that_comes_too_late_is_done_by_another_process(
    here: Path, stay: Stay, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay(0.2)
    waiting = processes.Child(processes.environment_with({}))
    assert waiting.wait() == EXIT_IDLE
    found = [waiting]  # it was alive when it was taken
    monkeypatch.setattr(processes, "take", lambda _: found.pop() if found else None)
    assert processes.run('{"task": "probe", "nonce": ""}')["error"] == processes.DIED  # by the other process
    assert not found


def test_child_processes_outlive_the_thread_that_started_them(here: Path, stay: Stay) -> None:
    stay(60)
    with ThreadPoolExecutor(1) as found:
        expected = content_of(here, executor=found)
    first = pids(here)
    with ThreadPoolExecutor(1) as found:
        assert content_of(here, executor=found) == expected
    assert pids(here) == first
    oocgemm.release()
    assert not pids(here)


def test_child_processes_that_stay_end_with_the_process_that_started_them(here: Path, stay: Stay) -> None:
    stay(60)
    done = subprocess.run(
        (sys.executable, "-c", RUN, here / "A.zarr", here / "B.zarr", here / "C.zarr"),
        env=environment(here) | {"PYTHONPATH": os.environ["PYTHONPATH"]},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2"]
    assert all_ended(here)


def test_a_child_process_with_another_environment_or_folder_is_not_used(
    here: Path, stay: Stay, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay(60)
    content_of(here, executor=executor)
    first = pids(here)
    monkeypatch.setenv("OOCGEMM_OTHER", "1")
    content_of(here, executor=executor)
    second = pids(here)
    assert len(second) == 4
    monkeypatch.chdir(here)
    content_of(here, executor=executor)
    assert len(pids(here)) == 6
    assert first < second < pids(here)
