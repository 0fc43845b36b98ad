"""Fit the rates in a plan's cost model to a run, so that it predicts the busy times that the run had."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oocgemm.planning import KernelRate, MachineModel, Plan, recorded_plan
from oocgemm.planning.cost.simulate import simulate, timed
from oocgemm.timeline.diagnosis import OUTPUT_LANES
from oocgemm.timeline.metrics import STORAGE, Report
from oocgemm.timeline.spans import Timeline, length, union

# T of a plan with at most this many steps is predicted by simulation, which takes about 0.1 ms per step. T of
# a longer plan is predicted by formulas.
MAX_SIMULATED = 4000
# A lane for which the kernel waited during less than this share of T may have run below its maximum rate.
# Unless lanes share CPU cores, the fit then ignores a measured rate below the model's.
NEGLIGIBLE_WAIT = 0.02


@dataclass(frozen=True)
class Fitted:
    """A run's plan, with the machine model `machine` fitted to the run.

    `original` is the model before the fit. Predictions lack some of the measured seconds. `outside` is added
    to a simulated T, `closed_outside` to a T computed from formulas.
    """

    plan: Plan
    machine: MachineModel
    original: MachineModel
    outside: float
    closed_outside: float

    def seconds(self, plan: Plan, *, closed: bool | None = None) -> float:
        """Predict T of a plan with the fitted model, in seconds.

        If `closed` is True, T is computed from formulas. If it is False, the schedule is simulated. By
        default, formulas are used for plans of more than `MAX_SIMULATED` steps.
        """
        if plan.steps > MAX_SIMULATED if closed is None else closed:
            return plan.prediction.total + self.closed_outside
        # `outside` includes the time of the run's page faults. On the host backend, a plan that occupies
        # `more` bytes than the run did causes more page faults.
        more = plan.footprint.device_total - self.plan.footprint.device_total if plan.machine.unified else 0
        seconds = simulate(plan.schedule(), plan.setting)
        return seconds + self.outside + max(0.0, more * plan.machine.arena_seconds_per_byte)

    @property
    def whole(self) -> Plan:
        """Return the run's plan with all tiles. The `plan` of a resumed run has only the remaining tiles."""
        return replace(self.plan, done=frozenset())

    def ratio(self, plan: Plan) -> float:
        """Return the predicted T of `plan` divided by that of `whole`."""
        closed = max(plan.steps, self.whole.steps) > MAX_SIMULATED
        return self.seconds(plan, closed=closed) / self.seconds(self.whole, closed=closed)


def fit(timeline: Timeline, figures: Report) -> Fitted | None:
    """Fit the cost model to a run.

    Returns None if the plan cannot be rebuilt from the timeline's header, if the run was unfinished, if it
    used several devices or workers, or if nothing was multiplied.
    """
    if figures.distribution:
        return None
    plan = recorded_plan(timeline.header.get("plan", {}), {s.tile for s in timeline.spans})
    if plan is None or not figures.compute or timeline.unfinished:
        return None
    lanes = _modelled(plan)
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
        """Return the factor by which to multiply a lane's rate in the model.

        It is the predicted busy time of the lane over the measured one. `latency` is the part of a busy time
        that does not depend on the rate, in seconds.
        """
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
    """Return the busy seconds of each lane that the plan's machine model predicts."""
    if plan.steps > MAX_SIMULATED:
        return plan.prediction.lanes
    lanes = dict.fromkeys(plan.prediction.lanes, 0.0)
    for operation, seconds in timed(plan.schedule(), plan.setting):
        lanes[operation.lane] += seconds
    return lanes
