"""The schedule: every copy and every multiplication of a run, and the buffers that they use, as data.

A schedule is the *sequential* program of the run, in the order in which one would write it without overlap::

    for each tile (i, j):
        [load C]                                       beta != 0
        for each step p but the last few:
            Read A(i,p) -> host slot    Upload A -> A0 or A1
            Read B(p,j) -> host slot    Upload B -> B0 or B1
            [Prepare  A_p, B_p -> residue planes]          compute = emulated
            Multiply  C0 += A_p B_p
        Read, Upload the panels of the last few steps
        for each strip of rows of C0:
            Multiply  C0[strip] += A_p[strip] B_p      for each of these steps
            [Finish]  Download -> host slot  Write         accumulator wider than C

The last steps of a tile run strip by strip: one strip (a block of rows of the tile) is downloaded and written
while the next strip is multiplied. With only one accumulator, the first steps of the next tile also run strip
by strip, into strips that have been downloaded.

In a run, operations of different streams overlap. They wait for one another only if they access the same part
of a buffer (`oocgemm.planning.schedule.hazards`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import NamedTuple

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads, Placed, Placing
from oocgemm.planning.schedule.slots import Region, Slot, Slots, Tier, slot_of
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import Range, Tile, TileGrid, ceil_div, length


class Kind(StrEnum):
    """What an operation does: copy from or to storage, copy from or to the device, or compute."""

    READ = "read"
    UPLOAD = "upload"
    PREPARE = "prepare"
    MULTIPLY = "multiply"
    FINISH = "finish"
    DOWNLOAD = "download"
    WRITE = "write"


class Lane(StrEnum):
    """Where an operation runs. Reports have one row per lane."""

    READ = "read"
    DECODE = "decode"
    H2D = "h2d"
    PREPARE = "prepare"
    COMPUTE = "compute"
    D2H = "d2h"
    ENCODE = "encode"
    WRITE = "write"


LANES = {
    Kind.READ: Lane.READ,
    Kind.UPLOAD: Lane.H2D,
    Kind.PREPARE: Lane.PREPARE,
    Kind.MULTIPLY: Lane.COMPUTE,
    Kind.FINISH: Lane.COMPUTE,
    Kind.DOWNLOAD: Lane.D2H,
    Kind.WRITE: Lane.WRITE,
}


# Replacements of lanes in `LANES`, for Reads that decode chunks and Writes that encode chunks.
_CODED = {Lane.READ: Lane.DECODE, Lane.WRITE: Lane.ENCODE}
_LOADS = (Kind.READ, Kind.UPLOAD)


class Operation(NamedTuple):
    """One copy or one computation.

    - `kind`, `operand`: what the operation does, and with which operand.
    - `tile`, `step`: the tile of C and the step along k that it belongs to.
    - `reads`, `writes`: the regions of slots (buffers) that it reads and writes.
    - `m`, `n`, `k`: ranges of indices of the product. A copy of a panel of op(A) has m and k, one of op(B)
      has k and n, and one of C has m and n. A Prepare and a Multiply have all three.
    - `bytes`: bytes that it copies. `flops`: real floating-point operations.
    - `first`: it is the first Multiply of its tile, which applies beta.
    - `coded`: it is a Read that decodes or a Write that encodes.
    """

    kind: Kind
    operand: str
    tile: Tile
    step: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    m: Range = (0, 0)
    n: Range = (0, 0)
    k: Range = (0, 0)
    bytes: int = 0
    flops: int = 0
    first: bool = False
    coded: bool = False
    device: int = 0

    @property
    def lane(self) -> Lane:
        """Where the operation runs.

        A Read that decodes is in "decode" instead of "read". A Write that encodes is in "encode" instead of
        "write".
        """
        lane = LANES[self.kind]
        return _CODED.get(lane, lane) if self.coded else lane

    @property
    def stream(self) -> str:
        """The name of the queue that the operation is issued to.

        It is the name of the operation's lane. Only loads of C have queues of their own, such as "read-c", so
        that they do not queue behind loads of A and B.
        """
        lane = self.lane.value
        return f"{lane}-c" if self.operand == "C" and self.kind in _LOADS else lane

    @property
    def block(self) -> tuple[Range, Range]:
        """Ranges of rows and columns that the operation accesses in op(A), op(B) or C."""
        if self.operand == "A":
            return self.m, self.k
        return (self.k if self.operand == "B" else self.m), self.n

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.block
        return f"{self.kind} {self.operand}[{r0}:{r1}, {c0}:{c1}] of tile {self.tile}, step {self.step}"


@dataclass(frozen=True)
class Schedule:
    """The operations of a run that computes `tiles` in the given order.

    A schedule can be iterated repeatedly, and creates its operations during iteration.

    `coded` are the operands ("A", "B", "C") whose chunks are decoded or encoded. `last` is the tile that a
    run over all of C would compute last, even if this run does not compute it.
    """

    problem: GemmProblem
    grid: TileGrid
    tiles: Sequence[Tile]
    slots: Slots
    coded: frozenset[str] = frozenset()
    last: Tile | None = None

    def __iter__(self) -> Iterator[Operation]:
        strips_done = prepared = 0
        placing = self._placing()
        for position, tile in enumerate(self.tiles):
            strips = list(enumerate(self._strips(tile), strips_done))
            strips_done += len(strips)
            c_slot = slot_of(Tier.DEVICE, "C", position % self.slots.c)
            if self.problem.reads_c and not self.problem.finishes:
                for number, rows in strips:
                    yield from self._load_c(tile, rows, number, c_slot, whole_tile=True)
            order = step_order(tile, self.grid.steps, self.grid.ramp)
            left, first_step = len(order), order[0]
            by_strips = False
            for by_strips, group in placing.groups(position):
                left -= len(group)
                for step, a, b in group:
                    yield from self._load_panel("A", tile, step, a)
                    yield from self._load_panel("B", tile, step, b)
                planes: dict[int, Region] = {}
                for step, a, b in group if self.slots.planes else ():
                    if length(self.grid.depth(step)):
                        slot = slot_of(Tier.DEVICE, "P", prepared % self.slots.planes)
                        planes[step] = Region(slot, 0, 1)
                        prepared += 1
                        yield self._prepare(tile, step, a, b, planes[step])
                for number, rows in strips if by_strips else [(0, self.grid.rows(tile[0]))]:
                    for step, a, b in group:
                        inputs = self._inputs(tile, step, a, b, planes)
                        yield self._multiply(tile, rows, step, inputs, c_slot, first=step == first_step)
                    if by_strips and not left:
                        yield from self._drain(tile, rows, number, c_slot)
            if not by_strips:
                for number, rows in strips:
                    yield from self._drain(tile, rows, number, c_slot)

    def loads(self) -> Loads:
        """Count the bytes of panels of A and B that the run loads, without creating the operations."""
        loads = self.loads_within(inf)
        assert loads is not None
        return loads

    def loads_within(self, max_work: float) -> Loads | None:
        """Count the bytes of panels that the run loads, or return None if that takes too long.

        `max_work` limits the work, in placements of one panel in slots. Each takes about 10 us.
        """
        depths = [length(self.grid.depth(p)) for p in range(self.grid.steps + self.grid.ramp + 1)]
        heights, widths = (lambda i: length(self.grid.rows(i))), (lambda j: length(self.grid.cols(j)))
        found = self._placing().loads(depths, heights, widths, max_work)
        if found is None:
            return None
        (a_up, a_read), (b_up, b_read) = found
        a, b = self.problem.itemsizes["A"], self.problem.itemsizes["B"]
        return Loads(a_up * a, b_up * b, a_read * a, b_read * b)

    def traffic(self, loads: Loads | None = None, in_place: Collection[str] = ()) -> dict[str, int]:
        """Count the bytes that cross each link ("read", "h2d", "d2h", "write") during the whole run.

        The operands in `in_place` cross none: they are multiplied where they are.
        """
        loads = loads or self.loads()
        loads = replace(
            loads,
            a_read=0 if "A" in in_place else loads.a_read,
            b_read=0 if "B" in in_place else loads.b_read,
        )
        c = 0 if "C" in in_place else self.problem.itemsizes["C"] * self.elements
        c_in = c if self.problem.reads_c else 0
        read, up = int(loads.a_read + loads.b_read) + c_in, int(loads.a_up + loads.b_up) + c_in
        if self.slots.unified:
            return {"read": read, "h2d": 0, "d2h": 0, "write": c}
        # The device copies from or to the arrays of operands without host slots: nothing is read or written.
        passed = {"A": loads.a_read, "B": loads.b_read, "C": c_in}
        read = int(sum(size for operand, size in passed.items() if not self.slots.streams(operand)))
        return {"read": read, "h2d": up, "d2h": c, "write": 0 if self.slots.streams("C") else c}

    @property
    def elements(self) -> int:
        """Elements of C in the tiles of the schedule."""
        down, across = self.grid.shape
        if len(self.tiles) == down * across:
            return self.grid.m * self.grid.n
        return sum(map(self.grid.elements, self.tiles))

    def _placing(self) -> Placing:
        return Placing(self.tiles, self.grid.steps, self.slots, self.grid.ramp, self.last)

    def _strips(self, tile: Tile) -> Iterator[Range]:
        m0, m1 = self.grid.rows(tile[0])
        for start in range(m0, m1, self.slots.strip):
            yield start, min(start + self.slots.strip, m1)

    def _load_panel(self, operand: str, tile: Tile, step: int, placed: Placed) -> Iterator[Operation]:
        k = self.grid.depth(step)
        if not placed.upload or k[0] == k[1]:
            return
        nothing = (0, 0)
        m = self.grid.rows(tile[0]) if operand == "A" else nothing
        n = self.grid.cols(tile[1]) if operand == "B" else nothing
        elements = length(k) * length(m if operand == "A" else n)
        size = elements * self.problem.itemsizes[operand]
        coded = operand in self.coded
        device = Region(slot_of(Tier.DEVICE, operand, placed.device_slot), 0, elements)
        if self.slots.unified:
            yield Operation(Kind.READ, operand, tile, step, (), (device,), m, n, k, size, coded=coded)
            return
        if self.slots.streams(operand):
            yield Operation(Kind.UPLOAD, operand, tile, step, (), (device,), m, n, k, size)
            return
        host = Region(slot_of(Tier.HOST, operand, placed.host_slot), 0, elements)
        if placed.read:
            yield Operation(Kind.READ, operand, tile, step, (), (host,), m, n, k, size, coded=coded)
        yield Operation(Kind.UPLOAD, operand, tile, step, (host,), (device,), m, n, k, size)

    def _inputs(
        self, tile: Tile, step: int, a: Placed, b: Placed, planes: Mapping[int, Region]
    ) -> tuple[Region, ...]:
        """Return the regions that a Multiply reads: the step's panels and, if emulated, their residues."""
        m, n, k = (
            length(x) for x in (self.grid.rows(tile[0]), self.grid.cols(tile[1]), self.grid.depth(step))
        )
        if k == 0:
            return ()
        panels = (
            Region(slot_of(Tier.DEVICE, "A", a.device_slot), 0, m * k),
            Region(slot_of(Tier.DEVICE, "B", b.device_slot), 0, k * n),
        )
        return (*panels, planes[step]) if step in planes else panels

    def _prepare(self, tile: Tile, step: int, a: Placed, b: Placed, planes: Region) -> Operation:
        m, n, k = self.grid.rows(tile[0]), self.grid.cols(tile[1]), self.grid.depth(step)
        size = (length(m) + length(n)) * length(k) * self.problem.itemsizes["A"]
        reads = self._inputs(tile, step, a, b, {})
        return Operation(Kind.PREPARE, "P", tile, step, reads, (planes,), m, n, k, size)

    def _multiply(
        self, tile: Tile, rows: Range, step: int, inputs: tuple[Region, ...], c_slot: Slot, *, first: bool
    ) -> Operation:
        n, k = self.grid.cols(tile[1]), self.grid.depth(step)
        c = self._in_tile(c_slot, tile, rows)
        keeps_old = not first or (self.problem.reads_c and not self.problem.finishes)
        sums = self._sums(c_slot, tile, rows)
        return Operation(
            Kind.MULTIPLY,
            "C",
            tile,
            step,
            (*inputs, c) if keeps_old else inputs,
            (c, *sums),
            rows,
            n,
            k,
            flops=self.problem.step_flops(length(rows), length(n), length(k)),
            first=first,
        )

    def _load_c(
        self, tile: Tile, rows: Range, number: int, slot: Slot, *, whole_tile: bool
    ) -> Iterator[Operation]:
        """Load the old elements of a strip (some rows of a tile) of C, to which beta applies.

        They go into the accumulator of the tile if `whole_tile`, otherwise into a buffer for one strip.
        """
        n, size, host = self._strip_parts(tile, rows, number)
        target = self._in_tile(slot, tile, rows) if whole_tile else Region(slot, 0, host.stop)
        targets = (target, *self._sums(slot, tile, rows)) if whole_tile else (target,)
        coded = "C" in self.coded
        if self.slots.unified:
            yield Operation(Kind.READ, "C", tile, 0, (), (target,), rows, n, bytes=size, coded=coded)
            return
        sources: tuple[Region, ...] = ()
        if not self.slots.streams("C"):
            sources = (host,)
            yield Operation(Kind.READ, "C", tile, 0, (), sources, rows, n, bytes=size, coded=coded)
        yield Operation(Kind.UPLOAD, "C", tile, 0, sources, targets, rows, n, bytes=size)

    def _drain(self, tile: Tile, rows: Range, number: int, c_slot: Slot) -> Iterator[Operation]:
        """Finish rows of the accumulator (apply alpha and beta), download them and write them to storage."""
        n, size, host = self._strip_parts(tile, rows, number)
        source, sums = self._in_tile(c_slot, tile, rows), self._sums(c_slot, tile, rows)
        last = self.grid.steps - 1
        if self.problem.finishes:
            finished = Region(slot_of(Tier.DEVICE, "D", number % self.slots.finish), 0, host.stop)
            if self.problem.reads_c:
                yield from self._load_c(tile, rows, number, finished.slot, whole_tile=False)
            inputs = (source, finished, *sums) if self.problem.reads_c else (source, *sums)
            yield Operation(Kind.FINISH, "D", tile, last, inputs, (finished,), rows, n)
            source, sums = finished, ()
        coded = "C" in self.coded
        if self.slots.unified:
            yield Operation(Kind.WRITE, "C", tile, last, (source,), (), rows, n, bytes=size, coded=coded)
            return
        if self.slots.streams("C"):
            yield Operation(Kind.DOWNLOAD, "C", tile, last, (source,), sums, rows, n, bytes=size)
            return
        yield Operation(Kind.DOWNLOAD, "C", tile, last, (source,), (host, *sums), rows, n, bytes=size)
        yield Operation(Kind.WRITE, "C", tile, last, (host,), (), rows, n, bytes=size, coded=coded)

    def _strip_parts(self, tile: Tile, rows: Range, number: int) -> tuple[Range, int, Region]:
        """Return (range of columns, size in bytes, region of a host slot) of a strip of C.

        The strip consists of the given `rows` of a tile. `number` is its number in the run. Strips use the
        host slots in turn.
        """
        n = self.grid.cols(tile[1])
        elements = length(rows) * length(n)
        host = Region(slot_of(Tier.HOST, "C", number % max(1, self.slots.host_c)), 0, elements)
        return n, elements * self.problem.itemsizes["C"], host

    def _sums(self, slot: Slot, tile: Tile, rows: Range) -> tuple[Region, ...]:
        """Return the region of the checksums of `rows` of a tile, in a tuple.

        The tuple is empty unless the device computes checksums.

        These checksums, which are stored behind the tile, need a region of their own. The regions of elements
        do not suffice: in two tiles of different widths that use the same accumulator, strip s has its
        elements at different offsets, but its checksums at the same address.

        The checksums behind a panel, or behind a strip in another slot, need no region of their own. Every
        operation on them also accesses the elements of that panel or strip.
        """
        if self.problem.checked != "device":
            return ()
        top, strip = self.grid.rows(tile[0])[0], self.slots.strip
        strips = (rows[0] - top) // strip, ceil_div(rows[1] - top, strip)
        return (Region(slot_of(Tier.DEVICE, "S", slot.index), *strips),)

    def _in_tile(self, slot: Slot, tile: Tile, rows: Range) -> Region:
        """Return the region of some rows of the tile in its accumulator."""
        top, cols = self.grid.rows(tile[0])[0], length(self.grid.cols(tile[1]))
        return Region(slot, (rows[0] - top) * cols, (rows[1] - top) * cols)
