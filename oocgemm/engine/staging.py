"""The host tier: slots in one block of memory, and the threads that fill them from stores and empty them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import takewhile
from threading import Event, Lock

from oocgemm.backends.base import InPlace, Locks, numpy_dtype, slot_offsets, stored_shape
from oocgemm.engine.pinning import Locked
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Op, Operation, Plan, Slot, Tier
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT, payload_bytes, slot_bytes
from oocgemm.planning.tiling import Range
from oocgemm.stores import BATCH_BYTES, FULL, Array, Matrix, memory, no_room, pieces, transient
from oocgemm.system.memory import allocate

# A block is cut into a part for each thread, within these bounds: handing out a part takes the interpreter tens of
# microseconds, in which no other thread can begin or end one.
PIECE_BYTES = 16 << 20
MIN_PIECE_BYTES = 4 << 20
PAGE = 4096
# A read that fails in a way that may pass is tried again after so many seconds each: 12 in all.
RETRY_AFTER = (0.1, 0.3, 0.9, 2.7, 8.1)

# Is shown a block, by its rows and columns, and what was read.
Look = Callable[[Range, Range, Array], None]


class Staging:
    """Host slots of a plan, and reading and writing through them.

    At most `plan.candidate.io_threads` chunks are decoded at a time and as many encoded, which bounds the scratch.
    """

    def __init__(
        self,
        plan: Plan,
        operands: Mapping[str, Matrix],
        page_lock: Callable[[Sequence[Array]], object] = lambda columns: None,
        locks: Locks | None = None,
    ) -> None:
        """`page_lock` is called with what of a slot has been touched, from its start on, by a thread that did, before a device is to
        copy from there or to there. With `locks` panels are copied from where they lie in memory, and strips to where they go: of
        arrays that are locked, and of operands that are worth it, which are locked until `release`."""
        self._plan = plan
        self._page_lock = page_lock
        self._operands = operands
        self._offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
        self.arena = allocate(size)
        sizes = slot_bytes, payload_bytes
        self._c_bytes, self._c_held = (
            f(plan.problem, plan.tile, plan.slots.strip)["host", "C"] for f in sizes
        )
        self._threads = plan.candidate.io_threads
        self._stopped = Event()
        self._in_place: dict[Slot, InPlace] = {}  # panels and strips that slots stand for, and do not hold
        self._locked: Locked | None = None
        # What each read that was tried again had failed of.
        self.retried: list[str] = []
        # Apart, so that reading ahead never queues behind writing.
        self._readers = ThreadPoolExecutor(self._threads, thread_name_prefix="oocgemm-reader")
        self._writers = ThreadPoolExecutor(self._threads, thread_name_prefix="oocgemm-writer")
        # What is read touches its slot on the way. Slots that the device writes to first, which is slow on memory that the system has
        # yet to find, are touched by one thread: before a tile is done, but after the first panels, which touch theirs.
        self._touching = ThreadPoolExecutor(1, thread_name_prefix="oocgemm-toucher")
        c = [] if plan.problem.reads_c else [slot for slot in self._offsets if slot.operand == "C"]
        self._untouched, self._touched = c, dict[Slot, Future[None]]()
        self._touch_once = Lock()
        self._filled: set[Slot] = set()
        try:
            self._begin_locking(locks)
        except BaseException:
            self.close()
            raise

    def _begin_locking(self, locks: Locks | None) -> None:
        """Lock operands in memory that are worth it, the panels of the first tile before others."""
        if locks is None or not (lying := self._plan.operands_to_pin):
            return
        schedule = self._plan.schedule()
        first = (
            self._block(operation)
            for operation in takewhile(lambda operation: operation.tile == schedule.tiles[0], schedule)
            if operation.kind is Kind.READ and operation.operand in lying
        )
        arrays = [memory(self._operands[operand]) for operand in sorted(lying)]
        self._locked = Locked(arrays, first, locks)

    def _block(self, operation: Operation) -> Array:
        """What an operation is to bring from an array in memory or to there, where it lies."""
        rows, cols = self._stored(operation)
        return memory(self._operands[operation.operand])[slice(*rows), slice(*cols)]

    def in_place(self, slot: Slot) -> bool:
        """Whether a slot on the host stands for what is copied from where it lies, or to where it goes."""
        return slot in self._in_place

    def held(self, operation: Operation) -> Sequence[Array]:
        """What an Upload is to copy."""
        slot = operation.reads[0].slot
        return self._in_place.get(slot) or self.columns(slot, operation)

    def room(self, operation: Operation) -> Sequence[Array]:
        """Where a Download is to copy to."""
        slot = operation.writes[0].slot
        return self._in_place[slot] if self._find_in_place(operation) else self.columns(slot, operation)

    def _find_in_place(self, operation: Operation) -> bool:
        """Have the slot of a Read or a Download stand for its block where that lies, if it is worth it and can be."""
        slot = operation.writes[0].slot
        self._in_place.pop(slot, None)
        if not self._plan.is_zero_copy(operation):
            return False
        found = None
        if operation.operand not in self._plan.operands_to_pin:
            found = InPlace(self._block(operation), [])
        elif self._locked is not None:
            found = self._locked.find(self._block(operation))
        if found is None:
            return False
        self._in_place[slot] = found
        return True

    def _begin_touching(self) -> None:
        with self._touch_once:
            try:
                for slot in self._untouched:
                    self._touched[slot] = self._touching.submit(self._touch, self._offsets[slot])
            except RuntimeError as error:
                raise ExecutionError(f"the system refuses a thread for writing: {error}") from error
            self._untouched = []

    def _touch(self, start: int) -> None:
        self.arena[start : start + self._c_bytes : PAGE] = 0
        self._page_lock([self.arena[start : start + self._c_held]])

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """The part of a host slot that an operation's block fills, in stored orientation: its columns in groups, each a
        contiguous array.

        A chunk that has to be decoded whole goes straight to its place in a group as wide as itself. So does one of C come
        from there: past the page cache, contiguous chunks were written at up to twice the rate of such as lay in rows.
        """
        if slot in self._untouched:
            self._begin_touching()
        if slot in self._touched:
            self._touched[slot].result()
        problem = self._plan.problem
        name = {"A": problem.a_dtype, "B": problem.b_dtype}.get(slot.operand, problem.c_dtype)
        dtype = numpy_dtype(name)
        height, width = stored_shape(operation, problem)
        start = self._offsets[slot]
        held = self.arena[start : start + height * width * dtype.itemsize].view(dtype)
        return [held[height * c0 : height * c1].reshape(height, c1 - c0) for c0, c1 in self._cuts(operation)]

    def _cuts(self, operation: Operation) -> list[Range]:
        """Columns of an operation's block as the operand is stored, counted from its first, in groups."""
        _, (first, last) = self._stored(operation)
        problem, layouts = self._plan.problem, self._plan.layouts
        match operation.operand:
            case "C":
                whole, (height, width) = True, self._plan.chunks
            case operand:
                is_a = operand == "A"
                layout = layouts.a if is_a else layouts.b
                whole = not layout.partial_reads
                height, width = layout.oriented(problem.trans_a if is_a else problem.trans_b).read_chunk
        if whole and height * width * problem.itemsizes[operation.operand] >= BATCH_BYTES:
            cuts = pieces((0, 1), (first, last), (1, width), 1)
            return [(c0 - first, c1 - first) for _, (c0, c1) in cuts]
        return [(0, last - first)]

    def transfer(
        self, operation: Operation, columns: Sequence[Array], look: Look | None = None
    ) -> Sequence[Array]:
        """Do a Read (store -> slot) or a Write (slot -> store), all threads on its chunks. `columns` is the slot, shaped
        as the block is stored, in groups of columns. `look` is shown each part, as it is stored, by the thread that has
        read it. Returns where the block is then, which need not be the slot if nothing is to look."""
        if operation.kind is Kind.READ:
            slot = operation.writes[0].slot
            if slot in self._filled and not self._plan.layouts.c.pinned:
                self._begin_touching()
            self._filled.add(slot)
            if look is None and self._find_in_place(operation):
                return [self._block(operation)]
            self._each(operation, columns, self._readers, partial(self._read, look))
            if operation.writes[0].slot.tier is Tier.HOST:
                self._page_lock(columns)
        else:
            self._each(operation, columns, self._writers, self._write)
        return columns

    def show(self, operation: Operation, columns: Sequence[Array], look: Look) -> None:
        """Show a strip that a Write is to bring to its store, each part by a thread that writes."""
        self._each(operation, columns, self._writers, lambda matrix, rows, cols, part: look(rows, cols, part))

    def groups(self, operation: Operation, columns: Sequence[Array]) -> Iterator[tuple[Range, Range, Array]]:
        """The groups of columns of a block, with their rows and columns as the operand is stored."""
        rows, (left, _) = self._stored(operation)
        for group in columns:
            yield rows, (left, left := left + group.shape[1]), group

    def behind(self, slot: Slot) -> Array:
        """What lies behind the strip of C in a host slot: the checksums that came down with it."""
        start = self._offsets[slot]
        return self.arena[start + self._c_held : start + self._c_bytes]

    def _each(
        self,
        operation: Operation,
        columns: Sequence[Array],
        pool: ThreadPoolExecutor,
        act: Callable[[Matrix, Range, Range, Array], None],
    ) -> None:
        """Do something with each part of a slot, on the threads of a pool."""
        matrix, reading = self._operands[operation.operand], operation.kind is Kind.READ
        parts = [
            (r, c, group[r[0] - rows[0] : r[1] - rows[0], c[0] - cols[0] : c[1] - cols[0]])
            for rows, cols, group in self.groups(operation, columns)
            for r, c in self._parts(matrix, rows, cols, reading)
        ]
        # To hand over a part takes as long as copying a small one. Scratch is reckoned for the threads of a pool.
        if len(parts) == 1 and not matrix.layout.decode_bytes and not matrix.layout.encode_bytes:
            act(matrix, *parts[0])
            return
        left = iter(parts)

        def take() -> None:
            """Part after part, as the other threads leave them: to hand over each would take longer than to decode some."""
            try:
                for part in left:
                    act(matrix, *part)
            except BaseException:
                deque(left, maxlen=0)  # the others begin nothing new
                raise

        futures = [pool.submit(take) for _ in range(min(self._threads, len(parts)))]
        wait(futures)
        for future in futures:
            future.result()

    def _read(self, look: Look | None, matrix: Matrix, rows: Range, cols: Range, out: Array) -> None:
        """Read a block, and again after failures that may pass, until the run is stopped."""
        waits = iter(RETRY_AFTER)
        while True:
            try:
                matrix.read(rows, cols, out)
                break
            except Exception as error:
                failed = _placed("reading", matrix, rows, cols, error)
                after = next(waits, None) if transient(error) else None
                if after is None or self._stopped.wait(after):
                    raise failed from error
            self.retried.append(str(failed))
        if look is not None:
            look(rows, cols, out)

    def _write(self, matrix: Matrix, rows: Range, cols: Range, data: Array) -> None:
        try:
            matrix.write(rows, cols, data)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                failed = ExecutionError(no_room(matrix, error, data.nbytes))
                raise _placed("writing", matrix, rows, cols, failed) from error
            raise _placed("writing", matrix, rows, cols, error) from error

    def stop(self) -> None:
        """Wait for no read any more: those that fail from here on are not tried again."""
        self._stopped.set()
        if self._locked is not None:
            self._locked.stop()

    def _stored(self, operation: Operation) -> tuple[Range, Range]:
        """Rows and columns of an operation's block as the operand is stored, op() undone."""
        problem = self._plan.problem
        op = {"A": problem.trans_a, "B": problem.trans_b}.get(operation.operand, Op.N)
        rows, cols = operation.block
        return (cols, rows) if op.swaps else (rows, cols)

    def _parts(
        self, matrix: Matrix, rows: Range, cols: Range, reading: bool
    ) -> Iterator[tuple[Range, Range]]:
        """A block (as stored) cut into what the threads do one by one."""
        layout, itemsize = matrix.layout, matrix.dtype.itemsize
        height, width = layout.read_chunk if reading else layout.write_chunk
        if not layout.partial_reads if reading else layout.encode_bytes:
            # Whole chunks, one at a time or a batch of small ones, which is what the scratch is reckoned for.
            batch = BATCH_BYTES if height * width * itemsize < BATCH_BYTES else 1
            return pieces(rows, cols, (height, width), -(-batch // itemsize))
        size = (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize
        wanted = max(MIN_PIECE_BYTES, min(PIECE_BYTES, size // self._threads)) // itemsize
        if layout.in_memory or (height, width) == (1, 1):  # one piece spans all that lies side by side
            if layout.contiguous:
                height, width = max(1, wanted // (cols[1] - cols[0])), cols[1]
            else:
                height, width = rows[1], max(1, wanted // (rows[1] - rows[0]))
        elif reading:  # a chunk can be read in parts, which must not straddle chunks, of whole lines
            count = max(1, height * width // wanted)
            if layout.contiguous:
                height = _divisor(height, -(-height // count))
            else:
                width = _divisor(width, -(-width // count))
        return pieces(rows, cols, (height, width), wanted)

    def close(self) -> None:
        """Join the threads; the memory goes when its last view does. What is locked in place stays so until `release`."""
        for pool in (self._readers, self._writers, self._touching):
            pool.shutdown(wait=True, cancel_futures=True)
        self._in_place.clear()
        self.arena = self.arena[:0].copy()

    def release(self) -> None:
        """Unlock what is locked in place, once the device is at nothing any more."""
        if self._locked is not None:
            self._locked.release()


def _divisor(extent: int, least: int) -> int:
    """The smallest divisor of an extent from `least` up."""
    return next(part for part in range(least, extent + 1) if extent % part == 0)


def _placed(verb: str, matrix: Matrix, rows: Range, cols: Range, error: Exception) -> ExecutionError:
    """An error that says where it struck."""
    what = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    return ExecutionError(f"{verb} {matrix.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}]: {what}")
