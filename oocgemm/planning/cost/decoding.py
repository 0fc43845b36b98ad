"""Choose which operands a GPU decodes, and the memory for that.

A GPU decodes many independent streams at once, slower than a CPU core each, but many times as many. A chunk
of blosc consists of many streams, a chunk of zstd of one. So the rate depends on the number of streams that
are decoded together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from oocgemm.planning.layout import Coding, Layouts
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import round_up

ALIGNMENT = 4096
# Lanes, decoded bytes of a batch, and the least of both to which little memory reduces them.
LANES, BATCH = 8, 128 << 20
MIN_LANES, MIN_BATCH = 2, 16 << 20
# All lanes together take at most this part of the budgets.
SHARE = 4
# Room for compressed chunks, relative to what they are expected to take. Batches that need more are halved.
FRAMES_MARGIN = 1.5
# Temporary device memory of the decoder, per byte of decoded data: a literal takes one byte, and a sequence
# of at least 3 bytes takes 8.
TEMPORARY = 3.6
# Minimum mean decoded bytes of a stream. The tables of the streams have room for so many.
MIN_CONTENT = 2 << 10
# Bytes of the tables per stream, and besides per lane: the tables of chunks.
STREAM_BYTES, TABLE_BYTES = 56, 1 << 20
# Rates of a GPU by compressor, in decoded bytes per second: per stream, and at most. During products, an H100
# with 16 cores decoded float64 at 64 GB/s from blosc-zstd, at 17 from zstd in chunks of 1 MiB, and at 31 from
# blosc-lz4, and int8 with bitshuffle at 28.
RATES = {"zstd": (15e6, 40e9), "lz4": (4e6, 30e9)}
# At most so many stored bytes are decoded per second. On the same machine, float32 of which 3/4 remained was
# decoded at 13 to 17 GB/s from blosc-zstd and blosc-lz4.
STORED_RATE = 12e9
# Panels that are decoded at the same time, and device slots for panels of an operand. On an H200's host with
# 16 cores, products of float64 from blosc-zstd took at least 10% longer with 4 or 8.
PANELS = 6
# The GPU decodes an operand if it is predicted to be faster than the host by this factor, and besides by so
# many seconds, which it takes to pin memory.
MARGIN, START_SECONDS = 1.3, 0.3


@dataclass(frozen=True, slots=True)
class DecodingShape:
    """`lanes` threads decode batches of chunks. A batch has at most `batch` bytes when it is decoded.

    `frames` are the bytes of the room for the compressed chunks of a batch.
    """

    lanes: int
    batch: int
    frames: int

    @property
    def streams(self) -> int:
        """Maximum number of streams of a batch."""
        return self.batch // MIN_CONTENT

    @property
    def tables(self) -> int:
        """Bytes of the room for the tables of a batch."""
        return round_up(STREAM_BYTES * self.streams + TABLE_BYTES, ALIGNMENT)

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory of the decoder of a lane."""
        return round_up(int(TEMPORARY * self.batch), ALIGNMENT)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane on the device."""
        return self.frames + round_up(self.batch, ALIGNMENT) + self.temporary + self.tables

    @property
    def device_bytes(self) -> int:
        """Bytes of all lanes on the device."""
        return self.lanes * self.lane_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all lanes in pinned host memory, and scratch memory for a chunk that the host decodes."""
        return self.lanes * (self.frames + self.tables) + self.batch


@lru_cache(64)
def decoding_shape(setting: Setting) -> DecodingShape | None:
    """Choose the lanes of each device; None if it decodes no operand, or if the budgets are too small."""
    layouts = setting.layouts
    decoded = [(x, y) for x, y in ((layouts.a, layouts.codings.a), (layouts.b, layouts.codings.b)) if y]
    if not decoded:
        return None
    chunk = round_up(max(prod(x.read_chunk) * x.itemsize for x, _ in decoded), ALIGNMENT)
    share = min(1.0, FRAMES_MARGIN * max(y.stored_share for _, y in decoded))

    def shaped(lanes: int, batch: int) -> DecodingShape:
        # A compressed chunk may be larger than its content, and the host may decode it there.
        frames = max(int(share * batch), chunk) + chunk // 128 + (64 << 10)
        return DecodingShape(lanes, batch, round_up(frames, ALIGNMENT))

    def fits(shape: DecodingShape) -> bool:
        budgets = setting.budgets
        return shape.device_bytes <= budgets.device // SHARE and shape.host_bytes <= budgets.host // SHARE

    batch, lanes = max(BATCH, chunk), LANES
    while batch > max(MIN_BATCH, chunk) and not fits(shaped(MIN_LANES, batch)):
        batch = max(MIN_BATCH, chunk, batch // 2)
    while lanes > MIN_LANES and not fits(shaped(lanes, batch)):
        lanes -= 1
    shape = shaped(lanes, batch)
    return shape if fits(shape) else None


def decoding_rate(setting: Setting, coding: Coding, size: int) -> float:
    """Return the decoded bytes per second at which a GPU decodes an operand of so many bytes.

    The result is 0 if the budgets are too small for that.
    """
    shape = decoding_shape(setting)
    if shape is None:
        return 0.0
    each, most = RATES[_compressor(coding.codec)]
    together = min(shape.lanes * shape.batch, size)
    return min(most, each * together / coding.stream_bytes, STORED_RATE / coding.stored_share)


def with_decoding(setting: Setting, codings: Mapping[str, Coding]) -> Layouts:
    """Return the layouts of a setting, with how a GPU shall decode the operands for which that pays.

    `codings` are those of the operands that it could decode.
    """
    layouts, problem, machine = setting.layouts, setting.problem, setting.machine
    if machine.unified or problem.checked:  # the host computes digests of what it has read
        return layouts
    found = layouts
    for operand, coding in codings.items():
        elements = problem.m * problem.depth if operand == "A" else problem.depth * problem.n
        size = elements * layouts.by_operand[operand].itemsize
        tried = replace(setting, layouts=layouts.decoded(operand, coding))
        rate = min(decoding_rate(tried, coding, size), machine.h2d / coding.stored_share)
        if rate >= MARGIN * machine.decode and size / machine.decode >= START_SECONDS + size / rate:
            found = found.decoded(operand, coding)
    # With both, the lanes may be larger, and not fit any more.
    return found if decoding_shape(replace(setting, layouts=found)) or found is layouts else layouts


def describe(layouts: Layouts, operands: Iterable[str] = "AB") -> str:
    """Return which of the operands the GPU decodes, such as "A (zstd)"; "" if none."""
    found = {operand: layouts.coding(operand) for operand in operands}
    return ", ".join(f"{operand} ({coding.codec})" for operand, coding in found.items() if coding)


def _compressor(codec: str) -> str:
    return codec.removeprefix("blosc-")
