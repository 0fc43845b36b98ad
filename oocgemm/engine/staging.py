"""The host side of a run: buffers in host memory, and threads that move blocks between them and the stores.

A buffer is called a host slot. All are in one allocation, the arena. Blocks of operands in host memory need
none (`host_blocks.host_block`). The reader and writer threads move parts of a block between its store and a
buffer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import product
from threading import Lock

import numpy as np

from oocgemm.backends.base import HostBlock, numpy_dtype, slot_offsets
from oocgemm.engine.host_blocks import host_block, located, parts, slot_views
from oocgemm.engine.mirror import adjoint, complete, mirrored, outside, replace_outside, trimmed
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation, Plan, Slot, Tier
from oocgemm.planning.cost.coding import slot_frames
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT, payload_bytes, slot_bytes
from oocgemm.planning.tiling import Range, ceil_div, length
from oocgemm.stores import FULL, Array, Coded, Matrix, no_room
from oocgemm.stores.base import Retries, failure
from oocgemm.stores.codecs import index_of
from oocgemm.system.resources import allocate

PAGE = 4096
# Number of threads that fault in the pages of a slot for C, and the bytes that each faults in at a time. One
# thread took 12 to 25 ms for 64 MiB on a host of an H100.
FAULTING_THREADS, FAULTED_BYTES = 4, 8 << 20


class HostSlots:
    """Allocates a plan's host slots, and prefaults the slots for C if the old C is not read.

    Reads fault in the pages of the slots that they fill. If the old C is not read, the slots for C are filled
    only by copies from the device, which are slow if pages are missing. So these slots are prefaulted, one
    after the other.
    """

    def __init__(
        self, plan: Plan, pin: Callable[[Sequence[Array]], object], arena: Array | None = None
    ) -> None:
        """Allocate the arena, one block of memory for all slots.

        Args:
            plan: determines the number and the sizes of the slots.
            pin: pins the memory of the arrays in a slot. Called after their pages have been faulted in.
            arena: memory for all slots, resident and pinned; None to allocate it.
        """
        self._plan = plan
        self._pin = pin
        self._offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
        self.arena = allocate(size) if arena is None else arena
        prefaulted = plan.problem.reads_c or arena is not None
        c = [] if prefaulted else [slot for slot in self._offsets if slot.operand == "C"]
        self._waiting, self._prefaulted = c, dict[Slot, Future[None]]()
        self._starting = Lock()

    @cached_property
    def _c_sizes(self) -> tuple[int, int]:
        """Bytes of a slot for C: those of a strip, and those of the strip and its checksums."""
        plan = self._plan
        given, frames = (plan.problem, plan.tile, plan.slots.strip), self._frames
        return frames or payload_bytes(*given)["host", "C"], slot_bytes(*given, frames)["host", "C"]

    @cached_property
    def _frames(self) -> int:
        """Bytes of a slot for a strip of C that the GPU encodes; 0 if it does not."""
        return slot_frames(self._plan.setting, self._plan.tile, self._plan.slots.strip)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="oocgemm-prefault")

    @cached_property
    def _faulting(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(FAULTING_THREADS, thread_name_prefix="oocgemm-fault")

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the memory for an operation's block in a slot, as arrays of the stored operand.

        Each array is a range of the block's columns, contiguous in memory. If the GPU encodes C, the result
        for a strip is one array: the bytes of the slot.
        """
        if slot.operand == "C" and self._frames:
            return [self.arena[self._offsets[slot] :][: self._frames]]
        name = self._plan.problem.dtypes[slot.operand]
        return slot_views(self._plan, operation, self.arena[self._offsets[slot] :], numpy_dtype(name))

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the checksums in a slot for C, as bytes. They follow the data; a Download copies both."""
        start, (data, whole) = self._offsets[slot], self._c_sizes
        return self.arena[start + data : start + whole]

    def start_prefault(self) -> None:
        """Start to prefault and pin the slots for C, in a thread. A second call does nothing.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        with self._starting:
            try:
                for slot in self._waiting:
                    self._prefaulted[slot] = self._pool.submit(self._prefault, self._offsets[slot])
            except RuntimeError as error:
                raise ExecutionError(f"the system refuses a thread that prefaults memory: {error}") from error
            self._waiting = []

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a slot has been prefaulted. Start the prefault if it has not been started.

        Return at once for a slot that a store is read into, which needs no prefault.
        """
        if slot in self._waiting:
            self.start_prefault()
        if slot in self._prefaulted:
            self._prefaulted[slot].result()

    def _prefault(self, start: int) -> None:
        data, whole = self._c_sizes
        slot = self.arena[start : start + whole]

        def fault_in(at: int) -> None:
            slot[at : at + FAULTED_BYTES : PAGE] = 0

        begun = list[Future[None]]()
        try:
            begun += (self._faulting.submit(fault_in, at) for at in range(0, whole, FAULTED_BYTES))
        except RuntimeError:  # the system refuses a thread
            # `submit` has queued its part although no thread started. Cancel it: a later thread would run it,
            # and clear the slot.
            self._faulting.shutdown(wait=True, cancel_futures=True)
            vars(self).pop("_faulting", None)
            slot[::PAGE] = 0
        else:
            for part in begun:
                part.result()
        self._pin([slot[:data]])

    def close(self) -> None:
        """Join the threads that prefault, and drop the arena.

        Its memory is freed when the last NumPy view of it is deleted.
        """
        for pool in ("_pool", "_faulting"):
            if pool in vars(self):  # it was used
                vars(self)[pool].shutdown(wait=True, cancel_futures=True)
        self.arena = self.arena[:0].copy()


# A function that is called with each part of a block: its rows and columns in the stored operand, its data.
OnPart = Callable[[Range, Range, Array], None]
# A function that reads, writes or inspects a part of a matrix, and its call for one part.
OnMatrix = Callable[[Matrix, Range, Range, Array], None]
Work = Callable[[], None]


class Transfers:
    """Reads and writes blocks with one pool of reader threads and one of writer threads.

    Each pool has `plan.candidate.io_threads` threads, which limits the scratch memory of codecs. An operand
    in an object store has pools of its own, with a thread per request in flight. Most of these threads wait.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Matrix], retries: Retries) -> None:
        self._plan = plan
        self._operands = operands
        self._threads = plan.candidate.io_threads
        self._retries = retries
        self.retried = self._retries.made
        # Threads for Reads (True) and for Writes (False). In one pool, Reads would wait behind Writes. If all
        # operands go from their memory to the device, a run has neither.
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        if not all(map(plan.slots.streams, "ABC")):
            for reads, name in ((True, "oocgemm-reader"), (False, "oocgemm-writer")):
                self._pools[reads] = ThreadPoolExecutor(self._threads, thread_name_prefix=name)
        self._remote: dict[tuple[str, bool], ThreadPoolExecutor] = {}
        self._layouts = plan.layouts.by_operand
        for name, layout in self._layouts.items():
            if layout.requests:
                for kind in (True, False) if name == "C" else (True,):
                    self._remote[name, kind] = ThreadPoolExecutor(
                        layout.requests, thread_name_prefix=f"oocgemm-requests-{name}"
                    )

    @cached_property
    def _mirrors(self) -> bool:
        """Whether strips of C are mirrored at its diagonal, or cut there."""
        return self._plan.problem.cover.halves and not self._plan.problem.sink.per_row

    @cached_property
    def _keeps_outside(self) -> bool:
        return self._plan.setting.keeps_outside

    def read(self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None) -> None:
        """Read a block from its store into `columns`, part by part.

        The thread that has read a part calls `on_part`.

        Raises:
            ExecutionError: a part cannot be read; the message names the store and the range.
        """
        blocks = located(self._plan, operation, columns)
        pool = self._remote.get((operation.operand, True)) or self._pools[True]
        self._each(operation, self._parts(operation, blocks, partial(self._read, on_part)), pool)

    def write(self, operation: Operation, columns: Sequence[Array]) -> None:
        """Write a block from `columns` to its store. Strips of a Gram matrix are mirrored first.

        Raises:
            ExecutionError: a part cannot be written; the message names the store and the range.
        """
        pool = self._remote.get((operation.operand, False)) or self._pools[False]
        if self._plan.layouts.codings.c:
            self._each(operation, self._frames(operation, columns[0]), pool)
            return
        blocks, work = list(located(self._plan, operation, columns)), list[Work]()
        write: OnMatrix = self.write_part
        if self._mirrors:
            complete(self._plan, operation, columns)
            below = mirrored(self._plan, operation, blocks)
            work = self._parts(operation, below, self._write_adjoint, copied=True)
            blocks = list(trimmed(self._plan, operation, blocks))
            write = self._write_triangle if self._plan.problem.triangle else write
        copied = self._keeps_outside
        self._each(operation, self._parts(operation, blocks, write, copied=copied) + work, pool)

    def _frames(self, operation: Operation, slot: Array) -> list[Work]:
        """Return a call for each chunk of a strip of C that the GPU has compressed, which writes it."""
        matrix, (rows, cols) = self._operands["C"], operation.block
        assert isinstance(matrix, Coded)
        down, across = (
            range(start // chunk, ceil_div(stop, chunk))
            for (start, stop), chunk in zip((rows, cols), self._plan.chunks, strict=True)
        )
        frames = zip(product(down, across), index_of(slot, len(down) * len(across)), strict=True)
        block = matrix, rows, cols
        return [
            partial(self._write, *block, size, partial(matrix.write_frame, chunk, slot[at:], size))
            for chunk, (at, size) in frames
        ]

    def _write_adjoint(self, matrix: Matrix, rows: Range, cols: Range, part: Array) -> None:
        """Write a part of a matrix, given its transpose."""
        self.write_part(matrix, rows, cols, adjoint(part.T))

    def _write_triangle(self, matrix: Matrix, rows: Range, cols: Range, part: Array) -> None:
        """Write the elements of a part of a matrix that are in the triangle that is stored."""
        triangle = self._plan.problem.triangle
        beyond = outside(triangle, rows, cols)
        if length(beyond):
            old = None
            if self._keeps_outside:
                old = np.empty((length(rows), length(beyond)), matrix.dtype)
                self.read_part(matrix, rows, beyond, old)
            replace_outside(triangle, rows, cols, part, old)
        self.write_part(matrix, rows, cols, part)

    def inspect(self, operation: Operation, columns: Sequence[Array], on_part: OnPart) -> None:
        """Call `on_part` for each part of a block of C before it is written, in the writer threads."""
        blocks = located(self._plan, operation, columns)
        act: OnMatrix = lambda matrix, rows, cols, part: on_part(rows, cols, part)  # noqa: E731
        self._each(operation, self._parts(operation, blocks, act), self._pools[False])

    def _parts(
        self,
        operation: Operation,
        blocks: Iterable[tuple[Range, Range, Array]],
        act: OnMatrix,
        *,
        copied: bool = False,
    ) -> list[Work]:
        """Cut blocks of an operand into parts, and return a call of `act`, which may copy it, for each."""
        matrix, reading = source_of(self._operands, operation), operation.kind is Kind.READ
        return [
            partial(
                act, matrix, r, c, block[r[0] - rows[0] : r[1] - rows[0], c[0] - cols[0] : c[1] - cols[0]]
            )
            for rows, cols, block in blocks
            for r, c in parts(matrix, rows, cols, self._threads, reading=reading, copied=copied)
        ]

    def _each(self, operation: Operation, work: Sequence[Work], pool: ThreadPoolExecutor) -> None:
        """Process the parts of a block in the threads of a pool; return when all have been processed."""
        matrix = source_of(self._operands, operation)
        # Process a single part in this thread: passing it to another one takes as long as copying it. A codec
        # must run in the pool's threads, because the budget contains scratch memory only for these.
        # So must a request, so that no more are in flight than the plan says.
        layout = matrix.layout
        needs_pool = layout.decode_bytes or layout.writing.encode_bytes or layout.requests
        if len(work) == 1 and not needs_pool:
            work[0]()
            return
        left = iter(work)

        def take() -> None:
            """Process parts until none is left.

            Each thread of the pool calls this once: one future per part would cost more than a small part.
            """
            try:
                for part in left:
                    part()
            except BaseException:
                deque(left, maxlen=0)  # empties the iterator: the other threads start no further part
                raise

        threads = self._layouts[operation.operand].requests or self._threads
        futures = [pool.submit(take) for _ in range(min(threads, len(work)))]
        wait(futures)
        for future in futures:
            future.result()

    def _read(self, on_part: OnPart | None, matrix: Matrix, rows: Range, cols: Range, out: Array) -> None:
        """Read a part of a block. After an error that may go away, try again, unless the run was stopped."""
        self._retries.read(matrix, rows, cols, out)
        if on_part is not None:
            on_part(rows, cols, out)

    def read_part(self, matrix: Matrix, rows: Range, cols: Range, out: Array) -> None:
        """Read a part of a matrix into `out`. After an error that may go away, try again.

        Raises:
            ExecutionError: the part cannot be read; the message names the store and the range.
        """
        self._read(None, matrix, rows, cols, out)

    def write_part(self, matrix: Matrix, rows: Range, cols: Range, data: Array) -> None:
        """Write a part of a matrix.

        Raises:
            ExecutionError: the part cannot be written; the message names the store and the range.
        """
        self._write(matrix, rows, cols, data.nbytes, partial(matrix.write, rows, cols, data))

    def _write(self, matrix: Matrix, rows: Range, cols: Range, size: int, write: Work) -> None:
        """Call `write`, which writes `size` bytes of a block. Its error names the store and the range."""
        try:
            write()
        except Exception as error:
            shown = error
            if isinstance(error, OSError) and error.errno in FULL:
                shown = ExecutionError(no_room(matrix, error, size))
            raise ExecutionError(failure("writing", matrix, rows, cols, shown)) from error

    def stop(self) -> None:
        """Stop retrying. A read that waits for its next try fails at once."""
        self._retries.stop()

    def close(self) -> None:
        """Join the threads."""
        for pool in (*self._pools.values(), *self._remote.values()):
            pool.shutdown(wait=True, cancel_futures=True)


def source_of(operands: Mapping[str, Matrix], operation: Operation) -> Matrix:
    """Return the matrix of an operation: for a load of a strip of C, the further matrix D if there is one."""
    loads = operation.kind in (Kind.READ, Kind.UPLOAD)
    merges = loads and operation.operand == "C" and "D" in operands
    return operands["D" if merges else operation.operand]


class Staging:
    """Moves blocks of the operands between stores and host slots, and returns where each block is."""

    def __init__(
        self,
        plan: Plan,
        operands: Mapping[str, Matrix],
        pin: Callable[[Sequence[Array]], object] = lambda columns: None,
        arena: Array | None = None,
        retries: Retries | None = None,
    ) -> None:
        """Allocate the host slots and start the threads.

        Args:
            plan: has the sizes of the slots and the layouts of the operands.
            operands: the matrices A, B and C, by name.
            pin: pins the memory of a slot. The thread that has faulted the pages in calls it.
            arena: memory for all slots, resident and pinned; None to allocate it.
            retries: repeats reads that fail; None to repeat only those of this object.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._plan = plan
        self._pin = pin
        self._slots = HostSlots(plan, pin, arena)
        self._operands = operands
        self._transfers = Transfers(plan, operands, retries or Retries())
        self._read_before: set[Slot] = set()
        if plan.slots.streams("A") and plan.slots.streams("B"):  # no Read would be delayed
            self._slots.start_prefault()

    @property
    def arena(self) -> Array:
        """The memory of all host slots, as bytes."""
        return self._slots.arena

    @property
    def retried(self) -> list[str]:
        """The error messages of the reads that failed and were tried again, one per retry."""
        return self._transfers.retried

    def is_in_place(self, operation: Operation) -> bool:
        """Return whether the CPU multiplies an operation's block where it is in the caller's memory."""
        return operation.operand in self._plan.in_place

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the memory for an operation's block in a host slot, as arrays of the stored operand.

        Each array is a range of the block's columns, contiguous in memory.
        """
        return self._slots.columns(slot, operation)

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the checksums in a host slot for C. They follow the data; a Download copies both."""
        return self._slots.checksum_bytes(slot)

    def groups(self, operation: Operation, columns: Sequence[Array]) -> Iterator[tuple[Range, Range, Array]]:
        """Yield (rows, columns, array) for each group of columns of a panel or strip.

        `rows` and `columns` are ranges of the operand as it is stored, before op().
        """
        return located(self._plan, operation, columns)

    def upload_source(self, operation: Operation) -> HostBlock:
        """Return the host memory that an Upload copies from: its host slot, or the operand's memory."""
        if self._plan.slots.streams(operation.operand):
            matrix = source_of(self._operands, operation)
            return host_block(self._plan, matrix, operation, self._transfers.read_part)
        return self.columns(operation.reads[0].slot, operation)

    def prepare_download(self, operation: Operation) -> HostBlock:
        """Return the host memory that a Download copies to: its host slot, or C's memory.

        Waits until the slot has been prefaulted.
        """
        if self._plan.slots.streams("C"):
            return host_block(self._plan, self._operands["C"], operation, self._transfers.write_part)
        slot = operation.writes[0].slot
        self._slots.await_prefault(slot)
        return self.columns(slot, operation)

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a host slot has been prefaulted. Return at once if stores, not the device, fill it."""
        self._slots.await_prefault(slot)

    def transfer(self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None) -> None:
        """Run a Read (store to host slot) or a Write (host slot to store) in the reader or writer threads.

        Args:
            operation: the Read or Write.
            columns: the slot's memory, as one contiguous array per range of columns.
            on_part: called for each part of a Read by the thread that has read it.

        Raises:
            ExecutionError: a part cannot be read or written; the message names the store and the range.
        """
        if operation.kind is not Kind.READ:
            self._transfers.write(operation, columns)
            return
        slot = operation.writes[0].slot
        # Prefaulting the slots for C would delay the first reads. So it starts after them, when a slot is
        # filled for the second time.
        if slot in self._read_before:
            self._slots.start_prefault()
        self._read_before.add(slot)
        self._transfers.read(operation, columns, on_part)
        if slot.tier is Tier.HOST:
            self._pin(columns)

    def inspect(self, operation: Operation, columns: Sequence[Array], on_part: OnPart) -> None:
        """Call `on_part` for each part of a block of C before it is written, in the writer threads."""
        self._transfers.inspect(operation, columns, on_part)

    def stop(self) -> None:
        """Stop retrying reads, and wake the threads that wait for a retry."""
        self._transfers.stop()

    def close(self) -> None:
        """Join the threads and drop the host slots."""
        self._slots.close()
        self._transfers.close()
