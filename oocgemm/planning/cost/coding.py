"""Choose which operands a GPU decodes, whether it encodes C, and the memory for both.

A GPU decodes and compresses many independent streams at once, each slower than a CPU core, but many times
as many. A chunk of blosc consists of many streams, a chunk of zstd of one. So the rate of decoding depends
on the number of streams that are decoded together.

A chunk of C is divided into many streams: into blocks of zstd, or into blocks of blosc, where each byte of
the elements is a stream. The GPU compresses the chunks of a strip of C in batches, and writes the frames,
which are what chunk files contain, to the strip's host slot.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from typing import ClassVar, NamedTuple

from oocgemm.planning.cost.machine import NEW_CHUNK_BYTES
from oocgemm.planning.layout import Coding, Layouts
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Shape, TileShape, ceil_div, round_up
from oocgemm.values import dataclass

# The parts of memory for decoding, and frames, begin at multiples of a page.
PAGE = 4096

# Decoding.

# Number of lanes, and decoded bytes of a batch. Batches of longer streams are larger, so that all lanes
# together decode STREAMS streams at once. If memory is scarce, there are fewer and smaller lanes, down to the
# minima.
LANES, DECODED_BATCH, MAX_DECODED_BATCH, STREAMS = 8, 128 << 20, 512 << 20, 1024
MIN_LANES, MIN_DECODED_BATCH = 2, 16 << 20
# All lanes together take at most 1 / DECODING_SHARE of each budget.
DECODING_SHARE = 4
# Room for compressed chunks, relative to their expected size. Batches that need more room are halved.
FRAMES_MARGIN = 1.5
# Temporary device memory of the decoder, per byte of decoded data: a literal takes one byte, and a sequence
# of at least 3 bytes takes 8.
TEMPORARY = 3.6
# Minimum mean decoded bytes of a stream. The tables of streams are sized for streams of this length.
MIN_CONTENT = 2 << 10
# Bytes of a lane's tables: per stream, and for the tables of chunks.
STREAM_BYTES, TABLE_BYTES = 56, 1 << 20
# Maximum number of stored bytes that are decoded per second, of all streams. During products, an H100 with 16
# cores decoded float32 of which 3/4 remained at 13 to 17 GB/s from blosc-zstd and blosc-lz4.
STORED_RATE = 12e9
# The same of a lane that reads entries of sparse matrices, and the stored bytes of a batch of these. On an
# H200's host with 16 cores, eight lanes read 1.6 GB/s during a product.
LANE_RATE, STORED_BATCH = 0.2e9, 4 << 20
# Number of panels that are decoded at the same time, and of an operand's device slots. On an H200's host with
# 16 cores, products of float64 from blosc-zstd took at least 10% longer with 4 or 8.
PANELS = 6
# The GPU decodes an operand if it is predicted to be faster than the host by the factor MARGIN, and to save
# START_SECONDS, the seconds that it takes to pin memory.
MARGIN, START_SECONDS = 1.3, 0.1

# Encoding.

# Maximum bytes of a zstd stream, and maximum and minimum bytes of a stream in a blosc frame. A frame has one
# stream per byte of an element.
ZSTD_STREAM, BLOSC_STREAM, MIN_STREAM = 64 << 10, 32 << 10, 4 << 10
# Sizes of elements that the kernels can shuffle, and minimum and maximum bytes of a chunk. The kernels count
# bytes in 32 bits.
ITEM_BYTES, MIN_CHUNK, MAX_CHUNK = (1, 2, 4, 8, 16), 128 << 10, 1 << 30
# The number of each compressor in the header of a blosc frame; 0 for zstd without blosc.
COMPRESSORS = {"zstd": 0, "blosc-lz4": 1, "blosc-zstd": 4}
# The output of a stream may exceed its input by SLACK bytes before the kernels notice it, and store the input
# instead. The parts of a batch's memory begin at multiples of ALIGNMENT bytes, with FIXED bytes besides.
SLACK, ALIGNMENT, FIXED = 512, 16, 256
# A frame is at most HEADER bytes longer than its elements, and one of zstd by BLOCK_HEADER more per stream. A
# checksum may follow.
HEADER, BLOCK_HEADER, CHECKSUM = 16, 3, 4
# Bytes of the elements of a batch. The memory of a batch takes at most 1 / SHARE of the device budget.
BATCH, SHARE = 128 << 20, 8
# Minimum bytes of a C that the GPU compresses. The host compresses a smaller C.
MIN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CodedStreams:
    """Compressed streams, which a GPU decodes at these rates, in bytes per second.

    - `of_stream`, `most`: decoded bytes, of one stream and of all of them.
    - `stored`: stored bytes of one stream.
    """

    of_stream: float
    most: float
    stored: float = inf

    index_bytes: ClassVar[int] = 0

    def batch(self, coding: Coding) -> int:
        """Return the decoded bytes of a batch. All lanes together decode `STREAMS` streams at once."""
        return max(DECODED_BATCH, min(MAX_DECODED_BATCH, STREAMS * coding.stream_bytes // LANES))

    def rate(self, coding: Coding, together: int, shape: "DecodingShape") -> float:
        """Return the rate if `together` decoded bytes are decoded at the same time."""
        each = min(self.of_stream, self.stored / coding.stored_share)
        return min(self.most, each * together / coding.stream_bytes)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of sparse matrices, which a GPU places in panels as fast as lanes read them.

    A lane needs no memory for decoded streams. `index_bytes` are the bytes of an index.
    """

    index_bytes: int

    def batch(self, coding: Coding) -> int:
        """Return the decoded bytes of a batch. Several chunks: two lanes decode a chunk at a border."""
        return min(DECODED_BATCH, max(int(STORED_BATCH / coding.stored_share), 4 * coding.stream_bytes))

    def rate(self, coding: Coding, together: int, shape: "DecodingShape") -> float:
        return LANE_RATE / coding.stored_share * max(1, together // shape.batch)


# What a GPU decodes, by the name of the coding without "blosc-". During products, an H100 with 16 cores
# decoded float64 at 64 GB/s from blosc-zstd, at 17 from zstd in chunks of 1 MiB, and at 31 from blosc-lz4,
# and int8 with bitshuffle at 28. On an H200, 512 streams of zstd with random float32, of which 9/10 remained,
# were decoded at 3.2 GB/s.
DECODED: dict[str, CodedStreams | Entries] = {
    "zstd": CodedStreams(15e6, 40e9, 5.7e6),
    "lz4": CodedStreams(4e6, 30e9),
    "csr": Entries(4),
    "csr64": Entries(8),
}


def decoded(codec: str) -> CodedStreams | Entries:
    """Return what a GPU decodes that is stored in a codec."""
    return DECODED[codec.removeprefix("blosc-")]


@dataclass(frozen=True, slots=True)
class DecodingShape:
    """`lanes` threads decode batches of chunks. A batch has at most `batch` bytes when it is decoded.

    `frames` are the bytes of the room for the compressed chunks of a batch. If `placed`, all operands are
    sparse, and stored bytes need no further memory. A thread needs `scratch` bytes to read a batch.
    """

    lanes: int
    batch: int
    frames: int
    placed: bool = False
    scratch: int = 0

    @property
    def streams(self) -> int:
        """Maximum number of streams of a batch."""
        return self.batch // MIN_CONTENT

    @property
    def tables(self) -> int:
        """Bytes of the room for the tables of a batch."""
        return 0 if self.placed else round_up(STREAM_BYTES * self.streams + TABLE_BYTES, PAGE)

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory of the decoder of a lane."""
        return 0 if self.placed else round_up(int(TEMPORARY * self.batch), PAGE)

    @property
    def content(self) -> int:
        """Bytes of decoded streams of a lane."""
        return 0 if self.placed else round_up(self.batch, PAGE)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane on the device."""
        return self.frames + self.content + self.temporary + self.tables

    @property
    def device_bytes(self) -> int:
        """Bytes of all lanes on the device."""
        return self.lanes * self.lane_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all lanes in pinned host memory, plus the scratch memory to decode a chunk on the host."""
        return self.lanes * (self.frames + self.tables + self.scratch) + self.batch


@lru_cache(64)
def decoding_shape(setting: Setting) -> DecodingShape | None:
    """Choose the lanes of each device; None if it decodes no operand, or if the budgets are too small."""
    layouts = setting.layouts
    coded = [(x, y) for x, y in ((layouts.a, layouts.codings.a), (layouts.b, layouts.codings.b)) if y]
    if not coded:
        return None
    chunk = round_up(max(prod(x.read_chunk) * x.itemsize for x, _ in coded), PAGE)
    share = min(1.0, FRAMES_MARGIN * max(y.stored_share for _, y in coded))
    sparse = [x for x, y in coded if decoded(y.codec).index_bytes]
    placed, scratch = len(sparse) == len(coded), max((x.decode_bytes for x in sparse), default=0)

    def shaped(lanes: int, batch: int) -> DecodingShape:
        # A compressed chunk may be larger than its content, and the host may decode it there.
        frames = max(int(share * batch), chunk) + chunk // 128 + (64 << 10)
        return DecodingShape(lanes, batch, round_up(frames, PAGE), placed, scratch)

    def fits(shape: DecodingShape) -> bool:
        budgets = setting.budgets
        return (
            shape.device_bytes <= budgets.device // DECODING_SHARE
            and setting.devices * shape.host_bytes <= budgets.host // DECODING_SHARE
        )

    batch, lanes = max(chunk, *(decoded(coding.codec).batch(coding) for _, coding in coded)), LANES
    while batch > max(MIN_DECODED_BATCH, chunk) and not fits(shaped(MIN_LANES, batch)):
        batch = max(MIN_DECODED_BATCH, chunk, batch // 2)
    while lanes > MIN_LANES and not fits(shaped(lanes, batch)):
        lanes -= 1
    shape = shaped(lanes, batch)
    return shape if fits(shape) else None


def decoding_rate(setting: Setting, coding: Coding, size: int, panel: int | None = None) -> float:
    """Return the decoded bytes per second at which a GPU decodes an operand of `size` bytes.

    `panel` are the bytes of its panels, of which `PANELS` are decoded at the same time; None if they are not
    known. The result is 0 if the budgets are too small for decoding.
    """
    shape = decoding_shape(setting)
    if shape is None:
        return 0.0
    together = min(shape.lanes * shape.batch, size, size if panel is None else PANELS * panel)
    return min(decoded(coding.codec).rate(coding, together, shape), STORED_RATE / coding.stored_share)


def with_decoding(setting: Setting, codings: Mapping[str, Coding]) -> Layouts:
    """Return the layouts of a setting, with the codings of the operands that a GPU should decode.

    `codings` has the operands that it could decode. It should decode those for which this saves time.
    """
    layouts, problem, machine = setting.layouts, setting.problem, setting.machine
    if machine.unified or problem.checked:  # the host computes digests of the panels that it reads
        return layouts
    found = layouts
    for operand, coding in codings.items():
        elements = problem.m * problem.depth if operand == "A" else problem.depth * problem.n
        size = elements * layouts.by_operand[operand].itemsize
        tried = replace(setting, layouts=layouts.decoded(operand, coding))
        rate = setting.devices * min(decoding_rate(tried, coding, size), machine.h2d / coding.stored_share)
        if rate >= MARGIN * machine.decode and size / machine.decode >= START_SECONDS + size / rate:
            found = found.decoded(operand, coding)
    # If the GPU decodes both operands, the lanes may be larger, and may not fit any more.
    return found if decoding_shape(replace(setting, layouts=found)) or found is layouts else layouts


def describe(layouts: Layouts, operands: Iterable[str] = "AB") -> str:
    """Return which of the operands the GPU decodes, such as "A (zstd)"; "" if none."""
    found = {operand: layouts.coding(operand) for operand in operands}
    return ", ".join(f"{operand} ({coding.codec})" for operand, coding in found.items() if coding)


class Division(NamedTuple):
    """How a chunk of `chunk` bytes, whose elements have `item` bytes, is divided into streams.

    `compressor` is a number in `COMPRESSORS`. There are `streams` streams of `length` bytes; the last one may
    be shorter. In frames of blosc, a block of `block` bytes has one stream per byte of an element.
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
        """Return the bytes of device memory for a batch of this many chunks."""
        return FIXED + chunks * self.chunk_work

    @property
    def frame_bytes(self) -> int:
        """Maximum bytes of a frame and its checksum, in whole pages."""
        more = self.streams * BLOCK_HEADER if self.compressor == COMPRESSORS["zstd"] else 0
        return round_up(self.chunk + HEADER + more + CHECKSUM, PAGE)


def index_bytes(chunks: int) -> int:
    """Return the bytes of the table at the start of a host slot: the offset and the size of each frame."""
    return round_up(16 * chunks, PAGE)


def frames_bytes(division: Division, chunks: int) -> int:
    """Return the bytes of a host slot for the frames of this many chunks."""
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
    """Return the layouts of a setting. In them, a GPU encodes C if it can, and if C is large enough.

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
    """Return the maximum bytes of a chunk of C. For a new C, the planner chooses chunks per tile shape."""
    c = setting.layouts.c
    return 2 * NEW_CHUNK_BYTES if c.writing.free else prod(c.writing.chunk) * setting.problem.itemsizes["C"]


def _work_bytes(codec: str, chunk: int) -> int:
    """Return the bytes of memory for a batch of chunks of any shape, each of at most `chunk` bytes."""
    length = MIN_STREAM if COMPRESSORS[codec] else ZSTD_STREAM
    batch = max(BATCH, chunk)
    per_stream = 3 * (length + SLACK + ALIGNMENT) + 4 + 8 + 8
    return FIXED + batch + (ceil_div(batch, length) + ceil_div(batch, MIN_CHUNK)) * per_stream
