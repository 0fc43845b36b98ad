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

With several devices or workers, times of compute, of causes and of lanes are means over the devices, and
flops, operations and bytes are sums. Overlaps are ratios of sums. `oocgemm.timeline.distribution` defines the
figures that only such runs have.

A ratio is None if its denominator is 0. The efficiency is None if rates are not calibrated, if the run is
unfinished, or if it used several devices.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oocgemm.timeline.distribution import Distribution, distribution
from oocgemm.timeline.intervals import intersection, length, union
from oocgemm.timeline.log import read_log
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.timeline.units import Unit, activities, is_distributed, spans_by_unit, workers_of
from oocgemm.timeline.verdict import COMPUTE, Verdict, shares, verdict

COPY = ("h2d", "d2h")
STORAGE = ("read", "decode", "encode", "write")


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

    If the numbers of a device or a worker are given, only operations on them are counted. Both count from 0.

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

    Timelines without a plan do not describe their product. They are ignored.
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
