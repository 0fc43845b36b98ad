"""A child process that has opened a GPU stays for another task. In these tests, one with a CPU stays, too."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def pids(here: Path) -> set[int]:
    return {process.pid for process in children(here)}


def test_child_processes_that_stay_compute_the_next_products(
    here: Path, stay: Stay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as executor:
        expected = content_of(here, executor=executor)
        assert all_ended(here)
        stay(60)
        assert content_of(here, executor=executor) == expected
        first = pids(here)
        assert len(first) == 2  # one had BLAS threads for the survey, the other one those for parts
        assert content_of(here, executor=executor) == expected
        assert pids(here) == first
    # They outlive the thread that started them.
    with ThreadPoolExecutor(1) as executor:
        assert content_of(here, executor=executor) == expected
        assert pids(here) == first
        # Those that were killed while they waited are replaced.
        killed = children(here)
        for process in killed:
            process.kill()
        psutil.wait_procs(killed, timeout=0.1)
        assert content_of(here, executor=executor) == expected
        second = pids(here)
        assert not second & first
        # Those with another environment or folder are not used.
        monkeypatch.setenv("OOCGEMM_OTHER", "1")
        content_of(here, executor=executor)
        third = pids(here)
        assert len(third) == 4
        monkeypatch.chdir(here)
        content_of(here, executor=executor)
        assert len(pids(here)) == 6
        assert second < third < pids(here)
    oocgemm.release()
    assert not pids(here)


def test_child_processes_end_when_no_task_comes(here: Path, stay: Stay) -> None:
    stay(0.5)
    with ThreadPoolExecutor(1) as executor:
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
