"""What to change after a run, and what the change is predicted to gain.

1. `fit` fits the plan's cost model to the run. Each lane's rate becomes the one at which the model predicts
   the measured busy time of the lane. Time outside all operations is added to every prediction.
2. Candidate changes are planned anew: larger budgets within the machine's memory, another tile, A and B
   stored in chunks that match their panels, or cuBLAS instead of a slower kernel whose calibrated rate is
   known. The planner still uses the machine model of the original plan, as it would when the user follows the
   advice.
3. The gain of a change is the ratio of two predictions of the fitted model, applied to the measured T.

No gain is predicted if the fitted model does not reproduce the measured T, or if a change depends on rates
that the run did not show, such as those of another storage or codec.
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
from oocgemm.timeline.diagnosis import OUTPUT_LANES, Diagnosis, diagnose, in_memory, unfinished
from oocgemm.timeline.metrics import STORAGE, Report, length, union
from oocgemm.timeline.spans import Timeline
from oocgemm.timeline.verdict import COMPUTE

# Changes that gain less than MIN_GAIN of T are not advised. An easier change is preferred if it gains at
# least COMPARABLE_GAIN of the largest gain.
MIN_GAIN, COMPARABLE_GAIN = 0.03, 0.8
# A stall gets its own advice from this share of T on.
MIN_STALL = 0.1
# Largest relative error of the fitted model's T at which its predictions are used.
MAX_FIT_ERROR = 0.25
# Plans of more steps are predicted in closed form. Simulating a step takes about 0.1 ms.
MAX_SIMULATED = 4000
# Largest advised budgets, as shares of the machine's memory.
USABLE = {"device": 0.9, "host": 0.7}
# A lane counts as unhurried if the run waited for it for less than this share of T.
MAX_UNHURRIED_WAIT = 0.02


@dataclass(frozen=True)
class Remedy:
    """What to change.

    `seconds` is the predicted T after the change, or None if no gain can be predicted. `why` says what the
    change does, or why no gain can be predicted. `settings` holds the arguments of `oocgemm.gemm` that make
    the change, if any do.
    """

    change: str
    why: str
    seconds: float | None = None
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """A candidate change: in words, the plan that results, and the settings that make it."""

    words: str
    plan: Plan
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """A run's plan, and the machine model fitted to the run.

    `original` is the machine model that the plan was made with. `outside` is the time before the first
    operation and after the last, in seconds, which no simulation covers. `closed_outside` is the
    corresponding correction of the closed form: the time after the last operation, and the part of the
    start-up that the closed form does not predict.
    """

    plan: Plan
    machine: MachineModel
    original: MachineModel
    outside: float
    closed_outside: float

    def seconds(self, plan: Plan, *, closed: bool | None = None) -> float:
        """Predict T of a plan with the fitted model, in seconds.

        The schedule is simulated. Plans of more than `MAX_SIMULATED` steps are predicted in closed form,
        unless `closed` decides.
        """
        if plan.steps > MAX_SIMULATED if closed is None else closed:
            return plan.prediction.total + self.closed_outside
        # The measured times include the first touch of the run's arena. A larger arena costs more.
        more = plan.footprint.device_total - self.plan.footprint.device_total if plan.machine.unified else 0
        seconds = simulate(plan.schedule(), plan.setting)
        return seconds + self.outside + max(0.0, more * plan.machine.arena_seconds_per_byte)

    @property
    def whole(self) -> Plan:
        """Return the plan for the whole product, even if the run resumed an earlier one."""
        return replace(self.plan, done=frozenset())

    def ratio(self, plan: Plan) -> float:
        """Return the predicted T of a plan over that of the run's plan, for the whole product."""
        closed = max(plan.steps, self.whole.steps) > MAX_SIMULATED
        return self.seconds(plan, closed=closed) / self.seconds(self.whole, closed=closed)


def fit(timeline: Timeline, figures: Report) -> Fitted | None:
    """Fit the cost model to a run.

    Returns None if the log does not hold the plan or the whole run, or if nothing was multiplied.
    """
    plan = recorded_plan(timeline.header.get("plan", {}), {s.tile for s in timeline.spans})
    if plan is None or not figures.compute or timeline.unfinished:
        return None
    lanes = _modelled(plan)
    # Lanes that share cores slow each other down. Scale their busy times so that the sum is that of their
    # union.
    together = length(union((s.start, s.end) for s in timeline.spans)) / 1e9
    crowding = (
        together / sum(lane["busy"] for lane in figures.lanes.values()) if plan.machine.shares_cores else 1.0
    )

    machine, layouts = plan.machine, plan.layouts

    def took(lane: str) -> float:
        return figures.lanes.get(lane, {}).get("busy", 0.0) * crowding

    def scale(lane: str, latency: float = 0.0) -> float:
        """Return the measured rate of a lane over the modelled one, `latency` seconds excluded from both.

        A lane that nothing waited for may have run below its rate, so its rate is never lowered.
        """
        busy, modelled = took(lane), lanes.get(lane, 0.0)
        if lane in STORAGE and not figures.lanes.get(lane, {}).get(
            "bytes"
        ):  # all panels or strips were zero-copy
            return 1.0
        if 2 * latency < min(busy, modelled):
            busy, modelled = busy - latency, modelled - latency
        rate = modelled / busy if busy and modelled else 1.0
        cause = "accumulator" if lane == "d2h" else lane
        waited = figures.exposed.get(cause, 0.0) + (
            figures.exposed.get("tail", 0.0) if lane in OUTPUT_LANES else 0.0
        )
        spare = not machine.shares_cores and waited < MAX_UNHURRIED_WAIT * figures.wall
        return max(rate, 1.0) if spare and lane != "compute" else rate

    writes = figures.lanes.get("write", {}).get("operations", 0) * machine.write_latency
    read, write = scale("read"), scale("write", writes)
    # Slower storage adds the same time per byte to whole and to partial chunks.
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
    refitted = replace(plan, machine=fitted)
    first_multiply = min(s.start for s in timeline.spans if s.kind == "multiply") / 1e9
    started, ended = min(s.start for s in timeline.spans), max(s.end for s in timeline.spans)
    closing = max(0, timeline.wall - ended) / 1e9
    closed_outside = max(0.0, first_multiply - refitted.prediction.start_up) + closing
    return Fitted(refitted, fitted, machine, started / 1e9 + closing, closed_outside)


def _modelled(plan: Plan) -> Mapping[str, float]:
    """Return the modelled busy seconds of each lane, in closed form above `MAX_SIMULATED` steps."""
    if plan.steps > MAX_SIMULATED:
        return plan.prediction.lanes
    lanes = dict.fromkeys(plan.prediction.lanes, 0.0)
    for operation, seconds in timed(plan.schedule(), plan.setting):
        lanes[operation.lane] += seconds
    return lanes


def remedy(timeline: Timeline, figures: Report, diagnosis: Diagnosis, fitted: Fitted | None) -> Remedy:
    """Choose the change with the largest predicted gain, or an easier one that gains almost as much.

    No gain is predicted for a contended run, since its rates are not those of the machine.
    """
    if diagnosis.contended:
        return Remedy(
            CONTENDED, "other programs slowed this run down, so its rates are not those of the machine"
        )
    if fitted is None:
        why = "nothing was multiplied"
        if figures.compute:
            why = "this log does not hold the whole plan, or another version of oocgemm wrote it"
        if timeline.unfinished:
            why = "this log does not hold the whole run"
        return Remedy(_advice(diagnosis, timeline), why)
    now = fitted.seconds(fitted.plan)
    if abs(now / figures.wall - 1) > MAX_FIT_ERROR:
        measured = format_time(figures.wall)
        why = f"the cost model at this run's rates predicts {format_time(now)}, but the run took {measured}"
        return Remedy(_advice(diagnosis, timeline), why)
    tried = [(change, fitted.ratio(change.plan)) for change in _changed(timeline, fitted)]
    best = min((ratio for _, ratio in tried), default=1.0)
    if 1 - best < MIN_GAIN:
        why = "the cost model finds no faster budget, tile or chunk shape"
        return Remedy(_advice(diagnosis, timeline), why)
    change, ratio = next(t for t in tried if 1 - t[1] >= COMPARABLE_GAIN * (1 - best))
    moved = {link: traffic["bytes"] or 0 for link, traffic in figures.traffic.items()}
    effect = _effect(fitted.whole, change.plan, moved)
    return Remedy(change.words, effect, ratio * figures.wall, change.settings)


def sentence(remedy: Remedy, wall: float) -> str:
    """Return a remedy and its gain as a sentence; `wall` is the measured T in seconds.

    >>> sentence(Remedy("A --host-memory of 24GiB", "would cut reads", 6.0), 8.0)
    'A --host-memory of 24GiB would cut reads: predicted 6 s instead of 8 s, 25% less.'
    """
    if remedy.seconds is None:
        return f"{remedy.change} No gain is predicted: {remedy.why}."
    gain = format_share(1 - remedy.seconds / wall)
    times = f"{format_time(remedy.seconds)} instead of {format_time(wall)}"
    return f"{remedy.change} {remedy.why}: predicted {times}, {gain} less."


def diagnosis_lines(figures: Report, timeline: Timeline, *, advise: bool = False) -> list[str]:
    """Return what bounded a run as a list of sentences.

    They say whether the run finished, which resource bounded it, how close that resource was to its
    maximum rate and, with `advise`, what to change.
    """
    found = diagnose(timeline, figures)
    lines = [unfinished(figures), found.finding, found.evidence]
    if advise:
        lines.append(sentence(remedy(timeline, figures, found, fit(timeline, figures)), figures.wall))
    return [line for line in lines if line]


def _changed(timeline: Timeline, fitted: Fitted) -> Iterator[_Change]:
    """Yield candidate changes, the easiest first."""
    plan, layouts = fitted.plan, fitted.plan.layouts
    budgets, backend = plan.budgets, timeline.header.get("backend", {})
    original = fitted.original
    if backend.get("kernel") not in (None, "auto", "cublas", "blas") and original.calibrated:
        cublas = replace(fitted.machine, kernels=original.kernels, step_latency=original.step_latency)
        if faster := _planned(fitted, budgets, layouts):
            yield _Change("--kernel cublas", replace(faster, machine=cublas), {"kernel": "cublas"})
    best = _planned(fitted, budgets, layouts, by=fitted.machine)
    if best and best.tile != plan.tile and (chosen := _planned(fitted, budgets, layouts, best.tile)):
        words = f"A --tile of {best.tile}, the planner's choice at this run's rates,"
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
        if plan.amplification[name.upper()] > 1 + MIN_GAIN
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
    """Plan the run's problem anew with machine model `by`, the original one by default.

    The plan returned carries the fitted model, for predictions. Returns None if there is no such plan.
    """
    try:
        plan = make_plan(fitted.plan.problem, budgets, by or fitted.original, layouts, tile)
    except OocGemmError:
        return None
    return replace(plan, machine=fitted.machine)


def _larger(header: Mapping[str, Any], budgets: Budgets, *, unified: bool) -> Iterator[tuple[str, int]]:
    """Yield budgets two, four and eight times as large, the smaller first, if the machine has the memory."""
    host = int(USABLE["host"] * header.get("machine", {}).get("memory", 0))
    device = int(USABLE["device"] * parse_size(header.get("backend", {}).get("memory", 1)))
    limits = {"device": host - budgets.host} if unified else {"host": host, "device": device}
    for factor in (2, 4, 8):
        for tier, limit in limits.items():
            size = _round(factor * getattr(budgets, tier))
            if size <= limit:
                yield tier, size


def _round(size: int) -> int:
    """Round a budget up to whole GiB, or to whole MiB below 8 GiB."""
    unit = 1 << 30 if size >= 8 << 30 else 1 << 20
    return -(-size // unit) * unit


def _effect(before: Plan, after: Plan, moved: Mapping[str, int]) -> str:
    """Return what a change does to the lane that gains most from it.

    `moved` holds the run's bytes per link.
    """
    lanes, later = before.prediction.lanes, after.prediction.lanes
    lane = max(lanes, key=lambda lane: lanes[lane] - later[lane])
    if lanes[lane] - later[lane] < MIN_GAIN * before.prediction.total:
        return "would overlap operations that now wait for each other"
    link = {"decode": "read", "encode": "write"}.get(lane, lane)
    old, new = moved.get(link, 0), after.traffic.get(link, 0)
    noun = {"read": "reads", "h2d": "uploads"}.get(link)
    if noun and new < old:
        return f"would reduce {noun} from {format_size(old)} to {format_size(new)}"
    saved = 1 - later[lane] / lanes[lane]
    if lane == "compute":
        lane = "multiplying"
    return f"would shorten {lane} by {format_share(saved)}"


ONLY_KERNEL = "Only a faster kernel or device, or a narrower dtype, would shorten this run."
FASTER_KERNEL = "A faster kernel or device, or a narrower dtype, would gain most."
CONTENDED = "Run it again while no other program uses the cores."
# What reduces a stall, by its cause.
ADVICE = {
    "read": "Put A and B on faster storage.",
    "decode": "Store A and B with a faster codec or uncompressed, or use a machine with more cores.",
    "h2d": "A larger device budget allows larger tiles, which upload fewer panels.",
    "prepare": "A larger device budget allows larger tiles, which prepare fewer panels.",
    "accumulator": "A host budget that holds a whole tile of C would shorten this wait.",
    "encode": "Write C with a faster codec or uncompressed.",
    "write": "Put C on faster storage.",
    "start-up": "The start-up weighs less in larger products, or in several products of one process.",
    "issue": "Steps are shorter than the time to issue them: choose deeper panels with --tile.",
    "tail": "Put C on faster storage, or choose smaller tiles, so that the last one drains sooner.",
    "nothing": "There is nothing to improve.",
}
ADVICE_IN_MEMORY = {
    "read": "A larger device budget allows larger tiles, which load fewer panels.",
    "write": "Only faster host memory or a narrower dtype would write C sooner.",
    "tail": "Choose smaller tiles, so that the last one drains sooner.",
}


def _advice(diagnosis: Diagnosis, timeline: Timeline) -> str:
    """Return general advice on the bound.

    If that is compute, also on a stall of at least `MIN_STALL` of T.
    """
    found = diagnosis.verdict
    if found.bound != COMPUTE:
        return _against(found.bound, timeline)
    if timeline.header.get("backend", {}).get("kernel") == "tiled":
        return "The tiled kernel is written for readers, not for speed: use --kernel cublas."
    if found.stall_share >= MIN_STALL:
        return f"{FASTER_KERNEL} Next: {_against(found.stall, timeline)}"
    return ONLY_KERNEL if 1 - found.share < MIN_STALL else FASTER_KERNEL


def _against(cause: str, timeline: Timeline) -> str:
    memory = in_memory("write" if cause == "tail" else cause, timeline.header) and cause in ADVICE_IN_MEMORY
    return ADVICE_IN_MEMORY[cause] if memory else ADVICE[cause]
