"""Run the parts of a plan in virtual time, on several workers whose Reads and Writes share the storage."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from oocgemm.planning import Kind, Operation, Schedule, Setting, TileGrid
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.partition import Part, Partition, Storage, k_range, slice_setting
from oocgemm.planning.plan import schedule_of
from oocgemm.planning.schedule.operation import HazardTracker
from oocgemm.planning.tiling import length
from tests.support.simulate import timed

# Operations that a host thread runs or waits for. Waking the thread takes extra time.
WOKEN = (Kind.READ, Kind.UPLOAD, Kind.DOWNLOAD, Kind.WRITE)
POOLS = {Kind.READ: "read", Kind.WRITE: "write", Kind.UPLOAD: "h2d"}


def simulated_seconds(partition: Partition, storage: Storage) -> float:
    """Return the seconds in which the workers of a partition compute its parts, and add the partial products.

    A worker that is idle takes the next part. Each operation of its schedule starts when those that it waits
    for have ended. At each moment, the Reads in progress share the storage's rate, and so do the Writes.
    """
    events = _Events(partition, storage)
    return events.run() + _sum_seconds(partition, storage)


def _sum_seconds(partition: Partition, storage: Storage) -> float:
    """Return the seconds in which one process adds the partial products, chunk by chunk."""
    if partition.grid[2] == 1:
        return 0.0
    problem, sizes = partition.plan.problem, partition.plan.problem.itemsizes
    chunk, machine = 1 << 20, partition.plan.machine
    read, write = min(machine.read, storage.read), min(machine.write, storage.write)
    seconds, left = 0.0, problem.m * problem.n
    while left > 0:
        elements = min(chunk, left)
        left -= elements
        old = elements * sizes["C"] if problem.reads_c else 0
        seconds += (partition.grid[2] * elements * sizes["acc"] + old) / read + elements * sizes["C"] / write
    return seconds


@dataclass(eq=False)
class _Running:
    """An operation of a worker: what it waits for, and how much of it is left to do, in [0, 1]."""

    worker: int
    operation: Operation
    own: float  # seconds if no other worker used the storage
    issued: float
    waits: "list[_Running]"
    left: float = 1.0
    rate: float = 0.0  # share of the operation that is done per second
    end: float = inf
    follows: "list[_Running]" = field(default_factory=list)
    pending: int = 0
    fetches: bool = False  # a thread waits for the storage, before the CPU copies the panel


class _Events:
    """The operations of all workers, in the order in which they start and end."""

    def __init__(self, partition: Partition, storage: Storage) -> None:
        plan = partition.plan
        self.partition, self.storage = partition, storage
        self.setting = plan.setting if partition.grid[2] == 1 else slice_setting(plan)
        machine, workers = plan.machine, partition.workers
        self.limited = storage.read < workers * machine.read or storage.write < workers * machine.write
        self.prices: dict[int, Prices] = {}
        self.parts = deque(partition.parts)
        self.now, self.number = 0.0, 0
        self.timers: list[
            tuple[float, int, _Running, bool]
        ] = []  # (time, number, operation, whether it ends)
        self.pools: dict[str, list[_Running]] = {"read": [], "write": [], "h2d": []}
        self.streams: dict[tuple[int, str], deque[_Running]] = {}
        self.unfinished = [0] * partition.workers

    def run(self) -> float:
        for worker in range(self.partition.workers):
            self.begin_part(worker)
        while self.timers or any(self.pools.values()):
            timer = self.timers[0][0] if self.timers else inf
            pooled = [(self.now + x.left / x.rate, x) for pool in self.pools.values() for x in pool]
            first = min(pooled, key=lambda item: item[0], default=(inf, None))
            then = min(timer, first[0])
            for pool in self.pools.values():
                for x in pool:
                    x.left -= (then - self.now) * x.rate
            self.now = then
            if first[0] <= timer and first[1] is not None:
                self.pools[POOLS[first[1].operation.kind]].remove(first[1])
                self.reprice()
                self.finish(first[1])
                continue
            _, _, running, ends = heappop(self.timers)
            if ends:
                self.finish(running)
            else:
                self.start(running)
        assert not any(self.unfinished)
        assert not self.parts
        return self.now

    def begin_part(self, worker: int) -> None:
        if not self.parts:
            return
        part, setting, issued = self.parts.popleft(), self.setting, self.now
        schedule = part_schedule(self.partition, part, setting)
        problem = schedule.problem
        tracker: HazardTracker[_Running] = HazardTracker()
        woken = setting.machine.issue
        for operation, seconds in timed(schedule, replace(setting, problem=problem)):
            issued += woken
            running = _Running(worker, operation, seconds, issued, [])
            running.waits = tracker.admit(operation, running)
            running.pending = len(running.waits) + 1  # and for its stream
            if self.limited and setting.machine.shares_cores and operation.kind is Kind.READ:
                running.waits = [self.fetch(running)]
                running.pending = 2
            else:
                for other in running.waits:
                    other.follows.append(running)
            self.enqueue(running, self.stream(running))
            if setting.machine.shares_cores and operation.kind is Kind.WRITE:
                self.occupy_cores(worker, operation, seconds)

    def fetch(self, copy: _Running) -> _Running:
        """Let a thread wait for the storage before the CPU copies a panel. Waiting takes no core."""
        own = self.seconds(copy.operation, 1)
        fetched = _Running(copy.worker, copy.operation, own, copy.issued, copy.waits, fetches=True)
        fetched.pending = len(copy.waits) + 1
        for other in copy.waits:
            other.follows.append(fetched)
        fetched.follows.append(copy)
        self.enqueue(fetched, "fetch")
        return fetched

    def enqueue(self, running: _Running, stream: str) -> None:
        queue = self.streams.setdefault((running.worker, stream), deque())
        queue.append(running)
        self.unfinished[running.worker] += 1
        if len(queue) == 1:
            self.advance(running)

    def occupy_cores(self, worker: int, write: Operation, seconds: float) -> None:
        """Keep the cores busy for the part of a Write that takes them."""
        copying = write._replace(kind=Kind.MULTIPLY)
        share = self.priced(1).write_cpu_share
        running = _Running(worker, copying, share * seconds, self.now, [], pending=1)
        self.enqueue(running, "compute")

    def stream(self, running: _Running) -> str:
        operation = running.operation
        if running.fetches:
            return "fetch"
        if self.setting.machine.shares_cores and operation.kind is not Kind.WRITE:
            return "compute"
        return "compute" if operation.kind is Kind.PREPARE else operation.stream

    def advance(self, running: _Running) -> None:
        """Note that one of the events that an operation waits for has happened."""
        running.pending -= 1
        if running.pending:
            return
        at = max(self.now, running.issued)
        if running.waits and running.operation.kind in WOKEN:
            at = max(at, max(x.end for x in running.waits) + self.setting.machine.issue)
        self.at(at, running, ends=False)

    def at(self, time: float, running: _Running, *, ends: bool) -> None:
        self.number += 1
        heappush(self.timers, (time, self.number, running, ends))

    def start(self, running: _Running) -> None:
        kind = running.operation.kind
        copies = self.limited and self.setting.machine.shares_cores and not running.fetches
        if kind in POOLS and running.own > 0 and not (kind is Kind.READ and copies):
            self.pools[POOLS[kind]].append(running)
            self.reprice()
        else:
            self.at(self.now + running.own, running, ends=True)

    def finish(self, running: _Running) -> None:
        running.end = self.now
        stream = self.streams[running.worker, self.stream(running)]
        assert stream.popleft() is running
        if stream:
            self.advance(stream[0])
        for other in running.follows:
            self.advance(other)
        running.waits = []
        self.unfinished[running.worker] -= 1
        if not self.unfinished[running.worker]:
            self.begin_part(running.worker)

    def reprice(self) -> None:
        """Divide the rates of the storage and of the links among the operations in progress.

        A worker's copies of the old C and of panels share its link, and its reads share what it can read. The
        workers share the storage if it is too slow for all of them.
        """
        for name, pool in self.pools.items():
            each = Counter(x.worker for x in pool)
            if name == "h2d":
                for x in pool:
                    x.rate = 1 / (x.own * each[x.worker])
                continue
            total, own = getattr(self.storage, name), getattr(self.setting.machine, name)
            for x in pool:
                alone = self.seconds(x.operation, 1)
                shared = self.seconds(x.operation, len(pool)) if len(each) * own > total else alone
                # `own` also has the page faults of the slot, which take as long whatever the storage does.
                x.rate = 1 / (x.own + max(shared, each[x.worker] * alone) - alone)

    def seconds(self, operation: Operation, workers: int) -> float:
        rows, cols = map(length, operation.block)
        prices = self.priced(workers)
        if operation.kind is Kind.WRITE:
            return prices.write(rows, cols)
        return prices.read(operation.operand, rows, cols)

    def priced(self, workers: int) -> Prices:
        if workers not in self.prices:
            machine = self.storage.shared(self.setting.machine, workers)
            self.prices[workers] = Prices(replace(self.setting, machine=machine))
        return self.prices[workers]


def part_schedule(partition: Partition, part: Part, setting: Setting) -> Schedule:
    """Return the schedule of a part: its tiles, in coordinates of the whole C, over its slice of k."""
    plan = partition.plan
    if partition.grid[2] == 1:
        return schedule_of(setting, plan.candidate, part.tiles(plan.grid))
    start, stop = k_range(plan.grid, partition.slices[part.k_slice])
    problem = replace(setting.problem, k=stop - start)
    tiles = part.tiles(TileGrid.of(problem, plan.tile))
    return schedule_of(replace(setting, problem=problem), plan.candidate, tiles)
