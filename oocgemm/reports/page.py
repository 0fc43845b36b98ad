"""The report as one self-contained HTML page, which loads no script, style or data from elsewhere.

`oocgemm.reports.sections` writes figures and tables as HTML. The scripts in the folder `web` draw the Gantt
chart from the spans, which the page contains as JSON.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from oocgemm.reports.sections import Run, body, heading
from oocgemm.reports.workers import labels, title
from oocgemm.timeline.activities import (
    Unit,
    activities,
    last_predecessor,
    spans_by_stream,
    stalls,
    stream_predecessors,
)
from oocgemm.timeline.metrics import Distribution, report
from oocgemm.timeline.series import lanes_of, rows
from oocgemm.timeline.spans import Timeline

# Maximum number of spans of a distributed run on a page. Each takes about 30 bytes.
MAX_SPANS = 300_000
SCRIPTS = ("format.js", "view.js", "gantt.js", "input.js", "main.js")


def page(runs: Sequence[tuple[str, Timeline]]) -> str:
    """Return the HTML page of one run, or of several side by side. Each run is given as (name, timeline)."""
    described = [Run.of(name, timeline, report(timeline)) for name, timeline in runs]
    parts = {
        "title": escape(f"{heading(described[0].header)} - oocgemm report"),
        "style": _file("page.css"),
        "body": body(described),
        "data": _json([run_data(run.timeline, run.report.distribution) for run in described]),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    # Inserted text, such as the name of a run, may look like a placeholder. It is not replaced, since each
    # placeholder is searched only after the previous one, in the template's own text.
    text = _file("page.html")
    filled = []
    for name, part in parts.items():
        before, text = text.split(f"<!--{name}-->")
        filled += [before, part]
    return "".join([*filled, text])


def run_data(timeline: Timeline, spread: Distribution | None = None) -> dict[str, Any]:
    """Return the data from which the scripts of the page draw a run.

    The spans are sorted by start and stored as columns, one list per field:

    - ``start``: nanoseconds since the start of the previous span.
    - ``lane``, ``kind``, ``operand``, ``tile``, ``size``: indices into the lists of distinct values, which
      are also returned. A size is a pair of bytes and flops.
    - ``after``: the index of the span, minus the index of its `last_predecessor`. It is 0 if the span has
      none, or if their times overlap.

    For a run on several devices or workers, whose figures are `spread`, ``units`` has the name of each device
    and a description, the column ``unit`` its number, and ``activity`` what each device did (`activities`).
    Then ``waits`` is empty. The spans of such a run are left out if there are more than `MAX_SPANS`.
    """
    if spread and len(timeline.spans) > MAX_SPANS:
        spans = []
    else:
        spans = sorted(timeline.spans, key=lambda s: (s.start, s.end, s.id))
    place = {span.id: index for index, span in enumerate(spans)}
    by_id = {span.id: span for span in spans}
    before = stream_predecessors(spans_by_stream(spans))
    lanes, kinds, operands, causes = lanes_of(spans), _Index(), _Index(), _Index()
    tiles, sizes = _Index(), _Index()
    blockers = [last_predecessor(span, by_id, before) for span in spans]
    starts = [span.start for span in spans]
    # Building the columns and `waits` collects the distinct values, so it precedes the returned dictionary.
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
    waited = [] if spread else stalls(timeline)
    waits = [(start, end - start, causes.of(why)) for start, end, why in waited]
    more: dict[str, Any] = {}
    if spread:
        did = activities(timeline)
        numbers = {unit: number for number, unit in enumerate(did)}
        # A worker that only added partial products has operations, but no row of its own.
        columns["unit"] = [numbers.get(Unit(span.worker, span.device), -1) for span in spans]
        more["activity"] = [[(s, e - s, causes.of(why)) for s, e, why in one] for one in did.values()]
        more["units"] = [*zip(labels(spread.units), map(title, spread.units), strict=True)]
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
    } | more


class _Index:
    """A list of distinct values, each with its index, in the order in which they first occurred."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """Return the index of a value. A value that is not in the list is appended."""
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Any]:
        """Return all values in the order of their indices."""
        return [*self._numbers]


def _json(data: Any) -> str:
    """Return data as JSON that is safe in an HTML script element: no text in the data can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (files("oocgemm.reports") / "web" / name).read_text(encoding="utf-8")
