"""What a run's figures say in words: the verdict, how near its limit the bound is, and contention on the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oocgemm.planning.units import format_rate, format_share, format_size, format_time
from oocgemm.timeline.metrics import Report, length, report, union
from oocgemm.timeline.series import limits
from oocgemm.timeline.spans import Timeline
from oocgemm.timeline.verdict import CAUSES, COMPUTE, Verdict

# Other programs are mentioned from this share of the cores on; the run competed with them if the cores were this busy.
MIN_OTHERS, MIN_BUSY = 0.1, 0.8
# The processor counts in ticks of 10 ms: of shorter runs it says little, in seconds.
MIN_COUNTED = 0.5
# Causes that are the device's own: on a GPU they do not compete for the cores.
ON_DEVICE = (COMPUTE, "h2d", "prepare", "accumulator")
# What the lanes do that a run waits for, and what they do where operands or C are in memory.
DOING = {
    **{
        "read": "Reading",
        "decode": "Decoding",
        "h2d": "Copying to the device",
        "prepare": "Preparing panels",
    },
    **{"d2h": "Copying from the device", "encode": "Encoding", "write": "Writing"},
}
IN_MEMORY = {
    "read": "Copying A and B into the slots that the device copies from",
    "write": "Copying C from the slots that the device copies to",
}
OUT = ("d2h", "encode", "write")  # the lanes that can be busy after the last Multiply


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a run: the verdict, and `evidence`, how near its limit the bound was. `contended` says whether other
    programs used cores that the bound needed."""

    verdict: Verdict
    evidence: str
    contended: bool = False

    @property
    def finding(self) -> str:
        """The verdict as a sentence."""
        return f"{self.headline}{self.rest}"

    @property
    def headline(self) -> str:
        """The first words of `finding`: the bound and its share."""
        text = self.verdict.headline
        return text if text.startswith("h2d") else text[0].upper() + text[1:]

    @property
    def rest(self) -> str:
        """The other words of `finding`: the largest stall or compute, and what the stall is."""
        found = self.verdict
        if not found.beside:
            return "."
        meaning = CAUSES.get(found.stall, "")
        if found.bound == COMPUTE:
            return f"; {found.beside}, {meaning}." if meaning else f"; {found.beside}."
        return f": {meaning}; {found.beside}." if meaning else f"; {found.beside}."


def diagnose(timeline: Timeline, figures: Report | None = None) -> Diagnosis:
    """Say what bounds a run; `figures` where they are known already."""
    figures = figures or report(timeline)
    found = figures.verdict
    contended = _competed(figures) and (
        timeline.header.get("backend", {}).get("name") == "host" or found.bound not in ON_DEVICE
    )
    evidence = (_of_bound(timeline, figures), others(figures))
    return Diagnosis(found, " ".join(filter(None, evidence)), contended)


def others(figures: Report) -> str:
    """A sentence on the other programs on the machine, if they used a tenth of its cores or more.

    Cores count only those that the process may use.
    """
    cpu = figures.cpu
    if not cpu or figures.wall < MIN_COUNTED or cpu["others"] < MIN_OTHERS * cpu["cores"]:
        return ""
    return f"Other programs used {cpu['others']:.1f} of {cpu['cores']:.0f} cores."


def unfinished(figures: Report) -> str:
    """What is to be said of the log of a run that has not ended."""
    if not figures.unfinished:
        return ""
    return (
        f"Unfinished: the run was stopped, or still goes on; this is its first {format_time(figures.wall)}."
    )


def in_memory(lane: str, header: Mapping[str, Any]) -> bool:
    """Whether a lane copies within host memory where it would else read from storage, or write to it."""
    concerned = {"read": "AB", "write": "C"}.get(lane, "")
    operands = header.get("operands", {})
    return bool(concerned) and all(operands.get(x, {}).get("store") == "memory" for x in concerned)


def _competed(figures: Report) -> bool:
    """Whether the process and others together kept the cores busy."""
    cpu = figures.cpu
    return bool(others(figures) and cpu and cpu["own"] + cpu["others"] >= MIN_BUSY * cpu["cores"])


def _of_bound(timeline: Timeline, figures: Report) -> str:
    """How near its limit the bound was: the kernel, or the lane that was waited for."""
    bound = figures.verdict.bound
    if bound == COMPUTE:
        return _kernel(timeline, figures)
    lane = {"accumulator": "d2h", "tail": _last_lane(timeline)}.get(bound, bound)
    return _link(lane, timeline.header, figures) if lane in DOING and lane in figures.lanes else ""


def _last_lane(timeline: Timeline) -> str:
    """The lane that was busiest after the last Multiply."""
    end = max((s.end for s in timeline.spans if s.kind == "multiply"), default=0)
    after = [s for s in timeline.spans if s.end > end]
    busy = {lane: length(union((max(end, s.start), s.end) for s in after if s.lane == lane)) for lane in OUT}
    return max(busy, key=lambda lane: busy[lane])


def _kernel(timeline: Timeline, figures: Report) -> str:
    rate = figures.flops / figures.compute
    text = f"The kernel ran at {format_rate(rate, 'FLOP')}"
    limit, measured = limits(timeline).get(COMPUTE, (0.0, False))
    exact = timeline.header.get("plan", {}).get("problem", {}).get("compute") in ("native", "emulated")
    if limit and (measured or exact):  # no model knows the rates of rounded products
        known = "calibrated" if measured else "assumed"
        text += f", {format_share(rate / limit)} of the {known} {format_rate(limit, 'FLOP')}"
    return text + "."


def _link(lane: str, header: Mapping[str, Any], figures: Report) -> str:
    doing = IN_MEMORY[lane] if in_memory(lane, header) else DOING[lane]
    busy, moved = figures.lanes[lane]["busy"], figures.lanes[lane]["bytes"]
    rate = moved / busy if busy else 0.0
    text = f"{doing} took {format_share(busy / figures.wall)} of the time, at {format_rate(rate)}"
    if calibrated := (header.get("rates") or {}).get(lane):
        text += f", {format_share(rate / calibrated)} of the calibrated {format_rate(calibrated)}"
    least = figures.traffic.get({"decode": "read", "encode": "write"}.get(lane, lane), {}).get("least")
    if least and moved:
        text += f"; it moved {format_size(moved)}, {moved / least:.2f} times the least possible"
    return text + "."
