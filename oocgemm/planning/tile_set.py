"""Sets of tiles: the tiles of C that a run computes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from oocgemm.planning.tiling import Range, Tile, TileGrid, length


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of elements in some tiles, and the numbers of rows and columns of C that they overlap."""

    rows: int
    cols: int
    elements: int


@dataclass(frozen=True)
class TileSet:
    """The tiles of a grid that are computed, in a rectangle of tiles, except those that are done.

    `rows` and `cols` are ranges of tile rows and tile columns. The cover of the grid says which of these
    tiles are computed. Coordinates of tiles are always those of the whole grid, because they determine the
    order of summation.
    """

    grid: TileGrid
    rows: Range
    cols: Range
    done: frozenset[Tile] = frozenset()

    @classmethod
    def of(cls, grid: TileGrid) -> "TileSet":
        """Return all tiles of a grid that are computed."""
        down, across = grid.shape
        return cls(grid, (0, down), (0, across))

    def part(self, rows: Range, cols: Range) -> "TileSet":
        """Return the tiles of this set in a rectangle of tile rows and tile columns."""
        return replace(self, rows=_common(self.rows, rows), cols=_common(self.cols, cols))

    def remaining(self, done: Collection[Tile]) -> "TileSet":
        """Return the tiles of this set that are not done."""
        return replace(self, done=self.done | frozenset(done))

    @property
    def is_whole(self) -> bool:
        """Whether the set contains every tile of its grid that is computed."""
        return self.count == self.grid.count

    @cached_property
    def count(self) -> int:
        """Number of tiles."""
        square = self.grid.cover.square
        inside = sum(length(self._cols(i)) for i in range(*self.rows)) if square else self._area
        return inside - sum(map(self._covers, self.done))

    @cached_property
    def coverage(self) -> Coverage:
        """The numbers of elements, rows and columns of C that the tiles of the set cover.

        For a Gram matrix, `rows` counts the rows of op(A) that are used in either role, and `cols` is 0.
        """
        grid = self.grid
        if self.is_whole and not grid.cover.square:
            return Coverage(grid.m, grid.n, grid.m * grid.n)
        rows, cols, elements = dict[int, int](), dict[int, int](), 0
        for i, j in self:
            rows[i], (rows if grid.cover.square else cols)[j] = length(grid.rows(i)), length(grid.cols(j))
            elements += grid.elements((i, j))
        return Coverage(sum(rows.values()), sum(cols.values()), elements)

    @cached_property
    def extents(self) -> tuple[int, int]:
        """The sums over all tiles of their numbers of rows and of their numbers of columns."""
        grid = self.grid
        if self.is_whole and not grid.cover.square:
            down, across = grid.shape
            return grid.m * across, grid.n * down
        return sum(length(grid.rows(i)) for i, _ in self), sum(length(grid.cols(j)) for _, j in self)

    def __contains__(self, tile: object) -> bool:
        return isinstance(tile, tuple) and self._covers(tile) and tile not in self.done

    def __iter__(self) -> Iterator[Tile]:
        """Yield the tiles row by row."""
        for i in range(*self.rows):
            yield from ((i, j) for j in range(*self._cols(i)) if (i, j) not in self.done)

    @property
    def _area(self) -> int:
        return length(self.rows) * length(self.cols)

    def _covers(self, tile: Tile) -> bool:
        """Tell whether a tile is in the rectangle or triangle, even if it is done."""
        start, stop = self.rows
        first, end = self._cols(tile[0])
        return start <= tile[0] < stop and first <= tile[1] < end

    def _cols(self, i: int) -> Range:
        """Return the range of tile columns that the set covers in tile row i."""
        return _common(self.cols, self.grid.cover.columns(i, self.grid.shape[1], self.grid.tile.m))


def _common(a: Range, b: Range) -> Range:
    """Intersect two ranges."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
