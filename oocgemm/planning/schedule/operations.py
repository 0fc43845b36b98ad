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

Where B is A^H (`oocgemm.planning.problem.Same`), B(p,j) is the panel of A that belongs to tile row j, in the
same slots. A tile on the diagonal uses one panel per step, and is always multiplied strip by strip, because
its strips differ in width (`TileGrid`).

If two products are chained (`problem.Updated`), each Multiply also changes its panel of B. C is then one
tile of one strip, so that this happens once for each panel.

If only the largest elements of each row of C are kept (`Sink.per_row`), a tile ends otherwise (`Selecting`).
The device keeps the largest elements so far of every row of C in one slot, D. The Finish of a tile updates
the rows of this tile. When the last tile of a tile row has been finished, the elements of its rows are
downloaded and written. No other element of C leaves the device. A tile of a Gram matrix also has elements of
other rows: of those with the numbers of its columns, as mirror images. A strip on the diagonal of C has
elements of both triangles in its diagonal block. Its elements left of this block are mirrored.

In a run, operations of different streams overlap. They wait for one another only if they access the same part
of a buffer (`oocgemm.planning.schedule.hazards`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from oocgemm.planning.cover import WHOLE
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Kind, Operation, Region, Slot, Slots, Tier, slot_of
from oocgemm.planning.schedule.placement import Loads, Placed, Placing, Step
from oocgemm.planning.schedule.traversal import NextUse, step_order
from oocgemm.planning.tiling import Range, Tile, TileGrid, ceil_div, length


@dataclass(frozen=True)
class Schedule:
    """The operations of a run that computes `tiles` in the given order.

    A schedule can be iterated repeatedly, and creates its operations during iteration.

    `coded` are the operands ("A", "B", "C") whose chunks are decoded or encoded. `last` is the tile that a
    run over all of C would compute last, even if this run does not compute it. If such a run has several
    devices, it would compute the tiles `ends` last instead. `device` is the device that computes the tiles.
    """

    problem: GemmProblem
    grid: TileGrid
    tiles: Sequence[Tile]
    slots: Slots
    coded: frozenset[str] = frozenset()
    last: Tile | None = None
    device: int = 0
    ends: frozenset[Tile] = frozenset()

    def __iter__(self) -> Iterator[Operation]:
        for _, operations in self.batches(self._placing()):
            yield from operations

    def batches(self, placing: Placing) -> Iterator[tuple[int, Iterator[Operation]]]:
        """Yield (number of steps, operations) for each group of steps that are loaded together.

        `placing` places the panels of the schedule's tiles. Iterate over the operations of a group before you
        take the next group.
        """
        strips_done = prepared = 0
        selecting = self._selecting() if self.problem.sink.per_row else None
        for position, tile in enumerate(self.tiles):
            strips = list(enumerate(self._strips(tile), strips_done))
            strips_done += len(strips)
            c_slot = self._on_device("C", position % self.slots.c)
            order = step_order(tile, self.grid.steps)
            left = len(order)
            for by_strips, group in placing.groups(position):
                old_c = strips if left == len(order) else []
                left -= len(group)
                planes: dict[int, Region] = {}
                for step, _, _ in group if self.slots.planes else ():
                    if length(self.grid.depth(step)):
                        slot = self._on_device("P", prepared % self.slots.planes)
                        planes[step] = Region(slot, 0, 1)
                        prepared += 1
                apart = by_strips or self.grid.is_staircase(tile)
                parts = [(part,) for part in strips] if apart else [strips]
                drains = not left and selecting is None
                yield len(group), self._batch(tile, c_slot, group, planes, old_c, parts, order[0], drains)
            if selecting is not None:
                whole = [(rows, self._in_tile(c_slot, tile, rows)) for _, rows in strips]
                yield 0, selecting.operations(position, tile, whole)

    def _batch(
        self,
        tile: Tile,
        c_slot: Slot,
        group: Sequence[Step],
        planes: Mapping[int, Region],
        old_c: Sequence[tuple[int, Range]],
        parts: Sequence[Sequence[tuple[int, Range]]],
        first_step: int,
        drains: bool,
    ) -> Iterator[Operation]:
        """Yield the operations of a group of steps.

        `old_c` are the numbered strips of the old C to load first. Each of `parts` consists of the numbered
        strips that are multiplied together. With `drains`, they drain after the group.
        """
        if self.problem.reads_c and not self.problem.finishes:
            for number, rows in old_c:
                yield from self._load_c(tile, rows, number, c_slot, whole_tile=True)
        for step, a, b in group:
            yield from self._load_panel("A", tile, step, a)
            if not self.problem.b.shares:
                yield from self._load_panel("B", tile, step, b)
            elif tile[0] != tile[1]:
                yield from self._load_panel("A", tile, step, b, line=tile[1])
        for step, a, b in group:
            if step in planes:
                yield self._prepare(tile, step, a, b, planes[step])
        for strips in parts:
            rows = strips[0][1][0], strips[-1][1][1]
            for step, a, b in group:
                inputs = self._inputs(tile, step, a, b, planes)
                yield self._multiply(tile, rows, step, inputs, c_slot, first=step == first_step)
            for number, rows in strips if drains else ():
                yield from self._drain(tile, rows, number, c_slot)

    def _selecting(self) -> "Selecting":
        return Selecting(self.problem, self.grid, self.slots, self.tiles, self.device)

    def _on_device(self, operand: str, index: int) -> Slot:
        return slot_of(Tier.DEVICE, operand, index, self.device)

    def loads(self) -> Loads:
        """Count the bytes of panels of A and B that the run loads, without creating the operations."""
        loads = self.loads_within(inf)
        assert loads is not None
        return loads

    def loads_within(self, max_work: float) -> Loads | None:
        """Count the bytes of panels that the run loads, or return None if that takes too long.

        `max_work` limits the work, in placements of one panel in slots. Each takes about 10 us.
        """
        depths = [length(self.grid.depth(p)) for p in range(self.grid.steps)]
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
        """Elements that the device returns: those of C, or those that are selected of its rows."""
        return self.problem.sink.count(self.grid.m, self.elements)

    @property
    def elements_written(self) -> int:
        """Elements of C that the schedule writes. Mirrored elements count twice."""
        if not self.problem.sink.stores_c:
            return self.elements_stored
        return sum(map(self.grid.written, self.tiles)) if self.grid.cover.mirrored else self.elements

    def _placing(self) -> Placing:
        return Placing(self.tiles, self.grid.steps, self.slots, self.last, ends=self.ends)

    def _strips(self, tile: Tile) -> Iterator[Range]:
        m0, m1 = self.grid.rows(tile[0])
        for start in range(m0, m1, self.slots.strip):
            yield start, min(start + self.slots.strip, m1)

    def _load_panel(
        self, operand: str, tile: Tile, step: int, placed: Placed, line: int | None = None
    ) -> Iterator[Operation]:
        """Load a panel of op(A) or op(B) unless it is cached.

        `line` is the tile row of a panel of op(A), by default that of `tile`.
        """
        k = self.grid.depth(step)
        if not placed.upload or k[0] == k[1]:
            return
        nothing = (0, 0)
        m = self.grid.rows(tile[0] if line is None else line) if operand == "A" else nothing
        n = self.grid.cols(tile[1]) if operand == "B" else nothing
        elements = length(k) * length(m if operand == "A" else n)
        size = elements * self.problem.itemsizes[operand]
        coded = operand in self.coded
        device = Region(self._on_device(operand, placed.device_slot), 0, elements)
        if self.slots.unified:
            yield Operation(
                Kind.READ, operand, tile, step, (), (device,), m, n, k, size, coded=coded, device=self.device
            )
            return
        if self.slots.streams(operand):
            source: tuple[Region, ...] = ()
            if placed.peer is not None:
                peer, index = placed.peer
                source = (Region(slot_of(Tier.DEVICE, operand, index, peer), 0, elements),)
            yield Operation(
                *(Kind.UPLOAD, operand, tile, step, source, (device,), m, n, k, size),
                device=self.device,
                peer=bool(source),
            )
            return
        host = Region(slot_of(Tier.HOST, operand, placed.host_slot), 0, elements)
        if placed.read:
            yield Operation(
                Kind.READ, operand, tile, step, (), (host,), m, n, k, size, coded=coded, device=self.device
            )
        yield Operation(
            Kind.UPLOAD, operand, tile, step, (host,), (device,), m, n, k, size, device=self.device
        )

    def _inputs(
        self, tile: Tile, step: int, a: Placed, b: Placed, planes: Mapping[int, Region]
    ) -> tuple[Region, ...]:
        """Return the regions that a Multiply reads: the step's panels and what a Prepare made of them."""
        m, n, k = (
            length(x) for x in (self.grid.rows(tile[0]), self.grid.cols(tile[1]), self.grid.depth(step))
        )
        if k == 0:
            return ()
        panels = (
            Region(self._on_device("A", a.device_slot), 0, m * k),
            Region(self._on_device(self.problem.operands[-1], b.device_slot), 0, k * n),
        )
        return (*panels, planes[step]) if step in planes else panels

    def _prepare(self, tile: Tile, step: int, a: Placed, b: Placed, planes: Region) -> Operation:
        m, n, k = self.grid.rows(tile[0]), self.grid.cols(tile[1]), self.grid.depth(step)
        size = self.problem.prepared_bytes(length(m), length(n), length(k))
        reads = self._inputs(tile, step, a, b, {})
        return Operation(Kind.PREPARE, "P", tile, step, reads, (planes,), m, n, k, size, device=self.device)

    def _multiply(
        self, tile: Tile, rows: Range, step: int, inputs: tuple[Region, ...], c_slot: Slot, *, first: bool
    ) -> Operation:
        n, k = self.grid.span(tile, rows), self.grid.depth(step)
        c = self._in_tile(c_slot, tile, rows)
        keeps_old = not first or (self.problem.reads_c and not self.problem.finishes)
        sums = self._sums(c_slot, tile, rows)
        if self.problem.b.changed_columns and inputs:
            sums = inputs[1], *sums  # the panel of op(B) is changed in its slot
        return Operation(
            *(Kind.MULTIPLY, "C", tile, step),
            *((*inputs, c) if keeps_old else inputs, (c, *sums)),
            *(rows, n, k),
            flops=self.problem.step_flops(length(rows), length(n), length(k)),
            first=first,
            device=self.device,
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
            yield Operation(
                Kind.READ, "C", tile, 0, (), (target,), rows, n, bytes=size, coded=coded, device=self.device
            )
            return
        sources: tuple[Region, ...] = ()
        if not self.slots.streams("C"):
            sources = (host,)
            yield Operation(
                Kind.READ, "C", tile, 0, (), sources, rows, n, bytes=size, coded=coded, device=self.device
            )
        yield Operation(Kind.UPLOAD, "C", tile, 0, sources, targets, rows, n, bytes=size, device=self.device)

    def _drain(self, tile: Tile, rows: Range, number: int, c_slot: Slot) -> Iterator[Operation]:
        """Finish rows of the accumulator (apply alpha and beta), download them and write them to storage."""
        n, size, host = self._strip_parts(tile, rows, number)
        source, sums = self._in_tile(c_slot, tile, rows), self._sums(c_slot, tile, rows)
        last = self.grid.steps - 1
        if self.problem.finishes:
            finished = Region(self._on_device("D", number % self.slots.finish), 0, host.stop)
            if self.problem.reads_c:
                yield from self._load_c(tile, rows, number, finished.slot, whole_tile=False)
            inputs = (source, finished, *sums) if self.problem.reads_c else (source, *sums)
            yield Operation(Kind.FINISH, "D", tile, last, inputs, (finished,), rows, n, device=self.device)
            source, sums = finished, ()
        coded = "C" in self.coded
        written = size + self.problem.itemsizes["C"] * length(rows) * length(self.grid.mirrored(tile, rows))
        if self.slots.unified:
            yield Operation(
                *(Kind.WRITE, "C", tile, last, (source,), (), rows, n),
                bytes=written,
                coded=coded,
                device=self.device,
            )
            return
        if self.slots.streams("C"):
            yield Operation(
                Kind.DOWNLOAD, "C", tile, last, (source,), sums, rows, n, bytes=size, device=self.device
            )
            cols = self.grid.mirrored(tile, rows)
            if length(cols):
                at, size = (cols, rows), written - size
                yield Operation(
                    *(Kind.DOWNLOAD, "C", tile, last, (source,), (), *at),
                    bytes=size,
                    device=self.device,
                    turned=True,
                )
            return
        yield Operation(
            Kind.DOWNLOAD, "C", tile, last, (source,), (host, *sums), rows, n, bytes=size, device=self.device
        )
        yield Operation(
            Kind.WRITE, "C", tile, last, (host,), (), rows, n, bytes=written, coded=coded, device=self.device
        )

    def _strip_parts(self, tile: Tile, rows: Range, number: int) -> tuple[Range, int, Region]:
        """Return (range of columns, size in bytes, region of a host slot) of a strip of C.

        The strip consists of the given `rows` of a tile. `number` is its number in the run. Strips use the
        host slots in turn.
        """
        n = self.grid.span(tile, rows)
        elements = length(rows) * length(n)
        host = Region(slot_of(Tier.HOST, "C", number % max(1, self.slots.host_c), self.device), 0, elements)
        return n, self.problem.sink.count(length(rows), elements) * self.problem.itemsizes["C"], host

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
        return (Region(self._on_device("S", slot.index), *strips),)

    def _in_tile(self, slot: Slot, tile: Tile, rows: Range) -> Region:
        """Return the region of some rows of the tile in its accumulator."""
        return Region(slot, self.grid.above(tile, rows[0]), self.grid.above(tile, rows[1]))


class Selecting:
    """Yields the operations at the end of tiles, which are visited in the order of `tiles`."""

    def __init__(
        self, problem: GemmProblem, grid: TileGrid, slots: Slots, tiles: Sequence[Tile], device: int
    ) -> None:
        self._problem, self._grid, self._slots, self._device = problem, grid, slots, device
        self._uses = NextUse(tiles, grid.steps, (0,))
        self._begun: set[int] = set()  # tile rows of which a tile has been finished
        # The position of the last tile with elements of a tile row of a Gram matrix, which may be mirrored.
        self._last: dict[int, int] = {}
        if problem.cover.halves:
            self._last = {line: position for position, tile in enumerate(tiles) for line in tile}

    def operations(
        self, position: int, tile: Tile, strips: Sequence[tuple[Range, Region]]
    ) -> Iterator[Operation]:
        """Yield the operations of the tile at `position`.

        `strips` are all strips of the tile: their rows and their elements in the accumulator.
        """
        first = tile[0] not in self._begun and not self._problem.cover.halves
        self._begun.add(tile[0])
        for rows, elements in strips:
            yield self._finish(tile, rows, elements, first=first)
        if self._problem.cover.halves:
            for line in dict.fromkeys(tile):
                if self._last[line] == position:
                    yield self._leave((line, line), self._grid.rows(line))
        elif self._uses.tile(tile[0], position) is None:
            for rows, _ in strips:
                yield self._leave(tile, rows)

    def _finish(self, tile: Tile, rows: Range, elements: Region, *, first: bool) -> Operation:
        """Return the operation that updates what is kept of the rows of a strip, and of its columns."""
        cols, step = self._grid.span(tile, rows), self._grid.steps - 1
        lines = [rows, mirrored_columns(rows, cols)] if self._problem.cover.halves else [rows]
        kept = tuple(self._kept(each) for each in lines if length(each))
        reads = (elements,) if first else (elements, *kept)
        return Operation(
            Kind.FINISH, "D", tile, step, reads, kept, rows, cols, first=first, device=self._device
        )

    def _leave(self, tile: Tile, rows: Range) -> Operation:
        """Return the operation that copies what is kept of some rows of C from the device."""
        kind = Kind.WRITE if self._slots.unified else Kind.DOWNLOAD
        selected: Range = (0, self._problem.sink.per_row)
        size = length(rows) * self._problem.sink.per_row * self._problem.itemsizes["C"]
        where = kind, "C", tile, self._grid.steps - 1, (self._kept(rows),), ()
        return Operation(*where, rows, selected, bytes=size, device=self._device)

    def _kept(self, rows: Range) -> Region:
        count = self._problem.sink.per_row
        return Region(slot_of(Tier.DEVICE, "D", 0, self._device), rows[0] * count, rows[1] * count)


def mirrored_columns(rows: Range, cols: Range) -> Range:
    """Return the columns of a strip of the lower triangle that are left of its diagonal block.

    >>> mirrored_columns((4, 8), (0, 8)), mirrored_columns((4, 8), (0, 4)), mirrored_columns((4, 8), (4, 8))
    ((0, 4), (0, 4), (4, 4))
    """
    return cols[0], min(rows[0], cols[1])
