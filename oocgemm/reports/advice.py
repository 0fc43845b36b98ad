"""What to change, and what it would gain, by the planner's own cost model.

The model of the plan is first fitted to the run: the rate of each lane becomes the one at which the lane took as long as
it did, and what passed outside all operations is added to every prediction. Then plans are made anew with one thing
changed, as the planner makes them, which goes on believing what it did: larger budgets, within the memory of the
machine; a tile by hand; A and B in chunks that fit their panels; cuBLAS instead of a slower kernel, where its rate is
calibrated. A gain is the ratio of two such predictions, applied to the time that the run took. Where the fitted model does
not give back that time, it is not asked for gains; nor for what rests on rates that this run has not shown, such as those
of another storage or codec.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oocgemm.errors import OocGemmError
from oocgemm.planning import (
    Budgets,
    KernelRate,
    Layouts,
    MachineModel,
    Plan,
    TileShape,
    make_plan,
    recorded_plan,
)
from oocgemm.planning.cost.simulate import simulate, timed
from oocgemm.planning.units import format_share, format_size, format_time, parse_size
from oocgemm.timeline.diagnosis import Diagnosis, diagnose, in_memory, unfinished
from oocgemm.timeline.metrics import STORAGE, Report, length, union
from oocgemm.timeline.spans import Timeline
from oocgemm.timeline.verdict import COMPUTE

# Gains below this share of T are not worth a change; a cheaper change is preferred if it gains that share of the most.
WORTH, NEARLY = 0.03, 0.8
# A share of T that is worth advice of its own.
MIN_STALL = 0.1
# How far from the run the fitted model may be and still be asked.
TRUSTED = 0.25
# Steps of plans that are simulated, at about 0.1 ms each.
MAX_SIMULATED = 4000
# Share of the memory there is that a budget may be raised to.
USABLE = {"device": 0.9, "host": 0.7}
# The part of a run that may wait for a lane which still has time to spare.
UNHURRIED = 0.02
OUT = ("d2h", "encode", "write")  # what the end of a run waits for


@dataclass(frozen=True)
class Remedy:
    """What to change. `seconds` is the predicted T after it, or None where no gain can be computed; `why` says why
    not, or what the change does. `settings` are the arguments of `oocgemm.gemm` that make the change, where any do."""

    change: str
    why: str
    seconds: float | None = None
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """Something that can be changed: in words, as settings, and the plan after it."""

    words: str
    plan: Plan
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """A run's plan and the machine model at the rates of the run; `outside` are the seconds before its first operation
    and after its last, `beyond` those after its last, and before its first Multiply, that the closed form does not
    account for. `believed` is the model that the plan was made with."""

    plan: Plan
    machine: MachineModel
    believed: MachineModel
    outside: float
    beyond: float

    def seconds(self, plan: Plan, *, closed: bool | None = None) -> float:
        """Predicted T of a plan made with the fitted model: its schedule on a virtual clock, or in closed form if that
        would take long."""
        if plan.steps > MAX_SIMULATED if closed is None else closed:
            return plan.prediction.total + self.beyond
        # What slots take that are not read into was paid for in the times that were measured; more of it costs more.
        more = plan.footprint.device_total - self.plan.footprint.device_total if plan.machine.unified else 0
        seconds = simulate(plan.schedule(), plan.setting)
        return seconds + self.outside + max(0.0, more * plan.machine.arena_seconds_per_byte)

    @property
    def whole(self) -> Plan:
        """The run's plan for all of the product, where it had gone on with some of it."""
        return replace(self.plan, done=frozenset())

    def ratio(self, plan: Plan) -> float:
        """Predicted T of a plan over that of the run's own, both of the whole product and predicted in the same way."""
        closed = max(plan.steps, self.whole.steps) > MAX_SIMULATED
        return self.seconds(plan, closed=closed) / self.seconds(self.whole, closed=closed)


def fit(timeline: Timeline, figures: Report) -> Fitted | None:
    """The cost model at the rates of a run. None where the log does not hold its plan, or only a part of the run, or
    nothing was multiplied."""
    plan = recorded_plan(timeline.header.get("plan", {}), {s.tile for s in timeline.spans})
    if plan is None or not figures.compute or timeline.unfinished:
        return None
    lanes = _modelled(plan)
    # Lanes that run on the same cores slow one another down: together they take the time that any of them is busy.
    together = length(union((s.start, s.end) for s in timeline.spans)) / 1e9
    crowding = (
        together / sum(lane["busy"] for lane in figures.lanes.values()) if plan.machine.shares_cores else 1.0
    )

    machine, layouts = plan.machine, plan.layouts

    def took(lane: str) -> float:
        return figures.lanes.get(lane, {}).get("busy", 0.0) * crowding

    def scale(lane: str, latency: float = 0.0) -> float:
        """The rate of a lane over what was believed, the time of latencies being what it is said to be. A lane that nothing
        waited for had no reason to hurry: it is not taken to be slower."""
        busy, modelled = took(lane), lanes.get(lane, 0.0)
        if lane in STORAGE and not figures.lanes.get(lane, {}).get("bytes"):  # copied in place, all of it
            return 1.0
        if 2 * latency < min(busy, modelled):
            busy, modelled = busy - latency, modelled - latency
        rate = modelled / busy if busy and modelled else 1.0
        cause = "accumulator" if lane == "d2h" else lane
        waited = figures.exposed.get(cause, 0.0) + (figures.exposed.get("tail", 0.0) if lane in OUT else 0.0)
        spare = not machine.shares_cores and waited < UNHURRIED * figures.wall
        return max(rate, 1.0) if spare and lane != "compute" else rate

    writes = figures.lanes.get("write", {}).get("operations", 0) * machine.write_latency
    read, write = scale("read"), scale("write", writes)
    # Slower storage takes so much longer for every byte, in whole chunks as in parts of them.
    late = 0.0
    if 0 < read < 1 and not (layouts.a.in_memory or layouts.b.in_memory):
        covered = _modelled(replace(plan, machine=replace(machine, read=1.0, read_scattered=1.0)))["read"]
        late = (took("read") - lanes["read"]) / covered if covered else 0.0
    memory = write if layouts.c.in_memory else read if layouts.a.in_memory and layouts.b.in_memory else 1.0
    kernel = scale("compute")
    fitted = replace(
        machine,
        kernels={d: KernelRate(k.peak * kernel, k.half_depth) for d, k in machine.kernels.items()},
        step_latency=machine.step_latency / kernel,
        h2d=machine.h2d * scale("h2d"),
        copy_latency=machine.copy_latency / scale("h2d"),
        d2h=machine.d2h * scale("d2h"),
        read=1 / (1 / machine.read + late) if late else machine.read * read,
        read_scattered=1 / (1 / machine.read_scattered + late) if late else machine.read_scattered * read,
        decode=machine.decode * scale("decode"),
        prepare=machine.prepare * scale("prepare"),
        memory=machine.memory * memory,
        write=machine.write * write,
        write_latency=machine.write_latency if 2 * writes < took("write") else machine.write_latency / write,
    )
    first = min(s.start for s in timeline.spans if s.kind == "multiply") / 1e9
    again = replace(plan, machine=fitted)
    begun, ended = min(s.start for s in timeline.spans), max(s.end for s in timeline.spans)
    closing = max(0, timeline.wall - ended) / 1e9
    beyond = max(0.0, first - again.prediction.start_up) + closing
    return Fitted(again, fitted, machine, begun / 1e9 + closing, beyond)


def _modelled(plan: Plan) -> Mapping[str, float]:
    """Seconds that each lane is busy by the model: of all operations, or in closed form if there are too many."""
    if plan.steps > MAX_SIMULATED:
        return plan.prediction.lanes
    lanes = dict.fromkeys(plan.prediction.lanes, 0.0)
    for operation, seconds in timed(plan.schedule(), plan.setting):
        lanes[operation.lane] += seconds
    return lanes


def remedy(timeline: Timeline, figures: Report, diagnosis: Diagnosis, fitted: Fitted | None) -> Remedy:
    """Choose the change that gains most by the fitted model; of those that gain nearly as much the one of least effort.
    A run that competed with other programs for the cores shows no rates to go by."""
    if diagnosis.contended:
        return Remedy(CONTENDED, "the rates of this run are not those of the machine")
    if fitted is None:
        why = "there are no rates to go by"
        if figures.compute:
            why = "this log does not hold the plan in full, or is of a version that reckons otherwise"
        if timeline.unfinished:
            why = "this log does not hold the run in full"
        return Remedy(_advice(diagnosis, timeline), why)
    now = fitted.seconds(fitted.plan)
    if abs(now / figures.wall - 1) > TRUSTED:
        why = f"the cost model at this run's rates gives {format_time(now)} for it, too far off to ask for gains"
        return Remedy(_advice(diagnosis, timeline), why)
    tried = [(change, fitted.ratio(change.plan)) for change in _changed(timeline, fitted)]
    best = min((ratio for _, ratio in tried), default=1.0)
    if 1 - best < WORTH:
        return Remedy(
            _advice(diagnosis, timeline),
            "no other budget, tile or shape of chunks is predicted to gain",
        )
    change, ratio = next(t for t in tried if 1 - t[1] >= NEARLY * (1 - best))
    moved = {link: traffic["bytes"] or 0 for link, traffic in figures.traffic.items()}
    effect = _effect(fitted.whole, change.plan, moved)
    return Remedy(change.words, effect, ratio * figures.wall, change.settings)


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


def _changed(timeline: Timeline, fitted: Fitted) -> Iterator[_Change]:
    """What can be changed, the easiest first."""
    plan, layouts = fitted.plan, fitted.plan.layouts
    budgets, backend = plan.budgets, timeline.header.get("backend", {})
    believed = fitted.believed
    if backend.get("kernel") not in (None, "auto", "cublas", "blas") and believed.calibrated:
        cublas = replace(fitted.machine, kernels=believed.kernels, step_latency=believed.step_latency)
        if faster := _planned(fitted, budgets, layouts):
            yield _Change("--kernel cublas", replace(faster, machine=cublas), {"kernel": "cublas"})
    best = _planned(fitted, budgets, layouts, by=fitted.machine)
    if best and best.tile != plan.tile and (chosen := _planned(fitted, budgets, layouts, best.tile)):
        words = f"A --tile of {best.tile}, which the planner would choose by the rates of this run,"
        yield _Change(words, chosen, {"tile": str(best.tile)})
    for tier, size in _larger(timeline.header, budgets, unified=fitted.machine.unified):
        if larger := _planned(fitted, replace(budgets, **{tier: size}), layouts):
            words = f"A --{tier}-memory of {format_size(size).replace(' ', '')}"
            yield _Change(words, larger, {f"{tier}_memory": size})
    straddled = {
        name: replace(layout, read_chunk=panel)
        for name, layout, panel in (
            ("a", layouts.a, (plan.tile.m, plan.tile.k)),
            ("b", layouts.b, (plan.tile.k, plan.tile.n)),
        )
        if plan.amplification[name.upper()] > 1 + WORTH
    }
    if straddled and (rechunked := _planned(fitted, budgets, replace(layouts, **straddled))):
        chunks = " and ".join(
            f"{name.upper()} stored in chunks that divide {layout.read_chunk[0]} x {layout.read_chunk[1]}"
            for name, layout in straddled.items()
        )
        yield _Change(chunks, rechunked)


def _planned(
    fitted: Fitted,
    budgets: Budgets,
    layouts: Layouts,
    tile: TileShape | None = None,
    by: MachineModel | None = None,
) -> Plan | None:
    """What the planner would make of it, by what it believes of the machine or a model of one; to be predicted by what
    the machine has shown."""
    try:
        plan = make_plan(fitted.plan.problem, budgets, by or fitted.believed, layouts, tile)
    except OocGemmError:
        return None
    return replace(plan, machine=fitted.machine)


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
    lanes, later = before.prediction.lanes, after.prediction.lanes
    lane = max(lanes, key=lambda lane: lanes[lane] - later[lane])
    if lanes[lane] - later[lane] < WORTH * before.prediction.total:
        return "would let operations run side by side that waited for one another"
    link = {"decode": "read", "encode": "write"}.get(lane, lane)
    old, new = moved.get(link, 0), after.traffic.get(link, 0)
    noun = {"read": "reads", "h2d": "copies to the device"}.get(link)
    if noun and new < old:
        return f"would cut {noun} from {format_size(old)} to {format_size(new)}"
    saved = 1 - later[lane] / lanes[lane]
    if lane == "compute":
        lane = "multiplying"
    return f"would take {format_share(saved)} off {lane}"


ONLY_KERNEL = "Only a faster kernel or device, or a narrower dtype, would shorten this run."
FASTER_KERNEL = "A faster kernel or device, or a narrower dtype, would help most."
CONTENDED = "Run it again when other programs leave the cores to it."
# What shortens a stall, by its cause.
ADVICE = {
    "read": "Keep A and B on faster storage.",
    "decode": "Store A and B with a faster codec or none, or take a machine with more cores.",
    "h2d": "Give the device a larger budget, so that larger tiles load fewer panels.",
    "prepare": "Give the device a larger budget, so that fewer panels are prepared.",
    "accumulator": "Give the host budget room for a whole tile of C.",
    "encode": "Write C with a faster codec, or without one.",
    "write": "Put C on faster storage.",
    "start-up": "Larger products, or several in one process, spread the start-up.",
    "issue": "Steps are too short to be issued in time: choose deeper panels with --tile.",
    "tail": "Put C on faster storage, or choose smaller tiles, of which the last leaves sooner.",
    "nothing": "There is nothing to change.",
}
ADVICE_IN_MEMORY = {
    "read": "Give the device a larger budget, so that fewer panels are loaded.",
    "write": "Only faster host memory, or a narrower dtype, would bring C out sooner.",
    "tail": "Choose smaller tiles, of which the last leaves sooner.",
}


def _advice(diagnosis: Diagnosis, timeline: Timeline) -> str:
    """What helps against the bound in general. Where compute is the bound, also against a stall that costs a tenth of T."""
    found = diagnosis.verdict
    if found.bound != COMPUTE:
        return _against(found.bound, timeline)
    if timeline.header.get("backend", {}).get("kernel") == "tiled":
        return "The tiled kernel is made to be read: take --kernel cublas."
    if found.stall_share >= MIN_STALL:
        return f"{FASTER_KERNEL} Next: {_against(found.stall, timeline)}"
    return ONLY_KERNEL if 1 - found.share < MIN_STALL else FASTER_KERNEL


def _against(cause: str, timeline: Timeline) -> str:
    memory = in_memory("write" if cause == "tail" else cause, timeline.header) and cause in ADVICE_IN_MEMORY
    return ADVICE_IN_MEMORY[cause] if memory else ADVICE[cause]
