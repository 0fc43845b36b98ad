"""Texts of reports and jobs: no word is broken, what ran is named, and sizes have units."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.cli import display
from oocgemm.planning import Budgets
from oocgemm.timeline import Span, Timeline, report
from oocgemm.timeline.activities import recent_activity
from oocgemm.timeline.metrics import diagnose
from tests.support.command import command
from tests.support.suite import thinned
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan, write_log


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(text: str) -> set[str]:
    """Return the words of a text without those of its pictures and rules."""
    return {word for line in text.splitlines() if "│" not in line for word in re.findall(r"[a-z]{2,}", line)}


@pytest.mark.parametrize("width", thinned([40, 50, 60, 80, 100], [40, 60]))
def test_a_narrow_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    run = run_of(virtual_plan((8192, 8192, 8192), Budgets(GIB // 4, GIB), machine()))
    write_log("log", Timeline(run.spans, run.wall, dict(run.header)))
    write_log("other", Timeline(run.spans, run.wall, dict(run.header)))
    np.lib.format.open_memmap("a.npy", mode="w+", dtype=np.float64, shape=(4000, 4000))
    plan = ("plan", "a.npy", "a.npy", "c.npy", "--backend", "cuda", "--device-memory", "8GiB")
    for line in (
        ("report", "log"),
        ("report", "log", "other"),
        (*plan, "--explain"),
        (*plan, "--workers", "1..3"),
        ("info",),
    ):
        monkeypatch.setenv("COLUMNS", "400")
        wide = command(*line)
        monkeypatch.setenv("COLUMNS", str(width))
        narrow = command(*line)
        assert narrow.code == wide.code == 0
        assert words(narrow.out) <= words(wide.out) | {"lane"}, line


KINDS: dict[str, dict[str, Any]] = {
    "topk": {"sink": "largest", "topk": 10},
    "threshold": {"sink": "at least"},
    "product with V": {"sink": "applied", "applied": 3},
    "reduction": {"sink": "reduced", "reduction": "sum"},
    "stored": {"sink": "stored"},
}


def finishing(problem: dict[str, Any], kind: str = "finish", lane: str = "compute") -> Timeline:
    spans = (
        Span(0, "multiply", "A", "compute", "s", 0, (0, 0), 0, 0, 10, 0, 8),
        Span(1, kind, "D", lane, "s" if lane == "compute" else "t", 0, (0, 0), 0, 10, 80, 0, 0, (0,)),
        Span(2, "multiply", "A", "compute", "s", 0, (0, 1), 0, 80, 90, 0, 8, (1,)),
    )
    return Timeline(spans, 90, {"plan": {"problem": problem}})


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_names_a_selection(kind: str) -> None:
    finding = diagnose(finishing(KINDS[kind])).finding
    selects = kind != "stored"
    assert finding.startswith("Select-bound" if selects else "Accumulator-bound")
    assert ("copied off the device" in finding) is not selects
    assert ("selected or reduced" in finding) is selects
    # A wait for a copy is one, also if elements are selected.
    copied = diagnose(finishing(KINDS[kind], "download", "d2h")).finding
    assert copied.startswith("Accumulator-bound")


@pytest.mark.parametrize("selects", [True, False])
def test_the_live_display_names_a_selection(selects: bool) -> None:
    from oocgemm.timeline.activities import finish_cause

    limit = recent_activity(finishing({}).spans, multiplied=True, finish=finish_cause(selects=selects))[1]
    assert limit.startswith("select-bound" if selects else "accumulator-bound")


def test_a_run_that_selects_is_reported_as_one() -> None:
    e = np.random.default_rng(0).random((2000, 2)).astype("f4")
    run = oocgemm.similarity(e, topk=100, backend="host", tile="200x200x2").run
    assert run.report.exposed.get("select", 0) > 0
    assert "accumulator" not in run.report.exposed


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_only_runs_with_copies_have_an_overlap_of_copies(backend: str) -> None:
    from oocgemm.planning.cost.machine import default_model
    from oocgemm.reports.exports import page

    believed = machine() if backend == "cuda" else default_model("host", 2)
    run = run_of(virtual_plan((4096, 4096, 4096), Budgets(GIB // 4, GIB), believed))
    write_log("log", Timeline(run.spans, run.wall, dict(run.header)))
    copies = backend == "cuda"
    assert (report(run).copy_overlap is not None) is copies
    for shown in (command("report", "log").out, command("report", "log", "log").out):
        assert ("copy overlap" in shown) is copies
    for logs in ([("log", run)], [("log", run), ("other", run)]):
        assert ("Copy overlap" in page(logs)) is copies


def test_the_options_of_a_job_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    job: dict[str, Any] = dict.fromkeys(
        ("id", "name", "owner", "error", "reason", "a", "b", "c", "exit_code", "device"), ""
    )
    job |= dict.fromkeys(("created", "started", "ended", "deadline", "predicted_start", "not_before"), None)
    job |= {"state": "succeeded", "plan": {}, "progress": None, "priority": 0, "predicted_s": 1.0}
    job |= {"attempt": 1, "failures": 0, "max_attempts": 3, "needs": [], "actions": [], "device": None}
    job["options"] = {"device_memory": 3 << 30, "host_memory": 123 << 20, "memory": "2GiB", "beta": 1}
    display.print_job(job)
    shown = capsys.readouterr().out
    assert "device_memory 3 GiB, host_memory 123 MiB, memory 2GiB, beta 1" in shown
