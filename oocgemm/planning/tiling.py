"""Divide the product into tiles and panels, and describe the set of tiles that a run computes.

C is divided into tiles, and k into steps. In each step, a tile adds the product of a panel of op(A) and a
panel of op(B). All tiles have the same *nominal* extents, which size the buffers. The *valid* extents of a
tile count only the rows and columns that C has. They are smaller in the last row and column of tiles:

              tile.n   tile.n  (valid < tile.n)
             +--------+--------+---+
      tile.m |  (0,0) |  (0,1) |   |
             +--------+--------+---+     rows(i) = [i tile.m, min((i + 1) tile.m, m))
      tile.m |  (1,0) |  (1,1) |   |
             +--------+--------+---+
             +--------+--------+---+     valid < tile.m
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

from oocgemm.planning.cover import WHOLE, Cover
from oocgemm.planning.problem import GemmProblem
from oocgemm.values import dataclass

# Start and stop of a range of indices along one axis.
Range = tuple[int, int]
# Rows and columns of a matrix, panel, tile or chunk.
Shape = tuple[int, int]
# Row and column of a tile in its grid.
Tile = tuple[int, int]


def ceil_div(a: int, b: int) -> int:
    """Divide and round up.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Round a up to a multiple of b.

    >>> round_up(7, 3), round_up(6, 3)
    (9, 6)
    """
    return ceil_div(a, b) * b


def length(indices: Range) -> int:
    """Count the indices of a range.

    >>> length((3, 7))
    4
    """
    return indices[1] - indices[0]


@dataclass(frozen=True, slots=True)
class TileShape:
    """Extents of full tiles and panels: a tile of C is m x n, a panel of op(A) m x k, of op(B) k x n."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def within(self, problem: GemmProblem) -> "TileShape":
        """Return this shape, limited to the extents of the product, or to 1 where such an extent is 0."""
        m, n, k = (max(1, extent) for extent in (problem.m, problem.n, problem.k))
        return TileShape(min(self.m, m), min(self.n, n), min(self.k, k))


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of C and the steps along k of an m x n x k product.

    The `cover` says which tiles are computed. For a triangle, tiles are square, and only those on one side of
    the diagonal and on it are computed. In a tile on the diagonal, each strip of `strip` rows is computed up
    to the end of its diagonal block, or from the start of it. Such a tile is a staircase, and its strips are
    stored one after another without gaps::

        lower, strip = 2:    # # . . . .       upper, strip = 2:    # # # # # #
                             # # . . . .                            # # # # # #
                             # # # # . .                            . . # # # #
                             # # # # . .                            . . # # # #
                             # # # # # #                            . . . . # #
                             # # # # # #                            . . . . # #
    """

    m: int
    n: int
    k: int
    tile: TileShape
    cover: Cover = WHOLE
    strip: int = 1

    @classmethod
    def of(cls, problem: GemmProblem, tile: TileShape, strip: int = 1) -> "TileGrid":
        """Divide a problem into tiles of shape `tile`. `strip` matters only for a triangle."""
        cover = problem.cover
        return cls(problem.m, problem.n, problem.depth, tile, cover, strip if cover.square else 1)

    @property
    def shape(self) -> Shape:
        """Number of tiles down and across."""
        return ceil_div(self.m, self.tile.m), ceil_div(self.n, self.tile.n)

    @property
    def count(self) -> int:
        return self.cover.count(*self.shape, self.tile.m)

    @property
    def steps(self) -> int:
        """Steps per tile, at least one: if k = 0, a step of depth 0 computes beta * C."""
        return max(1, ceil_div(self.k, self.tile.k))

    def rows(self, i: int) -> Range:
        return i * self.tile.m, min((i + 1) * self.tile.m, self.m)

    def cols(self, j: int) -> Range:
        return j * self.tile.n, min((j + 1) * self.tile.n, self.n)

    def is_staircase(self, tile: Tile) -> bool:
        """Tell whether a tile is on the diagonal of a triangle, so that its strips differ in width."""
        return self.cover.is_staircase(*tile)

    def span(self, tile: Tile, rows: Range) -> Range:
        """Return the range of columns of C that are computed in a strip of a tile."""
        cols = self.cols(tile[1])
        return self.cover.span(rows, cols) if self.is_staircase(tile) else cols

    def mirrored(self, tile: Tile, rows: Range) -> Range:
        """Return the columns of a strip that are also stored as rows right of the diagonal, if any."""
        return self.cover.mirrored_columns(rows, self.cols(tile[1]))

    def above(self, tile: Tile, row: int) -> int:
        """Count the computed elements in the rows of a tile above `row`. A strip must begin at `row`."""
        (top, bottom), width = self.rows(tile[0]), length(self.cols(tile[1]))
        if not self.is_staircase(tile):
            return (row - top) * width
        return self.cover.above(row - top, bottom - top, width, self.strip)

    def elements(self, tile: Tile) -> int:
        """Count the elements of C that are computed in a tile."""
        return self.above(tile, self.rows(tile[0])[1])

    def written(self, tile: Tile) -> int:
        """Count the elements of C that are written for a tile. Mirrored ones count, too."""
        if not self.cover.mirrored:
            return self.elements(tile)
        height = length(self.rows(tile[0]))
        return height * height if tile[0] == tile[1] else 2 * self.elements(tile)

    def blocks(self, tile: Tile) -> list[tuple[Range, Range]]:
        """Return the blocks of C, each as ranges of rows and columns, into which a tile is written."""
        block = self.rows(tile[0]), self.cols(tile[1])
        return [block, block[::-1]] if self.cover.mirrored and tile[0] != tile[1] else [block]

    def depth(self, step: int) -> Range:
        start = step * self.tile.k
        return start, min(start + self.tile.k, self.k)


@lru_cache(4096)  # cached, because many candidates have the same extents
def overread(extent: int, panel: int, chunk: int) -> float:
    """Return the elements read per element needed, along one axis that is stored in chunks.

    Panels of `panel` elements are read one after another from an axis of `extent` elements. Every chunk that
    a panel overlaps is read as a whole. A chunk that two panels overlap is read twice.

    >>> overread(100, 10, 5), overread(100, 10, 20), overread(90, 30, 20)
    (1.0, 2.0, 1.2222222222222223)
    """
    if extent == 0 or chunk == 1 or panel % chunk == 0:
        return 1.0
    count = ceil_div(extent, panel)
    sampled = min(count, 512)
    touched = 0
    for i in range(sampled):
        lo, hi = i * panel, min((i + 1) * panel, extent)
        touched += min(round_up(hi, chunk), extent) - lo // chunk * chunk
    return touched / min(sampled * panel, extent)


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
        return self.count == self.grid.count

    @cached_property
    def count(self) -> int:
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
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
