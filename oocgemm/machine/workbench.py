"""Measure how long single operations of a run take, and how fast a run loads a matrix.

A `Workbench` runs and times operations one by one, such as a copy or a product. `streaming` lets the executor
run products that read a matrix panel by panel, with as many threads as in any other run: all I/O threads read
at once, several panels are in flight, and on a GPU the uploads of earlier panels take place at the same time.
`typical` repeats a measurement, and `explained` repeats several until a model fits their medians.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import TypeVar

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Array, Stream, Token
from oocgemm.engine.executor import Run, span_of
from oocgemm.engine.staging import Staging
from oocgemm.errors import BackendError
from oocgemm.planning import (
    DTYPES,
    Budgets,
    Candidate,
    GemmProblem,
    InMemory,
    Kind,
    Lane,
    Layouts,
    MachineModel,
    Operation,
    Plan,
    Region,
    Setting,
    Slot,
    Slots,
    Tier,
    TileShape,
)
from oocgemm.planning.schedule.operation import LANES
from oocgemm.planning.search.slot_counts import io_threads
from oocgemm.planning.tiling import Range
from oocgemm.stores import Matrix
from oocgemm.system.resources import available_memory
from oocgemm.timeline import Span
from oocgemm.timeline.spans import length, union

# Maximum number of samples per size that `explained` measures before it raises BackendError.
_ROUNDS = 5

Fit = TypeVar("Fit")
_TILE = (0, 0)
# `Workbench.seconds` queues an operation this many times, to time it.
QUEUED = 4
# `Workbench.seconds` first queues up to this many copies. They keep the device busy while the host queues the
# operations that are timed.
MAX_AHEAD = 64
# Number of columns of B: few, so that the multiplications take little time in comparison with the loads.
COLUMNS = 8
# Numbers of slots for panels: on a GPU, and in host memory if A is not in memory itself.
DEVICE_SLOTS, HOST_SLOTS = 4, 3


def explained(
    measure: Callable[[int], float], places: Iterable[int], fit: Callable[[Mapping[int, float]], Fit]
) -> tuple[Fit, dict[int, float]]:
    """Measure rates at several sizes, and fit a model to them. Return the fit, and the median rates by size.

    `measure` returns the rate at a size. `fit` fits a model to the median rates, and raises `ValueError` if
    no model explains them, for example because other programs disturbed the measurement. Then one more sample
    is measured at each size. Raises `BackendError` if the fit fails with `_ROUNDS` samples per size.
    """
    taken = {place: [measure(place)] for place in places}
    for again in range(_ROUNDS):
        if again:
            for place, rates in taken.items():
                rates.append(measure(place))
        medians = {place: median(rates) for place, rates in taken.items()}
        try:
            if inf in medians.values():
                raise ValueError("an operation took no measurable time")
            return fit(medians), medians
        except ValueError as error:
            reason = error
    raise BackendError(
        f"{reason}; this calibration was not saved: end other programs on this machine and run "
        "oocgemm calibrate again"
    ) from reason


def per_second(amount: float, seconds: float) -> float:
    """Return `amount / seconds`; infinity if `seconds` is 0. After infinity, `explained` measures again."""
    return amount / seconds if seconds > 0 else inf


def typical(act: Callable[[], float], limit: float) -> float:
    """Call `act` repeatedly for `limit` seconds, and return the median of its results.

    The first call warms caches up. Its result is ignored, unless the first call takes longer than `limit`.
    """
    started = perf_counter()
    samples = [act()]
    if perf_counter() - started > limit:
        return samples[0]
    samples.clear()
    while not samples or perf_counter() - started < limit:
        samples.append(act())
    return median(samples)


def numbers(shape: tuple[int, int]) -> Array:
    """Return normal random numbers, rounded to 1/64 so that they compress about as well as measured data."""
    count = shape[0] * shape[1]
    some = np.round(np.random.default_rng(0).standard_normal(min(count, 1 << 20)) * 64) / 64
    return np.resize(some, count).reshape(shape)


class Workbench:
    """A backend with buffers for one product, whose operations are run and timed one by one.

    It has device buffers for a panel of A, a panel of B and a tile of C. Unless the device is the host, it
    has such buffers in host memory, too. `tile` has m, n and k of the product. Read operations read A from
    `a`.
    """

    def __init__(
        self,
        engine: Backend,
        machine: MachineModel,
        dtype: str,
        tile: TileShape,
        a: Matrix | None = None,
        compute: str = "native",
    ) -> None:
        self.plan = plan_of(machine, dtype, tile, compute)
        self._cleanup = ExitStack()
        self.staging = Staging(self.plan, {"A": a} if a else {})
        self._cleanup.callback(self.staging.close)
        try:
            self.session = engine.open(self.plan, "auto")
        except BaseException:
            self._cleanup.close()
            raise
        self._cleanup.callback(self.session.close)

    def __enter__(self) -> "Workbench":
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def multiply(self, depth: int, *, first: bool = False) -> Operation:
        """Return the operation that multiplies A and B over the first `depth` indices along k.

        If `first`, the operation overwrites C; otherwise it adds to C. Before an emulated product, run the
        operation that `prepare` returns.
        """
        tile, problem = self.plan.tile, self.plan.problem
        c, ranges = _device("C", tile.m * tile.n), ((0, tile.m), (0, tile.n), (0, depth))
        planes = (_device("P", 1),) if problem.planes else ()
        reads = (*self._panels(depth), *planes, *(() if first else (c,)))
        flops = problem.step_flops(tile.m, tile.n, depth)
        given = Kind.MULTIPLY, "C", _TILE, 0, reads, (c,), *ranges, 0, flops, first
        return Operation(*given, whole=ranges[:2])

    def prepare(self, depth: int) -> Operation:
        """Return the operation that splits A and B into residues, for an emulated product of this depth."""
        tile, planes = self.plan.tile, (_device("P", 1),)
        size = (tile.m + tile.n) * depth * self.plan.problem.itemsizes["A"]
        ranges = (0, tile.m), (0, tile.n), (0, depth)
        given = Kind.PREPARE, "P", _TILE, 0, self._panels(depth), planes, *ranges, size
        return Operation(*given, lane=Lane.PREPARE, stream=Lane.PREPARE.value, whole=ranges[:2])

    def _panels(self, depth: int) -> tuple[Region, Region]:
        return _device("A", self.plan.tile.m * depth), _device("B", depth * self.plan.tile.n)

    def load(self, kind: Kind, operand: str, rows: int | None = None) -> Operation:
        """Return a Read or an Upload of the panel of A or B, or of its first `rows` rows."""
        tile, itemsize = self.plan.tile, self.plan.problem.itemsizes[operand]
        height, width = (tile.m, tile.k) if operand == "A" else (tile.k, tile.n)
        return block_copy(kind, operand, (0, rows or height), (0, width), itemsize)

    def download(self, rows: int) -> Operation:
        itemsize = self.plan.problem.itemsizes["C"]
        return block_copy(Kind.DOWNLOAD, "C", (0, rows), (0, self.plan.tile.n), itemsize)

    def slot(self, operation: Operation) -> Array:
        """Return the memory that a Read fills: the host buffer, or the device's if the device is the host."""
        if self.plan.machine.unified:
            return self.session.view(operation, operation.writes[0])
        return self.staging.slots.columns(Slot(Tier.HOST, operation.operand, 0), operation)[0]

    def intervals(self, *operations: Operation) -> list[tuple[int, int]]:
        """Run operations in order. Return the start and end of each, in nanoseconds of the host clock."""
        return self._intervals([self._submit(operation) for operation in operations])

    @staticmethod
    def _intervals(tokens: Sequence[Token]) -> list[tuple[int, int]]:
        for token in tokens:
            token.synchronize()
        return [token.interval() for token in tokens]

    def seconds(self, operation: Operation) -> float:
        """Return the seconds that an operation takes on a busy device.

        An asynchronous operation is queued `QUEUED` times, behind copies that keep the device busy meanwhile.
        The result is the mean time from one end to the next. Starts are not used: an event on an idle stream
        can fire long before the work starts. Raises `BackendError` if even `MAX_AHEAD` copies end too early.
        """
        if operation.kind not in self.session.asynchronous:
            # The start and the end of a synchronous operation are known exactly, so one operation is enough.
            ((start, end),) = self.intervals(operation)
            return (end - start) / 1e9
        panel, ahead = self.load(Kind.UPLOAD, "A"), 1
        while ahead <= MAX_AHEAD:
            tokens = [self._submit(panel) for _ in range(ahead)][-1:]
            tokens += [self._submit(operation, tokens[:1]) for _ in range(QUEUED)]
            issued = perf_counter_ns()
            copies_end, first, *_, last = (end for _, end in self._intervals(tokens))
            if copies_end > issued:
                return (last - first) / (QUEUED - 1) / 1e9
            ahead *= 2
        raise BackendError(
            f"operations cannot be timed: the host queues them too slowly. {MAX_AHEAD} panel copies should "
            f"keep the device busy until {QUEUED} operations are queued, but the copies ended earlier; end "
            "other programs and run oocgemm calibrate again"
        )

    def fill(self, operand: str, numbers: Array) -> None:
        """Fill the panel of A or B on the device by repeating `numbers`. With zeros, a GPU is faster."""
        slot = self.slot(self.load(Kind.READ, operand)).reshape(-1)
        for start in range(0, slot.size, numbers.size):
            slot[start : start + numbers.size] = numbers[: slot.size - start]
        if not self.plan.machine.unified:
            self.intervals(self.load(Kind.UPLOAD, operand))

    def _submit(self, operation: Operation, after: Sequence[Token] = ()) -> Token:
        host: list[Array] = []
        if operation.kind in (Kind.UPLOAD, Kind.DOWNLOAD):
            slot = Slot(Tier.HOST, operation.operand, 0)
            self.staging.slots.await_prefault(slot)
            host = self.staging.slots.columns(slot, operation)
        with self.session.worker(Stream(operation.device, operation.stream)):
            return self.session.submit(operation, host, after)


def plan_of(machine: MachineModel, dtype: str, tile: TileShape, compute: str = "native") -> Plan:
    """Return a plan for a product of m, n and k in `tile`, in one step, with one buffer per operand."""
    kind = DTYPES[dtype]
    shape = tile.m, tile.n, tile.k
    problem = GemmProblem.of(*shape, dtype, dtype, kind.accumulator, kind.results[0], compute=compute)
    host, planes = 0 if machine.unified else 1, 1 if problem.planes else 0
    slots = Slots(1, 1, 1, host, host, host, strip=tile.m, planes=planes, unified=machine.unified)
    available = available_memory()
    candidate = Candidate(tile, slots, io_threads=machine.io_threads)
    return Plan(problem, Layouts(), Budgets(available, available), machine, candidate)


def _device(operand: str, elements: int) -> Region:
    return Region(Slot(Tier.DEVICE, operand, 0), 0, elements)


def block_copy(kind: Kind, operand: str, rows: Range, cols: Range, itemsize: int) -> Operation:
    """Return a Read, Write, Upload or Download of the block of an operand at `rows` and `cols`."""
    elements = (rows[1] - rows[0]) * (cols[1] - cols[0])
    region, nothing = (_device(operand, elements),), (0, 0)
    reads, writes = ((), region) if kind in (Kind.READ, Kind.UPLOAD) else (region, ())
    m, n, k = {"A": (rows, nothing, cols), "B": (nothing, cols, rows)}.get(operand, (rows, cols, nothing))
    given, lane = (kind, operand, _TILE, 0, reads, writes, m, n, k, elements * itemsize), LANES[kind]
    return Operation(*given, lane=lane, stream=lane.value, stored=(rows, cols))


@contextmanager
def streaming(
    engine: Backend, machine: MachineModel, a: Matrix, depth: int
) -> Iterator[Callable[[], list[Span]]]:
    """Prepare products that load a float64 matrix A; yield a function that runs one and returns its spans.

    If the device is the host, the panels are only read: in a run, reads and multiplications share the cores,
    and the model adds their times. A panel has all rows and `depth` columns. A GPU does not copy directly
    from A, even if A is pinned.
    """
    plan = _plan(machine, a, depth)
    rows, cols = a.shape
    operands = {"A": a, "B": _ones((cols, COLUMNS)), "C": _ones((rows, COLUMNS))}
    with ExitStack() as cleanup:
        session = engine.open(plan, "auto")
        cleanup.callback(session.close)
        staging = Staging(plan, operands, session.pin, session.host_arena)
        cleanup.callback(staging.close)

        def run() -> list[Span]:
            spans: list[Span] = []
            Run(plan, session, staging, perf_counter_ns(), [spans.append]).execute()
            return spans

        def read() -> list[Span]:
            spans = []
            for number, operation in enumerate(plan.schedule()):
                if (operation.kind, operation.operand) == (Kind.READ, "A"):
                    started = perf_counter_ns()
                    staging.transfer(operation, [session.view(operation, operation.writes[0])])
                    spans.append(span_of(number, operation, started, perf_counter_ns(), ()))
            return spans

        yield read if machine.unified else run


def loading_seconds(spans: list[Span]) -> float:
    """Return the seconds during which panels of A were read or, if none was read, uploaded."""
    for kind in (Kind.READ, Kind.UPLOAD):
        moved = [(s.start, s.end) for s in spans if (s.kind, s.operand) == (kind, "A") and s.bytes]
        if moved:
            return length(union(moved)) / 1e9
    return 0.0


def rate_of(a: Matrix, seconds: float) -> float:
    """Return the bytes per second at which A was loaded."""
    return per_second(a.shape[0] * a.shape[1] * a.dtype.itemsize, seconds)


def _plan(machine: MachineModel, a: Matrix, depth: int) -> Plan:
    (rows, cols), room = a.shape, available_memory()
    problem = GemmProblem.of(rows, COLUMNS, cols, "float64", "float64", "float64", "float64")
    layouts = Layouts(a.layout.copied(), InMemory(), InMemory())
    budgets = Budgets(room, room)
    setting = Setting(problem, machine, layouts, budgets)
    if machine.unified:
        slots = Slots(1, 1, 1, 0, 0, 0, strip=rows, unified=True)
    else:
        host = 0 if setting.routes["A"].streams else HOST_SLOTS
        slots = Slots(DEVICE_SLOTS, 2, 1, host, 0, 0, strip=rows)
    threads = io_threads(setting)
    tile = TileShape(rows, COLUMNS, depth)
    return Plan(problem, layouts, budgets, machine, Candidate(tile, slots, io_threads=threads))


def _ones(shape: tuple[int, int]) -> Matrix:
    return stores.open_matrix("an operand", np.ones(shape))
