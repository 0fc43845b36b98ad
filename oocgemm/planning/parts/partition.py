"""Choose how many workers are worth using, and the parts of the plan that they compute.

C is divided into p_m x p_n rectangles of tiles, and k into p_k slices. A plan for one worker has large tiles,
often fewer than there are workers. So tiles of other extents are tried too, with which all parts have as many
tiles, of nearly equal sizes. The numbers of slots are those of the plan. They fit the budgets if tiles are
smaller; otherwise it is checked that they do.

p_n p_k workers read the same rows of A, and p_m p_k workers the same columns of B. With P = p_m p_n p_k
workers, the storage delivers at least p_n m k + p_m k n elements, at best 2 k sqrt(m n P / p_k) of them.
Slices of k add 2 p_k m n elements, the partial products. The sum is least for
p_k = (k sqrt(P) / (2 sqrt(m n)))^(2/3). This is the "2.5D" trade of memory for communication: Solomonik and
Demmel, *Communication-optimal parallel 2.5D matrix multiplication* (2011); Kwasniewski et al., *Red-blue
pebbling revisited* (2019), on which COSMA is based. Here, all divisions are enumerated and priced.

Where parts have whole rows of tiles (`Plan.has_whole_rows`), no division is priced: each worker gets a band.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, inf
from typing import Any

from oocgemm.errors import InputError
from oocgemm.planning.cost.machine import MachineModel, default_model
from oocgemm.planning.parts.part import Part, bands, divide, step_ranges
from oocgemm.planning.parts.part_price import (
    PartPrices,
    Storage,
    allows_k_split,
    longest_first,
    parts_seconds,
    rounds_seconds,
    sum_seconds,
)
from oocgemm.planning.plan import Plan
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.tiling import Range, ceil_div, round_up
from oocgemm.planning.units import counted, format_time

# A tile extent is a multiple of the operands' chunks, if this increases it by at most this factor.
MAX_ROUNDING = 1.05
# Predicted times with at most this relative difference count as equal, since the cost model is no more exact.
CLOSE = 0.01
# If writes take longest at a rate that nobody has measured, all workers are used, unless that is predicted to
# take longer by this factor. Beside two GPUs, writes to a tmpfs were nearly four times as fast as assumed.
UNSURE = 1.1
# Seconds that a k-split must save: it begins a second phase when all parts are done.
MIN_GAIN = 1.0
# A worker gets several parts if each of them takes at least this many seconds, since to start one takes 1 to
# 2 s. Then a worker that is slower than predicted delays the others less, and less is lost if it dies.
MIN_PART_SECONDS = 60.0
# How one part per worker is divided into three or four, along m and along n.
FINER = ((3, 1), (1, 3), (2, 2), (4, 1), (1, 4))
# Where each worker has whole rows of tiles, no part should be larger than an equal share by more than this
# factor. So there are up to this many rows per worker.
UNEVEN, ROWS_PER_WORKER = 0.15, 4
# The choice is made among at most this many workers. Enumerating more grids would take many seconds.
MAX_WORKERS = 1024

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


@dataclass(frozen=True)
class Partition:
    """The parts of a product, and the number of workers that compute them.

    - `plan`: the plan that all parts share. Its tiles may be smaller than those of the plan for one worker.
    - `grid`: numbers of parts along m, n and k (p_m, p_n, p_k).
    - `parts`: the longest first, the order in which workers should get them.
    - `workers`, `available`: number of workers that are used, and of those that there are.
    - `seconds`: predicted for all parts and, with p_k > 1, for the sum of the partial products.
      `one_worker`: predicted if one worker computes the product.
    - `bottleneck`: "storage", "sum" (adding partial products), or the lane that is busy longest.
    - `why`: why not all workers are used; empty if they are.
    """

    plan: Plan
    grid: Grid
    parts: tuple[Part, ...]
    workers: int
    available: int
    seconds: float
    one_worker: float
    bottleneck: str
    why: str

    @property
    def reason(self) -> str:
        """Why this number of workers is used, in one line."""
        used = f"{self.workers} of {self.available} workers used: {self.bottleneck}-bound"
        return f"{used}, {self.why}" if self.why else used

    @property
    def speed_up(self) -> float:
        """Ratio of the predicted time of one worker to that of all workers."""
        return self.one_worker / self.seconds if self.seconds else 1.0

    @property
    def slices(self) -> tuple[Range, ...]:
        """Range of steps of each slice of k."""
        return step_ranges(self.plan.grid, self.grid[2])

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.grid))
        return f"{self.reason}; {grid} parts, {format_time(self.seconds)} predicted"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, without the plan."""
        tile = self.plan.tile
        return {
            "available": self.available,
            "workers": self.workers,
            "grid": list(self.grid),
            "parts": len(self.parts),
            "tile": {"m": tile.m, "n": tile.n, "k": tile.k},
            "predicted_seconds": self.seconds,
            "speed_up": self.speed_up,
            "bottleneck": self.bottleneck,
            "reason": self.reason,
        }


def partition(
    plan: Plan,
    workers: int,
    storage_read: float | None = None,
    *,
    keep_tile: bool = False,
    whole_k: bool = False,
) -> Partition:
    """Divide a plan among at most `workers` equal workers. Use fewer if that is predicted to be no slower.

    All are used if writes are predicted to take longest, and nobody has measured them: they may be faster.

    Args:
        plan: the plan for one worker. Its machine model and its budgets are those of each worker.
        workers: number of workers, from 1 to `MAX_WORKERS`.
        storage_read: bytes per second that the storage delivers to all workers together; by default, what one
            worker reads.
        keep_tile: divide the plan as it is. Otherwise, its tiles may be made smaller, so that there are
            enough for all workers.
        whole_k: do not divide k.

    Raises:
        InputError: the number of workers or the rate is out of range.
    """
    return scaling(plan, [workers], storage_read, keep_tile=keep_tile, whole_k=whole_k)[0]


def scaling(
    plan: Plan,
    counts: Sequence[int],
    storage_read: float | None = None,
    *,
    keep_tile: bool = False,
    whole_k: bool = False,
) -> tuple[Partition, ...]:
    """Return the partition for each number of workers in `counts`. The other arguments are as above."""
    for count in counts:
        if not 1 <= count <= MAX_WORKERS:
            raise InputError(f"the number of workers must be from 1 to {MAX_WORKERS}, not {count}")
    if storage_read is not None and not 0 < storage_read < inf:
        raise InputError(f"the rate of the storage must be positive, not {storage_read:g} bytes per second")
    storage = Storage.of(plan.machine, storage_read)
    if plan.has_whole_rows:
        return tuple(_in_bands(plan, storage, count, keep_tile=keep_tile) for count in counts)
    known = storage_read is not None or plan.machine.write != _default_write(plan.machine)
    choice = _Choice(plan, storage, keep_tile, whole_k, known)
    return tuple(choice.partition(count) for count in counts)


def _in_bands(plan: Plan, storage: Storage, available: int, *, keep_tile: bool) -> Partition:
    """Divide a plan among all workers that get a row of tiles.

    The clock runs the whole plan with a worker's share of the storage. Each part takes its share of that.
    """
    alone = replace(plan, machine=storage.shared(plan.machine, 1)).prediction
    if not keep_tile:
        plan = _with_rows(plan, available)
    found = bands(plan.grid, available)
    workers = max(1, len(found))
    together = replace(plan, machine=storage.shared(plan.machine, workers)).prediction
    parts = sorted(found, key=lambda part: -part.tiles(plan.grid).coverage.elements)
    limited = storage.limits(plan.machine, workers, together.bottleneck)
    return Partition(
        plan,
        (workers, 1, 1),
        tuple(parts),
        workers,
        available,
        together.total * _largest_share(plan, workers),
        alone.total,
        "storage" if limited else together.bottleneck,
        "" if workers == available else f"C has {counted(plan.grid.shape[0], 'row')} of tiles",
    )


def _with_rows(plan: Plan, workers: int) -> Plan:
    """Return the plan with tiles so low that each worker gets about as many elements of C as the others."""
    m, square, unit = plan.problem.m, plan.grid.cover.square, alignments(plan.setting)[0][0]
    tried = [plan]
    for rows in range(plan.grid.shape[0] + 1, ROWS_PER_WORKER * workers + 1):
        extent = min(m, round_up(ceil_div(m, rows), unit))
        tile = replace(plan.tile, m=extent, n=extent if square else plan.tile.n)
        if tile != tried[-1].tile:
            tried.append(replace(plan, candidate=replace(plan.candidate, tile=tile)))
    even = (one for one in tried if _largest_share(one, workers) * workers <= 1 + UNEVEN)
    return next(even, None) or min(tried, key=lambda one: _largest_share(one, workers))


def _largest_share(plan: Plan, workers: int) -> float:
    """Return the share of C's elements that the largest part has."""
    sizes = [part.tiles(plan.grid).coverage.elements for part in bands(plan.grid, workers)]
    return max(sizes) / sum(sizes) if sizes else 1.0


def _default_write(machine: MachineModel) -> float:
    """Return the rate of writes that a machine is assumed to have."""
    return default_model("host" if machine.shares_cores else "cuda", machine.cores).write


@dataclass(frozen=True)
class _Priced:
    """A division with its parts and its predicted seconds, of which `sum` are for adding partial products."""

    division: DividedPlan
    prices: PartPrices
    parts: tuple[Part, ...]
    seconds: float
    sum: float


class _Choice:
    """The divisions of one plan that have been priced, by number of workers.

    `known` tells that somebody has measured or given the rate of writes.
    """

    def __init__(self, plan: Plan, storage: Storage, keep_tile: bool, whole_k: bool, known: bool) -> None:
        self._plan, self._storage, self._known = plan, storage, known
        self._keep_tile, self._whole_k = keep_tile, whole_k
        self._bounded: dict[int, list[tuple[float, DividedPlan]]] = {}
        self._best: dict[int, _Priced | None] = {}

    def partition(self, available: int) -> Partition:
        """Choose the smallest number of workers that is as fast as any, within `CLOSE`.

        Choose all that are available if only the assumed rate of writes is against it.
        """
        used, chosen = 1, self._one
        bounds = {workers: self._bound(workers) for workers in range(1, available + 1)}
        least = chosen.seconds
        for workers in sorted(bounds, key=lambda workers: bounds[workers]):
            if bounds[workers] >= least:
                break
            least = min(least, self._seconds(workers))
        for workers in range(1, available + 1):
            if bounds[workers] <= (1 + CLOSE) * least and self._seconds(workers) <= (1 + CLOSE) * least:
                used, chosen = workers, self._best[workers] or chosen
                break
        unsure = not self._known and self._lane(chosen, used) in ("write", "encode")
        if unsure and used < available and self._seconds(available) <= UNSURE * least:
            used, chosen = available, self._best[available] or chosen
        return Partition(
            chosen.division.plan,
            chosen.division.grid,
            chosen.parts,
            used,
            available,
            chosen.seconds,
            self._one.seconds,
            self._bottleneck(chosen, used),
            self._why(used, available, chosen.seconds),
        )

    def _divisions(self, grid: Grid) -> Iterator[DividedPlan]:
        divides_k = grid[2] > 1
        return (
            iter(())
            if divides_k and self._whole_k
            else divisions(self._plan, grid, keep_tile=self._keep_tile)
        )

    @cached_property
    def _one(self) -> _Priced:
        return self._price(DividedPlan(self._plan, (1, 1, 1)), 1)

    def _bound(self, workers: int) -> float:
        """Return a lower bound on the seconds with a number of workers; inf if the plan has too few parts."""
        if workers not in self._bounded:
            found = [
                (least_seconds(division, self._storage, workers), division)
                for grid in grids(workers)
                for division in self._divisions(grid)
            ]
            self._bounded[workers] = sorted(found, key=lambda item: item[0])
        found = self._bounded[workers]
        return found[0][0] if found else inf

    def _seconds(self, workers: int) -> float:
        """Return the predicted seconds of the best division for exactly `workers` workers, inf if none."""
        if workers not in self._best:
            self._best[workers] = self._find(workers)
        found = self._best[workers]
        return found.seconds if found else inf

    def _find(self, workers: int) -> _Priced | None:
        if workers == 1:
            return self._one
        self._bound(workers)
        found: list[tuple[float, DividedPlan]] = []
        for bound, division in self._bounded[workers]:
            if found and bound >= min(found, key=_seconds)[0]:
                break
            found.append((self._estimated(division, workers), division))
        if not found:
            return None
        coarse = self._price(self._preferred(found), workers)
        finer = self._finer(coarse, workers)
        return finer if finer and finer.seconds <= (1 + CLOSE) * coarse.seconds else coarse

    def _preferred(self, found: Sequence[tuple[float, DividedPlan]]) -> DividedPlan:
        """Choose the fastest division, but keep the tiles of the plan if they are as fast within `CLOSE`.

        With the same tiles, the result has the same bits as that of one worker. So k is split only if that
        saves `MIN_GAIN` seconds.
        """
        whole = [item for item in found if item[1].grid[2] == 1]
        if whole and min(whole, key=_seconds)[0] <= min(found, key=_seconds)[0] + MIN_GAIN:
            found = whole
        least, best = min(found, key=_seconds)
        kept = [item for item in found if item[1].plan is self._plan and item[1].grid[2] == 1]
        if kept and min(kept, key=_seconds)[0] <= (1 + CLOSE) * least:
            return min(kept, key=_seconds)[1]
        return best

    def _finer(self, coarse: _Priced, workers: int) -> _Priced | None:
        """Divide each part into three or four, the fastest way; None if they would be too short."""
        p_m, p_n, p_k = coarse.division.grid
        tried = [
            division
            for down, across in FINER
            if (coarse.seconds - coarse.sum) / (down * across) >= MIN_PART_SECONDS
            for division in self._divisions((p_m * down, p_n * across, p_k))
        ]
        if not tried:
            return None
        estimated = [(self._estimated(division, workers), division) for division in tried]
        return self._price(self._preferred(estimated), workers)

    def _estimated(self, division: DividedPlan, workers: int) -> float:
        prices, parts = self._parts(division)
        adding = sum_seconds(division.plan, prices, division.grid[2])
        return rounds_seconds(parts, prices, workers) + adding

    def _price(self, division: DividedPlan, workers: int) -> _Priced:
        prices, parts = self._parts(division)
        adding = sum_seconds(division.plan, prices, division.grid[2])
        return _Priced(division, prices, parts, parts_seconds(parts, prices, workers) + adding, adding)

    def _parts(self, division: DividedPlan) -> tuple[PartPrices, tuple[Part, ...]]:
        prices = PartPrices(division.plan, self._storage, division.grid[2])
        return prices, tuple(longest_first(divide(division.plan.grid, *division.grid), prices))

    def _bottleneck(self, priced: _Priced, workers: int) -> str:
        if priced.sum > priced.seconds / 2:
            return "sum"
        if not priced.parts:
            return "none"
        lane = self._lane(priced, workers)
        return "storage" if self._storage.limits(self._plan.machine, workers, lane) else lane

    def _lane(self, priced: _Priced, workers: int) -> str:
        """Return the lane that is busy longest while the longest part is computed; "" if there is none."""
        if not priced.parts:
            return ""
        return priced.prices.time(priced.prices.size(priced.parts[0]), workers).lane

    def _why(self, used: int, available: int, seconds: float) -> str:
        """Say what it would cost to use all available workers, per worker that is not used."""
        if used == available:
            return ""
        all_used = self._seconds(available)
        if all_used == inf:
            return f"the product cannot be divided into {available} parts"
        if all_used <= (1 + CLOSE) * seconds:
            return "more are no faster"
        return f"each more costs {format_time((all_used - seconds) / (available - used))}"


def _seconds(estimated: tuple[float, DividedPlan]) -> float:
    return estimated[0]
