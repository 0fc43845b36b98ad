"""Copies arrays with contiguous rows, or blocks of files, by compiled threads through buffers of the ring.

They need no GIL. So pieces may be small: the device gets the first one sooner, and the last one of a download
takes the host less time.
"""

import threading
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array, Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.backends.cuda.pieces import pieces
from oocgemm.planning.cost.footprint import (
    BUFFERS,
    MARKS,
    MAX_COMPILED_PIECE,
    MIN_COMPILED_PIECE,
    MIN_STORED_PIECE,
    PAGE,
    RingShape,
)
from oocgemm.planning.tiling import ceil_div, round_up
from oocgemm.system.pool import (
    DRIVER,
    Block,
    Pool,
    available,
    error_of,
    memory_block,
    row_pieces,
    stored_block,
)

# A block is cut into FEW_PIECES pieces per thread, if these have at most LARGE_PIECE bytes, so that the link
# copies soon. Else it is cut into MANY_PIECES per thread, but not into smaller pieces than that.
FEW_PIECES, LARGE_PIECE, MANY_PIECES = 2, 1 << 20, 8
# Maximum number of pieces of a thread that are in flight. Downloads drain a strip of C from the device, while
# threads still write the one before.
UPLOADING, DOWNLOADING = 2, 8
# Maximum number of blocks per direction that have streams of their own while they are copied.
MAX_STREAMS = 4


class CompiledThreads:
    """The compiled threads of one direction, and the blocks that they copy."""

    def __init__(self, memory: Array, shape: RingShape, *, uploads: bool) -> None:
        """Start all threads but the last one of a ring with one direction.

        `memory` is pinned. It begins with the buffers, and ends with their marks. The device of the copies
        must be the current one.
        """
        driver = [cuda_calls.address(name) for name in DRIVER]
        lane, start = BUFFERS * shape.piece, memory.ctypes.data
        self._most = min(shape.piece, MAX_COMPILED_PIECE)
        size = 2 * self._most if uploads else lane
        places = start, lane, size, start + shape.lanes * lane
        threads = shape.lanes - 1, UPLOADING if uploads else DOWNLOADING
        self._pool = Pool(driver, cuda_calls.context(), places, threads, uploads=uploads)
        self.take, self.give = self._pool.take, self._pool.give
        self._threads, self._uploads = threads[0], uploads
        self._copied = list[PooledCopying]()  # blocks that may still be being copied
        self._streams, self._choosing = list[Any](), threading.Lock()

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
        with self._choosing:
            # What is being copied must stay in memory, even if nobody waits for it.
            self._copied = [copying for copying in self._copied if not copying.ended]
            block, stream = self._block(address, given), self._stream()
            copying = PooledCopying(self._pool, block, stream, waits, uploads=self._uploads)
            self._copied.append(copying)
        return copying

    def _block(self, address: int, given: Pageable) -> Block:
        """Cut a block into pieces."""
        itemsize = given.dtype.itemsize
        row_bytes = given.shape[1] * itemsize
        if given.memory is not None:
            cut = row_pieces(given.shape[0], row_bytes, self._piece(given.nbytes))
            return memory_block(given.memory, cut, address, uploads=self._uploads)
        assert given.stored is not None
        chunks, corner = given.stored.chunks, (given.stored.row, given.stored.left)
        size = round_up(max(MIN_STORED_PIECE, ceil_div(given.nbytes, FEW_PIECES * self._threads)), PAGE)
        found = [
            (top, end - top, left * itemsize, (right - left) * itemsize)
            for (top, end), (left, right), _ in pieces(given, min(self._most, size))
        ]
        block = stored_block(chunks.address, corner, np.array(found, np.uintp), address, row_bytes)
        block.owned += (chunks,)
        return block

    def _piece(self, size: int) -> int:
        """Return the maximum bytes of a piece of a block of `size` bytes."""
        small = ceil_div(size, FEW_PIECES * self._threads)
        piece = min(small, max(LARGE_PIECE, ceil_div(size, MANY_PIECES * self._threads)))
        return min(self._most, round_up(max(MIN_COMPILED_PIECE, piece), PAGE))

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
        end: the event after the last one.
    """

    def __init__(self, pool: Pool, block: Block, stream: Any, waits: Sequence[Any], *, uploads: bool) -> None:
        """Begin to copy a block once the events in `waits` have completed."""
        self.stream, self._pool, self._uploads = stream, pool, uploads
        for event in waits:
            cuda_calls.wait(stream, event)
        self._start, self.end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        cuda_calls.record(self._start, stream)
        self._block = block
        pool.begin(self._block, stream.ptr, self.end.ptr)

    def work(self) -> Work:
        """Wait until the last copy has been issued; raise the first error.

        After a download, `Work.finish` waits until the array has been written.
        """
        self._pool.wait_issued(self._block)
        if self._uploads or self._block.error:
            self._finish()
        return Work(self._start, self._block.issued_at, self.end, self._finish)

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
