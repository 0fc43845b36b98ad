"""Predict the seconds of one part, computed by one of several workers that share the storage."""

from dataclasses import dataclass, replace

from oocgemm.planning.cost.clock import Prediction, predict
from oocgemm.planning.cost.footprint import footprint
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Chunked, Writing
from oocgemm.planning.parts.part import Part, k_range, step_ranges
from oocgemm.planning.parts.storage import Storage
from oocgemm.planning.plan import Plan
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import last
from oocgemm.planning.setting import Setting
from oocgemm.planning.sinks import Stored
from oocgemm.planning.tiling import ceil_div, length


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


def slice_problem(problem: GemmProblem) -> GemmProblem:
    """Return the problem of which slices of k are computed: op(A) op(B) in the accumulator's dtype.

    alpha and beta are applied when the slices are added.
    """
    return replace(problem, sink=Stored(problem.acc_dtype))


def slice_setting(plan: Plan) -> Setting:
    """Return the setting in which slices of k are computed: partial products are new arrays of raw chunks."""
    problem = slice_problem(plan.problem)
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
