"""Which elements of C are computed and stored: all of them, those of a triangle, or those of a band.

A *line* is a tile row and the tile column with its number. Extents are numbers of elements, and ranges are
half-open. The sides of square tiles are `side` elements long.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar

from oocgemm.values import dataclass

# Start and stop of a range of indices along one axis.
_Range = tuple[int, int]
# Row and column of a tile in its grid.
_Tile = tuple[int, int]


@dataclass(frozen=True)
class Cover:
    """All elements of C are computed and stored.

    Attributes:
        name: the cover's name in records, such as journals.
        square: whether tiles and chunks must be square. B is A^H then, and the cover orders the tiles.
        halves: whether only one of the elements (i, j) and (j, i) is computed, for both places.
        upper: whether only the upper triangle is computed.
        mirrored: whether each element outside of the diagonal is also stored on the other side of it.
        stored_triangle: the triangle of C that is stored, "lower" or "upper", with the diagonal; "" if all of
            C is stored. The other triangle stays as it is: 0 in a new array.
        label: what users read in place of the name.
    """

    name: ClassVar[str] = ""
    square: ClassVar[bool] = False
    halves: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return self.name

    @property
    def upper(self) -> bool:
        """Whether only the upper triangle is computed."""
        return False

    @property
    def mirrored(self) -> bool:
        """Whether elements are stored twice."""
        return False

    @property
    def stored_triangle(self) -> str:
        """The triangle that is stored; "" if all of C is stored."""
        return ""

    def elements(self, m: int, n: int) -> int:
        """Count the elements of an m x n matrix C that are needed."""
        return m * n

    def extent(self, n: int) -> int:
        """Return the maximum number of elements that are needed of a row, if C is n x n."""
        return n

    def count(self, down: int, across: int, side: int) -> int:
        """Count the tiles that are computed, of `down` x `across` tiles."""
        return down * across

    def columns(self, i: int, across: int, side: int) -> _Range:
        """Return the tile columns of tile row i that are computed."""
        return 0, across

    def order(self, lines: int, band: int, side: int) -> list[_Tile]:
        """List the tiles of a square cover of `lines` lines, in bands of `band` tile rows.

        A band is visited column by column, from left to right: so the tiles of a row are always in the same
        order. Successive tiles of a band have a line in common.
        """
        found: list[_Tile] = []
        for rows, (left, right) in self._bands(lines, band, side):
            for number, col in enumerate(range(left, right)):
                inside = [row for row in rows if self._has(row, col, lines, side)]
                found += [(row, col) for row in (reversed(inside) if number % 2 else inside)]
        return found

    def _bands(self, lines: int, band: int, side: int) -> Iterator[tuple[Sequence[int], _Range]]:
        """Yield the tile rows of each band, and the range of its tile columns."""
        for top in range(0, lines, band):
            rows = range(top, min(top + band, lines))
            spans = [self.columns(row, lines, side) for row in rows]
            yield rows, (min(start for start, _ in spans), max(stop for _, stop in spans))

    def _has(self, row: int, col: int, lines: int, side: int) -> bool:
        start, stop = self.columns(row, lines, side)
        return start <= col < stop

    def period(self, band: int, side: int) -> int:
        """Return after how many tiles the pattern of `order` repeats, in the inner part of a row of tiles."""
        return 2 * band

    def is_staircase(self, i: int, j: int) -> bool:
        """Tell whether the strips of tile (i, j) differ in width."""
        return False

    def span(self, rows: _Range, cols: _Range) -> _Range:
        """Return the columns of a strip of a staircase that are computed."""
        return cols

    def mirrored_columns(self, rows: _Range, cols: _Range) -> _Range:
        """Return the columns of a strip that are also stored as rows on the other side of the diagonal."""
        return cols[0], cols[0]

    def above(self, rows: int, height: int, width: int, strip: int) -> int:
        """Count the elements in the first `rows` rows of a staircase of `height` x `width` elements."""
        return rows * width


@dataclass(frozen=True)
class Triangle(Cover):
    """The lower triangle of C is computed, or the upper one, with the diagonal.

    In a tile on the diagonal, each strip is computed up to the end of its diagonal block, or from the start
    of it. With `mirrored`, all of C is stored.
    """

    upper: bool = False
    mirrored: bool = False

    square = True
    halves = True

    @property
    def name(self) -> str:  # type: ignore[override]  # constant for other covers
        """The name of the triangle; "full" if it is mirrored."""
        return "full" if self.mirrored else self.stored_triangle

    @property
    def stored_triangle(self) -> str:
        """The triangle that is stored; "" if all of C is stored."""
        return "" if self.mirrored else "upper" if self.upper else "lower"

    def elements(self, m: int, n: int) -> int:
        """Count the elements of the triangle, with the diagonal."""
        return m * (m + 1) // 2

    def count(self, down: int, across: int, side: int) -> int:
        """Count the tiles with an element of the triangle."""
        return down * (down + 1) // 2

    def columns(self, i: int, across: int, side: int) -> _Range:
        """Return the tile columns of tile row i in the triangle."""
        return (i, across) if self.upper else (0, i + 1)

    def order(self, lines: int, band: int, side: int) -> list[_Tile]:
        """List the tiles of a triangle of `lines` tile rows, in bands of `band` rows.

        A band visits its columns from the diagonal to the left, and at last the tiles on its own diagonal. So
        a band starts with a column whose panels the band before has used, and successive tiles have a line in
        common. An upper triangle is visited as its transpose would be.

        >>> Triangle().order(3, 1, 8)
        [(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)]
        >>> Triangle().order(4, 2, 8)
        [(0, 0), (1, 0), (1, 1), (2, 1), (3, 1), (3, 0), (2, 0), (2, 2), (3, 2), (3, 3)]
        >>> Triangle(upper=True).order(2, 1, 8)
        [(0, 0), (0, 1), (1, 1)]
        """
        found: list[_Tile] = []
        down = True
        for top in range(0, lines, band):
            bottom = min(top + band, lines)
            first, last = (self._first(row, lines, side) for row in (top, bottom - 1))
            for col in (*range(top - 1, first - 1, -1), *range(top, bottom)):
                rows: Sequence[int] = range(max(top, col), bottom)
                if col < last:
                    rows = [row for row in rows if self._first(row, lines, side) <= col]
                found += [(row, col) for row in (rows if down or col >= top else reversed(rows))]
                down = not down
            down = True
        return [(col, row) for row, col in found] if self.upper else found

    def _first(self, row: int, lines: int, side: int) -> int:
        """Return the first tile column of a tile row of a lower triangle."""
        return 0

    def is_staircase(self, i: int, j: int) -> bool:
        """Tell whether the tile is on the diagonal."""
        return i == j

    def span(self, rows: _Range, cols: _Range) -> _Range:
        """Return the columns up to the end of the diagonal block of the strip, or from the start of it."""
        return (rows[0], cols[1]) if self.upper else (cols[0], rows[1])

    def mirrored_columns(self, rows: _Range, cols: _Range) -> _Range:
        """Return the columns left of the diagonal block, if they are mirrored."""
        return cols[0], min(cols[1], rows[0]) if self.mirrored else cols[0]

    def above(self, rows: int, height: int, width: int, strip: int) -> int:
        """Count the elements in the first `rows` rows of a staircase."""
        whole, rest = divmod(rows, strip)
        if self.upper:
            right = strip * (whole * width - strip * (whole * (whole - 1) // 2))
            return right + rest * (height - whole * strip)
        return strip * strip * (whole * (whole + 1) // 2) + rest * rows


@dataclass(frozen=True)
class Band(Cover):
    """The elements (i, j) with ``|i - j| <= width`` are computed, on both sides of the diagonal.

    Tiles with such an element are computed as a whole: an epilogue replaces their other elements (the step
    "within" of `oocgemm.planning.sinks`). A tile row has all elements of its rows, so that each row can be
    reduced by itself::

        width = 2, side = 2:    # # # # . .
                                # # # # . .
                                # # # # # #
                                # # # # # #
                                . . # # # #
                                . . # # # #
    """

    width: int = 0

    square = True

    @property
    def name(self) -> str:  # type: ignore[override]  # constant for other covers
        """The name of the band."""
        return f"band {self.width}"

    def elements(self, m: int, n: int) -> int:
        """Count the elements of the band."""
        width = max(0, min(self.width, m - 1))
        return m * (2 * width + 1) - width * (width + 1)

    def extent(self, n: int) -> int:
        """Return the maximum number of elements of a row in the band."""
        return min(n, 2 * self.width + 1)

    def first(self, row: int) -> int:
        """Return the first column that is needed in a row. It does not decrease from row to row."""
        return max(0, row - self.width)

    def last(self, row: int) -> int:
        """Return the last row whose first column is at most `row`, or any number beyond the last row."""
        return row + self.width

    def _reach(self, side: int) -> int:
        """Return how many tiles on each side of the tile on the diagonal have elements of the band."""
        return -(-self.width // side)

    def count(self, down: int, across: int, side: int) -> int:
        """Count the tiles with an element of the band."""
        reach = max(0, min(self._reach(side), down - 1))
        return down * (2 * reach + 1) - reach * (reach + 1)

    def columns(self, i: int, across: int, side: int) -> _Range:
        """Return the tile columns of tile row i with elements of the band.

        >>> [Band(2).columns(i, 4, 2) for i in range(4)]
        [(0, 2), (0, 3), (1, 4), (2, 4)]
        """
        return self.first(i * side) // side, min(across, self.last((i + 1) * side - 1) // side + 1)

    def period(self, band: int, side: int) -> int:
        """Return the number of tiles of a band of tile rows far from the corners."""
        return band * (2 * self._reach(side) + 1)


@dataclass(frozen=True)
class Windows(Band):
    """A band whose width differs from row to row, as that of variants within a distance on a chromosome.

    The rows are divided into blocks of `block` rows. Number b of `firsts` is the first column that is needed
    in a row of block b. The numbers do not decrease::

        block = 2, firsts = 0 1 3:    # # # . . .
                                      # # # . . .
                                      . # # # . .
                                      . # # # . .
                                      . . . # # #
                                      . . . # # #
    """

    block: int = 1
    firsts: tuple[int, ...] = ()

    @property
    def name(self) -> str:  # type: ignore[override]  # constant for other covers
        """The name of the windows, with all numbers."""
        return " ".join(map(str, ("windows", self.block, *self.firsts)))

    @property
    def label(self) -> str:
        return "windows"

    def elements(self, m: int, n: int) -> int:
        """Count the elements on both sides of the diagonal."""
        sizes = ((b, min(self.block, m - b * self.block)) for b in range(len(self.firsts)))
        left = sum(size * (b * self.block - self.firsts[b]) + size * (size - 1) // 2 for b, size in sizes)
        return 2 * left + m

    def extent(self, n: int) -> int:
        """Return the mean number of elements of a row."""
        rows = max(1, min(n, self.block * len(self.firsts)))
        return min(n, -(-self.elements(rows, rows) // rows))

    def first(self, row: int) -> int:
        return self.firsts[min(row // self.block, len(self.firsts) - 1)]

    def last(self, row: int) -> int:
        return bisect_left(self.firsts, row + 1) * self.block - 1

    def _reach(self, side: int) -> int:
        """Return this number of tiles of a mean row."""
        return -(-(self.extent(self.block * len(self.firsts)) // 2) // side)

    def count(self, down: int, across: int, side: int) -> int:
        return _count(self, down, side)


@lru_cache(4096)  # many candidates have the same sides
def _count(windows: Windows, down: int, side: int) -> int:
    return sum(stop - start for start, stop in (windows.columns(i, down, side) for i in range(down)))


@dataclass(frozen=True)
class Halved(Triangle):
    """The lower triangle of a band, with the diagonal. Tiles on the diagonal are staircases."""

    band: Band = Band()

    @property
    def name(self) -> str:  # type: ignore[override]  # constant for other covers
        """The name of the band, in the lower triangle."""
        return f"lower {self.band.name}"

    @property
    def label(self) -> str:
        return f"lower {self.band.label}"

    def elements(self, m: int, n: int) -> int:
        """Count the elements of the band in the triangle."""
        return (self.band.elements(m, n) + m) // 2

    def extent(self, n: int) -> int:
        """Return the elements of a row up to the diagonal: their maximum, or the mean, as of the band."""
        return min(n, self.band.extent(2 * n) // 2 + 1)

    def count(self, down: int, across: int, side: int) -> int:
        return (self.band.count(down, across, side) + down) // 2

    def columns(self, i: int, across: int, side: int) -> _Range:
        """Return the tile columns of tile row i with elements of the band, up to the diagonal.

        >>> [Halved(band=Band(2)).columns(i, 4, 2) for i in range(4)]
        [(0, 1), (0, 2), (1, 3), (2, 4)]
        """
        return self._first(i, across, side), i + 1

    def _first(self, row: int, lines: int, side: int) -> int:
        return self.band.columns(row, lines, side)[0]

    def period(self, band: int, side: int) -> int:
        return (self.band.period(band, side) + band) // 2


# All of C.
WHOLE = Cover()
_NAMED = {cover.name: cover for cover in (WHOLE, Triangle(), Triangle(True), Triangle(mirrored=True))}
# Values of `uplo`: the triangle of a Gram matrix that is computed. With "full", the lower triangle is
# computed, and mirrored into the upper one.
GRAMS = ("lower", "upper", "full")


def cover_of(name: str) -> Cover:
    """Return the cover with a name in records, or with a value of the option `uplo`. Raises `KeyError`."""
    kind, _, rest = name.partition(" ")
    if kind == "lower" and rest:
        band = cover_of(rest)
        assert isinstance(band, Band)
        return Halved(band=band)
    if kind == "windows":
        block, *firsts = map(int, rest.split())
        return Windows(block=block, firsts=tuple(firsts))
    return Band(int(rest)) if kind == "band" else _NAMED[name]
