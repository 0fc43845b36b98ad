"""Runs a schedule on a virtual clock: what a plan would take if every operation took its modelled time.

The waits are those of the run, derived by the same tracker; its tokens are the times at which operations end.
"""

from collections.abc import Iterator

from oocgemm.planning.cost.footprint import Layouts, MachineModel, extents
from oocgemm.planning.cost.predict import (
    BY_STRIPS,
    multiply_seconds,
    panel_rate,
    strip_rate,
    wave_quantization,
)
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.hazards import HazardTracker
from oocgemm.planning.schedule.operations import Kind, Operation, Schedule
from oocgemm.planning.schedule.slots import Slot
from oocgemm.planning.tiling import Layout, Range

# What waits, or is waited for, on the host: by a thread, that has to be woken. Others wait on the device.
_HANDED_ON = (Kind.READ, Kind.UPLOAD, Kind.DOWNLOAD, Kind.WRITE)


def _rate(operation: Operation, problem: GemmProblem, layouts: Layouts, machine: MachineModel) -> float:
    """Bytes per second of a Read, an Upload or a Write."""
    if operation.kind is Kind.WRITE:
        return strip_rate(problem, machine, layouts.c, _shape(operation))
    layout, whole = _stored(operation, problem, layouts)
    if operation.kind is Kind.UPLOAD:
        return machine.upload_rate(layout, _shape(operation))
    return panel_rate(problem, machine, layout, whole, _shape(operation))


def _stored(operation: Operation, problem: GemmProblem, layouts: Layouts) -> tuple[Layout, Range]:
    """How the operand lies, and its extents, in the orientation of op(X)."""
    m, n, k = problem.m, problem.n, problem.depth
    return {"A": (layouts.a, (m, k)), "B": (layouts.b, (k, n)), "C": (layouts.c, (m, n))}[operation.operand]


def _shape(operation: Operation) -> Range:
    (r0, r1), (c0, c1) = operation.block
    return r1 - r0, c1 - c0


def duration(
    operation: Operation,
    problem: GemmProblem,
    machine: MachineModel,
    layouts: Layouts,
) -> float:
    """Modelled seconds of one operation."""
    match operation.kind:
        case Kind.READ:
            return operation.bytes / _rate(operation, problem, layouts, machine)
        case Kind.WRITE:
            return operation.bytes / _rate(operation, problem, layouts, machine) + machine.write_latency
        case Kind.UPLOAD:
            return operation.bytes / _rate(operation, problem, layouts, machine) + machine.copy_latency
        case Kind.DOWNLOAD:
            return operation.bytes / machine.d2h + machine.copy_latency
        case Kind.MULTIPLY:
            w, h, r = (s[1] - s[0] for s in (operation.m, operation.n, operation.k))
            # Strips of a GPU are cut so that they fill it, and take little longer than those rows of a whole tile.
            more = 1.0
            if r and not machine.unified:
                strip, w = w, operation.reads[0].stop // r
                more = BY_STRIPS if strip < w else wave_quantization(problem, machine, w, h)
            seconds = more * multiply_seconds(problem, machine, operation.flops, w, h, r) if r else 0.0
            return seconds + machine.step_latency
        case _:  # a Prepare, or a Finish, which has no bytes
            return operation.bytes / machine.prepare + machine.step_latency


def timed(
    schedule: Schedule, problem: GemmProblem, machine: MachineModel, layouts: Layouts
) -> Iterator[tuple[Operation, float]]:
    """Operations with their modelled seconds. The first read into a slot faults its pages in."""
    w, h, r = extents(problem, schedule.grid.tile)
    panels, touched = {"A": (w, r), "B": (r, h)}, set[Slot]()
    for operation in schedule:
        seconds = duration(operation, problem, machine, layouts)
        if operation.kind is Kind.READ:
            slot, (layout, _) = operation.writes[0].slot, _stored(operation, problem, layouts)
            shape = _shape(operation)
            straight = layout.is_direct(panels.get(operation.operand, shape), shape)
            if slot not in touched and not straight:
                touched.add(slot)
                seconds += operation.bytes * machine.arena_seconds_per_byte
        yield operation, seconds


def simulate(
    schedule: Schedule,
    problem: GemmProblem,
    machine: MachineModel,
    layouts: Layouts,
) -> float:
    """Seconds until the last operation ends, streams running side by side and operations being issued one by one."""
    tracker: HazardTracker[list[float]] = HazardTracker()
    stream_free: dict[str, float] = {}
    end = issued = 0.0
    for operation, seconds in timed(schedule, problem, machine, layouts):
        done = [0.0]
        issued += machine.issue
        ready = max((t[0] for t in tracker.admit(operation, done)), default=0.0)
        if ready and operation.kind in _HANDED_ON:
            ready += machine.issue
        # Preparing beside a multiplication takes as long from that.
        stream = "compute" if operation.kind is Kind.PREPARE else operation.stream
        start = max(ready, issued, stream_free.get(stream, 0.0))
        done[0] = start + seconds
        stream_free[stream] = done[0]
        end = max(end, done[0])
    return end
