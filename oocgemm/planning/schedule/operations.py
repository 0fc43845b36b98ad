"""The schedule: every copy and every multiplication of a run, and the buffers that they use, as data.

A schedule is the *sequential* program of the run, in the order in which one would write it without overlap::

    for each tile (i, j):
        [load C]                                       beta != 0
        for each step p but the last few:
            Read A(i,p) -> host slot    Upload A -> A0 or A1
            Read B(p,j) -> host slot    Upload B -> B0 or B1
            [Prepare  A_p, B_p -> residues, expanded]      emulated or transformed
            Multiply  C0 += A_p B_p
        Read, Upload the panels of the last few steps
        for each strip of rows of C0:
            Multiply  C0[strip] += A_p[strip] B_p      for each of these steps
            [Finish]  Download -> host slot  Write         accumulator wider than C

The last steps of a tile run strip by strip: one strip (a block of rows of the tile) is downloaded and written
while the next strip is multiplied. With only one accumulator, the first steps of the next tile also run strip
by strip, into strips that have been downloaded.

If B is A^H (`oocgemm.planning.problem.Same`), B(p,j) is the panel of A that belongs to tile row j, in the
same slots. A tile on the diagonal uses one panel per step, and is always multiplied strip by strip, because
its strips differ in width (`TileGrid`).

If two products are chained (`problem.Updated`), each Multiply also changes its panel of B. C is then one
tile of one strip, so that this happens once for each panel.

If only the largest elements of each row of C are kept (`Sink.per_row`), a tile ends in another way
(`Selecting`). The device keeps the largest elements so far of every row of C in one slot, D. The Finish of a
tile updates the rows of this tile. When the last tile of a tile row has been finished, the elements of its
rows are downloaded and written. No other element of C leaves the device. A tile of a Gram matrix also has
elements of the rows that have the numbers of its columns: the mirror images of its elements. A strip on the
diagonal of C has elements of both triangles in its diagonal block. Its elements left of this block are
mirrored.

In a run, operations of different streams overlap. They wait for one another only if they access the same part
of a buffer (`oocgemm.planning.schedule.operation`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from oocgemm.planning.cover import WHOLE
from oocgemm.planning.lowering import Lowered, lower
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import (
    STORE_KINDS,
    Kind,
    Operation,
    Region,
    Slot,
    Slots,
    Tier,
    lane_and_stream,
    slot_of,
)
from oocgemm.planning.schedule.placement import Counts, Loads, Placed, Placing, Step
from oocgemm.planning.schedule.traversal import NextUse
from oocgemm.planning.tiling import Range, Tile, TileGrid, ceil_div, length
from oocgemm.values import dataclass

NOTHING: Range = (0, 0)


class TilePlace(NamedTuple):
    """Where a tile is: in C, by its `rows` and `cols`, and on the device, in an accumulator.

    `parts` is the number of the tile's strips. `staircase` tells that the strips differ in width
    (`TileGrid`).
    """

    tile: Tile
    rows: Range
    cols: Range
    slot: Slot
    parts: int
    staircase: bool


@dataclass(frozen=True)
class Schedule:
    """The operations of a run that computes `tiles` in the given order.

    A schedule can be iterated repeatedly, and creates its operations during iteration.

    `coded` are the operands ("A", "B", "C") whose chunks are decoded or encoded. `last` is the tile that a
    run over all of C would compute last, even if this run does not compute it. If such a run has several
    devices, it would compute the tiles `ends` last instead. `device` is the device that computes the tiles.
    `alternates` is that of the traversal.
    """

    problem: GemmProblem
    grid: TileGrid
    tiles: Sequence[Tile]
    slots: Slots
    coded: frozenset[str] = frozenset()
    last: Tile | None = None
    device: int = 0
    ends: frozenset[Tile] = frozenset()
    alternates: bool = True

    def __iter__(self) -> Iterator[Operation]:
        for _, operations in self.batches(self._placing()):
            yield from operations

    @cached_property
    def lowered(self) -> Lowered:
        """The decisions about what the operations of the run do."""
        return lower(self.problem, self.slots, self.coded)

    @cached_property
    def _depths(self) -> list[Range]:
        return [self.grid.depth(step) for step in range(self.grid.steps)]

    def batches(self, placing: Placing) -> Iterator[tuple[int, Iterator[Operation]]]:
        """Yield (number of steps, operations) for each group of steps that are loaded together.

        `placing` places the panels of the schedule's tiles. Iterate over the operations of a group before you
        take the next group.
        """
        strips_done = prepared = 0
        selecting = Selecting(self) if self.lowered.per_row else None
        grid, shape, depths, square = self.grid, self.grid.tile, self._depths, self.grid.cover.square
        for position, tile in enumerate(self.tiles):
            top, left = tile[0] * shape.m, tile[1] * shape.n
            m, n = (top, min(top + shape.m, grid.m)), (left, min(left + shape.n, grid.n))
            cuts = range(m[0], m[1], self.slots.strip)
            strips = [
                (i, (top, min(top + self.slots.strip, m[1]))) for i, top in enumerate(cuts, strips_done)
            ]
            strips_done += len(strips)
            c_slot = slot_of(Tier.DEVICE, "C", position % self.slots.c, self.device)
            place = TilePlace(tile, m, n, c_slot, len(strips), square and grid.is_staircase(tile))
            first_step = -1
            left = len(depths)
            for by_strips, group in placing.groups(position):
                old_c = strips if left == len(depths) else []
                first_step = group[0][0] if left == len(depths) else first_step
                left -= len(group)
                planes: dict[int, Region] = {}
                for step, _, _ in group if self.slots.planes else ():
                    if depths[step][0] < depths[step][1]:
                        slot = slot_of(Tier.DEVICE, "P", prepared % self.slots.planes, self.device)
                        planes[step] = Region(slot, 0, 1)
                        prepared += 1
                apart = by_strips or place.staircase
                parts = [(part,) for part in strips] if apart else [strips]
                drains = not left and selecting is None
                yield len(group), self._batch(place, group, planes, old_c, parts, first_step, drains)
            if selecting is not None:
                yield 0, selecting.operations(position, place, [each for _, each in strips])

    def _batch(
        self,
        place: TilePlace,
        group: Sequence[Step],
        planes: Mapping[int, Region],
        old_c: Sequence[tuple[int, Range]],
        parts: Sequence[Sequence[tuple[int, Range]]],
        first_step: int,
        drains: bool,
    ) -> Iterator[Operation]:
        """Yield the operations of a group of steps.

        `old_c` are the numbered strips of the old C to load first. Each of `parts` consists of the numbered
        strips that are multiplied together. With `drains`, the strips drain after the group.
        """
        lowered, depths = self.lowered, self._depths
        if lowered.loads_old:
            for number, rows in old_c:
                yield from self._load_c(place, rows, number, place.slot, whole_tile=True)
        for step, a, b in group:
            yield from self._load_panel("A", place, place.rows, step, a)
            if lowered.right == "B":
                yield from self._load_panel("B", place, place.cols, step, b)
            elif place.tile[0] != place.tile[1]:
                yield from self._load_panel("A", place, self.grid.rows(place.tile[1]), step, b)
        inputs = {step: self._inputs(place, depths[step], a, b) for step, a, b in group}
        for step, _, _ in group:
            if step in planes:
                yield self._prepare(place, step, inputs[step], planes[step])
                inputs[step] = *inputs[step], planes[step]
        for strips in parts:
            rows = strips[0][1][0], strips[-1][1][1]
            for step, _, _ in group:
                yield self._multiply(place, rows, step, inputs[step], first=step == first_step)
            for number, rows in strips if drains else ():
                yield from self._drain(place, rows, number)

    def loads(self) -> Loads:
        """Count the bytes of panels of A and B that the run loads, without creating the operations."""
        loads = self.loads_within(inf)
        assert loads is not None
        return loads

    def loads_within(self, max_work: float) -> Loads | None:
        """Count the bytes of panels that the run loads, or return None if that takes too long.

        `max_work` limits the work, in placements of one panel in slots. Each takes about 10 us.
        """
        found = self._placing().loads(*self._extents, max_work)
        return None if found is None else self._in_bytes(found)

    @property
    def _extents(self) -> tuple[list[int], Callable[[int], int], Callable[[int], int]]:
        """The depths of steps, and functions that return the heights of tile rows and widths of columns."""
        grid, depths = self.grid, list(map(length, self._depths))
        return depths, (lambda i: length(grid.rows(i))), (lambda j: length(grid.cols(j)))

    def _in_bytes(self, counts: Counts) -> Loads:
        ((a_up, a_read), (b_up, b_read)), sizes = counts, self.problem.itemsizes
        return Loads(a_up * sizes["A"], b_up * sizes["B"], a_read * sizes["A"], b_read * sizes["B"])

    def traffic(self, loads: Loads | None = None, in_place: Collection[str] = ()) -> dict[str, int]:
        """Count the bytes that cross each link ("read", "h2d", "d2h", "write") during the whole run.

        The operands in `in_place` cross no link: they are multiplied where they are.
        """
        loads = loads or self.loads()
        loads = replace(
            loads,
            a_read=0 if "A" in in_place else loads.a_read,
            b_read=0 if "B" in in_place else loads.b_read,
        )
        size = self.problem.itemsizes["C"]
        c, written = (
            (0, 0) if "C" in in_place else (size * self.elements_stored, size * self.elements_written)
        )
        down = written if self.slots.streams("C") else c
        c_in = c if self.problem.reads_c else 0
        read, up = int(loads.a_read + loads.b_read) + c_in, int(loads.a_up + loads.b_up) + c_in
        if self.slots.unified:
            return {"read": read, "h2d": 0, "d2h": 0, "write": written}
        # The device copies from or to the arrays of operands without host slots: nothing is read or written.
        passed = {"A": loads.a_read, "B": loads.b_read, "C": c_in}
        read = int(sum(size for operand, size in passed.items() if not self.slots.streams(operand)))
        return {"read": read, "h2d": up, "d2h": down, "write": 0 if self.slots.streams("C") else written}

    @property
    def elements(self) -> int:
        """Elements of C in the tiles of the schedule."""
        down, across = self.grid.shape
        if len(self.tiles) == down * across and self.grid.cover == WHOLE:
            return self.grid.m * self.grid.n
        return sum(map(self.grid.elements, self.tiles))

    @property
    def elements_stored(self) -> int:
        """Elements that the device returns: those of C, or the selected elements of its rows."""
        return self.problem.sink.count(self.grid.m, self.elements)

    @property
    def elements_written(self) -> int:
        """Elements of C that the schedule writes. Mirrored elements count twice."""
        if not self.problem.sink.stores_c:
            return self.elements_stored
        return sum(map(self.grid.written, self.tiles)) if self.grid.cover.mirrored else self.elements

    def _placing(self) -> Placing:
        given = self.tiles, self.grid.steps, self.slots, self.last
        return Placing(*given, ends=self.ends, alternates=self.alternates)

    def operation(
        self,
        kind: Kind,
        operand: str,
        place: TilePlace,
        step: int,
        reads: tuple[Region, ...],
        writes: tuple[Region, ...],
        m: Range = NOTHING,
        n: Range = NOTHING,
        k: Range = NOTHING,
        size: int = 0,
        flops: int = 0,
        *,
        first: bool = False,
        turned: bool = False,
        peer: bool = False,
        parts: int = 0,
    ) -> Operation:
        """Return an operation of a tile. Its lane, stream and blocks follow from its kind and its ranges."""
        panel = self.lowered.panels.get(operand)
        coded = panel is not None and panel.coded and kind in STORE_KINDS
        lane, stream = lane_and_stream(kind, operand, coded, turned, peer)
        block = (m, k) if operand == "A" else (k if operand == "B" else m, n)
        stored = block[::-1] if panel is not None and panel.swaps else block
        whole = place.rows, place.cols
        given = kind, operand, place.tile, step, reads, writes, m, n, k, size, flops
        return Operation(*given, first, coded, self.device, turned, peer, lane, stream, stored, whole, parts)

    def _load_panel(
        self, operand: str, place: TilePlace, line: Range, step: int, placed: Placed
    ) -> Iterator[Operation]:
        """Yield the operations that load a panel of op(A) or op(B) unless it is cached.

        `line` are the rows of C that the panel of op(A) has, or the columns of C that the panel of op(B) has.
        """
        k, panel = self._depths[step], self.lowered.panels[operand]
        if not placed.upload or k[0] == k[1]:
            return
        elements = (k[1] - k[0]) * (line[1] - line[0])
        at = (*((line, NOTHING) if operand == "A" else (NOTHING, line)), k, elements * panel.itemsize)
        device = Region(slot_of(Tier.DEVICE, operand, placed.device_slot, self.device), 0, elements)
        if self.slots.unified:
            yield self.operation(Kind.READ, operand, place, step, (), (device,), *at)
            return
        if panel.streams:
            source: tuple[Region, ...] = ()
            if placed.peer is not None:
                peer, index = placed.peer
                source = (Region(slot_of(Tier.DEVICE, operand, index, peer), 0, elements),)
            yield self.operation(Kind.UPLOAD, operand, place, step, source, (device,), *at, peer=bool(source))
            return
        host = Region(slot_of(Tier.HOST, operand, placed.host_slot), 0, elements)
        if placed.read:
            yield self.operation(Kind.READ, operand, place, step, (), (host,), *at)
        yield self.operation(Kind.UPLOAD, operand, place, step, (host,), (device,), *at)

    def _inputs(self, place: TilePlace, k: Range, a: Placed, b: Placed) -> tuple[Region, ...]:
        """Return the regions of a step's panels."""
        (top, bottom), (left, right), depth = place.rows, place.cols, k[1] - k[0]
        if depth == 0:
            return ()
        return (
            Region(slot_of(Tier.DEVICE, "A", a.device_slot, self.device), 0, (bottom - top) * depth),
            Region(
                slot_of(Tier.DEVICE, self.lowered.right, b.device_slot, self.device),
                *(0, (right - left) * depth),
            ),
        )

    def _prepare(self, place: TilePlace, step: int, reads: tuple[Region, ...], planes: Region) -> Operation:
        m, n, k = place.rows, place.cols, self._depths[step]
        size = self.problem.prepared_bytes(length(m), length(n), length(k))
        return self.operation(Kind.PREPARE, "P", place, step, reads, (planes,), m, n, k, size)

    def _multiply(
        self, place: TilePlace, rows: Range, step: int, inputs: tuple[Region, ...], *, first: bool
    ) -> Operation:
        lowered, n, k = self.lowered, self._span(place, rows), self._depths[step]
        c, sums = self._in_tile(place, rows), self._sums(place, rows)
        keeps_old = not first or lowered.loads_old
        if lowered.changes_b and inputs:
            sums = inputs[1], *sums  # the panel of op(B) is changed in its slot
        flops = lowered.flops((rows[1] - rows[0]) * (n[1] - n[0]) * (k[1] - k[0]))
        reads = (*inputs, c) if keeps_old else inputs
        return self.operation(
            *(Kind.MULTIPLY, "C", place, step, reads, (c, *sums), rows, n, k), flops=flops, first=first
        )

    def _load_c(
        self, place: TilePlace, rows: Range, number: int, slot: Slot, *, whole_tile: bool
    ) -> Iterator[Operation]:
        """Yield the operations that load the old elements of a strip of C, to which beta applies.

        The elements go into the accumulator of the tile if `whole_tile`, otherwise into a buffer for a strip.
        """
        n, size, host = self._strip_parts(place, rows, number)
        target = self._in_tile(place, rows) if whole_tile else Region(slot, 0, host.stop)
        targets = (target, *self._sums(place, rows)) if whole_tile else (target,)
        at = rows, n, NOTHING, size
        if self.slots.unified:
            yield self.operation(Kind.READ, "C", place, 0, (), (target,), *at)
            return
        sources: tuple[Region, ...] = ()
        if not self.lowered.panels["C"].streams:
            sources = (host,)
            yield self.operation(Kind.READ, "C", place, 0, (), sources, *at)
        yield self.operation(Kind.UPLOAD, "C", place, 0, sources, targets, *at)

    def _drain(self, place: TilePlace, rows: Range, number: int) -> Iterator[Operation]:
        """Yield the operations that finish a strip (alpha and beta), download it and write it to storage."""
        lowered, last = self.lowered, len(self._depths) - 1
        n, size, host = self._strip_parts(place, rows, number)
        source, sums = self._in_tile(place, rows), self._sums(place, rows)
        if lowered.finishes:
            slot = slot_of(Tier.DEVICE, "D", number % self.slots.finish, self.device)
            finished = Region(slot, 0, host.stop)
            if lowered.finish_reads:
                yield from self._load_c(place, rows, number, slot, whole_tile=False)
            inputs = (source, finished, *sums) if lowered.finish_reads else (source, *sums)
            yield self.operation(Kind.FINISH, "D", place, last, inputs, (finished,), rows, n)
            source, sums = finished, ()
        mirrored = self.grid.mirrored(place.tile, rows) if self.grid.cover.halves else NOTHING
        written = size + lowered.panels["C"].itemsize * (rows[1] - rows[0]) * (mirrored[1] - mirrored[0])
        at, down = (rows, n, NOTHING), (Kind.DOWNLOAD, "C", place, last, (source,))
        if self.slots.unified:
            yield self.operation(
                *(Kind.WRITE, "C", place, last, (source,), (), *at, written), parts=place.parts
            )
        elif lowered.panels["C"].streams:
            yield self.operation(*down, sums, *at, size)
            if mirrored[0] < mirrored[1]:
                yield self.operation(*down, (), mirrored, rows, NOTHING, written - size, turned=True)
        else:
            yield self.operation(*down, (host, *sums), *at, size)
            yield self.operation(
                *(Kind.WRITE, "C", place, last, (host,), (), *at, written), parts=place.parts
            )

    def _strip_parts(self, place: TilePlace, rows: Range, number: int) -> tuple[Range, int, Region]:
        """Return (range of columns, size in bytes, region of a host slot) of a strip of C.

        The strip consists of the given `rows` of a tile. `number` is its number in the run. Strips use the
        host slots in turn.
        """
        n = self._span(place, rows)
        elements = (rows[1] - rows[0]) * (n[1] - n[0])
        host = Region(slot_of(Tier.HOST, "C", number % max(1, self.slots.host_c), self.device), 0, elements)
        return n, elements // self.lowered.one_in * self.lowered.panels["C"].itemsize, host

    def _sums(self, place: TilePlace, rows: Range) -> tuple[Region, ...]:
        """Return the region of the checksums of `rows` of a tile, in a tuple.

        The tuple is empty unless the device computes checksums.

        These checksums, which are stored behind the tile, need a region of their own. The regions of elements
        do not suffice: in two tiles of different widths that use the same accumulator, strip s has its
        elements at different offsets, but its checksums at the same address.

        The checksums behind a panel, or behind a strip in another slot, need no region of their own. Every
        operation on them also accesses the elements of that panel or strip.
        """
        if not self.lowered.device_sums:
            return ()
        top, strip = place.rows[0], self.slots.strip
        strips = (rows[0] - top) // strip, ceil_div(rows[1] - top, strip)
        return (Region(slot_of(Tier.DEVICE, "S", place.slot.index, self.device), *strips),)

    def _span(self, place: TilePlace, rows: Range) -> Range:
        """Return the columns of C that are computed in some rows of a tile."""
        return self.grid.span(place.tile, rows) if place.staircase else place.cols

    def _in_tile(self, place: TilePlace, rows: Range) -> Region:
        """Return the region of some rows of the tile in its accumulator."""
        if place.staircase:
            return Region(place.slot, *(self.grid.above(place.tile, row) for row in rows))
        (top, _), width = place.rows, place.cols[1] - place.cols[0]
        return Region(place.slot, (rows[0] - top) * width, (rows[1] - top) * width)


class Selecting:
    """Yields the operations at the end of tiles, which are visited in the order of the schedule's tiles."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._grid, tiles = schedule, schedule.grid, schedule.tiles
        self._halves, self._per_row = schedule.problem.cover.halves, schedule.lowered.per_row
        self._uses = NextUse(tiles, self._grid.steps, (0,))
        self._begun: set[int] = set()  # tile rows of which a tile has been finished
        # For a Gram matrix: per tile row, the position of the last tile that has elements of it, perhaps
        # mirrored ones.
        self._last: dict[int, int] = {}
        if self._halves:
            self._last = {line: position for position, tile in enumerate(tiles) for line in tile}

    def operations(self, position: int, place: TilePlace, strips: Sequence[Range]) -> Iterator[Operation]:
        """Yield the operations of the tile at `position`. `strips` are the rows of all of its strips."""
        tile = place.tile
        first = tile[0] not in self._begun and not self._halves
        self._begun.add(tile[0])
        for rows in strips:
            yield self._finish(place, rows, first=first)
        if self._halves:
            for line in dict.fromkeys(tile):
                if self._last[line] == position:
                    whole = place._replace(tile=(line, line), parts=1)
                    yield self._leave(whole, self._grid.rows(line))
        elif self._uses.tile(tile[0], position) is None:
            for rows in strips:
                yield self._leave(place, rows)

    def _finish(self, place: TilePlace, rows: Range, *, first: bool) -> Operation:
        """Return the Finish that updates the elements kept of a strip's rows, and of their mirror images."""
        cols, step = self._grid.span(place.tile, rows), self._grid.steps - 1
        elements = self._schedule._in_tile(place, rows)
        lines = [rows, mirrored_columns(rows, cols)] if self._halves else [rows]
        kept = tuple(self._kept(each) for each in lines if length(each))
        reads = (elements,) if first else (elements, *kept)
        return self._schedule.operation(Kind.FINISH, "D", place, step, reads, kept, rows, cols, first=first)

    def _leave(self, place: TilePlace, rows: Range) -> Operation:
        """Return the operation that copies from the device the elements that are kept of some rows of C."""
        kind = Kind.WRITE if self._schedule.slots.unified else Kind.DOWNLOAD
        size = length(rows) * self._per_row * self._schedule.lowered.panels["C"].itemsize
        given = kind, "C", place, self._grid.steps - 1, (self._kept(rows),), ()
        return self._schedule.operation(*given, rows, (0, self._per_row), NOTHING, size, parts=place.parts)

    def _kept(self, rows: Range) -> Region:
        slot = slot_of(Tier.DEVICE, "D", 0, self._schedule.device)
        return Region(slot, rows[0] * self._per_row, rows[1] * self._per_row)


def mirrored_columns(rows: Range, cols: Range) -> Range:
    """Return the columns of a strip of the lower triangle that are left of its diagonal block.

    >>> mirrored_columns((4, 8), (0, 8)), mirrored_columns((4, 8), (0, 4)), mirrored_columns((4, 8), (4, 8))
    ((0, 4), (0, 4), (4, 4))
    """
    return cols[0], min(rows[0], cols[1])
