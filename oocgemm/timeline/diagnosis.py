"""Describe the figures of a run in words.

The text names the limiting lane, for example reading. It says how close this lane was to its maximum rate,
and whether other programs used CPU cores that the run needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oocgemm.planning.units import format_rate, format_share, format_size, format_time
from oocgemm.timeline.activities import CAUSES, COMPUTE, Verdict
from oocgemm.timeline.metrics import Report, report
from oocgemm.timeline.series import rate_limits
from oocgemm.timeline.spans import Timeline, length, union

# If other programs used at least the share MIN_OTHERS of the CPU cores, the report says so. If at least the
# share MIN_BUSY of the cores was busy in all, it says that other programs slowed the run down.
MIN_OTHERS, MIN_BUSY = 0.1, 0.8
# The use of CPU cores is not reported for runs of fewer seconds: Linux counts it in ticks of 10 ms.
MIN_CPU_WALL = 0.5
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
    """Diagnose a run. Pass its `figures` if they are already computed."""
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
