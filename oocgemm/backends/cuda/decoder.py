"""Decodes compressed chunks of an operand on the device, into its panels.

Each lane has a thread, a stream and memory for a batch of chunks, in pinned host memory and on the device.
The thread reads the stored chunks of a batch into host memory. It enqueues the copy of the chunks to the
device, the kernels that decode them (`oocgemm.backends.cuda.unpacker`), and the kernel `place`, which
composes the panel. The lanes work at the same time, so that reads, copies and decoding overlap, and enough
streams are decoded at once.

A lane waits for its batch and checks what the decoder reports. So no operation starts that uses a panel with
damaged data. The host decodes the chunks for which the decoder reports an error, and those whose frames it
could not have decoded: this raises the error of a damaged chunk.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.base import Array
from oocgemm.backends.compressed import Compressed
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import RING, Clock, CudaToken, Work
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.pinned import unpin
from oocgemm.backends.cuda.unpacker import Unpacker
from oocgemm.errors import BackendError
from oocgemm.planning.cost.coding import DecodingShape
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.planning.units import format_size
from oocgemm.stores.compressors import NO_ROOM, Fetched
from oocgemm.system.resources import allocate

# Fields of a chunk in the table for the kernel `place`, of eight bytes each. Maximum chunks of a batch.
FIELDS, MAX_CHUNKS = 14, 8192
# Elements that a thread block of the kernel `place` composes.
_ELEMENTS = 16 << 10
PAGE = 4096


class Lane:
    """The memory and the stream of one thread."""

    def __init__(self, shape: DecodingShape, memory: Array, device: int) -> None:
        """`memory` is pinned; `device` is the address of the lane's memory on the device."""
        self.shape = shape
        # Its blocks start before those of a Multiply that is running.
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.frames, self.tables = memory[: shape.frames], memory[shape.frames :]
        self.to_frames = device
        self.to_content = self.to_frames + shape.frames
        self.to_tables = device + shape.lane_bytes - shape.tables
        self.to_temporary = self.to_tables - shape.temporary


class Decoder:
    """The lanes of one device."""

    def __init__(self, device: Any, shape: DecodingShape, address: int, kernels: Kernels) -> None:
        """Pin the host memory, and start the threads.

        `address` is that of `shape.device_bytes` of device memory. The device must be the current one.

        Raises:
            BackendError: the system refuses to pin memory.
        """
        self._device, self._kernels, self._shape = device, kernels, shape
        self._unpacker = Unpacker(kernels, shape)
        size = shape.frames + shape.tables
        self._memory = allocate(shape.lanes * size)
        self._pool = ThreadPoolExecutor(shape.lanes, thread_name_prefix="oocgemm-decode")
        self._lanes: SimpleQueue[Lane] = SimpleQueue()
        self._on_host_turn = threading.Lock()
        self._join, self._joining = cupy.cuda.Stream(non_blocking=True), threading.Lock()
        try:
            list(self._pool.map(partial(self._touch, size), range(shape.lanes)))
            runtime.hostRegister(self._memory.ctypes.data, self._memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            self._pool.shutdown()
            raise BackendError(
                f"the system refuses to pin {format_size(self._memory.nbytes)} of host memory ({error}): "
                "pass a smaller --host-memory (or --memory), or raise ulimit -l"
            ) from error
        for i in range(shape.lanes):
            part = self._memory[i * size : (i + 1) * size]
            self._lanes.put(Lane(shape, part, address + i * shape.lane_bytes))

    def _touch(self, size: int, lane: int) -> None:
        self._memory[lane * size : (lane + 1) * size : PAGE] = np.uint8(0)

    def upload(
        self, address: int, block: Compressed, waits: Sequence[Any], clock: Clock
    ) -> Callable[[], CudaToken]:
        """Begin to decode a block to a device address, once the events in `waits` have completed.

        The returned function waits until the block has been decoded, and raises the errors of `block.move`.
        """
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        issued = perf_counter_ns()
        with self._joining:
            cuda_calls.record(start, self._join)
        decode = partial(self._decode, address, block, waits)
        futures: list[Future[int]] = [self._pool.submit(decode, *part) for part in self._batches(block)]

        def ended() -> CudaToken:
            try:
                copied = sum(future.result() for future in futures)
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
            with self._joining:
                cuda_calls.record(end, self._join)
            return CudaToken(RING, Work(start, issued, end), end, clock, bytes=copied)

        return ended

    def _batches(self, block: Compressed) -> Iterator[tuple[Range, Range]]:
        """Cut a block along borders of chunks into batches."""
        chunk, itemsize = block.chunk, block.dtype.itemsize
        most = max(1, min(MAX_CHUNKS, self._shape.batch // (chunk[0] * chunk[1] * itemsize)))
        across = ceil_div(block.origin[1] + block.shape[1], chunk[1])
        wide = min(most, across)
        for rows in _cuts(block.shape[0], block.origin[0], chunk[0] * max(1, most // across)):
            for cols in _cuts(block.shape[1], block.origin[1], chunk[1] * wide):
                yield rows, cols

    def _decode(self, address: int, block: Compressed, waits: Sequence[Any], rows: Range, cols: Range) -> int:
        """Decode a batch, the chunks of some rows and columns of a block. Return the bytes that were copied.

        Runs in a thread of the pool.
        """
        lane = self._lanes.get()
        try:
            with self._device, lane.stream:
                return self._decode_by(lane, address, block, waits, rows, cols)
        finally:
            self._lanes.put(lane)

    def _decode_by(
        self, lane: Lane, address: int, block: Compressed, waits: Sequence[Any], rows: Range, cols: Range
    ) -> int:
        fetched, stream = block.fetch(rows, cols, lane.frames), lane.stream
        if len(fetched) > 1 and any(each.size == NO_ROOM for each in fetched):
            return sum(
                self._decode_by(lane, address, block, waits, *half) for half in _halves(block, rows, cols)
            )
        size = max(0, *(each.start + each.size + 4 * each.checksum for each in fetched))
        if size:
            cuda_calls.make(cuda_calls.copy(lane.to_frames, lane.frames.ctypes.data, size, stream))
        for number in np.flatnonzero(self._unpack(lane, block, fetched, address, waits)):
            size += self._on_host(lane, address, block, fetched[int(number)], waits)
        return size

    def _unpack(
        self, lane: Lane, block: Compressed, fetched: Sequence[Fetched], address: int, waits: Sequence[Any]
    ) -> Array:
        """Decode chunks, which are on the device as they are stored, into the panel.

        Returns for each chunk whether the host must decode it.
        """
        chunks, count = self._fill(lane, fetched, block), len(fetched)
        table = chunks, count, any(each.checksum for each in fetched)
        room = lane.to_content, lane.to_temporary, lane.to_tables
        size = block.chunk[0] * block.chunk[1] * block.dtype.itemsize
        streams, statuses = self._unpacker.decode(block.codec, table, size, room, lane.stream)
        failed = lane.tables[: 4 * count]
        cuda_calls.make(cuda_calls.copy(failed.ctypes.data, statuses, failed.nbytes, lane.stream))
        for event in waits:
            cuda_calls.wait(lane.stream, event)
        grid = max(1, ceil_div(block.chunk[0] * block.chunk[1], _ELEMENTS)), count, 1
        place = self._kernels.plain("place", "place", (f"-DOOC_ITEM={block.dtype.itemsize}",))
        place(grid, _pointer(streams), _pointer(chunks), _long(block.shape[1]), _pointer(address))
        lane.stream.synchronize()
        found: Array = failed.view(np.int32) != 0
        return found

    def _fill(self, lane: Lane, fetched: Sequence[Fetched], block: Compressed) -> int:
        """Enqueue to copy the table of the chunks to the device. Return its address there.

        The kernel `frames` completes it.
        """
        chunk, itemsize, pitch = block.chunk, block.dtype.itemsize, block.shape[1]
        table = lane.tables[-8 * FIELDS * len(fetched) :].view(np.int64).reshape(-1, FIELDS)
        table[:, 4:] = [
            (chunk[0] * chunk[1] * itemsize, chunk[1], *each.corner, each.rows[1] - each.rows[0],
             each.cols[1] - each.cols[0], each.rows[0] * pitch + each.cols[0], lane.to_frames + each.start,
             max(0, each.size), each.checksum) for each in fetched
        ]  # fmt: skip
        to = lane.to_tables + self._shape.tables - table.nbytes
        cuda_calls.make(cuda_calls.copy(to, table.ctypes.data, table.nbytes, lane.stream))
        return to

    def _on_host(
        self, lane: Lane, address: int, block: Compressed, part: Fetched, waits: Sequence[Any]
    ) -> int:
        """Decode a chunk on the host, in the memory of an idle lane, and copy it to the device."""
        (r0, r1), (c0, c1) = part.rows, part.cols
        height, width = r1 - r0, (c1 - c0) * block.dtype.itemsize
        found = lane.frames[: height * width].view(block.dtype).reshape(height, c1 - c0)
        with self._on_host_turn:  # the budget has scratch memory for one such chunk
            block.move(part.rows, part.cols, found)
        for event in waits:
            cuda_calls.wait(lane.stream, event)
        row = block.shape[1] * block.dtype.itemsize
        onto = address + r0 * row + c0 * block.dtype.itemsize, row
        copy = cuda_calls.copy_rows(onto, (found.ctypes.data, width), width, height, lane.stream)
        cuda_calls.make(copy)
        lane.stream.synchronize()
        return height * width

    def close(self) -> None:
        """Join the threads, and unpin and free the host memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with suppress(Exception):  # after an error on the device, every call raises
            runtime.deviceSynchronize()
        unpin(self._device, self._memory)


def _cuts(extent: int, origin: int, step: int) -> list[Range]:
    """Cut an axis of a block at multiples of `step` from the start of the chunk with its first index.

    `origin` is the position of the first index in this chunk.

    >>> _cuts(10, 3, 4)
    [(0, 1), (1, 5), (5, 9), (9, 10)]
    """
    return [(max(0, at), min(extent, at + step)) for at in range(-origin, extent, step)]


def _halves(block: Compressed, rows: Range, cols: Range) -> list[tuple[Range, Range]]:
    """Cut a batch of several chunks into two, between chunks."""
    (high, wide), (top, left) = block.chunk, block.origin
    first, end = ((top + at) // high for at in (rows[0], rows[1] - 1))
    if first < end:
        middle = (first + end + 1) // 2 * high - top
        return [((rows[0], middle), cols), ((middle, rows[1]), cols)]
    first, end = ((left + at) // wide for at in (cols[0], cols[1] - 1))
    middle = (first + end + 1) // 2 * wide - left
    return [(rows, (cols[0], middle)), (rows, (middle, cols[1]))]


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
