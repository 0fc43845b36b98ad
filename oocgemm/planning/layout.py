"""Describe how arrays are stored, one class per kind of storage, and the routes of their blocks.

A layout answers the questions that planning asks of an array: which blocks are read as a whole, how fast
panels are read, and how much memory reads take. The base class `Layout` answers for an array of which any
block is read at the full rate. Each kind gives other answers where it differs:

- `Chunked`: chunks in files, or elements that are computed when they are read.
- `Lines`: one run of contiguous elements after another in a file, such as the rows of a .npy file.
- `InMemory`: an array in host memory.
- `Remote`: chunks in an object store.

The other modules ask these questions, and never for the kind.

A *route* is how the blocks of an operand travel between its array and the multiplication.

`Setting.routes` has one per operand. Planning chooses it from the layout of the array, the machine and the
problem:

- `Slotted`: threads read blocks into slots in host memory, or write them from there.
- `Encoded`: the same for a C whose chunks a GPU compresses. Its slots contain frames.
- `InPlace`: the CPU multiplies blocks where they are in the caller's memory.
- `Ringed`: blocks go between the array and a GPU through a ring of pinned buffers, piece by piece.
- `Direct`: a GPU copies blocks from or to an array that the caller has pinned. Blocks with short rows still
  go through the ring.
- `Decoded`: compressed chunks go to a GPU, which decodes them.

The other modules ask a route, and never for its kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, field, fields, replace
from math import gcd, inf, prod
from typing import Any, ClassVar

from oocgemm.planning.cost.machine import (
    CODEC_WORKERS,
    DIGEST_SECONDS_PER_BYTE,
    INSTANT,
    NEW_CHUNK_BYTES,
    REMOTE_WORKERS,
    MachineModel,
)
from oocgemm.planning.problem import Op
from oocgemm.planning.tiling import Shape, ceil_div, overread
from oocgemm.values import dataclass

# Relative rate of copies between pageable arrays and pinned buffers, by the bytes of a separate row of the
# block: (least bytes, rate). Rows are separate unless a block consists of whole rows of the array.
COPIED_ROWS = ((32 << 10, 1.0), (8 << 10, 0.85), (4 << 10, 0.65), (0, 0.5))
# Lines of chunks that are shorter than this many bytes pass through scratch memory, whole ones too.
SHORT_LINE = 4096
# `Chunked.line_overread` averages over this many consecutive panels, because they start at different offsets
# in their chunks.
SAMPLED_PANELS = 64


@dataclass(frozen=True, slots=True)
class Writing:
    """How blocks of C are written.

    - `chunk`: shape of the unit, a chunk or a shard, that only one thread at a time may write to.
    - `free`: the array does not exist yet, and the planner chooses its chunks.
    - `existing`: C exists before the run, so that elements which the run does not write stay as they are.
    - `encodes`: writing runs a codec on the host.
    - `encode_bytes`: temporary host memory to write one chunk; 0 if none.
    """

    chunk: Shape = (1, 1)
    free: bool = False
    existing: bool = False
    encodes: bool = False
    encode_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an array X is stored. Shapes and axes are those of op(X), which may be the transpose of X.

    - `itemsize`: bytes of an element.
    - `contiguous`: the axis along which elements are contiguous.
    - `decode_bytes`: temporary host memory to read one chunk; 0 if no codec runs.
    - `resident_bytes`: host memory that the array occupies during the whole run, besides the blocks read.
    - `writing`: how it is written, if it is C.
    """

    itemsize: int = 8
    contiguous: int = 1
    decode_bytes: int = 0
    resident_bytes: int = 0
    writing: Writing = field(default_factory=Writing)

    in_memory: ClassVar[bool] = False  # whether the array is in host memory, not in a file

    @property
    def read_chunk(self) -> Shape:
        """Shape of the chunks that are read; (1, 1) if there are none."""
        return 1, 1

    @property
    def partial_reads(self) -> bool:
        """Whether parts of chunks can be read. Otherwise, a chunk is read and decoded as a whole."""
        return True

    @property
    def in_place(self) -> bool:
        """Whether the CPU multiplies blocks of the array where they are, without copying them into slots."""
        return False

    @property
    def pinned(self) -> bool:
        """Whether the caller has pinned the array. Blocks of other arrays are never copied directly."""
        return False

    @property
    def page_cached(self) -> bool:
        """Whether the page cache has or will have the array, so that oocgemm need not cache its blocks."""
        return False

    @property
    def contiguous_rows(self) -> bool:
        """Whether this is an array in memory whose rows are so contiguous that a device could copy them."""
        return False

    @property
    def scratch_bytes(self) -> int:
        """Host memory that a thread needs to read or write parts of lines."""
        return 0

    @property
    def requests(self) -> int:
        """Maximum number of requests to an object store in flight; 0 for arrays elsewhere."""
        return 0

    @property
    def request_bytes(self) -> int:
        """Temporary host memory that a request takes, for codecs too."""
        return 0

    @property
    def request_chunk(self) -> Shape:
        """Shape of the block of small chunks that one request reads; (1, 1) if it reads one chunk."""
        return 1, 1

    def changed(self, **values: Any) -> "Layout":
        """Return the layout with these values for its fields. Values for fields that it lacks are ignored."""
        own = {each.name for each in fields(self)}
        return replace(self, **{name: value for name, value in values.items() if name in own})

    def oriented(self, op: Op) -> "Layout":
        """Return the layout of op(X), given a layout of X."""
        if not op.swaps:
            return self
        chunks = {"read_chunk": self.read_chunk[::-1], "request_chunk": self.request_chunk[::-1]}
        writing = replace(self.writing, chunk=self.writing.chunk[::-1])
        return self.changed(contiguous=1 - self.contiguous, writing=writing, **chunks)

    def computed(self, scratch: int, resident: int) -> "Layout":
        """Return the layout of a view whose elements are computed when they are read.

        Computing them takes `scratch` bytes of host memory per thread, and `resident` bytes for the whole
        run.
        """
        return replace(
            self,
            decode_bytes=self.decode_bytes + scratch,
            resident_bytes=self.resident_bytes + resident,
        )

    def copied(self) -> "Layout":
        """Return the layout of a view of X whose blocks are always copied, never accessed where they are."""
        return self.changed(zero_copy_width=0, in_place=False)

    def line_overread(self, panel: Shape) -> float:
        """Elements in all lines (contiguous runs in storage) that panels overlap, per element in panels."""
        return 1.0

    def segment_bytes(self, panel: Shape) -> float:
        """Mean bytes of a panel per part of a line in it; inf if panels consist of whole lines.

        Each part of a line takes a separate request to the store.

        >>> npy, raw = Lines(4000), Chunked((500, 500))
        >>> [npy.segment_bytes((64, k)) for k in (1000, 4000)]
        [8000.0, inf]
        >>> [raw.segment_bytes((64, k)) for k in (250, 500, 750)]
        [2000.0, inf, 6000.0]
        """
        return inf

    def line_scratch(self, panel: Shape) -> int:
        """Temporary host bytes that a thread needs to read panels of shape `panel`."""
        return self.scratch_bytes

    @property
    def write_scratch(self) -> int:
        """Temporary host bytes that a thread needs to write parts of lines."""
        return 0

    def is_direct(self, panel: Shape) -> bool:
        """Whether the device copies blocks of shape `panel` directly from or to an array in host memory."""
        return False

    def read_amplification(self, shape: Shape, panel: Shape) -> float:
        """Ratio of the bytes read to the bytes needed, if an array is read panel by panel."""
        if self.partial_reads:
            return 1.0
        (m, n), chunk = shape, self.read_chunk
        return overread(m, panel[0], chunk[0]) * overread(n, panel[1], chunk[1])

    def copy_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second of copies between a pageable array or a file and pinned buffers."""
        return self.read_rate(machine, panel)

    def read_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second at which panels of shape `panel` are read from the array."""
        if self.decode_bytes:
            return machine.decode * min(1.0, CODEC_WORKERS * self._chunks(panel) / machine.cores)
        # Between two rows of a panel, the file has bytes that are not needed. Either these bytes are read
        # too, or the next row takes another request. The model counts the shorter of these times.
        gaps = (self.line_overread(panel) - 1) * max(0.0, 1 / machine.read_scattered - 1 / machine.read)
        return 1 / (1 / machine.read + min(gaps, machine.segment / self.segment_bytes(panel)))

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        """Return the bytes per second at which strips of shape `strip` are written to the array."""
        return machine.write

    def _chunks(self, panel: Shape) -> int:
        """Count the chunks of a panel that begins with a chunk, at least one."""
        return max(1, prod(map(ceil_div, panel, self.read_chunk)))


@dataclass(frozen=True, slots=True)
class Chunked(Layout):
    """Chunks of shape `read_chunk` in files.

    If `partial_reads`, parts of chunks are read too, and whole ones without a codec. A thread needs
    `scratch_bytes` for that.
    """

    read_chunk: Shape = (1, 1)
    partial_reads: bool = True
    page_cached: bool = False
    scratch_bytes: int = 0

    def line_overread(self, panel: Shape) -> float:
        extent = panel[self.contiguous]
        if not self.partial_reads or not extent:
            return 1.0
        return overread(SAMPLED_PANELS * extent, extent, self.read_chunk[self.contiguous])

    def segment_bytes(self, panel: Shape) -> float:
        extent, chunk = panel[self.contiguous], self.read_chunk[self.contiguous]
        if not self.partial_reads or not extent:
            return inf
        # The mean number of lines that a row of a panel contains only in part. A line is as long as a chunk.
        even = gcd(extent, chunk)
        segments = (extent + chunk - even - max(0, extent - chunk + even)) / chunk
        return extent * self.itemsize / segments if segments else inf

    def line_scratch(self, panel: Shape) -> int:
        """Return 0 if panels consist of whole lines of chunks, and these lines are not short."""
        short = self.read_chunk[self.contiguous] * self.itemsize < SHORT_LINE
        return self.scratch_bytes if short or self.segment_bytes(panel) < inf else 0


@dataclass(frozen=True, slots=True)
class Lines(Layout):
    """Lines of `line` contiguous elements in a file, one after another.

    A thread needs `scratch_bytes` to read or write parts of lines.
    """

    line: int
    page_cached: bool = False
    scratch_bytes: int = 0

    def line_overread(self, panel: Shape) -> float:
        extent = panel[self.contiguous]
        return max(1.0, self.line / extent) if extent else 1.0

    def segment_bytes(self, panel: Shape) -> float:
        extent = panel[self.contiguous]
        return float(extent * self.itemsize) if 0 < extent < self.line else inf

    @property
    def write_scratch(self) -> int:
        return self.scratch_bytes

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        return 1 / (1 / machine.write + machine.segment / self.segment_bytes(strip))


@dataclass(frozen=True, slots=True)
class InMemory(Layout):
    """An array in host memory.

    - `zero_copy_width`: half of this many contiguous elements per row of a block suffice for a direct copy
      between the array and the device, without a pinned buffer; 0 means that no block may be copied directly.
    - `pinned`: the caller has pinned the array. Blocks of other arrays are never copied directly.
    - `in_place`: the CPU multiplies blocks of the array where they are, without copying them into slots.
    """

    zero_copy_width: int = 0
    pinned: bool = False
    in_place: bool = False

    in_memory = True

    @property
    def contiguous_rows(self) -> bool:
        return self.zero_copy_width > 0

    def computed(self, scratch: int, resident: int) -> Layout:
        of_array = Chunked(
            page_cached=True, itemsize=self.itemsize, contiguous=self.contiguous, writing=self.writing
        )
        return of_array.computed(scratch, resident)

    def is_direct(self, panel: Shape) -> bool:
        return self.pinned and 0 < self.zero_copy_width <= 2 * panel[self.contiguous]

    def copy_rate(self, machine: MachineModel, panel: Shape) -> float:
        row = panel[self.contiguous]
        # Whole rows of an array, which are contiguous, have at least `zero_copy_width` elements.
        size = COPIED_ROWS[0][0] if 0 < self.zero_copy_width <= row else row * self.itemsize
        return machine.memory * next(rate for least, rate in COPIED_ROWS if size >= least)

    def read_rate(self, machine: MachineModel, panel: Shape) -> float:
        return machine.memory

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        return machine.memory


@dataclass(frozen=True, slots=True)
class Remote(Layout):
    """Chunks of shape `read_chunk` in an object store.

    - `requests`: the maximum number of requests in flight, each for a chunk or a part of one.
    - `request_bytes`: temporary host memory that a request takes, for codecs too.
    - `request_chunk`: shape of the block of small chunks of a shard that a request reads; (1, 1) if it reads
      one chunk.
    - `partial_reads`: parts of chunks can be read.
    """

    requests: int = 1
    request_bytes: int = 0
    read_chunk: Shape = (1, 1)
    partial_reads: bool = True
    request_chunk: Shape = (1, 1)

    def read_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second at which panels of shape `panel` are read from or written to objects.

        Each chunk takes a request: its latency, then the time of its bytes at the rate of one connection.
        At most `requests` requests are in flight, and at most one per chunk of `REMOTE_WORKERS` panels.
        """
        unit, total = max(self.read_chunk, self.writing.chunk), prod(panel) * self.itemsize
        chunks = ceil_div(total, NEW_CHUNK_BYTES) if self.writing.free else prod(map(ceil_div, panel, unit))
        size = max(1.0, total / max(1, chunks))
        in_flight = min(self.requests, REMOTE_WORKERS * max(1, chunks))
        return min(machine.remote, in_flight * size / (machine.request_latency + size / machine.connection))

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        return self.read_rate(machine, strip)


# The kinds by the names that they have in the headers of timelines.
KINDS: dict[str, type[Layout]] = {
    "plain": Layout,
    "chunked": Chunked,
    "lines": Lines,
    "memory": InMemory,
    "remote": Remote,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Coding:
    """How the chunks of an array are compressed, for a GPU that decodes or encodes them.

    - `codec`: its name, such as "blosc-zstd".
    - `stream_bytes`: decoded bytes of a stream, the unit that is decoded independently of others.
    - `stored_share`: bytes in storage per decoded byte.
    """

    codec: str
    stream_bytes: int = 0
    stored_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Codings:
    """How a GPU decodes A and B and encodes C, as planning chooses; None if the host decodes or encodes."""

    a: Coding | None = None
    b: Coding | None = None
    c: Coding | None = None


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of op(A), op(B) and C, and which of them a GPU decodes or encodes (`codings`)."""

    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=Layout)
    c: Layout = field(default_factory=Layout)
    codings: Codings = field(default_factory=Codings, kw_only=True)

    @property
    def by_operand(self) -> dict[str, Layout]:
        return {"A": self.a, "B": self.b, "C": self.c}

    def coding(self, operand: str) -> Coding | None:
        """Return how a GPU decodes "A" or "B", or encodes "C"; None if no GPU decodes or encodes it."""
        return {"A": self.codings.a, "B": self.codings.b, "C": self.codings.c}[operand]

    @property
    def remote(self) -> bool:
        return any(layout.requests for layout in self.by_operand.values())

    def with_requests(self, wanted: Mapping[str, int], host: int, *, reads_c: bool) -> "Layouts":
        """Return the layouts with the numbers of requests in flight that a run has.

        `wanted` has the numbers that the user chose, by operand. Other operands keep those of their stores.
        Requests take at most a quarter of the host budget, `host` bytes, unless one per operand takes more.
        """
        layouts = {
            name: layout.changed(requests=wanted.get(name, layout.requests))
            for name, layout in self.by_operand.items()
        }
        while request_bytes(layouts, reads_c=reads_c) > host // 4:
            name = max(layouts, key=lambda one: layouts[one].requests * layouts[one].request_bytes)
            if layouts[name].requests <= 1:
                break
            layouts[name] = layouts[name].changed(requests=layouts[name].requests // 2)
        return replace(self, a=layouts["A"], b=layouts["B"], c=layouts["C"])

    @property
    def operands_in_memory(self) -> bool:
        return self.a.in_memory and self.b.in_memory

    @property
    def in_place(self) -> set[str]:
        """Operands ("A", "B", "C") that the CPU multiplies where they are in the caller's memory."""
        return {operand for operand, layout in self.by_operand.items() if layout.in_place}

    def decoded(self, operand: str, coding: Coding) -> "Layouts":
        """Return the layouts where a GPU decodes "A" or "B", which then counts as being in the page cache."""
        if operand == "A":
            return replace(self, a=self.a.changed(page_cached=True), codings=replace(self.codings, a=coding))
        return replace(self, b=self.b.changed(page_cached=True), codings=replace(self.codings, b=coding))

    def encoded(self, coding: Coding) -> "Layouts":
        """Return the layouts where a GPU encodes C, and the host does not."""
        c = replace(self.c, writing=replace(self.c.writing, encodes=False, encode_bytes=0))
        return replace(self, c=c, codings=replace(self.codings, c=coding))

    def cached_as(self, a: bool, b: bool) -> "Layouts":
        """Return the layouts with A and B in the page cache, or not, as they were when a run was planned.

        The slots of the plan depend on this. If an operand does not count as cached, the host decodes it.
        """
        codings = replace(self.codings, a=self.codings.a if a else None, b=self.codings.b if b else None)
        return replace(
            self, a=self.a.changed(page_cached=a), b=self.b.changed(page_cached=b), codings=codings
        )

    def to_dict(self) -> dict[str, Any]:
        layouts = {
            name.lower(): {"kind": _NAMES[type(layout)]} | asdict(layout)
            for name, layout in self.by_operand.items()
        }
        return layouts | {"codings": asdict(self.codings)}


def request_bytes(layouts: Mapping[str, Layout], *, reads_c: bool) -> int:
    """Return the bytes of temporary host memory that all requests in flight take."""
    return sum(
        layout.requests * layout.request_bytes * (2 if name == "C" and reads_c else 1)
        for name, layout in layouts.items()
    )


# Bytes of C per second that a GPU compresses. An H200 compressed 13 to 30 GB/s during products.
ENCODING_RATE = 14e9
# A function of the coding and the decoded bytes of an array: the bytes per second at which a GPU decodes it.
DecodingRate = Callable[[Coding, int, int], float]


@dataclass(frozen=True, slots=True)
class Route:
    """How blocks of an array with this layout travel. The base class has the answers of most routes.

    Class attributes:

    - `streams`: whether blocks go between the array and the device without host slots.
    - `rings`: whether blocks, or those with short rows, go through the ring.
    - `staged_ahead`: whether threads of the host prepare all blocks, and work ahead if the device has slots
      for that.
    """

    layout: Layout

    streams: ClassVar[bool] = False
    rings: ClassVar[bool] = False
    staged_ahead: ClassVar[bool] = False

    @property
    def lane_scratch(self) -> int:
        """Temporary host memory that a thread of the ring needs to read a block."""
        return 0

    def read_scratch(self, panel: Shape | None) -> int:
        """Return the host bytes that a reader thread needs; those for parts of lines only with `panel`."""
        return 0

    def read_rate(self, machine: MachineModel, whole: Shape, block: Shape) -> float:
        """Return the bytes per second at which Reads deliver blocks of an array of shape `whole`."""
        return INSTANT

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        """Return the bytes per second at which Writes store strips of C."""
        return self.layout.write_rate(machine, strip)

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        """Return the bytes per second at which blocks cross a link, as if their rows were contiguous."""
        return link

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        """Return the seconds for which the host copies a block of `size` bytes to or from pinned memory."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Slotted(Route):
    """Threads read blocks into host slots, or write them. If `digests`, they compute digests of A and B."""

    digests: bool = False

    def read_scratch(self, panel: Shape | None) -> int:
        lines = 0 if panel is None else self.layout.line_scratch(panel)
        return max(self.layout.decode_bytes, lines)

    def read_rate(self, machine: MachineModel, whole: Shape, block: Shape) -> float:
        rate = self.layout.read_rate(machine, block) / self.layout.read_amplification(whole, block)
        return 1 / (1 / rate + DIGEST_SECONDS_PER_BYTE) if self.digests else rate


@dataclass(frozen=True, slots=True)
class Encoded(Slotted):
    """A GPU compresses chunks of C, and threads write the frames from host slots."""

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        return min(link, ENCODING_RATE)


@dataclass(frozen=True, slots=True)
class InPlace(Route):
    """The CPU multiplies blocks where they are, without copying them."""

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        return INSTANT


@dataclass(frozen=True, slots=True)
class Ringed(Route):
    """Blocks pass through the ring between a GPU and an array in host memory or the page cache."""

    streams = True
    rings = True
    staged_ahead = True

    @property
    def lane_scratch(self) -> int:
        return self.layout.scratch_bytes

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        return min(link, self.layout.copy_rate(machine, block))

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return size / self.layout.copy_rate(machine, block)


@dataclass(frozen=True, slots=True)
class Direct(Ringed):
    """A GPU copies blocks directly from or to a pinned array, but blocks with short rows through the ring."""

    staged_ahead = False

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        if self.layout.is_direct(block):
            return link
        return Ringed.copy_rate(self, link, machine, whole, block, decoding)

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return 0.0 if self.layout.is_direct(block) else Ringed.staged(self, machine, size, block)


@dataclass(frozen=True, slots=True)
class Decoded(Route):
    """Compressed chunks are read into pinned buffers, and go to a GPU, which decodes them."""

    coding: Coding

    streams = True
    staged_ahead = True

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        size, panel = (prod(extents) * self.layout.itemsize for extents in (whole, block))
        decoded = decoding(self.coding, size, panel)
        rate = min(link / self.coding.stored_share, decoded)
        return rate / self.layout.read_amplification(whole, block)

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return self.coding.stored_share * size / machine.read
