"""Copies blocks between pageable host memory and the device, piece by piece through a ring of pinned buffers.

Several threads work on one block. To upload, a thread copies a piece of the block into one of its pinned
buffers, and issues the copy to the device. While the device copies, the thread fills its next buffer. A
download goes the other way. So the memory of a run does not depend on the size of its blocks, and copies on
the host and over the link overlap within a block.

Each thread has a stream for its copies, so that the link begins a copy while it ends one of another thread.
The end of a block is an event on one more stream, which waits for the copies of all threads.

Arrays with contiguous rows, and blocks of files, are copied by compiled threads (`CompiledThreads`), which
need no GIL. So their pieces may be small: the device gets the first piece sooner, and the host writes the
last piece of a download in less time. Other blocks are moved by Python's threads, which take pieces from one
queue per direction. Handing over a piece, and taking the GIL again after a copy, cost tens of microseconds.
So the pieces of Python's threads are large, and apart from the copy, no call for a piece releases the GIL.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, cycle
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver

from oocgemm.backends.base import Array, Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.planning.cost.footprint import (
    BUFFERS,
    MARKS,
    MAX_STORED_PIECE,
    MIN_BUSY_PIECE,
    MIN_PIECE,
    MIN_STORED_PIECE,
    PAGE,
    UPLOADED,
    RingShape,
)
from oocgemm.planning.tiling import Range, ceil_div, round_up
from oocgemm.system.pool import (
    DRIVER,
    CopiedBlock,
    CopyLane,
    Pool,
    available,
    error_of,
    memory_block,
    stored_block,
)
from oocgemm.system.threads import start

# A piece has at least this many bytes of every chunk that it contains a part of, or the whole chunk. Opening
# and looking up a file takes about as long as reading a tenth of MIN_PART bytes.
MIN_PART = 512 << 10
# If a row of a chunk has at least MIN_ROW bytes, and the chunk at least MIN_APART bytes, a piece has columns
# of one chunk only. Such a piece is read from one place of one file, by one call. The link copies shorter
# rows more slowly.
MIN_ROW, MIN_APART = 4 << 10, 2 << 20
# A piece of a block: its rows, its columns, and the byte at which it starts in the block.
Piece = tuple[Range, Range, int]


def pieces(block: Pageable, size: int) -> list[Piece]:
    """Cut a block into pieces of at most `size` bytes; `size` is at least the bytes of an element.

    If chunks are large (`MIN_ROW`, `MIN_APART`), a piece has whole rows of one chunk, or of several chunks
    below one another. Otherwise a piece has whole rows of the block, if `MIN_PART` bytes of each chunk, or
    the whole chunk, then fit into the piece. If not, the block is cut between chunks in both directions.
    """
    (rows, cols), itemsize = block.shape, block.dtype.itemsize
    row = cols * itemsize
    (high, wide), (down, along) = block.chunk, block.origin
    line = wide * itemsize
    least = max(1, min(high, MIN_PART // line, size // itemsize))
    if wide < cols and MIN_ROW <= line <= size and min(high * line, size) >= MIN_APART:
        height, width = min(high, size // line), wide
        if height < high:
            height = ceil_div(high, ceil_div(high, height))
            bands = cuts(rows, high, down)
            heights = [(top + i, top + j) for top, end in bands for i, j in cuts(end - top, height, 0)]
            return _located(heights, cuts(cols, width, along), row, itemsize)
        height = size // line // high * high
    elif least * row <= size:
        height, width = size // row, cols
        if height >= high:
            height -= height % high
    else:
        height, width = least, size // (least * itemsize)
        if width >= wide:
            width -= width % wide
    return _located(
        cuts(rows, height, down if height % high == 0 else 0),
        cuts(cols, width, along if width % wide == 0 else 0),
        *(row, itemsize),
    )


def _located(rows: Sequence[Range], cols: Sequence[Range], row: int, itemsize: int) -> list[Piece]:
    return [
        ((top, end), (left, right), top * row + left * itemsize) for top, end in rows for left, right in cols
    ]


def cuts(extent: int, step: int, start: int) -> list[Range]:
    """Cut an axis at multiples of `step`, where its first index counts as `start`.

    >>> cuts(10, 4, 0), cuts(10, 4, 7)
    ([(0, 4), (4, 8), (8, 10)], [(0, 1), (1, 5), (5, 9), (9, 10)])
    """
    first = -(start % step)
    return [(max(0, at), min(extent, at + step)) for at in range(first, extent, step)]


class Buffer:
    """A pinned buffer of a lane, and the event after the latest copy from or to it.

    `offset` is its distance in bytes from the first buffer of its direction.
    """

    def __init__(self, memory: Array, offset: int) -> None:
        self.address: int = memory.ctypes.data
        self.offset = offset
        self._memory = memory
        self._event = cupy.cuda.Event(block=True, disable_timing=True)
        self._query = cuda_calls.query(self._event)
        self._array, self._form = memory, (memory.dtype, 0, 0)

    def array(self, dtype: np.dtype[Any], height: int, width: int) -> Array:
        """Return the first bytes of the buffer as a `height` x `width` array."""
        form = dtype, height, width
        if form != self._form:  # most pieces of a block have the same shape
            self._array = self._memory[: height * width * dtype.itemsize].view(dtype).reshape(height, width)
            self._form = form
        return self._array

    def record(self, stream: Any) -> Any:
        """Record the event on a stream, and return it."""
        cuda_calls.record(self._event, stream)
        return self._event

    def wait(self) -> None:
        """Wait for the event. The thread keeps the GIL if the event has completed."""
        if self._query():
            self._event.synchronize()


class CopyBuffers:
    """The lane of one thread: its pinned buffers, and the stream of its copies.

    The stream has a high priority: a kernel that transposes a piece starts before the thread blocks of
    products that are queued.
    """

    def __init__(self, memory: Array, start: int, end: int) -> None:
        """Divide the bytes from `start` to `end` of a direction's memory into buffers."""
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.block = -1  # number of the block that the stream has waited for
        size = (end - start) // BUFFERS
        parts = range(start, end, size)
        self._buffers = [Buffer(memory[at : at + size], at) for at in parts]
        self._turns = cycle(self._buffers)
        self.pending: Callable[[], None] | None = None  # finishes the latest piece

    def finish(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def drain(self) -> None:
        for buffer in self._buffers:
            buffer.wait()

    def next_buffer(self) -> Buffer:
        buffer = next(self._turns)
        buffer.wait()
        return buffer


# Issues the copy of one piece on a stream, through the buffers of a lane. Returns the event after the copy,
# and a function to call when the thread has issued its next copy; None if nothing is left to do then.
Move = Callable[[CopyBuffers, Piece, Any], tuple[Any, Callable[[], None] | None]]


class Copying:
    """A block that is being copied.

    Attributes:
        number: identifies the block; unique in the process.
        move: issues the copy of one piece.
        waits: events that the copies wait for.
        ends: the stream that waits for all copies. On it, the event at their end is recorded.
        error: the first error of a piece; None without an error. After an error, no further piece is copied.
    """

    _numbers = count()

    def __init__(self, move: Move, waits: Sequence[Any], ends: Any, pieces: int) -> None:
        """Prepare to copy a number of pieces."""
        self.number = next(self._numbers)
        self.move, self.waits, self.ends = move, waits, ends
        self.error: BaseException | None = None
        self._start, self._end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        self._unstarted, self._issued = iter([self._start]), 0
        self._counting = threading.Lock()
        self._unissued = self._unfinished = pieces
        # `_issuing` is held until all copies have been issued, `_finishing` until all pieces are finished.
        self._issuing, self._finishing = threading.Lock(), threading.Lock()
        self._issuing.acquire()
        self._finishing.acquire()

    def copy(self, lane: CopyBuffers, piece: Piece) -> None:
        """Copy one piece, by the thread of a lane. `CopyBuffers.finish` must be called afterwards."""
        late = None
        try:
            if self.error is None:
                self._enter(lane)
                event, late = self.move(lane, piece, lane.stream)
                cuda_calls.wait(self.ends, event)
        except BaseException as error:
            self.error = self.error or error
        self._count_issued()
        if lane.pending is not None:
            lane.finish()  # finishes the previous piece
        if late is None:
            self._count_finished()
        else:
            lane.pending = partial(self._finish, late)

    def _enter(self, lane: CopyBuffers) -> None:
        """Let the stream of a lane wait for `waits` before its first piece. The first records the start."""
        if lane.block != self.number:
            for event in self.waits:
                cuda_calls.wait(lane.stream, event)
            lane.block = self.number
        for start_event in self._unstarted:  # in the first thread only
            self._issued = perf_counter_ns()
            cuda_calls.record(start_event, lane.stream)

    def _finish(self, late: Callable[[], None]) -> None:
        try:
            if self.error is None:
                late()
        except BaseException as error:
            self.error = self.error or error
        self._count_finished()

    def _count_issued(self) -> None:
        """Count a piece as issued. After the last piece, record the event at the end of the copies."""
        with self._counting:
            self._unissued -= 1
            if self._unissued:
                return
        # Record the event now: when `work` is called, the stream may also wait for the copies of a later
        # block.
        try:
            cuda_calls.record(self._end, self.ends)
        except BaseException as error:
            self.error = self.error or error
        self._issuing.release()

    def _count_finished(self) -> None:
        with self._counting:
            self._unfinished -= 1
            if self._unfinished:
                return
        self._finishing.release()

    def work(self) -> Work:
        """Wait until the last piece has been handed to the device; raise the first error.

        `Work.finish` waits until the host has written all pieces.
        """
        with self._issuing:
            if self.error is not None:
                self._wait()
            return Work(self._start, self._issued, self._end, self._wait)

    def _wait(self) -> None:
        with self._finishing:
            if self.error is not None:
                raise self.error


class CompiledThreads:
    """The compiled threads of one direction, and the blocks that they copy."""

    def __init__(
        self, memory: Array, lanes: Sequence[CopyBuffers], ends: Any, shape: RingShape, *, uploads: bool
    ) -> None:
        """Start a thread for each of `lanes`, the first ones of a ring, for copies with the current device.

        `memory` is the pinned memory of the direction, whose last bytes are the marks of the lanes.
        """
        functions = [cuda_calls.address(name) for name in DRIVER]
        start, step = memory.ctypes.data, BUFFERS * shape.piece
        marks = start + memory.nbytes - MARKS * shape.lanes
        self._left = [cupy.cuda.Event(disable_timing=True) for _ in lanes]
        size = min(step, UPLOADED) if uploads else step
        given = [
            CopyLane(start + i * step, size, marks + i * MARKS, lane.stream.ptr, event.ptr)
            for i, (lane, event) in enumerate(zip(lanes, self._left, strict=True))
        ]
        self._pool = Pool(functions, cuda_calls.context(), ends.ptr, given, uploads=uploads)
        self.take, self.give = self._pool.take, self._pool.give
        self._threads, self._most, self._uploads = len(lanes), min(shape.piece, MAX_STORED_PIECE), uploads
        self._copied = list[PooledCopying]()  # blocks that may still be being copied
        self._choosing = threading.Lock()

    @staticmethod
    def possible(memory: Array, stream: Any) -> bool:
        """Return whether there is compiled code, and the device can write marks to the end of `memory`."""
        if not (available() and cuda_calls.writes_values(memory[-MARKS:].ctypes.data, stream)):
            return False
        stream.synchronize()  # the memory is unpinned at once if the threads cannot be started
        return True

    def begin(self, address: int, given: Pageable, waits: Sequence[Any]) -> "PooledCopying":
        """Begin to copy a block to or from a device address, once the events in `waits` have completed.

        The block is in memory with contiguous rows, or it is uploaded from files that compiled code reads.
        """
        block = self._block(address, given)
        with self._choosing:
            # What is being copied must stay in memory, even if nobody waits for it.
            self._copied = [copying for copying in self._copied if not copying.ended]
            copying = PooledCopying(self._pool, block, waits, uploads=self._uploads)
            self._copied.append(copying)
        return copying

    def _block(self, address: int, given: Pageable) -> CopiedBlock:
        itemsize = given.dtype.itemsize
        row_bytes = given.shape[1] * itemsize
        if given.memory is not None:
            return memory_block(given.memory, address, uploads=self._uploads)
        assert given.stored is not None
        chunks, corner = given.stored.chunks, (given.stored.row, given.stored.left)
        # Two pieces per thread, so that the link soon has a piece to copy.
        size = round_up(max(MIN_STORED_PIECE, ceil_div(given.nbytes, 2 * self._threads)), PAGE)
        found = [
            (top, end - top, left * itemsize, (right - left) * itemsize)
            for (top, end), (left, right), _ in pieces(given, min(self._most, size))
        ]
        block = stored_block(chunks.address, corner, np.array(found, np.uintp), address, row_bytes)
        block.owned += (chunks,)
        return block

    def close(self) -> None:
        self._pool.close()
        self._copied.clear()


class PooledCopying:
    """A block that the threads of a pool are copying. `end` is the event after the last copy."""

    def __init__(self, pool: Pool, block: CopiedBlock, waits: Sequence[Any], *, uploads: bool) -> None:
        self._pool, self._block, self._uploads = pool, block, uploads
        self._start, self.end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        block.owned += tuple(waits)
        pool.begin(block, [event.ptr for event in waits], self._start.ptr, self.end.ptr)

    def work(self) -> Work:
        """Wait until the last copy has been issued; raise the first error (see `Copying.work`)."""
        self._pool.wait_issued(self._block)
        if self._uploads or self._block.error:
            self._finish()
        return Work(self._start, self._block.started_at, self.end, self._finish)

    def _finish(self) -> None:
        self._pool.wait_finished(self._block)
        self._block.owned = ()  # this object stays in `CompiledThreads._copied` until the next block
        if error := error_of(self._block):
            raise error
        driver.check_status(self._block.error)

    @property
    def ended(self) -> bool:
        return self._pool.is_finished(self._block)


# Transposes a piece of a block on the device. Takes the address of the strip, the rows and the columns of the
# piece in the transposed block, the offset of its pinned buffer, and a stream; returns the address of the
# result.
Turn = Callable[[int, Range, Range, int, Any], int]


class Direction:
    """The threads and lanes for copies in one direction. One more lane is for blocks of a single piece."""

    def __init__(self, device: Any, shape: RingShape, name: str) -> None:
        self._device = device
        self._memory = cuda_calls.pinned_memory(device, shape.bytes // 2, shape.lanes)
        self._queue: SimpleQueue[tuple[Copying, Piece] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.compiled: CompiledThreads | None = None
        try:
            self._start(shape, name)
        except BaseException:
            self.close()
            raise

    def _start(self, shape: RingShape, name: str) -> None:
        """Create the lanes and start their threads: compiled threads if possible, else Python threads."""
        size = BUFFERS * shape.piece
        with self._device:
            self._ends = cupy.cuda.Stream(non_blocking=True)
            self._lanes = [CopyBuffers(self._memory, i * size, (i + 1) * size) for i in range(shape.lanes)]
        self._piece, self._name, self._starting = shape.piece, name, threading.Lock()
        self._single, self._using_single = self._lanes.pop(), threading.Lock()
        with self._device:
            if CompiledThreads.possible(self._memory, self._ends):
                given = self._memory, self._lanes, self._ends, shape
                self.compiled = CompiledThreads(*given, uploads=name == "upload")
        if self.compiled is None:
            self._start_threads()

    def _start_threads(self) -> None:
        """Start the threads for blocks that Python moves, if they do not run yet."""
        with self._starting:
            for i in range(len(self._threads), len(self._lanes)):
                serve, name = partial(self._serve, i), f"oocgemm-{self._name}-{i}"
                thread = threading.Thread(target=serve, name=name, daemon=True)
                start(thread)
                self._threads.append(thread)

    def begin(self, block: Pageable, move: Move, waits: Sequence[Any]) -> Callable[[], Work]:
        """Begin to copy the pieces of a block. The returned function waits until the last copy is issued.

        `waits` are events that the copies wait for. The device must be the current one of this thread.
        """
        least = MIN_BUSY_PIECE if self._queue.qsize() else MIN_PIECE
        parts = pieces(block, min(self._piece, max(least, ceil_div(block.nbytes, len(self._lanes)))))
        copying = Copying(move, waits, self._ends, len(parts))
        if len(parts) == 1 and self._using_single.acquire(blocking=False):
            try:
                copying.copy(self._single, parts[0])
                self._single.finish()
            finally:
                self._using_single.release()
        else:
            self._start_threads()
            for piece in parts:
                self._queue.put((copying, piece))
        return copying.work

    def _serve(self, number: int) -> None:
        lane = self._lanes[number]
        with self._device:
            while (item := self._queue.get()) is not None:
                with self._using(number):
                    while item is not None:
                        copying, piece = item
                        copying.copy(lane, piece)
                        del copying  # a thread that waits must keep no block alive
                        try:
                            item = self._queue.get_nowait()
                        except Empty:
                            break
                    lane.finish()
                if item is None:
                    break
                del item

    @contextmanager
    def _using(self, lane: int) -> Iterator[None]:
        """Use the buffers of a lane, which the lane's compiled thread does not use meanwhile."""
        if self.compiled is None:
            yield
            return
        self.compiled.take(lane)
        try:
            yield
        finally:
            with suppress(Exception):  # the device has failed: the next copy raises the error, too
                self._lanes[lane].drain()
            self.compiled.give(lane)

    def close(self) -> None:
        """Join the threads, and unpin and free the buffers. No copy may be in flight."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if self.compiled is not None:
            self.compiled.close()
        cuda_calls.unpin(self._device, self._memory)


class Ring:
    """The pinned buffers and the threads of one device. Those of a direction are made at its first copy."""

    def __init__(self, device: Any, shape: RingShape) -> None:
        self.shape = shape
        self._device = device
        self._opening = threading.Lock()
        self._directions: dict[str, Direction] = {}

    def upload(self, address: int, block: Pageable, waits: Sequence[Any]) -> Callable[[], Work]:
        """Begin to copy a block to a device address, once the events in `waits` have completed.

        The returned function waits until the block has been read, and raises the errors of `block.move`.
        """
        direction, dtype = self._direction("upload"), block.dtype
        copied = None
        if direction.compiled is not None and (block.memory is not None or block.stored is not None):
            copied = direction.compiled.begin(address, block, waits)
        row = block.shape[1] * dtype.itemsize

        def move(lane: CopyBuffers, piece: Piece, stream: Any) -> tuple[Any, None]:
            rows, cols, at = piece
            buffer, height, width = lane.next_buffer(), rows[1] - rows[0], cols[1] - cols[0]
            block.move(rows, cols, buffer.array(dtype, height, width))
            size = width * dtype.itemsize
            _copy((address + at, row), (buffer.address, size), height, size, stream)
            return buffer.record(stream), None

        if copied is None:
            return direction.begin(block, move, waits)
        return copied.work if block.stored is None else partial(self._work, copied, direction, block, move)

    def _work(self, copied: PooledCopying, direction: Direction, block: Pageable, move: Move) -> Work:
        """Wait until an upload from files is issued. If compiled code fails to read it, Python reads it."""
        try:
            return copied.work()
        except OSError:
            if block.stored is not None:
                block.stored.chunks.incomplete = True
            with self._device:
                return direction.begin(block, move, [copied.end])()

    def download(
        self, address: int, block: Pageable, waits: Sequence[Any], turn: Turn | None = None
    ) -> Callable[[], Work]:
        """Begin to copy a block from a device address, once the events in `waits` have completed.

        With `turn`, the device transposes each piece first. The returned function waits until the last copy
        to the ring is issued, and returns a `Work`. `Work.finish` waits until the block has been written, and
        raises the errors of `block.move`. So the device may overwrite the block while the host still writes.
        """
        direction, dtype = self._direction("download"), block.dtype
        if block.memory is not None and turn is None and direction.compiled is not None:
            return direction.compiled.begin(address, block, waits).work
        row = block.shape[1] * dtype.itemsize

        def move(lane: CopyBuffers, piece: Piece, stream: Any) -> tuple[Any, Callable[[], None]]:
            rows, cols, at = piece
            buffer, height, width = lane.next_buffer(), rows[1] - rows[0], cols[1] - cols[0]
            size = width * dtype.itemsize
            if turn is None:
                source = address + at, row
            else:  # the last copy from this place on the device was to this buffer, and has ended
                source = turn(address, rows, cols, buffer.offset, stream), size
            _copy((buffer.address, size), source, height, size, stream)
            event = buffer.record(stream)

            def write() -> None:
                buffer.wait()
                block.move(rows, cols, buffer.array(dtype, height, width))

            return event, write

        return direction.begin(block, move, waits)

    def _direction(self, name: str) -> Direction:
        with self._opening:
            if name not in self._directions:
                self._directions[name] = Direction(self._device, self.shape, name)
            return self._directions[name]

    def close(self) -> None:
        """Join the threads, and unpin and free the buffers. No copy may be in flight."""
        while self._directions:
            self._directions.popitem()[1].close()


def _copy(to: tuple[int, int], source: tuple[int, int], height: int, size: int, stream: Any) -> None:
    """Copy `height` rows of `size` bytes between two addresses with pitches."""
    if height == 1 or to[1] == source[1]:
        cuda_calls.make(cuda_calls.copy(to[0], source[0], height * size, stream))
    else:
        cuda_calls.make(cuda_calls.copy_rows(to, source, size, height, stream))
