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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.base import Array, Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.backends.cuda.lanes import Copying, Lane, Move
from oocgemm.backends.cuda.pieces import Piece, pieces
from oocgemm.backends.cuda.pinned import unpin
from oocgemm.backends.cuda.pooled import MAX_STREAMS, CompiledThreads, PooledCopying
from oocgemm.backends.cuda.turner import Turn
from oocgemm.errors import BackendError
from oocgemm.planning.cost.footprint import BUFFERS, MIN_BUSY_PIECE, MIN_PIECE, RingShape
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import format_size
from oocgemm.system.resources import allocate
from oocgemm.system.threads import start

PAGE = 4096


class Direction:
    """The threads and lanes for copies in one direction. One more lane is for blocks of a single piece."""

    def __init__(self, device: Any, shape: RingShape, name: str) -> None:
        self._device = device
        self._memory = allocate(shape.bytes // 2)
        with ThreadPoolExecutor(shape.lanes) as pool:  # faults in the pages
            list(pool.map(partial(_touch, self._memory, shape.lanes), range(shape.lanes)))
        try:
            with device:
                runtime.hostRegister(self._memory.ctypes.data, self._memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            raise BackendError(
                f"the system refuses to pin {format_size(self._memory.nbytes)} of host memory ({error}): "
                "pass a smaller --host-memory (or --memory), or raise ulimit -l"
            ) from error
        self._streams: list[Any] = []  # those that no block uses
        self._more = iter(range(MAX_STREAMS))  # one number for each stream that may still be created
        self._queue: SimpleQueue[tuple[Copying, Piece] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.compiled: CompiledThreads | None = None
        try:
            self._start(shape, name)
        except BaseException:
            self.close()
            raise

    def _start(self, shape: RingShape, name: str) -> None:
        """Create the lanes, and start the compiled threads, if there are any, or Python's."""
        size = BUFFERS * shape.piece
        with self._device:
            self._join = cupy.cuda.Stream(non_blocking=True)
            self._lanes = [Lane(self._memory, i * size, (i + 1) * size) for i in range(shape.lanes)]
        self._piece, self._name, self._starting = shape.piece, name, threading.Lock()
        self._blocks: list[Pageable] = []  # as many as Python's threads are copying, in any order
        self._single, self._using_single = self._lanes.pop(), threading.Lock()
        with self._device:
            if CompiledThreads.possible(self._memory, self._join):
                self.compiled = CompiledThreads(self._memory, shape, uploads=name == "upload")
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

    def begin(
        self, block: Pageable, move: Move, waits: Sequence[Any], *, apart: bool = False
    ) -> Callable[[], Work]:
        """Begin to copy the pieces of a block. The returned function waits until the last copy is issued.

        `waits` are events that the copies wait for. If `apart`, each lane uses its own stream. The device
        must be the current one of this thread.
        """
        self._blocks.append(block)
        try:
            stream = self._free_stream()
            least = MIN_BUSY_PIECE if len(self._blocks) > 1 else MIN_PIECE
            parts = pieces(block, min(self._piece, max(least, ceil_div(block.nbytes, len(self._lanes)))))
            join = self._join if stream is None else stream
            ended, apart = partial(self._ended, stream), apart or stream is None
            copying = Copying(move, waits, join, len(parts), ended, apart=apart)
        except BaseException:
            self._blocks.pop()
            raise
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

    def _ended(self, stream: Any) -> None:
        """Note that a block has been copied, whose copies were on a stream; None if on those of the lanes."""
        self._blocks.pop()
        if stream is not None:
            self._streams.append(stream)

    def _free_stream(self) -> Any:
        """Return a stream that no block uses; None if there are too many blocks.

        On a stream that another block uses, its copies would wait for the events of both blocks.
        """
        with suppress(IndexError):
            return self._streams.pop()
        for _ in self._more:
            return cupy.cuda.Stream(non_blocking=True, priority=-1)
        return None

    def _serve(self, number: int) -> None:
        lane = self._lanes[number]
        with self._device:
            while (item := self._queue.get()) is not None:
                with self._using(number):
                    while item is not None:
                        copying, piece = item
                        copying.copy(lane, piece)
                        del copying  # while it waits, the thread shall keep no block alive
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
        direction, dtype = self._direction("upload"), block.dtype
        copied = None
        if direction.compiled is not None and (block.memory is not None or block.stored is not None):
            copied = direction.compiled.begin(address, block, waits)
        row = block.shape[1] * dtype.itemsize

        def move(lane: Lane, piece: Piece, stream: Any) -> tuple[Any, None]:
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
        """Wait until an upload from files is issued. If compiled code cannot read a piece, Python reads all.

        Python can read more. Or it raises an error that says what is wrong.
        """
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
        to the ring is issued. `Work.finish` of its result waits until the block has been written, and raises
        the errors of `block.move`. So the device may overwrite the block while the host still writes.
        """
        direction, dtype = self._direction("download"), block.dtype
        if block.memory is not None and turn is None and direction.compiled is not None:
            return direction.compiled.begin(address, block, waits).work
        row = block.shape[1] * dtype.itemsize

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

        return direction.begin(block, move, waits, apart=turn is not None)

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
