"""The progress display shows how far a run is and which lane limits it, on a terminal and elsewhere."""

import io
import re
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from oocgemm.cli import display as shown_by
from oocgemm.planning import Budgets
from oocgemm.reports import progress as live
from oocgemm.timeline import Span, report
from oocgemm.timeline.activities import recent_activity, utilisation
from tests.support.command import command, own_threads, run
from tests.support.suite import slow
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan


def shown(rates: dict[str, float]) -> list[tuple[float, str, str]]:
    """Simulate a run on a machine with these rates.

    Return what the display shows, updated after every operation.
    """
    plan = virtual_plan((4096, 4096, 8192), Budgets(GIB // 8, GIB), machine(**rates))
    found: list[tuple[float, str, str]] = []
    step = live._watch(plan, every=0.0, show=lambda *what: found.append(what))
    for span in sorted(run_of(plan).spans, key=lambda span: span.end):
        step(span)
    return found


@pytest.mark.parametrize(
    ("rates", "bound"),
    [
        ({"read": 100e9, "h2d": 200e9}, "compute"),
        ({"read": 2e9}, "read"),
        *slow(({"h2d": 4e9}, "h2d"), ({"write": 0.2e9}, "write")),
    ],
)
def test_the_lane_that_bounds_a_run_is_named(rates: dict[str, float], bound: str) -> None:
    seen = shown(rates)
    assert f"  |  {bound}-bound, " in seen[len(seen) // 2][2]


def test_progress_runs_from_0_to_100_percent() -> None:
    seen = shown({})
    shares = [share for share, _, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert (seen[0][1].split("/")[0], len({tiles for _, tiles, _ in seen}) > 1) == ("cuda: tile 1", True)


def test_utilisation_of_the_whole_run_is_that_of_its_report() -> None:
    recorded = run_of(virtual_plan((8192, 8192, 8192), Budgets(GIB // 4, GIB), machine()))
    figures = report(recorded)
    shares = utilisation(recorded.spans, 0, recorded.wall)
    assert shares == {
        lane: pytest.approx(busy["busy"] / figures.wall) for lane, busy in figures.lanes.items()
    }


def test_utilisation_counts_what_lies_within() -> None:
    spans = [
        Span(n, "read", "A", "read", "read", 0, (0, 0), 0, start, end, 0, 0)
        for n, (start, end) in enumerate([(0, 15), (12, 20), (40, 90)])
    ]
    assert utilisation(spans, 10, 50) == {"read": pytest.approx(0.5)}  # busy at 10-20 and 40-50


def test_the_multiply_that_is_running_is_no_stall() -> None:
    """Reads end while a long Multiply runs. Nothing is known of the Multiply before its end."""
    known = [
        Span(0, "multiply", "A", "compute", "compute", 0, (0, 0), 0, 0, 100, 0, 8),
        Span(1, "read", "A", "read", "read", 0, (0, 0), 1, 50, 900, 0, 0),
    ]
    assert recent_activity(known, multiplied=False)[1] == "compute-bound, 100.0%"
    assert recent_activity(known, multiplied=True)[1] == "tail-bound, 88.9%; compute 11.1%"
    assert recent_activity(known[1:], multiplied=False)[1] == ""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.ones((40, 40)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_lines_are_printed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LINE_SECONDS", 0.0)
    done = run("a.npy", "b.npy", "c", "--tile", "10x10x10")
    assert done.code == 0
    lines = done.err.splitlines()
    shape = re.compile(r"host: tile \d+/16  \d+%  \S+ m?s  .*  \|  busy .*")
    assert [line for line in lines if not shape.fullmatch(line)] == []
    assert "host: tile 16/16  100%" in done.err
    assert "\x1b" not in done.err
    assert run("a.npy", "b.npy", "d", "--quiet").err == ""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["verify", "a.npy", "b.npy", "c.npy"], [f"reading {x}, 100% of 12.5 KiB" for x in "BAC"]),
        (["verify", "a.npy", "b.npy", "c.npy", "--json"], []),
    ],
)
def test_verify_reports_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: list[str]
) -> None:
    assert run("a.npy", "b.npy", "c.npy").code == 0
    said: list[str] = []
    monkeypatch.setattr(
        "oocgemm.cli.display.doing", lambda enabled: nullcontext(said.append if enabled else len)
    )
    assert command(*arguments).code == 0
    assert said == expected


def test_lines_continue_during_one_long_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown_by, "SELDOM", 0.01)
    shown = ""
    with shown_by.doing(True) as say:
        say("reading [A]")
        while shown.count("reading [A]\n") < 3:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    lines = [line for line in shown.splitlines() if not line.endswith("  starting")]
    assert all(re.fullmatch(r"\S+ m?s  reading \[A\]", line) for line in lines)
    assert own_threads() == []


def test_short_work_prints_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_by.doing(True) as say:
        say("reading A")
    assert capsys.readouterr().err == ""


def test_doing_shows_on_a_terminal_what_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    console = partial(Console, file=terminal, force_terminal=True, width=100)
    monkeypatch.setattr(shown_by, "Console", lambda **_: console())
    with shown_by.doing(True) as say:
        say("reading [A]")
    assert "reading [A]" in terminal.getvalue()
    assert "0:00:00" in terminal.getvalue()


@pytest.mark.usefixtures("here")
def test_a_bar_is_drawn_on_a_terminal_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    console = partial(Console, file=terminal, force_terminal=True, width=200)
    monkeypatch.setattr(live, "Console", lambda **_: console())
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.0)
    done = run("a.npy", "b.npy", "c", "--tile", "10x10x10")
    assert (done.code, done.err) == (0, "")
    drawn = terminal.getvalue()
    for part in ("host: tile 16/16", "100%", " elapsed, ", "-bound, "):
        assert part in drawn
    assert drawn.endswith("\x1b[2K")  # the last output clears a line, so the display is gone
