"""The end of a tile of which only the largest elements of each row are kept (`Sink.per_row`).

The device keeps the largest elements so far of every row of C in one slot, D. The Finish of a tile updates
the rows of this tile. When the last tile of a tile row has been finished, the elements of its rows are
downloaded and written. No other element of C leaves the device.

A tile of a Gram matrix also has elements of other rows: of those with the numbers of its columns, as mirror
images. A strip on the diagonal of C has elements of both triangles in its diagonal block. Its elements left
of this block are mirrored.
"""

from collections.abc import Iterator, Sequence

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Kind, Operation
from oocgemm.planning.schedule.slots import Region, Slots, Tier, slot_of
from oocgemm.planning.schedule.traversal import NextUse
from oocgemm.planning.tiling import Range, Tile, TileGrid, length


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
        if problem.b.shares:
            self._last = {line: position for position, tile in enumerate(tiles) for line in tile}

    def operations(
        self, position: int, tile: Tile, strips: Sequence[tuple[Range, Region]]
    ) -> Iterator[Operation]:
        """Yield the operations of the tile at `position`.

        `strips` are all strips of the tile: their rows and their elements in the accumulator.
        """
        first = tile[0] not in self._begun and not self._problem.b.shares
        self._begun.add(tile[0])
        for rows, elements in strips:
            yield self._finish(tile, rows, elements, first=first)
        if self._problem.b.shares:
            for line in dict.fromkeys(tile):
                if self._last[line] == position:
                    yield self._leave((line, line), self._grid.rows(line))
        elif self._uses.tile(tile[0], position) is None:
            for rows, _ in strips:
                yield self._leave(tile, rows)

    def _finish(self, tile: Tile, rows: Range, elements: Region, *, first: bool) -> Operation:
        """Return the operation that updates what is kept of the rows of a strip, and of its columns."""
        cols, step = self._grid.span(tile, rows), self._grid.steps - 1
        lines = [rows, mirrored_columns(rows, cols)] if self._problem.b.shares else [rows]
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
