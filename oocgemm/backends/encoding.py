"""The argument of the kernels that compress the chunks of a strip of C (`kernels/encoding`)."""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from oocgemm.planning import Division, index_bytes
from oocgemm.planning.cost.coding import ALIGNMENT, FIXED
from oocgemm.planning.tiling import Shape, ceil_div, round_up

# Elements of a chunk that a thread block of the kernel `shuffle` gathers.
_ELEMENTS = 1 << 10


class EncodingBatch(ctypes.Structure):
    """A batch of chunks, `encoding_t` of `encoding.cuh`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "strip", "content", "encoded", "sequences", "literals", "host", "sizes", "places", "end",
        )),
        *((name, ctypes.c_uint32) for name in (
            "frames", "count", "first", "rows", "cols", "across", "height", "width", "item", "compressor",
            "block", "streams", "length", "room",
        )),
    )  # fmt: skip


class Strip(NamedTuple):
    """A strip of C on the device: its address, its shape, and that of chunks."""

    address: int
    shape: Shape
    chunk: Shape

    @property
    def chunks(self) -> int:
        """Number of chunks of the strip."""
        (rows, cols), (height, width) = self.shape, self.chunk
        return ceil_div(rows, height) * ceil_div(cols, width)


def batches(division: Division, strip: Strip, work: tuple[int, int], host: int) -> Iterator[EncodingBatch]:
    """Yield the batches of the chunks of a strip.

    Args:
        division: how chunks are divided.
        strip: the strip.
        work: address and size of the memory on the device for a batch.
        host: address of the host slot for the frames.
    """
    start, size, total = round_up(work[0], ALIGNMENT), work[1], strip.chunks
    max_count = max(1, (size - FIXED) // division.chunk_work)
    for first in range(0, total, max_count):
        count = min(max_count, total - first)
        streams, at, addresses = count * division.streams, start + ALIGNMENT, []
        # Behind each part there is room for a word that is read beyond it.
        for part in (
            count * division.chunk,
            *3 * (streams * division.room,),
            4 * streams,
            8 * (streams + count),
        ):
            addresses.append(at)
            at = round_up(at + part + 8, ALIGNMENT)
        content, encoded, sequences, literals, sizes, places = addresses
        yield EncodingBatch(
            strip.address, content, encoded, sequences, literals, host,
            *(sizes, places, start, index_bytes(total), count, first, *strip.shape),
            *(ceil_div(strip.shape[1], strip.chunk[1]), *strip.chunk, division.item, division.compressor),
            *(division.block, division.streams, division.length, division.room),
        )  # fmt: skip


def shuffle_blocks(given: EncodingBatch) -> int:
    """Return the number of thread blocks of the kernel `shuffle` per chunk."""
    return max(1, int(given.height) * int(given.width) // _ELEMENTS)
