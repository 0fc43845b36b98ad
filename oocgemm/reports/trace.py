"""Write a timeline as a trace that Perfetto and chrome://tracing display.

The format is Chrome's trace events in JSON. An operation is a complete event (X). Each lane is a thread,
which the viewers draw as a track. Events of one track must not overlap, so a lane with concurrent operations
gets several tracks. The data flow between operations is drawn as arrows (flow events s and f).

Each device of each worker is a process. If there are several, two more tracks of a device show the parts of
the product that its worker had, and what the device computed or waited for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TextIO

from oocgemm.timeline.activities import (
    Attempt,
    Unit,
    Worker,
    activities,
    is_distributed,
    units_of,
    workers_of,
)
from oocgemm.timeline.series import FLOW, lanes_of, rows
from oocgemm.timeline.spans import Span, Timeline


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
            process = _process(Unit(span.worker, span.device), workers)
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": process}}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}}
        facts = {
            "tile": f"{span.tile[0]},{span.tile[1]}",
            "step": span.step,
            "bytes": span.bytes,
            "flops": span.flops,
        }
        what = span.kind if span.kind == "multiply" else f"{span.kind} {span.operand}"
        times = {"ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3}
        yield {"ph": "X", "name": what, "cat": span.lane, **times, **place, "args": facts}
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
    """Yield two tracks for each device: the parts that its worker had, and what it computed or waited for.

    `numbers` has the number of the process of each device. `first` is the first free number of a track.
    """
    workers = workers_of(timeline.header)
    for unit, did in activities(timeline).items():
        parts = workers[unit.worker].parts if workers else ()
        attempts = [(part.start_ns, part.end_ns, f"part {part.part}", _facts(part)) for part in parts]
        causes: list[tuple[int, int, str, dict[str, Any]]] = [
            (start, end, why, {}) for start, end, why in did
        ]
        for number, (name, events) in enumerate(
            (("parts", sorted(attempts, key=itemgetter(0))), ("activity", causes))
        ):
            place = {"pid": numbers[unit], "tid": first + number}
            process = {"name": _process(unit, workers)}
            yield {"ph": "M", "name": "process_name", **place, "args": process}
            yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": numbers[unit]}}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number - 2}}
            cursor = 0  # attempts may overlap by errors of the clock, but events of a track must not
            for start, end, what, facts in events:
                begin = max(start, cursor)
                cursor = max(end, begin)
                times = {"ts": begin / 1e3, "dur": (cursor - begin) / 1e3}
                yield {"ph": "X", "name": what, "cat": name, **times, **place, "args": facts}


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
    """Return whether a span uses the data of `source`, an operation that it waited for.

    If not, `source` used a slot that the span overwrites.
    """
    order = {kind: place for place, kind in enumerate(FLOW)}
    return order.get(source.kind, -1) < order.get(span.kind, -1)
