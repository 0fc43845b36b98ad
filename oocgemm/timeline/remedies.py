"""What to change, and what it would gain, by the planner's own cost model.

The model of the plan is first fitted to the run: the rate of each lane becomes the one at which the lane took as long as
it did, and what passed outside all operations is added to every prediction. Then plans are
made anew with one thing changed: larger budgets, within the memory of the machine; A and B in chunks that fit their
panels; operands or C stored without compression. A gain is the ratio of two such predictions, applied to the time that
the run took. Where the fitted model does not give back that time, it is not asked for gains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oocgemm.errors import OocGemmError
from oocgemm.plan import Budgets, KernelRate, Layouts, MachineModel, Plan, make_plan, recorded_plan
from oocgemm.plan.simulate import simulate
from oocgemm.timeline.diagnosis import Diagnosis, diagnose, unfinished
from oocgemm.timeline.figures import Report, length, union
from oocgemm.timeline.spans import Timeline
from oocgemm.units import format_share, format_size, format_time, parse_size

# Gains below this share of T are not worth a change; a cheaper change is preferred if it gains that share of the most.
WORTH, NEARLY = 0.03, 0.8
# How far from the run the fitted model may be and still be asked.
TRUSTED = 0.25
# Steps of plans that are simulated, at about 0.1 ms each.
MOST_SIMULATED = 4000
# Share of the memory there is that a budget may be raised to.
USABLE = {"device": 0.9, "host": 0.7}


@dataclass(frozen=True)
class Remedy:
    """What to change. `seconds` is the predicted T after it, or None where no gain can be computed; `why` says why
    not, or what the change does."""

    change: str
    why: str
    seconds: float | None = None


@dataclass(frozen=True)
class Fitted:
    """A run's plan and the machine model at the rates of the run; `outside` are the seconds before its first operation
    and after its last, `beyond` those after its last, and before its first Multiply, that the closed form does not
    account for."""

    plan: Plan
    machine: MachineModel
    outside: float
    beyond: float

    def seconds(self, plan: Plan, *, closed: bool | None = None) -> float:
        """Predicted T of a plan made with the fitted model: its schedule on a virtual clock, or in closed form if that
        would take long."""
        if plan.steps > MOST_SIMULATED if closed is None else closed:
            return plan.prediction.total + self.beyond
        # What the run held was paid for in the times that were measured; more of it costs more.
        more = _slots_bytes(plan) - _slots_bytes(self.plan)
        seconds = simulate(plan.schedule(), plan.problem, plan.machine, plan.layouts)
        return seconds + self.outside + max(0.0, more * plan.machine.arena_seconds_per_byte)

    def ratio(self, plan: Plan) -> float:
        """Predicted T of a plan over that of the run's own, both predicted in the same way."""
        closed = max(plan.steps, self.plan.steps) > MOST_SIMULATED
        return self.seconds(plan, closed=closed) / self.seconds(self.plan, closed=closed)


def _slots_bytes(plan: Plan) -> int:
    """Bytes of host memory that are used for the first time."""
    return plan.footprint.host_total + (plan.footprint.device_total if plan.machine.unified else 0)


def fit(timeline: Timeline, figures: Report) -> Fitted | None:
    """The cost model at the rates of a run. None where the log does not hold its plan, or only a part of the run, or
    nothing was multiplied."""
    plan = recorded_plan(timeline.header.get("plan", {}))
    if plan is None or not figures.compute or timeline.unfinished:
        return None
    lanes = plan.prediction.lanes
    # Lanes that run on the same cores slow one another down: together they take the time that any of them is busy.
    together = length(union((s.start, s.end) for s in timeline.spans)) / 1e9
    crowding = (
        together / sum(lane["busy"] for lane in figures.lanes.values()) if plan.machine.shares_cores else 1.0
    )

    def scale(lane: str) -> float:
        busy = figures.lanes.get(lane, {}).get("busy", 0.0) * crowding
        return lanes[lane] / busy if busy and lanes.get(lane) else 1.0

    machine, layouts = plan.machine, plan.layouts
    read, write = scale("read"), scale("write")
    memory = write if layouts.c.in_memory else read if layouts.a.in_memory and layouts.b.in_memory else 1.0
    kernel = scale("compute")
    fitted = replace(
        machine,
        kernels={d: KernelRate(k.peak * kernel, k.half_depth) for d, k in machine.kernels.items()},
        step_latency=machine.step_latency / kernel,
        h2d=machine.h2d * scale("h2d"),
        copy_latency=machine.copy_latency / scale("h2d"),
        d2h=machine.d2h * scale("d2h"),
        read=machine.read * read,
        read_scattered=machine.read_scattered * read,
        decode=machine.decode * scale("decode"),
        memory=machine.memory * memory,
        write=machine.write * write,
        write_latency=machine.write_latency / write,
    )
    first = min(s.start for s in timeline.spans if s.kind == "multiply") / 1e9
    again = replace(plan, machine=fitted)
    begun, ended = min(s.start for s in timeline.spans), max(s.end for s in timeline.spans)
    closing = max(0, timeline.wall - ended) / 1e9
    beyond = max(0.0, first - again.prediction.start_up) + closing
    return Fitted(again, fitted, begun / 1e9 + closing, beyond)


def remedy(timeline: Timeline, figures: Report, diagnosis: Diagnosis, fitted: Fitted | None) -> Remedy:
    """The change that gains most by the fitted model; of those that gain nearly as much the one of least effort."""
    if fitted is None:
        why = "this log does not hold the plan in full" if figures.compute else "there are no rates to go by"
        if timeline.unfinished:
            why = "this log does not hold the run in full"
        return Remedy(_advice(diagnosis.bound, timeline), why)
    now = fitted.seconds(fitted.plan)
    if abs(now / figures.wall - 1) > TRUSTED:
        why = f"the cost model at this run's rates gives {format_time(now)} for it, too far off to ask for gains"
        return Remedy(_advice(diagnosis.bound, timeline), why)
    tried = [(change, plan, fitted.ratio(plan)) for change, plan in _changed(timeline, fitted)]
    best = min((ratio for _, _, ratio in tried), default=1.0)
    if 1 - best < WORTH:
        return Remedy(
            _advice(diagnosis.bound, timeline), "no other budget, tile or storage is predicted to gain"
        )
    change, plan, ratio = next(t for t in tried if 1 - t[2] >= NEARLY * (1 - best))
    moved = {link: traffic["bytes"] or 0 for link, traffic in figures.traffic.items()}
    return Remedy(change, _effect(fitted.plan, plan, moved), ratio * figures.wall)


def sentence(remedy: Remedy, wall: float) -> str:
    """A remedy with its gain, for people.

    >>> sentence(Remedy("A --host-memory of 24GiB", "would cut reads", 6.0), 8.0)
    'A --host-memory of 24GiB would cut reads: predicted 6 s instead of 8 s, 25% less.'
    """
    if remedy.seconds is None:
        return f"{remedy.change} No gain is predicted: {remedy.why}."
    gain = format_share(1 - remedy.seconds / wall)
    times = f"{format_time(remedy.seconds)} instead of {format_time(wall)}"
    return f"{remedy.change} {remedy.why}: predicted {times}, {gain} less."


def diagnosis_lines(figures: Report, timeline: Timeline, *, advise: bool = False) -> list[str]:
    """Whether a run ended, what bounded it, how near its limit that is and, with `advise`, what to change: a sentence
    or two each."""
    found = diagnose(timeline, figures)
    lines = [unfinished(figures), found.finding, found.evidence]
    if advise:
        lines.append(sentence(remedy(timeline, figures, found, fit(timeline, figures)), figures.wall))
    return [line for line in lines if line]


def _changed(timeline: Timeline, fitted: Fitted) -> Iterator[tuple[str, Plan]]:
    """Plans with one thing changed, what is easiest to change first."""
    plan, layouts = fitted.plan, fitted.plan.layouts
    budgets = plan.budgets
    chosen = _planned(fitted, budgets, layouts)
    if chosen is not None and chosen.tile != plan.tile:
        yield f"A --tile of {chosen.tile}, which the planner would choose by the rates of this run,", chosen
    for tier, size in _larger(timeline.header, budgets, unified=fitted.machine.unified):
        if larger := _planned(fitted, replace(budgets, **{tier: size}), layouts):
            yield f"A --{tier}-memory of {format_size(size).replace(' ', '')}", larger
    straddled = {
        name: replace(layout, read_chunk=panel)
        for name, layout, panel in (
            ("a", layouts.a, (plan.tile.w, plan.tile.r)),
            ("b", layouts.b, (plan.tile.r, plan.tile.h)),
        )
        if plan.amplification[name.upper()] > 1 + WORTH
    }
    if straddled and (rechunked := _planned(fitted, budgets, replace(layouts, **straddled))):
        chunks = " and ".join(
            f"{name.upper()} stored in chunks that divide {layout.read_chunk[0]} x {layout.read_chunk[1]}"
            for name, layout in straddled.items()
        )
        yield chunks, rechunked
    plain = {n: replace(x, decode_bytes=0) for n, x in (("a", layouts.a), ("b", layouts.b)) if x.decode_bytes}
    if (
        plain
        and fitted.machine.storage_calibrated
        and (stored := _planned(fitted, budgets, replace(layouts, **plain)))
    ):
        yield f"{' and '.join(n.upper() for n in plain)} stored without compression", stored
    if layouts.c.encodes and fitted.machine.storage_calibrated:
        c = replace(layouts.c, encodes=False, encode_bytes=0)
        if written := _planned(fitted, budgets, replace(layouts, c=c)):
            yield "C written without compression", written


def _planned(fitted: Fitted, budgets: Budgets, layouts: Layouts) -> Plan | None:
    try:
        return make_plan(fitted.plan.problem, budgets, fitted.machine, layouts)
    except OocGemmError:
        return None


def _larger(header: Mapping[str, Any], budgets: Budgets, *, unified: bool) -> Iterator[tuple[str, int]]:
    """Budgets twice, four and eight times as large that the machine has the memory for, the smaller first."""
    host = int(USABLE["host"] * header.get("machine", {}).get("memory", 0))
    device = int(USABLE["device"] * parse_size(header.get("backend", {}).get("memory", 1)))
    limits = {"device": host - budgets.host} if unified else {"host": host, "device": device}
    for factor in (2, 4, 8):
        for tier, limit in limits.items():
            size = _round(factor * getattr(budgets, tier))
            if size <= limit:
                yield tier, size


def _round(size: int) -> int:
    """A budget as people write it: whole GiB, or MiB below 8 GiB."""
    unit = 1 << 30 if size >= 8 << 30 else 1 << 20
    return -(-size // unit) * unit


def _effect(before: Plan, after: Plan, moved: Mapping[str, int]) -> str:
    """What a change does to the lane that gains most by it."""
    lanes = before.prediction.lanes
    lane = max(lanes, key=lambda lane: lanes[lane] - after.prediction.lanes[lane])
    if not after.prediction.lanes[lane]:
        return f"would leave nothing to {lane}"
    link = {"decode": "read", "encode": "write"}.get(lane, lane)
    old, new = moved.get(link, 0), after.traffic.get(link, 0)
    noun = {"read": "reads", "h2d": "copies to the device"}.get(link)
    if noun and new < old:
        return f"would cut {noun} from {format_size(old)} to {format_size(new)}"
    if lane == "compute":
        return f"would let the kernel work on tiles of {after.tile}"
    return f"would take {format_time(max(0.0, lanes[lane] - after.prediction.lanes[lane]))} off {lane}"


ADVICE = {
    "compute": "Only a faster kernel or device, or a narrower dtype, would shorten this run.",
    "read": "Keep A and B on faster storage.",
    "decode": "Store A and B with a faster codec, or on a machine with more cores.",
    "h2d": "Give the device a larger budget, so that larger tiles load fewer panels.",
    "d2h": "Give the host budget room for a whole tile of C.",
    "encode": "Write C with a faster codec, or without one.",
    "write": "Put C on faster storage.",
    "start-up": "Larger products, or several in one process, spread the start-up.",
    "issue": "Steps are too short to be issued in time: choose deeper panels with --tile.",
    "panels": "Keep A and B on faster storage.",
    "result": "Put C on faster storage.",
    "nothing": "There is nothing to change.",
}


def _advice(bound: str, timeline: Timeline) -> str:
    if bound == "compute" and timeline.header.get("backend", {}).get("kernel") == "tiled":
        return "The tiled kernel is made to be read: take --kernel cublas."
    return ADVICE[bound]
