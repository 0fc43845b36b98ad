"""Enumerate the tile shapes worth scoring.

Traffic falls as tile.m and tile.n grow. Therefore a tile takes nearly all of the device memory, and panels
are only as deep as the kernel and the copies need: ``c tile.m tile.n + 2 tile.k (tile.m + tile.n) <= M`` with
c accumulators.

Extents are enumerated as *counts* of tiles down and across, so that tiles have equal sizes. For each depth
and count down, the smallest count across that fits is tried, and one more. Each is tried with streamed
panels, and with all panels of a tile row (or column) in slots.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, lcm

from oocgemm.planning.check_blocks import checksum_fraction
from oocgemm.planning.cost.footprint import casts, workspace_per_element
from oocgemm.planning.cost.machine import LARGE_EXTENT, LARGE_UNIT
from oocgemm.planning.emulation import STRIP_ROWS, work_bytes
from oocgemm.planning.search.depths import best_depths, link_rate
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape, ceil_div, overread, round_up

BINS = 3  # largest areas of tiles of which the best shape is scored
DENSE_COUNTS = 32  # counts of tiles up to this are all tried, larger ones sparsely
MAX_READING_COUNT = 48  # tiles down, of shapes that save reads
LAST_SHARES = tuple(eighths / 8 for eighths in range(7, 1, -1))  # extents of a smaller last tile
MORE_TILES = 3  # tiles added along an extent, so that their C starts to drain sooner
FEW_TILES = 8  # tiles along an extent up to which shapes with a smaller end are derived
THIN_EXTENT = 16  # of a tile that leaves the memory to the panels of a row (or column)


def _alignments(setting: Setting) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """List units that tile extents along m and along n may be multiples of.

    They are the chunks of C, which tiles must not divide (or a number that suits kernels and chunks of a new
    C), and the chunks of A or B.
    """
    problem, layouts = setting.problem, setting.layouts
    units = []
    for extent, must, wish in (
        (problem.m, layouts.c.write_chunk[0], layouts.a.read_chunk[0]),
        (problem.n, layouts.c.write_chunk[1], layouts.b.read_chunk[1]),
    ):
        unit = 128 if must == 1 and extent > 1024 else must
        # The chunks of a new C divide its tiles: see `Setting.c_chunks`.
        fine = unit if layouts.c.free_chunks else min(unit, lcm(must, 8))
        suits = wish if must == 1 and 128 <= wish < extent else lcm(unit, wish)
        units.append(tuple(dict.fromkeys((unit, fine, suits))))
    return units[0], units[1]


def shapes(setting: Setting, *, every_depth: bool = False) -> Iterator[tuple[TileShape, int]]:
    """Yield tile shapes worth scoring, with the number of accumulators that fit.

    For each of the best depths (or of all) and for one and two accumulators, shapes are binned by area. From
    each of the bins of the largest areas, the shape that moves fewest bytes is kept. Larger tiles move less;
    smaller ones start and end sooner.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    if 0 in (problem.m, problem.n):
        return
    units_m, units_n = _alignments(setting)
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    a, b, acc = (problem.itemsizes[x] for x in ("A", "B", "acc"))
    work = workspace_per_element(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    chunk_a = 1 if layouts.a.partial_reads else layouts.a.read_chunk[0]
    chunk_b = 1 if layouts.b.partial_reads else layouts.b.read_chunk[1]
    whole_chunks = chunk_a > 1 or chunk_b > 1
    memory = int((setting.budgets.device - machine.device_reserve) / (1 + checksum_fraction(problem)))
    # Narrower tiles leave most of the memory empty, even if they span n and all panels of B are in slots.
    narrowest = min(m, memory // (16 * (n * acc + k * b)))
    thin_m, thin_n = (min(x, round_up(THIN_EXTENT, min(unit))) for x, unit in ((m, units_m), (n, units_n)))
    extents_m = sorted({thin_m, *(x for x in _extents(m, units_m, _counts(m)) if x >= narrowest)})
    depths = best_depths(setting, memory, every_depth=every_depth)
    if setting.host_caches_panels:
        yield from ((shape, 1) for shape in _reading_shapes(setting, memory, depths))
    for tile_k in depths:
        padded_k = round_up(k, tile_k)  # panels take whole slots
        # Bytes that the slowest link moves while the steps of one tile are issued.
        per_tile = padded_k // tile_k * machine.step_latency * link_rate(setting, (m, n, tile_k))
        for c in (1, 2):
            bins: dict[tuple[int, int], tuple[float, int, int]] = {}
            for tile_m in extents_m:
                down = ceil_div(m, tile_m)
                cost_a = machine.partial_line_cost(layouts.a, (tile_m, tile_k))
                column_work = _column_work(setting, tile_m)
                for kept in range(3):  # panels of no operand, of A's row, or of B's column are all in slots
                    panels_a = tile_m * padded_k * a if kept == 1 else 2 * tile_m * tile_k * a
                    panels_a += tile_m * tile_k * work
                    per_column = (padded_k * b if kept == 2 else 2 * tile_k * b) + tile_k * work + column_work
                    max_n = min(n, (memory - panels_a) // (c * tile_m * acc + per_column))
                    if max_n < 1:
                        continue
                    extents_n = _long_extents(n, units_n, max_n)
                    for tile_n in (*extents_n, thin_n) if kept == 1 and thin_n < max_n else extents_n:
                        across = ceil_div(n, tile_n)
                        free = memory - tile_n * (c * tile_m * acc + column_work)
                        free -= (tile_m + tile_n) * tile_k * work
                        free -= 2 * tile_k * ((kept != 1) * tile_m * a + (kept != 2) * tile_n * b)
                        cost_b = machine.partial_line_cost(layouts.b, (tile_k, tile_n))
                        moved = _moved(
                            (across, a_bytes, min(free, tile_m * k * a), cost_a),
                            (down, b_bytes, min(free, k * tile_n * b), cost_b),
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
                # Larger counts are tried sparsely: a longer tile may fit between two of them.
                if sparse:
                    max_m = (memory - tile_n * tile_k * (2 * b + work)) // (
                        tile_n * c * acc + tile_k * (2 * a + work)
                    )
                    yield TileShape(max(tile_m, *_long_extents(m, units_m, max_m)), tile_n, tile_k), c


def _best_of(
    bins: Mapping[tuple[int, int], tuple[float, int, int]], m: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield tile.m and tile.n of the best shapes, and whether a longer tile may fit.

    The keys of `bins` are (which panels are all in slots, bits of the area). Its values are (bytes moved,
    tile.n, tile.m).
    """
    for kept in range(3):
        areas = sorted((x for x in bins if x[0] == kept), reverse=True)
        best_areas = areas[: BINS if kept == 0 else 1]
        if areas:  # a small tile may leave more memory to panels
            best_areas.append(min(areas, key=lambda x: bins[x][0]))
        for area in dict.fromkeys(best_areas):
            _, tile_n, tile_m = bins[area]
            yield tile_m, tile_n, kept == 0 and ceil_div(m, tile_m) > DENSE_COUNTS


def _moved(a: tuple[int, int, int, float], b: tuple[int, int, int, float], free: int) -> float:
    """Estimate the bytes loaded, times their cost, if free memory caches panels for the next tile.

    For each operand, the arguments are: times loaded, bytes, bytes of the panels of a row (or column) that
    are cached, and cost per byte.
    """
    (across, a_bytes, row, cost_a), (down, b_bytes, column, cost_b) = a, b
    saved = max(
        cost_a * (across - 1) * min(a_bytes, free * down) + cost_b * (down - 1) * min(b_bytes, free - row),
        cost_b * (down - 1) * min(b_bytes, free * across)
        + cost_a * (across - 1) * min(a_bytes, free - column),
    )
    return cost_a * across * a_bytes + cost_b * down * b_bytes - saved


def with_smaller_last(setting: Setting, tile: TileShape) -> Iterator[TileShape]:
    """Yield larger tiles, in equal number, so that the last row or column of tiles is smaller.

    The drain of the last tile is hidden by nothing.
    """
    problem = setting.problem
    (*_, unit_m), (*_, unit_n) = _alignments(setting)
    for share in LAST_SHARES:
        for shape in (
            replace(tile, m=_longer(problem.m, tile.m, unit_m, share)),
            replace(tile, n=_longer(problem.n, tile.n, unit_n, share)),
        ):
            if shape != tile:
                yield shape


def with_more_tiles(setting: Setting, tile: TileShape) -> Iterator[TileShape]:
    """Yield smaller tiles, a few more along either extent. They drain sooner, and less drains at the end."""
    problem = setting.problem
    (*_, unit_m), (*_, unit_n) = _alignments(setting)
    counts = ceil_div(problem.m, tile.m), ceil_div(problem.n, tile.n)
    for down, across in product(*(range(x, min(x + MORE_TILES, FEW_TILES) + 1) for x in counts)):
        tile_m = round_up(ceil_div(problem.m, down), unit_m)
        tile_n = round_up(ceil_div(problem.n, across), unit_n)
        yield replace(tile, m=min(tile_m, tile.m), n=min(tile_n, tile.n))


def _longer(extent: int, nominal: int, unit: int, share: float) -> int:
    """Lengthen tiles so that about this share of the last one is left, or return `nominal`."""
    count = ceil_div(extent, nominal)
    if not 1 < count <= FEW_TILES:
        return nominal
    rest = extent - (count - 1) * nominal
    longer = round_up(ceil_div(extent - int(share * rest), count - 1), unit)
    return longer if nominal < longer and (count - 1) * longer < extent else nominal


def _column_work(setting: Setting, tile_m: int) -> int:
    """Bytes of workspace per column of a tile, for residues or for int32 sums."""
    problem = setting.problem
    if problem.planes:
        return work_bytes(problem.planes, tile_m, 16) // 16
    return 4 * min(tile_m, STRIP_ROWS) if problem.exact and not casts(problem, setting.machine) else 0


def _reading_shapes(setting: Setting, memory: int, depths: Sequence[int]) -> Iterator[TileShape]:
    """Yield the two shapes per depth with fewest bytes read if the host caches panels."""
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    m, n, k = problem.m, problem.n, max(1, problem.depth)
    sizes = problem.itemsizes
    a, b, acc = sizes["A"], sizes["B"], sizes["acc"]
    work = workspace_per_element(problem, machine)
    a_bytes, b_bytes = m * k * a, k * n * b
    host = setting.budgets.host - machine.host_reserve
    units_m, units_n = _alignments(setting)
    units_m, units_n = units_m[-2:], units_n[-2:]
    extents_m = _extents(m, units_m, [count for count in _counts(m) if count <= MAX_READING_COUNT])
    for tile_k in depths:
        scored: dict[TileShape, tuple[float, int]] = {}
        for tile_m in extents_m:
            down = ceil_div(m, tile_m)
            left = memory - tile_m * tile_k * work
            column = tile_m * acc + tile_k * work + _column_work(setting, tile_m)
            panels_a = (2 * tile_m * tile_k * a, memory // 2, tile_m * k * a)  # bytes that they may take
            limits = {min(n, (left - x) // (column + 2 * tile_k * b)) for x in panels_a}
            limits.add(
                min(n, (left - 2 * tile_m * tile_k * a) // (column + k * b))
            )  # with a column of B cached
            for max_n in limits:
                if max_n < 1:
                    continue
                for tile_n in _long_extents(n, units_n, max_n):
                    across = ceil_div(n, tile_n)
                    free = memory - tile_m * tile_n * acc
                    host_free = host * 0.97 - 3 * tile_k * (tile_m * a + tile_n * b)
                    cost_a = machine.partial_line_cost(layouts.a, (tile_m, tile_k))
                    cost_b = machine.partial_line_cost(layouts.b, (tile_k, tile_n))
                    row = tile_m * k * a, down, a_bytes, cost_a
                    col = k * tile_n * b, across, b_bytes, cost_b
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
    """Estimate the bytes read, times their cost, of a walk along rows, at best over which tier caches what.

    `row` and `column` are the bytes of panels of a tile row and a tile column. `device` and `host` are free
    bytes.
    """
    least = inf
    for keeps, other in ((device, host), (host, device), (host, max(device, host - row))):
        kept, passing = min(max(0.0, keeps), row), min(max(0.0, other), b_bytes)
        first = a_bytes * across - (across - 1) * down * kept
        least = min(least, cost_a * first + cost_b * (b_bytes * down - (down - 1) * passing))
        if keeps == host and down > 1 and keeps > row:
            fewest = ceil_div(down, int(keeps // row))
            for bands in {fewest, max(1, fewest - 1)}:  # also a band that does not fit completely
                band = ceil_div(down, bands)
                rest = min(max(device, host - band * row), column)
                again = (down - bands) * max(0.0, b_bytes - across * max(0.0, rest))
                spilt = (across - 1) * max(0.0, a_bytes - bands * keeps)
                least = min(least, cost_a * (a_bytes + spilt) + cost_b * (bands * b_bytes + again))
    return least


def _counts(extent: int) -> Iterator[int]:
    """Yield counts of tiles along an extent: every count up to `DENSE_COUNTS`, then ever sparser ones."""
    count = 1
    while count <= extent:
        yield count
        count = count + 1 if count < DENSE_COUNTS else ceil_div(count * 25, 24)


@lru_cache(4096)  # depths share counts
def _long_extents(extent: int, units: tuple[int, ...], longest: int) -> list[int]:
    """List tile extents up to `longest`, for the smallest possible count of tiles and for one more."""
    fewest = ceil_div(extent, longest)
    found = {x for x in _extents(extent, units, (fewest, fewest + 1)) if x <= longest}
    if not found:
        found = {longest // unit * unit for unit in units} - {0}
    return sorted(found)


def _extents(extent: int, units: Sequence[int], counts: Iterable[int]) -> list[int]:
    """List equal tile extents for each count, as multiples of each unit, or of `LARGE_UNIT` if large."""
    found = set()
    for count in counts:
        even = ceil_div(extent, max(count, 1))
        for unit in units:
            aligned = LARGE_UNIT if even >= LARGE_EXTENT and LARGE_UNIT % unit == 0 else unit
            found.add(min(extent, round_up(max(even, 1), aligned)))
    return sorted(e for e in found if e > 0)
