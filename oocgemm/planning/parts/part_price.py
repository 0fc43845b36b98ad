"""Predict the seconds of parts, and of all of them, computed by workers that share the storage.

The virtual clock runs a part with its worker's share of the storage's rates (`PartPrices`). `parts_seconds`
follows all workers until the last part is done.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oocgemm.planning.cost.clock import Prediction, predict
from oocgemm.planning.cost.footprint import footprint
from oocgemm.planning.cost.machine import MachineModel, scaled
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Chunked, Writing
from oocgemm.planning.parts.part import Part, k_range, step_ranges
from oocgemm.planning.plan import Plan
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.setting import Setting
from oocgemm.planning.sinks import Stored
from oocgemm.planning.tiling import ceil_div, length

# Parts whose ends differ by less than this fraction of their time end together.
TOGETHER = 1e-9


@dataclass(frozen=True, slots=True)
class Storage:
    """Total rates of the storage, in bytes per second, for all workers together.

    Workers that read at the same time get equal shares of `read`, and those that write get equal shares of
    `write`. No worker is served faster than its machine model says.
    """

    read: float
    write: float

    @classmethod
    def of(cls, machine: MachineModel, read: float | None = None) -> "Storage":
        """Return the storage that delivers `read` bytes per second in total, by default to one worker.

        Only total rates of reads are known to most users. A storage that can serve the reads of x workers at
        their full rate is assumed to serve the writes of x workers too.
        """
        workers = 1.0 if read is None else read / machine.read
        return cls(workers * machine.read, workers * machine.write)

    def shared(self, machine: MachineModel, workers: int, part: float = 1.0) -> MachineModel:
        """Return the model of a machine on which one of `workers` equal workers runs.

        If the storage is too slow for all, the model's reads get a fraction `part` of the worker's share. The
        uncompressed bytes of compressed chunks count as read, since their compressed size is not known.
        """
        share = self.read / workers
        factors = {
            "read": 1.0 if machine.read <= share else part * share / machine.read,
            "write": min(1.0, self.write / workers / machine.write),
        }
        decode = min(machine.decode, share)
        if decode == machine.decode and set(factors.values()) == {1.0}:
            return machine
        return replace(scaled(machine, factors), decode=decode)

    def limits(self, machine: MachineModel, workers: int, lane: str) -> bool:
        """Tell whether sharing the storage slows `lane` down ("read", "decode" or "write")."""
        if lane not in ("read", "decode", "write", "encode"):
            return False
        total, own = (self.write, machine.write) if lane in ("write", "encode") else (self.read, machine.read)
        if lane == "decode":
            own = machine.decode
        return total < workers * own


@dataclass(frozen=True, slots=True)
class PartSize:
    """What the seconds of a part depend on: its rows and columns of C, its extent along k, and its end.

    `last` tells whether the part has the tile that a run of the whole plan computes last. More of the last
    steps of this tile run strip by strip.
    """

    m: int
    n: int
    k: int
    last: bool

    @property
    def volume(self) -> int:
        """Number of multiplications of elements, at least one per element of C."""
        return self.m * self.n * max(1, self.k)


def allows_k_split(plan: Plan) -> bool:
    """Tell whether a product may be computed in slices of k, whose partial products are stored and added.

    Partial products have the dtype of the accumulator, so that nothing is rounded that a run without slices
    would not round. The sums of int8 products stay exact, since they are below the limit of the whole sum.

    A product cannot be split if it has fewer than two steps, if C is in memory, or if it is verified: the
    checksums are those of tiles of C, not of partial products. Nor can it be split if strips of partial
    products, which may be wider than strips of C, do not fit the host budget.
    """
    if plan.problem.checked or plan.layouts.c.in_memory or plan.grid.steps < 2:
        return False
    return footprint(slice_setting(plan), plan.candidate).host_total <= plan.budgets.host


def slice_setting(plan: Plan) -> Setting:
    """Return the setting in which slices of k are computed: op(A) op(B) in the accumulator's dtype.

    Partial products are new arrays of raw chunks. alpha and beta are applied when they are added.
    """
    problem = replace(plan.problem, sink=Stored(plan.problem.acc_dtype))
    partial = Chunked(itemsize=problem.itemsizes["C"], writing=Writing(free=True))
    return replace(plan.setting, problem=problem, layouts=replace(plan.layouts, c=partial))


@dataclass(frozen=True, slots=True)
class PartTime:
    """Predicted seconds of a part: until its last multiplication ends (`main`), and after that (`tail`).

    In the tail, nothing is read. `lane` is the lane that is busy longest.
    """

    main: float
    tail: float
    lane: str

    @property
    def seconds(self) -> float:
        """All seconds of the part."""
        return self.main + self.tail


class PartPrices:
    """Predicted seconds of the parts of a plan. The parts are computed by equal workers on shared storage."""

    def __init__(self, plan: Plan, storage: Storage, k_slices: int = 1) -> None:
        self.plan, self.storage = plan, storage
        self._setting = plan.setting if k_slices == 1 else slice_setting(plan)
        self._ranges = step_ranges(plan.grid, k_slices)
        self._end = last(plan.candidate.traversal, *plan.grid.shape) if plan.tiles.count else (0, 0)
        self._times: dict[tuple[PartSize, int], PartTime] = {}

    def size(self, part: Part) -> PartSize:
        """Return the size of a part."""
        grid, end = self.plan.grid, self._end
        (top, bottom), (left, right) = part.rows, part.cols
        return PartSize(
            grid.rows(bottom - 1)[1] - grid.rows(top)[0],
            grid.cols(right - 1)[1] - grid.cols(left)[0],
            length(k_range(grid, self._ranges[part.k_slice])) if len(self._ranges) > 1 else grid.k,
            top <= end[0] < bottom and left <= end[1] < right,
        )

    def time(self, size: PartSize, workers: int) -> PartTime:
        """Predict a part while `workers` workers, including that of the part, use the storage.

        The virtual clock runs the part with an equal share of the storage's rates, as if the workers were in
        step. `alone` is the part with the full rates of one worker.
        """
        key = size, workers
        if key not in self._times:
            self._times[key] = self._time(size, workers)
        return self._times[key]

    def _time(self, size: PartSize, workers: int) -> PartTime:
        machine = self._setting.machine
        shared = self.storage.shared(machine, workers)
        if workers > 1 and shared is machine:
            return self.time(size, 1)
        alone = self._predict(size, machine)
        if shared is machine:
            return PartTime(alone.total - alone.tail, alone.tail, alone.bottleneck)
        if machine.shares_cores:
            return self._on_cpu(size, alone, shared)
        lanes, problem = alone.lanes, self._setting.problem
        if problem.reads_c and lanes["read"]:
            # The clock reads the old C beside the panels, both at the full rate. They share the rate.
            old = size.m * size.n * problem.itemsizes["C"] / machine.read / lanes["read"]
            shared = self.storage.shared(machine, workers, max(old, 1 - old))
        found = self._predict(size, shared)
        return PartTime(found.total - found.tail, found.tail, found.bottleneck)

    def _on_cpu(self, size: PartSize, alone: Prediction, shared: MachineModel) -> PartTime:
        """Predict a part that the CPU multiplies.

        Reads of one worker keep the cores busy: they copy from the page cache. But a thread that waits for
        the storage leaves the cores to others. So each Read first waits for the storage, beside the
        multiplications, and then copies as it does alone. Either the cores are busy all the time but for the
        first wait, or the storage is, until the last step begins.
        """
        machine = self._setting.machine
        busy = self._predict(size, replace(machine, write=shared.write))
        waiting = self._predict(size, replace(shared, shares_cores=False, arena_seconds_per_byte=0.0))
        steps = ceil_div(size.k, self.plan.tile.k) * ceil_div(size.m, self.plan.tile.m)
        steps *= ceil_div(size.n, self.plan.tile.n)
        reads, main = waiting.lanes["read"] + waiting.lanes["decode"], busy.total - busy.tail
        if reads + main / steps > waiting.start_up + main:
            return PartTime(reads + main / steps, busy.tail, waiting.bottleneck)
        return PartTime(waiting.start_up + main, busy.tail, alone.bottleneck)

    def _predict(self, size: PartSize, machine: MachineModel) -> Prediction:
        setting, candidate = self._setting, self.plan.candidate
        problem = replace(setting.problem, m=size.m, n=size.n, k=size.k)
        slots = candidate.slots
        if not size.last:
            slots = replace(slots, drain=slots.turn_steps, turn=slots.turn_steps)
        candidate = replace(candidate, slots=slots)
        prices = Prices(replace(setting, problem=problem, machine=machine))
        # A Write that waits for the storage longer keeps the CPU cores busy no longer.
        prices.write_cpu_share *= machine.write / setting.machine.write
        return predict(prices.setting, candidate, prices)


def longest_first(parts: Sequence[Part], prices: PartPrices) -> list[Part]:
    """Order parts by their numbers of multiplications, the longest part first."""
    return sorted(parts, key=lambda part: (-prices.size(part).volume, part.number))


def rounds_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Estimate the seconds until all parts are computed, as if all took as long as the first one."""
    if not parts:
        return 0.0
    return ceil_div(len(parts), workers) * prices.time(prices.size(parts[0]), workers).seconds


def parts_seconds(parts: Sequence[Part], prices: PartPrices, workers: int) -> float:
    """Predict the seconds until all parts are computed, the longest of which come first.

    A worker that has completed a part begins the next one of `parts`. While w workers read and multiply, each
    of their parts advances as if w equal workers shared the storage (`PartPrices.time`). While w workers
    only write the last tiles of their parts, those share the storage among them. If writing limits the run,
    all busy workers share it. For fewer workers than `workers`, only the first part is predicted. The others
    are sped up by the same factor.
    """
    waiting = [prices.size(part) for part in reversed(parts)]
    if not waiting:
        return 0.0
    longest = waiting[-1]
    writes = prices.time(longest, workers).lane in ("write", "encode")
    # What workers do: the part, whether it is in its tail, the fraction of that stage which remains to be
    # done; and the number of workers that do the same.
    running: Counter[tuple[PartSize, bool, float]] = Counter()
    seconds, idle = 0.0, workers
    while waiting or running:
        for _ in range(min(idle, len(waiting))):
            running[waiting.pop(), False, 1.0] += 1
            idle -= 1
        counts = [sum(n for (_, tail, _), n in running.items() if tail is stage) for stage in (False, True)]
        if writes:
            counts = [workers - idle] * 2
        factors = [_speed(prices, longest, count, workers)[tail] for tail, count in enumerate(counts)]
        lasts = {key: factors[key[1]] * _stages(prices, key[0], workers)[key[1]] for key in running}
        step = min(left * lasts[key] for key in running for left in key[2:])
        seconds += step
        rest: Counter[tuple[PartSize, bool, float]] = Counter()
        for key, count in running.items():
            size, tail, left = key
            after = left - step / lasts[key] if lasts[key] else 0.0
            if after > TOGETHER:
                rest[size, tail, after] += count
            elif tail:
                idle += count
            else:
                rest[size, True, 1.0] += count
        running = rest
    return seconds


def _stages(prices: PartPrices, size: PartSize, workers: int) -> tuple[float, float]:
    found = prices.time(size, workers)
    return found.main, found.tail


def _speed(prices: PartPrices, size: PartSize, count: int, workers: int) -> tuple[float, float]:
    """Divide the times of the two stages of a part with `count` busy workers by those with `workers`."""
    few, all_ = _stages(prices, size, max(1, count)), _stages(prices, size, workers)
    return few[0] / all_[0] if all_[0] else 1.0, few[1] / all_[1] if all_[1] else 1.0


def sum_seconds(plan: Plan, prices: PartPrices, k_slices: int) -> float:
    """Predict the seconds to add the partial products of slices of k, and to write C.

    One process adds them chunk by chunk: it reads the chunk of every slice (and the old C, if beta is not 0),
    then it writes the chunk of C.
    """
    if k_slices == 1:
        return 0.0
    problem, machine = plan.problem, prices.storage.shared(plan.machine, 1)
    elements, sizes = problem.m * problem.n, problem.itemsizes
    read = elements * (k_slices * sizes["acc"] + (sizes["C"] if problem.reads_c else 0))
    return read / machine.read + elements * sizes["C"] / machine.write
