"""Predict the time of a Gram matrix with formulas: how long each lane is busy, and what does not overlap.

The virtual clock (`oocgemm.planning.cost.clock`) knows only products of two operands. The plans of a Gram
matrix differ mainly in their numbers of tiles and strips, and in the bytes that they load. The times of lanes
suffice to compare them.
"""

from functools import lru_cache

from oocgemm.planning.cost import clock
from oocgemm.planning.cost.clock import LANES, Prediction
from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cover import Cover
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots, Tier
from oocgemm.planning.schedule.placement import Loads, Placing
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, ceil_div, length

# Seconds that a strip of an array in memory adds to a run, besides the time to copy its bytes: the host has
# copied it later than the device. With this number, lower triangles of 32768 rows in float64, float32 and
# int8 were predicted to take 616, 770 and 110 ms on a host of an H100, and took 622, 763 and 111 ms.
STREAMED_STRIP = 2e-4
# Loads of panels are counted for at most this many placements of a panel in slots, which take about 30 ms.
MAX_COUNTED = 6000


def predict(
    setting: Setting, candidate: Candidate, prices: Prices | None = None, *, rough: bool = False
) -> Prediction:
    """Predict the seconds of a run of a candidate over all of C, by the clock or by formulas.

    The loads of panels are counted if that takes little time, and otherwise estimated. With `rough`, they are
    always estimated.
    """
    if not setting.problem.cover.square:
        return clock.predict(setting, candidate, prices)
    grid = TileGrid.of(setting.problem, candidate.tile, candidate.slots.strip)
    if 0 in grid.shape:
        return Prediction(dict.fromkeys(LANES, 0.0), 0.0, 0.0, 0.0, 0.0, 0.0)
    lines, steps, slots = grid.shape[0], grid.steps, candidate.slots
    counted = None
    if not rough and 2 * grid.count * steps <= MAX_COUNTED:
        counted = _counted(
            grid.cover,
            *(lines, steps, slots.a, 0 if slots.unified else slots.host_a, candidate.traversal.band),
            grid.tile.m,
        )
    return _Formulas(prices or Prices(setting), candidate, grid, counted).prediction()


@lru_cache(1024)
def _counted(
    cover: Cover, lines: int, steps: int, device: int, host: int, band: int, side: int
) -> tuple[float, float]:
    """Count the lines that are uploaded and read, if all lines and panels are of equal size."""
    tiles = cover.order(lines, band, side)
    slots = Slots(a=device, b=0, host_a=host, host_b=0)
    found = Placing(tiles, steps, slots).loads([1] * steps, lambda i: 1, lambda j: 1)
    assert found is not None
    return found[0][0] / steps, found[0][1] / steps


def estimate_line_loads(
    problem: GemmProblem,
    grid: TileGrid,
    slots: Slots,
    traversal: Traversal,
    counted: tuple[float, float] | None = None,
) -> Loads:
    """Estimate the bytes that `Schedule.loads` counts for all tiles of a Gram matrix.

    `counted` are the numbers of lines that are uploaded and read, if they are known.
    """
    lines, steps = grid.shape[0], grid.steps
    if not lines:
        return Loads(0, 0, 0, 0)
    line = problem.m * problem.depth * problem.itemsizes["A"] / lines
    if counted is not None:
        return Loads(line * counted[0], 0, line * counted[1], 0)
    shape = traversal.band, grid.tile.m
    up = line * grid.cover.lines_loaded(lines, steps, slots.a, *shape)
    if slots.unified:
        return Loads(up, 0, up, 0)
    # Both tiers cache the panels that are used next, so that their slots do not add up.
    read = line * grid.cover.lines_loaded(lines, steps, slots.host_a, *shape)
    return Loads(up, 0, min(up, read), 0)


class _Formulas:
    """The times of the lanes of one candidate."""

    def __init__(
        self, prices: Prices, candidate: Candidate, grid: TileGrid, counted: tuple[float, float] | None
    ) -> None:
        self._counted = counted
        self._prices, self._setting, self._grid = prices, prices.setting, grid
        self._slots, self._tile, self._band = candidate.slots, candidate.tile, candidate.traversal
        self._last = length(grid.rows(grid.shape[0] - 1))
        self._side = side = min(grid.tile.m, grid.m)
        # (number of tiles, rows, columns) of equal rectangular tiles, and (number, rows) of staircases.
        self._squares, self._staircases = list[tuple[int, int, int]](), list[tuple[int, int]]()
        for number, last_row, last_col, staircase in grid.cover.alike(grid.shape[0], grid.tile.m):
            rows, cols = (self._last if at_end else side for at_end in (last_row, last_col))
            if staircase:
                self._staircases.append((number, rows))
            else:
                self._squares.append((number, rows, cols))

    def prediction(self) -> Prediction:
        prices, slots, grid, setting = self._prices, self._slots, self._grid, self._setting
        problem, machine, layouts = setting.problem, setting.machine, setting.layouts
        depth = min(grid.tile.k, grid.k)
        loads = estimate_line_loads(problem, grid, slots, self._band, self._counted)
        busy = dict.fromkeys(LANES, 0.0)
        steps = problem.depth / max(1, depth)
        busy["compute"] = steps * sum(
            [count * prices.multiply(rows, rows, cols, depth) for count, rows, cols in self._squares if count]
            + [count * self._staircase(rows, depth) for count, rows in self._staircases]
        )
        if slots.planes:
            busy["prepare"] = grid.count * steps * prices.prepare(self._side, self._side, depth)
        size = max(1, prices.bytes("A", self._side, depth))
        read, uploads = loads.a_read / size, loads.a_up / size
        reading = 0.0 if slots.streams("A") else prices.read("A", self._side, depth)
        uploading = 0.0 if slots.unified else prices.upload("A", self._side, depth)
        held = min(read, slots.count(Tier.DEVICE if slots.unified else Tier.HOST, "A"))
        lane = "decode" if layouts.a.decode_bytes else "read"
        busy[lane] = read * reading + held * prices.faults("A", self._side, depth)
        busy["h2d"] = uploads * uploading
        strip, strips = min(slots.strip, self._side), self._strips()
        if not problem.sink.stores_c:
            busy["compute"] += strips * prices.finish(strip, self._side)
        streams_c = slots.streams("C")
        down, writing = prices.download(strip, self._side), prices.write(strip, self._side)
        # Off the diagonal, a whole Gram matrix is stored twice.
        twice = 2 if problem.cover.mirrored else 1
        downs = strips * twice if streams_c else strips
        out = "encode" if layouts.c.writing.encodes else "write"
        busy[out] = 0.0 if streams_c else strips * twice * writing
        busy["d2h"] = 0.0 if slots.unified else downs * down
        if problem.reads_c:
            lane = "decode" if layouts.c.decode_bytes else "read"
            busy[lane] += strips * prices.read("C", strip, self._side)
            busy["h2d"] += 0.0 if slots.unified else strips * prices.upload("C", strip, self._side)
        copied = (downs + strips * problem.reads_c) * prices.staged("C", strip, self._side)
        staged = uploads * prices.staged("A", self._side, depth) + copied
        leaving = downs if slots.unified or streams_c else 2 * strips
        busy["issue"] = machine.issue * (grid.count * grid.steps + read + uploads + leaving)
        start = reading + uploading
        step = self._diagonal(self._last, depth)
        draining = max(busy["d2h"], busy[out]) / max(strips, 1e-9)
        last = grid.elements((grid.shape[0] - 1,) * 2) / (strip * self._side)
        hidden = min(slots.last_steps, grid.steps) * step
        if machine.shares_cores:
            total = sum(busy[x] for x in ("read", "decode", "compute")) + prices.write_cpu_share * busy[out]
            tail, bubbles = draining, 0.0
        else:
            tail = max(draining, last * draining - hidden)
            # With one accumulator, the strips of the next tile wait until those of this tile have drained.
            # Those that pass through the ring have drained when the host has copied them, which is later.
            waiting = self._side / strip * draining - (0 if streams_c else 2 * slots.turn_steps * step)
            # Elements that are selected are in other slots when the next tile begins.
            tiles = grid.count - 1 if slots.c == 1 and problem.sink.stores_c else 0
            bubbles = tiles * max(0.0, waiting) + self._first_waits(max(reading, uploading), depth)
            total = start + max(*busy.values(), busy["compute"] + busy["prepare"] + bubbles, staged)
            # Of the largest elements of rows, those of a tile row are downloaded together.
            total += (grid.shape[0] if problem.sink.per_row else downs) * STREAMED_STRIP if streams_c else 0.0
        return Prediction(busy, start, bubbles, tail, total + tail, total + tail)

    def _diagonal(self, rows: int, depth: int) -> float:
        """Return the seconds of one step of a tile of `rows` rows on the diagonal."""
        if self._grid.is_staircase((0, 0)):
            return self._staircase(rows, depth)
        return self._prices.multiply(rows, rows, rows, depth)

    def _staircase(self, rows: int, depth: int) -> float:
        """Return the seconds of one step of a staircase of `rows` rows."""
        strip, prices = min(self._slots.strip, rows), self._prices
        halves = self._setting.machine.shares_cores and self._setting.problem.halves_diagonal
        return sum(
            prices.multiply(height, height, top + (ceil_div(height, 2) if halves else height), depth)
            for top in range(0, rows, strip)
            if (height := min(strip, rows - top))
        )

    def _first_waits(self, loading: float, depth: int) -> float:
        """Return the seconds for which the first tile waits for panels, which take `loading` seconds each.

        It is on the diagonal of C. A staircase needs only half of the flops of other tiles per byte.
        """
        return (self._grid.steps - 1) * max(0.0, loading - self._diagonal(self._side, depth))

    def _strips(self) -> float:
        """Return how many strips of full size have as many elements together as are computed."""
        end = self._grid.shape[0] - 1
        elements = sum(count * rows * cols for count, rows, cols in self._squares)
        corners = zip(self._staircases, ((0, 0), (end, end)), strict=False)
        elements += sum(count * self._grid.elements(tile) for (count, _), tile in corners)
        return elements / (min(self._slots.strip, self._side) * self._side)
