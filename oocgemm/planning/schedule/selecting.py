"""The end of a tile of which only the largest elements of each row are kept (`GemmProblem.kept`).

The device keeps the largest elements so far of every row of C in one slot, D. The Finish of a tile updates
the rows of this tile. When the last tile of a tile row has been finished, the elements of its rows are
downloaded and written. No other element of C leaves the device.
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
        self._uses = NextUse(tiles, grid.steps, axis=0)
        self._begun: set[int] = set()  # tile rows of which a tile has been finished

    def operations(
        self, position: int, tile: Tile, strips: Sequence[tuple[Range, Region]]
    ) -> Iterator[Operation]:
        """Yield the operations of the tile at `position`.

        `strips` are all strips of the tile: their rows and their elements in the accumulator.
        """
        first = tile[0] not in self._begun
        self._begun.add(tile[0])
        last = self._uses.tile(tile[0], position) is None
        for rows, elements in strips:
            yield from self._strip(tile, rows, elements, first=first, last=last)

    def _strip(
        self, tile: Tile, rows: Range, elements: Region, *, first: bool, last: bool
    ) -> Iterator[Operation]:
        count, step, device = self._problem.kept, self._grid.steps - 1, self._device
        kept = Region(slot_of(Tier.DEVICE, "D", 0, device), rows[0] * count, rows[1] * count)
        reads = (elements,) if first else (elements, kept)
        cols = self._grid.cols(tile[1])
        yield Operation(Kind.FINISH, "D", tile, step, reads, (kept,), rows, cols, first=first, device=device)
        if not last:
            return
        selected: Range = (0, count)
        size = length(rows) * count * self._problem.itemsizes["C"]
        if self._slots.unified:
            yield Operation(
                Kind.WRITE, "C", tile, step, (kept,), (), rows, selected, bytes=size, device=device
            )
        else:
            yield Operation(
                Kind.DOWNLOAD, "C", tile, step, (kept,), (), rows, selected, bytes=size, device=device
            )
