"""The host tier: slots in one block of memory, and the threads that fill them from stores and empty them."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from oocgemm.backends.base import Array, numpy_dtype, slot_offsets, stored_shape
from oocgemm.backends.memory import allocate
from oocgemm.errors import ExecutionError
from oocgemm.plan import Kind, Op, Operation, Plan, Slot
from oocgemm.plan.cost import HOST_ALIGNMENT, slot_bytes
from oocgemm.plan.tiling import Span
from oocgemm.stores import BATCH_BYTES, Matrix, pieces

# A block is cut into a part for each thread, within these bounds: handing out a part takes the interpreter tens of
# microseconds, in which no other thread can begin or end one.
PIECE_BYTES = 16 << 20
LEAST_PIECE_BYTES = 1 << 20
PAGE = 4096


class Staging:
    """Host slots of a plan, and reading and writing through them.

    At most `plan.candidate.io_threads` chunks are decoded at a time and as many encoded, which bounds the scratch.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Matrix]) -> None:
        self._plan = plan
        self._operands = operands
        self._offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
        self.arena = allocate(size)
        self._c_bytes = slot_bytes(plan.problem, plan.tile, plan.slots.strip)["host", "C"]
        self._threads = plan.candidate.io_threads
        # Apart, so that reading ahead never queues behind writing.
        self._readers = ThreadPoolExecutor(self._threads, thread_name_prefix="oocgemm-reader")
        self._writers = ThreadPoolExecutor(self._threads, thread_name_prefix="oocgemm-writer")
        # Panels touch their slots as they are read. Those of C are first written to by the device, which is slow on
        # memory that the system has yet to find.
        self._touched = {
            slot: self._writers.submit(self._touch, start)
            for slot, start in self._offsets.items()
            if slot.operand == "C"
        }

    def _touch(self, start: int) -> None:
        self.arena[start : start + self._c_bytes : PAGE] = 0

    def view(self, slot: Slot, operation: Operation) -> Array:
        """The part of a host slot that an operation's block fills, in stored orientation."""
        if slot in self._touched:
            self._touched[slot].result()
        problem = self._plan.problem
        name = {"A": problem.a_dtype, "B": problem.b_dtype}.get(slot.operand, problem.c_dtype)
        dtype = numpy_dtype(name)
        rows, cols = stored_shape(operation, problem)
        start = self._offsets[slot]
        return self.arena[start : start + rows * cols * dtype.itemsize].view(dtype).reshape(rows, cols)

    def transfer(
        self, operation: Operation, view: Array, look: Callable[[Span, Span, Array], None] | None = None
    ) -> None:
        """Do a Read (store -> slot) or a Write (slot -> store), all threads on its chunks. `view` is the slot, shaped
        as the block is stored. `look` is shown each part, as it is stored, by the thread that has read it."""
        reading = operation.kind is Kind.READ
        matrix = self._operands[operation.operand]
        rows, cols = self._stored(operation)
        act = matrix.read if reading else matrix.write

        def part(r: Span, c: Span) -> None:
            piece = view[r[0] - rows[0] : r[1] - rows[0], c[0] - cols[0] : c[1] - cols[0]]
            try:
                act(r, c, piece)
                if look is not None:
                    look(r, c, piece)
            except ExecutionError:
                raise
            except Exception as error:
                verb = "reading" if reading else "writing"
                where = f"{matrix.name}[{r[0]}:{r[1]}, {c[0]}:{c[1]}]"
                raise ExecutionError(f"{verb} {where}: {type(error).__name__}: {error}") from error

        pool = self._readers if reading else self._writers
        parts = self._parts(matrix, rows, cols, reading)
        self._run([pool.submit(part, r, c) for r, c in parts])

    def _stored(self, operation: Operation) -> tuple[Span, Span]:
        """Rows and columns of an operation's block as the operand is stored, op() undone."""
        problem = self._plan.problem
        op = {"A": problem.trans_a, "B": problem.trans_b}.get(operation.operand, Op.N)
        rows, cols = operation.block
        return (cols, rows) if op.swaps else (rows, cols)

    def _parts(self, matrix: Matrix, rows: Span, cols: Span, reading: bool) -> Iterator[tuple[Span, Span]]:
        """A block (as stored) cut into what the threads do one by one."""
        layout, itemsize = matrix.layout, matrix.dtype.itemsize
        height, width = layout.read_chunk if reading else layout.write_chunk
        if not layout.partial_reads if reading else layout.encode_bytes:
            # Whole chunks, one at a time or a batch of small ones, which is what the scratch is reckoned for.
            batch = BATCH_BYTES if height * width * itemsize < BATCH_BYTES else 1
            return pieces(rows, cols, (height, width), -(-batch // itemsize))
        size = (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize
        wanted = max(LEAST_PIECE_BYTES, min(PIECE_BYTES, size // self._threads)) // itemsize
        if layout.in_memory or (height, width) == (1, 1):
            width = cols[1] - cols[0]
            height = max(1, wanted // width)
        elif reading:  # a chunk can be read in parts, which must not straddle chunks
            count = max(1, height * width // wanted)
            height = next(h for h in range(-(-height // count), height + 1) if height % h == 0)
        return pieces(rows, cols, (height, width), wanted)

    def close(self) -> None:
        """Join the threads; the memory goes when its last view does."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)

    @staticmethod
    def _run(futures: list[Future[None]]) -> None:
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise
