"""What bounds a run, in a sentence, from its figures.

The time outside the multiplications is shared among four directions, by its causes: panels that come late, results
that leave late, start-up, and waiting for nothing but being issued. Start-up is here all that passes before the first
Multiply and the result all that passes after the last, whatever runs then. A direction bounds the run if it costs at
least `COUNTS` of the time that multiplying takes; otherwise the kernel does. Which link of a direction is to blame, the
lanes say: it is the one that is busy longest, since the others wait for it. Operands and results in memory have the same
lanes, which copy them there: a C that leaves too slowly is bound by its download, whichever of the two copies is slower.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oocgemm.timeline.figures import Report, exposed_intervals, report
from oocgemm.timeline.spans import Timeline
from oocgemm.units import format_rate, format_share, format_size, format_time

COUNTS = 0.1

PANELS, RESULT, START_UP, ISSUE = "panels", "result", "start-up", "issue"
DIRECTIONS = {
    **dict.fromkeys(("read", "decode", "h2d", "prepare"), PANELS),
    **dict.fromkeys(("accumulator", "encode", "write", "tail"), RESULT),
}
# The lanes of a direction, and what a run that one of them bounds is said to be.
LINKS = {
    PANELS: {"read": "Storage-bound", "decode": "Decode-bound", "h2d": "PCIe-bound"},
    RESULT: {"d2h": "Download-bound", "encode": "Encode-bound", "write": "Write-bound"},
}
# And where no lane of it is there.
NAMES = {PANELS: "Input-bound", RESULT: "Output-bound", START_UP: "Start-up-bound", ISSUE: "Issue-bound"}
WAITING = {
    PANELS: "waits for panels of A and B",
    RESULT: "waits for C to leave",
    START_UP: "passes before the first multiplication",
    ISSUE: "waits for the next operation to be issued",
}
DOING = {
    **{"read": "Reading", "decode": "Decoding", "h2d": "Copying to the device"},
    **{"d2h": "Copying from the device", "encode": "Encoding", "write": "Writing"},
}
# The same for what is in memory.
IN_MEMORY = {
    "read": ("Memory-bound", "Copying A and B into the slots that the device copies from"),
    "write": ("Download-bound", "Copying C from the slots that the device copies to"),
}


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a run.

    `bound` is a lane (read, decode, h2d, compute, d2h, encode, write), or a direction that has none (``start-up``,
    ``issue``), or ``nothing`` where nothing was multiplied; `share` of T is what it costs: the time multiplied, or that waited. `finding` says so in a
    sentence, `evidence` how near the limit that lane is.
    """

    bound: str
    share: float
    finding: str
    evidence: str


def diagnose(timeline: Timeline, figures: Report | None = None) -> Diagnosis:
    """What bounds a run; `figures` where they are known already."""
    figures = figures or report(timeline)
    wall = figures.wall
    if not figures.compute or not wall:
        return Diagnosis("nothing", 0.0, "Nothing was multiplied.", "")
    costs = directions(timeline)
    worst = max(costs, key=lambda direction: costs[direction], default=ISSUE)
    share = costs[worst] / wall if costs else 0.0
    if costs.get(worst, 0.0) < COUNTS * figures.compute:
        share = figures.compute / wall
        finding = f"Kernel-bound: {format_share(share)} of the time is multiplication."
        return Diagnosis("compute", share, finding, _kernel(timeline.header, figures))
    busy = {lane: figures.lanes[lane]["busy"] for lane in LINKS.get(worst, {}) if lane in figures.lanes}
    lane = max(busy, key=lambda lane: busy[lane], default="")
    what = f"{format_share(share)} of the time {WAITING[worst]}"
    if not lane:
        return Diagnosis(worst, share, f"{NAMES[worst]}: {what}.", "")
    name, doing = LINKS[worst][lane], DOING[lane]
    if in_memory(lane, timeline.header):
        name, doing = IN_MEMORY[lane]
    return Diagnosis(
        lane, share, f"{name}: {what}.", _link(lane, doing, timeline.header, figures, busy[lane])
    )


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


def directions(timeline: Timeline, device: int = 0) -> dict[str, float]:
    """Seconds outside all Multiplies by direction."""
    spans = [s for s in timeline.spans if s.device == device]
    multiplies = [s for s in spans if s.kind == "multiply"]
    first = min((s.start for s in multiplies), default=0)
    costs: defaultdict[str, float] = defaultdict(float)
    for start, end, cause in exposed_intervals(spans, timeline.wall):
        costs[START_UP if end <= first else DIRECTIONS.get(cause, ISSUE)] += (end - start) / 1e9
    return dict(costs)


def _kernel(header: Mapping[str, Any], figures: Report) -> str:
    rate = figures.flops / figures.compute
    return f"The kernel ran at {format_rate(rate, 'FLOP')}{_of_calibrated(header, 'kernel', rate, 'FLOP')}."


def _link(lane: str, doing: str, header: Mapping[str, Any], figures: Report, busy: float) -> str:
    moved = figures.lanes[lane]["bytes"]
    rate = moved / busy if busy else 0.0
    text = (
        f"{doing} took {format_share(busy / figures.wall)} of the time, at {format_rate(rate)}"
        f"{_of_calibrated(header, lane, rate)}"
    )
    least = figures.traffic.get("read" if lane == "decode" else lane, {}).get("least")
    if least and moved:
        text += f"; it moved {format_size(moved)}, {moved / least:.2f} times the least possible"
    return text + "."


def _of_calibrated(header: Mapping[str, Any], part: str, rate: float, unit: str = "B") -> str:
    calibrated = (header.get("rates") or {}).get(part)
    return (
        f", {format_share(rate / calibrated)} of the calibrated {format_rate(calibrated, unit)}"
        if calibrated
        else ""
    )
