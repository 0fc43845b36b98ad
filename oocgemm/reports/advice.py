"""Suggest what to change after a run, and predict how much time the change saves.

1. `fit` adjusts the rates in the plan's cost model, so that it predicts the busy times that the run had.
2. `_changed` plans the product again with each candidate change, such as a larger budget or another tile.
3. The fitted model predicts T of the run's plan and T of the changed plan. The measured T, times the ratio of
   the two predictions, is the predicted T after the change.

If the T that the fitted model predicts for the run itself is too far from the measured T (`MAX_FIT_ERROR`),
no saving is predicted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
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
    within,
)
from oocgemm.planning.units import format_share, format_size, format_time, parse_size
from oocgemm.timeline.activities import COMPUTE
from oocgemm.timeline.metrics import OUTPUT_LANES, STORAGE, Diagnosis, Report, diagnose, in_memory, unfinished
from oocgemm.timeline.spans import Timeline, length, union
from oocgemm.values import dataclass

# A lane for which the kernel waited during less than this share of T may have run below its maximum rate.
# Unless lanes share CPU cores, the fit then ignores a measured rate below the model's.
NEGLIGIBLE_WAIT = 0.02
# A change is suggested only if the best one saves at least the share MIN_GAIN of T. An easier change is
# suggested instead if it saves at least the share COMPARABLE_GAIN of what the best one saves.
MIN_GAIN, COMPARABLE_GAIN = 0.03, 0.8
# Advice on a compute-bound run also covers the kernel's longest wait, if it took at least this share of T.
MIN_STALL = 0.1
# The fitted model is used only if the T that it predicts for the run is within this share of the measured T.
MAX_FIT_ERROR = 0.25
# Suggested budgets are at most these shares of the memory of the device and of the host.
USABLE = {"device": 0.9, "host": 0.7}
ONLY_KERNEL = "Only a faster kernel or device, or a narrower dtype, would shorten this run."
FASTER_KERNEL = "A faster kernel or device, or a narrower dtype, would gain most."
CONTENDED = "Run it again while no other program uses the cores."
# How to shorten exposed time, by its cause.
ADVICE = {
    "read": "Put A and B on faster storage.",
    "decode": "Store A and B with a faster codec or uncompressed, or use a machine with more cores.",
    "h2d": "A larger device budget allows larger tiles, which upload fewer panels.",
    "prepare": "A larger device budget allows larger tiles, which prepare fewer panels.",
    "accumulator": "A host budget with room for a whole tile of C would shorten this wait.",
    "select": "Deeper products, or fewer elements that are kept of each row, make selecting weigh less.",
    "encode": "Write C with a faster codec or uncompressed.",
    "write": "Put C on faster storage.",
    "start-up": "The start-up weighs less in larger products, or in several products of one process.",
    "issue": "Steps are shorter than the time to issue them: choose deeper panels with --tile.",
    "tail": "Put C on faster storage, or choose smaller tiles, so that the last one drains sooner.",
    "samples": "This check of samples weighs less in larger products.",
    "part-wait": "Smaller parts let workers end together. Larger products make their start weigh less.",
    "reduce": "Fewer slices of k leave fewer partial products to add.",
    "nothing": "There is nothing to improve.",
}
ADVICE_IN_MEMORY = {
    "read": "A larger device budget allows larger tiles, which load fewer panels.",
    "write": "Only faster host memory or a narrower dtype would write C sooner.",
    "accumulator": "Choose smaller tiles, so that each one drains sooner.",
    "tail": "Choose smaller tiles, so that the last one drains sooner.",
}
# What to do about HDF5 datasets that only h5py reads.
STORE_OTHERWISE = "store it without filters, or with gzip, blosc, zstd, lz4 or bitshuffle."


@dataclass(frozen=True)
class Fitted:
    """A run's plan, with the machine model `machine` fitted to the run; `original` is the model before.

    `outside` are the measured seconds that predictions do not include.
    """

    plan: Plan
    machine: MachineModel
    original: MachineModel
    outside: float

    def seconds(self, plan: Plan) -> float:
        """Predict T of a plan with the fitted model, in seconds."""
        # `outside` includes the time of the run's page faults. On the host backend, a plan that occupies
        # `more` bytes than the run did causes more page faults.
        more = plan.footprint.device_total - self.plan.footprint.device_total if plan.machine.unified else 0
        return plan.prediction.total + self.outside + max(0.0, more * plan.machine.arena_seconds_per_byte)

    @property
    def whole(self) -> Plan:
        """The run's plan with all tiles. The plan of a resumed run has only the remaining tiles."""
        return replace(self.plan, done=frozenset())

    def ratio(self, plan: Plan) -> float:
        """Return the predicted T of `plan` divided by that of `whole`."""
        return self.seconds(plan) / self.seconds(self.whole)


def fit(timeline: Timeline, figures: Report) -> Fitted | None:
    """Fit the cost model to a run.

    Returns None if the header has no plan, if the run was unfinished, used several devices, or multiplied
    nothing.
    """
    if figures.distribution:
        return None
    plan = recorded_plan(timeline.header.get("plan", {}), {s.tile for s in timeline.spans})
    if plan is None or not figures.compute or timeline.unfinished:
        return None
    lanes = plan.prediction.lanes
    # The model predicts how long each lane takes alone, but lanes that share CPU cores slow each other down.
    # So the measured busy times are multiplied by `crowding`. Their sum is then the time in which at least
    # one lane was busy.
    together = length(union((s.start, s.end) for s in timeline.spans)) / 1e9
    crowding = (
        together / sum(lane["busy"] for lane in figures.lanes.values()) if plan.machine.shares_cores else 1.0
    )

    machine, layouts = plan.machine, plan.layouts

    def took(lane: str) -> float:
        return figures.lanes.get(lane, {}).get("busy", 0.0) * crowding

    def scale(lane: str, latency: float = 0.0) -> float:
        """Return a lane's predicted busy time over the measured one, both without `latency`, in seconds."""
        busy, modelled = took(lane), lanes.get(lane, 0.0)
        # A storage lane that moved no bytes has no measured rate: the device copied from or to the caller's
        # arrays in place.
        if lane in STORAGE and not figures.lanes.get(lane, {}).get("bytes"):
            return 1.0
        if 2 * latency < min(busy, modelled):
            busy, modelled = busy - latency, modelled - latency
        rate = modelled / busy if busy and modelled else 1.0
        cause = "accumulator" if lane == "d2h" else lane
        waited = figures.exposed.get(cause, 0.0) + (
            figures.exposed.get("tail", 0.0) if lane in OUTPUT_LANES else 0.0
        )
        spare = not machine.shares_cores and waited < NEGLIGIBLE_WAIT * figures.wall
        return max(rate, 1.0) if spare and lane != "compute" else rate

    writes = figures.lanes.get("write", {}).get("operations", 0) * machine.write_latency
    read, write = scale("read"), scale("write", writes)
    # If reads from storage took longer than predicted, each byte took `late` seconds more. `late` is added to
    # the seconds per byte of both read rates, those of whole chunks (`read`) and of parts (`read_scattered`).
    # `covered` is the number of bytes read, computed as the seconds that reads take at 1 byte per second.
    late = 0.0
    if 0 < read < 1 and not (layouts.a.in_memory or layouts.b.in_memory):
        unit = replace(plan, machine=replace(machine, read=1.0, read_scattered=1.0))
        covered = unit.prediction.lanes["read"]
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
    started, ended = min(s.start for s in timeline.spans), max(s.end for s in timeline.spans)
    outside = (started + max(0, timeline.wall - ended)) / 1e9
    return Fitted(replace(plan, machine=fitted), fitted, machine, outside)


@dataclass(frozen=True)
class Remedy:
    """A change that would make a run faster, with arguments of `oocgemm.gemm` that make it, if any.

    `seconds` is the predicted T after the change; None if T cannot be predicted, for the reason `why`.
    """

    change: str
    why: str
    seconds: float | None = None
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """A change to try: its description, the plan with the change, and the `gemm` arguments that make it."""

    words: str
    plan: Plan
    settings: Mapping[str, int | str] = field(default_factory=dict)


def remedy(timeline: Timeline, figures: Report, diagnosis: Diagnosis, fitted: Fitted | None) -> Remedy:
    """Return the change that saves most, or an easier one that saves almost as much; else advice."""
    if diagnosis.contended:
        why = "other programs slowed this run down, so its rates are not those of the machine"
        return Remedy(CONTENDED, why)
    if fitted is None:
        why = "nothing was multiplied"
        if figures.compute:
            why = "this log does not contain the whole plan, or another version of oocgemm wrote it"
        if timeline.unfinished:
            why = "this log does not contain the whole run"
        elif figures.distribution:
            why = "the cost model of one device does not describe a run on several devices or workers"
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
    """Return a sentence that names a change and what it saves. `wall` is the measured T in seconds.

    >>> sentence(Remedy("A --host-memory of 24GiB", "would cut reads", 6.0), 8.0)
    'A --host-memory of 24GiB would cut reads: predicted 6 s instead of 8 s, 25% less.'
    """
    if remedy.seconds is None:
        return f"{remedy.change} No gain is predicted: {remedy.why}."
    gain = format_share(1 - remedy.seconds / wall)
    times = f"{format_time(remedy.seconds)} instead of {format_time(wall)}"
    return f"{remedy.change} {remedy.why}: predicted {times}, {gain} less."


def diagnosis_lines(figures: Report, timeline: Timeline, *, advise: bool = False) -> list[str]:
    """Return sentences: whether the run is unfinished, what limited it, and with `advise` a remedy."""
    found = diagnose(timeline, figures)
    lines = [unfinished(figures), found.finding, found.evidence]
    if advise:
        lines.append(sentence(remedy(timeline, figures, found, fit(timeline, figures)), figures.wall))
    return [line for line in lines if line]


def _changed(timeline: Timeline, fitted: Fitted) -> Iterator[_Change]:
    """Yield the candidate changes, the easiest for the user first."""
    plan, layouts = fitted.plan, fitted.plan.layouts
    backend = timeline.header.get("backend", {})
    sizes = plan.budgets.by_option(unified=fitted.machine.unified)
    original = fitted.original
    if backend.get("kernel") not in (None, "auto", "cublas", "blas") and original.calibrated:
        cublas = replace(fitted.machine, kernels=original.kernels, step_latency=original.step_latency)
        if faster := _planned(fitted, sizes, layouts):
            yield _Change("--kernel cublas", replace(faster, machine=cublas), {"kernel": "cublas"})
    best = _planned(fitted, sizes, layouts, by=fitted.machine)
    if best and best.tile != plan.tile and (chosen := _planned(fitted, sizes, layouts, best.tile)):
        words = f"A --tile of {best.tile}, the planner's choice at this run's rates,"
        yield _Change(words, chosen, {"tile": str(best.tile)})
    for option, size in _larger(timeline.header, plan.budgets, unified=fitted.machine.unified):
        if larger := _planned(fitted, sizes | {option: size}, layouts):
            words = f"A --{option.replace('_', '-')} of {format_size(size).replace(' ', '')}"
            yield _Change(words, larger, {option: size})
    straddled: dict[str, Any] = {
        name: layout.changed(read_chunk=panel)
        for name, layout, panel in (
            ("a", layouts.a, (plan.tile.m, plan.tile.k)),
            ("b", layouts.b, (plan.tile.k, plan.tile.n)),
        )
        if plan.amplification.get(name.upper(), 1) > 1 + MIN_GAIN
    }
    if straddled and (rechunked := _planned(fitted, sizes, replace(layouts, **straddled))):
        chunks = " and ".join(
            f"{name.upper()} stored in chunks that divide {layout.read_chunk[0]} x {layout.read_chunk[1]}"
            for name, layout in straddled.items()
        )
        yield _Change(chunks, rechunked)


def _planned(
    fitted: Fitted,
    sizes: Mapping[str, int],
    layouts: Layouts,
    tile: TileShape | None = None,
    by: MachineModel | None = None,
) -> Plan | None:
    """Plan the run's product again, with the machine model `by`; the default is the model before the fit.

    The returned plan predicts times at the rates of this run. Return None if no plan satisfies the arguments.
    """
    try:
        given = by or fitted.original, layouts, tile
        plan = within(sizes, lambda budgets: make_plan(fitted.plan.problem, budgets, *given))
    except OocGemmError:
        return None
    return replace(plan, machine=fitted.machine)


def _larger(header: Mapping[str, Any], budgets: Budgets, *, unified: bool) -> Iterator[tuple[str, int]]:
    """Yield (option, bytes) for 2, 4 and 8 times each size of the run, as far as there is memory."""
    host = int(USABLE["host"] * header.get("machine", {}).get("memory", 0))
    device = int(USABLE["device"] * parse_size(header.get("backend", {}).get("memory", 1)))
    given = budgets.by_option(unified=unified)
    limits = {"memory": host, "host_memory": host, "device_memory": device}
    if unified:
        limits = {"memory": host, "device_memory": host - budgets.host}
    for factor in (2, 4, 8):
        for option, limit in limits.items():
            if option in given and (size := _round(factor * given[option])) <= limit:
                yield option, size


def _round(size: int) -> int:
    unit = 1 << 30 if size >= 8 << 30 else 1 << 20
    return -(-size // unit) * unit


def _effect(before: Plan, after: Plan, moved: Mapping[str, int]) -> str:
    """Say what a change improves, for example "would shorten write by 20%". `moved` are bytes by link."""
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


def _advice(diagnosis: Diagnosis, timeline: Timeline) -> str:
    """Return advice on what limited a run, and for a compute-bound run also on a long stall."""
    found = diagnosis.verdict
    if found.bound != COMPUTE:
        return _against(found.bound, timeline)
    if timeline.header.get("backend", {}).get("kernel") == "tiled":
        return "The tiled kernel is written for readers, not for speed: use --kernel cublas."
    if found.stall_share >= MIN_STALL:
        return f"{FASTER_KERNEL} Next: {_against(found.stall, timeline)}"
    return ONLY_KERNEL if 1 - found.share < MIN_STALL else FASTER_KERNEL


def _against(cause: str, timeline: Timeline) -> str:
    operands = timeline.header.get("operands", {})
    slow = [name for name in "AB" if operands.get(name, {}).get("through") == "h5py"]
    if cause == "read" and slow:
        return f"h5py reads {' and '.join(slow)}, one thread at a time: {STORE_OTHERWISE}"
    lane = "write" if cause in ("accumulator", "tail") else cause
    memory = in_memory(lane, timeline.header) and cause in ADVICE_IN_MEMORY
    return ADVICE_IN_MEMORY[cause] if memory else ADVICE[cause]
