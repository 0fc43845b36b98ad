"""A child process that has opened a GPU stays for another task. In these tests, one with a CPU stays, too."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from oocgemm.distributed import child, worker
from oocgemm.distributed.watchdog import EXIT_IDLE
from tests.clusters import all_ended, children
from tests.small_runs import content_of, prepare

# Python runs this when a child process starts. The number of seconds is filled in.
STAY = """
import sys
if "oocgemm.distributed.part" in sys.orig_argv:
    from oocgemm.distributed import watchdog
    watchdog.STAYING, watchdog.IDLE = ("host",), {seconds}
"""
Stay = Callable[[float], None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


@pytest.fixture
def stay(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stay]:
    """Yield a function that lets child processes wait for other tasks, for some seconds."""
    code = here / "code"
    code.mkdir()

    def let(seconds: float) -> None:
        (code / "sitecustomize.py").write_text(STAY.format(seconds=seconds))
        monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)

    yield let
    for waiting in child._idle.values():
        while waiting:
            waiting.pop().end()


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
    waiting = child.Child({})
    assert waiting.wait() == EXIT_IDLE
    found = [waiting]  # it was alive when it was taken
    monkeypatch.setattr(worker, "take", lambda _: found.pop() if found else None)
    assert worker.run('{"task": "probe", "nonce": ""}')["error"] == worker.DIED  # by the other process
    assert not found


def test_child_processes_that_stay_end_with_the_thread_that_started_them(here: Path, stay: Stay) -> None:
    stay(60)
    with ThreadPoolExecutor(1) as found:
        expected = content_of(here, executor=found)
    assert all_ended(here)
    with ThreadPoolExecutor(1) as found:  # the dead processes are still known
        began = time.monotonic()
        assert content_of(here, executor=found) == expected
        assert time.monotonic() - began < 60
