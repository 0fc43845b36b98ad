"""The pinned buffers of the threads of the ring, and the blocks that they copy together (`ring`)."""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count, cycle
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.backends.cuda.pieces import Piece
from oocgemm.planning.cost.footprint import BUFFERS


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
        self._buffers = [Buffer(memory[at : at + size], at) for at in parts]
        self._turns = cycle(self._buffers)
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

    def drain(self) -> None:
        """Wait until all copies from and to the buffers have ended."""
        for buffer in self._buffers:
            buffer.wait()

    def next_buffer(self) -> Buffer:
        """Return a buffer, when the latest copy from or to the buffer has ended."""
        buffer = next(self._turns)
        buffer.wait()
        return buffer


# Issues the copy of one piece on a stream, by the means of a lane. Returns the event after the copy, and what
# is left to do when the thread has issued its next copy; None if nothing is.
Move = Callable[[Lane, Piece, Any], tuple[Any, Callable[[], None] | None]]


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

    def __init__(
        self,
        move: Move,
        waits: Sequence[Any],
        stream: Any,
        pieces: int,
        ended: Callable[[], object],
        *,
        apart: bool,
    ) -> None:
        """Prepare to copy a number of pieces. `ended` is called when all of them have been copied."""
        self.number = next(self._numbers)
        self.move, self.waits, self.stream, self.apart = move, waits, stream, apart
        for event in () if apart else waits:
            cuda_calls.wait(stream, event)
        self.error: BaseException | None = None
        self._start, self._end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        self._unstarted, self._issued = iter([self._start]), 0
        self._counting, self._when_ended = threading.Lock(), ended
        self._unissued = self._unfinished = pieces
        # They are held until all copies have been issued, and until all pieces are finished.
        self._issuing, self._finishing = threading.Lock(), threading.Lock()
        self._issuing.acquire()
        self._finishing.acquire()

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
        self._count_issued()
        if lane.pending is not None:
            lane.finish()  # of the piece before this one
        if late is None:
            self._count_finished()
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
        self._count_finished()

    def _count_issued(self) -> None:
        """Count a piece as issued. After the last one, record the end of the copies."""
        with self._counting:
            self._unissued -= 1
            if self._unissued:
                return
        # Now, not when `work` is called: by then the stream may wait for the copies of a later block, too.
        try:
            cuda_calls.record(self._end, self.stream)
        except BaseException as error:
            self.error = self.error or error
        self._issuing.release()

    def _count_finished(self) -> None:
        with self._counting:
            self._unfinished -= 1
            if self._unfinished:
                return
        self._when_ended()
        self._finishing.release()

    def work(self) -> Work:
        """Wait until the last piece has been handed to the device; raise the first error.

        The host may still have to write pieces: the returned `Work.finish` waits for that.
        """
        with self._issuing:
            if self.error is not None:
                self._wait()
            return Work(self._start, self._issued, self._end, self._wait)

    def _wait(self) -> None:
        """Wait until all pieces are finished; raise the first error."""
        with self._finishing:
            if self.error is not None:
                raise self.error
