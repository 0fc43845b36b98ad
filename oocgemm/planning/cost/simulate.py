"""Predict the time of a run: simulate its schedule, in which each operation takes its modelled time.

`HazardTracker` derives the waits of operations for one another, as it does in a real run. A real run
registers operations with completion events. The simulation registers them with the times at which they end.
"""

from collections.abc import Iterator

from oocgemm.planning.cost.machine import STRIP_OVERHEAD
from oocgemm.planning.cost.price import panel_rate, strip_rate
from oocgemm.planning.schedule.hazards import HazardTracker
from oocgemm.planning.schedule.operations import Kind, Operation, Schedule
from oocgemm.planning.schedule.slots import Slot
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Layout, Shape, length

# Operations that a host thread runs or waits for. Waking the thread takes extra time. Other operations wake
# no thread: the device itself starts them when the operations before them have ended.
_WOKEN = (Kind.READ, Kind.UPLOAD, Kind.DOWNLOAD, Kind.WRITE)


def _rate(operation: Operation, setting: Setting) -> float:
    """Return the bytes per second of a Read, an Upload, a Download or a Write."""
    if operation.kind is Kind.DOWNLOAD:
        return setting.machine.download_rate(setting.layouts.c, _shape(operation))
    if operation.kind is Kind.WRITE:
        return strip_rate(setting, _shape(operation))
    layout, shape = _operand(operation, setting)
    if operation.kind is Kind.UPLOAD:
        return setting.machine.upload_rate(layout, _shape(operation))
    return panel_rate(setting, layout, shape, _shape(operation))


def _operand(operation: Operation, setting: Setting) -> tuple[Layout, Shape]:
    """Return layout and shape of the operand X that an operation copies. Their axes are those of op(X)."""
    problem, layouts = setting.problem, setting.layouts
    m, n, k = problem.m, problem.n, problem.depth
    return {"A": (layouts.a, (m, k)), "B": (layouts.b, (k, n)), "C": (layouts.c, (m, n))}[operation.operand]


def _shape(operation: Operation) -> Shape:
    rows, cols = operation.block
    return length(rows), length(cols)


def duration(operation: Operation, setting: Setting) -> float:
    """Return the modelled seconds of one operation."""
    problem, machine = setting.problem, setting.machine
    match operation.kind:
        case Kind.READ:
            return operation.bytes / _rate(operation, setting)
        case Kind.WRITE:
            return operation.bytes / _rate(operation, setting) + machine.write_latency
        case Kind.UPLOAD:
            return operation.bytes / _rate(operation, setting) + machine.copy_latency
        case Kind.DOWNLOAD:
            return operation.bytes / _rate(operation, setting) + machine.copy_latency
        case Kind.MULTIPLY:
            m, n, k = length(operation.m), length(operation.n), length(operation.k)
            # A strip takes only the small STRIP_OVERHEAD, because `MachineModel.strip_rows` has chosen its
            # number of rows so that it fills the GPU's waves.
            factor = 1.0
            if k and not machine.unified:
                rows, m = m, operation.reads[0].stop // k
                factor = STRIP_OVERHEAD if rows < m else machine.wave_quantization(problem.rate, m, n)
            seconds = factor * machine.multiply_seconds(problem.rate, operation.flops, m, n, k) if k else 0.0
            return seconds + machine.step_latency
        case _:
            # Only Prepare and Finish reach this case. The `bytes` of a Finish are 0, so that its modelled
            # time is only `step_latency`.
            return operation.bytes / machine.prepare + machine.step_latency


def timed(schedule: Schedule, setting: Setting) -> Iterator[tuple[Operation, float]]:
    """Yield operations with their modelled seconds. The first read into a buffer includes its page faults."""
    touched = set[Slot]()
    for operation in schedule:
        seconds = duration(operation, setting)
        if operation.kind is Kind.READ:
            slot = operation.writes[0].slot
            if slot not in touched:
                touched.add(slot)
                seconds += operation.bytes * setting.machine.arena_seconds_per_byte
        yield operation, seconds


def simulate(schedule: Schedule, setting: Setting) -> float:
    """Return the seconds from the start of the run until its last operation ends.

    Operations of different streams overlap. The host issues operations one by one.
    """
    issue = setting.machine.issue
    tracker: HazardTracker[list[float]] = HazardTracker()
    stream_free: dict[str, float] = {}
    end = issued = 0.0
    for operation, seconds in timed(schedule, setting):
        done = [0.0]
        issued += issue
        ready = max((t[0] for t in tracker.admit(operation, done)), default=0.0)
        if ready and operation.kind in _WOKEN:
            ready += issue
        # A Prepare runs on the GPU's cores, so that it cannot overlap multiplications.
        stream = "compute" if operation.kind is Kind.PREPARE else operation.stream
        start = max(ready, issued, stream_free.get(stream, 0.0))
        done[0] = start + seconds
        stream_free[stream] = done[0]
        end = max(end, done[0])
    return end
