"""Divide the tiles of a plan among workers, and choose tiles that divide evenly. Pure."""

from dataclasses import dataclass
from math import gcd

from oocgemm.planning import Plan, TileShape
from oocgemm.planning.parts.part import Part, divide
from oocgemm.planning.tiling import ceil_div, length, round_up

# Parts per worker if a part lasts at least LONG seconds even then. Long parts are worth evening out.
PER_WORKER, LONG = 3, 60.0
# Largest ratio of the tiles of the busiest worker to the mean that is accepted without smaller tiles.
MAX_IMBALANCE = 1.1


@dataclass(frozen=True)
class _Choice:
    """A division into down x across parts.

    `most` is the number of tiles that the busiest worker computes if each takes the next part when it is
    free. `panels` is the number of elements that storage delivers, divided by k.
    """

    most: int
    panels: int
    down: int
    across: int


def parts_of(plan: Plan, workers: int) -> tuple[Part, ...]:
    """Divide the tiles of a plan into parts for a number of workers, the longest parts first."""
    seconds = plan.prediction.total / workers
    count = workers * (PER_WORKER if seconds / PER_WORKER >= LONG else 1)
    best = _best(plan, workers, count)
    found = divide(plan.grid, best.down, best.across)
    return tuple(sorted(found, key=lambda part: (-length(part.rows) * length(part.cols), part.number)))


def even_tile(plan: Plan, workers: int) -> TileShape | None:
    """Return a smaller tile, with which every worker computes as many tiles; None if the plan's tile will do.

    A tile that a planner chose for one process can be as large as C. The new tile's extents are multiples of
    those of chunks where that still divides C finely enough.
    """
    down, across = plan.grid.shape
    if 0 in (down, across) or _best(plan, workers, workers).most * workers <= MAX_IMBALANCE * down * across:
        return None
    problem, layouts = plan.problem, plan.layouts
    pairs = [(rows, workers // rows) for rows in range(1, workers + 1) if workers % rows == 0]
    rows, cols = min(pairs, key=lambda pair: pair[0] * problem.n + pair[1] * problem.m)
    chunk = [
        unit[0] * unit[1] // gcd(*unit)
        for unit in zip(
            layouts.c.write_chunk, (layouts.a.read_chunk[0], layouts.b.read_chunk[1]), strict=True
        )
    ]
    extents = [
        _extent(*pair)
        for pair in zip(
            (problem.m, problem.n), (down, across), (rows, cols), chunk, layouts.c.write_chunk, strict=True
        )
    ]
    return TileShape(extents[0], extents[1], plan.tile.k)


def _extent(whole: int, tiles: int, parts: int, *units: int) -> int:
    """Return the extent of tiles that divide `whole` into a multiple of `parts`, and into at least
    `tiles`.
    """
    extent = max(1, ceil_div(whole, round_up(tiles, parts)))
    for unit in units:
        if 4 * unit <= extent:
            return round_up(extent, unit)
    return round_up(extent, units[-1])


def _best(plan: Plan, workers: int, count: int) -> _Choice:
    """Return the division into about `count` parts that balances the workers best, then reads least."""
    rows, cols = plan.grid.shape
    found = []
    for down in range(1, min(rows, count) + 1):
        across = min(cols, ceil_div(count, down))
        sizes = [length(part.rows) * length(part.cols) for part in divide(plan.grid, down, across)]
        busy = [0] * workers
        for size in sorted(sizes, reverse=True):
            least = busy.index(min(busy))
            busy[least] += size
        panels = across * plan.problem.m + down * plan.problem.n
        found.append(_Choice(max(busy), panels, down, across))
    return min(found, key=lambda one: (one.most, one.panels), default=_Choice(0, 0, 1, 1))
