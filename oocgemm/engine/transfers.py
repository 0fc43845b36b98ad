"""The reader and writer threads. They move parts of a block between its store and a buffer in host memory."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import product

import numpy as np

from oocgemm.engine.blocks import located, parts
from oocgemm.engine.mirror import adjoint, complete, mirrored, outside, replace_outside, trimmed
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.tiling import Range, ceil_div, length
from oocgemm.stores import FULL, Array, Coded, Matrix, no_room
from oocgemm.stores.base import Retries, failure
from oocgemm.stores.compressors import index_of

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
        # By whether it reads: two pools, so that reads never queue behind writes. If all operands go from
        # their memory to the device, there are no Reads and no Writes.
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
        if self._plan.problem.cover.square and not self._plan.problem.sink.per_row:
            complete(self._plan, operation, columns)
            below = mirrored(self._plan, operation, blocks)
            work = self._parts(operation, below, self._write_adjoint, copied=True)
            blocks = list(trimmed(self._plan, operation, blocks))
            write = self._write_triangle if self._plan.problem.triangle else write
        copied = self._plan.setting.keeps_outside
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
            if self._plan.setting.keeps_outside:
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
