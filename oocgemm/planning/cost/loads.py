"""Estimate how many panels are in slots before a tile needs them, and how many bytes a candidate loads.

`Schedule.loads` counts these bytes exactly, one panel after the other. These estimates are for the clock and
the search, which cannot count, and for runs of so many steps that counting would take too long.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from oocgemm.planning.cover import Cover
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import NEVER, Traversal
from oocgemm.planning.tiling import Tile, TileGrid, ceil_div

# Maximum number of tiles of a square cover that are examined. They are taken from the middle of a longer
# list.
MAX_TILES = 256


def cached(slots: int, between: int, steps: int) -> int:
    """Count the panels of a tile that are still in slots if `between` other panels were used since.

    The tile goes through its panels in the opposite order to the tile that used them before.

    >>> cached(10, 0, 4), cached(10, 8, 4), cached(10, 12, 4)
    (4, 2, 0)
    """
    return max(0, min(slots - between, steps))


def cached_of_lines(tiles: Sequence[Tile], steps: int, slots: int) -> list[tuple[int, int]]:
    """Estimate how many panels of the row and of the column of each tile are in slots before the tile.

    A line, which is a tile row and the column with its number, has one panel per step. The `slots` keep
    panels of the lines that are used next (Belady). Unless they have room for all panels, two slots are for
    panels that pass through. `Placing` places panel by panel, but here, lines are kept and evicted tile by
    tile.

    >>> cached_of_lines([(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)], 3, 8)
    [(0, 0), (0, 3), (3, 3), (0, 3), (3, 3), (3, 3)]
    """
    if slots < 1:
        return [(0, 0)] * len(tiles)
    later, uses = dict[int, int](), list[tuple[int, int]]()
    for position in range(len(tiles) - 1, -1, -1):
        i, j = tiles[position]
        uses.append((later.get(i, NEVER), later.get(j, NEVER)))
        later[i] = later[j] = position
    room = slots if slots >= len(later) * steps else max(0, slots - 2)
    found, kept, next_use = list[tuple[int, int]](), dict[int, int](), dict[int, int]()
    furthest, total = list[tuple[int, int]](), 0
    for tile, both in zip(tiles, reversed(uses), strict=True):
        found.append((kept.get(tile[0], 0), kept.get(tile[1], 0)))
        for line, use in dict(zip(tile, both, strict=True)).items():
            total += steps - kept.get(line, 0)
            kept[line], next_use[line] = steps, use
            heappush(furthest, (-use, line))
        while total > room:
            use, line = furthest[0]
            if next_use.get(line) != -use:
                heappop(furthest)  # the line has been used since this entry, or has been evicted
                continue
            dropped = min(kept[line], total - room)
            total -= dropped
            kept[line] -= dropped
            if not kept[line]:
                heappop(furthest)
                del kept[line], next_use[line]
    return found


def estimate_loads(problem: GemmProblem, grid: TileGrid, slots: Slots, traversal: Traversal) -> Loads:
    """Estimate the bytes that `Schedule.loads` counts for all tiles."""
    down, across = grid.shape
    if down * across == 0:
        return Loads(0, 0, 0, 0)
    a = problem.m * problem.depth * problem.itemsizes["A"]
    if problem.cover.square:
        counts = grid.steps, slots.a, 0 if slots.unified else slots.host_a
        up, read = _lines_loaded(problem.cover, down, grid.tile.m, traversal.band, *counts)
        return Loads(a * up / down, 0, a * read / down, 0)
    b = problem.depth * problem.n * problem.itemsizes["B"]
    steps = max(1.0, problem.depth / max(1, grid.tile.k))
    a_up, b_up = _times_loaded(down, across, steps, slots.a, slots.b, traversal)
    if slots.unified:
        return Loads(a * a_up, b * b_up, a * a_up, b * b_up)
    a_read, b_read = _times_loaded(down, across, steps, slots.host_a, slots.host_b, traversal)
    return Loads(a * a_up, b * b_up, a * min(a_up, a_read), b * min(b_up, b_read))


@lru_cache(1024)
def _lines_loaded(
    cover: Cover, lines: int, side: int, band: int, steps: int, device: int, host: int
) -> tuple[float, float]:
    """Estimate how many lines of panels of a square cover are uploaded, and how many are read."""
    tiles = cover.order(lines, band, side)
    left_out = max(0, len(tiles) - MAX_TILES)
    some = tiles[left_out // 2 : left_out // 2 + MAX_TILES]
    up = read = 0
    found = (cached_of_lines(some, steps, count) for count in (device, host))
    for (i, j), here, there in zip(some, *found, strict=True):
        missing = steps - here[0]
        up += missing
        read += min(missing, steps - there[0])
        if i != j:  # a tile on the diagonal has one line
            missing = steps - here[1]
            up += missing
            read += min(missing, steps - there[1])
    times = len(tiles) / len(some) / steps
    return times * up, times * read


def _times_loaded(
    down: int, across: int, steps: float, a_slots: int, b_slots: int, traversal: Traversal
) -> tuple[float, float]:
    """Estimate how many times op(A) and op(B) are loaded into a cache of `a_slots` and `b_slots` panels.

    `steps` is the number of panels along k. If the last one is thinner than the others, it counts as a
    fraction of a panel, since the panels that stay cached are full ones.
    """
    if traversal.axis == 1:
        b, a = _times_loaded(across, down, steps, b_slots, a_slots, traversal.along_rows)
        return a, b
    band = min(traversal.band, down)
    bands = ceil_div(down, band)
    # The hit rate depends on how many panels of the operand are used before the same ones are used again:
    # - A, from one tile column to the next: the panels of all tile rows of the band, band * steps.
    # - B, from one tile row to the next within a band: the panels of one tile column, `steps`.
    # - B, from one band to the next: the panels of all tile columns, across * steps.
    a = 1 + (across - 1) * (1 - _hit_rate(a_slots, band * steps))
    b = 1 + (bands - 1) * (1 - _hit_rate(b_slots, across * steps))
    return a, b + bands * (band - 1) * (1 - _hit_rate(b_slots, steps))


def _hit_rate(slots: int, panels: float) -> float:
    """Return the fraction of uses that find their panel in a cache with `slots` slots.

    The same `panels` panels are used again and again, alternately forwards and backwards. At each turn, the
    cached panels are the ones that are used next. The other panels are loaded again.
    """
    return min(1.0, slots / panels)
