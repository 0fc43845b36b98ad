"""The HTML page, the pictures and the trace show the timeline, and load nothing from elsewhere."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.cli.process import EXIT_USAGE
from oocgemm.planning import Budgets
from oocgemm.reports.charts import COLUMNS, svg
from oocgemm.reports.exports import page, run_data, write_trace
from oocgemm.timeline import Span, Timeline, read_log, report
from oocgemm.timeline.activities import finish_times, rate_limits, rates, rows
from tests.support.command import command
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan, write_log


@pytest.fixture(scope="module")
def run() -> Timeline:
    return run_of(virtual_plan((8192, 8192, 8192), Budgets(GIB // 4, GIB), machine(h2d=8e9)), jitter=0.3)


@pytest.fixture
def log(tmp_path: Path, run: Timeline) -> Path:
    write_log(tmp_path / "run.jsonl", run)
    return tmp_path / "run.jsonl"


class Elements(HTMLParser):
    """The elements of a page in order, with their attributes. `VOID` lists elements without an end tag."""

    VOID = frozenset({"meta", "br", "line", "rect", "path", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.data: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data[self.open[-1] if self.open else ""] = data


def test_the_page_is_complete_in_itself(run: Timeline) -> None:
    text = page([("run.jsonl", run)])
    elements = Elements(text)
    assert elements.open == []
    assert not [attrs for _, attrs in elements.found if "src" in attrs or "href" in attrs]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket", text)
    assert not re.search(r"<!--\w+-->", text)
    figures = report(run)
    assert f"{100 * (figures.compute_share or 0):.1f}%" in text


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--style-->", "<img src=x onerror=1>", 'é & "x" \'']
)
def test_names_and_paths_cannot_break_the_page(run: Timeline, name: str) -> None:
    plan = run.header["plan"] | {"problem": run.header["plan"]["problem"] | {"a_dtype": name}}
    header = dict(run.header) | {"plan": plan, "operands": {"A": {"path": name}}, "backend": {"device": name}}
    spans = tuple(s._replace(operand=name, lane=name if s.id % 3 else s.lane) for s in run.spans[:20])
    text = page([(name, Timeline(spans, run.wall, header)), (name, run)])
    elements = Elements(text)
    assert elements.open == []
    assert {attrs.get("id") for tag, attrs in elements.found if tag == "script"} == {"data", None}
    assert len([tag for tag, _ in elements.found if tag == "script"]) == 2
    names = {attribute for _, attributes in elements.found for attribute in attributes}
    assert "onerror" not in names
    # If a quote had ended the value of an attribute, the rest of the value would be read as names.
    assert all(re.fullmatch("[a-z][a-z0-9-]*", attribute) for attribute in names), names


def spans_of(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    columns, start = data["spans"], 0
    for i in range(len(columns["start"])):
        start += columns["start"][i]
        yield (
            *(start, start + columns["length"][i], data["lanes"][columns["lane"][i]]),
            *(data["kinds"][columns["kind"][i]], data["operands"][columns["operand"][i]]),
            *(tuple(data["tiles"][columns["tile"][i]]), columns["step"][i]),
            tuple(data["sizes"][columns["size"][i]]),
        )


def test_the_data_of_the_page_are_the_spans(run: Timeline) -> None:
    data = json.loads(json.dumps(run_data(run)))
    expected = [
        (s.start, s.end, s.lane, s.kind, s.operand, s.tile, s.step, (s.bytes, s.flops))
        for s in sorted(run.spans, key=lambda s: (s.start, s.end, s.id))
    ]
    assert list(spans_of(data)) == expected
    waited = sum(length for _, length, _ in data["waits"]) / 1e9
    assert waited == pytest.approx(sum(report(run).exposed.values()))
    # The last predecessor of a span must have ended before the span started.
    ends = [end for _, end, *_ in expected]
    after = data["spans"]["after"]
    assert any(after)
    assert all(not back or ends[i - back] <= expected[i][0] for i, back in enumerate(after))


intervals = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)), max_size=30)


def made(pairs: list[tuple[int, int]], size: int = 7) -> list[Span]:
    return [
        Span(n, "read", "A", "read", "read", 0, (0, 0), 0, start, start + length, size, 0)
        for n, (start, length) in enumerate(pairs)
    ]


@given(intervals)
def test_no_two_spans_of_a_row_overlap(pairs: list[tuple[int, int]]) -> None:
    spans = made(pairs)
    found = rows(spans, exact=True)
    for n, (one, row) in enumerate(zip(spans, found, strict=True)):
        for other, beside in zip(spans[:n], found, strict=False):
            assert row != beside or one.end <= other.start or other.end <= one.start


@given(intervals, st.integers(1, 50))
def test_rates_over_time_add_up_to_the_bytes(pairs: list[tuple[int, int]], bins: int) -> None:
    found = rates(made(pairs), 600, bins)
    assert sum(found) * (600 / bins) / 1e9 == pytest.approx(7 * len(pairs))


def test_tiles_are_finished_when_their_last_part_is_written(run: Timeline) -> None:
    done = finish_times(run.spans)
    down, across = run.header["plan"]["tiles"]
    assert set(done) == {(i, j) for i in range(down) for j in range(across)}
    assert max(done.values()) == run.wall


def test_two_runs_stand_side_by_side(run: Timeline) -> None:
    slower = Timeline(run.spans, 2 * run.wall, run.header)
    text = page([("one.jsonl", run), ("two.jsonl", slower)])
    assert text.count('<div class="gantt">') == 2
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [one["wall"] for one in data] == [run.wall, 2 * run.wall]


@pytest.mark.parametrize(
    ("alpha", "beta", "shown"),
    [
        (1.0, 0.0, "C = A B<sup>T</sup> <span"),
        (0.5, 1.0, "C = 0.5 A B<sup>T</sup> + C <span"),
        ([1.0, 0.0], [0.0, 0.0], "C = A B<sup>T</sup> <span"),
        ([1.0, -2.0], "nan", "C = (1-2j) A B<sup>T</sup> + nan C <span"),
    ],
)
def test_the_title_is_the_product(run: Timeline, alpha: object, beta: object, shown: str) -> None:
    plan = run.header["plan"]
    problem = plan["problem"] | {"alpha": alpha, "beta": beta, "trans_b": "T"}
    header = dict(run.header) | {"plan": plan | {"problem": problem}}
    assert f"<h1>{shown}" in page([("x", Timeline(run.spans, run.wall, header))])


def test_a_run_without_anything_has_a_page_and_a_picture() -> None:
    for empty in (Timeline((), 0), Timeline((), 10), Timeline(tuple(made([(0, 5)])), 5)):
        assert Elements(page([("empty", empty)])).open == []
        ElementTree.fromstring(svg(empty))


def test_the_area_of_the_picture_is_the_busy_time(run: Timeline) -> None:
    """The width of a lane's boxes, weighted by their opacity, is the lane's busy time."""
    root = ElementTree.fromstring(svg(run, "a < b"))
    space = "{http://www.w3.org/2000/svg}"
    title = root.find(f"{space}title")
    assert title is not None
    assert title.text == "a < b"
    figures = report(run)
    drawn = 0.0
    for path in root.iter(f"{space}path"):
        if path.get("fill") == "#59616c":
            boxes = re.findall(r"h([\d.e-]+)v([\d.e-]+)h-", path.get("d") or "")
            # Every other wide box is lighter to tell steps apart. Its opacity does not mean a partly busy
            # column.
            weight = 1.0 if path.get("fill-opacity") == "0.66" else float(path.get("fill-opacity") or 1)
            drawn += weight * sum(float(width) for width, _ in boxes)
    assert drawn / COLUMNS == pytest.approx(figures.compute_share, abs=0.05)


def test_the_trace_has_a_track_per_lane_and_arrows_to_uses(run: Timeline) -> None:
    file = io.StringIO()
    write_trace(file, run)
    events = json.loads(file.getvalue())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"read", "h2d", "compute", "d2h", "write"} <= set(names.values())
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(run.spans)
    assert all(names[e["tid"]].split()[0] == e["cat"] for e in slices)
    tracks: dict[int, list[tuple[float, float, str]]] = {}
    for e in slices:
        tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    for track in tracks.values():
        track.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(track))

    def bound(e: dict[str, Any]) -> str:
        (name,) = (name for start, end, name in tracks[e["tid"]] if start < e["ts"] < end)
        return name

    begins = {e["id"]: bound(e) for e in events if e["ph"] == "s"}
    ends = {e["id"]: bound(e) for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert {(begins[i], ends[i]) for i in begins} == {
        *(("read A", "upload A"), ("read B", "upload B"), ("upload A", "multiply"), ("upload B", "multiply")),
        *(("multiply", "download C"), ("download C", "write C")),
    }
    multiplies = sum(1 for s in run.spans if s.kind == "multiply")
    # Each Multiply gets one arrow from a panel of A and one from a panel of B.
    assert sum(1 for i in ends if ends[i] == "multiply") == 2 * multiplies


def test_report_writes_the_requested_files(log: Path, tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("html", "svg", "trace")}
    done = command("report", log, *(x for kind, path in paths.items() for x in (f"--{kind}", path)))
    assert (done.code, done.err) == (0, "")
    assert done.out.count(str(tmp_path)) >= 3
    assert paths["html"].read_text() == page([(str(log), read_log(log))])
    assert paths["svg"].read_text().startswith("<svg")
    json.loads(paths["trace"].read_text())


def test_an_unfinished_run_is_reported_as_unfinished(log: Path, tmp_path: Path) -> None:
    """The figures cover what was recorded, and are not compared with those of the whole plan."""
    header, recorded = log.read_bytes().split(b"\n", 1)
    part = tmp_path / "part.jsonl"
    for share in (0.1, 0.5, 0.95):
        part.write_bytes(header + b"\n" + recorded[: round(share * len(recorded))])
        shown = command("report", part, "--html", tmp_path / "part.html", "--svg", tmp_path / "part.svg")
        assert (shown.code, shown.err) == (0, "")
        assert shown.out.startswith(
            "Unfinished: the run was stopped or is still running. The figures cover its first"
        )
        assert "log does not contain the whole run" in " ".join(shown.out.split())
        text = (tmp_path / "part.html").read_text()
        assert Elements(text).open == []
        assert "Unfinished: the run was stopped" in text
        assert "wall time until the log ends" in text
        figures = command("report", part, "--json").json()
        assert figures["unfinished"] is True
        assert figures["efficiency"] is None
        assert {link["least"] for link in figures["traffic"].values()} == {None}
    assert "Unfinished" not in command("report", log).out
    assert command("report", log, part).out.count("Unfinished") == 1


def test_limits_say_whether_their_rates_were_measured() -> None:
    model = machine()
    run = run_of(virtual_plan((2048, 2048, 2048), Budgets(GIB, GIB), model))
    assert rate_limits(run)["compute"] == (model.kernels["float64"].peak, True)
    plan = run.header["plan"] | {"problem": run.header["plan"]["problem"] | {"compute": "emulated"}}
    emulated = rate_limits(replace(run, header=dict(run.header) | {"plan": plan, "rates": None}))
    assert emulated["compute"] == (model.kernels["emulated float64"].peak, False)
    assert emulated["h2d"] == (model.h2d, True)
    assert emulated["read"] == (model.read, True)


def test_report_compares_two_runs(log: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "other.jsonl", read_log(log))
    shown = command("report", log, tmp_path / "other.jsonl", "--html", tmp_path / "both.html")
    assert (shown.code, shown.err) == (0, "")
    assert "+0.0%" in shown.out
    assert shown.out.count("h2d-bound, ") == 2
    both = command("report", log, log, "--json").json()
    assert both["same_product"] is True
    assert both["runs"] == [command("report", log, "--json").json()] * 2


def test_different_products_are_compared_by_rates_only(log: Path, tmp_path: Path) -> None:
    other, page_of_both = tmp_path / "other.jsonl", tmp_path / "both.html"
    write_log(other, run_of(virtual_plan((4096, 8192, 4096), Budgets(GIB // 4, GIB), machine(h2d=8e9))))
    shown = command("report", log, other, "--html", page_of_both)
    text = " ".join(shown.out.split())
    assert (
        "different products, 8192 x 8192 x 8192 float64 and 4096 x 8192 x 4096 float64: compare rates" in text
    )
    changed = [
        line.split()[0]
        for line in shown.out.splitlines()
        if line.endswith("%") and line[-6:-1].strip()[0] in "+-"
    ]
    assert changed == ["rate"]
    assert command("report", log, other, "--json").json()["same_product"] is False
    assert "times the T" not in page_of_both.read_text()
    assert "a different product, " in page_of_both.read_text()
    assert "different product" not in command("report", log, log).out


def test_a_png_is_drawn_or_the_error_names_its_package(log: Path, tmp_path: Path) -> None:
    with patch.dict("sys.modules", {"resvg_py": None}):
        refused = command("report", log, "--png", tmp_path / "out.png")
    assert refused.code == EXIT_USAGE
    assert "pip install 'oocgemm[png]'" in refused.err
    assert not (tmp_path / "out.png").exists()
    pytest.importorskip("resvg_py", reason="resvg-py draws the PNG")
    assert command("report", log, "--png", tmp_path / "out.png").code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_that_cannot_be_written_is_refused(log: Path, tmp_path: Path) -> None:
    before = log.read_bytes()
    for arguments, part in (
        ((log, "--html", log), "would overwrite the timeline"),
        ((log, "--svg", tmp_path / "none" / "out.svg"), "cannot write --svg"),
        ((log, log, "--trace", tmp_path / "out.json"), "takes one timeline, but 2 were given"),
    ):
        refused = command("report", *arguments)
        assert refused.code == EXIT_USAGE
        assert part in refused.err
    assert log.read_bytes() == before


def test_concurrent_reads_get_separate_tracks() -> None:
    """Two threads read at the same time.

    The end of one read shortly after the start of another is no dependency.
    """
    run = Timeline(tuple(made([(0, 1000), (990, 1000), (1995, 300)])), 2300)
    file = io.StringIO()
    write_trace(file, run)
    events = json.loads(file.getvalue())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["read", "read 2"]
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 2
    assert run_data(run)["spans"]["after"] == [0, 0, 1]
    assert run_data(run)["spans"]["row"] == [0, 0, 0]
