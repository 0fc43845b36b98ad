"""The host side of a run: where blocks of operands are in host memory, and threads that read and write them.

A *block* is what one Read or Write moves: a panel of A or B, or a strip of C. A *host slot*, a buffer in host
memory, stores a block as one or more contiguous arrays, each of some columns (`slot_views`). All host slots
are in one allocation, the arena. A block of an operand in memory, or in a file that a device copies from,
needs no host slot (`host_block`). The reader and writer threads move a block in *parts* (`Cutter`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import product
from threading import Lock
from typing import Any

import numpy as np

from oocgemm.backends.base import (
    Compressed,
    Found,
    HostBlock,
    Pageable,
    Pinned,
    numpy_dtype,
    slot_offsets,
)
from oocgemm.engine.mirror import adjoint, complete, mirrored, outside, replace_outside, trimmed
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Layout, Operation, Plan, Slot, Tier
from oocgemm.planning.cost.coding import slot_frames
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT, MIRRORED_BYTES, payload_bytes, slot_bytes
from oocgemm.planning.tiling import Range, Shape, ceil_div, length
from oocgemm.stores import (
    BATCH_BYTES,
    FULL,
    Array,
    Coded,
    Collecting,
    Matrix,
    in_memory,
    memory,
    no_room,
    pieces,
)
from oocgemm.stores.base import Retries, failure
from oocgemm.stores.capabilities import cached_chunks
from oocgemm.stores.codecs import Codec, Fetched, index_of
from oocgemm.stores.files import CachedBlock
from oocgemm.system.resources import allocate
from oocgemm.values import dataclass

PAGE = 4096
# Number of threads that fault in the pages of a slot for C, and the bytes that each faults in at a time. One
# thread took 12 to 25 ms for 64 MiB on a host of an H100.
FAULTING_THREADS, FAULTED_BYTES = 4, 8 << 20
# Maximum and minimum size, in bytes, of the parts into which a block is cut, for stores that can transfer
# parts of chunks. Within these limits, there is one part per thread. Smaller parts would be slower: passing a
# part to a thread takes the GIL for tens of microseconds.
MAX_PIECE_BYTES = 16 << 20
MIN_PIECE_BYTES = 4 << 20

# A function that is called with each part of a block: its rows and columns in the stored operand, its data.
OnPart = Callable[[Range, Range, Array], None]
# A function that reads, writes or inspects a part of a matrix.
OnMatrix = Callable[[Matrix, Range, Range, Array], None]
# A call of such a function for one part.
Work = Callable[[], None]


def group_width(plan: Plan, operand: str) -> int:
    """Return how many columns each array of a block in a host slot has; 0 if one array has all columns.

    If a chunk has at least `BATCH_BYTES` bytes, there is one array per chunk in two cases:

    - for A and B, if the store only reads whole chunks: a codec can then decode a chunk in place;
    - for C: direct I/O writes a contiguous chunk up to twice as fast as one row by row.
    """
    layouts, problem = plan.layouts, plan.problem
    if operand == "C":
        whole, (height, width) = True, plan.chunks
    else:
        layout, op = (layouts.a, problem.trans_a) if operand == "A" else (layouts.b, problem.trans_b)
        whole, (height, width) = not layout.partial_reads, layout.oriented(op).read_chunk
    return width if whole and height * width * problem.itemsizes[operand] >= BATCH_BYTES else 0


def slot_views(operation: Operation, memory: Array, dtype: np.dtype[Any], width: int) -> list[Array]:
    """Return an operation's block in a host slot, as one contiguous array per group of columns.

    `memory` has the bytes of the slot. The arrays are views of it. The first array begins at the start of the
    slot, and the arrays follow each other without gaps. `width` is what `group_width` returns.
    """
    (top, bottom), cols = operation.stored
    height, first = bottom - top, cols[0]
    data = memory[: height * (cols[1] - first) * dtype.itemsize].view(dtype)
    groups = (group for _, group in pieces((0, 1), cols, (1, width), 1)) if width else (cols,)
    return [data[height * (c0 - first) : height * (c1 - first)].reshape(height, c1 - c0) for c0, c1 in groups]


def located(operation: Operation, columns: Sequence[Array]) -> Iterator[tuple[Range, Range, Array]]:
    """Yield (rows, columns, array) for each of the arrays `columns`, which `slot_views` returned for a block.

    Rows and columns are the ranges of the stored operand that the array contains.
    """
    rows, (left, _) = operation.stored
    for group in columns:
        yield rows, (left, left := left + group.shape[1]), group


class Cutter:
    """Cuts blocks of a stored matrix into parts, for threads that take one part at a time.

    If the store only transfers whole chunks, a part is one chunk, or several chunks that have about
    `BATCH_BYTES` bytes together. With other stores, a part has about `MIN_PIECE_BYTES` to `MAX_PIECE_BYTES`
    bytes. A larger chunk is read in several parts, but written as one. Parts that are `copied` before they
    are written have at most `MIRRORED_BYTES`, or are one chunk. If the matrix is in an object store, each
    part takes one request.
    """

    def __init__(self, matrix: Matrix, threads: int, *, reading: bool, copied: bool = False) -> None:
        layout, self._itemsize = matrix.layout, matrix.dtype.itemsize
        self._threads, self._reading, self._copied = threads, reading, copied
        self._contiguous = layout.contiguous
        self._chunk = height, width = layout.read_chunk if reading else layout.writing.chunk
        # The shape of parts and the minimum number of their elements, if they are the same in all blocks.
        self._fixed: tuple[Shape, int] | None = None
        if layout.requests:
            self._fixed = _request(layout, self._itemsize, reading=reading), 1
        elif not layout.partial_reads if reading else layout.writing.encode_bytes:
            batch = BATCH_BYTES if height * width * self._itemsize < BATCH_BYTES else 1
            self._fixed = self._chunk, ceil_div(batch, self._itemsize)

    def parts(self, rows: Range, cols: Range) -> Iterator[tuple[Range, Range]]:
        """Cut the block at these rows and columns. Return the rows and columns of each part."""
        if self._fixed is not None:
            return pieces(rows, cols, *self._fixed)
        size = (rows[1] - rows[0]) * (cols[1] - cols[0]) * self._itemsize
        # Chunks are joined until they have at least this size. So they have less than twice this size.
        piece = max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, size // self._threads))
        wanted = (MIRRORED_BYTES // 2 if self._copied else piece) // self._itemsize
        height, width = self._chunk
        if (height, width) == (1, 1):
            # A matrix without chunks is cut into whole rows or whole columns, whichever are contiguous.
            if self._contiguous:
                height, width = max(1, wanted // (cols[1] - cols[0])), cols[1]
            else:
                height, width = rows[1], max(1, wanted // (rows[1] - rows[0]))
        elif self._reading:
            height, width = _bands(height, width, max(1, height * width // wanted), self._contiguous)
        return pieces(rows, cols, (height, width), wanted)


def _request(layout: Layout, itemsize: int, *, reading: bool) -> Shape:
    """Return the shape of the block that one request to an object store reads or writes.

    It is a chunk, or several small chunks of a shard. If the store can read parts of a large chunk, it is a
    band of whole rows or columns of the chunk, of at most about `MAX_PIECE_BYTES`.
    """
    height, width = layout.read_chunk if reading else layout.writing.chunk
    count = height * width * itemsize // MAX_PIECE_BYTES
    if reading and layout.partial_reads and count > 1:
        return _bands(height, width, count, layout.contiguous)
    if reading:
        return max(height, layout.request_chunk[0]), max(width, layout.request_chunk[1])
    return height, width


def _bands(height: int, width: int, count: int, contiguous: int) -> Shape:
    """Cut a chunk into at most `count` equal bands of whole contiguous lines. Return the shape of a band."""
    extent = height if contiguous else width
    least = -(-extent // count)
    # The smallest part that divides the extent, so that no part crosses the border of a chunk.
    part = least if extent % least == 0 else next(i for i in range(least, extent + 1) if extent % i == 0)
    return (part, width) if contiguous else (height, part)


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
        """Bytes of a slot for a strip of C that the GPU encodes; 0 if the GPU does not encode C."""
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
        return slot_views(operation, self.arena[self._offsets[slot] :], *self._forms[slot.operand])

    @cached_property
    def _forms(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Per operand, its dtype in slots, and what `group_width` returns for it."""
        plan = self._plan
        return {x: (numpy_dtype(plan.problem.dtypes[x]), group_width(plan, x)) for x in "ABC"}

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the checksums in a slot for C, as bytes. They follow the data; a Download copies both."""
        start, (data, whole) = self._offsets[slot], self._c_sizes
        return self.arena[start + data : start + whole]

    def start_prefault(self) -> None:
        """Start to prefault and pin the slots for C, in a thread. A second call does nothing.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        if not self._waiting:
            return
        with self._starting:
            try:
                for slot in self._waiting:
                    self._prefaulted[slot] = self._pool.submit(self._prefault, self._offsets[slot])
            except RuntimeError as error:
                raise ExecutionError(f"the system refuses a thread that prefaults memory: {error}") from error
            self._waiting = []

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a slot has been prefaulted. Start the prefault if it has not been started.

        Return at once if the slot needs no prefault, because Reads fill it or the arena is resident.
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

        The memory of the arena is freed when the last NumPy view of it is deleted.
        """
        for pool in ("_pool", "_faulting"):
            if pool in vars(self):  # it was used
                vars(self)[pool].shutdown(wait=True, cancel_futures=True)
        self.arena = self.arena[:0].copy()


@dataclass(frozen=True, slots=True)
class Way:
    """How blocks of an operand are read or written.

    Attributes:
        matrix: the matrix that blocks are read from, or written to.
        cutter: cuts blocks into parts.
        pool: the threads that move parts.
        threads: the maximum number of threads that move parts of one block.
        pooled: whether only threads of the pool may move parts.
    """

    matrix: Matrix
    cutter: Cutter
    pool: ThreadPoolExecutor
    threads: int
    pooled: bool


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
        # Threads for Reads (True) and for Writes (False). In one pool, Reads would wait behind Writes. If no
        # operand has host slots, a run has neither Reads nor Writes.
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        if not all(map(plan.slots.streams, "ABC")):
            for reads, name in ((True, "oocgemm-reader"), (False, "oocgemm-writer")):
                self._pools[reads] = ThreadPoolExecutor(self._threads, thread_name_prefix=name)
        self._remote: dict[tuple[str, bool], ThreadPoolExecutor] = {}
        self._ways: dict[tuple[str, bool, bool], Way] = {}
        for name, layout in plan.layouts.by_operand.items():
            if layout.requests:
                for kind in (True, False) if name == "C" else (True,):
                    self._remote[name, kind] = ThreadPoolExecutor(
                        layout.requests, thread_name_prefix=f"oocgemm-requests-{name}"
                    )

        # Whether strips of C are mirrored at its diagonal, or cut there.
        self._mirrors = plan.problem.cover.halves and not plan.problem.sink.per_row
        self._keeps_outside = plan.setting.keeps_outside
        self._encodes = plan.layouts.codings.c is not None  # the GPU encodes C

    def _way(self, operand: str, *, reading: bool, copied: bool = False) -> Way:
        """Return how blocks of an operand are read or written. `copied` tells that they are copied before."""
        key = operand, reading, copied
        if key not in self._ways:
            matrix, planned = self._operands[operand], self._plan.layouts.by_operand[operand]
            if reading and operand == "C":
                matrix = self._operands.get("D", matrix)
            layout, pool = matrix.layout, self._remote.get((operand, reading)) or self._pools[reading]
            # A codec must run in the pool's threads, because the budget contains scratch memory only for
            # these. A request must, too, so that no more requests are in flight than the plan says.
            pooled = layout.decode_bytes or layout.writing.encode_bytes or layout.requests
            cutter = Cutter(matrix, self._threads, reading=reading, copied=copied)
            self._ways[key] = Way(matrix, cutter, pool, planned.requests or self._threads, bool(pooled))
        return self._ways[key]

    def read(self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None) -> None:
        """Read a block from its store into `columns`, part by part.

        The thread that has read a part calls `on_part`.

        Raises:
            ExecutionError: a part cannot be read; the message names the store and the range.
        """
        way = self._way(operation.operand, reading=True)
        self._run(way, self._parts(way, located(operation, columns), partial(self._read, on_part)))

    def write(self, operation: Operation, columns: Sequence[Array]) -> None:
        """Write a block from `columns` to its store. Strips of a Gram matrix are mirrored first.

        Raises:
            ExecutionError: a part cannot be written; the message names the store and the range.
        """
        way = self._way(operation.operand, reading=False, copied=self._keeps_outside)
        if self._encodes:
            self._run(way, self._frames(operation, columns[0]))
            return
        if not self._mirrors:
            self._run(way, self._parts(way, located(operation, columns), self.write_part))
            return
        blocks = list(located(operation, columns))
        complete(self._plan, operation, columns)
        below = mirrored(self._plan, operation, blocks)
        turned = self._way(operation.operand, reading=False, copied=True)
        work = self._parts(turned, below, self._write_adjoint)
        if operation.operand in self._plan.in_place:
            self._run(turned, work)
            return
        write = self._write_triangle if self._plan.problem.triangle else self.write_part
        self._run(way, self._parts(way, trimmed(self._plan, operation, blocks), write) + work)

    def _frames(self, operation: Operation, slot: Array) -> list[Work]:
        """Return one call per chunk of a strip of C that the GPU has compressed. It writes the chunk."""
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
        way = self._way(operation.operand, reading=False)
        act: OnMatrix = lambda matrix, rows, cols, part: on_part(rows, cols, part)  # noqa: E731
        self._run(way, self._parts(way, located(operation, columns), act), self._pools[False])

    def _parts(self, way: Way, blocks: Iterable[tuple[Range, Range, Array]], act: OnMatrix) -> list[Work]:
        """Cut blocks of an operand into parts, and return a call of `act` for each part."""
        return [
            partial(
                act, way.matrix, r, c, block[r[0] - rows[0] : r[1] - rows[0], c[0] - cols[0] : c[1] - cols[0]]
            )
            for rows, cols, block in blocks
            for r, c in way.cutter.parts(rows, cols)
        ]

    def _run(self, way: Way, work: Sequence[Work], pool: ThreadPoolExecutor | None = None) -> None:
        """Process the parts of a block in the threads of a pool; return when all have been processed."""
        # Process a single part in this thread: passing it to another one takes as long as copying it.
        if len(work) == 1 and not way.pooled:
            work[0]()
            return
        pool = pool or way.pool
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

        futures = [pool.submit(take) for _ in range(min(way.threads, len(work)))]
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


def host_block(
    plan: Plan, matrix: Matrix, operation: Operation, transfer: OnMatrix
) -> Pinned | Pageable | Found:
    """Return the block of an Upload or a Download in the memory of `matrix`, or in its file.

    `transfer` copies parts of a pageable block from or to the matrix. If only some elements of C are kept,
    the result receives the elements that the device has found.
    """
    if plan.problem.sink.bounded and isinstance(matrix, Collecting):
        return Found(partial(matrix.put, operation.m, operation.n))
    (top, bottom), (left, right) = operation.stored
    if plan.is_direct(operation.operand):
        return Pinned(memory(matrix)[top:bottom, left:right])

    coding = plan.layouts.coding(operation.operand)
    rows, cols, uploading = (top, bottom), (left, right), operation.kind is Kind.UPLOAD
    if coding is None or in_memory(matrix) is not None:
        return pageable(matrix, rows, cols, transfer, uploading=uploading)
    assert isinstance(matrix, Coded)

    def fetch(rows: Range, cols: Range, out: Array) -> list[Fetched]:
        block = (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1])
        return [each.counted_from(top, left) for each in matrix.fetch(*block, out)]

    plain, codec = (
        _in_chunks(matrix, rows, cols, transfer, None),
        Codec.of(coding.codec, matrix.dtype.itemsize),
    )
    return Compressed(
        plain.shape, plain.dtype, plain.move, plain.chunk, plain.origin, codec=codec, fetch=fetch
    )


def pageable(matrix: Matrix, rows: Range, cols: Range, transfer: OnMatrix, *, uploading: bool) -> Pageable:
    """Return a block of a matrix in pageable memory, or in files, whose parts `transfer` copies."""
    whole = in_memory(matrix)
    if whole is None:
        chunks = cached_chunks(matrix) if uploading else None
        stored = None if chunks is None else CachedBlock(chunks, rows[0], cols[0])
        return _in_chunks(matrix, rows, cols, transfer, stored)
    array = whole[slice(*rows), slice(*cols)]

    def copy(rows: Range, cols: Range, part: Array) -> None:
        found = array[slice(*rows), slice(*cols)]
        np.copyto(*((part, found) if uploading else (found, part)), casting="equiv")

    contiguous = array.dtype == matrix.dtype and array.strides[1] == array.itemsize
    return Pageable(array.shape, matrix.dtype, copy, memory=array if contiguous else None)


def _in_chunks(
    matrix: Matrix, rows: Range, cols: Range, transfer: OnMatrix, stored: CachedBlock | None
) -> Pageable:
    (top, bottom), (left, right) = rows, cols

    def move(rows: Range, cols: Range, part: Array) -> None:
        transfer(matrix, (top + rows[0], top + rows[1]), (left + cols[0], left + cols[1]), part)

    chunk = matrix.layout.read_chunk
    place = chunk, (top % chunk[0], left % chunk[1])
    return Pageable((bottom - top, right - left), matrix.dtype, move, *place, stored=stored)


class Staging(Transfers):
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
            retries: repeats reads that fail; None to create one for this object alone.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        super().__init__(plan, operands, retries or Retries())
        self._pin = pin
        self.slots = HostSlots(plan, pin, arena)
        self._streams = {x for x in "ABC" if plan.slots.streams(x)}
        # The arrays of operands that the device copies directly. If D is given, it is read instead of C.
        self._direct = {
            name: memory(matrix)
            for name, matrix in operands.items()
            if plan.is_direct("C" if name == "D" else name) and not isinstance(matrix, Collecting)
        }
        self._read_before: set[Slot] = set()
        if {"A", "B"} <= self._streams:  # no Read would be delayed
            self.slots.start_prefault()

    def upload_source(self, operation: Operation) -> HostBlock:
        """Return the host memory that an Upload copies from: its host slot, or the operand's memory."""
        operand = operation.operand
        if operand not in self._streams:
            return self.slots.columns(operation.reads[0].slot, operation)
        name = "D" if operand == "C" and "D" in self._operands else operand
        return self._in_memory(name, operation, self.read_part)

    def prepare_download(self, operation: Operation) -> HostBlock:
        """Return the host memory that a Download copies to: its host slot, or C's memory.

        Waits until the slot has been prefaulted.
        """
        if "C" in self._streams:
            return self._in_memory("C", operation, self.write_part)
        slot = operation.writes[0].slot
        self.slots.await_prefault(slot)
        return self.slots.columns(slot, operation)

    def _in_memory(self, name: str, operation: Operation, transfer: OnMatrix) -> HostBlock:
        """Return the block of an operation in the memory of an operand, or in its file."""
        direct = self._direct.get(name)
        if direct is None:
            return host_block(self._plan, self._operands[name], operation, transfer)
        (top, bottom), (left, right) = operation.stored
        return Pinned(direct[top:bottom, left:right])

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
            self.write(operation, columns)
            return
        slot = operation.writes[0].slot
        # Prefaulting the slots for C would delay the first Reads. So it starts when a Read fills a slot for
        # the second time.
        if slot in self._read_before:
            self.slots.start_prefault()
        self._read_before.add(slot)
        self.read(operation, columns, on_part)
        if slot.tier is Tier.HOST:
            self._pin(columns)

    def close(self) -> None:
        """Join the threads and drop the host slots."""
        self.slots.close()
        super().close()
