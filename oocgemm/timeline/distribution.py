"""The figures of a run on several devices or workers, computed from its timeline alone.

T is the wall time of the run. A *unit* is one device of one worker (`oocgemm.timeline.units`).

- balance: the least compute time of a unit / the largest.
- first end, last end: when the first and the last unit ended its last operation.
- scaling efficiency: flops of the result / (sum of the units' kernel rates * T), with calibrated rates. A
  processor that several units share counts once (`units.kernels_of`).
- storage: bytes read from storage by all workers, ``required`` if every element was read once, and ``least``,
  a lower bound for workers with these memories and these shares of the product.
- lost: work that was thrown away, because a process died or another attempt finished the tile first. The
  seconds are those in which at least one operation of such work ran, summed over the units.

A ratio is None if its denominator is 0. The scaling efficiency is None if the kernel rate of a unit was not
calibrated or the run is unfinished, and ``least`` is None if the log does not describe the product.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oocgemm.planning.cost.shared_bounds import Share, min_bytes_of_workers
from oocgemm.planning.serialize import recorded_problem
from oocgemm.timeline.exposed import Wait
from oocgemm.timeline.intervals import length, union
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.timeline.units import Unit, Worker, attempts_of, kernels_of, spans_by_unit, workers_of
from oocgemm.timeline.verdict import COMPUTE, shares


@dataclass(frozen=True)
class UnitFigures:
    """The figures of one device of one worker. Times are in seconds.

    `worker` is the name of the worker; "" for a run in one process. `device` is a number, and `described`
    says what the device is. `shares` has compute and each cause of exposed time as shares of T. `flops` and
    `bytes` count all work, `lost_flops` and `lost_seconds` the work that was thrown away. `bytes` were read
    from storage. `parts` is the number of attempts at parts, `lost_parts` that of attempts whose process
    died. `end` is the end of the last operation. `clock_offset` is the worker's clock minus that of the
    coordinator, `clock_error` its maximum error.
    """

    worker: str
    host: str
    device: int
    described: str
    compute: float
    shares: dict[str, float]
    end: float
    flops: int
    bytes: int
    parts: int
    lost_parts: int
    lost_flops: int
    lost_seconds: float
    clock_offset: float
    clock_error: float


@dataclass(frozen=True)
class Distribution:
    """The figures of a run on several units. The top of this module defines them. Times are in seconds."""

    units: tuple[UnitFigures, ...]
    workers: int
    hosts: int
    balance: float | None
    first_end: float
    last_end: float
    scaling_efficiency: float | None
    storage: dict[str, int | None]
    lost: dict[str, float]


def distribution(timeline: Timeline, activities: Mapping[Unit, Sequence[Wait]]) -> Distribution:
    """Compute the figures of a run on several units. `activities` is from `units.activities`."""
    workers = workers_of(timeline.header)
    spans, lost = spans_by_unit(timeline), _thrown_away(timeline)
    units = tuple(
        _unit(timeline, unit, workers, spans.get(unit, []), lost.get(unit, []), activities[unit])
        for unit in activities
    )
    compute = [unit.compute for unit in units]
    ends = [unit.end for unit in units]
    lost_flops = sum(s.flops for thrown in lost.values() for s in thrown)
    flops = sum(s.flops for s in timeline.spans) - lost_flops
    return Distribution(
        units=units,
        workers=max(1, len(workers)),
        hosts=max(1, len({worker.host for worker in workers})),
        balance=min(compute) / max(compute) if max(compute) else None,
        first_end=min(ends),
        last_end=max(ends),
        scaling_efficiency=_scaling_efficiency(timeline, list(activities), workers, flops),
        storage=_storage(timeline, workers, lost),
        lost={
            "flops": lost_flops,
            "seconds": sum(_busy(thrown) for thrown in lost.values()) / 1e9,
            "attempts": sum(part.lost for worker in workers for part in worker.parts),
        },
    )


def _thrown_away(timeline: Timeline) -> dict[Unit, list[Span]]:
    """Return the spans of each unit whose work was thrown away."""
    found: defaultdict[Unit, list[Span]] = defaultdict(list)
    for w, part, spans in attempts_of(timeline):
        tiles = {(i, j) for i, j in part.thrown_away}
        for span in spans:
            if span.tile in tiles:
                found[Unit(w, span.device)].append(span)
    return found


def _unit(
    timeline: Timeline,
    unit: Unit,
    workers: Sequence[Worker],
    spans: Sequence[Span],
    lost: Sequence[Span],
    activity: Sequence[Wait],
) -> UnitFigures:
    totals: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in activity:
        totals[cause] += end - start
    compute = totals.pop(COMPUTE, 0)
    worker = workers[unit.worker] if workers else None
    devices = timeline.header.get("devices") or ()
    described = worker.device if worker else devices[unit.device] if unit.device < len(devices) else ""
    return UnitFigures(
        worker=worker.name if worker else "",
        host=worker.host if worker else "",
        device=unit.device,
        described=_text(described),
        compute=compute / 1e9,
        shares=shares(compute, totals, timeline.wall),
        end=max((span.end for span in spans), default=0) / 1e9,
        flops=sum(span.flops for span in spans),
        bytes=_read_bytes(spans),
        parts=len(worker.parts) if worker else 1,
        lost_parts=sum(part.lost for part in worker.parts) if worker else 0,
        lost_flops=sum(span.flops for span in lost),
        lost_seconds=_busy(lost) / 1e9,
        clock_offset=worker.clock_offset_ns / 1e9 if worker else 0.0,
        clock_error=worker.clock_error_ns / 1e9 if worker else 0.0,
    )


def _text(described: object) -> str:
    """Return the description of a device: a text, or the field ``device`` of an object that describes it."""
    return str(described.get("device", "")) if isinstance(described, dict) else str(described)


def _busy(spans: Sequence[Span]) -> int:
    return length(union((span.start, span.end) for span in spans))


def _read_bytes(spans: Sequence[Span]) -> int:
    """Return the bytes that were read from storage. Reads of encoded chunks run on the lane ``decode``."""
    return sum(span.bytes for span in spans if span.lane in ("read", "decode"))


def _scaling_efficiency(
    timeline: Timeline, units: Sequence[Unit], workers: Sequence[Worker], flops: int
) -> float | None:
    one = (timeline.header.get("rates") or {}).get("kernel")
    rates = [workers[u.worker].kernel_rate if workers else one for u in kernels_of(timeline, units)]
    total = sum(rate or 0.0 for rate in rates)
    if timeline.unfinished or not timeline.wall or not all(rates):
        return None
    return flops / (total * timeline.wall / 1e9)


def _storage(
    timeline: Timeline, workers: Sequence[Worker], lost: Mapping[Unit, Sequence[Span]]
) -> dict[str, int | None]:
    """Return the bytes read from storage, the bytes required, and a lower bound."""
    plan: Mapping[str, Any] = {} if timeline.unfinished else timeline.header.get("plan", {})
    required, least = (plan.get(name, {}).get("read") for name in ("required", "least"))
    if workers and required is not None:
        least = _shared_bound(timeline, plan, workers, lost, required)
    return {"bytes": _read_bytes(timeline.spans), "required": required, "least": least}


def _shared_bound(
    timeline: Timeline,
    plan: Mapping[str, Any],
    workers: Sequence[Worker],
    lost: Mapping[Unit, Sequence[Span]],
    required: int,
) -> int | None:
    """Return a lower bound on the bytes that the workers read, for the shares that they computed."""
    try:
        problem, tile = recorded_problem(plan["problem"]), plan["tile"]
        thrown = {span.id for spans in lost.values() for span in spans}
        products, tiles = [0] * len(workers), [set[tuple[int, int]]() for _ in workers]
        for span in timeline.spans:
            if span.kind == "multiply" and span.id not in thrown:
                products[span.worker] += span.flops // problem.step_flops(1, 1, 1)
                tiles[span.worker].add(span.tile)
        sizes = [
            sum(
                max(0, min(tile["m"], problem.m - i * tile["m"]))
                * max(0, min(tile["n"], problem.n - j * tile["n"]))
                for i, j in mine
            )
            for mine in tiles
        ]
        each = zip((worker.memory for worker in workers), sizes, products, strict=True)
        return min_bytes_of_workers(problem, [Share(*one) for one in each], required)
    except (KeyError, TypeError, ValueError, ArithmeticError, IndexError):
        return None
