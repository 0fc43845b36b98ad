"""The order of the tiles of a Gram matrix, and the slots for its panels.

There is only one operand, A. The panels of a tile row are used by the tiles of this row, in the role of
op(A), and by the tiles of the column with the same number, in the role of op(B). A row and the column with
its number are together called a *line*. One set of slots caches the panels of all lines: a panel that is
cached for one role is also cached for the other.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf

from oocgemm.planning.schedule.eviction import NEVER, SlotCache
from oocgemm.planning.schedule.placement import Placed, Placing, place_on_host
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import forwards
from oocgemm.planning.tiling import Tile


def triangle(lines: int, band: int, *, upper: bool = False) -> list[Tile]:
    """List the tiles of a triangle of `lines` tile rows, in bands of `band` rows.

    A band visits its columns from the diagonal to the left, and at last the tiles on its own diagonal. So it
    starts with a column whose panels the band before it has used, and successive tiles have a line in common.
    An upper triangle is visited as its transpose would be.

    >>> triangle(3, 1)
    [(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)]
    >>> triangle(4, 2)
    [(0, 0), (1, 0), (1, 1), (2, 1), (3, 1), (3, 0), (2, 0), (2, 2), (3, 2), (3, 3)]
    >>> triangle(2, 1, upper=True)
    [(0, 0), (0, 1), (1, 1)]
    """
    found: list[Tile] = []
    down = True
    for top in range(0, lines, band):
        bottom = min(top + band, lines)
        for col in (*range(top - 1, -1, -1), *range(top, bottom)):
            rows = range(max(top, col), bottom)
            found += [(row, col) for row in (rows if down or col >= top else reversed(rows))]
            down = not down
        down = True
    return [(col, row) for row, col in found] if upper else found


class LinePlacing(Placing):
    """Assign slots to the panels of a Gram matrix, tile by tile, on the device and on the host.

    The slots are evicted by the next use of their panels in either role.
    """

    def __init__(self, tiles: Sequence[Tile], steps: int, slots: Slots, last: Tile | None = None) -> None:
        super().__init__(tiles, steps, slots, last)
        host = 0 if slots.unified else slots.host_a
        self._tiers = [SlotCache(slots.a)]
        if host:
            self._tiers.append(SlotCache(host, spread=max(1, steps)))
        # Per line, the positions of its tiles.
        self._positions: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        for position, tile in enumerate(tiles):
            for line in dict.fromkeys(tile):
                self._positions[line].append(position)

    def place_step(self, position: int, step: int) -> tuple[Placed, Placed]:
        row, col = self._tiles[position]
        a = self._place(row, step, position)
        return a, a if row == col else self._place(col, step, position)

    def advance(self) -> None:
        for cache in self._tiers:
            cache.advance()

    def _place(self, line: int, step: int, position: int) -> Placed:
        use = self._next_use(line, step, position)
        slot, hit = self._tiers[0].acquire((line, step), use)
        return place_on_host(slot, hit, self._tiers[1:], (line, step), use)

    def _next_use(self, line: int, step: int, position: int) -> int:
        """Return the number of the next use of a panel after the tile at `position`, as `NextUse` does."""
        positions = self._positions[line]
        index = bisect_right(positions, position)
        if index == len(positions) or step >= self._steps:
            return NEVER
        later = positions[index]
        ahead = step if forwards(self._tiles[later]) else self._steps - 1 - step
        return later * self._steps + ahead

    def loads(
        self,
        depths: Sequence[int],
        height: Callable[[int], int],
        width: Callable[[int], int],
        max_work: float = inf,
    ) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Count the elements of all panels that are uploaded and read: those of op(A), and (0, 0)."""
        if 2 * len(self._tiles) * self._steps > max_work:
            return None
        up = read = 0
        for position, tile in enumerate(self._tiles):
            for _, group in self.groups(position):
                for step, *panels in group:
                    for line, placed in dict(zip(tile, panels, strict=True)).items():
                        elements = depths[step] * height(line)
                        up += elements * placed.upload
                        read += elements * placed.read
        return (up, read), (0, 0)
