"""Which elements of C are computed and stored: all of them, or those of a triangle.

Rows and columns of tiles are called lines here. Extents are numbers of elements, and ranges are half-open.
"""

from dataclasses import dataclass
from typing import ClassVar

# Start and stop of a range of indices along one axis.
_Range = tuple[int, int]


@dataclass(frozen=True)
class Cover:
    """All elements of C are computed and stored.

    Attributes:
        name: the cover's name in records, such as journals.
        square: whether tiles and chunks must be square.
        upper: whether only the upper triangle is computed.
        mirrored: whether each element outside of the diagonal is also stored on the other side of it.
        stored_triangle: the triangle of C that is stored, "lower" or "upper", with the diagonal; "" if all of
            C is. The other one stays as it is: 0 in a new array.
    """

    name: ClassVar[str] = ""
    square: ClassVar[bool] = False

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
        """The triangle that is stored; "" if all of C is."""
        return ""

    def elements(self, m: int, n: int) -> int:
        """Count the elements of an m x n matrix C that are needed."""
        return m * n

    def count(self, down: int, across: int) -> int:
        """Count the tiles that are computed, of `down` x `across` tiles."""
        return down * across

    def columns(self, i: int, across: int) -> _Range:
        """Return the tile columns of tile row i that are computed."""
        return 0, across

    def is_staircase(self, i: int, j: int) -> bool:
        """Tell whether the strips of tile (i, j) differ in width."""
        return False

    def span(self, rows: _Range, cols: _Range) -> _Range:
        """Return the columns that are computed of a strip of a staircase."""
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

    @property
    def name(self) -> str:  # type: ignore[override]  # constant for other covers
        """The name of the triangle; "full" if it is mirrored."""
        return "full" if self.mirrored else self.stored_triangle

    @property
    def stored_triangle(self) -> str:
        """The triangle that is stored; "" if all of C is."""
        return "" if self.mirrored else "upper" if self.upper else "lower"

    def elements(self, m: int, n: int) -> int:
        """Count the elements of the triangle, with the diagonal."""
        return m * (m + 1) // 2

    def count(self, down: int, across: int) -> int:
        """Count the tiles with an element of the triangle."""
        return down * (down + 1) // 2

    def columns(self, i: int, across: int) -> _Range:
        """Return the tile columns of tile row i in the triangle."""
        return (i, across) if self.upper else (0, i + 1)

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


# All of C.
WHOLE = Cover()
# Covers by their names in records, and by values of the option `uplo`.
COVERS = {cover.name: cover for cover in (WHOLE, Triangle(), Triangle(True), Triangle(mirrored=True))}
# Values of `uplo`: the triangle of a Gram matrix that is computed. With "full", it is the lower one, and the
# other one is mirrored.
GRAMS = ("lower", "upper", "full")
