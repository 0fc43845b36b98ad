"""The figures of a run, from its timeline alone.

|X| is the length of the union of the intervals of lanes X.

- compute share    |compute| / T, compute = Multiply
- copy overlap     |copy and compute| / |copy|, copy = h2d and d2h
- storage overlap  |storage and compute| / |storage|, storage = read, decode, encode, write
- exposed time     T - |compute|, every instant of it given to a cause; the causes add up to it exactly
- traffic          bytes crossed per link, beside those required and the least possible for the budget
- shares           compute and each cause of exposed time over T; they add up to 1 (`oocgemm.timeline.verdict`)
- efficiency       the longest of flops / kernel rate, least bytes / rate of each link and bytes decoded / rate of
                   decoding, over T, by the calibrated rates in the header: those of what the run uses

A ratio over nothing, or over rates never calibrated, is None.
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
    """The same instants as disjoint intervals in order.

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
    """Summed lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Instants in both of two unions.

    >>> intersection([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
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
    """The figures of one device. Times in seconds; ratios between 0 and 1, or None over nothing.

    `checks` of a verified run: how many tiles and blocks of them were checked, how many blocks held an Inf or a NaN and
    were only looked at for these (`undecided`), which tiles were `recomputed`, the seconds in which any thread was
    checking, those of all threads together, and both as a share: of T, and of T on every core; and which `tier` took the
    checksums, and the seconds in which the device was at that.

    `cpu` says how many cores the process could use, and how many of them, on average over T, it used itself (`own`) and
    others did: other programs, and other virtual machines of the host. None where the system does not say.

    Of an `unfinished` run `wall` is the time up to the end of its last operation that was recorded; there is no efficiency,
    and nothing required or least possible, since those are of the whole.
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
        """Shares of T of compute and of each cause of exposed time, the largest first."""
        return shares(self.compute, self.exposed, self.wall)

    @property
    def verdict(self) -> Verdict:
        """What bounds the run: the largest of the shares."""
        return verdict(self.shares if self.compute else {})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the verdict and the shares included."""
        return {"verdict": self.verdict.to_dict(), "shares": self.shares} | asdict(self)


def report(timeline: Timeline | str | os.PathLike[str], device: int = 0) -> Report:
    """Compute all figures of a timeline, or of the log of one at a path.

    Raises `InputError` for a path at which there is no log that can be read.
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
    """Whether runs multiplied alike: the same extents and dtypes. True where a log does not say what it multiplied."""
    problems = [timeline.header.get("plan", {}).get("problem") for timeline in timelines]
    names = ("m", "n", "k", "a_dtype", "b_dtype", "c_dtype")
    return len({tuple(problem.get(name) for name in names) for problem in problems if problem}) <= 1


def shares_between(spans: Sequence[Span], since: int, until: int) -> dict[str, float]:
    """Shares of the time between two instants by cause, of a run whose operations are known up to `until`.

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
    """Nanoseconds outside all Multiplies, by cause; they add up to T - |compute| exactly."""
    causes: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in exposed_intervals(spans, wall):
        causes[cause] += end - start
    return dict(causes)


def exposed_intervals(spans: Sequence[Span], wall: int) -> list[Wait]:
    """The instants outside all Multiplies and what each is given to, as intervals (start, end, cause) in order.

    For each gap before a Multiply, the chain of the predecessors that ended last is followed back through the
    gap: each instant belongs to the operation of that chain which was running, or else to ``issue``. What is
    uncovered before the first Multiply is ``start-up``; all after the last is ``tail``.
    """
    by_id = {s.id: s for s in spans}
    before = stream_predecessors(spans)
    found: list[Wait] = []
    covered_until = 0
    rest = "start-up"
    for span in sorted((s for s in spans if s.kind == "multiply"), key=lambda s: (s.start, s.end)):
        if span.start > covered_until:
            found += reversed(_blamed(span, (covered_until, span.start), rest, by_id, before))
        covered_until = max(covered_until, span.end)
        rest = "issue"
    found.append((covered_until, wall, "tail"))
    return [wait for wait in found if wait[0] < wait[1]]


def _blamed(
    span: Span, gap: Interval, rest: str, by_id: dict[int, Span], before: dict[int, int]
) -> list[Wait]:
    """A gap shared among the chain of operations that the span waited for, from its end back to its start."""
    start, cursor = gap
    found: list[Wait] = []
    current = span
    while cursor > start:
        latest = last_of(current, by_id, before)
        if latest is None or latest.end <= start:
            break
        if latest.end < cursor:
            found.append((latest.end, cursor, rest))
            cursor = latest.end
        begin = max(start, min(latest.start, cursor))
        found.append((begin, cursor, _cause(latest)))
        cursor = begin
        current = latest
    found.append((start, cursor, rest))
    return found


def last_of(span: Span, by_id: dict[int, Span], before: dict[int, int]) -> Span | None:
    """What ended last of all that a span had to wait for, its predecessor on the stream included."""
    candidates = [by_id[i] for i in (*span.waits, before.get(span.id, -1)) if i in by_id]
    return max(candidates, key=lambda s: s.end, default=None)


def _cause(span: Span) -> str:
    return "accumulator" if span.lane == "d2h" else span.lane


def stream_predecessors(spans: Sequence[Span]) -> dict[int, int]:
    """For each span the one of its stream that ended last before it began, or else was issued before it: a stream that several
    threads work off takes the next operation when any of them is free."""
    streams: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.id):
        streams[span.stream].append(span)
    found: dict[int, int] = {}
    for issued in streams.values():
        ended = sorted(issued, key=lambda s: (s.end, s.id))
        ends = [s.end for s in ended]
        for number, span in enumerate(issued):
            place = bisect_right(ends, span.start) - 1
            while place >= 0 and ended[place].id >= span.id:  # of no length, or clocks that differ
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
    least = timeline.header.get("plan", {}).get("least", {})
    work = {"kernel": flops, **least, "decode": _decoded(timeline, spans)}
    seconds: float = max(work[part] / rate for part, rate in rates.items() if part in work)
    return seconds / (timeline.wall / 1e9)


def _decoded(timeline: Timeline, spans: Sequence[Span]) -> float:
    """Bytes decoded: those of the lane, or where reading decodes on its way, of the chunks that reads have touched."""
    lane = sum(span.bytes for span in spans if span.lane == "decode")
    if lane:
        return lane
    operands = timeline.header.get("operands", {})
    touched = timeline.header.get("plan", {}).get("read_amplification", {})
    return sum(
        span.bytes * float(touched.get(span.operand, 1.0))
        for span in spans
        if span.lane == "read" and operands.get(span.operand, {}).get("direct") is False
    )


def in_place(timeline: Timeline) -> str:
    """How many panels were not read into a slot, and how many strips not written from one, if any."""
    said = []
    for kinds, operands, what, where in (
        ("read", "AB", "panels of A and B", "from where they lie in memory"),
        ("write", "C", "strips of C", "to where they lie in memory"),
    ):
        spans = [span for span in timeline.spans if span.kind == kinds and span.operand in operands]
        if lying := sum(not span.bytes for span in spans):
            said.append(f"{lying} of {len(spans)} {what} copied {where}")
    return ", ".join(said)
