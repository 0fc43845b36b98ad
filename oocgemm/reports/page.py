"""The report as one page of HTML that needs nothing else: no network, no script or style from outside.

Figures and tables are HTML, written here and in `oocgemm.reports.sections`; the Gantt chart is drawn by the scripts in
the folder `web` from the spans, which the page carries as JSON.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from oocgemm.reports.sections import Run, body, heading
from oocgemm.timeline.metrics import exposed_intervals, last_of, report, stream_predecessors
from oocgemm.timeline.series import lanes_of, rows
from oocgemm.timeline.spans import Timeline

SCRIPTS = ("format.js", "view.js", "gantt.js", "input.js", "main.js")


def page(runs: Sequence[tuple[str, Timeline]]) -> str:
    """The page of a run, or of several beside one another; each with a name for it."""
    described = [Run.of(name, timeline, report(timeline)) for name, timeline in runs]
    parts = {
        "title": escape(f"{heading(described[0].header)} - oocgemm report"),
        "style": _file("page.css"),
        "body": body(described),
        "data": _json([run_data(timeline) for _, timeline in runs]),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    # Piece by piece, so that nothing that is filled in is searched for places to fill in.
    text = _file("page.html")
    filled = []
    for name, part in parts.items():
        before, text = text.split(f"<!--{name}-->")
        filled += [before, part]
    return "".join([*filled, text])


def run_data(timeline: Timeline) -> dict[str, Any]:
    """What the scripts draw a run from: its spans in columns, in order of their start, each start as the difference
    to the one before. `after` says how many places earlier that span is which ended last of those waited for, 0 for
    none; a size is an index into the pairs of bytes and flops that there are."""
    spans = sorted(timeline.spans, key=lambda s: (s.start, s.end, s.id))
    place = {span.id: index for index, span in enumerate(spans)}
    by_id = {span.id: span for span in spans}
    before = stream_predecessors(spans)
    lanes, kinds, operands, causes = lanes_of(spans), _Index(), _Index(), _Index()
    tiles, sizes = _Index(), _Index()
    blockers = [last_of(span, by_id, before) for span in spans]
    starts = [span.start for span in spans]
    # Lists made in this order fill the indices before these are written.
    columns = {
        "start": [b - a for a, b in zip([0, *starts], starts, strict=False)],
        "length": [span.end - span.start for span in spans],
        "lane": [lanes.index(span.lane) for span in spans],
        "row": rows(spans),
        "kind": [kinds.of(span.kind) for span in spans],
        "operand": [operands.of(span.operand) for span in spans],
        "tile": [tiles.of(span.tile) for span in spans],
        "step": [span.step for span in spans],
        "size": [sizes.of((span.bytes, span.flops)) for span in spans],
        "after": [
            index - place[b.id] if b and b.end <= spans[index].start else 0
            for index, b in enumerate(blockers)
        ],
    }
    waits = [
        (start, end - start, causes.of(why)) for start, end, why in exposed_intervals(spans, timeline.wall)
    ]
    return {
        "wall": timeline.wall,
        "lanes": lanes,
        "kinds": kinds.values(),
        "operands": operands.values(),
        "tiles": tiles.values(),
        "sizes": sizes.values(),
        "spans": columns,
        "causes": causes.values(),
        "waits": waits,
    }


class _Index:
    """Numbers for values, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Any]:
        return [*self._numbers]


def _json(data: Any) -> str:
    """JSON that can stand in a script element, whatever its texts say."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (files("oocgemm.reports") / "web" / name).read_text(encoding="utf-8")
