"""The steps of a tile as the virtual clock runs them. Tiles of the same kind share them.

Only a few kinds of tiles occur in a run: they differ in their extents, in the direction along k, and in the
numbers of panels that they find in slots.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.streams import Load, Strip
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.tiling import TileGrid, length

# How the panels of A and of B of a step are loaded: None for a panel that is in a device slot.
Loads = Sequence[Load | None]
# A step that runs strip by strip: its loads, the seconds of its Multiply per strip, and of its Prepare.
Step = tuple[Loads, Sequence[float], float]


class TileKind(NamedTuple):
    """What the steps of a tile depend on.

    `first` and `last` tell that it is the first and the last tile of the run. `found_a` and `found_b` are the
    numbers of cached panels of A and B, on the device and on the host.
    """

    rows: int
    cols: int
    forwards: bool
    first: bool
    last: bool
    found_a: tuple[int, int]
    found_b: tuple[int, int]


class Whole(NamedTuple):
    """Equal steps that multiply the whole tile: how many, and the seconds of a Multiply and of a Prepare."""

    steps: int
    loads: Loads
    multiply: float
    prepare: float


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
    """The steps of each kind of tile of a run."""

    def __init__(self, prices: Prices, slots: Slots, grid: TileGrid) -> None:
        self._prices, self._slots, self._grid, self._steps = prices, slots, grid, grid.steps
        self._strip = min(slots.strip, extents(prices.setting.problem, grid.tile)[0])
        self._known: dict[TileKind, TileSteps] = {}
        self._loads: dict[tuple[str, int, int, float], Load] = {}
        self._strips: dict[tuple[int, int], tuple[list[Strip], list[int]]] = {}
        self._seconds: dict[tuple[int, int, int], list[float]] = {}

    def __getitem__(self, kind: TileKind) -> TileSteps:
        """Return the steps of the tiles of a kind."""
        if kind not in self._known:
            self._known[kind] = self._of(kind)
        return self._known[kind]

    def _of(self, kind: TileKind) -> TileSteps:
        rows, n, slots = kind.rows, kind.cols, self._slots
        strips, heights = self._strips_of(rows, n)
        segments = _segments(self._grid, forwards=kind.forwards)
        steps = sum(count for count, _ in segments)
        stop = steps - min(slots.last_steps if kind.last else slots.turn_steps, steps)
        head = 0 if kind.first else min(slots.turn_steps, stop)
        groups: list[Whole | ByStrips] = []
        group: list[Step] = []
        for begin, end, depth in _cut(segments, (kind.found_a[0], kind.found_b[0], head, stop)):
            loads = self._panels(kind, depth, begin, steps)
            prepare = self._prices.prepare(rows, n, depth) if slots.planes and depth else 0.0
            if head <= begin < stop:
                groups.append(Whole(end - begin, loads, self._prices.multiply(rows, rows, n, depth), prepare))
                continue
            group += [(loads, self._by_strips(rows, n, depth), prepare)] * (end - begin)
            if end in (head, steps):
                groups.append(ByStrips(group, drains=end == steps))
                group = []
        return TileSteps(strips, heights, groups)

    def _panels(self, kind: TileKind, depth: int, step: int, steps: int) -> Loads:
        """Return how the panels of A and B of a step are loaded, None for those in device slots."""
        loads: list[Load | None] = []
        for operand, block, (on_device, on_host) in (
            ("A", (kind.rows, depth), kind.found_a),
            ("B", (depth, kind.cols), kind.found_b),
        ):
            if step < on_device or not depth:
                loads.append(None)
                continue
            share = max(0, steps - max(on_device, on_host)) / (steps - on_device)
            if self._slots.streams(operand):
                share = 0.0
            key = operand, *block, share
            if key not in self._loads:
                self._loads[key] = Load(self._prices, *key)
            loads.append(self._loads[key])
        return loads

    def _strips_of(self, rows: int, n: int) -> tuple[list[Strip], list[int]]:
        """Return the strips of a tile, and their numbers of rows."""
        if (rows, n) not in self._strips:
            heights = [min(self._strip, rows - top) for top in range(0, rows, self._strip)]
            known = {height: self._strip_of(height, n) for height in set(heights)}
            self._strips[rows, n] = [known[height] for height in heights], heights
        return self._strips[rows, n]

    def _strip_of(self, height: int, n: int) -> Strip:
        prices = self._prices
        reads_c = prices.setting.problem.reads_c
        old = (prices.read("C", height, n), prices.upload("C", height, n)) if reads_c else (0.0, 0.0)
        leaving = prices.download(height, n), prices.write(height, n), prices.staged("C", height, n)
        return Strip(*leaving, prices.finish(height, n), *old)

    def _by_strips(self, rows: int, n: int, depth: int) -> list[float]:
        """Return the seconds of a Multiply of each strip of a tile."""
        if (rows, n, depth) not in self._seconds:
            _, heights = self._strips_of(rows, n)
            self._seconds[rows, n, depth] = [
                self._prices.multiply(height, rows, n, depth) for height in heights
            ]
        return self._seconds[rows, n, depth]


def _segments(grid: TileGrid, *, forwards: bool) -> list[tuple[int, int]]:
    """List (number of steps, depth) of a tile in the order in which its steps run."""
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
