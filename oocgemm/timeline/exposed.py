"""Attribute exposed time, in which no Multiply ran, to its causes."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from oocgemm.timeline.intervals import Interval, intersection, length, union
from oocgemm.timeline.spans import Span
from oocgemm.timeline.verdict import shares

Wait = tuple[int, int, str]
# The worker, the device and the name of a stream.
StreamKey = tuple[int, int, str]
# At most this many operations of a stream run at the same time, if several threads run them.
MAX_AT_ONCE = 16


def finish_cause(*, selects: bool) -> str:
    """Return the cause of exposed time while a Finish ran.

    If the run `selects` or reduces elements of a tile and does not store C, that is what a Finish does.
    Otherwise the next tile waits for its accumulator.
    """
    return "select" if selects else "accumulator"


def shares_between(
    spans: Sequence[Span], since: int, until: int, finish: str = "accumulator"
) -> dict[str, float]:
    """Return the shares of compute and of each cause of exposed time between two times, the largest first.

    The times `since` and `until` are in nanoseconds since the run began. `spans` must contain all operations
    that ran between them. `finish` is from `finish_cause`.

    >>> multiply = Span(0, "multiply", "A", "compute", "s", 0, (0, 0), 0, 10, 40, 0, 8)
    >>> shares_between([multiply], 0, 50)
    {'compute': 0.6, 'start-up': 0.2, 'tail': 0.2}
    """
    window = [(since, until)]
    compute = union((s.start, s.end) for s in spans if s.kind == "multiply")
    causes: defaultdict[str, float] = defaultdict(float)
    for start, end, cause in exposed_intervals(spans, until, finish=finish):
        causes[cause] += max(0, end - max(start, since))
    return shares(length(intersection(compute, window)), causes, until - since)


def exposed(spans: Sequence[Span], wall: int) -> dict[str, int]:
    """Return the exposed time of each cause, in nanoseconds."""
    causes: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in exposed_intervals(spans, wall):
        causes[cause] += end - start
    return dict(causes)


def exposed_intervals(
    spans: Sequence[Span],
    wall: int,
    since: int = 0,
    device: int | None = None,
    finish: str = "accumulator",
) -> list[Wait]:
    """Return the exposed time from `since` to `wall` as intervals (start, end, cause) in order.

    It is that of one device if `device` is given. `spans` has the operations of all devices, since a device
    may wait for an operation of another one.

    Why a Multiply started late is found by going back in time. Of the operations that the Multiply waited
    for, the last one to end delayed it. The operation that delayed that one is found in the same way, and
    so on. While one of these operations ran, its lane is the cause. For an operation on ``d2h`` the cause is
    ``accumulator``: the Multiply waited for a free accumulator. For a Finish it is `finish`, which is
    ``select`` if C is not stored (`finish_cause`).

    While none of them ran, the stream of the one that started next may have run other operations at the same
    time, such as copies of other blocks. Then its lane is the cause. Otherwise it is ``start-up`` before the
    first Multiply, and ``issue`` later. After the last Multiply, it is ``tail``.
    """
    by_id = {s.id: s for s in spans}
    streams = spans_by_stream(spans)
    before = stream_predecessors(streams)
    found: list[Wait] = []
    covered_until = since
    idle_cause = "start-up"
    multiplies = [s for s in spans if s.kind == "multiply" and device in (None, s.device)]
    for span in sorted(multiplies, key=lambda s: (s.start, s.end)):
        if span.start > covered_until:
            found += reversed(
                _attributed(span, (covered_until, span.start), idle_cause, by_id, before, streams, finish)
            )
        covered_until = max(covered_until, span.end)
        idle_cause = "issue"
    found.append((covered_until, wall, "tail"))
    return [wait for wait in found if wait[0] < wait[1]]


def _attributed(
    span: Span,
    gap: Interval,
    idle_cause: str,
    by_id: dict[int, Span],
    before: dict[int, int],
    streams: dict[StreamKey, list[Span]],
    finish: str,
) -> list[Wait]:
    """Return the causes of the gap before a Multiply, as intervals (start, end, cause), the latest first.

    `span` is the Multiply. `exposed_intervals` describes the method. `idle_cause` is the cause while no
    operation ran that may have delayed it. `by_id` maps ids to spans. `before` is from `stream_predecessors`,
    and `streams` from `spans_by_stream`.
    """
    start, cursor = gap
    found: list[Wait] = []
    current = span
    while cursor > start:
        latest = last_predecessor(current, by_id, before)
        if latest is None or latest.end <= start:
            break
        if latest.end < cursor:
            found += _idle(current, (latest.end, cursor), idle_cause, streams, finish)
            cursor = latest.end
        begin = max(start, min(latest.start, cursor))
        found.append((begin, cursor, _cause(latest, finish)))
        cursor = begin
        current = latest
    return found + _idle(current, (start, cursor), idle_cause, streams, finish)


def _idle(
    span: Span, gap: Interval, idle_cause: str, streams: dict[StreamKey, list[Span]], finish: str
) -> list[Wait]:
    """Return the causes of a gap in which no operation ran that a span waited for, the latest first."""
    if span.kind == "multiply":
        return [(*gap, idle_cause)] if gap[0] < gap[1] else []
    issued = streams[_stream(span)]
    place = bisect_left(issued, span.id, key=lambda s: s.id)
    near = issued[max(0, place - MAX_AT_ONCE) : place + MAX_AT_ONCE]
    busy = intersection(union((s.start, s.end) for s in near), [gap])
    found, cursor = list[Wait](), gap[1]
    for start, end in reversed(busy):
        found += [(end, cursor, idle_cause), (start, end, _cause(span, finish))]
        cursor = start
    found.append((gap[0], cursor, idle_cause))
    return [wait for wait in found if wait[0] < wait[1]]


def last_predecessor(span: Span, by_id: dict[int, Span], before: dict[int, int]) -> Span | None:
    """Return the predecessor of a span that ended last; None if it has no predecessor.

    The predecessors are the operations in `span.waits`, and the one that `before` gives for the span.
    `before` is from `stream_predecessors`.
    """
    candidates = [by_id[i] for i in (*span.waits, before.get(span.id, -1)) if i in by_id]
    return max(candidates, key=lambda s: s.end, default=None)


def _cause(span: Span, finish: str) -> str:
    if span.kind == "finish":
        return finish
    return "accumulator" if span.lane == "d2h" else span.lane


def spans_by_stream(spans: Sequence[Span]) -> dict[StreamKey, list[Span]]:
    """Return the operations of each stream in the order in which they were issued."""
    streams: defaultdict[StreamKey, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.id):
        streams[_stream(span)].append(span)
    return streams


def _stream(span: Span) -> StreamKey:
    return span.worker, span.device, span.stream


def stream_predecessors(streams: dict[StreamKey, list[Span]]) -> dict[int, int]:
    """Map the id of each span to the id of an earlier operation of its stream, which may have delayed it.

    If several threads run the operations of a stream, an operation starts when a thread becomes free. The
    earlier operation that ended last before the span started is therefore chosen. If none had ended, the
    operation issued just before the span is chosen. The first operation of a stream is left out.
    """
    found: dict[int, int] = {}
    for issued in streams.values():
        ended = sorted(issued, key=lambda s: (s.end, s.id))
        ends = [s.end for s in ended]
        for number, span in enumerate(issued):
            place = bisect_right(ends, span.start) - 1
            # Skip operations that were issued after the span. They may seem to end before it starts, because
            # device clocks are inexact.
            while place >= 0 and ended[place].id >= span.id:
                place -= 1
            if place >= 0:
                found[span.id] = ended[place].id
            elif number:
                found[span.id] = issued[number - 1].id
    return found
