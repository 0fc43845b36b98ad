"""The order in which tiles and steps are visited.

By default, every other row of tiles is visited in the opposite direction, and every other tile goes through
its steps along k backwards. Thus a tile starts with the panels that the tile before it used last. The
direction of k depends only on the traversal and the coordinates of the tile, never on its position in the
sequence. Therefore a run over any subset of the tiles sums every element in the same order.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import overload

from oocgemm.planning.tiling import Tile
from oocgemm.values import dataclass

# Next use of a panel that is never used again, larger than every step number.
NEVER = 1 << 62

# A panel of op(A) or op(B): its tile row or column, and its step along k.
Panel = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Traversal:
    """An order in which to visit tiles: in bands of `band` tile rows (axis 0) or tile columns (axis 1).

    Within a band of rows, tiles are visited column by column. Every band uses all panels of op(B). With wide
    bands, these panels are loaded less often, but memory must cache the panels of op(A) of all rows of a
    band.

    With `turns`, every other band is visited in the opposite direction. Otherwise, every band starts at the
    same side. The run may then end with a smaller tile, so that less of C remains to be written at the end.

    With `alternates`, every other tile goes through its steps along k backwards. Otherwise, all tiles go
    forwards. If several devices have one tile each, they then use a panel that they share at the same time.
    """

    axis: int = 0
    band: int = 1
    turns: bool = True
    alternates: bool = True

    @property
    def ascends(self) -> bool:
        """Whether the tiles of a tile row are visited in ascending order of their columns."""
        return self.band == 1 if self.axis == 1 else not self.turns

    def __str__(self) -> str:
        if self.band == 1:
            how = "row by row" if self.axis == 0 else "column by column"
        else:
            how = f"bands of {self.band} {'rows' if self.axis == 0 else 'columns'}"
        how = how if self.turns else f"{how}, all in one direction"
        return how if self.alternates else f"{how}, k forwards"

    @property
    def along_rows(self) -> "Traversal":
        """The same traversal in bands of rows. It visits (j, i) wherever one with axis 1 visits (i, j)."""
        return Traversal(0, self.band, self.turns, self.alternates)


ROW_BY_ROW = Traversal()


class Walk(Sequence[Tile]):
    """The tiles of a grid in the order of a traversal.

    Tiles are computed from their positions in the sequence, so that a walk over the whole grid takes no
    memory. If `tiles` is given, the walk visits only those tiles, and takes 8 bytes of memory per tile.

    >>> tuple(walk(Traversal(), 2, 3))
    ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0))
    >>> tuple(walk(Traversal(axis=1), 2, 2))
    ((0, 0), (1, 0), (1, 1), (0, 1))
    >>> tuple(walk(Traversal(band=2), 2, 3))
    ((0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2))
    >>> tuple(walk(Traversal(turns=False), 2, 2))
    ((0, 0), (0, 1), (1, 0), (1, 1))
    """

    def __init__(
        self,
        traversal: Traversal,
        tile_rows: int,
        tile_cols: int,
        tiles: Container[Tile] | None = None,
    ) -> None:
        self.traversal = traversal
        self.axis = traversal.axis
        # A band consists of tile rows (axis 0) or tile columns (axis 1). The grid has `_down` of these rows
        # or columns, and each of them has `_across` tiles.
        self._down, self._across = (tile_rows, tile_cols) if self.axis == 0 else (tile_cols, tile_rows)
        self.whole = self._down * self._across
        self._positions: array[int] | None = None
        if tiles is not None:
            self._positions = array("q", (p for p in range(self.whole) if self._tile(p) in tiles))

    def __len__(self) -> int:
        return self.whole if self._positions is None else len(self._positions)

    @overload
    def __getitem__(self, position: int) -> Tile: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[Tile, ...]: ...
    def __getitem__(self, position: int | slice) -> Tile | tuple[Tile, ...]:
        places = range(self.whole) if self._positions is None else self._positions
        if isinstance(position, slice):
            return tuple(map(self._tile, places[position]))
        return self._tile(places[position])

    def bands(self) -> Iterator[tuple[int, int, object]]:
        """Yield (start position, stop position, key) of each band of tile rows or columns.

        The walk must visit the whole grid. Bands with equal keys visit the same sequence of tiles, relative
        to their first row (or column). No other band has the key of the last one.
        """
        for top in range(0, self._down, self.traversal.band) if self._across else ():
            height = self._height(top)
            key = top % 2, self._backwards(top), height, top + height == self._down
            yield top * self._across, (top + height) * self._across, key

    def next_in(self, axis: int, line: int, position: int) -> int | None:
        """Find the next position after `position` in tile row (axis 0) or column (axis 1) `line`, if any."""
        crosses = axis != self.axis
        if self._positions is None:
            return self._next(crosses, line, position)
        later = self._next(crosses, line, self._positions[position])
        while later is not None:
            found = bisect_left(self._positions, later)
            if found < len(self._positions) and self._positions[found] == later:
                return found
            later = self._next(crosses, line, later)
        return None

    def _next(self, crosses: bool, line: int, position: int) -> int | None:
        """Find the next position after `position`, in a walk over the whole grid, in a tile row or column.

        `crosses` tells that `line` has tiles in every band. Otherwise, all its tiles are in one band.
        """
        band, area = self.traversal.band, self.traversal.band * self._across
        if not crosses:
            top = line // band * band
            height, start = self._height(top), top * self._across
            col = max(0, (position - start) // height)
            for c in (col, col + 1):
                row = line - top if c % 2 == 0 else height - 1 - (line - top)
                if c < self._across and start + c * height + row > position:
                    return start + c * height + row
            return None
        # Within each band, the tiles of `line` have consecutive positions.
        for top in (position // area * band, (position // area + 1) * band):
            if top < self._down:
                height = self._height(top)
                col = self._across - 1 - line if self._backwards(top) else line
                start = top * self._across + col * height
                if position < start + height - 1:
                    return max(start, position + 1)
        return None

    def _tile(self, position: int) -> Tile:
        top = position // (self.traversal.band * self._across) * self.traversal.band
        height = self._height(top)
        col, row = divmod(position - top * self._across, height)
        i = top + (row if col % 2 == 0 else height - 1 - row)
        j = self._across - 1 - col if self._backwards(top) else col
        return (i, j) if self.axis == 0 else (j, i)

    def _height(self, top: int) -> int:
        return min(self.traversal.band, self._down - top)

    def _backwards(self, top: int) -> bool:
        return self.traversal.turns and top // self.traversal.band % 2 == 1


def walk(traversal: Traversal, tile_rows: int, tile_cols: int, tiles: Container[Tile] | None = None) -> Walk:
    """Order the tiles of a grid by a traversal: all of them, or those in `tiles`."""
    return Walk(traversal, tile_rows, tile_cols, tiles)


def last(traversal: Traversal, tile_rows: int, tile_cols: int) -> Tile:
    """Return the tile that a traversal visits last in a grid of at least one tile.

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


def forwards(tile: Tile, alternates: bool = True) -> bool:
    """Tell whether a tile goes through its steps along k forwards. `alternates` is that of its traversal."""
    return not alternates or sum(tile) % 2 == 0


def step_order(tile: Tile, steps: int, alternates: bool = True) -> range:
    """Return the steps of a tile in order.

    >>> list(step_order((0, 0), 3)), list(step_order((0, 1), 3))
    ([0, 1, 2], [2, 1, 0])
    """
    return range(steps) if forwards(tile, alternates) else range(steps - 1, -1, -1)


class NextUse:
    """Look up when a panel is used next.

    Panels of op(A) belong to tile rows (`axes` is (0,)), and those of op(B) to tile columns ((1,)). Panels
    that are used in both roles belong to a line, which is a tile row and the column with its number ((0, 1)).

    Uses are numbered by steps: step s of the tile at position p has the number p * steps + s, counted in the
    order in which the steps run. If several devices compute `at_once` successive tiles at the same time, the
    number is p // at_once * steps + s. `alternates` is that of the traversal.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        steps: int,
        axes: tuple[int, ...],
        at_once: int = 1,
        alternates: bool = True,
    ) -> None:
        self._tiles, self._alternates = tiles, alternates
        self._at_once = at_once
        self._steps = steps
        self._axes = axes
        # The arguments of the latest call of `tile`, its result, and whether k runs forwards in that tile.
        self._known: tuple[int, int, int | None, bool] = -1, -1, None, True
        self._positions: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        for position, tile in enumerate(() if isinstance(tiles, Walk) else tiles):
            for line in {tile[axis] for axis in axes}:
                self._positions[line].append(position)

    def tile(self, line: int, position: int) -> int | None:
        """Return the next position after `position` whose tile uses the panels of `line`, or None."""
        if self._known[0] != line or self._known[1] != position:
            later = self._next(line, position)
            forward = later is not None and forwards(self._tiles[later], self._alternates)
            self._known = line, position, later, forward
        return self._known[2]

    def _next(self, line: int, position: int) -> int | None:
        if isinstance(self._tiles, Walk):
            return self._tiles.next_in(self._axes[0], line, position)
        positions = self._positions[line]
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else None

    def __call__(self, line: int, step: int, position: int) -> int:
        """Return the number of the next use of the panel of `step` in `line` after `position`, or NEVER."""
        later = self.tile(line, position)
        if later is None:
            return NEVER
        ahead = step if self._known[3] else self._steps - 1 - step
        return later // self._at_once * self._steps + ahead
