"""Predict the time of a run: simulate its schedule, in which each operation takes its modelled time.

`HazardTracker` derives the waits of operations for one another, as it does in a real run. A real run
registers operations with completion events. The simulation registers them with the times at which they end.

`oocgemm.planning.cost.clock` computes the same times far faster, without creating the operations.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from oocgemm.planning.cost.price import Prices
from oocgemm.planning.schedule.operation import HazardTracker, Kind, Operation, Slot
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import length

# Operations that a host thread runs or waits for. Waking the thread takes extra time. Other operations wake
# no thread: the device itself starts them when the operations before them have ended.
_WOKEN = (Kind.READ, Kind.UPLOAD, Kind.DOWNLOAD, Kind.WRITE)


# Bytes per second of copies between devices, over NVLink.
PEER_RATE = 150e9


@lru_cache(4)
def _prices(setting: Setting) -> Prices:
    return Prices(setting)


def duration(operation: Operation, setting: Setting) -> float:
    """Return the modelled seconds of one operation."""
    return _seconds(operation, _prices(setting))


def _seconds(operation: Operation, prices: Prices) -> float:
    rows, cols = map(length, operation.block)
    k, seconds = length(operation.k), 0.0
    if prices.setting.problem.sink.per_row and operation.kind in (Kind.DOWNLOAD, Kind.WRITE):
        cols = prices.setting.problem.n  # the selected elements of whole rows
    match operation.kind:
        case Kind.READ:
            seconds = prices.read(operation.operand, rows, cols)
        case Kind.WRITE:
            seconds = prices.write(rows, cols)
            mirrored = operation.bytes // max(1, prices.bytes("C", rows, 1)) - cols
            if prices.setting.problem.cover.mirrored and mirrored > 0:
                seconds += prices.write(rows, mirrored)
        case Kind.UPLOAD if operation.peer:
            seconds = operation.bytes / PEER_RATE + prices.setting.machine.copy_latency
        case Kind.UPLOAD:
            seconds = prices.upload(operation.operand, rows, cols)
        case Kind.DOWNLOAD:
            seconds = prices.download(rows, cols)
        case Kind.MULTIPLY:
            if prices.halves and operation.tile[0] == operation.tile[1]:
                cols -= rows // 2
            seconds = prices.multiply(rows, operation.reads[0].stop // k if k else rows, cols, k)
        case Kind.PREPARE:
            seconds = prices.prepare(rows, cols, k)
        case Kind.FINISH:
            seconds = prices.finish(rows, cols)
    return seconds


def timed(schedule: Schedule, setting: Setting) -> Iterator[tuple[Operation, float]]:
    """Yield operations with their modelled seconds. The first use of a buffer includes its page faults."""
    prices, touched, first_tiles = Prices(setting), set[Slot](), set(schedule.tiles[: schedule.slots.c])
    for operation in schedule:
        seconds = _seconds(operation, prices)
        if operation.kind is Kind.READ and operation.operand != "C":
            slot = operation.writes[0].slot
            if slot not in touched:
                touched.add(slot)
                seconds += prices.faults(operation.operand, *map(length, operation.block))
        elif operation.kind is Kind.MULTIPLY and operation.first and operation.tile in first_tiles:
            seconds += prices.accumulator_faults(length(operation.m), length(operation.n))
        yield operation, seconds


def simulate(schedule: Schedule, setting: Setting) -> float:
    """Return the seconds from the start of the run until its last operation ends.

    Operations of different streams overlap, unless they share CPU cores. The host issues operations one by
    one. Devices have streams of their own, but share storage.
    """
    issue, shares_cores = setting.machine.issue, setting.machine.shares_cores
    tracker: HazardTracker[list[float]] = HazardTracker()
    prices, staged = Prices(setting), [0.0] * setting.devices
    layouts = {"A": setting.layouts.a, "B": setting.layouts.b, "C": setting.layouts.c}
    # The old C and panels are loaded at the same time, over the same link and from the same storage. Both
    # Downloads of a strip of a whole Gram matrix use one link.
    carried = defaultdict[tuple[int, str], float](float)
    # Each device has threads of its own for copies between pageable arrays and pinned buffers.
    copying = setting.machine.copy_threads_of(setting.devices) / setting.machine.copy_threads
    stream_free: dict[tuple[int, str], float] = {}
    end = issued = 0.0
    for operation, seconds in timed(schedule, setting):
        done = [0.0]
        issued += issue
        ready = max((t[0] for t in tracker.admit(operation, done)), default=0.0)
        if ready and operation.kind in _WOKEN and not setting.enqueues:
            ready += issue
        # A Prepare runs on the GPU's cores, so that it cannot overlap multiplications.
        stream = "compute" if operation.kind is Kind.PREPARE else operation.stream
        if shares_cores and operation.kind is not Kind.WRITE:
            stream = "compute"
        # All devices use the same storage.
        common = shares_cores or operation.kind in (Kind.READ, Kind.WRITE)
        key = 0 if common else operation.device, stream
        start = max(ready, issued, stream_free.get(key, 0.0))
        done[0] = start + seconds
        stream_free[key] = done[0]
        if shares_cores and operation.kind is Kind.WRITE:
            computed = stream_free.get((0, "compute"), 0.0)
            stream_free[0, "compute"] = computed + prices.write_cpu_share * seconds
        if operation.kind is Kind.READ:
            carried[0, "decode" if layouts[operation.operand].decode_bytes else "read"] += seconds
        if operation.kind is Kind.UPLOAD and not operation.peer:
            carried[operation.device, "h2d"] += seconds
        if operation.kind is Kind.DOWNLOAD:
            carried[operation.device, "d2h"] += seconds
        if operation.kind in (Kind.UPLOAD, Kind.DOWNLOAD) and not operation.peer:
            copied = prices.staged(operation.operand, *map(length, operation.block))
            staged[operation.device] += copied / copying
        end = max(end, done[0])
    return max(end, *staged, *carried.values())
