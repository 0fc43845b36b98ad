"""The processor time of this process is told apart from that of other processes on the same cores."""

import subprocess
import sys
from time import process_time
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.system.resources import CpuTimes, used_since

pytestmark = pytest.mark.skipif(CpuTimes.now() is None, reason="the system counts no processor time")
SPINNING = "import time\nwhile time.process_time() < {}: pass"


def test_what_another_process_uses_is_not_our_own() -> None:
    start = CpuTimes.now()
    subprocess.run([sys.executable, "-c", SPINNING.format(0.6)], check=True)
    used = used_since(start)
    assert used is not None
    assert used["busy_seconds"] - used["own_seconds"] > 0.5
    assert used["own_seconds"] < 0.3


def test_what_this_process_uses_is_its_own() -> None:
    start, begun = CpuTimes.now(), process_time()
    while process_time() - begun < 0.3:
        pass
    used = used_since(start)
    assert used is not None
    assert used["own_seconds"] >= 0.3
    assert used["busy_seconds"] >= used["own_seconds"]


def test_a_run_records_the_processor_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.jobs.execute.MIN_CPU_WALL", 0.0)  # of very short runs, too
    figures = oocgemm.gemm(np.ones((50, 50)), np.ones((50, 50)), backend="host").report
    assert figures.cpu is not None
    assert figures.cpu["cores"] >= 1
    assert figures.cpu["own"] > 0


def test_the_processor_time_is_not_read_before_the_first_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.jobs.execute.MIN_CPU_WALL", 0.0)
    happened, right = list[str](), CpuTimes.now

    def now() -> CpuTimes | None:
        happened.append("times read")
        return right()

    def progress(plan: Any) -> Any:
        happened.append("run begins")
        return lambda span: happened.append("operation ended")

    monkeypatch.setattr("oocgemm.jobs.execute.CpuTimes.now", now)
    oocgemm.gemm(np.ones((50, 50)), np.ones((50, 50)), backend="host", progress=progress)
    assert happened[:3] == ["run begins", "times read", "operation ended"]
