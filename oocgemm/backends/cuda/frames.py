"""Decodes and encodes compressed chunks on the device.

*Decoding* an operand: each lane has a thread, a stream and memory for a batch of chunks, in pinned host
memory and on the device. The thread reads the stored chunks of a batch into host memory. It enqueues the copy
of the chunks to the device, the kernels of `kernels/decoding`, which decode zstd, blosc-zstd and blosc-lz4,
and the kernel `place`, which composes the panel. The lanes work at the same time, so that reads, copies and
decoding overlap, and enough streams are decoded at once.

The kernels check all that they read. (nvCOMP never ends on many damaged streams of zstd, and does not see all
damage of LZ4.) The kernels find the streams of a batch, because finding them on the host would take as
long as reading them. They decode the blocks of one zstd stream in parallel. A lane waits for its batch and
checks what the decoder reports. So no operation starts that uses a panel with damaged data. The host decodes
the chunks for which the decoder reports an error, and the chunks whose frames it cannot decode. If a chunk is
damaged, the host raises the error.

Lines of a sparse matrix are stored as entries, not in frames. The kernel `scatter` composes the panel of
them, so that nothing is decoded.

*Encoding* C: the kernels of `kernels/encoding` compress the chunks of a strip. They run on the stream of
Downloads, instead of a copy, and write the frames to the pinned host slot of the strip. So only compressed
bytes cross the link, and the host need not know in advance how many.
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

from oocgemm.backends.base import Array, Compressed
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import RING, Clock, CudaToken, Work
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.pageable import cuts
from oocgemm.kernels.launches import DeviceStrip, batches, shuffle_blocks
from oocgemm.kernels.spec import Launch
from oocgemm.planning import Operation, Plan, division_of
from oocgemm.planning.cost.coding import COMPRESSORS, DecodingShape, decoded
from oocgemm.planning.tiling import Range, ceil_div, length
from oocgemm.stores.codecs import NO_ROOM, NUMBERS, Codec, Fetched, entries_at

# Bytes of structures of `kernels/decoding/streams.cuh`, and minimum mean bytes of a block's content.
_STREAM, _BLOCK, _COUNTERS, _MIN_BLOCK = 40, 112, 32, 2 << 10
# Number of warps per multiprocessor that decode, and bytes of content that keep one warp busy.
_WARPS, _PER_WARP = 24, 32 << 10
# Blocks of the kernel `crc32c` per chunk.
_PARTS = 8
_KERNELS = (
    *(
        ("crc32c", "crc32c"),
        ("frames", "frames"),
        ("zstd", "zstd_walk"),
        ("zstd", "zstd_entropy"),
        ("lz4", "lz4_parse"),
    ),
    ("execute", "execute"),
)


class Batch(ctypes.Structure):
    """The argument of the kernels, `batch_t` of `streams.cuh`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "chunks", "statuses", "counters", "pointers", "streams", "blocks", "sequences", "literals",
            "content", "max_sequences", "max_literals",
        )),
        *((name, ctypes.c_uint32) for name in (
            "count", "max_streams", "max_blocks", "chunk", "itemsize", "compressor",
        )),
    )  # fmt: skip


class Unpacker:
    """Launches the decoding kernels on one device, with the memory of a lane of a given shape."""

    def __init__(self, kernels: Kernels, shape: DecodingShape) -> None:
        self._shape = shape
        self._warps = _WARPS * kernels.device.processors
        self._kernels = {entry: kernels.plain(source, entry, ()) for source, entry in _KERNELS}

    def decode(
        self,
        codec: Codec,
        chunks: tuple[int, int, bool],
        chunk: int,
        lane: tuple[int, int, int],
        stream: Any,
    ) -> tuple[int, int]:
        """Enqueue the kernels that decode a batch on `stream`, which must be the current one.

        `chunks` are the device address of the chunks' table, the number of chunks, and whether some have
        checksums. `chunk` is the bytes of a decoded chunk. `lane` has the device addresses of the lane's
        content, temporary memory and tables.

        Returns the device addresses of two tables: the contents of the streams, and the status of each chunk
        in four bytes.
        """
        shape, (content, temporary, tables) = self._shape, lane
        table, count, checksums = chunks
        most = shape.streams
        streams = tables + 8 * most
        counters = streams + _STREAM * most
        statuses = counters + _COUNTERS
        blocks = shape.batch // _MIN_BLOCK + count
        literals = temporary + _BLOCK * blocks
        sequences = literals + ceil_div(shape.batch, 8) * 8
        given = Batch(
            *(table, statuses, counters, tables, streams, temporary, sequences, literals, content),
            *((temporary + shape.temporary - sequences) // 8, shape.batch),
            *(count, most, blocks, chunk, codec.itemsize, NUMBERS[codec.compressor] if codec.blosc else 0),
        )
        cuda_calls.make(cuda_calls.fill(counters, _COUNTERS + 4 * count, stream))
        warps = max(1, min(self._warps, ceil_div(count * chunk, _PER_WARP)))
        finding = {"lz4_parse": warps} if codec.compressor == "lz4" else {
            "zstd_walk": ceil_div(warps, 4), "zstd_entropy": warps,
        }  # fmt: skip
        verifying = {"crc32c": _PARTS * count} if checksums else {}
        for name, grid in {**verifying, "frames": count, **finding, "execute": warps}.items():
            self._kernels[name](Launch((grid, 1, 1), (32, 1, 1)), given)
        return tables, statuses


# Number of fields, of eight bytes each, that a chunk has in the table for the kernel `place`, and maximum
# number of chunks in a batch.
FIELDS, MAX_CHUNKS = 14, 8192
# Elements that a thread block of the kernel `place` composes.
_ELEMENTS = 16 << 10


class DecodingLane:
    """The memory and the stream of one thread."""

    def __init__(self, shape: DecodingShape, memory: Array, device: int) -> None:
        """`memory` is pinned; `device` is the address of the lane's memory on the device."""
        self.shape = shape
        # The stream's thread blocks start before those of a Multiply that is running.
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.frames, self.tables = memory[: shape.frames], memory[shape.frames :]
        self.to_frames = device
        self.to_content = self.to_frames + shape.frames
        self.to_tables = device + shape.lane_bytes - shape.tables
        self.to_temporary = self.to_tables - shape.temporary


class Decoder:
    """The lanes of one device."""

    def __init__(self, device: Any, shape: DecodingShape, address: int, kernels: Kernels) -> None:
        """Pin host memory. The lanes use `shape.device_bytes` at `address` on the current device."""
        self._device, self._kernels, self._shape = device, kernels, shape
        self._unpacker = None if shape.placed else Unpacker(kernels, shape)
        size = shape.frames + shape.tables
        self._memory = cuda_calls.pinned_memory(device, shape.lanes * size, shape.lanes)
        self._pool = ThreadPoolExecutor(shape.lanes, thread_name_prefix="oocgemm-decode")
        self._lanes: SimpleQueue[DecodingLane] = SimpleQueue()
        self._on_host_turn = threading.Lock()
        self._join, self._joining = cupy.cuda.Stream(non_blocking=True), threading.Lock()
        for i in range(shape.lanes):
            part = self._memory[i * size : (i + 1) * size]
            self._lanes.put(DecodingLane(shape, part, address + i * shape.lane_bytes))

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
        for rows in cuts(block.shape[0], chunk[0] * max(1, most // across), block.origin[0]):
            for cols in cuts(block.shape[1], chunk[1] * wide, block.origin[1]):
                yield rows, cols

    def _decode(self, address: int, block: Compressed, waits: Sequence[Any], rows: Range, cols: Range) -> int:
        """Decode a batch in a thread of the pool. Return the bytes that were copied."""
        lane = self._lanes.get()
        try:
            with self._device, lane.stream:
                return self._decode_by(lane, address, block, waits, rows, cols)
        finally:
            self._lanes.put(lane)

    def _decode_by(
        self,
        lane: DecodingLane,
        address: int,
        block: Compressed,
        waits: Sequence[Any],
        rows: Range,
        cols: Range,
    ) -> int:
        fetched, stream = block.fetch(rows, cols, lane.frames), lane.stream
        several = len(fetched) > 1 or length(fetched[0].rows) > block.chunk[0]
        if several and any(each.size == NO_ROOM for each in fetched):
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
        self,
        lane: DecodingLane,
        block: Compressed,
        fetched: Sequence[Fetched],
        address: int,
        waits: Sequence[Any],
    ) -> Array:
        """Decode chunks that are on the device into the panel. Return which chunks the host must decode."""
        if index := decoded(block.codec.compressor).index_bytes:
            return self._scatter(lane, block, index, fetched, address, waits)
        assert self._unpacker is not None
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

    def _scatter(
        self,
        lane: DecodingLane,
        block: Compressed,
        index: int,
        fetched: Sequence[Fetched],
        address: int,
        waits: Sequence[Any],
    ) -> Array:
        """Compose lines of sparse matrices in the panel. Return which of them the host must compose.

        `index` are the bytes of an index.
        """
        item, pitch = block.dtype.itemsize, block.shape[1]
        options = f"-DOOC_ITEM={item}", f"-DOOC_INDEX={'int' if index == 4 else 'long long'}"
        scatter = self._kernels.plain("scatter", "scatter", options)
        for event in waits:
            cuda_calls.wait(lane.stream, event)
        for lines in fetched:
            if lines.size == NO_ROOM:
                continue
            count, first = length(lines.rows), lines.start
            entries = int(lane.frames[first : first + 8 * (count + 1)].view(np.int64)[-1])
            indices, values, _ = entries_at(count, entries, index, item)
            stored = (_pointer(lane.to_frames + first + at) for at in (0, indices, values))
            places = _long(lines.corner[1]), _long(length(lines.cols)), _long(pitch)
            to = _pointer(address + (lines.rows[0] * pitch + lines.cols[0]) * item)
            scatter((count, 1, 1), *stored, *places, to)
        lane.stream.synchronize()
        return np.array([lines.size == NO_ROOM for lines in fetched])

    def _fill(self, lane: DecodingLane, fetched: Sequence[Fetched], block: Compressed) -> int:
        """Enqueue the copy of the chunks' table, which the kernel `frames` completes. Return its address."""
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
        self, lane: DecodingLane, address: int, block: Compressed, part: Fetched, waits: Sequence[Any]
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
        cuda_calls.unpin(self._device, self._memory)


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


class Packer:
    """The encoding kernels on one device, and their memory for a batch of chunks."""

    def __init__(self, plan: Plan, kernels: Kernels, work: tuple[int, int]) -> None:
        """Load the kernels. `work` are the address and the size of the memory on the device."""
        division = division_of(plan.setting, plan.tile)
        assert division is not None
        self._division, self._chunk, self._work = division, plan.chunks, work
        compress = "lz4_compress" if division.compressor == COMPRESSORS["blosc-lz4"] else "zstd_compress"
        self._kernels = {
            entry: kernels.plain(entry, entry, ()) for entry in ("shuffle", compress, "locate", "assemble")
        }

    def launch(self, op: Operation, address: int, host: int, stream: Any) -> None:
        """Compress the strip at a device address on a stream, into the host slot at the address `host`."""
        strip = DeviceStrip(address, (length(op.m), length(op.n)), self._chunk)
        with stream:
            for given in batches(self._division, strip, self._work, host):
                streams = given.count * given.streams
                for entry, kernel in self._kernels.items():
                    grid = {"shuffle": (shuffle_blocks(given), given.count), "locate": (1, 1)}
                    x, y = grid.get(entry, (streams, 1))
                    kernel(Launch((x, y, 1), (32, 1, 1)), given)
