"""The tile shapes of a product that are worth running on the virtual clock, the most promising first.

Large tiles load fewer bytes. So C is divided into some numbers of tile rows. For each, tiles are as wide as
memory permits, beside two panels of each operand, or beside all panels of a tile row or of a tile column; or
they are a half or a quarter as wide. The depth of panels is the best one, or all or half of k. From the best
of these shapes, the estimate of the time is improved by changing one decision at a time (`near`).

The estimate uses the prices of the clock, but treats a run as a few phases: the first panels, the tiles at
the rate of the slowest lane, the waits at the start of a row of tiles, the end of the last tile. It differs
from the clock by up to a fifth. It only ranks shapes: the clock decides.

Two kinds of products have shapes of their own: chained products, for which only the depth is chosen, and
products whose arrays are multiplied in place.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil, inf, isqrt, lcm

from oocgemm.planning import emulation
from oocgemm.planning.cost.footprint import casts, extents, workspace_per_element
from oocgemm.planning.cost.machine import LARGE_EXTENT, LARGE_UNIT
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.device_memory import checksum_fraction, epilogue_bytes, factor_bytes, scale_bytes
from oocgemm.planning.emulation import MAX_DEPTH, STRIP_ROWS, work_bytes
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.search.slot_counts import MAX_DRAIN, STAGED_STRIPS, STRIP_BYTES, STRIPS
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# A tile shape with a number of accumulators. A `Ranked` has the estimated seconds, too, as its first item.
Shape = tuple[TileShape, int]
Ranked = tuple[float, TileShape, int]
# Numbers of tile rows to try. Numbers above MANY are only tried if a row of tiles takes at least the part
# 1 / MIN_PART of the device memory. Tiles are as wide as memory permits, divided by each of WIDTHS.
COUNTS, MANY, MIN_PART = (1, 2, 3, 4, 8, 16, 32, 64, 128), 16, 32
WIDTHS = (1, 2, 4)
# Numbers of strips of C to try if A, B and C are pinned. If memory is scarce, only many strips fit.
STRIP_COUNTS = (8, 16, 32)
# Depths (tile.k) to choose from for all dtypes, and further depths for int8. The best depth is tried, and the
# maximum depth divided by each of PARTS_OF_K.
DEPTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BYTE_DEPTHS, PARTS_OF_K = (16384, 32768), (1, 2)
# With less device memory for tiles than this, in bytes, all depths are tried.
SCARCE_MEMORY = 1 << 20
# The depth of panels is changed by these factors. Short rows of a panel are copied more slowly.
DEPTH_FACTORS = (2, 0.5)
# If a changed depth differs by at most this part from a depth in `Shapes.depths`, the latter is taken.
NEAR_DEPTH = 0.05
# The estimate is improved from this many shapes, as long as each change gains at least the part MIN_GAIN.
STARTS, MIN_GAIN = 3, 0.002
# The estimates of shapes with similar extents are likely to have similar errors. So each of these shapes is
# ranked as if it took longer by this part than the one before it.
ALIKE = 0.04
# A shape is hopeless if its multiplications alone take this many times as long as the least estimate.
HOPELESS = 1.3
# Estimates include this part of the time that a run would take if nothing overlapped. Without it, shapes that
# the same resource limits, such as the host's copies, would have equal estimates.
SERIAL = 0.05
# Operations per step, and per strip without and with a Finish; and the part of the host budget that caches
# panels. Bytes of thin strips of C, and host slots per operand, as `slot_counts` chooses them.
PER_STEP, PER_STRIP, CACHING = 3.5, (1, 4), 0.97
THIN_STRIP_BYTES, HOST_SLOTS = 1 << 20, 3
# If A, B and C are multiplied in place, one product takes about CALL_SECONDS seconds, and has at least
# MIN_CALL_ROWS rows of C. With fewer rows, BLAS would copy B into its own buffers too often.
CALL_SECONDS, MIN_CALL_ROWS = 0.5, 1024
# Target size of a panel of A of chained products, in bytes. A GPU copies larger panels no faster. The host
# has smaller panels, since it reads panels while it multiplies others. X is divided into at least PANELS
# panels, so that little is read before the first product, unless panels would be smaller than
# MIN_PANEL_BYTES.
PANEL_BYTES, HOST_PANEL_BYTES = 64 << 20, 16 << 20
PANELS, MIN_PANEL_BYTES = 16, 1 << 20


class Shapes:
    """The tile shapes of a product, with estimates of their times."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self._setting = prices, prices.setting
        problem, machine = self._setting.problem, self._setting.machine
        self._units_m, self._units_n = alignments(self._setting)
        self._m, self._n, self._k = problem.m, problem.n, max(1, problem.depth)
        self._a, self._b, self._acc, self._c = (problem.itemsizes[x] for x in ("A", "B", "acc", "C"))
        self._work = workspace_per_element(problem, machine)
        self._planes, self._prepares = problem.planes, problem.prepares
        self._finishes, self._reads_c = problem.finishes, problem.reads_c
        self._exact = problem.exact and not casts(problem, machine)
        self._deepest = max_depth(problem)
        self._memory = int(
            (self._setting.budgets.device - machine.device_reserve) / (1 + checksum_fraction(problem))
        )
        self._finish_slots = 0 if machine.unified or problem.sink.per_row else problem.finish_slots
        if problem.sink.per_row:
            self._memory -= problem.sink.count(self._m, 0) * self._c + scale_bytes(problem)
            self._memory -= factor_bytes(problem) + epilogue_bytes(problem)
        self._in_slots = [not (machine.unified or self._setting.routes[x].streams) for x in "AB"]
        self._host = self._setting.budgets.host - machine.host_reserve
        self._caching = CACHING * self._setting.budgets.host if self._setting.host_caches_panels else 0.0
        self._streams_c = self._setting.routes["C"].streams
        self._known: dict[Shape, float] = {}
        self._least = inf

    @property
    def is_scarce(self) -> bool:
        """Whether so little device memory is left for tiles that every depth may be the best one."""
        return self._memory < SCARCE_MEMORY

    def ranked(self, *, every_depth: bool = False) -> list[Ranked]:
        """Return (estimated seconds, tile shape, number of accumulators), the most promising ones first.

        With `every_depth`, shapes are enumerated for all depths.
        """
        depths = self.depths
        if not every_depth:
            depths = list(dict.fromkeys((depths[0], *(ceil_div(self._deepest, x) for x in PARTS_OF_K))))
        shapes = list(dict.fromkeys(self._enumerated(depths)))
        direct = [shape for shape in shapes if is_enqueued(self._setting, shape[0])]
        found = {shape: self.estimate(*shape) for shape in direct or shapes}
        for start in _varied(found)[:STARTS]:
            now = start
            while True:
                near = self.near(*now[1:])
                found |= {(tile, c): seconds for seconds, tile, c in near}
                best = min(near, key=_order, default=now)
                if not best[0] < (1 - MIN_GAIN) * found[now[1:]]:  # stops, too, if neither of them fits
                    break
                now = best
        return [*self._strips_of_c(), *_varied(found)]

    def near(self, tile: TileShape, c: int) -> list[Ranked]:
        """Return the shapes that differ from this one in the depth, the numbers of tiles, or accumulators."""
        direct, found = is_enqueued(self._setting, tile), dict[Ranked, None]()
        for shape, count in self._neighbours(tile, c):
            if direct and not is_enqueued(self._setting, shape):
                continue
            # Larger tiles may only fit with one accumulator, or with thinner panels.
            thinner = replace(shape, k=max(1, shape.k // 2))
            for fitting in ((shape, count), (shape, 1), (thinner, count), (thinner, 1)):
                seconds = self.estimate(*fitting)
                if seconds < inf:
                    found[seconds, *fitting] = None
                    break
        return list(found)

    def estimate(self, tile: TileShape, c: int) -> float:
        """Estimate the seconds with tiles of a shape and `c` accumulators; inf if they do not fit."""
        if (tile, c) not in self._known:
            seconds = self._known[tile, c] = self._seconds(tile, c)
            self._least = min(self._least, seconds)
        return self._known[tile, c]

    @cached_property
    def depths(self) -> list[int]:
        """List the depths (tile.k) to try, best first.

        They are `DEPTHS`, small multiples of the chunks' extents along k, and the maximum depth. Multiples
        and divisors of these extents come first, since they read whole chunks. Depths whose panels do not fit
        come last. Otherwise the order is that of the estimated time with square tiles that fill the memory.
        """
        layouts = self._setting.layouts
        chunks = layouts.a.read_chunk[1], layouts.b.read_chunk[0]
        units = {*chunks, lcm(*chunks)}
        multiples = {unit * times for unit in units for times in (1, 2, 3, 4, 6, 8)}
        usual = {*DEPTHS, *(BYTE_DEPTHS if self._setting.problem.exact else ())}
        depths = {
            k
            for k in (usual | multiples | {self._deepest})
            if k <= self._deepest and (k >= min(DEPTHS) or k == self._k)
        }
        parted = [x for y, x in ((layouts.a, chunks[0]), (layouts.b, chunks[1])) if not y.partial_reads]

        def order(k: int) -> tuple[bool, bool, float, int]:
            parts = k < self._k and any(k % chunk and chunk % k for chunk in parted)
            seconds = self._square_seconds(k)
            return seconds == inf, parts, seconds, k

        return sorted(depths, key=order)

    def _enumerated(self, depths: Sequence[int]) -> Iterator[Shape]:
        for tile_m in self._extents_m():
            for k in depths:
                for tile_n in self._extents_n(tile_m, k):
                    yield TileShape(tile_m, tile_n, k), 1

    def _strips_of_c(self) -> list[Ranked]:
        """Return the tile shape of the best strips of C with all of k, in a list; an empty list if none fits.

        One operand stays on the device, and the other one passes through, as in a loop written by hand. If
        all arrays are pinned, the estimates of other shapes are too low by about a tenth. So the clock runs
        the best strips first.
        """
        if not self._setting.enqueues or self._k > self._deepest:
            return []
        shapes = [TileShape(_divided(self._m, x, self._units_m), self._n, self._k) for x in STRIP_COUNTS]
        shapes += [TileShape(self._m, _divided(self._n, x, self._units_n), self._k) for x in STRIP_COUNTS]
        ranked = [(self.estimate(x, 2), x, 2) for x in shapes if is_enqueued(self._setting, x)]
        return [min(ranked, key=_order)] if ranked else []

    def _extents_m(self) -> list[int]:
        found = dict[int, None]()
        for count in COUNTS:
            tile_m = _divided(self._m, count, self._units_m)
            if count > MANY and tile_m * (self._n * self._acc + self._k * self._b) * MIN_PART < self._memory:
                break
            found[tile_m] = found[_whole(tile_m, self._units_m)] = None
        return list(found)

    def _extents_n(self, tile_m: int, k: int) -> list[int]:
        """Return the extents along n of tiles with `tile_m` rows that fit."""
        found, thin = dict[int, None](), min(2 * k, self._k)
        column = tile_m * self._acc + k * self._work + self._column_work(tile_m)
        for kept_a, kept_b in ((thin, thin), (self._k, thin), (thin, self._k)):
            room = self._memory - tile_m * (kept_a * self._a + k * self._work)
            widest = min(self._n, room // (column + kept_b * self._b))
            for width in WIDTHS if widest > 0 else ():
                tile_n = _divided(self._n, width * ceil_div(self._n, widest), self._units_n)
                if tile_n <= widest:
                    found[tile_n] = found[_whole(tile_n, self._units_n)] = None
        return list(found)

    def _column_work(self, tile_m: int) -> int:
        """Return the bytes of workspace per column of a tile, for emulated products or for int32 sums."""
        if self._planes:
            return work_bytes(self._planes, tile_m, 16) // 16
        return 4 * min(tile_m, STRIP_ROWS) if self._exact else 0

    def _on_host(self, m: int, n: int, k: int) -> int:
        """Return the bytes of the host budget that are left beside one host slot for A and one for B."""
        on_a, on_b = self._in_slots
        return self._host - k * (on_a * m * self._a + on_b * n * self._b)

    def _neighbours(self, tile: TileShape, c: int) -> Iterator[Shape]:
        for factor in DEPTH_FACTORS:
            k = min(ceil(factor * tile.k), self._k)
            # Depths of whole chunks are better than those nearby.
            near = min(self.depths, key=lambda depth: abs(depth - k))
            k = near if abs(near - k) <= NEAR_DEPTH * k else k
            if min(DEPTHS) <= k <= self._deepest and k != min(tile.k, self._k):
                yield replace(tile, k=k), c
        down, across = ceil_div(self._m, tile.m), ceil_div(self._n, tile.n)
        counts = [(down - 1, across)] * (down > 1) + [(down, across - 1)] * (across > 1)
        counts += [(down + 1, across), (down, across + 1), (2 * down, across), (down, 2 * across)]
        others: list[Shape] = []
        for rows, cols in counts:
            m, n = _divided(self._m, rows, self._units_m), _divided(self._n, cols, self._units_n)
            shape = TileShape(m, n, tile.k)
            if shape != tile:
                yield shape, c if rows * cols > 1 else 1
                others += [(shape, 3 - c)] * (rows * cols > 1)
        if down * across > 1:
            yield tile, 3 - c
        yield from others

    def _seconds(self, tile: TileShape, c: int) -> float:
        prices, machine = self._prices, self._setting.machine
        m, n, k = tile.m, tile.n, min(tile.k, self._k)
        down, across, steps = ceil_div(self._m, m), ceil_div(self._n, n), ceil_div(self._k, k)
        size_a, size_b = m * k * self._a, k * n * self._b
        own_a, own_b = 2 * size_a, 2 * size_b
        used = n * (c * m * self._acc + self._column_work(m)) + (m + n) * k * self._work
        free = self._memory - used - own_a - own_b
        strip, strip_bytes = self._strip(tile, free)
        free -= strip_bytes
        if free < 0 or self._on_host(m, n, k) < 0:
            return inf
        step = prices.multiply(m, m, n, k) + (prices.prepare(m, n, k) if self._prepares else 0.0)
        each, tiles = max(1.0, self._k / k) * step, self._m / m * (self._n / n)
        compute = tiles * each
        if compute > HOPELESS * self._least:
            return compute
        # Seconds per tile in which C leaves the device, strip by strip.
        strips = m / strip
        write = 0.0 if self._streams_c else prices.write(strip, n) * strips
        download = 0.0 if machine.unified else prices.download(strip, n) * strips
        out = max(write, download)
        # While the strips of the last tile leave one by one, its last steps run.
        hidden = step * (1 - 1 / strips)
        tail = max(out / strips, out - min(steps, MAX_DRAIN) * hidden)
        if c == 1 and down * across > 1:
            each += self._turn(m, n, k, step, strips, (out, download))
        # Seconds per byte to read, upload and stage panels.
        costs_a, costs_b = (
            (
                prices.read(operand, *panel) / size,
                0.0 if machine.unified else prices.upload(operand, *panel) / size,
                0.0 if machine.unified else prices.staged(operand, *panel) / size,
            )
            for operand, panel, size in (("A", (m, k), size_a), ("B", (k, n), size_b))
        )
        first = size_a * sum(costs_a[:2]) + size_b * sum(costs_b[:2])
        old_read = tiles * prices.read("C", m, n) if self._reads_c else 0.0
        old_up = tiles * prices.upload("C", m, n) if self._reads_c and not machine.unified else 0.0
        copied = tiles * strips * prices.staged("C", strip, n) * (2 if self._reads_c else 1)
        faults = prices.accumulator_faults(m, n) * c + self._panel_faults(m, n, k)
        host = max(0.0, self._caching - 3 * (size_a + size_b))
        # Only whole panels are cached.
        a = m * self._k * self._a, self._m * self._k * self._a, own_a + free // size_a * size_a
        b = n * self._k * self._b, self._n * self._k * self._b, own_b + free // size_b * size_b
        least = inf
        for lines, others, kept, passing, costs, costs_passing in (
            (down, across, a, b, costs_a, costs_b),
            (across, down, b, a, costs_b, costs_a),
        ):
            uploads, reads = _loads(lines, others, kept, passing, host)
            (line, whole, room), (column, whole_passing, _) = kept, passing
            reading, uploading, staging = (
                times[0] * whole * cost + times[1] * whole_passing * cost_passing
                for times, cost, cost_passing in zip(
                    (reads, uploads, uploads), costs, costs_passing, strict=True
                )
            )
            if machine.shares_cores:
                busy = compute + tiles * prices.write_cpu_share * write
                total = max(tiles * each, busy) + reading + old_read + faults + tail
            else:
                # The panels of a line of tiles are cached. Panels of the next line are loaded early into
                # spare slots. The other panels are loaded while one tile runs. If they take longer, the next
                # line waits for them.
                slow, slow_passing = max(costs[:2]), max(costs_passing[:2])
                spare = min(1.0, max(0.0, room / line - 1))
                waits = (
                    max(0.0, min(1.0, room / line) * (1 - spare) * line * slow - each) if others > 1 else 0.0
                )
                begun = faults + line * slow
                total = max(
                    faults + first + tiles * each + (lines - 1) * waits,
                    begun + column * slow_passing + step + (tiles - tiles / (lines * others)) * each,
                    begun + whole_passing * slow_passing + (lines - 1) * (tiles / lines * each + waits),
                    faults + reading + size_b * costs_b[1] + step,
                    size_a * costs_a[0] + uploading + step,
                )
                issue = (
                    (PER_STEP * steps + PER_STRIP[self._finishes] * strips) * machine.issue * down * across
                )
                leaving = first + step / strips + tiles * out
                total = max(
                    total + tail, leaving, issue, reading + old_read, uploading + old_up, staging + copied
                )
            serial = tiles * each + reading + uploading + tiles * (write + download)
            least = min(least, total + SERIAL * serial)
        return least

    def _panel_faults(self, m: int, n: int, k: int) -> float:
        """Estimate the seconds of page faults when the first Reads fill the minimum numbers of slots."""
        on_a, on_b = (2, 2) if self._setting.machine.unified else (HOST_SLOTS * x for x in self._in_slots)
        return on_a * self._prices.faults("A", m, k) + on_b * self._prices.faults("B", k, n)

    def _turn(
        self, m: int, n: int, k: int, step: float, strips: float, leaving: tuple[float, float]
    ) -> float:
        """Estimate by how many seconds a tile takes longer because the tile before has the only accumulator.

        `step` is the time of a step, and `strips` the number of strips. `leaving` are the seconds in which a
        tile is downloaded and written, and in which it is only downloaded.
        """
        turning, strip = min(2, ceil_div(self._k, k)), int(m / strips)
        by_strips = strips * self._prices.multiply(strip, m, n, k) - step
        if self._finishes:
            return turning * max(0.0, by_strips)
        # Host slots for a whole tile of C free the accumulator before it has been written.
        waits = self._setting.machine.unified or 2 * m * n * self._c > self._host
        hidden = turning * step * (1 - 1 / strips)
        return turning * max(0.0, by_strips) + max(0.0, leaving[0 if waits else 1] - hidden)

    def _strip(self, tile: TileShape, free: int) -> tuple[int, int]:
        """Return about how many rows the strips of C have, and the bytes of their slots on the device.

        Strips are thin if the `free` memory does not suffice for others, as in `slot_counts`.
        """
        strips = STRIPS if self._setting.machine.unified else STAGED_STRIPS
        row = tile.n * self._c
        rows = max(1, STRIP_BYTES // row, ceil_div(tile.m, strips))
        wanted = min(tile.m, round_up(rows, self._setting.c_chunks(tile)[0]))
        if self._finish_slots * wanted * row > free:
            wanted = min(wanted, max(1, THIN_STRIP_BYTES // row))
        return wanted, self._finish_slots * wanted * row

    def _square_seconds(self, k: int) -> float:
        """Estimate the seconds with square tiles that fill the memory; inf if panels do not fit."""
        problem, machine, layouts = self._setting.problem, self._setting.machine, self._setting.layouts
        # A tile of `side` rows and four panels: side^2 + 4 * panels * side = memory, in elements of the
        # accumulator. Here, `panels` is the size of a panel and its workspace per row of the tile.
        panels = k * (2 * self._a + self._work) // (2 * self._acc)
        side = isqrt(4 * panels**2 + max(1, self._memory // self._acc)) - 2 * panels
        if side < 1:
            return inf
        chunks = layouts.a.read_chunk[0], layouts.b.read_chunk[1]
        m, n = (
            max(1, min(extent, side // chunk * chunk or side))
            for extent, chunk in zip((self._m, self._n), chunks, strict=True)
        )
        if self._on_host(m, n, k) < 0:
            return inf
        compute = self._prices.product(problem.flops, m, n, k)
        links = ("read",) if machine.unified else ("read", "h2d")
        rate = min(self._prices.rate(x, *panel) for x in links for panel in (("A", m, k), ("B", k, n)))
        copied = self._m * self._n * self._k * self._a * (1 / m + 1 / n) / rate
        first = copied * k / self._k * m / self._m * n / self._n
        steps = ceil_div(self._m, m) * ceil_div(self._n, n) * ceil_div(self._k, k)
        decodes = layouts.a.decode_bytes or layouts.b.decode_bytes
        latency = machine.step_latency + (machine.decode_latency if decodes else 0.0)
        return max(compute, copied) + 0.1 * (compute + copied) + first + steps * latency


# The bytes of the panels of a line of tiles, of the whole operand, and of the memory for its panels.
_Sizes = tuple[int, int, int]
_Times = tuple[float, float]


def _loads(lines: int, others: int, kept: _Sizes, passing: _Sizes, host: float) -> tuple[_Times, _Times]:
    """Estimate how many times two operands are uploaded, and how many times they are read, line by line.

    Both results have a number for `kept` and one for `passing`. There are `lines` lines of `others` tiles.
    The panels of a line of `kept` are cached before those of `passing`. `host` is the memory that caches
    panels on the host.
    """
    (line, _, room), (_, whole, room_passing) = kept, passing

    def times(room: float, rest: float) -> _Times:
        hit = min(1.0, room / line)
        again = 1 + (lines - 1) * (1 - min(1.0, max(0.0, rest - hit * line) / whole))
        return 1 + (others - 1) * (1 - hit), again

    uploads = times(room, room_passing)
    return uploads, times(host, max(host, room_passing)) if host > room else uploads


def _varied(found: Mapping[Shape, float]) -> list[Ranked]:
    """Order shapes by their estimated seconds. Later ones with similar extents are moved back (`ALIKE`)."""
    alike, ranked = Counter[tuple[int, int]](), list[Ranked]()
    for seconds, tile, c in sorted(((seconds, *shape) for shape, seconds in found.items()), key=_order):
        group = tile.m.bit_length(), tile.n.bit_length()
        ranked.append((seconds * (1 + ALIKE * alike[group]), tile, c))
        alike[group] += 1
    return sorted(ranked, key=_order)


def _order(ranked: Ranked) -> tuple[float, int, int, int]:
    seconds, tile, c = ranked
    return seconds, c, tile.k, tile.m


def _divided(extent: int, count: int, units: tuple[int, ...]) -> int:
    """Divide an extent into `count` tiles, in multiples of the last unit that gives `count` tiles."""
    return next(
        (tile for unit in reversed(units) if ceil_div(extent, tile := _even(extent, count, unit)) == count),
        _even(extent, count, units[0]),
    )


def _whole(tile: int, units: tuple[int, ...]) -> int:
    """Round the extent of a tile down to whole chunks (the last unit), so that none is decoded twice."""
    return tile // units[-1] * units[-1] or tile


def _even(extent: int, count: int, unit: int) -> int:
    """Divide an extent by `count`, and round up to a multiple of a unit.

    Large extents are rounded up to a multiple of `LARGE_UNIT` if the unit permits it, because a GPU
    multiplies such tiles faster. The clock does not know that.
    """
    share = max(1, ceil_div(extent, max(1, count)))
    unit = LARGE_UNIT if share >= LARGE_EXTENT and LARGE_UNIT % unit == 0 else unit
    return max(1, min(extent, round_up(share, unit)))


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


def max_depth(problem: GemmProblem) -> int:
    """Return the maximum depth of a step: all of k, or the depth above which int32 sums could overflow."""
    depth = max(1, problem.depth)
    if problem.exact:
        return min(depth, emulation.MAX_INT32_DEPTH // 16 * 16)
    return min(depth, MAX_DEPTH) if problem.planes else depth


def is_enqueued(setting: Setting, tile: TileShape) -> bool:
    """Return False if all arrays are pinned (`enqueues`), but threads would copy blocks, which are narrow."""
    m, n, k = extents(setting.problem, tile)
    layouts = setting.layouts
    blocks = (layouts.a, (m, k)), (layouts.b, (k, n)), (layouts.c, (m, n))
    return not setting.enqueues or all(layout.is_direct(block) for layout, block in blocks)


def needs_no_memory(setting: Setting) -> bool:
    """Return whether A, B and C are multiplied in place, without any workspace."""
    problem = setting.problem
    workspace = problem.planes or workspace_per_element(problem, setting.machine)
    return len(setting.layouts.in_place) == 3 and not workspace


def in_place_tile(setting: Setting) -> TileShape:
    """Return the tile shape of a product that needs no memory: some rows of C, and all of n and k.

    As few products as possible are the fastest. C is only divided so that a run shows its progress and can
    be cancelled.
    """
    problem = setting.problem
    m, n, k = max(1, problem.m), max(1, problem.n), max(1, problem.depth)
    seconds = setting.machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
    tiles = max(1, min(int(seconds / CALL_SECONDS), m // MIN_CALL_ROWS))
    return TileShape(ceil_div(m, tiles), n, k)


def chained_shapes(setting: Setting) -> Iterator[TileShape]:
    """Yield the tile shapes of chained products, best first: with panels of whole chunks, then thinner ones.

    C and Q stay on the device. A step multiplies a panel of all rows of op(A), twice. So only the depth of
    the panels is chosen. The depth does not depend on measured rates: the same problem in the same budgets is
    always divided in the same way, and its result is rounded in the same way.
    """
    problem, layout = setting.problem, setting.layouts.a
    row = problem.m * problem.itemsizes["A"]
    size = HOST_PANEL_BYTES if setting.machine.unified else PANEL_BYTES
    size = max(MIN_PANEL_BYTES, min(size, row * problem.depth // PANELS))
    target = max(1, size // row)
    chunk = layout.read_chunk[1]
    depth = min(problem.depth, max(1, target // chunk) * chunk)
    while depth > 1:
        yield TileShape(problem.m, problem.n, depth)
        # Half of the chunks in a panel, then parts of chunks that divide them evenly.
        depth = depth // chunk // 2 * chunk if depth >= 2 * chunk else ceil_div(depth, 2)
    yield min_tile(setting)


def min_tile(setting: Setting) -> TileShape:
    """Return the smallest tile shape that the planner uses.

    It is 16 x 16 x 16, with m and n rounded up to whole chunks of C. For chained products, it is m x n x 1.
    """
    problem, unit = setting.problem, setting.layouts.c.writing.chunk
    if problem.b.one_tile:
        return TileShape(problem.m, problem.n, 1)
    return TileShape(
        max(1, min(problem.m, round_up(16, unit[0]))),
        max(1, min(problem.n, round_up(16, unit[1]))),
        max(1, min(problem.depth, 16)),
    )
