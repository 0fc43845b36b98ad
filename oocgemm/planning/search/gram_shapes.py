"""Enumerate the candidates for a Gram matrix: tile shapes, strips and numbers of slots.

Tiles are square. Large tiles load fewer bytes. With one tile, its staircase is the whole triangle of C: every
panel is loaded once, and the triangle stays on the device (the *resident triangle*). With more tiles, fewer
strips per tile suffice to multiply little more than the triangle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, lcm

from oocgemm.planning.check_blocks import panel_checksum_bytes
from oocgemm.planning.cost.footprint import Candidate, footprint, slot_bytes
from oocgemm.planning.cost.gram import predict
from oocgemm.planning.cost.machine import LARGE_UNIT
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import Shapes
from oocgemm.planning.setting import GRAM_STRIPS, Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up

# Numbers of tile rows to try: all up to DENSE_COUNTS, then in steps of about a quarter, up to MAX_COUNT. If
# none of them fits, larger ones are tried until one fits.
DENSE_COUNTS, MAX_COUNT = 12, 64
# Larger numbers are not tried if the last STALE ones each took at least SLOWER times as long as the best one.
STALE, SLOWER = 3, 1.1
# For this many sides of tiles, the best ones, all depths and numbers of strips are tried.
REFINED = 4
# Of all candidates, the loads of this many, the best ones, are counted where that takes little time.
MAX_CANDIDATES = 12
# Number of depths to try.
DEPTHS_TRIED = 4
# Minimum rows of a strip. Thinner ones would take longer to issue than they save.
MIN_STRIP = 64
# Numbers of strips into which C is divided. Those in SCARCE_STRIPS are tried only if memory for larger strips
# is missing. All tile shapes are tried with the first number of strips, the best shapes with every number.
STRIPS, SCARCE_STRIPS = (GRAM_STRIPS, 2 * GRAM_STRIPS), tuple(GRAM_STRIPS << shift for shift in range(2, 6))
# The same for a host whose BLAS computes only a triangle of each square on the diagonal, so that thick strips
# waste nothing. With 4 strips instead of 8, nine matrices on two cores took 0.92 to 1.01 of the time. With 1
# or 2, some took up to 1.2: then less of C is written beside products.
HALVED_STRIPS = (GRAM_STRIPS // 2, GRAM_STRIPS // 4, *STRIPS)
# With less device memory than this, in bytes, all depths (tile.k) are tried.
SCARCE_MEMORY = 1 << 20
# Maximum number of steps of a tile that run strip by strip at its end.
MAX_DRAIN = 8
# Device slots for panels of a pageable array. Several blocks are copied at the same time.
PAGEABLE_SLOTS = 8


def gram_candidates(
    prices: Prices, tile: TileShape | None, io_threads: int
) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates that fit the budgets, each with its predicted seconds as a lower bound.

    If `tile` is given, all of them have that tile shape.
    """
    setting = prices.setting
    n = setting.problem.m
    if not n:
        yield 0.0, smallest(setting, tile)
        return
    extent = max(1, setting.problem.cover.extent(n))
    depths = depths_of(prices)
    # Where few tiles are needed of each row, tiles are small, and few deep steps are faster.
    first = () if extent < n else (depths[len(depths) // 2],)
    found: dict[Candidate, float] = {}
    numbers = HALVED_STRIPS if setting.machine.unified and setting.problem.halves_diagonal else STRIPS

    def try_shape(shape: TileShape, strips: Sequence[int]) -> float:
        """Predict the candidates with a tile shape. Return the seconds of the best one; inf if none fits."""
        fastest = inf
        for candidate in _filled(prices, shape, io_threads, strips):
            found[candidate] = predict(setting, candidate, prices, rough=True).total
            fastest = min(fastest, found[candidate])
        return fastest

    stale = 0
    for count in () if tile else _counts(n // setting.problem.min_panel_rows, extent):
        if found and (count > MAX_COUNT * ceil_div(n, extent) or stale == STALE):
            break
        fastest = inf
        for side in _sides(setting, count):
            # Of the depths, the middle one is tried, or the largest one that fits.
            for k in (*first, *reversed(depths)):
                seconds = try_shape(TileShape(side, side, k), numbers[:1])
                if seconds < inf:
                    fastest = min(fastest, seconds)
                    break
        stale = stale + 1 if found and fastest > SLOWER * min(found.values()) else 0
    sides = dict.fromkeys(candidate.tile.m for candidate in sorted(found, key=found.__getitem__))
    refined = [TileShape(side, side, k) for side in list(sides)[:REFINED] for k in depths]
    for shape in [tile] if tile else refined:
        try_shape(shape, numbers)
    least = smallest(setting, tile)
    if not found and min(_free(setting, least)) >= 0:
        yield predict(setting, least, prices).total, least  # no depth in `depths` fits
    for candidate in sorted(found, key=found.__getitem__)[:MAX_CANDIDATES]:
        yield predict(setting, candidate, prices).total, candidate


def depths_of(prices: Prices) -> list[int]:
    """Return the depths of panels to try, in ascending order."""
    setting, depths = prices.setting, Shapes(prices).depths
    every = setting.budgets.device - setting.machine.device_reserve < SCARCE_MEMORY
    narrow = setting.problem.cover.extent(setting.problem.m) < setting.problem.m
    return sorted(depths if narrow or every else depths[:DEPTHS_TRIED])


def estimate(prices: Prices, tile: TileShape, io_threads: int) -> float:
    """Estimate the seconds of the best candidate with a tile shape, without counting; inf if none fits."""
    found = _filled(prices, tile, io_threads, STRIPS[:1])
    return min((predict(prices.setting, one, prices, rough=True).total for one in found), default=inf)


def smallest(setting: Setting, tile: TileShape | None) -> Candidate:
    """Return the candidate that needs the least memory, whether it fits or not."""
    problem, unit = setting.problem, _unit(setting)
    side = max(1, problem.min_panel_rows, min(problem.m, round_up(16, unit)))
    shape = tile or TileShape(side, side, max(1, min(problem.depth, 16)))
    return Candidate(shape, _slots(setting, shape, 1, min(_step_unit(setting, shape), shape.m), 1))


def _counts(n: int, extent: int) -> Iterator[int]:
    """Yield numbers of tile rows into which `n` rows are divided.

    Tiles of more than `extent` rows have many elements that are not needed. Few such tiles are tried.
    """
    count, whole = 1, ceil_div(n, extent)
    while count < whole:
        yield count
        count = min(2 * count, whole)
    while count <= n:
        yield count
        count = count + whole if count < DENSE_COUNTS * whole else ceil_div(5 * count, 4)


def _unit(setting: Setting) -> int:
    """Return the number of which the sides of tiles are multiples, so that no two share a chunk of C."""
    return 1 if setting.layouts.c.writing.free else lcm(*setting.layouts.c.writing.chunk)


def _step_unit(setting: Setting, tile: TileShape) -> int:
    """Return the number of which the heights of strips are multiples."""
    return lcm(*setting.c_chunks(tile))


def _sides(setting: Setting, count: int) -> list[int]:
    """List sides of tiles that give about `count` tile rows, as near as the units of tiles allow."""
    n, must, layout = setting.problem.m, _unit(setting), setting.layouts.a
    even = ceil_div(n, count)
    whole_chunks = must if layout.partial_reads else lcm(must, layout.read_chunk[0])
    fine = lcm(must, 128 if even >= 1024 else 16 if even >= 256 else 1)
    return sorted({min(n, round_up(even, unit if unit <= even else must)) for unit in (whole_chunks, fine)})


def _filled(prices: Prices, tile: TileShape, io_threads: int, strips: Sequence[int]) -> Iterator[Candidate]:
    """Yield candidates with a tile shape. The memory that is left over caches panels.

    C is divided into each of these numbers of `strips`. If none of these candidates fits, thinner strips are
    tried.
    """
    setting, found = prices.setting, False
    heights = dict.fromkeys(_strip(setting, tile, count) for count in (*strips, *SCARCE_STRIPS))
    for number, strip in enumerate(heights):
        if found and number >= len(strips):
            return
        for c in (1, 2) if tile.m < setting.problem.m else (1,):
            base = _base(prices, tile, c, strip, io_threads)
            if base is not None:
                found = True
                yield from _cached(setting, Candidate(tile, base, Traversal(), io_threads))


def _strip(setting: Setting, tile: TileShape, count: int) -> int:
    """Return the height of strips if C is divided into `count` of them."""
    n, unit = setting.problem.m, _step_unit(setting, tile)
    side = min(tile.m, n)
    height = max(min(side, MIN_STRIP), ceil_div(side, ceil_div(count * side, n)))
    if unit == 1:
        unit = LARGE_UNIT if height >= LARGE_UNIT else 16 if height >= 64 else 1
    return min(side, round_up(height, unit))


def _base(prices: Prices, tile: TileShape, c: int, strip: int, io_threads: int) -> Slots | None:
    """Return the minimum numbers of slots with which a tile shape runs well; None if they do not fit."""
    setting = prices.setting
    for host in (1,) if setting.machine.unified else (3, 2, 1):
        slots = _slots(setting, tile, c, strip, host)
        device, on_host = _free(setting, Candidate(tile, slots, io_threads=io_threads))
        if min(device, on_host) < 0:
            continue
        size = slot_bytes(setting.problem, tile, strip)
        drain = _drain(prices, tile, slots)
        panels, planes = 2 * (drain + 1), drain + 1 if setting.problem.prepares else slots.planes
        if setting.routes["A"].staged_ahead:
            panels = max(panels, PAGEABLE_SLOTS)
        more = max(0, panels - slots.a)
        needed = more * size["device", "A"] + max(0, planes - slots.planes) * size["device", "P"]
        if more and needed <= device // 2:
            return replace(slots, a=slots.a + more, drain=drain, planes=max(planes, slots.planes))
        return slots
    return None


def _slots(setting: Setting, tile: TileShape, c: int, strip: int, host: int) -> Slots:
    """Return the least numbers of slots, with `host` host slots for each panel of a step and for strips."""
    problem, unified = setting.problem, setting.machine.unified
    panels = 2 if min(tile.m, problem.m) < problem.m else 1
    return Slots(
        a=2 * panels,
        b=0,
        c=c,
        host_a=0 if unified or setting.routes["A"].streams else host * panels,
        host_b=0,
        host_c=0 if unified or setting.routes["C"].streams else host,
        finish=problem.finish_slots,
        strip=strip,
        planes=2 if problem.prepares else 0,
        unified=unified,
    )


def _drain(prices: Prices, tile: TileShape, slots: Slots) -> int:
    """Choose how many of the last steps of a tile run strip by strip, to hide the download of the tile."""
    setting = prices.setting
    problem, machine = setting.problem, setting.machine
    side, depth = min(tile.m, problem.m), min(tile.k, problem.depth)
    flops = problem.step_flops(side, side, depth) / 2
    if not flops or problem.planes:
        return 1
    step = machine.multiply_seconds(problem.rate, flops, side, side, depth) + machine.step_latency
    rate = machine.write if slots.unified else prices.rate("d2h", "C", slots.strip, side)
    twice = 2 if setting.turns_on_device else 1
    seconds = twice * side * side / 2 * problem.itemsizes["C"] / rate
    return max(1, min(TileGrid.of(problem, tile).steps, MAX_DRAIN, int(seconds / step) + 1))


def _free(setting: Setting, candidate: Candidate) -> tuple[int, int]:
    """Return the bytes of the budgets that a candidate leaves free on the device and on the host."""
    used = footprint(setting, candidate)
    return setting.budgets.device - used.device_total, setting.budgets.host - used.host_total


def _cached(setting: Setting, candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate whose free memory caches panels, in bands of several widths."""
    problem, slots, tile = setting.problem, candidate.slots, candidate.tile
    grid = TileGrid.of(problem, tile)
    lines, steps = grid.shape[0], grid.steps
    if lines > 1:
        size = slot_bytes(problem, tile, slots.strip)
        checks = panel_checksum_bytes(problem, tile, slots.strip)[0]
        free, host_free = _free(setting, candidate)
        # If the host computes checksums, it stores those of the panels on the device too.
        more = free // size["device", "A"] if size["device", "A"] else lines * steps
        more = min(more, host_free // checks if checks else more, max(0, lines * steps - slots.a))
        slots, host_free = replace(slots, a=slots.a + more), host_free - more * checks
        if slots.host_a and setting.host_caches_panels:
            wanted = max(0, lines * steps - slots.host_a) if lines * steps > slots.a else 0
            slots = replace(
                slots, host_a=slots.host_a + min(wanted, host_free // (size["host", "A"] + checks))
            )
    candidate = replace(candidate, slots=slots)
    if slots.a >= lines * steps:
        yield replace(candidate, traversal=Traversal(0, 1))  # all bands load each panel once
        return
    # Bands of equal height, whose lines are cached on the device, or on the host, or nearly so.
    widths = {1, *(count // steps + more for count in (slots.a, slots.host_a) for more in (-1, 0))}
    even = {ceil_div(lines, ceil_div(lines, min(lines, width))) for width in widths if width >= 1}
    for band in sorted(even):
        yield replace(candidate, traversal=Traversal(0, band))
