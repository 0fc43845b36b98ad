"""Parts of a plan, each computed by one process: which tiles each has, and how many workers are worth using.

C is divided into p_m x p_n rectangles of tiles, one per worker, such that they read as few bytes as possible.
A plan for one worker has large tiles, often fewer than there are workers. Then tiles are made smaller, so
that all parts have as many, or k is divided into p_k slices, whose partial products are added. The clock
decides: it runs the largest part with an equal share of the storage's rates.

p_n p_k workers read the same rows of A, and p_m p_k workers the same columns of B. With P = p_m p_n p_k
workers, the storage delivers at least p_n m k + p_m k n elements, at best 2 k sqrt(m n P / p_k) of them.
Slices of k add 2 p_k m n elements, the partial products. So they pay off if C is small and k is huge. This is
the "2.5D" trade of memory for communication: Solomonik and Demmel, *Communication-optimal parallel 2.5D
matrix multiplication* (2011); Kwasniewski et al., *Red-blue pebbling revisited* (2019), on which COSMA is
based.

Where parts have whole rows of tiles (`Plan.has_whole_rows`), each worker gets a band.

All parts have the candidate of the shared plan: its tile shape, its depth of panels, its direction along k.
So each element of C is summed in the same order, whichever process computes it, and has the same bits. The
partial products of slices of k are one array, stacked along the rows: slice q has the rows from
q * `Slicing.rows` on. C is their sum in ascending order of k.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from math import gcd, inf
from typing import Any

from oocgemm.errors import InputError
from oocgemm.planning.cost.clock import Prediction, predict
from oocgemm.planning.cost.footprint import footprint
from oocgemm.planning.cost.machine import MachineModel, default_model, scaled
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Chunked, Writing
from oocgemm.planning.plan import Plan
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.setting import Setting
from oocgemm.planning.sinks import Stored
from oocgemm.planning.tiling import Range, TileGrid, TileSet, ceil_div, length, round_up
from oocgemm.planning.units import counted, format_time
from oocgemm.values import dataclass


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


# A tile extent is a multiple of the operands' chunks, if this increases it by at most this factor.
MAX_ROUNDING = 1.05
# Predicted times with at most this relative difference count as equal, since the cost model is no more exact.
CLOSE = 0.01
# If writes take longest at a rate that nobody has measured, all workers are used, unless that is predicted to
# take longer by this factor. Beside two GPUs, writes to a tmpfs were nearly four times as fast as assumed.
UNSURE = 1.1
# Seconds that a k-split must save: it begins a second phase when all parts are done.
MIN_GAIN = 1.0
# A worker gets FINER parts if each of them takes at least this many seconds, since starting a part takes 1 to
# 2 s. Then a worker that is slower than predicted delays the others less, and less is lost if it dies.
MIN_PART_SECONDS, FINER = 60.0, 4
# If each worker has whole rows of tiles, no part should be larger than an equal share by more than the
# fraction UNEVEN. So there are up to ROWS_PER_WORKER rows of tiles per worker.
UNEVEN, ROWS_PER_WORKER = 0.15, 4
# Number of pairs (p_m, p_n) that are tried with the same tiles and slices: those with which workers read
# least.
PAIRS = 2
# Maximum number of workers. Numbers above EVERY are not tried if they have a prime factor above MAX_FACTOR,
# because C cannot be divided into nearly square parts then.
MAX_WORKERS, EVERY, MAX_FACTOR = 1024, 16, 7

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """Total rates of the storage, in bytes per second, for all workers together.

    Workers that read at the same time get equal shares of `read`, and those that write get equal shares of
    `write`. No worker is served faster than its machine model says.
    """

    read: float
    write: float

    @classmethod
    def of(cls, machine: MachineModel, read: float | None = None) -> "Storage":
        """Return the storage that delivers `read` bytes per second in total, by default to one worker.

        Only total rates of reads are known to most users. A storage that can serve the reads of x workers at
        their full rate is assumed to serve the writes of x workers too.
        """
        workers = 1.0 if read is None else read / machine.read
        return cls(workers * machine.read, workers * machine.write)

    def shared(self, machine: MachineModel, workers: int, part: float = 1.0) -> MachineModel:
        """Return the model of a machine on which one of `workers` equal workers runs.

        If the storage is too slow for all, the model's reads get a fraction `part` of the worker's share. The
        uncompressed bytes of compressed chunks count as read, since their compressed size is not known.
        """
        share = self.read / workers
        factors = {
            "read": 1.0 if machine.read <= share else part * share / machine.read,
            "write": min(1.0, self.write / workers / machine.write),
        }
        decode = min(machine.decode, share)
        if decode == machine.decode and set(factors.values()) == {1.0}:
            return machine
        return replace(scaled(machine, factors), decode=decode)

    def limits(self, machine: MachineModel, workers: int, lane: str) -> bool:
        """Tell whether sharing the storage slows `lane` down ("read", "decode" or "write")."""
        if lane not in ("read", "decode", "write", "encode"):
            return False
        total, own = (self.write, machine.write) if lane in ("write", "encode") else (self.read, machine.read)
        if lane == "decode":
            own = machine.decode
        return total < workers * own


def allows_k_split(plan: Plan) -> bool:
    """Tell whether a product may be computed in slices of k, whose partial products are stored and added.

    Partial products have the dtype of the accumulator, so that nothing is rounded that a run without slices
    would not round. The sums of int8 products stay exact, since they are below the limit of the whole sum.

    A product cannot be split if it has fewer than two steps, if C is in memory, or if it is verified: the
    checksums are those of tiles of C, not of partial products. Nor can it be split if strips of partial
    products, which may be wider than strips of C, do not fit the host budget.
    """
    if plan.problem.checked or plan.layouts.c.in_memory or plan.grid.steps < 2:
        return False
    return footprint(slice_setting(plan), plan.candidate).host_total <= plan.budgets.host


def slice_setting(plan: Plan) -> Setting:
    """Return the setting in which slices of k are computed: op(A) op(B) in the accumulator's dtype.

    Partial products are new arrays of raw chunks. alpha and beta are applied when they are added.
    """
    problem = replace(plan.problem, sink=Stored(plan.problem.acc_dtype))
    partial = Chunked(itemsize=problem.itemsizes["C"], writing=Writing(free=True))
    return replace(plan.setting, problem=problem, layouts=replace(plan.layouts, c=partial))


@dataclass(frozen=True, slots=True)
class DividedPlan:
    """A plan whose tiles are divided among `grid` = (p_m, p_n, p_k) parts."""

    plan: Plan
    grid: Grid

    @property
    def slices(self) -> tuple[Range, ...]:
        """Range of steps of each slice of k."""
        return step_ranges(self.plan.grid, self.grid[2])

    @property
    def parts(self) -> list[Part]:
        """The parts, the longest first."""
        grid, slices = self.plan.grid, self.slices

        def volume(part: Part) -> int:
            return part.tiles(grid).coverage.elements * max(1, length(k_range(grid, slices[part.k_slice])))

        return sorted(divide(grid, *self.grid), key=lambda part: (-volume(part), part.number))


def divisions(plan: Plan, parts: int, *, keep_tile: bool = False, whole_k: bool = False) -> list[DividedPlan]:
    """Return the ways to divide a plan into a number of parts; an empty list if there is none.

    A way has the tiles of the plan, or smaller tiles unless `keep_tile`, or slices of k unless `whole_k`.
    """
    if 0 in (plan.problem.m, plan.problem.n):
        return []
    down, across = plan.grid.shape
    found = [
        DividedPlan(plan, (*pair, 1)) for pair in _pairs(plan, parts) if pair[0] <= down and pair[1] <= across
    ][:PAIRS]
    if not keep_tile:
        finer = (finer_tiles(plan, pair) for pair in _pairs(plan, parts))
        found += [one for one in finer if one is not None][:PAIRS]
    rectangles = max(x for x in range(1, down * across + 1) if parts % x == 0) if parts > 1 else 1
    slices = parts // rectangles
    if 1 < slices <= plan.grid.steps and not whole_k and allows_k_split(plan):
        pairs = _pairs(plan, rectangles)
        found += [
            DividedPlan(plan, (*pair, slices)) for pair in pairs if pair[0] <= down and pair[1] <= across
        ][:PAIRS]
    return found


def _pairs(plan: Plan, parts: int) -> list[tuple[int, int]]:
    """Return all (p_m, p_n) whose product is `parts`, those with which workers read few bytes first."""
    problem, layouts = plan.problem, plan.layouts
    a = 0 if layouts.a.in_memory else problem.m * problem.itemsizes["A"]
    b = 0 if layouts.b.in_memory else problem.n * problem.itemsizes["B"]
    pairs = [(down, parts // down) for down in range(1, parts + 1) if parts % down == 0]
    return sorted(pairs, key=lambda pair: (pair[1] * a + pair[0] * b, abs(pair[0] - pair[1])))


def finer_tiles(plan: Plan, pair: tuple[int, int]) -> DividedPlan | None:
    """Return the plan with tiles so small that all parts have equally many; None if that is impossible."""
    tile = plan.tile
    extents = [
        _extent(extent, nominal, pieces, units)
        for extent, nominal, pieces, units in zip(
            (plan.problem.m, plan.problem.n), (tile.m, tile.n), pair, alignments(plan.setting), strict=True
        )
    ]
    lines = [
        ceil_div(extent, x) // pieces
        for extent, x, pieces in zip((plan.problem.m, plan.problem.n), extents, pair, strict=True)
    ]
    if 0 in lines:
        return None
    other = replace(
        plan.candidate,
        tile=replace(tile, m=extents[0], n=extents[1]),
        traversal=_within(plan.candidate.traversal, *lines),
    )
    return DividedPlan(replace(plan, candidate=other), (*pair, 1))


def _extent(extent: int, tile: int, pieces: int, units: tuple[int, ...]) -> int:
    """Return a tile extent of at most `tile` that divides an axis of C among `pieces` parts evenly.

    The extent is a multiple of the last one of `units`, which suits the chunks of the operands, unless that
    makes the tile much larger.
    """
    even = ceil_div(extent, pieces * ceil_div(ceil_div(extent, pieces), tile))
    suits = round_up(even, units[-1])
    rounded = suits if suits <= MAX_ROUNDING * even else round_up(even, min(units))
    return min(rounded, tile, extent)


def _within(traversal: Traversal, down: int, across: int) -> Traversal:
    """Return a traversal for parts of `down` x `across` tiles, so that no part has half a band.

    If each part has only one band, all bands are visited in the same direction: parts end with a small tile
    at the edge of C, of which less remains to be written at the end.
    """
    lines, crossing = (down, across) if traversal.axis == 0 else (across, down)
    if crossing <= 1:
        return replace(traversal, band=1, turns=False)
    band = gcd(traversal.band, max(1, lines))
    return replace(traversal, band=band, turns=traversal.turns and band < lines)


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

    All workers are used if writes are predicted to take longest, and nobody has measured their rate: writes
    may be faster.

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
    """Return the partition for each number of workers in `counts`. For other arguments, see `partition`."""
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

    The clock runs the whole plan with a worker's share of the storage. A part takes its share of that time.
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
    """Return the plan with tiles of so few rows that all workers get about equally many elements of C."""
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
    """Return the elements of the largest part as a fraction of C's elements."""
    sizes = [part.tiles(plan.grid).coverage.elements for part in bands(plan.grid, workers)]
    return max(sizes) / sum(sizes) if sizes else 1.0


def _default_write(machine: MachineModel) -> float:
    """Return the rate of writes that a machine is assumed to have."""
    return default_model("host" if machine.shares_cores else "cuda", machine.cores).write


@dataclass(frozen=True, slots=True)
class _Priced:
    """A division, its predicted seconds, those to add slices of k, and the prediction of its largest part."""

    division: DividedPlan
    seconds: float
    sum: float
    largest: Prediction | None


class _Choice:
    """The divisions of one plan that have been priced, by number of workers.

    `known` tells that somebody has measured or given the rate of writes.
    """

    def __init__(self, plan: Plan, storage: Storage, keep_tile: bool, whole_k: bool, known: bool) -> None:
        self._plan, self._storage, self._known = plan, storage, known
        self._how = {"keep_tile": keep_tile, "whole_k": whole_k}
        self._best = cache(self._find)

    def partition(self, available: int) -> Partition:
        """Choose the smallest number of workers that is as fast as any, within `CLOSE`.

        Choose all available workers if only the assumed rate of writes speaks against that.
        """
        one = self._best(1)
        assert one is not None
        numbers = [*(x for x in range(1, available) if x <= EVERY or _is_smooth(x)), available]
        found = {x: priced for x in numbers if (priced := self._best(x)) is not None}
        limit = (1 + CLOSE) * min(priced.seconds for priced in found.values())
        used = min(x for x, priced in found.items() if priced.seconds <= limit)
        unsure = not self._known and found[used].largest is not None and self._lane(found[used]) in _WRITES
        if unsure and available in found and found[available].seconds <= UNSURE * limit / (1 + CLOSE):
            used = available
        chosen = found[used]
        division = chosen.division
        if (chosen.seconds - chosen.sum) / FINER >= MIN_PART_SECONDS and used > 1 and division.grid[2] == 1:
            division = self._divided_again(chosen, used)
        return Partition(
            division.plan,
            division.grid,
            tuple(division.parts),
            used,
            available,
            chosen.seconds,
            one.seconds,
            self._bottleneck(chosen, used),
            self._why(used, available, chosen.seconds),
        )

    def _divided_again(self, chosen: _Priced, workers: int) -> DividedPlan:
        """Return a division into FINER parts per worker if it is as fast; otherwise, the chosen division."""
        tried = divisions(
            chosen.division.plan, FINER * workers, keep_tile=self._how["keep_tile"], whole_k=True
        )
        priced = (self._priced(one, workers) for one in tried)
        fast = (one.division for one in priced if one.seconds <= (1 + CLOSE) * chosen.seconds)
        return next(fast, chosen.division)

    def _find(self, workers: int) -> _Priced | None:
        """Return the best division for a number of workers.

        With the tiles of the plan, the result has the same bits as that of one worker. So these tiles are
        kept if they are as fast within `CLOSE`, and k is split only if that saves `MIN_GAIN` seconds.
        """
        if workers == 1:
            return self._priced(DividedPlan(self._plan, (1, 1, 1)), 1)
        priced = [self._priced(one, workers) for one in divisions(self._plan, workers, **self._how)]
        whole = [one for one in priced if one.division.grid[2] == 1]
        least = min((one.seconds for one in whole), default=inf)
        best = next((one for one in whole if one.seconds <= (1 + CLOSE) * least), None)
        sliced = next((one for one in priced if one.division.grid[2] > 1), None)
        return sliced if sliced and sliced.seconds < least - MIN_GAIN else best or sliced

    def _priced(self, division: DividedPlan, workers: int) -> _Priced:
        """Predict all parts: the clock runs the largest one, while equal workers share the storage."""
        parts, plan = division.parts, division.plan
        if not parts:
            return _Priced(division, 0.0, 0.0, None)
        grid, largest = plan.grid, parts[0]
        (top, bottom), (left, right) = largest.rows, largest.cols
        setting = plan.setting if division.grid[2] == 1 else slice_setting(plan)
        k = length(k_range(grid, division.slices[largest.k_slice])) if division.grid[2] > 1 else grid.k
        own = replace(
            setting.problem,
            m=grid.rows(bottom - 1)[1] - grid.rows(top)[0],
            n=grid.cols(right - 1)[1] - grid.cols(left)[0],
            k=k,
        )
        found = self._run(replace(setting, problem=own), plan, workers)
        adding = self._sum_seconds(division)
        return _Priced(division, ceil_div(len(parts), workers) * found.total + adding, adding, found)

    def _run(self, own: Setting, plan: Plan, workers: int) -> Prediction:
        machine = own.machine
        shared = self._storage.shared(machine, workers)
        tried = [shared]
        if machine.shares_cores and shared is not machine:
            # A thread that waits for the storage needs no core meanwhile, but then it copies the bytes read.
            waiting = replace(shared, shares_cores=False, arena_seconds_per_byte=0.0)
            tried = [replace(machine, write=shared.write), waiting]
        found = []
        for model in tried:
            prices = Prices(replace(own, machine=model))
            # A Write that waits for the storage longer keeps the CPU cores busy no longer.
            prices.write_cpu_share *= model.write / machine.write
            found.append(predict(prices.setting, plan.candidate, prices))
        return max(found, key=lambda one: one.total)

    def _sum_seconds(self, division: DividedPlan) -> float:
        """Predict the seconds to add the partial products of slices of k, and to write C.

        One process adds them chunk by chunk: it reads the chunk of every slice (and the old C, if beta is not
        0), then it writes the chunk of C.
        """
        slices = division.grid[2]
        if slices == 1:
            return 0.0
        problem, machine = self._plan.problem, self._storage.shared(self._plan.machine, 1)
        elements, sizes = problem.m * problem.n, problem.itemsizes
        read = elements * (slices * problem.acc_itemsize + (sizes["C"] if problem.reads_c else 0))
        return read / machine.read + elements * sizes["C"] / machine.write

    def _bottleneck(self, priced: _Priced, workers: int) -> str:
        if priced.sum > priced.seconds / 2:
            return "sum"
        if priced.largest is None:
            return "none"
        lane = self._lane(priced)
        return "storage" if self._storage.limits(self._plan.machine, workers, lane) else lane

    def _lane(self, priced: _Priced) -> str:
        """Return the lane that is busy longest while the largest part is computed."""
        assert priced.largest is not None
        return priced.largest.bottleneck

    def _why(self, used: int, available: int, seconds: float) -> str:
        """Return as text why not all available workers are used; "" if all are used."""
        if used == available:
            return ""
        all_used = self._best(available)
        if all_used is None:
            return f"the product cannot be divided into {available} parts"
        if all_used.seconds <= (1 + CLOSE) * seconds:
            return "more are no faster"
        return f"each more costs {format_time((all_used.seconds - seconds) / (available - used))}"


# Lanes in which C is written.
_WRITES = "write", "encode"


def _is_smooth(number: int) -> bool:
    """Tell whether a number has no prime factor above `MAX_FACTOR`."""
    for factor in range(2, MAX_FACTOR + 1):
        while number % factor == 0:
            number //= factor
    return number == 1
