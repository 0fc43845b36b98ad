"""Time single operations of a run, such as a copy or a product, without a whole run."""

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter_ns

from oocgemm.backends import Backend
from oocgemm.backends.base import Array, Stream, Token
from oocgemm.engine.staging import Staging
from oocgemm.errors import BackendError
from oocgemm.planning import (
    DTYPES,
    Budgets,
    Candidate,
    GemmProblem,
    Kind,
    Layouts,
    MachineModel,
    Operation,
    Plan,
    Region,
    Slot,
    Slots,
    Tier,
    TileShape,
)
from oocgemm.planning.tiling import Range
from oocgemm.stores import Matrix
from oocgemm.system.memory import available_memory

_TILE = (0, 0)
# `Workbench.seconds` queues an operation this many times, to time it.
QUEUED = 4
# `Workbench.seconds` first queues up to this many copies. They keep the device busy while the host queues the
# operations that are timed.
MAX_AHEAD = 64


class Workbench:
    """A backend with buffers for one product.

    It has device buffers for a panel of A, a panel of B and a tile of C, and the same in host memory unless
    the device is the host. Operations on these buffers are run and timed one by one.

    Args:
        engine: the backend.
        machine: the machine model; tells whether the device is the host.
        dtype: dtype of A, B and C.
        tile: m, n and k of the product.
        a: the matrix that Read operations read A from; None if there are none.
        compute: precision of the product.
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

        If `first`, it overwrites C; otherwise it adds to C. An emulated product needs the operation that
        `prepare` returns for the same depth before it.
        """
        tile, problem = self.plan.tile, self.plan.problem
        c, ranges = _device("C", tile.m * tile.n), ((0, tile.m), (0, tile.n), (0, depth))
        planes = (_device("P", 1),) if problem.planes else ()
        reads = (*self._panels(depth), *planes, *(() if first else (c,)))
        flops = problem.step_flops(tile.m, tile.n, depth)
        return Operation(Kind.MULTIPLY, "C", _TILE, 0, reads, (c,), *ranges, flops=flops, first=first)

    def prepare(self, depth: int) -> Operation:
        """Return the operation that prepares an emulated product over `depth` indices along k.

        It splits A and B into their residues modulo several small numbers.
        """
        tile, planes = self.plan.tile, (_device("P", 1),)
        size = (tile.m + tile.n) * depth * self.plan.problem.itemsizes["A"]
        ranges = (0, tile.m), (0, tile.n), (0, depth)
        return Operation(Kind.PREPARE, "P", _TILE, 0, self._panels(depth), planes, *ranges, size)

    def _panels(self, depth: int) -> tuple[Region, Region]:
        return _device("A", self.plan.tile.m * depth), _device("B", depth * self.plan.tile.n)

    def load(self, kind: Kind, operand: str, rows: int | None = None) -> Operation:
        """Return a Read or an Upload of the panel of A or B, or of its first `rows` rows."""
        tile, itemsize = self.plan.tile, self.plan.problem.itemsizes[operand]
        height, width = (tile.m, tile.k) if operand == "A" else (tile.k, tile.n)
        return block_copy(kind, operand, (0, rows or height), (0, width), itemsize)

    def download(self, rows: int) -> Operation:
        """Return a Download of the first `rows` rows of C."""
        itemsize = self.plan.problem.itemsizes["C"]
        return block_copy(Kind.DOWNLOAD, "C", (0, rows), (0, self.plan.tile.n), itemsize)

    def slot(self, operation: Operation) -> Array:
        """Return the memory that a Read fills: the host buffer, or the device's if the device is the host."""
        if self.plan.machine.unified:
            return self.session.view(operation, operation.writes[0])
        return self.staging.columns(Slot(Tier.HOST, operation.operand, 0), operation)[0]

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
        can fire long before the work starts.

        Raises:
            BackendError: even `MAX_AHEAD` copies ended before the host had queued all operations.
        """
        if operation.kind not in self.session.asynchronous:
            # The start and the end of a synchronous operation are known exactly, so one is enough.
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
        """Fill the panel of A or B on the device with `numbers`, repeated.

        Fill it with typical data before products are timed: with zeros, a GPU would be faster.
        """
        slot = self.slot(self.load(Kind.READ, operand)).reshape(-1)
        for start in range(0, slot.size, numbers.size):
            slot[start : start + numbers.size] = numbers[: slot.size - start]
        if not self.plan.machine.unified:
            self.intervals(self.load(Kind.UPLOAD, operand))

    def _submit(self, operation: Operation, after: Sequence[Token] = ()) -> Token:
        host: list[Array] = []
        if operation.kind in (Kind.UPLOAD, Kind.DOWNLOAD):
            slot = Slot(Tier.HOST, operation.operand, 0)
            self.staging.await_prefault(slot)
            host = self.staging.columns(slot, operation)
        with self.session.worker(Stream.of(operation)):
            return self.session.submit(operation, host, after)


def plan_of(machine: MachineModel, dtype: str, tile: TileShape, compute: str = "native") -> Plan:
    """Return a plan for a product in one step, with one buffer each for A, B and C.

    The extents of `tile` are those of the whole product.
    """
    kind = DTYPES[dtype]
    shape = tile.m, tile.n, tile.k
    problem = GemmProblem(*shape, dtype, dtype, kind.accumulator, kind.results[0], compute=compute)
    host, planes = 0 if machine.unified else 1, 1 if problem.planes else 0
    slots = Slots(1, 1, 1, host, host, host, strip=tile.m, planes=planes, unified=machine.unified)
    available = available_memory()
    candidate = Candidate(tile, slots, io_threads=machine.io_threads)
    return Plan(problem, Layouts(), Budgets(available, available), machine, candidate)


def _device(operand: str, elements: int) -> Region:
    return Region(Slot(Tier.DEVICE, operand, 0), 0, elements)


def block_copy(kind: Kind, operand: str, rows: Range, cols: Range, itemsize: int) -> Operation:
    """Return an operation that copies a block of an operand.

    Args:
        kind: Read (from the store), Write (to the store), Upload (to the device) or Download (from the
            device).
        operand: "A", "B" or "C".
        rows, cols: the block, as ranges of rows and columns of the operand.
        itemsize: bytes per element.
    """
    elements = (rows[1] - rows[0]) * (cols[1] - cols[0])
    region, nothing = (_device(operand, elements),), (0, 0)
    reads, writes = ((), region) if kind in (Kind.READ, Kind.UPLOAD) else (region, ())
    m, n, k = {"A": (rows, nothing, cols), "B": (nothing, cols, rows)}.get(operand, (rows, cols, nothing))
    return Operation(kind, operand, _TILE, 0, reads, writes, m, n, k, elements * itemsize)
