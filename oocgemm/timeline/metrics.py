"""The figures of a run, computed from its timeline alone.

T is the wall time.

- compute: the time in which at least one Multiply ran. The compute share is this time / T.
- copy overlap: of the time in which the lane h2d or d2h was busy, the share in which a Multiply ran too.
- storage overlap: the same for the lanes read, decode, encode and write.
- exposed time: T - compute. Each instant of it is attributed to one cause.
- shares: the compute share, and the exposed time of each cause / T. They add up to 1.
- traffic: three numbers of bytes for each link. ``bytes`` crossed the link in the run. ``required`` would
  cross it if every element crossed once. ``least`` is a lower bound for any schedule within the budgets.
- efficiency: a lower bound of the run time / T. The bound is the longest of these times, at calibrated rates:
  multiplying, moving the ``least`` bytes over each link, and decoding.

A ratio is None if its denominator is 0, and the efficiency if rates are not calibrated or the run is
unfinished.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oocgemm.timeline.log import read_log
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.timeline.verdict import Verdict, shares, verdict

Interval = tuple[int, int]
Wait = tuple[int, int, str]

COPY = ("h2d", "d2h")
STORAGE = ("read", "decode", "encode", "write")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as disjoint intervals in ascending order. Empty ones are left out.

    >>> union([(5, 7), (0, 3), (2, 4), (9, 9)])
    [(0, 4), (5, 7)]
    """
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Return the sum of the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intervals of time that both lists cover.

    The intervals of each list must be disjoint and in ascending order, as `union` returns them.
    """
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


@dataclass(frozen=True)
class Report:
    """The figures of a run on one device.

    Times are in seconds. The figures are defined at the top of this module. Ratios may be None.

    `checks` describes the checks of C, and is None if the run was not verified:

    - `tiles`, `blocks`: the numbers of tiles, and of blocks of their strips, that were checked.
    - `undecided`: the number of blocks with nonfinite sums. In these blocks, only the positions of nonfinite
      elements were checked.
    - `recomputed`: the tiles that were computed a second time, because their check failed.
    - `seconds`: the time in which at least one host thread was checking. `share` is `seconds` / T.
    - `thread_seconds`: the same time, summed over the threads. `core_share` is `thread_seconds` / (T * number
      of cores).
    - `tier`: where the checksums were computed, "host" or "device".
    - `device_seconds`: the time in which the device computed checksums.

    `cpu` describes the use of the CPU, and is None if the system does not report processor time:

    - `cores`: the number of cores that this process may use.
    - `own`, `others`: the mean number of cores that this process, and all other programs, kept busy.

    `unfinished` is set if the run was stopped or is still running. `wall` then ends with the last recorded
    operation. The efficiency, ``required`` and ``least`` are None.
    """

    wall: float
    compute: float
    compute_share: float | None
    copy_overlap: float | None
    storage_overlap: float | None
    exposed: dict[str, float]
    lanes: dict[str, dict[str, float]]
    traffic: dict[str, dict[str, int | None]]
    flops: int
    flop_rate: float | None
    efficiency: float | None
    checks: dict[str, Any] | None = None
    unfinished: bool = False
    cpu: dict[str, float] | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Return compute and each cause of exposed time as shares of T, the largest first."""
        return shares(self.compute, self.exposed, self.wall)

    @property
    def verdict(self) -> Verdict:
        """Return what limits the speed of the run: the cause with the largest share of T."""
        return verdict(self.shares if self.compute else {})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the verdict and the shares as plain data that JSON can represent."""
        return {"verdict": self.verdict.to_dict(), "shares": self.shares} | asdict(self)


def report(timeline: Timeline | str | os.PathLike[str], device: int = 0) -> Report:
    """Compute the figures of a run from its timeline, or from the path of its log.

    Only operations on the device with number `device` are counted.

    Raises `InputError` if the log cannot be read.
    """
    if not isinstance(timeline, Timeline):
        timeline = read_log(os.fspath(timeline))
    spans = [s for s in timeline.spans if s.device == device]
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    moved: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        lanes[span.lane].append((span.start, span.end))
        moved[span.lane] += span.bytes
    multiplies = [s for s in spans if s.kind == "multiply"]
    compute = union((s.start, s.end) for s in multiplies)
    wall = timeline.wall
    flops = sum(s.flops for s in multiplies)
    return Report(
        wall=wall / 1e9,
        compute=length(compute) / 1e9,
        compute_share=_ratio(length(compute), wall),
        copy_overlap=_overlap([i for lane in COPY for i in lanes[lane]], compute),
        storage_overlap=_overlap([i for lane in STORAGE for i in lanes[lane]], compute),
        exposed={cause: ns / 1e9 for cause, ns in exposed(spans, wall).items()},
        lanes={
            lane: {"busy": length(union(intervals)) / 1e9, "operations": len(intervals), "bytes": moved[lane]}
            for lane, intervals in lanes.items()
            if intervals
        },
        traffic=_traffic(timeline, moved),
        flops=flops,
        flop_rate=_ratio(flops, wall / 1e9),
        efficiency=_efficiency(timeline, spans, flops),
        checks=_checks(timeline),
        unfinished=timeline.unfinished,
        cpu=_cpu(timeline),
    )


def same_product(timelines: Sequence[Timeline]) -> bool:
    """Return whether all runs computed products of the same extents and dtypes.

    Timelines without a plan do not describe their product. They are ignored.
    """
    problems = [timeline.header.get("plan", {}).get("problem") for timeline in timelines]
    names = ("m", "n", "k", "a_dtype", "b_dtype", "c_dtype")
    return len({tuple(problem.get(name) for name in names) for problem in problems if problem}) <= 1


def shares_between(spans: Sequence[Span], since: int, until: int) -> dict[str, float]:
    """Return the shares of compute and of each cause of exposed time between two times, the largest first.

    The times `since` and `until` are in nanoseconds since the run began. `spans` must contain all operations
    that ran between them.

    >>> multiply = Span(0, "multiply", "A", "compute", "s", 0, (0, 0), 0, 10, 40, 0, 8)
    >>> shares_between([multiply], 0, 50)
    {'compute': 0.6, 'start-up': 0.2, 'tail': 0.2}
    """
    window = [(since, until)]
    compute = union((s.start, s.end) for s in spans if s.kind == "multiply")
    causes: defaultdict[str, float] = defaultdict(float)
    for start, end, cause in exposed_intervals(spans, until):
        causes[cause] += max(0, end - max(start, since))
    return shares(length(intersection(compute, window)), causes, until - since)


def exposed(spans: Sequence[Span], wall: int) -> dict[str, int]:
    """Return the exposed time of each cause, in nanoseconds."""
    causes: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in exposed_intervals(spans, wall):
        causes[cause] += end - start
    return dict(causes)


def exposed_intervals(spans: Sequence[Span], wall: int) -> list[Wait]:
    """Return the exposed time as intervals (start, end, cause) in order.

    Why a Multiply started late is found by going back in time. Of the operations that the Multiply waited
    for, the last one to end delayed it. The operation that delayed that one is found in the same way, and
    so on. While one of these operations ran, its lane is the cause, except that ``d2h`` is reported as
    ``accumulator``: the Multiply waited for a free accumulator.

    While none of them ran, the cause is ``start-up`` before the first Multiply, and ``issue`` later. After
    the last Multiply, it is ``tail``.
    """
    by_id = {s.id: s for s in spans}
    before = stream_predecessors(spans)
    found: list[Wait] = []
    covered_until = 0
    idle_cause = "start-up"
    for span in sorted((s for s in spans if s.kind == "multiply"), key=lambda s: (s.start, s.end)):
        if span.start > covered_until:
            found += reversed(_attributed(span, (covered_until, span.start), idle_cause, by_id, before))
        covered_until = max(covered_until, span.end)
        idle_cause = "issue"
    found.append((covered_until, wall, "tail"))
    return [wait for wait in found if wait[0] < wait[1]]


def _attributed(
    span: Span, gap: Interval, idle_cause: str, by_id: dict[int, Span], before: dict[int, int]
) -> list[Wait]:
    """Return the causes of the gap before a Multiply, as intervals (start, end, cause), the latest first.

    `span` is the Multiply. `exposed_intervals` describes the method. `idle_cause` is the cause while none of
    the delaying operations ran. `by_id` maps ids to spans. `before` is from `stream_predecessors`.
    """
    start, cursor = gap
    found: list[Wait] = []
    current = span
    while cursor > start:
        latest = last_predecessor(current, by_id, before)
        if latest is None or latest.end <= start:
            break
        if latest.end < cursor:
            found.append((latest.end, cursor, idle_cause))
            cursor = latest.end
        begin = max(start, min(latest.start, cursor))
        found.append((begin, cursor, _cause(latest)))
        cursor = begin
        current = latest
    found.append((start, cursor, idle_cause))
    return found


def last_predecessor(span: Span, by_id: dict[int, Span], before: dict[int, int]) -> Span | None:
    """Return the predecessor of a span that ended last; None if it has no predecessor.

    The predecessors are the operations in `span.waits`, and the one that `before` gives for the span.
    `before` is from `stream_predecessors`.
    """
    candidates = [by_id[i] for i in (*span.waits, before.get(span.id, -1)) if i in by_id]
    return max(candidates, key=lambda s: s.end, default=None)


def _cause(span: Span) -> str:
    return "accumulator" if span.lane == "d2h" else span.lane


def stream_predecessors(spans: Sequence[Span]) -> dict[int, int]:
    """Map the id of each span to the id of an earlier operation of its stream, which may have delayed it.

    If several threads run the operations of a stream, an operation starts when a thread becomes free. The
    earlier operation that ended last before the span started is therefore chosen. If none had ended, the
    operation issued just before the span is chosen. The first operation of a stream is left out.
    """
    streams: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.id):
        streams[span.stream].append(span)
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


def _overlap(intervals: list[Interval], compute: Sequence[Interval]) -> float | None:
    merged = union(intervals)
    return _ratio(length(intersection(merged, compute)), length(merged))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _traffic(timeline: Timeline, moved: dict[str, int]) -> dict[str, dict[str, int | None]]:
    plan = {} if timeline.unfinished else timeline.header.get("plan", {})
    through_codec = {"read": "decode", "write": "encode"}
    return {
        link: {
            "bytes": moved.get(link, 0) + moved.get(through_codec.get(link, ""), 0),
            "required": plan.get("required", {}).get(link),
            "least": plan.get("least", {}).get(link),
        }
        for link in ("read", "h2d", "d2h", "write")
    }


def _checks(timeline: Timeline) -> dict[str, Any] | None:
    found = timeline.header.get("checks")
    if found is None:
        return None
    wall, cores = timeline.wall / 1e9, timeline.header.get("machine", {}).get("cores", 1)
    return dict(found) | {
        "share": _ratio(found["seconds"], wall),
        "core_share": _ratio(found["thread_seconds"], wall * cores),
    }


def _cpu(timeline: Timeline) -> dict[str, float] | None:
    found, wall = timeline.header.get("cpu"), timeline.wall / 1e9
    if not found or not wall:
        return None
    own, busy = (found[name] / wall for name in ("own_seconds", "busy_seconds"))
    return {"cores": found["cores"], "own": own, "others": max(0.0, busy - own)}


def _efficiency(timeline: Timeline, spans: Sequence[Span], flops: int) -> float | None:
    rates = timeline.header.get("rates")
    if not rates or not timeline.wall or timeline.unfinished:
        return None
    lower_bounds = timeline.header.get("plan", {}).get("least", {})
    work = {"kernel": flops, **lower_bounds, "decode": _decoded(timeline, spans)}
    seconds: float = max(work[part] / rate for part, rate in rates.items() if part in work)
    return seconds / (timeline.wall / 1e9)


def _decoded(timeline: Timeline, spans: Sequence[Span]) -> float:
    """Return the number of bytes that decoding produced.

    Without operations on the lane decode, zarr decoded whole chunks during reads. The bytes of each read are
    then multiplied by the operand's read amplification: bytes of whole chunks per byte needed.
    """
    lane = sum(span.bytes for span in spans if span.lane == "decode")
    if lane:
        return lane
    operands = timeline.header.get("operands", {})
    amplification = timeline.header.get("plan", {}).get("read_amplification", {})
    return sum(
        span.bytes * float(amplification.get(span.operand, 1.0))
        for span in spans
        if span.lane == "read" and operands.get(span.operand, {}).get("direct") is False
    )


def in_place(timeline: Timeline) -> str:
    """Return a text that counts the panels and strips that the device copied from or to the caller's arrays.

    It is empty if there are none. Such arrays are pinned, and their blocks need no buffers on the host.
    """
    direct = timeline.header.get("plan", {}).get("direct", "")
    counts = []
    for kind, operands, blocks, where in (
        ("upload", "AB", "panels of A and B", "from the caller's arrays"),
        ("download", "C", "strips of C", "to the caller's array"),
    ):
        spans = [span.operand for span in timeline.spans if span.kind == kind and span.operand in operands]
        if count := sum(operand in direct for operand in spans):
            counts.append(f"{count} of {len(spans)} {blocks} copied directly {where}")
    return ", ".join(counts)
