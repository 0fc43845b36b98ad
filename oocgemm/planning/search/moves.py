"""Change one decision of a candidate: the number of tiles, the depth of steps, or the accumulators."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from operator import itemgetter

from oocgemm.planning.cost.bound import bound
from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.search.candidates import is_enqueued
from oocgemm.planning.search.depths import max_depth
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.search.slot_counts import slot_counts
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# The depth of the panels is changed by these factors. Short rows of a panel are copied more slowly.
DEPTH_FACTORS = (2, 0.5, 4)
# Strips of C that the GPU downloads by itself are tried this many times as large: fewer take less time to
# enqueue.
LARGER_STRIP = 4
# Of the numbers of slots for a tile shape, this many are tried.
MAX_SLOT_COUNTS = 2


def moves(prices: Prices, best: Candidate) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates that differ from the best one in one decision, each with a lower bound on its time."""
    strip = min(best.tile.m, LARGER_STRIP * best.slots.strip)
    # Without slots for finished strips, strips of any size take no memory.
    if prices.setting.enqueues and not prices.setting.problem.finishes and strip > best.slots.strip:
        fewer = replace(best, slots=replace(best.slots, strip=strip))
        yield bound(prices, fewer), fewer
    for shape, c in _shapes(prices.setting, best):
        if not is_enqueued(prices.setting, shape) and is_enqueued(prices.setting, best.tile):
            continue
        # Larger tiles may only fit with one accumulator, or with thinner panels.
        thinner = replace(shape, k=max(1, shape.k // 2))
        for fitting in ((shape, c), (shape, 1), (thinner, c), (thinner, 1)):
            found = sorted(slot_counts(prices, *fitting, best.io_threads), key=itemgetter(0))
            yield from found[:MAX_SLOT_COUNTS]
            if found:
                break


def _shapes(setting: Setting, candidate: Candidate) -> Iterator[tuple[TileShape, int]]:
    """Yield (tile shape, number of accumulators) of neighbours: other depths, one tile more or fewer."""
    problem, tile, c = setting.problem, candidate.tile, candidate.slots.c
    depth = max(1, problem.depth)
    for k in (ceil(tile.k * factor) for factor in DEPTH_FACTORS):
        if k >= 16 and min(k, depth) <= max_depth(problem) and min(k, depth) != min(tile.k, depth):
            yield replace(tile, k=min(k, depth)), c
    (*_, unit_m), (*_, unit_n) = alignments(setting)
    down, across = ceil_div(problem.m, tile.m), ceil_div(problem.n, tile.n)
    counts = [(down - 1, across)] * (down > 1) + [(down, across - 1)] * (across > 1)
    counts += [(down + 1, across), (down, across + 1), (2 * down, across), (down, 2 * across)]
    others: list[tuple[TileShape, int]] = []
    for rows, cols in counts:
        m, n = round_up(ceil_div(problem.m, rows), unit_m), round_up(ceil_div(problem.n, cols), unit_n)
        shape = TileShape(min(m, problem.m), min(n, problem.n), tile.k)
        if shape != tile:
            yield shape, c if rows * cols > 1 else 1
            others += [(shape, 3 - c)] * (rows * cols > 1)
    yield tile, 3 - c
    yield from others
