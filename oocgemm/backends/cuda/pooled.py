"""Copies blocks of arrays with contiguous rows by compiled threads, through the buffers of the ring (`ring`).

They need no GIL. So pieces may be small: the device gets the first one sooner, and the last one of a download
takes the host less time.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from oocgemm.backends.base import Array
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.planning.cost.ring import BUFFERS, COMPILED_PIECE, MARK, MIN_COMPILED_PIECE, PAGE, RingShape
from oocgemm.planning.tiling import ceil_div, round_up
from oocgemm.system.pool import DRIVER, Pool, available, error_of, memory_block, row_pieces

# A block is cut into at least this many pieces per thread, unless they would be too small.
PIECES_PER_THREAD = 2
# Maximum number of blocks per direction that have streams of their own while they are copied.
MAX_STREAMS = 4


class CompiledThreads:
    """The compiled threads of one direction, and the blocks that they copy."""

    def __init__(self, memory: Array, shape: RingShape, *, uploads: bool) -> None:
        """Start all threads but the last one of a ring with one direction.

        `memory` is pinned. It begins with the buffers, and ends with their marks. The device of the copies
        must be the current one.
        """
        start, threads = memory.ctypes.data, (shape.lanes - 1, BUFFERS)
        driver = [cuda_calls.address(name) for name in DRIVER]
        places = start, shape.piece, start + shape.lanes * BUFFERS * shape.piece
        self._pool = Pool(driver, cuda_calls.context(), places, threads, uploads=uploads)
        self.take, self.give = self._pool.take, self._pool.give
        self._shape, self._uploads = shape, uploads
        self._copied = list[PooledCopying]()  # blocks that may still be being copied
        self._streams, self._choosing = list[Any](), threading.Lock()

    @staticmethod
    def possible(memory: Array, stream: Any) -> bool:
        """Return whether there is compiled code, and the device can write marks to the end of `memory`."""
        return available() and cuda_calls.writes_values(memory[-MARK:].ctypes.data, stream)

    def begin(self, address: int, array: Array, waits: Sequence[Any]) -> Callable[[], Work]:
        """Begin to copy an array to or from a device address, once the events in `waits` have completed.

        The returned function waits until the last copy is issued.
        """
        with self._choosing:
            # What is being copied must stay in memory, even if nobody waits for it.
            self._copied = [copying for copying in self._copied if not copying.ended]
            stream = self._stream()
            copying = PooledCopying(
                self._pool, array, address, stream, waits, self._shape, uploads=self._uploads
            )
            self._copied.append(copying)
        return copying.work

    def _stream(self) -> Any:
        """Return the stream of the fewest blocks.

        On a stream that another block uses, copies wait for the events of both blocks.
        """
        used = [sum(copying.stream is stream for copying in self._copied) for stream in self._streams]
        if min(used, default=1) and len(used) < MAX_STREAMS:
            self._streams.append(cupy.cuda.Stream(non_blocking=True, priority=-1))
            return self._streams[-1]
        return self._streams[used.index(min(used))]

    def close(self) -> None:
        """End the threads. No block may be in flight."""
        self._pool.close()
        self._copied.clear()


class PooledCopying:
    """A block that the threads of a pool are copying.

    Attributes:
        stream: of the copies.
    """

    def __init__(
        self,
        pool: Pool,
        array: Array,
        address: int,
        stream: Any,
        waits: Sequence[Any],
        shape: RingShape,
        *,
        uploads: bool,
    ) -> None:
        """Begin to copy an array to or from a device address, once the events in `waits` have completed."""
        self.stream, self._pool, self._uploads = stream, pool, uploads
        for event in waits:
            cuda_calls.wait(stream, event)
        self._start, self._end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        cuda_calls.record(self._start, stream)
        size = max(MIN_COMPILED_PIECE, ceil_div(array.nbytes, (shape.lanes - 1) * PIECES_PER_THREAD))
        size = min(shape.piece, COMPILED_PIECE, round_up(size, PAGE))
        pieces = row_pieces(array.shape[0], array.shape[1] * array.itemsize, size)
        self._block = memory_block(array, pieces, address, uploads=uploads)
        pool.begin(self._block, stream.ptr, self._end.ptr)

    def work(self) -> Work:
        """Wait until the last copy has been issued; raise the first error.

        After a download, `Work.finish` waits until the array has been written.
        """
        self._pool.wait_issued(self._block)
        if self._uploads or self._block.error:
            self._finish()
        return Work(self._start, self._block.issued_at, self._end, self._finish)

    def _finish(self) -> None:
        self._pool.wait_finished(self._block)
        self._block.owned = ()  # the copying is remembered until the next one
        if error := error_of(self._block):
            raise error
        cuda_calls.check(self._block.error)

    @property
    def ended(self) -> bool:
        """Whether all pieces have been copied."""
        return self._pool.is_finished(self._block)
