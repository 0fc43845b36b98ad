"""Estimate the time of each tile of C if there are few tiles.

With few tiles, averages mislead. The first tile loads the most panels of A and B. The last tile may be
smaller than the others, and no multiplication overlaps its download.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import Traversal, last, walk
from oocgemm.planning.tiling import Tile, TileGrid, length

MAX_TILES = 16  # grids of more tiles are not estimated tile by tile


@lru_cache(256)  # cached, because many candidates visit the same tiles in the same order
def _walk(traversal: Traversal, down: int, across: int) -> tuple[Tile, ...]:
    return tuple(walk(traversal, down, across))


class Share(NamedTuple):
    """The fractions of the elements of C, and of the bytes loaded during the run, that belong to one tile."""

    computed: float
    loaded: float


def shares(problem: GemmProblem, grid: TileGrid, traversal: Traversal, loads: Loads) -> list[Share]:
    """Estimate the fractions of C's elements and of the loaded bytes that belong to each tile.

    Tiles are in the order of the traversal. If there are more than `MAX_TILES`, the list has one entry only,
    that of the last tile.

    The first tile visited in a row of tiles loads all panels of op(A) of that row, and likewise for columns
    and op(B). The other bytes in `loads` are divided among the other tiles in proportion to their extents.
    """
    down, across = grid.shape
    if down * across > MAX_TILES:
        computed = grid.elements(last(traversal, down, across)) / (problem.m * problem.n)
        return [Share(computed, computed)]
    tiles = _walk(traversal, down, across)
    heights, widths = [length(grid.rows(i)) for i, _ in tiles], [length(grid.cols(j)) for _, j in tiles]
    a = _loaded(
        [i for i, _ in tiles], heights, loads.a_read, problem.m * problem.depth * problem.itemsizes["A"]
    )
    b = _loaded(
        [j for _, j in tiles], widths, loads.b_read, problem.depth * problem.n * problem.itemsizes["B"]
    )
    whole = sum(a) + sum(b) or 1.0
    c = problem.m * problem.n
    return [
        Share(height * width / c, (of_a + of_b) / whole)
        for height, width, of_a, of_b in zip(heights, widths, a, b, strict=True)
    ]


def tile_seconds(parts: Sequence[Share], computing: float, loading: float, *, prefetch: bool) -> list[float]:
    """Estimate the seconds of each tile, if all tiles together take `computing` and `loading` seconds.

    With `prefetch`, a tile's panels are loaded while the tile before it is computed, otherwise only
    afterwards.
    """
    each: list[float] = []
    before = done = loaded = 0.0
    for part in parts:
        loaded = max(loaded, before if prefetch else done) + part.loaded * loading
        each.append(max(part.computed * computing, loaded - done))
        before, done = done, done + each[-1]
    return each


def drain_end(
    parts: Sequence[Share],
    each: Sequence[float],
    end: float,
    drain_seconds: float,
    last_step: float,
    strips: int,
) -> float:
    """Estimate the time at which the last element of C has been written.

    - `parts`: for each tile, its fraction of the elements of C (`Share.computed`).
    - `each`: the seconds of each tile (`tile_seconds`).
    - `end`: the time at which the multiplications of the last tile end.
    - `drain_seconds`: seconds to download and write all of C.
    - `last_step`: the fraction of a tile's steps that overlap its own drain.
    - `strips`: number of strips in which a tile drains.
    """
    done, drained = end - sum(each), 0.0
    for part, seconds in zip(parts, each, strict=True):
        done += seconds
        draining = part.computed * drain_seconds
        drained = max(max(drained, done - last_step * seconds) + draining, done + draining / strips)
    return drained


def _loaded(lines: Sequence[int], extents: Sequence[int], loaded: float, once: float) -> list[float]:
    """Divide the bytes that are loaded of one operand among tiles.

    Tile number t uses the panels of tile row (or column) `lines[t]`, which has `extents[t]` rows (or columns)
    of the matrix. The first tile visited in each tile row (or column) loads all its panels: together these
    tiles load `once` bytes, the size of the operand. The rest of the `loaded` bytes is divided among the
    other tiles in proportion to `extents`.
    """
    first = [line not in lines[:at] for at, line in enumerate(lines)]
    new = sum(extent for extent, is_first in zip(extents, first, strict=True) if is_first)
    again = sum(extents) - new
    return [
        extent * (once / new if is_first else max(0.0, loaded - once) / again)
        for extent, is_first in zip(extents, first, strict=True)
    ]
