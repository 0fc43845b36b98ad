"""The order of the tiles of a triangle.

There is only one operand, A. The panels of a tile row are used by the tiles of this row, in the role of
op(A), and by the tiles of the column with the same number, in the role of op(B). A row and the column with
its number are together called a *line*.
"""

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
