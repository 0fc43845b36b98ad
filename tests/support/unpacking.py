"""Run the kernels that decode a batch of chunks: on the processor, compiled by g++, or on a GPU."""

import ctypes

import numpy as np

from oocgemm.planning.cost.coding import DecodingShape
from oocgemm.stores.codecs import BYTES, NUMBERS, PLAIN
from tests.support.decoding import Array, Batch, ordered
from tests.support.native import built

# Fields of the table of the chunks, and bytes of the structures, of kernels/decoding/streams.cuh.
FIELDS, STREAM, BLOCK = 14, 40, 112
WARPS = 3
GUARD = 64


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "chunks", "statuses", "counters", "pointers", "streams", "blocks", "sequences", "literals",
            "content",
        )),
        *((name, ctypes.c_uint64) for name in ("max_sequences", "max_literals")),
        *((name, ctypes.c_uint32) for name in (
            "count", "max_streams", "max_blocks", "chunk", "itemsize", "compressor",
        )),
    )  # fmt: skip


def unpacked(
    given: Batch, most: tuple[int, int, int] | None = None, *, checksum: bool = False
) -> list[Array | None]:
    """Decode the chunks of a batch. Return the elements of each as bytes, None of those that are refused.

    With `checksum`, each frame ends with one. `most` are the streams, blocks and sequences for which there is
    memory.
    """
    count, chunk = len(given.start), given.chunk
    each = chunk // 64 + 8
    streams, blocks, sequences = most or (count * each, count * each, count * chunk)
    buffer = np.concatenate([given.buffer, np.zeros(8, np.uint8)])
    table = np.zeros((count, FIELDS), np.int64)
    table[:, 4], table[:, 8], table[:, 11] = chunk, 1, buffer.ctypes.data + given.start
    table[:, 12], table[:, 13] = given.size - 4 * checksum, checksum
    statuses, counters = np.zeros(count, np.uint32), np.zeros(4, np.uint64)
    pointers = np.zeros(streams, np.uint64)
    memory = [np.full(size, 0xA5, np.uint8) for size in (STREAM * streams, BLOCK * blocks, 8 * sequences)]
    literals, content = (np.full(size * count * chunk + GUARD, 0xA5, np.uint8) for size in (4, 1))
    arrays: list[Array] = [table, statuses, counters, pointers, *memory, literals, content]
    room = sequences, literals.size - GUARD, count, streams, blocks, chunk
    number = NUMBERS[given.codec.compressor] if given.codec.blosc else 0
    batch = _Given(*(x.ctypes.data for x in arrays), *room, given.codec.itemsize, number)
    built("unpack").unpack(ctypes.byref(batch), WARPS, given.codec.compressor == "lz4")
    assert (content[-GUARD:] == 0xA5).all()
    assert (literals[-GUARD:] == 0xA5).all()
    return [
        None if status else _composed(row, pointers, given.codec.itemsize)
        for row, status in zip(table.tolist(), statuses, strict=True)
    ]


def _composed(row: list[int], pointers: Array, itemsize: int) -> Array:
    """Do what the kernel `place` does with a whole chunk."""
    first, split, order, block, size = row[:5]
    found = []
    for number, start in enumerate(range(0, size, block)):
        content = min(block, size - start)
        parts = split if content == block else 1
        streams = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (content // parts)).from_address(int(at)))
            for at in pointers[first + number * split :][:parts]
        ]
        assert order in (PLAIN, BYTES) or split in (1, itemsize)
        found.append(ordered(np.concatenate(streams), order, itemsize))
    return np.concatenate(found)


def unpacked_on_gpu(given: Batch) -> list[Array | None]:
    """Do what `unpacked` does by the kernels of a GPU, with the memory that a product has for a batch."""
    import cupy

    from oocgemm.backends.cuda.frames import Unpacker
    from oocgemm.backends.cuda.launch import Kernels

    count, chunk, item = len(given.start), given.chunk, given.codec.itemsize
    shape = DecodingShape(1, count * chunk, given.buffer.size)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernels = Kernels(0)
        frames = cupy.asarray(np.concatenate([given.buffer, np.zeros(8, np.uint8)]))
        table = np.zeros((count, FIELDS), np.int64)
        table[:, 4], table[:, 5], table[:, 8], table[:, 9] = chunk, chunk // item, 1, chunk // item
        table[:, 10] = np.arange(count) * (chunk // item)
        table[:, 11], table[:, 12] = frames.data.ptr + given.start, given.size
        chunks, found = cupy.asarray(table), cupy.full(count * chunk + GUARD, 0xA5, cupy.uint8)
        memory = [cupy.empty(size, cupy.uint8) for size in (shape.batch, shape.temporary, shape.tables)]
        lane = memory[0].data.ptr, memory[1].data.ptr, memory[2].data.ptr
        of = chunks.data.ptr, count, False
        streams, statuses = Unpacker(kernels, shape).decode(given.codec, of, chunk, lane, stream)
        place = kernels.plain("place", "place", (f"-DOOC_ITEM={item}",))
        pointers = ctypes.c_void_p(streams), ctypes.c_void_p(chunks.data.ptr)
        place((4, count, 1), *pointers, ctypes.c_longlong(0), ctypes.c_void_p(found.data.ptr))
        at = statuses - lane[2]
        failed = cupy.asnumpy(memory[2][at : at + 4 * count]).view(np.uint32)
        elements = cupy.asnumpy(found)
    assert (elements[-GUARD:] == 0xA5).all()
    whole = elements[:-GUARD].reshape(count, chunk)
    return [None if status else each for each, status in zip(whole, failed, strict=True)]
