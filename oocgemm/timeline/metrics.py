"""The figures of a run, computed from its timeline alone, and their diagnosis in words. T is the wall time.

- compute: the time in which at least one Multiply ran. The compute share is this time / T.
- copy overlap: of the time in which the lane h2d or d2h was busy, the share in which a Multiply ran too.
- storage overlap: the same for the lanes read, decode, encode and write.
- exposed time: T - compute. Each instant of it is attributed to one cause.
- shares: the compute share, and the exposed time of each cause / T. They add up to 1.
- traffic: three numbers of bytes for each link. ``bytes`` crossed the link in the run. ``required`` would
  cross it if every element crossed once. ``least`` is a lower bound for any schedule within the budgets.
- efficiency: a lower bound of the run time / T. The bound is the longest of these times, at calibrated rates:
  multiplying, moving the ``least`` bytes over each link, and decoding.

With several devices or workers, times of compute, of causes and of lanes are means over the devices, and
flops, operations and bytes are sums. Overlaps are ratios of sums. Only such runs have these figures, the
`Distribution`. A *unit* is one device of one worker (`oocgemm.timeline.activities`).

- balance: the least compute time of a unit / the largest.
- first end, last end: when the first and the last unit ended its last operation.
- scaling efficiency: flops of the result / (sum of the units' kernel rates * T), with calibrated rates. A
  processor that several units share counts once (`activities.kernels_of`).
- storage: bytes read from storage by all workers, ``required`` if every element was read once, and ``least``,
  a lower bound for workers with these memories and these shares of the product.
- lost: work that was thrown away, because a process died or another attempt finished the tile first. The
  seconds are those in which at least one operation of such work ran, summed over the units.

A ratio is None if its denominator is 0. The efficiency is None if rates are not calibrated, if the run is
unfinished, or if it used several devices. The scaling efficiency is None if the kernel rate of a unit was not
calibrated or the run is unfinished, and ``least`` is None if the log does not describe the product.

The diagnosis names the limiting lane, for example reading. It says how close this lane was to its maximum
rate, and whether other programs used CPU cores that the run needed.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from oocgemm.planning.cost.bound import WorkerShare, min_bytes_of_workers
from oocgemm.planning.plan import recorded_problem
from oocgemm.planning.units import format_rate, format_share, format_size, format_time
from oocgemm.timeline.activities import (
    CAUSES,
    COMPUTE,
    Unit,
    Verdict,
    Wait,
    Worker,
    activities,
    attempts_of,
    is_distributed,
    kernels_of,
    rate_limits,
    shares,
    spans_by_unit,
    verdict,
    workers_of,
)
from oocgemm.timeline.log import read_log
from oocgemm.timeline.spans import MIN_CPU_WALL, Span, Timeline, intersection, length, union
from oocgemm.values import dataclass

COPY = ("h2d", "d2h")
STORAGE = ("read", "decode", "encode", "write")


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
    """Compute the figures of a run on several units. `activities` is from `activities.activities`."""
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
        return min_bytes_of_workers(problem, [WorkerShare(*one) for one in each], required)
    except (KeyError, TypeError, ValueError, ArithmeticError, IndexError):
        return None


@dataclass(frozen=True)
class Report:
    """The figures of a run.

    Times are in seconds. The figures are defined at the top of this module. Ratios may be None.

    `distribution` has the figures of a run on several devices or workers, one entry per device among them. It
    is None for a run on one device.

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
    distribution: Distribution | None = None

    @property
    def devices(self) -> int:
        """The number of devices that the figures cover."""
        return len(self.distribution.units) if self.distribution else 1

    @property
    def shares(self) -> dict[str, float]:
        """Return compute and each cause of exposed time as shares of T, the largest first."""
        return shares(self.compute, self.exposed, self.wall)

    @property
    def verdict(self) -> Verdict:
        """Return what limits the speed of the run: the cause with the largest share of T."""
        return verdict(self.shares if self.compute else {})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the verdict and the shares as plain data that JSON can represent.

        The field ``distribution`` is left out if it is None.
        """
        found = {"verdict": self.verdict.to_dict(), "shares": self.shares} | asdict(self)
        return {name: value for name, value in found.items() if name != "distribution" or value is not None}


def report(
    timeline: Timeline | str | os.PathLike[str], device: int | None = None, worker: int | None = None
) -> Report:
    """Compute the figures of a run from its timeline, or from the path of its log.

    If the number of a device or of a worker is given, only operations on this device or worker are counted.
    Both numbers count from 0.

    Raises `InputError` if the log cannot be read.
    """
    if not isinstance(timeline, Timeline):
        timeline = read_log(os.fspath(timeline))
    every = activities(timeline)
    units = [u for u in every if device in (None, u.device) and worker in (None, u.worker)]
    units = units or [Unit(worker or 0, device or 0)]
    whole, wall, count = len(units) == len(every), timeline.wall, len(units)
    by_unit = spans_by_unit(timeline)
    mine = list(by_unit) if whole else units
    spans = list(timeline.spans) if whole else [s for unit in units for s in by_unit.get(unit, [])]
    causes: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in (one for unit in units for one in every.get(unit, [(0, wall, "tail")])):
        causes[cause] += end - start
    compute = causes.pop(COMPUTE, 0)
    flops = sum(s.flops for s in spans if s.kind == "multiply")
    spread = distribution(timeline, every) if whole and is_distributed(timeline) else None
    useful = flops - (int(spread.lost["flops"]) if spread else 0)
    moved: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        moved[span.lane] += span.bytes
    return Report(
        wall=wall / 1e9,
        compute=compute / (count * 1e9),
        compute_share=_ratio(compute, count * wall),
        copy_overlap=_overlap([by_unit.get(unit, []) for unit in mine], COPY),
        storage_overlap=_overlap([by_unit.get(unit, []) for unit in mine], STORAGE),
        exposed={cause: ns / (count * 1e9) for cause, ns in causes.items() if ns},
        lanes=_lanes([by_unit.get(unit, []) for unit in mine], count),
        traffic=_traffic(timeline, moved, spread, whole=whole),
        flops=flops,
        flop_rate=_ratio(useful, wall / 1e9),
        efficiency=_efficiency(timeline, spans, flops) if len(every) == 1 and not spread else None,
        checks=_checks(timeline),
        unfinished=timeline.unfinished,
        cpu=_cpu(timeline),
        distribution=spread,
    )


def same_product(timelines: Sequence[Timeline]) -> bool:
    """Return whether all runs computed products of the same extents and dtypes.

    Timelines without a plan are ignored, because they do not describe their product.
    """
    problems = [timeline.header.get("plan", {}).get("problem") for timeline in timelines]
    names = ("m", "n", "k", "a_dtype", "b_dtype", "c_dtype")
    return len({tuple(problem.get(name) for name in names) for problem in problems if problem}) <= 1


def _lanes(units: Sequence[Sequence[Span]], count: int) -> dict[str, dict[str, float]]:
    """Return the mean busy time, the number of operations and the bytes of each lane of several units."""
    found: dict[str, dict[str, float]] = {}
    for spans in units:
        lanes: defaultdict[str, list[Span]] = defaultdict(list)
        for span in spans:
            lanes[span.lane].append(span)
        for lane, ran in lanes.items():
            sums = found.setdefault(lane, {"busy": 0, "operations": 0, "bytes": 0})
            sums["busy"] += length(union((s.start, s.end) for s in ran))
            sums["operations"] += len(ran)
            sums["bytes"] += sum(s.bytes for s in ran)
    return {lane: sums | {"busy": sums["busy"] / (count * 1e9)} for lane, sums in found.items()}


def _overlap(units: Sequence[Sequence[Span]], lanes: Sequence[str]) -> float | None:
    """Return the share of the time of some lanes in which a Multiply of the same unit ran."""
    both = busy = 0
    for spans in units:
        merged = union((s.start, s.end) for s in spans if s.lane in lanes)
        compute = union((s.start, s.end) for s in spans if s.kind == "multiply")
        both += length(intersection(merged, compute))
        busy += length(merged)
    return _ratio(both, busy)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _traffic(
    timeline: Timeline, moved: dict[str, int], spread: Distribution | None, *, whole: bool
) -> dict[str, dict[str, int | None]]:
    plan = {} if timeline.unfinished or not whole else timeline.header.get("plan", {})
    through_codec = {"read": "decode", "write": "encode"}
    found = {
        link: {
            "bytes": moved.get(link, 0) + moved.get(through_codec.get(link, ""), 0),
            "required": plan.get("required", {}).get(link),
            "least": plan.get("least", {}).get(link),
        }
        for link in ("read", "h2d", "d2h", "write")
    }
    if spread and workers_of(timeline.header):
        # The plan's bound on uploads holds for the memory of one worker. Several have room for more.
        found["read"]["least"] = spread.storage["least"]
        found["h2d"]["least"] = found["h2d"]["required"]
    return found


def _checks(timeline: Timeline) -> dict[str, Any] | None:
    found = timeline.header.get("checks")
    if found is None:
        return None
    wall, cores = timeline.wall / 1e9, timeline.header.get("machine", {}).get("cores", 1)
    wall *= max(1, len(workers_of(timeline.header)))
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

    The text is empty if there are none. Such arrays are pinned, and their blocks need no buffers on the host.
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


# If other programs used at least the share MIN_OTHERS of the CPU cores, the report says so. If at least the
# share MIN_BUSY of the cores was busy in all, it says that other programs slowed the run down.
MIN_OTHERS, MIN_BUSY = 0.1, 0.8
# Causes that need no CPU cores if the device is a GPU. If one of them limits the run, other programs on the
# CPU have not slowed it down.
ON_DEVICE = (COMPUTE, "h2d", "prepare", "accumulator", "select")
# The activity of each lane, as the subject of a sentence of the report. If the lane's arrays are in host
# memory, the text in ACTIVITIES_IN_MEMORY is used instead.
ACTIVITIES = {
    **{
        "read": "Reading",
        "decode": "Decoding",
        "h2d": "Copying to the device",
        "prepare": "Preparing panels",
    },
    **{"d2h": "Copying from the device", "encode": "Encoding", "write": "Writing"},
}
ACTIVITIES_IN_MEMORY = {
    "read": "Copying A and B into slots",
    "write": "Copying C out of slots",
}
OUTPUT_LANES = ("d2h", "encode", "write")  # the lanes that can be busy after the last Multiply


@dataclass(frozen=True)
class Diagnosis:
    """What limits the speed of a run: for example storage, the link to the device, or compute.

    `evidence` is a text with the rate of the limiting lane, its maximum rate, and the number of CPU cores
    that other programs used. `contended` is set if other programs slowed the limiting lane down.
    """

    verdict: Verdict
    evidence: str
    contended: bool = False

    @property
    def finding(self) -> str:
        """Return the verdict as a sentence."""
        return f"{self.headline}{self.rest}"

    @property
    def headline(self) -> str:
        """Return the first words of `finding`: what limits the run, and the share of T that this takes."""
        text = self.verdict.headline
        return text if text.startswith("h2d") else text[0].upper() + text[1:]

    @property
    def rest(self) -> str:
        """Return the part of `finding` after the headline.

        For a compute-bound run, it gives the largest stall, such as waiting for reads. For any other run, it
        explains the headline, and gives the share of compute.
        """
        found = self.verdict
        if not found.beside:
            return "."
        meaning = CAUSES.get(found.stall, "")
        if found.bound == COMPUTE:
            return f"; {found.beside}, {meaning}." if meaning else f"; {found.beside}."
        return f": {meaning}; {found.beside}." if meaning else f"; {found.beside}."


def diagnose(timeline: Timeline, figures: Report | None = None) -> Diagnosis:
    """Return what limits a run. Pass its `figures` if they are already computed."""
    figures = figures or report(timeline)
    found = figures.verdict
    contended = _cores_contended(figures) and (
        timeline.header.get("backend", {}).get("name") == "host" or found.bound not in ON_DEVICE
    )
    evidence = (_bound_evidence(timeline, figures), other_programs(figures))
    return Diagnosis(found, " ".join(filter(None, evidence)), contended)


def other_programs(figures: Report) -> str:
    """Return a sentence that says how many CPU cores other programs used.

    Only the cores that this process may use are counted. The text is empty if other programs used few of them
    (`MIN_OTHERS`), if the run was short (`MIN_CPU_WALL`), or if the system does not report the use of cores.
    """
    cpu = figures.cpu
    if not cpu or figures.wall < MIN_CPU_WALL or cpu["others"] < MIN_OTHERS * cpu["cores"]:
        return ""
    return f"Other programs used {cpu['others']:.1f} of {cpu['cores']:.0f} cores."


def unfinished(figures: Report) -> str:
    """Return a sentence that says that the run is unfinished, or an empty text if the run is complete."""
    if not figures.unfinished:
        return ""
    recorded = format_time(figures.wall)
    return f"Unfinished: the run was stopped or is still running. The figures cover its first {recorded}."


def in_memory(lane: str, header: Mapping[str, Any]) -> bool:
    """Return whether the arrays that a lane reads or writes are in host memory instead of storage.

    Only the lanes "read" (A and B) and "write" (C) have such arrays: those of the host backend, and of runs
    whose checksums the host computes. A GPU copies other arrays in memory on the lanes "h2d" and "d2h". For
    these, return False.
    """
    concerned = {"read": "AB", "write": "C"}.get(lane, "")
    operands = header.get("operands", {})
    return bool(concerned) and all(operands.get(x, {}).get("store") == "memory" for x in concerned)


def _cores_contended(figures: Report) -> bool:
    """Return whether other programs used CPU cores while hardly any core was idle."""
    cpu = figures.cpu
    return bool(other_programs(figures) and cpu and cpu["own"] + cpu["others"] >= MIN_BUSY * cpu["cores"])


def _bound_evidence(timeline: Timeline, figures: Report) -> str:
    """Return a sentence with the rate of the limiting lane and its maximum rate.

    If the tail has the largest share of T, the limiting lane is the one that was busiest in the tail. The
    text is empty if no lane limits the run, as for ``start-up``.
    """
    bound = figures.verdict.bound
    if bound == COMPUTE:
        return _kernel_evidence(timeline, figures)
    # In a distributed run, each part has a tail, so no single lane stands for all of them.
    last = "" if figures.distribution else _last_lane(timeline)
    lane = {"accumulator": "d2h", "tail": last}.get(bound, bound)
    known = lane in ACTIVITIES and lane in figures.lanes
    return _lane_evidence(lane, timeline.header, figures) if known else ""


def _last_lane(timeline: Timeline) -> str:
    """Return the lane of `OUTPUT_LANES` that was busiest after the last Multiply."""
    end = max((s.end for s in timeline.spans if s.kind == "multiply"), default=0)
    after = [s for s in timeline.spans if s.end > end]
    busy = {
        lane: length(union((max(end, s.start), s.end) for s in after if s.lane == lane))
        for lane in OUTPUT_LANES
    }
    return max(busy, key=lambda lane: busy[lane])


def _kernel_evidence(timeline: Timeline, figures: Report) -> str:
    rate = figures.flops / figures.compute
    text = f"The kernel ran at {format_rate(rate, 'FLOP')}"
    if figures.devices > 1:
        text = f"The kernels of {figures.devices} devices ran at {format_rate(rate, 'FLOP')} together"
    limit, measured = rate_limits(timeline).get(COMPUTE, (0.0, False))
    exact = timeline.header.get("plan", {}).get("problem", {}).get("compute") in ("native", "emulated")
    # An assumed `limit` is for products in the operands' precision, so it says nothing about tf32 and bf16.
    if limit and (measured or exact):
        known = "calibrated" if measured else "assumed"
        text += f", {format_share(rate / limit)} of the {known} {format_rate(limit, 'FLOP')}"
    return text + "."


def _lane_evidence(lane: str, header: Mapping[str, Any], figures: Report) -> str:
    activity = (ACTIVITIES_IN_MEMORY if in_memory(lane, header) else ACTIVITIES)[lane]
    busy, moved = figures.lanes[lane]["busy"], figures.lanes[lane]["bytes"]
    rate = moved / busy if busy else 0.0
    text = f"{activity} took {format_share(busy / figures.wall)} of the time, at {format_rate(rate)}"
    if figures.devices > 1:
        text += f" for {figures.devices} devices together"
    # Devices may share a link, so the sum of their calibrated rates is no limit.
    elif calibrated := (header.get("rates") or {}).get(lane):
        text += f", {format_share(rate / calibrated)} of the calibrated {format_rate(calibrated)}"
    lower_bound = figures.traffic.get({"decode": "read", "encode": "write"}.get(lane, lane), {}).get("least")
    if lower_bound and moved:
        text += f"; it moved {format_size(moved)}, {moved / lower_bound:.2f} times the lower bound"
    return text + "."
