"""Copies blocks between pageable host memory and the device, piece by piece through a ring of pinned buffers.

Several threads work on one block. To upload, a thread copies a piece of the block into one of its pinned
buffers, and issues the copy to the device. While the device copies, the thread fills its
next buffer. A download goes the other way. So the memory of a run does not depend on the size of its blocks,
and copies on the host and over the link overlap within a block.

The copies of a block are on one stream, and blocks that are copied at the same time have different streams.
With more streams, copies would wait for each other: a GPU has 8 queues, by default, and streams share them.

Threads take pieces from one queue per direction. To hand over a piece and to take the GIL again after a copy
costs tens of microseconds. So pieces are large, and no other call of a piece releases the GIL.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import count, cycle
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.base import Array, Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.backends.cuda.pieces import Piece, pieces
from oocgemm.backends.cuda.pinned import unpin
from oocgemm.backends.cuda.turner import Turn
from oocgemm.errors import BackendError
from oocgemm.planning.cost.ring import BUFFERS, MIN_BUSY_PIECE, MIN_PIECE, RingShape
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import format_size
from oocgemm.system.memory import allocate
from oocgemm.system.threads import start

PAGE = 4096
# Maximum number of blocks per direction that have streams of their own while they are copied. The pieces of
# other blocks are on the streams of the lanes.
MAX_STREAMS = 4


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
        """Return the first bytes of the buffer as an array."""
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


class Lane:
    """The pinned buffers of one thread, and its stream for pieces that the device transposes."""

    def __init__(self, memory: Array, start: int, end: int) -> None:
        """Divide the bytes from `start` to `end` of a direction's memory into buffers."""
        self.block = -1  # number of the block that the stream has waited for
        size = (end - start) // BUFFERS
        parts = range(start, end, size)
        self._buffers = cycle([Buffer(memory[at : at + size], at) for at in parts])
        self.pending: Callable[[], None] | None = None  # finishes the latest piece

    @cached_property
    def stream(self) -> Any:
        """The lane's stream. While it copies a piece, those of other lanes transpose theirs.

        A kernel that transposes a piece starts before the thread blocks of products that are queued.
        """
        return cupy.cuda.Stream(non_blocking=True, priority=-1)

    def finish(self) -> None:
        """Finish the latest piece, if that is left to do."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def next_buffer(self) -> Buffer:
        """Return a buffer, when the latest copy from or to the buffer has ended."""
        buffer = next(self._buffers)
        buffer.wait()
        return buffer


# Issues the copy of one piece on a stream, by the means of a lane. Returns the event after the copy, and what
# is left to do when the thread has issued its next copy; None if nothing is.
_Move = Callable[[Lane, Piece, Any], tuple[Any, Callable[[], None] | None]]


class Copying:
    """A block that is being copied.

    Attributes:
        number: of the block, unique in the process.
        move: issues the copy of one piece.
        waits: events that the copies wait for.
        stream: of the copies. If `apart`, each lane uses its own stream, and this one waits for the copies.
        error: the first error of a piece. No further piece is copied then.
    """

    _numbers = count()

    def __init__(self, move: _Move, waits: Sequence[Any], stream: Any, pieces: int, *, apart: bool) -> None:
        self.number = next(self._numbers)
        self.move, self.waits, self.stream, self.apart = move, waits, stream, apart
        for event in () if apart else waits:
            cuda_calls.wait(stream, event)
        self.error: BaseException | None = None
        self._start, self._end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        self._unstarted, self._issued = iter([self._start]), 0
        self._left, self._counting, self._ended = pieces, threading.Lock(), threading.Lock()
        self._ended.acquire()

    def copy(self, lane: Lane, piece: Piece) -> None:
        """Copy one piece, by the thread of a lane. `Lane.finish` must be called afterwards."""
        late = None
        try:
            if self.error is None:
                event, late = self.move(lane, piece, self._stream_of(lane))
                if self.apart:
                    cuda_calls.wait(self.stream, event)
        except BaseException as error:
            self.error = self.error or error
        if lane.pending is not None:
            lane.finish()  # of the piece before this one
        if late is None:
            self._count()
        else:
            lane.pending = partial(self._finish, late)

    def _stream_of(self, lane: Lane) -> Any:
        """Return the stream for a piece that a lane copies. The first lane records the start."""
        stream = self.stream
        if self.apart:
            stream = lane.stream
            for event in self.waits if lane.block != self.number else ():
                cuda_calls.wait(stream, event)
            lane.block = self.number
        for start_event in self._unstarted:  # in the first thread only
            self._issued = perf_counter_ns()
            cuda_calls.record(start_event, stream)
        return stream

    def _finish(self, late: Callable[[], None]) -> None:
        """Do what is left to do for a piece."""
        try:
            if self.error is None:
                late()
        except BaseException as error:
            self.error = self.error or error
        self._count()

    def _count(self) -> None:
        """Count a piece as copied. After the last one, record the end."""
        with self._counting:
            self._left -= 1
            if self._left:
                return
        # Now, not when `work` is called: by then the stream may wait for the copies of a later block, too.
        try:
            cuda_calls.record(self._end, self.stream)
        except BaseException as error:
            self.error = self.error or error
        self._ended.release()

    def work(self) -> Work:
        """Wait until the last piece has been handed to the device; raise the first error."""
        self._ended.acquire()
        if self.error is not None:
            raise self.error
        return Work(self._start, self._issued, self._end)


class Direction:
    """The threads and lanes for copies in one direction. One more lane is for blocks of a single piece."""

    def __init__(self, device: Any, shape: RingShape, name: str) -> None:
        self._device = device
        self._memory = allocate(shape.lanes * BUFFERS * shape.piece)
        with ThreadPoolExecutor(shape.lanes) as pool:  # faults in the pages
            list(pool.map(partial(_touch, self._memory, shape.lanes), range(shape.lanes)))
        try:
            with device:
                runtime.hostRegister(self._memory.ctypes.data, self._memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            raise BackendError(
                f"the system refuses to pin {format_size(self._memory.nbytes)} of host memory ({error}): "
                "pass a smaller --host-memory, or raise ulimit -l"
            ) from error
        self._streams: list[Any] = []  # those that no block uses
        self._more = iter(range(MAX_STREAMS))  # one number for each stream that may still be created
        self._queue: SimpleQueue[tuple[Copying, Piece] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            self._start(shape, name)
        except BaseException:
            self.close()
            raise

    def _start(self, shape: RingShape, name: str) -> None:
        """Create the lanes, and start a thread for each but the last one."""
        size = BUFFERS * shape.piece
        with self._device:
            self._join = cupy.cuda.Stream(non_blocking=True)
            lanes = [Lane(self._memory, i * size, (i + 1) * size) for i in range(shape.lanes)]
        self._piece = shape.piece
        self._blocks: list[Pageable] = []  # as many as are being copied, in any order
        self._single, self._using_single = lanes.pop(), threading.Lock()
        for i, lane in enumerate(lanes):
            serve = partial(self._serve, lane)
            thread = threading.Thread(target=serve, name=f"oocgemm-{name}-{i}", daemon=True)
            start(thread)
            self._threads.append(thread)

    def begin(
        self, block: Pageable, move: _Move, waits: Sequence[Any], *, apart: bool = False
    ) -> Callable[[], Work]:
        """Begin to copy the pieces of a block. The returned function waits until the last copy is issued.

        `waits` are events that the copies wait for. If `apart`, each lane uses its own stream. The device
        must be the current one of this thread.
        """
        self._blocks.append(block)
        try:
            stream = self._free_stream()
            least = MIN_BUSY_PIECE if len(self._blocks) > 1 else MIN_PIECE
            parts = pieces(block, min(self._piece, max(least, ceil_div(block.nbytes, len(self._threads)))))
            join = self._join if stream is None else stream
            copying = Copying(move, waits, join, len(parts), apart=apart or stream is None)
            if len(parts) == 1 and self._using_single.acquire(blocking=False):
                try:
                    copying.copy(self._single, parts[0])
                    self._single.finish()
                finally:
                    self._using_single.release()
            else:
                for piece in parts:
                    self._queue.put((copying, piece))
        except BaseException:
            self._blocks.pop()
            raise
        return partial(self._end, copying)

    def _end(self, copying: Copying) -> Work:
        try:
            return copying.work()
        finally:
            self._blocks.pop()
            if copying.stream is not self._join:
                self._streams.append(copying.stream)

    def _free_stream(self) -> Any:
        """Return a stream that no block uses; None if there are too many blocks.

        On a stream that another block uses, its copies would wait for the events of both blocks.
        """
        with suppress(IndexError):
            return self._streams.pop()
        for _ in self._more:
            return cupy.cuda.Stream(non_blocking=True, priority=-1)
        return None

    def _serve(self, lane: Lane) -> None:
        with self._device:
            while True:
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    lane.finish()
                    item = self._queue.get()
                if item is None:
                    break
                copying, piece = item
                copying.copy(lane, piece)
                del item, copying  # while it waits, the thread shall keep no block alive
            lane.finish()

    def close(self) -> None:
        """Join the threads, and unpin and free the buffers. No copy may be in flight."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        unpin(self._device, self._memory)


class Ring:
    """The pinned buffers and the threads of one device. A direction gets them with its first copy."""

    def __init__(self, device: Any, shape: RingShape) -> None:
        self.shape = shape
        self._device = device
        self._opening = threading.Lock()
        self._directions: dict[str, Direction] = {}

    def upload(self, address: int, block: Pageable, waits: Sequence[Any]) -> Callable[[], Work]:
        """Begin to copy a block to a device address, once the events in `waits` have completed.

        The returned function waits until the block has been read. It raises the errors of `block.move`.
        """

        dtype, row = block.dtype, block.shape[1] * block.dtype.itemsize

        def move(lane: Lane, piece: Piece, stream: Any) -> tuple[Any, None]:
            rows, cols, at = piece
            buffer, height, width = lane.next_buffer(), rows[1] - rows[0], cols[1] - cols[0]
            block.move(rows, cols, buffer.array(dtype, height, width))
            size = width * dtype.itemsize
            _copy((address + at, row), (buffer.address, size), height, size, stream)
            return buffer.record(stream), None

        return self._direction("upload").begin(block, move, waits)

    def download(
        self, address: int, block: Pageable, waits: Sequence[Any], turn: Turn | None = None
    ) -> Callable[[], Work]:
        """Begin to copy a block from a device address, once the events in `waits` have completed.

        With `turn`, the device transposes each piece first. The returned function waits until the block has
        been written. It raises the errors of `block.move`.
        """

        dtype, row = block.dtype, block.shape[1] * block.dtype.itemsize

        def move(lane: Lane, piece: Piece, stream: Any) -> tuple[Any, Callable[[], None]]:
            rows, cols, at = piece
            buffer, height, width = lane.next_buffer(), rows[1] - rows[0], cols[1] - cols[0]
            size = width * dtype.itemsize
            if turn is None:
                source = address + at, row
            else:  # the last copy from the same place has ended, since it was one to this buffer
                source = turn(address, rows, cols, buffer.offset, stream), size
            _copy((buffer.address, size), source, height, size, stream)
            event = buffer.record(stream)

            def write() -> None:
                buffer.wait()
                block.move(rows, cols, buffer.array(dtype, height, width))

            return event, write

        return self._direction("download").begin(block, move, waits, apart=turn is not None)

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
    """Copy `height` rows of `size` bytes. Both places consist of an address and a pitch in bytes."""
    if height == 1 or to[1] == source[1]:
        cuda_calls.make(cuda_calls.copy(to[0], source[0], height * size, stream))
    else:
        cuda_calls.make(cuda_calls.copy_rows(to, source, size, height, stream))


def _touch(memory: Array, parts: int, part: int) -> None:
    size = memory.nbytes // parts
    memory[part * size : (part + 1) * size : PAGE] = np.uint8(0)
