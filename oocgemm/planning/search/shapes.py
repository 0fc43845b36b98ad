"""Enumerate the tile shapes worth scoring.

The larger tile.m and tile.n, the fewer bytes are loaded. Therefore tiles of C take nearly all of the device
memory, and panels are no deeper (tile.k) than the kernel and the copies need. With c accumulators, two panels
of each operand, and room for M elements: ``c tile.m tile.n + 2 tile.k (tile.m + tile.n) <= M``.

C is divided evenly: the numbers of tiles down and across are chosen first, and the extents follow from them.
For each number down, the smallest number across that fits in memory is tried, and the next larger one. Each
pair is tried in three ways: with two panels per operand in memory, with all panels of a row of tiles, and
with all panels of a column of tiles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import inf, lcm

from oocgemm.planning.check_blocks import checksum_fraction
from oocgemm.planning.cost.footprint import casts, workspace_per_element
from oocgemm.planning.cost.machine import LARGE_EXTENT, LARGE_UNIT
from oocgemm.planning.emulation import STRIP_ROWS, work_bytes
from oocgemm.planning.expansion import epilogue_bytes, factor_bytes, scale_bytes
from oocgemm.planning.search.depths import best_depths, link_rate, max_depth
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape, ceil_div, overread, round_up

# `_best_of` groups tile shapes of similar area into bins. Of the shapes with memory for only two panels per
# operand, it keeps the best one of each of the BINS bins with the largest areas.
BINS = 2
# All numbers of tiles per row or column up to this one are tried. Of larger numbers, only some are tried.
DENSE_COUNTS = 12
# `_reading_shapes` divides C into at most this many rows of tiles. With more, planning would take longer.
MAX_READING_COUNT = 48
# Numbers of strips of C to try if A, B and C are pinned: see `strip_shapes`. If memory is scarce, only many
# strips fit. On an H100, 10304 x 128 x 37272 in bfloat16 took 39 ms in tiles in 256 MiB, and 16 ms in strips.
STRIP_COUNTS = (8, 16, 32)


def alignments(setting: Setting) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """List the units of which tile extents are multiples, for m and for n.

    No chunk of C may be in two tiles. Therefore the units are multiples of the chunks of C, unless C does not
    exist yet. Some units are also multiples of the chunks of A or B, so that whole chunks are read.
    """
    problem, layouts = setting.problem, setting.layouts
    units = []
    for extent, must, wish in (
        (problem.m, layouts.c.writing.chunk[0], layouts.a.read_chunk[0]),
        (problem.n, layouts.c.writing.chunk[1], layouts.b.read_chunk[1]),
    ):
        unit = 128 if must == 1 and extent > 1024 else must
        # The chunks of a new C divide its tiles: see `Setting.c_chunks`.
        fine = unit if layouts.c.writing.free else min(unit, lcm(must, 8))
        suits = wish if must == 1 and 128 <= wish < extent else lcm(unit, wish)
        units.append(tuple(dict.fromkeys((unit, fine, suits))))
    return units[0], units[1]


def shapes(setting: Setting, *, every_depth: bool = False) -> Iterator[tuple[TileShape, int]]:
    """Yield (tile shape, number of accumulators) for the shapes whose time is worth predicting.

    For each depth (tile.k), and for one and two accumulators, shapes are divided into bins by the area of a
    tile. Each of the bins with the largest areas keeps the shape that moves the fewest bytes. The largest
    tiles are not always the fastest: smaller ones shorten the start and the end of a run, when few copies
    overlap multiplications.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    if 0 in (problem.m, problem.n):
        return
    units_m, units_n = alignments(setting)
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    a, b, acc = (problem.itemsizes[x] for x in ("A", "B", "acc"))
    work = workspace_per_element(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    chunk_a = 1 if layouts.a.partial_reads else layouts.a.read_chunk[0]
    chunk_b = 1 if layouts.b.partial_reads else layouts.b.read_chunk[1]
    whole_chunks = chunk_a > 1 or chunk_b > 1
    memory = int((setting.budgets.device - machine.device_reserve) / (1 + checksum_fraction(problem)))
    if problem.sink.per_row:
        memory -= problem.sink.count(m, 0) * problem.itemsizes["C"] + scale_bytes(problem)
        memory -= factor_bytes(problem) + epilogue_bytes(problem)
    # Tiles with fewer rows would use less than 1/16 of the device memory. They are not tried, since larger
    # tiles load fewer bytes.
    narrowest = min(m, memory // (16 * (n * acc + k * b)))
    extents_m = [x for x in _extents(m, units_m, _counts(m)) if x >= narrowest]
    depths = best_depths(setting, memory, every_depth=every_depth)
    if setting.host_caches_panels:
        yield from ((shape, 1) for shape in _reading_shapes(setting, memory, depths))
    for tile_k in depths:
        # Even the last panel along k, which may be thinner, takes a full slot.
        padded_k = round_up(k, tile_k)
        # Shapes are compared by the bytes that they move. The time to issue the steps of a tile is converted
        # to bytes at the rate of the slowest link, and added.
        per_tile = padded_k // tile_k * machine.step_latency * link_rate(setting, (m, n, tile_k))
        costs_a, costs_b = _line_costs(setting, tile_k)
        for c in (1, 2):
            bins: dict[tuple[int, int], tuple[float, int, int]] = {}
            for tile_m in extents_m:
                down = ceil_div(m, tile_m)
                column_work = _column_work(setting, tile_m)
                # `kept` says which panels have room in memory. 0: two per operand; 1: all panels of A of a
                # tile row, and two of B; 2: all panels of B of a tile column, and two of A.
                for kept in range(3):
                    panels_a = tile_m * padded_k * a if kept == 1 else 2 * tile_m * tile_k * a
                    panels_a += tile_m * tile_k * work
                    per_column = (padded_k * b if kept == 2 else 2 * tile_k * b) + tile_k * work + column_work
                    max_n = min(n, (memory - panels_a) // (c * tile_m * acc + per_column))
                    if max_n < 1:
                        continue
                    for tile_n in _long_extents(n, units_n, max_n):
                        across = ceil_div(n, tile_n)
                        free = memory - tile_n * (c * tile_m * acc + column_work)
                        free -= (tile_m + tile_n) * tile_k * work
                        free -= 2 * tile_k * ((kept != 1) * tile_m * a + (kept != 2) * tile_n * b)
                        moved = _moved(
                            (across, a_bytes, min(free, tile_m * k * a), costs_a(tile_m)),
                            (down, b_bytes, min(free, k * tile_n * b), costs_b(tile_n)),
                            free,
                        )
                        if whole_chunks:
                            moved *= max(overread(m, tile_m, chunk_a), overread(n, tile_n, chunk_b))
                        moved += down * across * per_tile
                        area = kept, (tile_m * tile_n).bit_length()
                        best = bins.get(area)
                        if best is None or (moved, tile_n) < best[:2]:
                            bins[area] = moved, tile_n, tile_m
            for tile_m, tile_n, sparse in _best_of(bins, m):
                yield TileShape(tile_m, tile_n, tile_k), c
                # Only some of the small values of tile.m were tried. Also yield the largest tile.m that fits
                # with this tile.n.
                if sparse:
                    max_m = (memory - tile_n * tile_k * (2 * b + work)) // (
                        tile_n * c * acc + tile_k * (2 * a + work)
                    )
                    yield TileShape(max(tile_m, *_long_extents(m, units_m, max_m)), tile_n, tile_k), c


def strip_shapes(setting: Setting) -> Iterator[tuple[TileShape, int]]:
    """Yield tiles that are strips of C, with all of k: one operand stays on the device, the other passes.

    A loop written by hand would do this. Each step multiplies at the full rate of the kernel, and little is
    left to multiply and to download when the last panel has arrived. Yield none unless all arrays are pinned.
    """
    problem = setting.problem
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    if setting.enqueues and k <= max_depth(problem) and 0 not in (m, n):
        for extent, units, axis in zip((m, n), alignments(setting), ("m", "n"), strict=True):
            for tile_extent in _extents(extent, units[:1], STRIP_COUNTS):
                yield replace(TileShape(m, n, k), **{axis: tile_extent}), 2


def _best_of(
    bins: Mapping[tuple[int, int], tuple[float, int, int]], m: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield (tile.m, tile.n, sparse) for the best shapes in `bins`.

    `sparse` tells that a larger tile.m may fit with the same tile.n, because not every tile.m was tried.

    `bins` maps (kept, bit length of the tile's area) to the best shape, as (bytes moved, tile.n, tile.m).
    `kept` says which panels are in memory: 0 means two per operand, 1 all panels of A of a tile row, and 2
    all panels of B of a tile column.
    """
    for kept in range(3):
        areas = sorted((x for x in bins if x[0] == kept), reverse=True)
        best_areas = areas[: BINS if kept == 0 else 1]
        # A small tile may move the fewest bytes, because it leaves memory to cache panels.
        if areas:
            best_areas.append(min(areas, key=lambda x: bins[x][0]))
        for area in dict.fromkeys(best_areas):
            _, tile_n, tile_m = bins[area]
            yield tile_m, tile_n, kept == 0 and ceil_div(m, tile_m) > DENSE_COUNTS


def _moved(a: tuple[int, int, int, float], b: tuple[int, int, int, float], free: int) -> float:
    """Estimate the bytes loaded, weighted by their cost, if `free` bytes of memory cache panels for reuse.

    `a` and `b` are tuples: how many times the operand is loaded if nothing is cached, its bytes, the cached
    bytes of one tile row of A (or tile column of B), and the cost per byte.
    """
    (across, a_bytes, row, cost_a), (down, b_bytes, column, cost_b) = a, b
    saved = max(
        cost_a * (across - 1) * min(a_bytes, free * down) + cost_b * (down - 1) * min(b_bytes, free - row),
        cost_b * (down - 1) * min(b_bytes, free * across)
        + cost_a * (across - 1) * min(a_bytes, free - column),
    )
    return cost_a * across * a_bytes + cost_b * down * b_bytes - saved


def _line_costs(setting: Setting, k: int) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Return the relative cost of parts of lines in panels of A by tile.m, and in those of B by tile.n."""
    machine, layouts = setting.machine, setting.layouts
    return (
        cache(lambda m: layouts.a.partial_line_cost(machine, (m, k))),
        cache(lambda n: layouts.b.partial_line_cost(machine, (k, n))),
    )


def _column_work(setting: Setting, tile_m: int) -> int:
    """Return the bytes of workspace per column of a tile, for emulated products or for int32 sums."""
    problem = setting.problem
    if problem.planes:
        return work_bytes(problem.planes, tile_m, 16) // 16
    return 4 * min(tile_m, STRIP_ROWS) if problem.exact and not casts(problem, setting.machine) else 0


def _reading_shapes(setting: Setting, memory: int, depths: Sequence[int]) -> Iterator[TileShape]:
    """Yield the two tile shapes per depth that read the fewest bytes if the host caches panels."""
    problem, machine = setting.problem, setting.machine
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    sizes = problem.itemsizes
    a, b, acc = sizes["A"], sizes["B"], sizes["acc"]
    work = workspace_per_element(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    host = setting.budgets.host - machine.host_reserve
    units_m, units_n = alignments(setting)
    units_m, units_n = units_m[-2:], units_n[-2:]
    extents_m = _extents(m, units_m, [count for count in _counts(m) if count <= MAX_READING_COUNT])
    for tile_k in depths:
        costs_a, costs_b = _line_costs(setting, tile_k)
        scored: dict[TileShape, tuple[float, int]] = {}
        for tile_m in extents_m:
            down = ceil_div(m, tile_m)
            left = memory - tile_m * tile_k * work
            column = tile_m * acc + tile_k * work + _column_work(setting, tile_m)
            # Upper bounds on tile.n with two panels of B on the device. For panels of A, there is memory for
            # two panels, half of all memory, or memory for all panels of a tile row.
            panels_a = (2 * tile_m * tile_k * a, memory // 2, tile_m * k * a)
            limits = {min(n, (left - x) // (column + 2 * tile_k * b)) for x in panels_a}
            # The upper bound on tile.n with two panels of A and all panels of B of a tile column on the
            # device.
            limits.add(min(n, (left - 2 * tile_m * tile_k * a) // (column + k * b)))
            for max_n in limits:
                if max_n < 1:
                    continue
                for tile_n in _long_extents(n, units_n, max_n):
                    across = ceil_div(n, tile_n)
                    free = memory - tile_m * tile_n * acc
                    host_free = host * 0.97 - 3 * tile_k * (tile_m * a + tile_n * b)
                    row = tile_m * k * a, down, a_bytes, costs_a(tile_m)
                    col = k * tile_n * b, across, b_bytes, costs_b(tile_n)
                    read = min(_read(*row, *col, free, host_free), _read(*col, *row, free, host_free))
                    scored[TileShape(tile_m, tile_n, tile_k)] = read, -tile_m * tile_n
        yield from sorted(scored, key=lambda shape: scored[shape])[:2]


def _read(
    row: int,
    down: int,
    a_bytes: int,
    cost_a: float,
    column: int,
    across: int,
    b_bytes: int,
    cost_b: float,
    device: float,
    host: float,
) -> float:
    """Estimate the bytes read, weighted by their cost, if tiles are visited row by row or in bands of rows.

    There are several ways to divide the cached panels of A and B between device and host, and several widths
    of bands. The result is the smallest of the estimates.

    Arguments:
        row, column: bytes of the panels of A of a tile row, and of B of a tile column
        down, across: numbers of tiles
        a_bytes, b_bytes: bytes of the operands
        cost_a, cost_b: cost per byte
        device, host: bytes of free memory for cached panels
    """
    best = inf
    for keeps, other in ((device, host), (host, device), (host, max(device, host - row))):
        kept, passing = min(max(0.0, keeps), row), min(max(0.0, other), b_bytes)
        first = a_bytes * across - (across - 1) * down * kept
        best = min(best, cost_a * first + cost_b * (b_bytes * down - (down - 1) * passing))
        if keeps == host and down > 1 and keeps > row:
            fewest = ceil_div(down, int(keeps // row))
            # `fewest` bands suffice to cache all panels of A of a band on the host. One band fewer is tried
            # too: B is then read once less, but some panels of A are read again.
            for bands in {fewest, max(1, fewest - 1)}:
                band = ceil_div(down, bands)
                rest = min(max(device, host - band * row), column)
                again = (down - bands) * max(0.0, b_bytes - across * max(0.0, rest))
                spilt = (across - 1) * max(0.0, a_bytes - bands * keeps)
                best = min(best, cost_a * (a_bytes + spilt) + cost_b * (bands * b_bytes + again))
    return best


def _counts(extent: int) -> Iterator[int]:
    """Yield counts of tiles along an extent: all up to `DENSE_COUNTS`, then in steps of about 4%."""
    count = 1
    while count <= extent:
        yield count
        count = count + 1 if count < DENSE_COUNTS else ceil_div(count * 9, 8)


@lru_cache(4096)  # cached, because the same arguments recur for every depth
def _long_extents(extent: int, units: tuple[int, ...], longest: int) -> list[int]:
    """List extents of at most `longest` for the tiles along an axis of `extent` elements.

    They divide the axis into as few tiles as possible, or into one more. Each is a multiple of one of
    `units`, or `extent` itself. If all of these are too long, list the longest multiple of each unit instead.
    """
    fewest = ceil_div(extent, longest)
    found = {x for x in _extents(extent, units, (fewest, fewest + 1)) if x <= longest}
    if not found:
        found = {longest // unit * unit for unit in units} - {0}
    return sorted(found)


def _extents(extent: int, units: Sequence[int], counts: Iterable[int]) -> list[int]:
    """List tile extents for given numbers of tiles: `extent` / count, rounded up to a multiple of a unit.

    All pairs of a count in `counts` and a unit in `units` are used. Large extents are rounded up to a
    multiple of `LARGE_UNIT` if the unit permits it, because a GPU multiplies such tiles faster.
    """
    found = set()
    for count in counts:
        even = ceil_div(extent, max(count, 1))
        for unit in units:
            aligned = LARGE_UNIT if even >= LARGE_EXTENT and LARGE_UNIT % unit == 0 else unit
            found.add(min(extent, round_up(max(even, 1), aligned)))
    return sorted(e for e in found if e > 0)
