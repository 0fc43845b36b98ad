"""Parts: tiles of one shared plan, each part computed by one process, and slices of k.

A part has the tiles in a rectangle of tiles. If only a triangle of C is computed, or if tiles of a row are
merged, a part has whole rows of tiles (`bands`). All parts have the candidate of the shared plan: its tile
shape, its depth of panels, its direction along k. So each element of C is summed in the same order, whichever
process computes it, and has the same bits.

If the plan splits k, a part computes its tiles over one range of steps only, a slice of k. The result is a
partial product. C is the sum of the partial products of all slices, in ascending order of k. The partial
products are one array, stacked along the rows: slice q has the rows from q * `Slicing.rows` on. So the slices
are computed as one product, whose tiles each belong to one slice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from oocgemm.planning.tiling import Range, TileGrid, TileSet, ceil_div, length


@dataclass(frozen=True, slots=True)
class Part:
    """Tiles of C that one process computes.

    `number` identifies the part in its plan. `rows` and `cols` are ranges of tile rows and of tile columns in
    the grid of the whole plan. `k_slice` is the number of the part's range of k, if the plan splits k.
    """

    number: int
    rows: Range
    cols: Range
    k_slice: int = 0

    def tiles(self, grid: TileGrid) -> TileSet:
        """Return the tiles of the part. `grid` is that of the whole plan."""
        return TileSet.of(grid).part(self.rows, self.cols)

    def __str__(self) -> str:
        (top, bottom), (left, right) = self.rows, self.cols
        return f"part {self.number} (tiles [{top}:{bottom}, {left}:{right}])"


def divide(grid: TileGrid, down: int, across: int, k_slices: int = 1) -> tuple[Part, ...]:
    """Divide the tiles of a plan into `down` x `across` rectangles of nearly equal sizes, per slice of k.

    There are fewer parts if the grid has fewer than `down` rows or `across` columns of tiles, or if a tile
    has fewer than `k_slices` steps. If the cover is square, such as a triangle, the parts are those of
    `bands`.
    """
    if grid.cover.square:
        return bands(grid, down * across)
    rows, cols = (list(_even(*pair)) for pair in zip(grid.shape, (down, across), strict=True))
    found = product(range(len(step_ranges(grid, k_slices))), rows, cols)
    return tuple(Part(number, r, c, k_slice) for number, (k_slice, r, c) in enumerate(found))


def bands(grid: TileGrid, count: int) -> tuple[Part, ...]:
    """Divide the rows of tiles of a plan into `count` parts, with as equal numbers of elements as possible.

    There are fewer parts if there are fewer rows of tiles.
    """
    down, across = grid.shape
    rows = [TileSet.of(grid).part((i, i + 1), (0, across)).coverage.elements for i in range(down)]
    ends, total = list(accumulate(rows, initial=0)), sum(rows)
    found, top, count = list[Part](), 0, min(count, down)
    for number in range(count):
        left = count - number - 1
        # The row that ends nearest to an equal share, and leaves a row for each part that follows.
        wanted = total * (number + 1) / count
        stop = min(range(top + 1, down - left + 1), key=lambda row: abs(ends[row] - wanted))
        stop = down if not left else stop
        found.append(Part(number, (top, stop), (0, across)))
        top = stop
    return tuple(found)


def step_ranges(grid: TileGrid, k_slices: int) -> tuple[Range, ...]:
    """Divide the steps of a tile into `k_slices` nearly equal ranges; fewer ranges if there are fewer steps.

    Slice q of k has the steps of range q. So all its panels but the last one are tile.k deep.
    """
    return tuple(_even(grid.steps, k_slices))


def k_range(grid: TileGrid, steps: Range) -> Range:
    """Return the range of indices along k that a range of steps multiplies."""
    return grid.depth(steps[0])[0], grid.depth(steps[1] - 1)[1]


def _even(count: int, pieces: int) -> Iterator[Range]:
    """Divide the numbers below `count` into `pieces` nearly equal ranges, none of them empty.

    >>> list(_even(7, 3)), list(_even(2, 3))
    ([(0, 2), (2, 4), (4, 7)], [(0, 1), (1, 2)])
    """
    pieces = min(pieces, count)
    return pairwise(count * piece // pieces for piece in range(pieces + 1)) if pieces else iter(())


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
