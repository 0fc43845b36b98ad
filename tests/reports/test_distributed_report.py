"""The report of a distributed run in every form: text, JSON, page, picture and trace."""

import io
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from oocgemm.reports import exports as pages
from oocgemm.reports.charts import COLUMNS, DEVICE, svg
from oocgemm.reports.exports import page, run_data, write_trace
from oocgemm.reports.sections import labels
from oocgemm.timeline import Timeline, report
from oocgemm.timeline.activities import activities
from oocgemm.timeline.metrics import Distribution, UnitFigures
from tests.reports.test_page import Elements
from tests.reports.test_page_in_browser import complaints
from tests.support.browser import FAULTS, MISSING, browser, find_browser
from tests.support.command import command
from tests.support.virtual_cluster import cluster
from tests.support.virtual_runs import write_log


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return cluster(tmp_path_factory.mktemp("four"), 4, (4, 3), {2})


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return cluster(tmp_path_factory.mktemp("many"), 32, (8, 8), {20, 40}, "tcp://10.0.0.{}:41233")


def spread_of(timeline: Timeline) -> Distribution:
    spread = report(timeline).distribution
    assert spread is not None
    return spread


def logged(folder: Path, timeline: Timeline) -> Path:
    write_log(folder / "whole.jsonl", timeline)
    return folder / "whole.jsonl"


def test_the_text_has_a_row_for_each_worker(four: Timeline, tmp_path: Path) -> None:
    done = command("report", logged(tmp_path, four))
    assert (done.code, done.err) == (0, "")
    text = " ".join(done.out.split())
    spread = spread_of(four)
    assert "ran on 4 workers on 1 host" in text
    assert f"scaling efficiency {100 * (spread.scaling_efficiency or 0):.1f}%" in text
    assert f"balance {100 * (spread.balance or 0):.1f}%" in text
    assert "1 process died or failed" in text
    assert len(re.findall(r"^gpu-\d +│", done.out, re.MULTILINE)) == 4
    assert "part-wait" in text


def test_of_many_workers_those_that_computed_least_are_printed(many: Timeline, tmp_path: Path) -> None:
    done = command("report", logged(tmp_path, many))
    rows = [int(number) for number in re.findall(r"^ *worker (\d+) │", done.out, re.MULTILINE)]
    units = spread_of(many).units
    least = sorted(range(32), key=lambda number: units[number].compute)[:16]
    assert rows == sorted(least)
    assert "16 more devices" in done.out


def test_json_has_all_figures(many: Timeline, tmp_path: Path) -> None:
    done = command("report", logged(tmp_path, many), "--json")
    found = json.loads(done.out)["distribution"]
    assert len(found["units"]) == found["workers"] == 32
    for unit in found["units"]:
        assert sum(unit["shares"].values()) == pytest.approx(1)
        assert 0 < unit["clock_error"] < 1e-3
    assert found["lost"]["attempts"] == 2
    assert found["storage"]["bytes"] >= found["storage"]["least"] >= found["storage"]["required"]
    whole = json.loads(done.out)
    assert whole["flops"] - found["lost"]["flops"] == many.header["plan"]["flops"]


def test_the_data_of_the_page_are_what_each_device_did(four: Timeline) -> None:
    data = json.loads(json.dumps(run_data(four, spread_of(four))))
    assert [name for name, _ in data["units"]] == [f"gpu-{worker}" for worker in range(4)]
    for did, (unit, expected) in zip(data["activity"], activities(four).items(), strict=True):
        assert [(s, s + n, data["causes"][why]) for s, n, why in did] == expected
        shown = [n for n, one in enumerate(data["spans"]["unit"]) if one == unit.worker]
        assert len(shown) == sum(span.worker == unit.worker for span in four.spans)
    assert data["waits"] == []


def test_the_spans_of_a_very_long_run_are_left_out(four: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_SPANS", 10)
    data = run_data(four, spread_of(four))
    assert data["spans"]["start"] == []
    assert len(data["activity"]) == 4


def test_the_page_is_complete_in_itself(many: Timeline) -> None:
    text = page([("many.jsonl", many)])
    elements = Elements(text)
    assert elements.open == []
    assert "Workers and devices" in text
    assert "Predicted and measured" not in text
    assert text.count('class="stack thin"') == 8 + 32


def test_a_page_compares_a_distributed_run_with_another(four: Timeline) -> None:
    own = Timeline(
        tuple(s for s in four.spans if not s.worker), four.wall, dict(four.header) | {"workers": []}
    )
    text = page([("four.jsonl", four), ("one.jsonl", own)])
    assert Elements(text).open == []
    assert "This run used one device." in text
    rate = four.header["rates"]["kernel"]
    alone = (report(own).flop_rate or 0) / rate
    shown = text.split("<dt>Scaling efficiency</dt>")[1].split("</div>")[0]
    both = spread_of(four).scaling_efficiency or 0, alone
    assert re.findall(r"<dd>([\d.]+%)</dd>", shown) == [f"{100 * share:.1f}%" for share in both]


def test_a_picture_fills_the_row_of_each_device(many: Timeline) -> None:
    """The boxes of a row are the causes of each instant, so that their area is that of the whole row."""
    root = ElementTree.fromstring(svg(many))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert [text for text in texts if text and text.startswith("worker")] == [
        f"worker {n}" for n in range(32)
    ]
    area = 0.0
    for path in root.iter(f"{space}path"):
        if path.get("fill"):
            boxes = re.findall(r"h([\d.e-]+)v([\d.e-]+)h-", path.get("d") or "")
            area += sum(float(width) * float(height) for width, height in boxes)
    assert area == pytest.approx(32 * DEVICE * COLUMNS, rel=0.01)


def test_the_trace_has_the_events_that_viewers_accept(four: Timeline) -> None:
    """Each event has the fields that its phase requires, and no two events of a track overlap."""
    file = io.StringIO()
    write_trace(file, four)
    trace = json.loads(file.getvalue())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    required: dict[str, dict[str, Any]] = {
        "M": {"name": str, "pid": int, "tid": int, "args": dict},
        "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
        "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int},
        "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int, "bp": str},
    }
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    names: dict[int, str] = {}
    for event in trace["traceEvents"]:
        fields = required[event["ph"]]
        assert {name: type(event[name]) for name in fields} == fields
        assert set(event) == {"ph", *fields}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
    assert names == {worker: f"gpu-{worker} on node0, device 0" for worker in range(4)}
    for events in tracks.values():
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(sorted(events)))
    parts = [e for e in trace["traceEvents"] if e.get("cat") == "parts"]
    assert len(parts) == 13
    assert sum(e["args"]["lost"] for e in parts) == 1
    activity = [e["dur"] for e in trace["traceEvents"] if e.get("cat") == "activity"]
    assert sum(activity) == pytest.approx(4 * four.wall / 1e3)


def unit(worker: str, device: int = 0, host: str = "h") -> UnitFigures:
    return UnitFigures(worker, host, device, "", 0.0, {}, 0.0, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([unit("a"), unit("b")], ["a", "b"]),
        ([unit("a"), unit("a", 1), unit("b")], ["a/0", "a/1", "b/0"]),
        ([unit("tcp://10.0.0.1:4000"), unit("b")], ["worker 0", "worker 1"]),
        ([unit("a"), unit("a", host="other")], ["worker 0", "worker 1"]),
        ([unit("", 0, ""), unit("", 1, "")], ["device 0", "device 1"]),
    ],
)
def test_rows_of_charts_have_short_distinct_names(units: list[UnitFigures], expected: list[str]) -> None:
    assert labels(units) == expected


@pytest.mark.skipif(find_browser() is None, reason=MISSING)
@pytest.mark.parametrize("width", [1440, 700, 390])
def test_pages_of_distributed_runs_in_a_browser(
    four: Timeline, many: Timeline, tmp_path: Path, width: int
) -> None:
    """Nothing overlaps. A click on the name of a device shows its lanes. Its row says what it did."""
    program = find_browser()
    assert program is not None
    for name, timeline in (("four", four), ("many", many)):
        (tmp_path / f"{name}.html").write_text(page([(f"{name}.jsonl", timeline)]))
    with browser(program) as shown:
        for theme in ("light", "dark"):
            for name in ("four", "many"):
                shown.open(tmp_path / f"{name}.html", width=width, theme=theme)
                # The boxes of texts in a closed element are not those of the texts that are shown.
                shown.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
                assert shown.js(FAULTS) == []
                assert complaints(shown) == []
        lanes = shown.js("gantts[0].tops.filter((top) => top !== undefined).length")
        assert lanes == 0
        before = shown.js("gantts[0].height")
        left, top = shown.js(
            "(() => { const g = gantts[0]; g.canvas.scrollIntoView();"
            "const r = g.canvas.getBoundingClientRect(); return [r.left, r.top + g.deviceTops[3]]; })()"
        )
        shown.click(left + 40, top + 6)
        shown.painted()
        assert shown.js("gantts[0].open") == [3]
        assert shown.js("gantts[0].tops.filter((top) => top !== undefined).length") == 5
        assert shown.js("gantts[0].height") > before
        shown.mouse("mouseMoved", left + 90, top + 6)
        shown.painted()
        tip = shown.js("document.getElementById('tip').innerText")
        assert "Waits: part-wait" in tip
        assert "10.0.0.3" in tip
        shown.js("for (let unit = 0; unit < 20; unit += 1) gantts[0].toggle(unit, true)")
        assert shown.js("gantts[0].open.length") == 8
        assert complaints(shown) == []
