"""Slices of k: ranges of k whose partial products are computed apart, and then added in order.

The partial products of all slices are one array, stacked along the rows: slice q has the rows from
q * `Slicing.rows` on. So the slices are computed as one product, whose tiles each belong to one slice.
"""

from dataclasses import dataclass, replace

from oocgemm.planning.parts.part import Part, k_range, step_ranges
from oocgemm.planning.tiling import Range, TileGrid, ceil_div, length


@dataclass(frozen=True, slots=True)
class Slicing:
    """The slices of a product's k.

    `ranges` are the slices, in order. `rows` is the number of rows of a slice in the stacked partial
    products: m, rounded up to whole tiles. `number` is the slice of which op(B) is read; None to read none.
    """

    ranges: tuple[Range, ...]
    rows: int
    number: int | None = None

    @classmethod
    def of(cls, grid: TileGrid, count: int) -> "Slicing":
        """Divide the steps of a grid into `count` slices of nearly equal numbers of steps."""
        ranges = (k_range(grid, steps) for steps in step_ranges(grid, count))
        return cls(tuple(ranges), ceil_div(grid.m, grid.tile.m) * grid.tile.m)

    @property
    def depth(self) -> int:
        """Extent of the longest slice. Shorter slices are extended by zeros."""
        return max(map(length, self.ranges))

    def stacked(self, part: Part, grid: TileGrid) -> Part:
        """Return a part of the product as a part of the stacked partial products. `grid` is that of C."""
        top = part.k_slice * grid.shape[0]
        return replace(part, rows=(part.rows[0] + top, part.rows[1] + top))
