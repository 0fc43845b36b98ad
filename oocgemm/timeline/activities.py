"""What each device of a run did at each instant of its wall time T, what limited the run, and series of it.

Each instant is attributed to one cause of `CAUSES`, so that the shares of all causes add up to 1. The cause
is ``compute`` if at least one Multiply ran at that instant. All other time is *exposed*, and its causes are
called stalls: `exposed_intervals` determines them. The *verdict* names the cause with the largest share.

A *unit* is one device of one worker. A run in one process has one worker, which has no name. In a distributed
run each worker computes parts, one after another, each in a process of its own. The header of the log then
has the field ``workers``, a list of objects with the fields of `Worker`. `oocgemm.timeline.log` writes it.

The last part has data for drawing: rows of concurrent operations, rates over time, ends of tiles.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from oocgemm.planning.sinks import Stored
from oocgemm.planning.units import format_percent
from oocgemm.timeline.spans import LANES, Interval, Span, Timeline, intersection, length, union
from oocgemm.values import dataclass

COMPUTE = "compute"
CAUSES = {
    COMPUTE: "multiplying",
    "read": "waiting for reads",
    "decode": "waiting for chunks to be decoded",
    "h2d": "waiting for copies to the device",
    "prepare": "waiting for panels to be prepared",
    "accumulator": "waiting for a tile to be finished or copied off the device",
    "select": "waiting for elements of a tile to be selected or reduced",
    "encode": "waiting for C to be encoded",
    "write": "waiting for C to be written",
    "issue": "no operation that the kernel waited for was running",
    "start-up": "before the first multiplication, no operation was running",
    "tail": "after the last multiplication",
    "samples": "computing samples of the result again, to check it",
    "part-wait": "the worker had no part to compute",
    "reduce": "adding the partial products of a k-split",
}
Wait = tuple[int, int, str]
# The worker, the device and the name of a stream.
StreamKey = tuple[int, int, str]
# At most this many operations of a stream run at the same time, if several threads run them.
MAX_AT_ONCE = 16
PART_WAIT, REDUCE, SAMPLES = "part-wait", "reduce", "samples"
MAX_DEVICES = 1024  # of one worker; a log with more is damaged
_LARGEST = 2**63


@dataclass(frozen=True)
class Verdict:
    """What limits the speed of a run.

    `bound` is the cause with the largest share of T, such as ``compute`` or ``read``. `share` is its
    share. If the run has no Multiply, `bound` is ``nothing``.

    `stall` is the cause other than ``compute`` with the largest share, `stall_share`. If the kernel never
    waited, `stall` is empty.
    """

    bound: str
    share: float
    stall: str
    stall_share: float
    compute_share: float

    @property
    def headline(self) -> str:
        """Return a text that names the cause with the largest share of T, and this share.

        >>> verdict({"compute": 0.734, "write": 0.084}).headline
        'compute-bound, 73.4%'
        """
        return f"{self.bound}-bound, {format_percent(self.share)}" if self.share else "nothing was multiplied"

    @property
    def beside(self) -> str:
        """Return the text that follows `headline`; "" if the kernel never waited.

        For a compute-bound run, it gives the share of the largest stall; for any other run, that of compute.

        >>> verdict({"compute": 0.734, "write": 0.084}).beside
        'largest stall: write 8.4%'
        >>> verdict({"compute": 0.02, "read": 0.98}).beside
        'compute 2.0%'
        """
        if not self.stall:
            return ""
        if self.bound == COMPUTE:
            return f"largest stall: {self.stall} {format_percent(self.stall_share)}"
        return f"{COMPUTE} {format_percent(self.compute_share)}"

    def to_dict(self) -> dict[str, str | float]:
        """Return the fields as a dictionary that JSON can represent."""
        return asdict(self)


def shares(compute: float, exposed: Mapping[str, float], wall: float) -> dict[str, float]:
    """Return each cause's share of the wall time, the largest first.

    `compute` is the time in which any Multiply ran, `exposed` the time of each other cause, and `wall` the
    wall time, all in the same unit. If `wall` is 0, the result is empty.

    >>> shares(6.0, {"read": 1.0, "tail": 3.0}, 10.0)
    {'compute': 0.6, 'tail': 0.3, 'read': 0.1}
    """
    if not wall:
        return {}
    found = {COMPUTE: compute / wall} | {
        cause: seconds / wall for cause, seconds in exposed.items() if seconds
    }
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def verdict(shares: Mapping[str, float]) -> Verdict:
    """Return the verdict on a run whose causes have these shares of its wall time.

    If compute and the largest stall have equal shares, the run counts as compute-bound. For a run without a
    Multiply, pass an empty mapping.
    """
    compute = shares.get(COMPUTE, 0.0)
    stalls = {cause: share for cause, share in shares.items() if cause != COMPUTE}
    stall = max(stalls, key=lambda cause: stalls[cause], default="")
    longest = stalls.get(stall, 0.0)
    if not shares:
        return Verdict("nothing", 0.0, "", 0.0, 0.0)
    bound, share = (COMPUTE, compute) if compute >= longest else (stall, longest)
    return Verdict(bound, share, stall, longest, compute)


def finish_cause(*, selects: bool) -> str:
    """Return the cause of exposed time while a Finish ran.

    If the run does not store C (`selects`), a Finish selects or reduces the elements of a tile. Otherwise the
    next tile waits for its accumulator.
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


def exposed_intervals(
    spans: Sequence[Span],
    wall: int,
    since: int = 0,
    device: int | None = None,
    finish: str = "accumulator",
) -> list[Wait]:
    """Return the exposed time from `since` to `wall` as intervals (start, end, cause) in order.

    If `device` is given, the exposed time is that of this device. `spans` has the operations of all devices,
    since a device may wait for an operation of another one.

    Why a Multiply started late is found by going back in time. Among the operations that the Multiply waited
    for, the last one to end delayed it. The operation that delayed that one is found in the same way, and
    so on. While one of these operations ran, its lane is the cause. For an operation on ``d2h`` the cause is
    ``accumulator``: the Multiply waited for a free accumulator. For a Finish it is `finish`, which is
    ``select`` if C is not stored (`finish_cause`).

    While none of these operations ran, the stream of the one that started next may have run other operations,
    such as copies of other blocks. Then the lane of that stream is the cause. Otherwise the cause is
    ``start-up`` before the first Multiply, and ``issue`` later. After the last Multiply, it is ``tail``.
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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a part: when its process ran, and which spans it recorded.

    `start_ns` and `end_ns` are nanoseconds since the run began, on the coordinator's clock. The spans have
    the ids `first` to `first` + `ids` - 1. `lost` is set if the process died or failed. `thrown_away` lists
    the tiles that the attempt worked on, but that another attempt finished first, or that no attempt
    finished. `reduces` is set if the attempt added partial products of a k-split instead of multiplying.
    """

    part: int
    attempt: int
    start_ns: int
    end_ns: int
    first: int
    ids: int
    lost: bool
    reduces: bool
    thrown_away: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a distributed run.

    `host` and `device` describe where it ran; `devices` is its number of devices. `clock_offset_ns` is its
    wall clock minus that of the coordinator, `clock_error_ns` the maximum error of this difference. `memory`
    is the sum of its budgets, in bytes. `kernel_rate` is the calibrated rate of the kernel on one device, in
    flop/s; None if it was not measured.
    """

    name: str
    host: str
    device: str
    devices: int
    clock_offset_ns: int
    clock_error_ns: int
    memory: int
    kernel_rate: float | None
    parts: Sequence[Attempt]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One device of one worker. Both numbers count from 0."""

    worker: int = 0
    device: int = 0


def workers_of(header: Mapping[str, Any]) -> list[Worker]:
    """Return the workers in the header of a log. The list is empty if the run was not distributed.

    Raises `ValueError`, `TypeError` or `LookupError` if the field ``workers`` is damaged.
    """
    found = []
    for data in header.get("workers") or ():
        parts = [_checked(Attempt, part) for part in data["parts"]]
        one: Worker = _checked(Worker, data | {"parts": parts})
        tiles = [tile for part in parts for tile in part.thrown_away]
        ordered = all(part.start_ns <= part.end_ns for part in parts)
        if not ordered or one.devices > MAX_DEVICES or any(list(map(type, t)) != [int, int] for t in tiles):
            raise ValueError(f"its worker {one.name} is damaged")
        found.append(one)
    return found


def units_of(timeline: Timeline) -> list[Unit]:
    """Return the units of a run. A worker that only added partial products has none."""
    workers = workers_of(timeline.header)
    if workers:
        computing = [w for w, worker in enumerate(workers) if not all(p.reduces for p in worker.parts)]
        return [Unit(w, device) for w in computing for device in range(workers[w].devices)]
    listed = range(len(timeline.header.get("devices") or ()))
    return [Unit(0, device) for device in sorted(set(listed) | {s.device for s in timeline.spans})] or [
        Unit()
    ]


def is_distributed(timeline: Timeline) -> bool:
    """Tell whether a run had workers, or one process with several devices."""
    return bool(timeline.header.get("workers")) or len(units_of(timeline)) > 1


def kernels_of(timeline: Timeline, units: Iterable[Unit]) -> list[Unit]:
    """Return the units that do not share their processor with an earlier unit.

    On the host backend, all units of one host share its cores. Two devices of one process share a GPU if the
    header describes them with the same ``number``.
    """
    header = timeline.header
    workers, devices = workers_of(header), header.get("devices") or ()
    on_cores = header.get("backend", {}).get("name") == "host"
    found: dict[object, Unit] = {}
    for unit in units:
        described = devices[unit.device] if not workers and unit.device < len(devices) else None
        number = described.get("number") if isinstance(described, dict) else None
        host = workers[unit.worker].host if workers else ""
        found.setdefault(host if on_cores else unit if number is None else str(number), unit)
    return list(found.values())


def spans_by_unit(timeline: Timeline) -> dict[Unit, list[Span]]:
    """Return the spans of each unit, in program order."""
    found: defaultdict[Unit, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        found[Unit(span.worker, span.device)].append(span)
    return found


def attempts_of(timeline: Timeline) -> Iterator[tuple[int, Attempt, list[Span]]]:
    """Yield each attempt of a distributed run with the number of its worker and with its spans."""
    spans = sorted(timeline.spans, key=lambda span: span.id)
    ids = [span.id for span in spans]
    for w, worker in enumerate(workers_of(timeline.header)):
        for part in worker.parts:
            yield w, part, spans[bisect_left(ids, part.first) : bisect_left(ids, part.first + part.ids)]


def activities(timeline: Timeline) -> dict[Unit, list[Wait]]:
    """Return what each unit did during the run: intervals (start, end, cause), in order and without gaps.

    The cause is ``compute`` while a Multiply ran, and otherwise a cause of exposed time:

    - While samples of the result were checked, after the last Multiply, ``samples``.
    - During an attempt, that of `exposed_intervals` for the operations of the attempt.
    - While the worker added partial products of a k-split, ``reduce``.
    - While the worker had no attempt, ``part-wait``, or ``reduce`` if another worker added partial products
      then.
    """
    units, wall = units_of(timeline), timeline.wall
    workers = workers_of(timeline.header)
    problem = timeline.header.get("plan", {}).get("problem", {})
    finish = finish_cause(selects=problem.get("sink", Stored.name) != Stored.name)
    if not workers:
        sampling = timeline.header.get("sampling")
        return {
            u: list(_with_samples(_activity(timeline.spans, u.device, (0, wall), finish), sampling))
            for u in units
        }
    by_worker: defaultdict[int, list[tuple[Attempt, list[Span]]]] = defaultdict(list)
    for w, part, spans in attempts_of(timeline):
        by_worker[w].append((part, spans))
    reducing = union((p.start_ns, p.end_ns) for worker in workers for p in worker.parts if p.reduces)
    found = {}
    for unit in units:
        done: list[Wait] = []
        cursor = 0
        for part, spans in sorted(by_worker[unit.worker], key=lambda one: (one[0].start_ns, one[0].end_ns)):
            # Attempts of one worker follow each other, but errors of the clock may let them overlap.
            window = max(cursor, min(part.start_ns, wall)), max(cursor, min(part.end_ns, wall))
            done += _without_part((cursor, window[0]), reducing)
            if part.reduces:
                done.append((*window, REDUCE))
            else:
                done += _activity(spans, unit.device, window, finish)
            cursor = window[1]
        done += _without_part((cursor, wall), reducing)
        found[unit] = [one for one in done if one[0] < one[1]]
    return found


def stalls(timeline: Timeline) -> list[Wait]:
    """Return the exposed time of a run on one device, as intervals (start, end, cause) in order."""
    ((_, did),) = activities(timeline).items()
    return [one for one in did if one[2] != COMPUTE]


def _activity(spans: Iterable[Span], device: int, window: Interval, finish: str) -> Iterator[Wait]:
    """Yield what a device did in a window of time, as intervals (start, end, cause) in order."""
    spans, (since, until) = list(spans), window
    compute = union((s.start, s.end) for s in spans if s.kind == "multiply" and s.device == device)
    both = [(start, end, COMPUTE) for start, end in compute]
    both += exposed_intervals(spans, until, since, device, finish)
    for start, end, cause in sorted(both):
        if max(since, start) < min(until, end):
            yield max(since, start), min(until, end), cause


def _with_samples(did: Iterable[Wait], sampling: Sequence[int] | None) -> Iterator[Wait]:
    """Yield what a device did. In the interval `sampling`, the cause of the tail is ``samples``."""
    for start, end, cause in did:
        if cause != "tail" or sampling is None:
            yield start, end, cause
            continue
        first, last = (max(start, min(end, time)) for time in sampling)
        parts = (start, first, cause), (first, last, SAMPLES), (last, end, cause)
        yield from (one for one in parts if one[0] < one[1])


def _without_part(gap: Interval, reducing: Sequence[Interval]) -> Iterator[Wait]:
    """Yield the causes of a gap in which a worker had no attempt. `reducing` has the times of all sums."""
    cursor = gap[0]
    for start, end in intersection([gap], reducing):
        yield cursor, start, PART_WAIT
        yield start, end, REDUCE
        cursor = end
    yield cursor, gap[1], PART_WAIT


def _checked(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Build an `Attempt` or a `Worker`. Raises `ValueError` or `LookupError` if a field is not valid."""
    for field in fields(kind):
        value = data[field.name]
        if field.type is int:
            least = -_LARGEST if field.name == "clock_offset_ns" else 0
            valid = type(value) is int and least <= value < _LARGEST
        elif field.type in (str, bool):
            valid = type(value) is field.type
        elif field.name == "kernel_rate":
            valid = value is None or (type(value) in (int, float) and 0 < value < _LARGEST)
        else:
            valid = isinstance(value, list)
        if not valid:
            raise ValueError(f"{field.name} of a {kind.__name__.lower()} is damaged")
    return kind(**{field.name: data[field.name] for field in fields(kind)})


# Kinds of operations in the order of data flow. An operation waits for an earlier kind to use its data: a
# Multiply needs an uploaded panel. It waits for a later kind to reuse a slot: a Read may overwrite a panel
# only after the Upload of that panel.
FLOW = ("read", "upload", "prepare", "multiply", "finish", "download", "write")
# `recent_activity` describes the last WINDOW_NS nanoseconds. It needs the last MAX_RECENT operations.
WINDOW_NS, MAX_RECENT = 5_000_000_000, 1000


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes that occur in these spans, in the order of data flow."""
    used = {span.lane for span in spans}
    return [*(lane for lane in LANES if lane in used), *sorted(used.difference(LANES))]


def rows(spans: Sequence[Span], *, exact: bool = False) -> list[int]:
    """Return for each span the number of the row on which it is drawn, counted from 0 within its lane.

    A span gets the first row that is free when it starts. If `exact` is set, spans of one row never overlap.
    Otherwise, they may overlap by 5% of the later span: clocks of devices are inexact, and consecutive spans
    should be drawn on one row.
    """
    free: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    found = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[index]
        ends = free[span.worker, span.device, span.lane]
        begins = span.start + (0 if exact else (span.end - span.start) // 20)
        row = next((r for r, end in enumerate(ends) if end <= begins), len(ends))
        ends[row : row + 1] = [span.end]
        found[index] = row
    return found


def rates(spans: Iterable[Span], wall: int, bins: int) -> list[float]:
    """Return the mean rate of these spans in each of `bins` equal parts of the run.

    Rates are in flop/s if the spans have flops, and in bytes per second otherwise. The flops or bytes of a
    span are spread evenly over its duration. `wall` is the length of the run in nanoseconds.
    """
    moved = [0.0] * bins
    if wall <= 0:
        return moved
    width = wall / bins
    for span in spans:
        amount = span.flops or span.bytes
        first, last = (min(bins - 1, int(t / width)) for t in (span.start, span.end))
        if first == last:
            moved[first] += amount
            continue
        per_ns = amount / (span.end - span.start)
        moved[first] += per_ns * ((first + 1) * width - span.start)
        moved[last] += per_ns * (span.end - last * width)
        for b in range(first + 1, last):
            moved[b] += per_ns * width
    return [amount / width * 1e9 for amount in moved]


def utilisation(spans: Sequence[Span], since: int, until: int) -> dict[str, float]:
    """Return for each lane the share of the time from `since` to `until` in which it was busy.

    Both times are in nanoseconds. The lanes are in the order of data flow.
    """
    busy: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        busy[span.lane].append((max(span.start, since), min(span.end, until)))
    return {lane: length(union(busy[lane])) / max(1, until - since) for lane in lanes_of(spans)}


def finish_times(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """Return when the last Multiply or Write of each tile ended, in nanoseconds since the run began."""
    ends: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.kind in ("multiply", "write"):
            ends[span.tile] = max(ends.get(span.tile, 0), span.end)
    return ends


def rate_limits(timeline: Timeline) -> dict[str, tuple[float, bool]]:
    """Return for each lane the highest rate that it can reach, and whether that rate was measured.

    Rates are in flop/s for the lane "compute" and in bytes per second for all others. A calibrated
    rate is preferred to that of the plan's machine model, which may be assumed. A lane without either is
    left out.

    With several devices, the limit of compute is that of all devices together. Other lanes are left out,
    because devices may share a link.
    """
    calibrated = timeline.header.get("rates") or {}
    model: dict[str, Any] = timeline.header.get("plan", {}).get("model", {})
    problem = timeline.header.get("plan", {}).get("problem", {})
    emulated = "emulated " if problem.get("compute") == "emulated" else ""
    kernel = model.get("kernels", {}).get(f"{emulated}{problem.get('a_dtype')}", {}).get("peak")
    measured = {part for part in ("h2d", "prepare", "d2h", "decode") if model.get("calibrated")}
    measured |= {part for part in ("read", "write") if model.get("storage_calibrated")}
    known: dict[str, tuple[float, bool]] = {}
    for lane, part in ((lane, "kernel" if lane == "compute" else lane) for lane in LANES):
        rate = calibrated.get(part) or (kernel if part == "kernel" else model.get(part))
        if rate:
            known[lane] = float(rate), part in calibrated or part in measured
    if len(units := units_of(timeline)) > 1:
        count = len(kernels_of(timeline, units))
        return {lane: (count * rate, sure) for lane, (rate, sure) in known.items() if lane == COMPUTE}
    return known


def recent_activity(
    recent: Sequence[Span], *, multiplied: bool, finish: str = "accumulator"
) -> tuple[dict[str, float], str]:
    """Return for each lane the share of the last seconds in which it was busy, and what limited the run.

    The second result is a text such as ``compute-bound, 73.4%; largest stall: write 8.4%``; "" if that is
    unknown.

    Args:
        recent: the last operations to end, at most `MAX_RECENT`, the one that ended first before the others.
        multiplied: whether all multiplications have ended. Until then, one may be running, which is not yet
            in `recent` and would look like a stall. So what limited the run is computed only up to the end
            of the last Multiply in `recent`.
        finish: the cause of exposed time while a Finish ran (`oocgemm.timeline.activities.finish_cause`).
    """
    # If `recent` is full, it lacks older operations. The time before `known` is left out, since the lanes of
    # those operations would look idle.
    known = recent[0].end if len(recent) == MAX_RECENT else 0
    until = max(span.end for span in recent)
    since = max(0, until - WINDOW_NS, known)
    busy = utilisation([span for span in recent if span.end > since], since, until)
    if not multiplied:
        until = max((span.end for span in recent if span.kind == "multiply"), default=0)
    since = max(0, until - WINDOW_NS, known)
    if until <= since:
        return busy, ""
    found = verdict(shares_between(recent, since, until, finish))
    return busy, "; ".join(filter(None, (found.headline, found.beside)))
