"""Runs that are killed or interrupted at any moment are resumed and give the same bits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from oocgemm.jobs.journal import JOURNAL
from tests.support import TOP
from tests.support.crash_points import CASES
from tests.support.suite import slow
from tests.support.unfinished_runs import store_operands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


@pytest.mark.parametrize(
    ("case", "stride"),
    [("in place", 29), *slow(("in place", 11), ("new.npy", 11), *((case, 1) for case in CASES))],
)
def test_a_run_may_end_before_any_step(case: str, stride: int) -> None:
    """A run may end before any system call that changes a file, and so may the run that resumes it."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync takes no time there
    with tempfile.TemporaryDirectory(dir=in_memory) as work:
        line = [sys.executable, "-m", "tests.support.crash_points", case, work, str(stride)]
        done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


@pytest.mark.timeout(900)  # it took more than five minutes when other programs used the cores too
@pytest.mark.parametrize(("kills", "cases"), slow((2, 1), (50, 10)))
def test_a_run_killed_at_random_gives_the_same_bits(tmp_path: Path, kills: int, cases: int) -> None:
    output = tmp_path / "torture.json"
    line = [
        sys.executable,
        str(TOP / "scripts/bench/torture.py"),
        "--kills",
        str(kills),
        "--output",
        str(output),
    ]
    line += [argument for number in range(cases) for argument in ("--case", str(number))]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["host"]
    assert found["kills"] >= kills
    assert sum(bool(case["kills"]) for case in found["cases"]) >= 0.8 * cases
    # Few kills do not hit every phase.
    assert {"in a tile", "in a commit"} <= found["phases"].keys() or cases < 10


# Commands other than run and gram, by the numbers of their cases in torture_cases.py. Those that keep their
# result in memory have no --resume. The last four have --verify.
VERBS = {"corr": 16, "cov": 17, "grm": 18, "grm.bin": 19, "pca": 20, "similarity": 21, "threshold": 22} | {
    "kernel_matmul": 23,
    "verified grm": 24,
    "verified gram": 25,
    "verified similarity": 26,
    "verified threshold": 27,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("verbs", "kills"),
    slow((("grm", "verified similarity"), 2), (("gram", *VERBS), 50)),
    ids=["few", "all"],
)
def test_a_command_killed_at_random_gives_the_same_bits(
    tmp_path: Path, verbs: tuple[str, ...], kills: int
) -> None:
    output, numbers = tmp_path / "torture.json", {"gram": 10} | VERBS
    line = [sys.executable, str(TOP / "scripts/bench/torture.py"), "--kills", str(kills)]
    line += [argument for verb in verbs for argument in ("--case", str(numbers[verb]))]
    done = subprocess.run(
        [*line, "--output", str(output)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["host"]
    commands = [case["command"] for case in found["cases"]]
    named = (verb.removeprefix("verified ") for verb in verbs)
    assert commands == [{"grm.bin": "grm", "threshold": "corr"}.get(verb, verb) for verb in named]
    assert all(sum(case["kills"].values()) for case in found["cases"])
    assert found["kills"] >= kills


STUCK = """
import time
from pathlib import Path
from oocgemm.backends.host.backend import HostSession
from oocgemm.cli.main import main
HostSession._multiply = lambda *arguments: Path("stuck").touch() or time.sleep(600)
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *slow((signal.SIGTERM, 143))])
@pytest.mark.parametrize("stuck", [False, True], ids=["between operations", "amid a long one"])
def test_a_signal_ends_a_run_promptly(here: Path, number: int, code: int, stuck: bool) -> None:
    array = np.lib.format.open_memmap("large.npy", mode="w+", dtype=np.float64, shape=(2000, 2000))
    del array  # the file has no blocks on the disk, since it contains only zeros
    start = [sys.executable, *(("-c", STUCK) if stuck else ("-m", "oocgemm"))]
    arguments = [
        "run",
        "large.npy",
        "large.npy",
        "c",
        "--backend",
        "host",
        "--tile",
        "50x50x50",
        "--chunks",
        "50x50",
    ]
    journal = here / "c" / ".oocgemm" / JOURNAL
    with subprocess.Popen(
        [*start, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(TOP)},
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                done = journal.read_bytes().count(b"\n") if journal.exists() else 0
                if (here / "stuck").exists() if stuck else done >= 3:
                    break
                time.sleep(0.01)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (code, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("Interrupted. ")
    assert last.endswith("of 1600 tiles are done: the same command with --resume computes the others")
