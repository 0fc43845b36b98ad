"""Child processes end when their coordinator has ended, and only then."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oocgemm.distributed import attempts
from oocgemm.distributed.attempts import Fence, FenceGuard, Sign, machine, read_sign
from oocgemm.system.threads import process_start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator"


def write(path: Path, sign: Sign) -> None:
    path.write_text(json.dumps(asdict(sign)))


def sign() -> Sign:
    """Return the sign of a coordinator that is this process."""
    return Sign("e1", machine(), os.getpid(), process_start(os.getpid()) or 0)


def test_a_live_coordinator_is_seen_and_its_end_too(path: Path) -> None:
    kept = Fence(path)
    try:
        guard = FenceGuard(path, kept.epoch, "attempt")
        assert guard.reason_to_end() is None
        first = read_sign(path)
        until = time.monotonic() + 30
        while read_sign(path) == first and time.monotonic() < until:
            time.sleep(0.01)
        found = read_sign(path)
        assert found is not None
        assert found.beat > 0
        kept.end(["another"])
        assert guard.reason_to_end() is None
        kept.end(["attempt"])
        while guard.reason_to_end() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert guard.reason_to_end() == "its tiles are done"
    finally:
        kept.close()
    assert guard.reason_to_end() == "its coordinator has ended"
    assert list(path.parent.iterdir()) == []


def test_another_epoch_ends_a_process(path: Path) -> None:
    write(path, sign())
    guard = FenceGuard(path, "e1", "attempt")
    assert guard.reason_to_end() is None
    write(path, replace(sign(), epoch="e2"))
    assert guard.reason_to_end() == "another coordinator has taken over"


def test_a_dead_coordinator_on_this_machine_is_noticed_at_once(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        write(path, replace(sign(), pid=process.pid, started=process_start(process.pid) or 0))
        guard = FenceGuard(path, "e1", "attempt")
        assert guard.reason_to_end() is None
        process.kill()
        until = time.monotonic() + 30
        while guard.reason_to_end() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert guard.reason_to_end() == "its coordinator has died"
    finally:
        process.kill()
        process.communicate()
    # Another process may have the id by now.
    write(path, replace(sign(), started=1))
    assert guard.reason_to_end() == "its coordinator has died"


def test_processes_on_other_machines_wait_for_a_silent_coordinator(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(attempts, "monotonic", lambda: now)
    away = replace(sign(), machine="another", pid=1, started=1)
    write(path, away)
    guard = FenceGuard(path, "e1", "attempt")
    assert guard.reason_to_end() is None
    now += attempts.TTL - 1
    assert guard.reason_to_end() is None
    write(path, replace(away, beat=1))
    assert guard.reason_to_end() is None
    now += attempts.TTL - 1
    assert guard.reason_to_end() is None
    now += 2
    assert guard.reason_to_end() == f"its coordinator was silent for {attempts.TTL:.0f} s"


def test_a_file_that_cannot_be_read_for_a_moment_ends_nothing(path: Path) -> None:
    write(path, sign())
    guard = FenceGuard(path, "e1", "attempt")
    path.write_text("{")
    assert guard.reason_to_end() is None


def test_a_coordinator_notices_that_another_one_has_replaced_it(path: Path) -> None:
    first = Fence(path)
    second = Fence(path)
    try:
        until = time.monotonic() + 30
        while not first.taken_over and time.monotonic() < until:
            time.sleep(0.01)
        assert first.taken_over
    finally:
        first.close()
        found = read_sign(path)
        second.close()
    assert found is not None
    assert found.epoch == second.epoch
