"""Write a timeline as a trace that Perfetto and chrome://tracing display.

The format is Chrome's trace events in JSON. An operation is a complete event (X). Each lane is a thread,
which the viewers draw as a track. Events of one track must not overlap, so a lane with concurrent operations
gets several tracks. The data flow between operations is drawn as arrows (flow events s and f).
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

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

    def track(span: Span) -> dict[str, int]:
        # Every lane gets its own range of track numbers. A lane has at most one track per span.
        return {"pid": span.device, "tid": lanes.index(span.lane) * (len(spans) + 1) + row[span.id]}

    named: set[tuple[int, int]] = set()
    flows = 0
    for span in spans:
        place = track(span)
        key = place["pid"], place["tid"]
        if key not in named:
            named.add(key)
            name = span.lane if not row[span.id] else f"{span.lane} {row[span.id] + 1}"
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"device {span.device}"}}
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


def _feeds(source: Span, span: Span) -> bool:
    """Return whether a span uses the data of `source`, an operation that it waited for.

    If not, `source` used a slot that the span overwrites.
    """
    order = {kind: place for place, kind in enumerate(FLOW)}
    return order.get(source.kind, -1) < order.get(span.kind, -1)
