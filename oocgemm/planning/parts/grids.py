"""The ways to divide a product into parts: numbers of parts along m, n and k, and tiles that divide evenly.

A plan for one worker has large tiles, often fewer than there are workers. So tiles of other extents are tried
too, with which all parts have as many tiles, of nearly equal sizes. The numbers of slots are those of the
plan. They fit the budgets if the tiles are smaller; otherwise it is checked that they do.

p_n p_k workers read the same rows of A, and p_m p_k workers the same columns of B. With P = p_m p_n p_k
workers, the storage delivers at least p_n m k + p_m k n elements, at best 2 k sqrt(m n P / p_k) of them.
Slices of k add 2 p_k m n elements, the partial products. The sum is least for
p_k = (k sqrt(P) / (2 sqrt(m n)))^(2/3). This is the "2.5D" trade of memory for communication: Solomonik and
Demmel, *Communication-optimal parallel 2.5D matrix multiplication* (2011); Kwasniewski et al., *Red-blue
pebbling revisited* (2019), on which COSMA is based. Here, all divisions are enumerated and priced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from oocgemm.planning.parts.price import allows_k_split
from oocgemm.planning.parts.storage import Storage
from oocgemm.planning.plan import Plan
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.tiling import ceil_div, round_up

# A tile extent is a multiple of the operands' chunks, if this increases it by at most this factor.
MAX_ROUNDING = 1.05
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class DividedPlan:
    """A plan whose tiles are divided among `grid` = (p_m, p_n, p_k) parts."""

    plan: Plan
    grid: Grid


def grids(count: int) -> Iterator[Grid]:
    """Yield all (p_m, p_n, p_k) whose product is `count`.

    >>> list(grids(3))
    [(1, 1, 3), (1, 3, 1), (3, 1, 1)]
    """
    for down in _divisors(count):
        for across in _divisors(count // down):
            yield down, across, count // down // across


def divisions(plan: Plan, grid: Grid, *, keep_tile: bool = False) -> Iterator[DividedPlan]:
    """Yield the ways to divide a plan among a grid of parts: with its tiles, and with tiles of other extents.

    With `keep_tile`, only with its tiles. There are none if the product cannot be divided that often.
    """
    if grid[2] > plan.grid.steps or (grid[2] > 1 and not allows_k_split(plan)):
        return
    tile, (m, n) = plan.tile, (plan.problem.m, plan.problem.n)
    if 0 in (m, n):
        return
    units_m, units_n = alignments(plan.setting)
    extents_m = _extents(m, tile.m, grid[0], () if keep_tile else units_m)
    extents_n = _extents(n, tile.n, grid[1], () if keep_tile else units_n)
    for tile_m, tile_n in product(extents_m, extents_n):
        if (tile_m, tile_n) == (tile.m, tile.n):
            yield DividedPlan(plan, grid)
            continue
        lines = ceil_div(m, tile_m) // grid[0], ceil_div(n, tile_n) // grid[1]
        traversal = _within(plan.candidate.traversal, *lines)
        other = replace(tile, m=tile_m, n=tile_n)
        found = replace(plan, candidate=replace(plan.candidate, tile=other, traversal=traversal))
        if (tile_m <= tile.m and tile_n <= tile.n) or _fits(found, grid[2] > 1):
            yield DividedPlan(found, grid)


def least_seconds(division: DividedPlan, storage: Storage, workers: int) -> float:
    """Return a lower bound on the seconds in which `workers` workers compute the parts of a division.

    It counts the multiplications, and what the storage delivers if each part reads its panels once.
    """
    plan, (p_m, p_n, p_k) = division.plan, division.grid
    problem, layouts, machine, tile = plan.problem, plan.layouts, plan.machine, plan.tile
    if not problem.flops:
        return 0.0
    sizes, elements = problem.itemsizes, problem.m * problem.n
    extents = min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.k)
    compute = machine.multiply_seconds(problem.rate, problem.flops, *extents) / workers
    read = 0 if layouts.a.in_memory else p_n * problem.m * problem.k * sizes["A"]
    read += 0 if layouts.b.in_memory else p_m * problem.k * problem.n * sizes["B"]
    old = elements * sizes["C"] if problem.reads_c and not layouts.c.in_memory else 0
    write = 0 if layouts.c.in_memory else elements * sizes["C"]
    reads, writes = (
        min(storage.read, workers * machine.read),
        min(storage.write, workers * machine.write),
    )
    if p_k == 1:
        return max(compute, (read + old) / reads, write / writes)
    partial = p_k * elements * sizes["acc"]
    return max(compute, read / reads, partial / writes) + (partial + old) / reads + write / writes


def _extents(extent: int, tile: int, pieces: int, units: tuple[int, ...]) -> list[int]:
    """List tile extents that divide an axis of C among `pieces` parts: `tile`, and those that divide evenly.

    With the latter, each part has one, two or three tiles along the axis, or as many as are needed for tiles
    no larger than `tile`. The extents are multiples of one of `units`: of the last one, which suits the
    chunks of the operands, unless that makes the tile much larger.
    """
    found = [tile] if ceil_div(extent, tile) >= pieces else []
    most = ceil_div(ceil_div(extent, tile), pieces)
    for lines in sorted({min(count, most) for count in (1, 2, 3, most)}) if units else ():
        even = ceil_div(extent, pieces * lines)
        suits = round_up(even, units[-1])
        rounded = suits if suits <= MAX_ROUNDING * even else round_up(even, min(units))
        if ceil_div(extent, rounded) >= pieces:
            found.append(min(rounded, extent))
    return list(dict.fromkeys(found))


def _fits(plan: Plan, splits_k: bool) -> bool:
    """Tell whether a plan fits its budgets."""
    used = plan.footprint
    fits = used.device_total <= plan.budgets.device and used.host_total <= plan.budgets.host
    return fits and (not splits_k or allows_k_split(plan))


def _within(traversal: Traversal, down: int, across: int) -> Traversal:
    """Adapt a traversal to parts of `down` x `across` tiles, so that no part has half a band.

    If each part has only one band, all bands are visited in the same direction: parts end with a small tile
    at the edge of C, of which less remains to be written at the end.
    """
    lines, crossing = (down, across) if traversal.axis == 0 else (across, down)
    if crossing <= 1:
        return replace(traversal, band=1, turns=False)
    band = gcd(traversal.band, max(1, lines))
    return replace(traversal, band=band, turns=traversal.turns and band < lines)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)
