"""The candidates of square covers, such as the triangle of a Gram matrix: tile shapes, strips and slots.

Tiles are square. Large tiles load fewer bytes. With one tile, its staircase is the whole triangle of C: every
panel is loaded once, and the triangle stays on the device. With more tiles, fewer strips per tile suffice to
multiply little more than the triangle. The clock runs tiles of all sizes with one depth, and then the best
sizes with all depths and numbers of strips.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, lcm
from operator import itemgetter

from oocgemm.planning.cost.bound import bound
from oocgemm.planning.cost.footprint import Candidate, footprint, slot_bytes
from oocgemm.planning.cost.machine import LARGE_UNIT
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.device_memory import panel_checksum_bytes
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.shapes import Shapes
from oocgemm.planning.setting import GRAM_STRIPS, Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up

# Numbers of tile rows to try. If none of them fits, larger numbers are tried until one fits.
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
# Larger numbers are not tried if the lower bounds of the last STALE ones exceed the least bound by SLOWER.
STALE, SLOWER = 2, 1.1
# Number of depths to try. With less device memory than SCARCE_MEMORY bytes, all are tried.
DEPTHS_TRIED, SCARCE_MEMORY = 4, 1 << 20
# Minimum rows of a strip. Thinner ones would take longer to issue than they save.
MIN_STRIP = 64
# Numbers of strips into which C is divided. Those in SCARCE_STRIPS are tried only if memory for larger strips
# is missing.
STRIPS, SCARCE_STRIPS = (GRAM_STRIPS, 2 * GRAM_STRIPS), tuple(GRAM_STRIPS << shift for shift in range(2, 6))
# Numbers of strips for a host whose BLAS computes only a triangle of each square on the diagonal, so that
# strips of many rows waste no work. If k is long, one product is faster than several thin ones. If k is
# short, several strips are faster: some of C is written beside products.
HALVED_STRIPS = (1, 2, 4, 8, *STRIPS)
# In half a band, most tiles are no staircases, and one strip per tile is best. On a GPU, each Download of
# selected elements waits for their number, which took 1 ms on an H200, however few there are.
WHOLE_STRIPS = (1,)
# Maximum number of steps of a tile that run strip by strip at its end.
MAX_DRAIN = 8
# Device slots for panels of a pageable array. Several blocks are copied at the same time.
PAGEABLE_SLOTS = 8

# Candidates, each with a lower bound on its seconds.
Bounded = list[tuple[float, Candidate]]


class Squares:
    """The candidates of a square cover with a number of I/O threads."""

    def __init__(self, prices: Prices, io_threads: int) -> None:
        self._prices, self._setting, self._threads = prices, prices.setting, io_threads
        problem, machine = self._setting.problem, self._setting.machine
        # If only a few tiles of each row are needed, tiles are small, and a few deep steps are faster.
        self._extent = max(1, problem.cover.extent(problem.m))
        narrow = self._extent < problem.m
        scarce = self._setting.budgets.device - machine.device_reserve < SCARCE_MEMORY
        depths = Shapes(prices).depths
        self.depths = sorted(depths if narrow or scarce else depths[:DEPTHS_TRIED])
        self._first = [self.depths[len(self.depths) // 2]] * narrow + self.depths[::-1]
        self._strips: Sequence[int] = HALVED_STRIPS if machine.unified and problem.halves_diagonal else STRIPS
        if narrow and problem.cover.halves:
            self._strips = WHOLE_STRIPS

    def of_all_sides(self) -> Bounded:
        """Return the candidates with tiles of all sizes, each with the first depth that fits.

        With one I/O thread, the smallest candidate of all stands in if there are none.
        """
        found: Bounded = []
        n, tried, stale = self._setting.problem.m, set[int](), 0
        for count in self._counts():
            if found and (count > COUNTS[-1] * ceil_div(n, self._extent) or stale == STALE):
                break
            more: Bounded = []
            for side in self._sides(count):
                shapes = () if side in tried else (TileShape(side, side, k) for k in self._first)
                more += next(filter(None, (self._bounded(shape, self._strips[:1]) for shape in shapes)), [])
                tried.add(side)
            limit = SLOWER * min((least for least, _ in found), default=inf)
            stale = stale + 1 if more and min(more, key=itemgetter(0))[0] > limit else 0
            found += more
        if not found and self._threads == 1:
            least = smallest(self._setting, None)
            found = [(bound(self._prices, least), least)] if min(_free(self._setting, least)) >= 0 else []
        return sorted(found, key=itemgetter(0))

    def with_sides(self, sides: Sequence[int]) -> Bounded:
        """Return the candidates with tiles of some sizes, of all depths and numbers of strips.

        With the first size, somewhat larger and smaller tiles are tried, too.
        """
        count = ceil_div(self._setting.problem.m, sides[0])
        near = (x for other in (ceil_div(4 * count, 5), ceil_div(5 * count, 4)) for x in self._sides(other))
        every = dict.fromkeys((*sides, *near))
        shapes = (TileShape(side, side, k) for side in every for k in self.depths)
        return sorted((x for shape in shapes for x in self.of(shape)), key=itemgetter(0))

    def of(self, tile: TileShape) -> Bounded:
        """Return the candidates with a tile shape."""
        return self._bounded(tile, self._strips)

    def _counts(self) -> Iterator[int]:
        """Yield numbers of tile rows.

        Tiles with more columns than the cover needs of one row have many elements that are not needed. Few
        such tiles are tried.
        """
        n = self._setting.problem.m // self._setting.problem.min_panel_rows
        whole = ceil_div(self._setting.problem.m, self._extent)
        count = 1
        while count < whole:
            yield count
            count *= 2
        count = COUNTS[-1]
        yield from (x * whole for x in COUNTS if x * whole <= n)
        while (count := ceil_div(5 * count, 4)) * whole <= n:
            yield count * whole

    def _sides(self, count: int) -> list[int]:
        """List sides of tiles that give about `count` tile rows, as near as the units of tiles allow."""
        n, must, layout = self._setting.problem.m, _unit(self._setting), self._setting.layouts.a
        even = ceil_div(n, count)
        whole_chunks = must if layout.partial_reads else lcm(must, layout.read_chunk[0])
        fine = lcm(must, 128 if even >= 1024 else 16 if even >= 256 else 1)
        units = (unit if unit <= even else must for unit in (whole_chunks, fine))
        return sorted({min(n, round_up(even, unit)) for unit in units})

    def _bounded(self, tile: TileShape, strips: Sequence[int]) -> Bounded:
        """Return candidates with a tile shape. The memory that is left over caches panels.

        C is divided into each of these numbers of `strips`. If none of these candidates fits, thinner strips
        are tried.
        """
        setting, found = self._setting, list[Candidate]()
        heights = dict.fromkeys(_strip(setting, tile, count) for count in (*strips, *SCARCE_STRIPS))
        for number, strip in enumerate(heights):
            if found and number >= len(strips):
                break
            for c in (1, 2) if tile.m < setting.problem.m else (1,):
                base = self._base(tile, c, strip)
                if base is not None:
                    found += _cached(setting, Candidate(tile, base, Traversal(), self._threads))
        return [(bound(self._prices, one), one) for one in found]

    def _base(self, tile: TileShape, c: int, strip: int) -> Slots | None:
        """Return the minimum numbers of slots with which a tile shape runs well; None if they do not fit."""
        setting = self._setting
        for host in (1,) if setting.machine.unified else (3, 2, 1):
            slots = _slots(setting, tile, c, strip, host)
            device, on_host = _free(setting, Candidate(tile, slots, io_threads=self._threads))
            if min(device, on_host) < 0:
                continue
            size = slot_bytes(setting.problem, tile, strip)
            drain = self._drain(tile, slots)
            panels, planes = 2 * (drain + 1), drain + 1 if setting.problem.prepares else slots.planes
            if setting.routes["A"].staged_ahead:
                panels = max(panels, PAGEABLE_SLOTS)
            more = max(0, panels - slots.a)
            needed = more * size["device", "A"] + max(0, planes - slots.planes) * size["device", "P"]
            if more and needed <= device // 2:
                return replace(slots, a=slots.a + more, drain=drain, planes=max(planes, slots.planes))
            return slots
        return None

    def _drain(self, tile: TileShape, slots: Slots) -> int:
        """Choose how many of the last steps of a tile run strip by strip, to hide its download."""
        setting = self._setting
        problem, machine = setting.problem, setting.machine
        side, depth = min(tile.m, problem.m), min(tile.k, problem.depth)
        flops = problem.step_flops(side, side, depth) / 2
        if not flops or problem.planes:
            return 1
        step = machine.multiply_seconds(problem.rate, flops, side, side, depth) + machine.step_latency
        rate = machine.write if slots.unified else self._prices.rate("d2h", "C", slots.strip, side)
        twice = 2 if setting.turns_on_device else 1
        seconds = twice * side * side / 2 * problem.itemsizes["C"] / rate
        return max(1, min(TileGrid.of(problem, tile).steps, MAX_DRAIN, int(seconds / step) + 1))


def smallest(setting: Setting, tile: TileShape | None) -> Candidate:
    """Return the candidate that needs the least memory, whether it fits or not."""
    problem, unit = setting.problem, _unit(setting)
    side = max(1, problem.min_panel_rows, min(problem.m, round_up(16, unit)))
    shape = tile or TileShape(side, side, max(1, min(problem.depth, 16)))
    return Candidate(shape, _slots(setting, shape, 1, min(lcm(*setting.c_chunks(shape)), shape.m), 1))


def _unit(setting: Setting) -> int:
    """Return the unit of the sides of tiles. With multiples of it, no two tiles share a chunk of C."""
    return 1 if setting.layouts.c.writing.free else lcm(*setting.layouts.c.writing.chunk)


def _strip(setting: Setting, tile: TileShape, count: int) -> int:
    """Return the height of strips if C is divided into `count` of them."""
    n, unit = setting.problem.m, lcm(*setting.c_chunks(tile))
    side = min(tile.m, n)
    height = max(min(side, MIN_STRIP), ceil_div(side, ceil_div(count * side, n)))
    if unit == 1:
        unit = LARGE_UNIT if height >= LARGE_UNIT else 16 if height >= 64 else 1
    return min(side, round_up(height, unit))


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
