"""Output is as wide as the terminal. Text of wide cells continues on the next line and is not cut."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from oocgemm.planning import Budgets
from oocgemm.timeline import Timeline
from tests.support.command import command
from tests.support.suite import slow
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan, write_log

WIDTHS = [60, 80, 120, 200]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    run = run_of(virtual_plan((8192, 8192, 8192), Budgets(GIB // 4, GIB), machine()))
    write_log("log", Timeline(run.spans, run.wall, dict(run.header)))
    # The file has no blocks on the disk.
    np.lib.format.open_memmap("a.npy", mode="w+", dtype=np.float64, shape=(40000, 40000))
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_the_gantt_chart_fill_the_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = command("report", "log").out.splitlines()
    assert {len(line) for line in lines if "│" in line} == {width}
    assert max(map(len, lines)) == width


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("width", WIDTHS)
def test_explanations_name_every_tile(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    asked = [
        "plan",
        "a.npy",
        "a.npy",
        "--backend",
        "cuda",
        "--explain",
        "--device-memory",
        "8GiB",
        "--host-memory",
        "8GiB",
    ]
    shown = command(*asked).out
    tiles = {row["tile"] for row in command(*asked, "--json").json()["considered"]}
    assert len(tiles) > 1
    assert tiles <= set(shown.split())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("columns", [100, *slow((None,))])
def test_a_terminal_gives_its_width(columns: int | None) -> None:
    """If there is no terminal, on stdout or stdin, the width is 80 columns."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"}
    ours, theirs = pty.openpty()
    if columns:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", "report", "log"],
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        stdin=theirs if columns else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    os.close(ours)
    os.close(theirs)
    assert {len(line) for line in done.stdout.splitlines() if "│" in line} == {columns or 80}
