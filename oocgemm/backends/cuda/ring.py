"""Copies blocks between pageable host memory and the device, piece by piece through a ring of pinned buffers.

Several threads work on one block. To upload, a thread copies a piece of the block into one of its pinned
buffers, and issues the copy to the device on its own stream. While the device copies, the thread fills its
next buffer. A download goes the other way. So the memory of a run does not depend on the size of its blocks,
and copies on the host and over the link overlap within a block.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.base import Array, Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.errors import BackendError
from oocgemm.planning.cost.ring import DOWNLOAD_BUFFERS, UPLOAD_BUFFERS, RingShape
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.planning.units import format_size
from oocgemm.system.memory import allocate

# A block is cut into one piece per thread, but not into smaller pieces than this many bytes, because handing
# a piece to another thread takes tens of microseconds.
MIN_PIECE = 1 << 20
PAGE = 4096
# A piece of a block: its rows, its columns, and the byte at which it starts in the block.
_Piece = tuple[Range, Range, int]
# Copies one piece: its rows and columns, a buffer for it, and its byte in the block.
_Move = Callable[["Lane", Range, Range, int], None]


class Lane:
    """The stream and the pinned buffers that one thread uses at a time."""

    def __init__(self, memory: Array, buffers: int) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        size = memory.nbytes // buffers
        self._buffers = [memory[i * size : (i + 1) * size] for i in range(buffers)]
        # Per buffer, the event after the latest copy from or to it.
        self._events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(buffers)]
        self._turn = 0

    def next_buffer(self) -> tuple[Array, Any]:
        """Return a buffer and its event, when the latest copy from or to the buffer has ended."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._events[self._turn]
        if not cuda_calls.ended(event):
            event.synchronize()
        return self._buffers[self._turn], event


class Direction:
    """The threads and lanes for copies in one direction."""

    def __init__(self, device: Any, memory: Array, threads: int, buffers: int, name: str) -> None:
        size = memory.nbytes // threads
        with device:
            lanes = [Lane(memory[i * size : (i + 1) * size], buffers) for i in range(threads)]
        self._device, self._threads = device, threads
        self._lanes: SimpleQueue[Lane] = SimpleQueue()
        for lane in lanes:
            self._lanes.put(lane)
        self._pool = ThreadPoolExecutor(threads, f"oocgemm-{name}")

    def copy(self, pieces: Sequence[_Piece], move: _Move, waits: Sequence[Any], stream: Any) -> Work:
        """Copy the pieces of a block; return when the last copy has been issued.

        Args:
            pieces: what to copy.
            move: copies one piece, on the stream of a lane.
            waits: events that the copies wait for.
            stream: the stream on which the end of all copies is recorded.
        """
        start, issued = cupy.cuda.Event(block=True), list[int]()
        unstarted, left = iter([start]), iter(pieces)

        def take() -> Any:
            """Copy pieces until none is left. Returns the event after the last copy; None without a piece."""
            done = None
            lane = self._lanes.get()
            try:
                with self._device:
                    for rows, cols, at in left:
                        if done is None:
                            for event in waits:
                                cuda_calls.wait(lane.stream, event)
                            done = cupy.cuda.Event(block=True, disable_timing=True)
                        for begin in unstarted:  # of one thread, and once
                            issued.append(perf_counter_ns())
                            cuda_calls.record(begin, lane.stream)
                        move(lane, rows, cols, at)
                    if done is not None:
                        cuda_calls.record(done, lane.stream)
            except BaseException:
                deque(left, maxlen=0)  # empties the iterator: the other threads start no further piece
                raise
            finally:
                self._lanes.put(lane)
            return done

        if len(pieces) == 1:
            ends = [take()]
        else:
            futures = [self._pool.submit(take) for _ in range(min(self._threads, len(pieces)))]
            wait(futures)
            ends = [future.result() for future in futures]
        for event in ends:
            if event is not None:
                cuda_calls.wait(stream, event)
        end = cupy.cuda.Event(block=True)
        cuda_calls.record(end, stream)
        return Work(start, issued[0], end)

    def close(self) -> None:
        """Join the threads. No copy may be in flight."""
        self._pool.shutdown(wait=True)


class Ring:
    """The pinned buffers and the threads of one device. `close` frees them."""

    def __init__(self, device: Any, shape: RingShape) -> None:
        """Pin no memory yet: each direction gets its buffers with its first copy."""
        self.shape = shape
        self._device = device
        self._opening = threading.Lock()
        self._memory: list[Array] = []
        self._up: Direction | None = None
        self._down: Direction | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(memory.nbytes for memory in self._memory)

    def upload(self, address: int, block: Pageable, waits: Sequence[Any], stream: Any) -> Work:
        """Copy a block to a device address, once the events in `waits` have completed.

        Returns when the block has been read. Raises the errors of `block.move`.
        """
        with self._opening:
            if self._up is None:
                self._up = self._open(UPLOAD_BUFFERS, "upload")

        def move(lane: Lane, rows: Range, cols: Range, at: int) -> None:
            buffer, event = lane.next_buffer()
            part = _view(buffer, block, rows, cols)
            block.move(rows, cols, part)
            cuda_calls.make(cuda_calls.copy(address + at, part.ctypes.data, part.nbytes, lane.stream))
            cuda_calls.record(event, lane.stream)

        return self._up.copy(self._pieces(block), move, waits, stream)

    def download(self, address: int, block: Pageable, waits: Sequence[Any], stream: Any) -> Work:
        """Copy a block from a device address, once the events in `waits` have completed.

        Returns when the block has been written. Raises the errors of `block.move`.
        """
        with self._opening:
            if self._down is None:
                self._down = self._open(DOWNLOAD_BUFFERS, "download")

        def move(lane: Lane, rows: Range, cols: Range, at: int) -> None:
            buffer, event = lane.next_buffer()
            part = _view(buffer, block, rows, cols)
            cuda_calls.make(cuda_calls.copy(part.ctypes.data, address + at, part.nbytes, lane.stream))
            cuda_calls.record(event, lane.stream)
            event.synchronize()
            block.move(rows, cols, part)

        return self._down.copy(self._pieces(block), move, waits, stream)

    def _open(self, buffers: int, name: str) -> Direction:
        """Allocate and pin the buffers of one direction."""
        threads = self.shape.threads
        memory = allocate(threads * buffers * self.shape.piece)
        with ThreadPoolExecutor(threads) as pool:  # faults in the pages
            list(pool.map(partial(_touch, memory), range(threads), [threads] * threads))
        try:
            with self._device:
                runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            raise BackendError(
                f"the system refuses to pin {format_size(memory.nbytes)} of host memory ({error}): "
                "pass a smaller --host-memory, or raise ulimit -l"
            ) from error
        self._memory.append(memory)
        return Direction(self._device, memory, threads, buffers, name)

    def _pieces(self, block: Pageable) -> list[_Piece]:
        """Cut a block into pieces of whole rows, or of parts of a row, that fit into a buffer."""
        (rows, cols), itemsize = block.array.shape, block.array.itemsize
        row = cols * itemsize
        size = min(self.shape.piece, max(MIN_PIECE, ceil_div(rows * row, self.shape.threads)))
        return list(_cut(rows, cols, row, max(1, size // row), max(1, size // itemsize)))

    def close(self) -> None:
        """Join the threads, and unpin and free the buffers. No copy may be in flight."""
        for direction in (self._up, self._down):
            if direction is not None:
                direction.close()
        with self._device:
            while self._memory:
                runtime.hostUnregister(self._memory.pop().ctypes.data)


def _cut(rows: int, cols: int, row: int, height: int, width: int) -> Iterator[_Piece]:
    width = cols if height > 1 else min(width, cols)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            span = (top, min(top + height, rows)), (left, min(left + width, cols))
            yield *span, top * row + left * (row // cols)


def _view(buffer: Array, block: Pageable, rows: Range, cols: Range) -> Array:
    shape = rows[1] - rows[0], cols[1] - cols[0]
    dtype = block.array.dtype.newbyteorder("=")
    return buffer[: shape[0] * shape[1] * dtype.itemsize].view(dtype).reshape(shape)


def _touch(memory: Array, part: int, parts: int) -> None:
    size = memory.nbytes // parts
    memory[part * size : (part + 1) * size : PAGE] = np.uint8(0)
