"""Choose whether a GPU encodes C, how it divides chunks into streams, and the memory for that.

A GPU compresses many independent streams at once. So a chunk is divided into many: into blocks of zstd, or
into blocks of blosc, where each byte of the elements is a stream. It compresses the chunks of a strip of C in
batches, and writes the frames, which are what chunk files contain, to the strip's host slot.
"""

from math import prod
from typing import NamedTuple

from oocgemm.planning.cost.machine import NEW_CHUNK_BYTES
from oocgemm.planning.layout import Coding, Layouts
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Shape, TileShape, ceil_div, round_up

PAGE = 4096
# Maximum bytes of a stream of zstd, and of one in a frame of blosc, of which a chunk has one per byte of an
# element. Minimum bytes of the latter.
ZSTD_STREAM, BLOSC_STREAM, MIN_STREAM = 64 << 10, 32 << 10, 4 << 10
# Bytes of elements that the kernels shuffle, and bytes of a chunk, which they count in 32 bits.
ITEM_BYTES, MIN_CHUNK, MAX_CHUNK = (1, 2, 4, 8, 16), 128 << 10, 1 << 30
# Numbers of compressors: in the header of a blosc frame, or 0.
COMPRESSORS = {"zstd": 0, "blosc-lz4": 1, "blosc-zstd": 4}
# The output of a stream may exceed its input by SLACK bytes before the kernels notice it, and store the input
# instead. The parts of a batch's memory begin at multiples of ALIGNMENT bytes, with FIXED bytes besides.
SLACK, ALIGNMENT, FIXED = 512, 16, 256
# A frame is at most HEADER bytes longer than its elements, and one of zstd by BLOCK_HEADER more per stream. A
# checksum may follow.
HEADER, BLOCK_HEADER, CHECKSUM = 16, 3, 4
# Bytes of the elements of a batch. Its memory takes at most this part of the device budget.
BATCH, SHARE = 128 << 20, 8
# A smaller C is compressed by the host.
MIN_BYTES = 64 << 20


class Division(NamedTuple):
    """How a chunk of `chunk` bytes, whose elements have `item`, is divided into streams.

    `compressor` is a number in `COMPRESSORS`. There are `streams` streams of `length` bytes; the last one may
    be shorter. In frames of blosc, a block of `block` bytes has one per byte of an element.
    """

    compressor: int
    chunk: int
    item: int
    block: int
    streams: int
    length: int

    @classmethod
    def of(cls, codec: str, chunk: Shape, itemsize: int) -> "Division | None":
        """Divide chunks of this shape; return None if a GPU does not encode them."""
        elements, number = prod(chunk), COMPRESSORS.get(codec)
        size = elements * itemsize
        if number is None or itemsize not in ITEM_BYTES or not MIN_CHUNK <= size <= MAX_CHUNK:
            return None
        if not number:
            return cls(number, size, itemsize, size, ceil_div(size, ZSTD_STREAM), ZSTD_STREAM)
        counts = range(ceil_div(elements, BLOSC_STREAM), elements // MIN_STREAM + 1)
        blocks = next((count for count in counts if elements % count == 0), None)
        if blocks is None:
            return None
        return cls(number, size, itemsize, size // blocks, blocks * itemsize, elements // blocks)

    @property
    def room(self) -> int:
        """Bytes of the memory for a stream that is being compressed."""
        return round_up(self.length + SLACK, ALIGNMENT)

    @property
    def chunk_work(self) -> int:
        """Bytes of device memory per chunk of a batch: its elements, and per stream its room and two numbers.

        Compressed bytes, sequences and literals have separate rooms.
        """
        return round_up(self.chunk + self.streams * (3 * self.room + 4 + 8) + 8, ALIGNMENT)

    def work_bytes(self, chunks: int) -> int:
        """Return the bytes of device memory for a batch of so many chunks."""
        return FIXED + chunks * self.chunk_work

    @property
    def frame_bytes(self) -> int:
        """Maximum bytes of a frame and its checksum, in whole pages."""
        more = self.streams * BLOCK_HEADER if self.compressor == COMPRESSORS["zstd"] else 0
        return round_up(self.chunk + HEADER + more + CHECKSUM, PAGE)


def index_bytes(chunks: int) -> int:
    """Return the bytes in a host slot before the frames: where each of so many begins, and its size."""
    return round_up(16 * chunks, PAGE)


def frames_bytes(division: Division, chunks: int) -> int:
    """Return the bytes of a host slot for the frames of so many chunks."""
    return index_bytes(chunks) + chunks * division.frame_bytes


def division_of(setting: Setting, tile: TileShape) -> Division | None:
    """Return how chunks of C are divided if a GPU encodes them; None if it does not."""
    coding, itemsize = setting.layouts.codings.c, setting.problem.itemsizes["C"]
    return Division.of(coding.codec, setting.c_chunks(tile), itemsize) if coding else None


def slot_frames(setting: Setting, tile: TileShape, strip: int) -> int:
    """Return the bytes of a host slot for the frames of a strip of C; 0 if a GPU does not encode it."""
    division = division_of(setting, tile)
    if division is None:
        return 0
    height, width = setting.c_chunks(tile)
    rows, cols = min(strip, tile.m, setting.problem.m), min(tile.n, setting.problem.n)
    return frames_bytes(division, ceil_div(rows, height) * ceil_div(cols, width))


def encoding_bytes(setting: Setting) -> int:
    """Return the bytes of device memory in which a GPU encodes a batch; 0 if it does not encode C."""
    coding = setting.layouts.codings.c
    return _work_bytes(coding.codec, _max_chunk(setting)) if coding else 0


def with_encoding(setting: Setting, codec: str) -> Layouts:
    """Return the layouts of a setting, with how a GPU shall encode C, if that pays.

    `codec` is how chunks of C are compressed; "" if a GPU could not encode them.
    """
    layouts, problem = setting.layouts, setting.problem
    c, size = layouts.c, problem.elements * problem.itemsizes["C"]
    apart = problem.cover.square or bool(problem.checked) or not problem.sink.stores_c
    apart = apart or problem.reads_c or problem.b.one_tile
    if codec not in COMPRESSORS or apart or setting.machine.unified or size < MIN_BYTES:
        return layouts
    if not c.writing.free and Division.of(codec, c.writing.chunk, problem.itemsizes["C"]) is None:
        return layouts
    if _work_bytes(codec, _max_chunk(setting)) > setting.budgets.device // SHARE:
        return layouts
    return layouts.encoded(Coding(codec))


def _max_chunk(setting: Setting) -> int:
    """Return the maximum bytes of a chunk of C. The planner chooses those of a new C for each tile shape."""
    c = setting.layouts.c
    return 2 * NEW_CHUNK_BYTES if c.writing.free else prod(c.writing.chunk) * setting.problem.itemsizes["C"]


def _work_bytes(codec: str, chunk: int) -> int:
    """Return the bytes of memory for a batch, of chunks of any shape with at most `chunk` bytes."""
    length = MIN_STREAM if COMPRESSORS[codec] else ZSTD_STREAM
    batch = max(BATCH, chunk)
    per_stream = 3 * (length + SLACK + ALIGNMENT) + 4 + 8 + 8
    return FIXED + batch + (ceil_div(batch, length) + ceil_div(batch, MIN_CHUNK)) * per_stream
