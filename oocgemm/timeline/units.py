"""The workers and devices of a run, and the attempts of the workers at parts of the product.

A *unit* is one device of one worker. A run in one process has one worker, which has no name. In a distributed
run each worker computes parts, one after another, each in a process of its own. The header of the log then
has the field ``workers``, a list of objects with the fields of `Worker`. `oocgemm.timeline.merge` writes it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from oocgemm.timeline.exposed import Wait, exposed_intervals, finish_cause
from oocgemm.timeline.intervals import Interval, intersection, union
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.timeline.verdict import COMPUTE

# Fields of a problem that say that C is not stored.
NOT_STORED = ("topk", "sparse", "applied", "reduction")
PART_WAIT, REDUCE, SAMPLES = "part-wait", "reduce", "samples"
MAX_DEVICES = 1024  # of one worker; a log with more is damaged
_LARGEST = 2**63


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
    """Return those of the units that do not share their processor with an earlier one.

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
    """Say for each instant of T what each unit did: intervals (start, end, cause) that cover T in order.

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
    finish = finish_cause(selects=any(problem.get(name) for name in NOT_STORED))
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
