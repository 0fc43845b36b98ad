"""Describe how arrays are stored: their chunks, lines, requests and codecs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd, inf, prod

from oocgemm.planning.cost.machine import (
    CODEC_WORKERS,
    INSTANT,
    NEW_CHUNK_BYTES,
    REMOTE_WORKERS,
    MachineModel,
)
from oocgemm.planning.problem import Op
from oocgemm.planning.tiling import Shape, ceil_div, overread

# Relative rate of such copies, by the bytes of a separate row of the block: (least bytes, rate). Rows are
# separate unless a block consists of whole rows of the array.
COPIED_ROWS = ((32 << 10, 1.0), (4 << 10, 0.65), (0, 0.5))
# Lines of chunks that are shorter than this many bytes pass through scratch memory, whole ones too.
SHORT_LINE = 4096
# `Layout.line_overread` averages over this many consecutive panels, because they start at different offsets
# in their chunks.
SAMPLED_PANELS = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array X is stored. Shapes and axes are those of op(X), which may be the transpose of X.

    Chunks:

    - `read_chunk`: shape of the chunks that are read. Unless `partial_reads`, a chunk is always read and
      decoded as a whole.
    - `write_chunk`: shape of the unit, a chunk or a shard, that only one thread at a time may write to.
    - `free_chunks`: the array does not exist yet, and the planner chooses its chunks.
    - `existing`: C exists before the run, so that elements which the run does not write stay as they are.
    - `decode_bytes`, `encode_bytes`: temporary host memory to read or to write one chunk; 0 if none.
    - `encodes`: writing runs a codec.
    - `resident_bytes`: host memory that the array occupies during the whole run, besides what is read.

    Lines are runs of contiguous elements:

    - `contiguous`: the axis along which elements of `itemsize` bytes are contiguous.
    - `line`: elements per line; 0 means the chunk's extent along that axis.
    - `scratch_bytes`: host memory that a thread needs to read or write parts of lines.
    - `page_cached`: the array is in files that the page cache contains, or will contain once they have been
      read. So blocks of A and B that a GPU uses again need no cache of ours in host memory.

    Arrays in object stores:

    - `requests`: the maximum number of requests in flight, each for a chunk or a part of one; 0 for arrays
      elsewhere.
    - `request_bytes`: temporary host memory that a request takes, for codecs too.
    - `request_chunk`: shape of the block of small chunks of a shard that a request reads; (1, 1) if it reads
      one chunk.

    Compressed chunks that a GPU decodes (`oocgemm.planning.cost.decoding`):

    - `decoded`: how chunks are compressed, such as "blosc-zstd"; "" if the host decodes them. If it is set,
      `page_cached` is too.
    - `stream_bytes`: decoded bytes of a stream, the unit that is decoded independently of others.
    - `stored_share`: bytes in storage per decoded byte.
    - `encoded`: for C, how a GPU compresses its chunks, such as "blosc-zstd"; "" if the host does.

    Arrays in host memory:

    - `in_memory`: the array is in host memory, not in a file.
    - `zero_copy_width`: half of this many contiguous elements per row of a block suffice for a direct copy
      between the array and the device, without a pinned buffer; 0 means that no block may be copied directly.
    - `pinned`: the caller has pinned the array. Blocks of other arrays are never copied directly.
    - `in_place`: the CPU multiplies blocks of the array where they are, without copying them into slots.
    """

    read_chunk: Shape = (1, 1)
    write_chunk: Shape = (1, 1)
    partial_reads: bool = True
    decode_bytes: int = 0
    encode_bytes: int = 0
    resident_bytes: int = 0
    encodes: bool = False
    in_memory: bool = False
    free_chunks: bool = False
    contiguous: int = 1
    line: int = 0
    itemsize: int = 8
    scratch_bytes: int = 0
    page_cached: bool = False
    zero_copy_width: int = 0
    pinned: bool = False
    in_place: bool = False
    requests: int = 0
    request_bytes: int = 0
    request_chunk: Shape = (1, 1)
    decoded: str = ""
    stream_bytes: int = 0
    stored_share: float = 1.0
    encoded: str = ""
    existing: bool = False

    def oriented(self, op: Op) -> "Layout":
        """Turn a layout of X into one of op(X)."""
        if not op.swaps:
            return self
        return replace(
            self,
            read_chunk=self.read_chunk[::-1],
            write_chunk=self.write_chunk[::-1],
            request_chunk=self.request_chunk[::-1],
            contiguous=1 - self.contiguous,
        )

    def line_overread(self, panel: Shape) -> float:
        """Elements in all lines that panels of shape `panel` overlap, per element in the panels.

        A line is a run of contiguous elements of the stored array. The ratio is 1 if panels consist of whole
        lines.
        """
        extent = panel[self.contiguous]
        if not self.partial_reads or self.in_memory or not extent:
            return 1.0
        if self.line:
            return max(1.0, self.line / extent)
        return overread(SAMPLED_PANELS * extent, extent, self.read_chunk[self.contiguous])

    def segment_bytes(self, panel: Shape) -> float:
        """Mean bytes of a panel per part of a line in it; inf if panels consist of whole lines.

        A line is a run of contiguous elements of the stored array. Each part of a line takes a separate
        request to the store. `panel` is the shape of the panels.

        >>> npy, raw = Layout(line=4000, itemsize=8), Layout((500, 500), itemsize=8)
        >>> [npy.segment_bytes((64, k)) for k in (1000, 4000)]
        [8000.0, inf]
        >>> [raw.segment_bytes((64, k)) for k in (250, 500, 750)]
        [2000.0, inf, 6000.0]
        """
        extent, chunk = panel[self.contiguous], self.read_chunk[self.contiguous]
        if not self.partial_reads or self.in_memory or not extent:
            return inf
        if self.line:
            segments = float(extent < self.line)
        else:
            # The mean number of lines that a row of a panel contains only in part. A line is as long as a
            # chunk.
            even = gcd(extent, chunk)
            segments = (extent + chunk - even - max(0, extent - chunk + even)) / chunk
        return extent * self.itemsize / segments if segments else inf

    def line_scratch(self, panel: Shape) -> int:
        """Temporary host bytes that a thread needs to read panels of shape `panel`.

        A chunked array needs none if panels consist of whole lines of its chunks, and these are not short.
        """
        short = self.read_chunk[self.contiguous] * self.itemsize < SHORT_LINE
        return self.scratch_bytes if self.line or short or self.segment_bytes(panel) < inf else 0

    @property
    def contiguous_rows(self) -> bool:
        """Whether this is an array in memory that a device could copy, as far as its rows are concerned."""
        return self.in_memory and self.zero_copy_width > 0

    def is_direct(self, panel: Shape) -> bool:
        """Whether the device copies blocks of shape `panel` directly from or to an array in host memory."""
        return self.pinned and 0 < self.zero_copy_width <= 2 * panel[self.contiguous]

    def read_amplification(self, shape: Shape, panel: Shape) -> float:
        """Ratio of the bytes read to the bytes needed, if an array is read panel by panel."""
        if self.partial_reads:
            return 1.0
        return overread(shape[0], panel[0], self.read_chunk[0]) * overread(
            shape[1], panel[1], self.read_chunk[1]
        )

    def copy_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second of copies between a pageable array or a file and pinned buffers."""
        if self.page_cached:
            return self.read_rate(machine, panel)
        row = panel[self.contiguous]
        # Whole rows of an array, which are contiguous, have at least `zero_copy_width` elements.
        size = COPIED_ROWS[0][0] if 0 < self.zero_copy_width <= row else row * self.itemsize
        return machine.memory * next(rate for least, rate in COPIED_ROWS if size >= least)

    def read_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second at which panels of shape `panel` are read from an array."""
        if self.in_place:
            return INSTANT
        if self.in_memory:
            return machine.memory
        if self.requests:
            return self.object_rate(machine, panel)
        if self.decode_bytes:
            chunks = prod(
                ceil_div(extent, chunk) for extent, chunk in zip(panel, self.read_chunk, strict=True)
            )
            return machine.decode * min(1.0, CODEC_WORKERS * max(1, chunks) / machine.cores)
        # Between two rows of a panel, the file has bytes that are not needed. Either these bytes are read
        # too, or the next row takes another request. The model counts the shorter of these times.
        gaps = (self.line_overread(panel) - 1) * max(0.0, 1 / machine.read_scattered - 1 / machine.read)
        return 1 / (1 / machine.read + min(gaps, machine.segment / self.segment_bytes(panel)))

    def object_rate(self, machine: MachineModel, panel: Shape) -> float:
        """Return the bytes per second at which panels of shape `panel` are read from or written to objects.

        Each chunk takes a request: its latency, then the time of its bytes at the rate of one connection.
        As many requests are in flight as the layout says, if `REMOTE_WORKERS` panels have so many chunks.
        """
        unit, total = max(self.read_chunk, self.write_chunk), prod(panel) * self.itemsize
        chunks = prod(ceil_div(extent, chunk) for extent, chunk in zip(panel, unit, strict=True))
        if self.free_chunks:
            chunks = ceil_div(total, NEW_CHUNK_BYTES)
        size = max(1.0, total / max(1, chunks))
        in_flight = min(self.requests, REMOTE_WORKERS * max(1, chunks))
        return min(machine.remote, in_flight * size / (machine.request_latency + size / machine.connection))

    def partial_line_cost(self, machine: MachineModel, panel: Shape) -> float:
        """Return how many times as long it takes to read panels of shape `panel` as to read whole lines.

        A line is a run of contiguous elements of the stored array. Both read the same number of bytes, so
        that the result is at least 1.
        """
        if self.in_memory or self.decode_bytes or self.requests:
            return 1.0
        return max(1.0, machine.read / self.read_rate(machine, panel))


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of op(A), op(B) and C."""

    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=Layout)
    c: Layout = field(default_factory=Layout)

    @property
    def by_operand(self) -> dict[str, Layout]:
        """The layouts by the names of the operands, "A", "B" and "C"."""
        return {"A": self.a, "B": self.b, "C": self.c}

    @property
    def remote(self) -> bool:
        """Whether any array is in an object store."""
        return any(layout.requests for layout in self.by_operand.values())

    def with_requests(self, wanted: Mapping[str, int], host: int, *, reads_c: bool) -> "Layouts":
        """Return the layouts with the numbers of requests in flight that a run has.

        Args:
            wanted: the numbers that the user chose, by operand. The others are those that the stores want.
            host: the host budget in bytes. Requests take at most a quarter of it, unless one per operand
                takes more.
            reads_c: whether C is read, too.
        """
        layouts = {
            name: replace(layout, requests=wanted.get(name, layout.requests)) if layout.requests else layout
            for name, layout in self.by_operand.items()
        }
        while request_bytes(layouts, reads_c=reads_c) > host // 4:
            name = max(layouts, key=lambda one: layouts[one].requests * layouts[one].request_bytes)
            if layouts[name].requests <= 1:
                break
            layouts[name] = replace(layouts[name], requests=layouts[name].requests // 2)
        return Layouts(layouts["A"], layouts["B"], layouts["C"])

    @property
    def operands_in_memory(self) -> bool:
        """Whether both A and B are in memory."""
        return self.a.in_memory and self.b.in_memory

    @property
    def in_place(self) -> set[str]:
        """Operands ("A", "B", "C") that the CPU multiplies where they are in the caller's memory."""
        return {operand for operand, layout in self.by_operand.items() if layout.in_place}

    def cached_as(self, a: bool, b: bool) -> "Layouts":
        """Return the layouts with A and B in the page cache, or not, as when a run was planned.

        The page cache may have changed since then, and the slots of the plan depend on it. If an operand does
        not count as cached, the host decodes it.
        """
        found = (
            replace(layout, page_cached=cached, decoded=layout.decoded if cached else "")
            for layout, cached in ((self.a, a), (self.b, b))
        )
        return replace(self, a=next(found), b=next(found))


def request_bytes(layouts: Mapping[str, Layout], *, reads_c: bool) -> int:
    """Return the bytes of temporary host memory that all requests in flight take."""
    return sum(
        layout.requests * layout.request_bytes * (2 if name == "C" and reads_c else 1)
        for name, layout in layouts.items()
    )
