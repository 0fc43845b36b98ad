"""The order in which tiles and steps are visited.

Tiles are walked as a snake, if nothing speaks for another way, and k runs backwards on every other tile, so that at each turn
the panels just used are used again. The direction of k hangs on the tile's coordinates alone, never on its place
in the sequence: a run over any part of the tiles sums every element in the same order.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from oocgemm.plan.replacement import NEVER
from oocgemm.plan.tiling import Tile


@dataclass(frozen=True, slots=True)
class Traversal:
    """How the tiles are walked: in bands of `band` tile rows (axis 0) or tile columns (axis 1).

    Within a band the *other* axis is the slow one. A band of one tile row is a plain snake along the row: its
    panels of op(A) are used by one tile after another, and those of op(B) come round again with the next
    row. Wider bands suit a memory that holds the panels of several rows: op(B) then comes round once a band.
    Without `turns` each band begins where the first did: the walk then ends in the last row and column, where tiles may
    be thinner and less of C is left to leave.
    """

    axis: int = 0
    band: int = 1
    turns: bool = True

    def __str__(self) -> str:
        if self.band == 1:
            how = "row by row" if self.axis == 0 else "column by column"
        else:
            how = f"bands of {self.band} {'rows' if self.axis == 0 else 'columns'}"
        return how if self.turns else f"{how}, all in one direction"

    @property
    def along_rows(self) -> "Traversal":
        """The same of the transposed product, if this is along columns."""
        return Traversal(0, self.band, self.turns)


ROW_BY_ROW = Traversal()


def walk(traversal: Traversal, tile_rows: int, tile_cols: int) -> tuple[Tile, ...]:
    """All tiles, each next to the one before where the traversal turns.

    >>> walk(Traversal(), 2, 3)
    ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0))
    >>> walk(Traversal(axis=1), 2, 2)
    ((0, 0), (1, 0), (1, 1), (0, 1))
    >>> walk(Traversal(band=2), 2, 3)
    ((0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2))
    >>> walk(Traversal(turns=False), 2, 2)
    ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    if traversal.axis == 1:
        return tuple((i, j) for j, i in walk(traversal.along_rows, tile_cols, tile_rows))
    tiles: list[Tile] = []
    cols_forwards = rows_forwards = True
    for top in range(0, tile_rows, traversal.band):
        rows = range(top, min(top + traversal.band, tile_rows))
        for j in range(tile_cols) if cols_forwards else reversed(range(tile_cols)):
            tiles.extend((i, j) for i in (rows if rows_forwards else reversed(rows)))
            rows_forwards = not rows_forwards
        cols_forwards, rows_forwards = not (traversal.turns and cols_forwards), True
    return tuple(tiles)


def last(traversal: Traversal, tile_rows: int, tile_cols: int) -> Tile:
    """The tile at which a walk over at least one ends.

    >>> last(Traversal(), 2, 3), last(Traversal(axis=1), 2, 2), last(Traversal(band=2), 2, 3)
    ((1, 0), (0, 1), (1, 2))
    """
    if traversal.axis == 1:
        j, i = last(traversal.along_rows, tile_cols, tile_rows)
        return i, j
    top = (tile_rows - 1) // traversal.band * traversal.band
    row = tile_rows - 1 if tile_cols % 2 else top
    backwards = traversal.turns and top // traversal.band % 2
    return row, 0 if backwards else tile_cols - 1


def forwards(tile: Tile) -> bool:
    """Whether k runs forwards in a tile."""
    return sum(tile) % 2 == 0


def step_order(tile: Tile, steps: int, ramp: int = 0) -> Sequence[int]:
    """The steps of a tile in the order they run; with a `ramp` those of tile (0, 0) begin with thin ones.

    >>> list(step_order((0, 0), 3)), list(step_order((0, 1), 3))
    ([0, 1, 2], [2, 1, 0])
    >>> step_order((0, 0), 3, ramp=1)
    (3, 4, 1, 2)
    """
    if not forwards(tile):
        return range(steps - 1, -1, -1)
    return (*range(steps, steps + ramp + 1), *range(1, steps)) if ramp and tile == (0, 0) else range(steps)


class NextUse:
    """When a panel of op(A) (axis 0) or op(B) (axis 1) is used next, the whole future being known: positions counted
    in steps of the run."""

    def __init__(self, tiles: Sequence[Tile], steps: int, axis: int) -> None:
        self._tiles = tiles
        self._steps = steps
        self._positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, tile in enumerate(tiles):
            self._positions[tile[axis]].append(position)

    def tile(self, row: int, position: int) -> int | None:
        """The next tile after tile number `position` that is in a tile row (or column)."""
        positions = self._positions[row]
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else None

    def __call__(self, row: int, step: int, position: int) -> int:
        """First use, after tile number `position`, of the panel `step` of a tile row (or column); NEVER if there is
        none."""
        later = self.tile(row, position)
        if later is None or step >= self._steps:  # thin steps are of one tile only
            return NEVER
        ahead = step if forwards(self._tiles[later]) else self._steps - 1 - step
        return later * self._steps + ahead
