"""Slices of k: ranges of k whose partial products are computed apart, and then added in order.

The partial products of all slices are one array, stacked along the rows: slice q has the rows from
q * `Slicing.rows` on. So the slices are computed as one product, whose tiles each belong to one slice.
"""

from dataclasses import dataclass

from oocgemm.planning.problem import GemmProblem
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
        starts = [min(grid.k, step * grid.steps // count * grid.tile.k) for step in range(count)]
        ranges = zip(starts, [*starts[1:], grid.k], strict=True)
        return cls(tuple(ranges), ceil_div(grid.m, grid.tile.m) * grid.tile.m)

    @property
    def depth(self) -> int:
        """Extent of the longest slice. Shorter slices are extended by zeros."""
        return max(map(length, self.ranges))

    def stacked(self, problem: GemmProblem) -> tuple[int, int, int]:
        """Return m, n and k of the product that computes all partial products."""
        return self.rows * len(self.ranges), problem.n, self.depth
