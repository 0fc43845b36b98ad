"""Estimate the time of each tile of a small grid, where tiles differ much in their shares of work and loads.

The first tile loads most. The last one may be small but load nearly as much as others. What is computed of C
at the end drains when nothing else is left to hide it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import Traversal, last, walk
from oocgemm.planning.tiling import Tile, TileGrid, length

MAX_TILES = 16  # grids of more tiles are not estimated tile by tile


@lru_cache(256)  # candidates that differ only in their slots share walks
def _walk(traversal: Traversal, down: int, across: int) -> tuple[Tile, ...]:
    return tuple(walk(traversal, down, across))


class Share(NamedTuple):
    """Shares of one tile: of the elements of C that are computed, and of the bytes that are loaded."""

    computed: float
    loaded: float


def shares(problem: GemmProblem, grid: TileGrid, traversal: Traversal, loads: Loads) -> list[Share]:
    """Estimate the shares of all tiles in walk order if they are few; otherwise of the last one alone.

    The first tile of a row (or column) loads all panels of that row (or column). All further loads are
    divided among the other tiles in proportion to their extents.
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
    """Estimate the seconds of each tile from the seconds that computing and loading take in all.

    With `prefetch`, slots have room for a tile's panels while the tile before is computed.
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
    """Estimate when C has drained, if the last of these tiles ends its last step at `end`.

    `each` are the seconds of the tiles. All of C takes `drain_seconds` to drain. A tile starts to drain in
    its last step, which takes the share `last_step` of the tile's time, and drains in that many strips.
    """
    done, drained = end - sum(each), 0.0
    for part, seconds in zip(parts, each, strict=True):
        done += seconds
        draining = part.computed * drain_seconds
        drained = max(max(drained, done - last_step * seconds) + draining, done + draining / strips)
    return drained


def _loaded(lines: Sequence[int], extents: Sequence[int], loaded: float, once: float) -> list[float]:
    """Divide the `loaded` bytes of an operand of `once` bytes among tiles, by their rows (or columns)."""
    first = [line not in lines[:at] for at, line in enumerate(lines)]
    new = sum(extent for extent, is_first in zip(extents, first, strict=True) if is_first)
    again = sum(extents) - new
    return [
        extent * (once / new if is_first else max(0.0, loaded - once) / again)
        for extent, is_first in zip(extents, first, strict=True)
    ]
