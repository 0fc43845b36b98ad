"""The virtual clock: predict the time of a candidate without creating the operations of its schedule.

The clock goes through the run in program order, as a simulation of the schedule does, but only keeps the
times at which streams and slots become free. It is fast because it collapses periodic parts: the steps of a
tile, the tiles of a row, the rows of tiles. Each is repeated until all times grow at constant rates. The rest
is skipped, up to the repetition in which one time could overtake another.

Which panels are cached follows from their reuse distance: the number of panels of the operand that are used
between two uses of a panel. The panel is still in its slot if this number is below the number of slots. In a
traversal that turns at the end of each row of tiles, Belady's policy evicts the same panels.

The tiles of a square cover, such as a triangle, are run one by one in the order of the cover. Tiles that
repeat those before them are skipped. `cached_of_lines` says which panels are cached.

Several devices run in step. So the clock runs only one of them, on a product of as many tile rows and columns
as this device computes, its `Share`. Storage, the host's copies and the time to issue operations are common
to all devices. In the share, they are slower accordingly: storage by the number of panels that are read for
all devices per panel that is read for one. Copies between devices count as uploads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple

from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.machine import MachineModel, scaled
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.streams import MAX_AHEAD, ClockState, Load, Streams, Strip
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.placement import Loads, cached, cached_of_lines, estimate_loads
from oocgemm.planning.schedule.traversal import forwards, last
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Range, Tile, TileGrid, TileShape, ceil_div, length
from oocgemm.values import dataclass

# All lanes whose time is predicted. "issue" is an additional lane: the time in which threads hold the GIL and
# submit operations one after another.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write", "issue")
# Fewer steps than this are run one by one.
MIN_COLLAPSED = 24
# If times do not grow at constant rates after this many repetitions, the clock assumes that each of the
# others takes as long as the last ones.
MAX_REPETITIONS = 64
# Maximum number of tiles of a square cover that the clock runs. Of more tiles, it runs those in the middle of
# their order, and extrapolates to all tiles.
MAX_LISTED = 3000

# How the panels of A and of B of a step are loaded: None for a panel that is in a device slot.
StepLoads = Sequence[Load | None]
# A step that runs strip by strip: its loads, the seconds of its Multiply per strip, and of its Prepare.
Step = tuple[StepLoads, Sequence[float], float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of a run in `total`, and the parts that it consists of.

    `lanes` has the seconds for which each lane is busy; lanes overlap. `start_up` is the time before the
    first multiplication, `bubbles` the waits between multiplications, and `tail` the time after the last
    multiplication. `streams` is the time at which the last stream ends. It is less than `total` if a resource
    that several streams share is busy for longer, such as the host's memory while pageable arrays are copied.
    `ran` is roughly the number of operations that the clock ran.
    """

    lanes: Mapping[str, float]
    start_up: float
    bubbles: float
    tail: float
    total: float
    streams: float
    ran: int = 0

    @property
    def bottleneck(self) -> str:
        """Name of the lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def serial(self) -> float:
        """Seconds that the run would take if no operations overlapped."""
        return sum(self.lanes.values())

    def part(self, share: float) -> "Prediction":
        """Predict another part of the run, whose work is `share` times that of this one."""
        rest = self.total - self.start_up - self.tail
        total = self.start_up + share * rest + self.tail if share else 0.0
        return Prediction(
            {lane: share * seconds for lane, seconds in self.lanes.items()},
            self.start_up,
            share * self.bubbles,
            self.tail,
            total,
            max(0.0, self.streams - self.total + total),
            self.ran,
        )


def predict(
    setting: Setting, candidate: Candidate, prices: Prices | None = None, *, last_drains: bool = True
) -> Prediction:
    """Predict the seconds of a run of a candidate over all of C, on one device.

    `last_drains` tells that the last tile of the product is among the tiles of the run. Only the steps of
    that tile run strip by strip at its end, so that its strips drain meanwhile.
    """
    problem = setting.problem
    grid = TileGrid.of(problem, candidate.tile, candidate.slots.strip)
    if 0 in grid.shape:
        return Prediction(dict.fromkeys(LANES, 0.0), 0.0, 0.0, 0.0, 0.0, 0.0)
    if not problem.cover.square:
        end = last(candidate.traversal, *grid.shape)
        clock = _Clock(prices or Prices(setting), candidate, grid, end if last_drains else None)
        clock.run()
        return clock.prediction()
    tiles = problem.cover.order(grid.shape[0], candidate.traversal.band, grid.tile.m)
    left_out = max(0, len(tiles) - MAX_LISTED)
    listed = tiles[left_out // 2 : left_out // 2 + MAX_LISTED]
    clock = _Clock(prices or Prices(setting), candidate, grid, listed[-1] if last_drains else None)
    clock.run_listed(listed)
    found = clock.prediction()
    return found.part(len(tiles) / len(listed)) if left_out else found


class TileKind(NamedTuple):
    """The properties of a tile on which its steps depend.

    `first` and `last` tell that it is the first and the last tile of the run. `found_a` and `found_b` are the
    numbers of cached panels of A and B, on the device and on the host. The strips of a `staircase` differ in
    width.
    """

    rows: int
    cols: int
    forwards: bool
    first: bool
    last: bool
    found_a: tuple[int, int]
    found_b: tuple[int, int]
    staircase: bool = False


class Whole(NamedTuple):
    """Equal steps, each of which multiplies the whole tile: how many, and how their panels are loaded.

    A step takes `prepare` seconds for its Prepare, and `multiply` seconds for all of its `calls` of Multiply.
    """

    steps: int
    loads: StepLoads
    multiply: float
    prepare: float
    calls: int


class ByStrips(NamedTuple):
    """Steps that run strip by strip. `drains` tells that each strip drains after them."""

    steps: Sequence[Step]
    drains: bool


class TileSteps(NamedTuple):
    """The strips of a tile with their numbers of rows, and its steps in groups."""

    strips: Sequence[Strip]
    heights: Sequence[int]
    groups: Sequence[Whole | ByStrips]


class TileKinds:
    """The steps of the tiles of a run: tiles at the borders of C have other extents, and so other steps."""

    def __init__(self, prices: Prices, slots: Slots, grid: TileGrid) -> None:
        self._prices, self._slots, self._grid, self._steps = prices, slots, grid, grid.steps
        setting = prices.setting
        self._cover, self._shares = setting.problem.cover, setting.problem.b.shares
        self._strip = min(slots.strip, extents(setting.problem, grid.tile)[0])
        self._known: dict[TileKind, TileSteps] = {}
        self._loads: dict[tuple[str, int, int, float, int], Load] = {}
        self._strips: dict[tuple[int, int, bool], tuple[list[Strip], list[int]]] = {}
        self._seconds: dict[tuple[int, int, bool, int], list[float]] = {}

    def __getitem__(self, kind: TileKind) -> TileSteps:
        """Return the steps of the tiles whose kind is `kind`."""
        if kind not in self._known:
            self._known[kind] = self._of(kind)
        return self._known[kind]

    def _of(self, kind: TileKind) -> TileSteps:
        slots, block = self._slots, (kind.rows, kind.cols, kind.staircase)
        strips, heights = self._strips_of(*block)
        segments = _segments(self._grid, forwards=kind.forwards)
        steps = sum(count for count, _ in segments)
        stop = steps - min(slots.last_steps if kind.last else slots.turn_steps, steps)
        head = 0 if kind.first else min(slots.turn_steps, stop)
        groups: list[Whole | ByStrips] = []
        group: list[Step] = []
        for begin, end, depth in _cut(segments, (kind.found_a[0], kind.found_b[0], head, stop)):
            loads = self._panels(kind, depth, begin, steps)
            prepare = self._prices.prepare(*block[:2], depth) if slots.planes and depth else 0.0
            if head <= begin < stop:
                calls = len(strips) if kind.staircase else 1
                groups.append(Whole(end - begin, loads, self._whole(*block, depth), prepare, calls))
                continue
            group += [(loads, self._by_strips(*block, depth), prepare)] * (end - begin)
            if end in (head, steps):
                groups.append(ByStrips(group, drains=end == steps))
                group = []
        return TileSteps(strips, heights, groups)

    def _panels(self, kind: TileKind, depth: int, step: int, steps: int) -> StepLoads:
        """Return how the panels of A and B of a step are loaded, None for those in device slots."""
        loads: list[Load | None] = []
        b = ("A", (kind.cols, depth)) if self._shares else ("B", (depth, kind.cols))
        for operand, block, (on_device, on_host) in (
            ("A", (kind.rows, depth), kind.found_a),
            (*b, kind.found_b),
        ):
            if step < on_device or not depth:
                loads.append(None)
                continue
            share = max(0, steps - max(on_device, on_host)) / (steps - on_device)
            if self._slots.streams(operand):
                share = 0.0
            # A tile on the diagonal has one panel per step. Others take slots for both roles.
            key = operand, *block, share, 2 if self._shares and kind.staircase else 1
            if key not in self._loads:
                self._loads[key] = Load(self._prices, *key)
            loads.append(self._loads[key])
        return loads

    def _strips_of(self, rows: int, n: int, staircase: bool) -> tuple[list[Strip], list[int]]:
        """Return the strips of a tile, and their numbers of rows."""
        key = rows, n, staircase
        if key not in self._strips:
            spans = [(top, min(top + self._strip, rows)) for top in range(0, rows, self._strip)]
            if staircase:
                strips = [self._strip_of(length(x), *self._widths(x, n)) for x in spans]
            else:
                mirrored = n if self._cover.mirrored else 0
                known = {height: self._strip_of(height, n, mirrored) for height in set(map(length, spans))}
                strips = [known[length(x)] for x in spans]
            self._strips[key] = strips, list(map(length, spans))
        return self._strips[key]

    def _widths(self, rows: Range, n: int) -> tuple[int, int]:
        """Return how many columns of a strip of a staircase are computed, and how many are mirrored."""
        return length(self._cover.span(rows, (0, n))), length(self._cover.mirrored_columns(rows, (0, n)))

    def _strip_of(self, height: int, n: int, mirrored: int) -> Strip:
        prices = self._prices
        reads_c = prices.setting.problem.reads_c
        old = (prices.read("C", height, n), prices.upload("C", height, n)) if reads_c else (0.0, 0.0)
        download, write = prices.download(height, n), prices.write(height, n)
        staged = prices.staged("C", height, n)
        if mirrored:
            write += prices.mirror(height, mirrored)
            if self._slots.streams("C"):
                download += prices.download(mirrored, height)
                staged += prices.staged("C", mirrored, height)
        return Strip(download, write, staged, prices.finish(height, n), *old)

    def _whole(self, rows: int, n: int, staircase: bool, depth: int) -> float:
        """Return the seconds of a step that multiplies the whole tile. A staircase runs strip by strip."""
        if not staircase:
            return self._prices.multiply(rows, rows, n, depth)
        return sum(self._by_strips(rows, n, staircase, depth))

    def _by_strips(self, rows: int, n: int, staircase: bool, depth: int) -> list[float]:
        """Return the seconds of a Multiply of each strip of a tile."""
        key = rows, n, staircase, depth
        if key not in self._seconds:
            seconds, top = list[float](), 0
            for height in self._strips_of(rows, n, staircase)[1]:
                width = self._widths((top, top + height), n)[0] if staircase else n
                width -= height // 2 if staircase and self._prices.halves else 0
                seconds.append(self._prices.multiply(height, rows, width, depth))
                top += height
            self._seconds[key] = seconds
        return self._seconds[key]


def _segments(grid: TileGrid, *, forwards: bool) -> list[tuple[int, int]]:
    """List (number of steps, depth) for the steps of a tile, in the order in which they run."""
    steps, k = grid.steps, grid.tile.k
    edge = length(grid.depth(steps - 1))
    if edge == k or steps == 1:
        return [(steps, edge)]
    return [(steps - 1, k), (1, edge)] if forwards else [(1, edge), (steps - 1, k)]


def _cut(segments: Sequence[tuple[int, int]], cuts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, depth) of the segments, divided at `cuts`.

    >>> list(_cut([(3, 64), (1, 10)], (0, 2)))
    [(0, 2, 64), (2, 3, 64), (3, 4, 10)]
    """
    begin = 0
    for count, depth in segments:
        for start, stop in pairwise(
            sorted({begin, begin + count, *(c for c in cuts if begin < c < begin + count)})
        ):
            yield start, stop, depth
        begin += count


class _Clock:
    """Runs the tiles of a candidate on streams."""

    def __init__(self, prices: Prices, candidate: Candidate, grid: TileGrid, end: Tile | None) -> None:
        self.setting, self.prices = prices.setting, prices
        self.grid, self.traversal, self.slots = grid, candidate.traversal, candidate.slots
        self.streams = Streams(prices, candidate.slots)
        self._last = end
        self._widths = [0] * self.slots.c  # widths of the latest tiles in the accumulators, next one first
        self._kinds = TileKinds(prices, candidate.slots, grid)

    def prediction(self) -> Prediction:
        """Return the prediction for the tiles that have run."""
        s, layouts = self.streams, self.setting.layouts
        lanes = {lane: s.busy.get(lane, 0.0) for lane in LANES} | {"issue": s.base + s.issued}
        if layouts.c.writing.encodes:
            lanes |= {"encode": s.busy["write"], "write": 0.0}
        # The old C and panels are loaded at the same time, on different streams, but over the same link and
        # from the same storage.
        shared = max(s.busy[lane] for lane in ("read", "decode", "h2d", "staged"))
        streams = s.base + max(s.read, s.h2d, s.compute, s.d2h, s.write)
        total = max(streams, shared)
        multiplied = s.base + s.multiplied
        tail = total - multiplied
        bubbles = multiplied - s.first_start - s.busy["compute"]
        return Prediction(lanes, s.first_start, max(0.0, bubbles), tail, total, streams, s.ran)

    def run_listed(self, tiles: Sequence[Tile]) -> None:
        """Run tiles of a square cover one by one. Skip those that repeat the tiles of the period before."""
        slots, steps = self.slots, self.grid.steps
        found = [cached_of_lines(tiles, steps, x) for x in (slots.a, 0 if slots.unified else slots.host_a)]
        given = [
            (tile, (device[0], host[0]), (device[1], host[1]) if tile[0] != tile[1] else (steps, steps))
            for tile, device, host in zip(tiles, *found, strict=True)
        ]
        kinds = [self._kind(*each) for each in given]
        band = self.traversal.band
        period = self.grid.cover.period(band, self.grid.tile.m)
        cuts = (i for i in range(period, len(kinds)) if kinds[i] != kinds[i - period])
        for start, stop in _pieces(len(kinds), cuts):
            self._repeat(start, stop, lambda number: self._tile(*given[number]), period)

    # The traversal: bands of tile rows, columns of a band, tiles of a column. If the traversal goes along
    # columns (axis 1), rows and columns change roles.

    def run(self) -> None:
        """Run all tiles."""
        shape = self.grid.shape
        down, across = shape if self.traversal.axis == 0 else shape[::-1]
        band = min(self.traversal.band, down)
        count = ceil_div(down, band)
        for start, stop in _pieces(count, (1, count - 1)):
            self._repeat(start, stop, lambda number: self._band(number, band, down, across))

    def _band(self, number: int, band: int, down: int, across: int) -> None:
        top = number * band
        height, backwards = min(band, down - top), self.traversal.turns and number % 2 == 1
        slots, axis, steps = self.slots, self.traversal.axis, self.grid.steps
        passing = [x // steps for x in ((slots.b, slots.a)[axis], (slots.host_b, slots.host_a)[axis])]

        def column(c: int) -> None:
            self._column(c, across - 1 - c if backwards else c, top, height, again=number > 0)

        for start, stop in _pieces(across, (1, across - 1, *(x + more for x in passing for more in (0, 1)))):
            self._repeat(start, stop, column)

    def _column(self, c: int, col: int, top: int, height: int, *, again: bool) -> None:
        """Run column `col`, number `c` of a band. `again` tells that an earlier band used the same panels."""
        slots, steps, axis = self.slots, self.grid.steps, self.traversal.axis
        on_device, on_host = [slots.a, slots.b], [slots.host_a, slots.host_b]
        if not self.traversal.turns and c * steps < on_device[1 - axis] < self.grid.shape[1 - axis] * steps:
            # Two slots are needed for panels that pass through.
            on_device[1 - axis] -= 2
        (on_a, on_b), (host_a, host_b) = on_device, (0, 0) if slots.unified else on_host

        def tile(r: int) -> None:
            row = top + (r if c % 2 == 0 else height - 1 - r)
            # For A and B (exchanged for axis 1): whether an earlier tile has used the panels, and how many
            # panels have been used since then.
            uses = (c > 0, r * steps), (r > 0 or again, 0 if r else c * steps)
            (used_a, between_a), (used_b, between_b) = uses if axis == 0 else uses[::-1]
            found_a = (cached(on_a, between_a, steps), cached(host_a, between_a, steps)) if used_a else (0, 0)
            found_b = (cached(on_b, between_b, steps), cached(host_b, between_b, steps)) if used_b else (0, 0)
            self._tile((row, col) if axis == 0 else (col, row), found_a, found_b)

        kept = [x[axis] // steps for x in (on_device, on_host)]
        for start, stop in _pieces(height, (1, height - 1, *(x + more for x in kept for more in (0, 1)))):
            self._repeat(start, stop, tile)

    def _repeat(self, start: int, stop: int, body: Callable[[int], None], period: int = 2) -> None:
        """Call `body` with each number from `start` up to `stop`. Extrapolate calls that repeat earlier ones.

        A repetition has `period` calls: by default two, because directions and accumulators alternate.
        """

        def once(number: int) -> None:
            for at in range(start + period * number, start + period * (number + 1)):
                body(at)

        periods = (stop - start) // period if stop - start >= 4 * period else 0
        self._skip_repeated(periods, once)
        for number in range(start + period * periods, stop):
            body(number)

    def _skip_repeated(self, count: int, body: Callable[[int], None]) -> None:
        """Call `body` with each number below `count`. Extrapolate calls that repeat earlier ones."""
        done = ran = 0  # `ran` counts the calls since calls were last skipped
        size = 1  # this many repetitions are compared with the next ones
        while count - done > 2 * size:
            states = [self.streams.state()]
            for _ in range(2):
                for number in range(done, done + size):
                    body(number)
                done += size
                states.append(self.streams.state())
            ran += 2 * size
            settled = ran < MAX_REPETITIONS
            groups = (count - done) // size
            more = _repeatable(states, size, groups) if settled else max(0, groups - 1)
            if more:
                self.streams.advance(states[1], states[2], more, together=not settled)
                done += size * more
            ran, size = (0, 1) if more else (ran, 2 * size)
        for number in range(done, count):
            body(number)

    # The steps of a tile.

    def _tile(self, tile: Tile, found_a: tuple[int, int], found_b: tuple[int, int]) -> None:
        """Run a tile. `found_a` and `found_b` count cached panels of A and B, on the device and the host."""
        s, kind = self.streams, self._kind(tile, found_a, found_b)
        s.ran += 8
        rows, n = kind.rows, kind.cols
        strips, heights, groups = self._kinds[kind]
        free = _free_strips(s.drained.pop(0), self._widths.pop(0) or n, n, len(strips))
        self._widths.append(n)
        if s.reads_c and not s.finishes:
            free = [s.load_c(number, strip, free[number]) for number, strip in enumerate(strips)]
        faults = self.prices.accumulator_faults(rows, n) if s.untouched else 0.0
        s.untouched = max(0, s.untouched - 1)
        done: list[float] = []
        for group in groups:
            if isinstance(group, Whole):
                count, loads, multiply, prepare, calls = group
                if free:
                    s.steps(1, loads, multiply + faults, prepare, max(free), calls=calls)
                    count -= 1
                if count:
                    self._steps(count, loads, multiply, prepare, calls)
            else:
                steps = _slowed(group.steps, [faults * x / rows for x in heights]) if faults else group.steps
                done = s.group(steps, free, strips, drains=group.drains)
            free, faults = [], 0.0
        if not done:
            done = [s.drain(number, strip) for number, strip in enumerate(strips)]
        s.drained.append(done)
        for ring in (s.host_c, s.finished):
            turn = len(strips) % len(ring)
            if turn:
                ring[:] = ring[turn:] + ring[:turn]

    def _kind(self, tile: Tile, found_a: tuple[int, int], found_b: tuple[int, int]) -> TileKind:
        grid, ends = self.grid, (tile == (0, 0), tile == self._last)
        rows, n = length(grid.rows(tile[0])), length(grid.cols(tile[1]))
        forward = forwards(tile, self.traversal.alternates)
        return TileKind(rows, n, forward, *ends, found_a, found_b, grid.is_staircase(tile))

    def _steps(self, count: int, loads: StepLoads, multiply: float, prepare: float, calls: int) -> None:
        """Run equal steps. If there are many, skip steps that repeat earlier ones."""
        slots, s = self.slots, self.streams
        window = min(MAX_AHEAD, max(slots.a, slots.b, slots.host_a, slots.host_b)) + 2
        if count < max(MIN_COLLAPSED, 2 * window):
            s.steps(count, loads, multiply, prepare, calls=calls)
            return
        s.steps(window, loads, multiply, prepare, calls=calls)
        self._skip_repeated(count - window, lambda _: s.steps(1, loads, multiply, prepare, calls=calls))


def _free_strips(free: Sequence[float], old_width: int, width: int, count: int) -> list[float]:
    """Return when each strip of a tile may overwrite the tile before, whose strips have drained at `free`.

    Two tiles of different widths have their strips at different offsets in the accumulator.

    >>> _free_strips([1.0, 2.0, 3.0], 100, 100, 2), _free_strips([1.0, 2.0, 3.0], 100, 200, 2)
    ([1.0, 2.0], [2.0, 3.0])
    """
    if old_width == width:
        return [*free[:count], *[-inf] * (count - len(free))]
    found = []
    for number in range(count):
        overlapping = free[number * width // old_width : ceil_div((number + 1) * width, old_width)]
        found.append(max(overlapping, default=-inf))
    return found


def _slowed(steps: Sequence[Step], seconds: Sequence[float]) -> list[Step]:
    """Return the steps of a group. The first one takes longer by these `seconds`, one number per strip."""
    (loads, per_strip, prepare), *others = steps
    return [(loads, [x + y for x, y in zip(per_strip, seconds, strict=True)], prepare), *others]


def _pieces(count: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges into which `cuts` divide the numbers below `count`.

    >>> list(_pieces(5, (1, 4, 9)))
    [(0, 1), (1, 4), (4, 5)]
    """
    return pairwise(sorted({0, count, *(cut for cut in cuts if 0 < cut < count)}))


def _repeatable(states: Sequence[ClockState], size: int, most: int) -> int:
    """Return how many groups of repetitions will grow as the last two groups did, at most `most`.

    They do until a time overtakes one that is later now, but grows more slowly. A time that is about to be
    overtaken delays nothing that grows faster than itself.

    Args:
        states: the states before, between and after the last two groups.
        size: number of repetitions in a group.
        most: number of groups that are left.
    """
    first, second, third = states
    if not len(first.times) == len(second.times) == len(third.times):
        return 0
    for x, y, z in zip(first.unused, second.unused, third.unused, strict=True):
        if x - y != y - z:
            return 0
        if y > z:
            most = min(most, z // (y - z) - 1)
    periods = second.base - first.base, third.base - second.base
    # Rounding errors of growth rates, which are seconds per repetition.
    noise = [1e-9 * periods[1] + 1e-14 * abs(time) for time in third.times]
    before = [y - x + periods[0] for x, y in zip(first.times, second.times, strict=True)]
    rates = [y - x + periods[1] for x, y in zip(second.times, third.times, strict=True)]
    if any(abs(y - x) > error for x, y, error in zip(before, rates, noise, strict=True)):
        return 0
    fastest = max(rates)
    margin = 2 * fastest / size  # within a repetition, operations shift times by less than this
    grown = list(zip(third.times, rates, noise, strict=True))
    high = max(time for time, rate, error in grown if fastest - rate <= error)
    others = {(time, rate) for time, rate, error in grown if fastest - rate > error}
    others.add((high, fastest))
    for time, rate in others:
        for other, its_rate in others:
            if its_rate > rate and other < time - margin:
                most = min(most, int((time - other - margin) / (its_rate - rate)))
    return max(0, most)


@dataclass(frozen=True)
class Share:
    """One device's share of a run of a candidate on several devices.

    The tiles of a round are spread over `down` tile rows and `across` tile columns. `setting` and `candidate`
    are those of a product of the size of the share, on one device that works alone.
    """

    down: int
    across: int
    setting: Setting
    candidate: Candidate

    @classmethod
    def of(cls, setting: Setting, candidate: Candidate) -> "Share":
        """Return the share of each device. It has at least one tile."""
        grid = TileGrid.of(setting.problem, candidate.tile)
        down, across = arrangement(setting.devices, setting.problem, grid, apart=setting.works_apart)
        rows, cols = ceil_div(grid.shape[0], down), ceil_div(grid.shape[1], across)
        slots, order = candidate.slots, candidate.traversal
        on_host = ceil_div(slots.host_a, down), ceil_div(slots.host_b, across)
        slots = replace(slots, host_a=on_host[0], host_b=on_host[1])
        order = replace(order, band=max(1, order.band // (down, across)[order.axis]))
        own = own_setting(setting, candidate.tile, rows * candidate.tile.m, cols * candidate.tile.n)
        return cls(down, across, own, replace(candidate, slots=slots, traversal=order))

    @property
    def tiles(self) -> int:
        """Number of tiles of the share; 1 if C is empty."""
        down, across = TileGrid.of(self.setting.problem, self.candidate.tile).shape
        return max(1, down * across)

    def loads(self) -> Loads:
        """Estimate the bytes of panels that one device loads if it works alone."""
        grid = TileGrid.of(self.setting.problem, self.candidate.tile)
        return estimate_loads(self.setting.problem, grid, self.candidate.slots, self.candidate.traversal)


def own_setting(setting: Setting, tile: TileShape | None, m: int, n: int) -> Setting:
    """Return the setting of a product of m x n elements on one of several devices that works alone.

    With `tile`, the chunks of a new C are those of the whole product.
    """
    problem, layouts = setting.problem, setting.layouts
    if tile is not None and layouts.c.writing.free:
        writing = replace(layouts.c.writing, free=False, chunk=setting.c_chunks(tile))
        layouts = replace(layouts, c=replace(layouts.c, writing=writing))
    own = replace(problem, m=min(problem.m, m), n=min(problem.n, n))
    return Setting(own, setting.machine, layouts, setting.budgets)


def slowed(machine: MachineModel, reading: float, devices: int) -> MachineModel:
    """Return the model of the machine for one of several devices, all of them busy with their shares.

    `reading` is the factor by which reads take longer. Other work that the devices have in common takes
    `devices` times as long. The rate of copies between pageable arrays and pinned buffers follows from the
    number of threads that copy for each device, and from the part of its panels that these threads copy.
    """
    each = 1 / devices
    factors = {"read": 1 / reading, "decode": 1 / reading, "write": each}
    factors["issue"] = devices
    if machine.shares_cores:
        return scaled(machine, factors | dict.fromkeys(("memory", "select", *machine.kernels), each))
    # The threads of a device read only a part of its panels: it copies the others from other devices.
    threads = machine.copy_threads_of(devices) / machine.copy_threads
    factors["memory"] = min(1.0, threads * devices / reading)
    # More threads read for several devices, if there are cores for them.
    io_threads = min(devices * machine.io_threads, max(machine.io_threads, machine.cores // 2))
    return replace(scaled(machine, factors), io_threads=io_threads)


def divided(machine: MachineModel, sessions: int) -> MachineModel:
    """Return the model of the machine for one of several sessions that share a GPU's kernels and its link.

    If device and host memory are the same, return `machine`: `slowed` divides the rates of common resources.
    """
    if sessions == 1 or machine.unified:
        return machine
    return scaled(machine, dict.fromkeys(("h2d", "d2h", "prepare", *machine.kernels), 1 / sessions))


def estimate_shared_loads(setting: Setting, candidate: Candidate, rounds: int) -> Loads:
    """Estimate the bytes of panels of all devices in a number of rounds, in which each computes one tile."""
    if setting.problem.cover.square:
        grid = TileGrid.of(setting.problem, candidate.tile, candidate.slots.strip)
        whole = estimate_loads(setting.problem, grid, candidate.slots, candidate.traversal)
        # The tiles of one of d devices are in more than the d-th part of the lines.
        return replace(whole, a_up=whole.a_up * sqrt(setting.devices))
    share = Share.of(setting, candidate)
    each, part, devices = share.loads(), rounds / share.tiles, setting.devices
    return Loads(
        *(part * devices * each.a_up, part * devices * each.b_up),
        *(part * share.down * each.a_read, part * share.across * each.b_read),
    )


def predict_shared(setting: Setting, candidate: Candidate, loads: Loads, rounds: int) -> Prediction:
    """Predict the seconds of a run on several devices. Lanes of devices are those of one device.

    `loads` are the panels of all devices together. `rounds` is the largest number of tiles of a device.
    """
    share = Share.of(setting, candidate)
    each, part = share.loads(), rounds / share.tiles
    alone = part * (each.a_read + each.b_read)
    reading = max(1.0, (loads.a_read + loads.b_read) / alone) if alone else 1.0
    devices = setting.devices
    machine = slowed(setting.machine, reading, devices)
    setting = replace(share.setting, machine=machine)
    # If one device began the run, one device computes the last tile. The other devices may end later.
    drains = candidate.ends >= devices
    return predict(setting, share.candidate, last_drains=drains).part(part)


def predict_triangle(setting: Setting, candidate: Candidate, share: float) -> Prediction:
    """Predict the seconds of a triangle. `share` is the part of C that the busiest device computes."""
    machine = slowed(setting.machine, 1.0, setting.devices)
    return predict(replace(setting, machine=machine, devices=1), candidate).part(share)
