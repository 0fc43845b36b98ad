"""Export a report to files: an HTML page, pictures, a trace.

The page is self-contained: it loads no script, style or data from elsewhere. `oocgemm.reports.sections`
writes figures and tables as HTML. The scripts in the folder `web` draw the Gantt chart from the spans, which
the page contains as JSON.

The trace is a file for Perfetto and chrome://tracing: Chrome's trace events in JSON. An operation is a
complete event (X). Each lane is a thread, which the viewers draw as a track. Events of one track must not
overlap, so a lane with concurrent operations gets several tracks. The data flow between operations is drawn
as arrows (flow events s and f). Each device of each worker is a process. If there are several devices, each
has two more tracks: the parts of the product that its worker had, and what the device computed or waited for.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from oocgemm.errors import InputError
from oocgemm.reports.charts import svg
from oocgemm.reports.sections import ReportedRun, body, heading, labels, title
from oocgemm.timeline.activities import (
    FLOW,
    Attempt,
    Unit,
    Worker,
    activities,
    is_distributed,
    lanes_of,
    last_predecessor,
    rows,
    spans_by_stream,
    stalls,
    stream_predecessors,
    units_of,
    workers_of,
)
from oocgemm.timeline.metrics import Distribution, report
from oocgemm.timeline.spans import Span, Timeline

# Maximum number of spans of a distributed run on a page. Each span takes about 30 bytes.
MAX_SPANS = 300_000
SCRIPTS = ("format.js", "view.js", "gantt.js", "input.js", "main.js")
PNG_WIDTH = 2700


def page(runs: Sequence[tuple[str, Timeline]]) -> str:
    """Return the HTML page of one run, or of several side by side. Each run is given as (name, timeline)."""
    described = [ReportedRun.of(name, timeline, report(timeline)) for name, timeline in runs]
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

    The spans are sorted by start and stored as columns. ``lane``, ``kind``, ``operand``, ``tile`` and
    ``size`` are indices into lists of distinct values. ``start`` is in nanoseconds since the start of the
    previous span. ``after`` is the index of the span minus the index of its `last_predecessor`; 0 if there
    is no predecessor, or if the two overlap.

    For a run on several devices, whose figures are `spread`, ``activity`` replaces ``waits``. The spans of
    such a run are left out if there are more than `MAX_SPANS`.
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
    """A list of distinct values with their indices, in the order in which they first occurred."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Any]:
        return [*self._numbers]


def _json(data: Any) -> str:
    """Return data as JSON that is safe in an HTML script element: no text in the data can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (files("oocgemm.reports") / "web" / name).read_text(encoding="utf-8")


def write_trace(file: TextIO, timeline: Timeline) -> None:
    """Write a timeline as a JSON trace to an open file, one event per line."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    for event in _events(timeline):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    spans = timeline.spans
    lanes = lanes_of(spans)
    row = dict(zip((span.id for span in spans), rows(spans, exact=True), strict=True))
    by_id = {span.id: span for span in spans}
    distributed, workers = is_distributed(timeline), workers_of(timeline.header)
    # A worker that only added partial products is no unit, but has operations.
    units = units_of(timeline) if distributed else []
    units += sorted({Unit(span.worker, span.device) for span in spans}.difference(units))
    numbers = {unit: number if distributed else unit.device for number, unit in enumerate(units)}

    def track(span: Span) -> dict[str, int]:
        # Every lane gets its own range of track numbers. A lane has at most one track per span.
        process = numbers[Unit(span.worker, span.device)]
        return {"pid": process, "tid": lanes.index(span.lane) * (len(spans) + 1) + row[span.id]}

    named: set[tuple[int, int]] = set()
    flows = 0
    if distributed:
        yield from _device_tracks(timeline, numbers, len(lanes) * (len(spans) + 1))
    for span in spans:
        place = track(span)
        key = place["pid"], place["tid"]
        if key not in named:
            named.add(key)
            name = span.lane if not row[span.id] else f"{span.lane} {row[span.id] + 1}"
            yield from _names(place, _process(Unit(span.worker, span.device), workers), name, place["tid"])
        facts = {"tile": f"{span.tile[0]},{span.tile[1]}", "step": span.step}
        facts |= {"bytes": span.bytes, "flops": span.flops}
        what = span.kind if span.kind == "multiply" else f"{span.kind} {span.operand}"
        yield _complete(what, span.lane, span.start, span.end, place, facts)
        # A panel that does not fill its slot leaves a part of an older panel there. A span that uses the slot
        # waits for both uploads, but uses only the newer panel. So among operations of the same kind and
        # operand, only the one that was issued last gets an arrow.
        sources = (by_id[number] for number in sorted(span.waits) if number in by_id)
        for source in {(s.kind, s.operand): s for s in sources if _feeds(s, span)}.values():
            flows += 1
            arrow = {"name": "data", "cat": "flow", "id": flows}
            # Arrows start and end in the middle of events. After rounding, an arrow at the end of an event
            # could lie outside it, and the viewer would drop the arrow.
            yield {"ph": "s", **arrow, "ts": (source.start + source.end) / 2e3, **track(source)}
            yield {"ph": "f", "bp": "e", **arrow, "ts": (span.start + span.end) / 2e3, **place}


def _device_tracks(timeline: Timeline, numbers: Mapping[Unit, int], first: int) -> Iterator[dict[str, Any]]:
    """Yield two tracks per device, from number `first` on: the parts of its worker, and its activities."""
    workers = workers_of(timeline.header)
    for unit, did in activities(timeline).items():
        parts = workers[unit.worker].parts if workers else ()
        attempts = [(part.start_ns, part.end_ns, f"part {part.part}", _facts(part)) for part in parts]
        causes = [(start, end, why, dict[str, Any]()) for start, end, why in did]
        tracks = ("parts", sorted(attempts, key=itemgetter(0))), ("activity", causes)
        for number, (name, events) in enumerate(tracks):
            place = {"pid": numbers[unit], "tid": first + number}
            yield from _names(place, _process(unit, workers), name, number - 2)
            yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": numbers[unit]}}
            cursor = 0  # attempts may overlap by errors of the clock, but events of a track must not
            for start, end, what, facts in events:
                begin = max(start, cursor)
                cursor = max(end, begin)
                yield _complete(what, name, begin, cursor, place, facts)


def _names(place: Mapping[str, int], process: str, thread: str, order: int) -> Iterator[dict[str, Any]]:
    """Yield the names of a track and of its process, and its position among the tracks."""
    yield {"ph": "M", "name": "process_name", **place, "args": {"name": process}}
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": thread}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": order}}


def _complete(
    name: str, lane: str, start: int, end: int, place: Mapping[str, int], facts: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": lane, **times, **place, "args": facts}


def _facts(part: Attempt) -> dict[str, Any]:
    numbers = {"attempt": part.attempt, "tiles_thrown_away": len(part.thrown_away)}
    return numbers | {"lost": part.lost, "reduces": part.reduces}


def _process(unit: Unit, workers: Sequence[Worker]) -> str:
    """Return the name of a device, which is a process in the trace."""
    if unit.worker >= len(workers):
        return f"device {unit.device}"
    worker = workers[unit.worker]
    return f"{worker.name} on {worker.host}, device {unit.device}"


def _feeds(source: Span, span: Span) -> bool:
    """Return whether a span uses the data of an operation that it waited for, not only its slot."""
    before, after = (FLOW.index(one.kind) if one.kind in FLOW else -1 for one in (source, span))
    return before < after


def export(
    logs: Sequence[str], timelines: Sequence[Timeline], outputs: dict[str, str | None]
) -> list[tuple[str, str]]:
    """Write the requested files, and return a description and the path of each.

    `outputs` maps ``html``, ``svg``, ``png`` and ``trace`` to the path to write, or to None.

    Raises `InputError` if a path cannot be written or is one of `logs`, if another output than ``html`` is
    requested for several timelines, or if a PNG is requested without resvg-py.
    """
    wanted = {kind: path for kind, path in outputs.items() if path is not None}
    for kind, path in wanted.items():
        if any(os.path.realpath(path) == os.path.realpath(log) for log in logs):
            raise InputError(
                f"--{kind} {path} would overwrite the timeline of this report: give another path"
            )
        if kind != "html" and len(logs) > 1:
            raise InputError(
                f"--{kind} takes one timeline, but {len(logs)} were given; only --html takes several"
            )
    makers: dict[str, Callable[[TextIO], object]] = {
        "html": lambda file: file.write(page(list(zip(logs, timelines, strict=True)))),
        "svg": lambda file: file.write(svg(timelines[0], logs[0])),
        "trace": lambda file: write_trace(file, timelines[0]),
    }
    for kind, path in wanted.items():
        with writing(f"--{kind}", path):
            if kind == "png":
                Path(path).write_bytes(_png(svg(timelines[0], logs[0])))
            else:
                with open(path, "w", encoding="utf-8") as file:
                    makers[kind](file)
    names = {"html": "Page", "svg": "Picture", "png": "Picture", "trace": "Trace for ui.perfetto.dev"}
    return [(names[kind], path) for kind, path in wanted.items()]


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Turn an `OSError` into an `InputError` that names the command-line option and the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {option} {path}: {error.strerror}") from error


def check_writable(option: str, path: str) -> None:
    """Raise `InputError` if no file can be created in the folder of `path`. Call this before long work."""
    with writing(option, path):
        folder = os.path.dirname(os.path.abspath(path))
        tempfile.TemporaryFile(dir=folder).close()


def _png(picture: str) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise InputError("--png needs resvg-py: pip install 'oocgemm[png]', or use --svg") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=picture, width=PNG_WIDTH))
