"""What falls to each of a few tiles, whose shares differ: the first loads most, the last may be thin and load nearly as much as
others, and what of C is made last leaves when nothing else is left to do."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import Traversal, last, walk
from oocgemm.planning.tiling import Range, Tile, TileGrid

FEW_TILES = 16


@lru_cache(256)  # candidates of a planner differ in their slots
def _walk(traversal: Traversal, down: int, across: int) -> tuple[Tile, ...]:
    return tuple(walk(traversal, down, across))


class Share(NamedTuple):
    """Of one tile: parts of C, and of the bytes that are loaded."""

    made: float
    loaded: float


def shares(problem: GemmProblem, grid: TileGrid, traversal: Traversal, loads: Loads) -> list[Share]:
    """Those of all tiles in the order in which they are walked, if they are few; otherwise of the last one alone.

    Panels of a row (or column) of tiles are loaded whole for its first tile; what is loaded beyond that falls to the others
    by their extents.
    """
    down, across = grid.shape
    if down * across > FEW_TILES:
        made = grid.elements(last(traversal, down, across)) / (problem.m * problem.n)
        return [Share(made, made)]
    tiles = _walk(traversal, down, across)
    heights, widths = [_length(grid.rows(i)) for i, _ in tiles], [_length(grid.cols(j)) for _, j in tiles]
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


def tile_seconds(parts: Sequence[Share], computing: float, loading: float, *, ahead: bool) -> list[float]:
    """How long tiles take if all of C takes so long to compute and all panels so long to load, side by side; where there is
    room for them, panels come a tile `ahead`."""
    each: list[float] = []
    before = done = loaded = 0.0
    for part in parts:
        loaded = max(loaded, before if ahead else done) + part.loaded * loading
        each.append(max(part.made * computing, loaded - done))
        before, done = done, done + each[-1]
    return each


def drain_end(
    parts: Sequence[Share], each: Sequence[float], end: float, out: float, at_once: float, strips: int
) -> float:
    """When C has left, the last of these tiles, which take so long each, having been multiplied at `end`. All of C takes `out`
    seconds to leave; a tile begins to in its last part, `at_once`, and in strips."""
    done, left = end - sum(each), 0.0
    for part, seconds in zip(parts, each, strict=True):
        done += seconds
        leaving = part.made * out
        left = max(max(left, done - at_once * seconds) + leaving, done + leaving / strips)
    return left


def _loaded(lines: Sequence[int], extents: Sequence[int], loaded: float, once: float) -> list[float]:
    """Bytes for each tile, of an operand that has so many and of which so many are loaded, by its row (or column)."""
    first = [line not in lines[:at] for at, line in enumerate(lines)]
    new = sum(extent for extent, is_first in zip(extents, first, strict=True) if is_first)
    again = sum(extents) - new
    return [
        extent * (once / new if is_first else max(0.0, loaded - once) / again)
        for extent, is_first in zip(extents, first, strict=True)
    ]


def _length(span: Range) -> int:
    return span[1] - span[0]
