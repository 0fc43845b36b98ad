"""Deal the tiles of C to several devices, and schedule them.

The devices work on one tile each at the same time: a *round*. Tiles of a round that are in one tile row use
the same panels of op(A), and those in one tile column the same panels of op(B). Such a panel is read once for
all of them (`SharedSchedule`), provided that they use it at about the same time. So a round takes tiles that
have the same direction along k, which is that of the sum of their coordinates: even or odd. With four
devices, for example, the first round takes every other tile of two tile rows and of two tile columns:

    0 . 1 .
    . . . .
    2 . 3 .

The next round takes the tiles to the right of these. So a device keeps its panels of op(A) at the turn.

Sessions on the CPU share no panels. They work *apart*: each takes a rectangle of C, so that it loads as few
panels as possible.

If the sink keeps numbers of each row of C (`GemmProblem.keeps_rows`), a device takes whole tile rows
(`deal_rows`). Then this device alone adds the contributions of the tiles of a row, in an order that does not
depend on the other devices.

*The schedule.* In program order, the devices take turns: the device with the fewest steps so far is next. So
a panel that several devices use at about the same time is read once:

- With host slots, which all devices share, the panel is uploaded from its host slot to each device.
- Without host slots, the panel is uploaded to one device. The next device copies it from that one, and so on.

The waits are derived from this one program, as for one device.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from heapq import heappop, heapreplace
from itertools import islice, pairwise, product, zip_longest
from typing import TypeVar

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Operation
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.schedule.placement import Loads, Panels, Placing, Step, host_cache, loads_of, pools_of
from oocgemm.planning.schedule.traversal import NextUse, Traversal, forwards, walk
from oocgemm.planning.tiling import Tile, TileGrid, ceil_div, length
from oocgemm.values import dataclass

# `arrangement` compares the panels that are loaded in this many rounds.
COMPARED_ROUNDS = 64


def deal(
    devices: int,
    shape: tuple[int, int],
    traversal: Traversal,
    arranged: tuple[int, int],
    tiles: Container[Tile] | None = None,
    *,
    apart: bool = False,
) -> list[Tile]:
    """Order the tiles of a grid for several devices: every tile once, or every one of `tiles`.

    The tile at position p is for device p modulo `devices`, in round p // `devices`. Only the last round may
    have fewer tiles than there are devices. The bands of the traversal have the width that they have on one
    device. `arranged` says over how many tile rows and columns the tiles of a round are spread
    (`arrangement`); if devices share no panels (`apart`), it counts rectangles down and across.

    >>> deal(2, (3, 2), Traversal(), (2, 1))
    [(0, 0), (2, 0), (0, 1), (2, 1), (1, 1), (1, 0)]
    >>> deal(2, (4, 2), Traversal(), (2, 1), apart=True)
    [(0, 0), (2, 0), (0, 1), (2, 1), (1, 1), (3, 1), (1, 0), (3, 0)]
    """
    order = (_rectangles if apart else _blocks)(shape, traversal, arranged)
    return deal_in_order(devices, order, tiles, apart=apart)


def deal_in_order(
    devices: int, order: Iterable[Tile], tiles: Container[Tile] | None = None, *, apart: bool = False
) -> list[Tile]:
    """Deal the tiles of `order`, or those that are in `tiles`, in this order. `deal` describes the result.

    >>> deal_in_order(2, [(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)])
    [(0, 0), (1, 1), (1, 0), (2, 1), (2, 0), (2, 2)]
    """
    found = order if tiles is None else (tile for tile in order if tile in tiles)
    return list((_pieces if apart else _rounds)(devices, found))


def deal_rows(
    devices: int, shape: tuple[int, int], traversal: Traversal, tiles: Container[Tile] | None = None
) -> list[list[Tile]]:
    """Deal whole tile rows of a grid. Return the tiles of each device in order: all, or those of `tiles`.

    The devices visit the columns in the same order. The tile rows of a round have the same direction along k,
    as long as there are two tile rows per device.

    >>> deal_rows(2, (3, 2), Traversal(turns=False))
    [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1)]]
    >>> [sorted({i for i, _ in own}) for own in deal_rows(2, (7, 1), Traversal())]
    [[0, 1, 4, 6], [2, 3, 5]]
    """
    whole = shape[0] // (2 * devices) * 2 * devices
    lines = [*_lines(whole, devices)]
    lines += [range(top, min(top + devices, shape[0])) for top in range(whole, shape[0], devices)]
    found: list[list[Tile]] = [[] for _ in range(devices)]
    band = max(1, traversal.band // (devices, 1)[traversal.axis])
    for i, j in walk(replace(traversal, band=band), len(lines), shape[1]):
        for own, row in zip(found, lines[i], strict=False):
            if tiles is None or (row, j) in tiles:
                own.append((row, j))
    return found


def arrangement(
    devices: int, problem: GemmProblem, grid: TileGrid, *, apart: bool = False
) -> tuple[int, int]:
    """Choose over how many tile rows and tile columns the tiles of a round are spread.

    The product of both numbers is `devices`. They are chosen so that the panels of a round have as few bytes
    as possible. They depend on the whole grid, not on the tiles that are left to compute. If the devices work
    `apart`, the numbers are those of rectangles, and the panels are those of a whole rectangle.
    """
    if problem.keeps_rows:
        return devices, 1
    if 0 in grid.shape:
        return 1, devices
    a, b = grid.tile.m * problem.itemsizes["A"], grid.tile.n * problem.itemsizes["B"]
    rows, cols = grid.shape

    def loaded(arranged: tuple[int, int]) -> tuple[int, float]:
        if apart:
            return a * ceil_div(rows, arranged[0]) + b * ceil_div(cols, arranged[1]), 0.0
        rounds = _rounds(devices, _blocks(grid.shape, Traversal(), arranged))
        total = 0
        for _ in range(COMPARED_ROUNDS):
            tiles = list(islice(rounds, devices))
            total += a * len({i for i, _ in tiles}) + b * len({j for _, j in tiles})
        # Among arrangements that load equally much, prefer one for which the grid has enough tile rows and
        # columns.
        return total, max(wanted / there for wanted, there in zip(arranged, grid.shape, strict=True))

    return min(((down, devices // down) for down in range(1, devices + 1) if devices % down == 0), key=loaded)


def _rounds(devices: int, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Order tiles so that each round has tiles of one direction along k, as long as there are enough."""
    waiting = list[Tile](), list[Tile]()
    for tile in tiles:
        alike = waiting[forwards(tile)]
        alike.append(tile)
        if len(alike) == devices:
            yield from alike
            alike.clear()
    yield from (*waiting[True], *waiting[False])


def _pieces(devices: int, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Cut a sequence of tiles into one piece per device. Yield the first tile of each, then the second."""
    every = list(tiles)
    cuts = [ceil_div(number * len(every), devices) for number in range(devices + 1)]
    pieces = sorted((every[start:stop] for start, stop in pairwise(cuts)), key=len, reverse=True)
    for found in zip_longest(*pieces):
        yield from (tile for tile in found if tile is not None)


def _rectangles(shape: tuple[int, int], traversal: Traversal, arranged: tuple[int, int]) -> Iterator[Tile]:
    """Yield the tiles of a grid rectangle by rectangle."""
    rows, cols = (
        list(pairwise(number * count // parts for number in range(parts + 1)))
        for count, parts in zip(shape, arranged, strict=True)
    )
    order = replace(traversal, band=max(1, traversal.band // arranged[traversal.axis]))
    for (top, bottom), (left, right) in product(rows, cols):
        for i, j in walk(order, bottom - top, right - left):
            yield top + i, left + j


def _blocks(shape: tuple[int, int], traversal: Traversal, arranged: tuple[int, int]) -> Iterator[Tile]:
    """Yield the tiles of a grid block by block. The tiles of a block have the same direction along k."""
    rows, cols = (_lines(*pair) for pair in zip(shape, arranged, strict=True))
    band = max(1, traversal.band // arranged[traversal.axis])
    for i, j in walk(replace(traversal, band=band), len(rows), len(cols)):
        yield from product(rows[i], cols[j])


def _lines(count: int, together: int) -> Sequence[Sequence[int]]:
    """Divide tile rows (or columns) into groups of `together` rows. No two rows of a group are neighbours.

    >>> [list(group) for group in _lines(7, 2)]
    [[0, 2], [1, 3], [4, 6], [5]]
    """
    if together == 1:
        return [range(i, i + 1) for i in range(count)]
    width = 2 * together
    found = (
        range(first, min(start + width, count), 2)
        for start in range(0, count, width)
        for first in (start, start + 1)
    )
    return [group for group in found if group]


T = TypeVar("T")
# A tile that is in no grid.
NO_TILE: Tile = (-1, -1)


@dataclass(frozen=True)
class SharedSchedule(Schedule):
    """The operations of a run on several devices. `each` are the tiles of each device.

    If `each` is empty, the tile at position p is for device p modulo `devices`.
    """

    devices: int = 2
    each: tuple[Sequence[Tile], ...] = ()

    def __iter__(self) -> Iterator[Operation]:
        batches = [
            self._of_device(device).batches(placing) for device, placing in enumerate(self._placings())
        ]
        for operations in interleaved(batches, rotating=self._streams):
            yield from operations

    def loads_within(self, max_work: float) -> Loads | None:
        if 2 * len(self.tiles) * self.grid.steps > max_work:
            return None
        steps = [self._placed(device, placing) for device, placing in enumerate(self._placings())]
        groups = interleaved(steps, rotating=self._streams)
        return self._in_bytes(loads_of(groups, *self._extents, shares=self.problem.b.shares))

    def _placed(self, device: int, placing: Placing) -> Iterator[tuple[int, tuple[Tile, list[Step]]]]:
        for position, tile in enumerate(self._tiles_of(device)):
            for _, group in placing.groups(position):
                yield len(group), (tile, group)

    @property
    def _streams(self) -> bool:
        """Whether no panels have host slots."""
        return all(map(self.slots.streams, self.problem.operands))

    def _tiles_of(self, device: int) -> Sequence[Tile]:
        return self.each[device] if self.each else self.tiles[device :: self.devices]

    @property
    def rounds(self) -> int:
        """The largest number of tiles of a device."""
        return max(len(self._tiles_of(device)) for device in range(self.devices))

    @property
    def largest(self) -> int:
        """The largest number of elements of C that a device computes."""
        return max(sum(map(self.grid.elements, self._tiles_of(device))) for device in range(self.devices))

    @property
    def elements_stored(self) -> int:
        """Elements that the devices return: each returns those of the rows that it has tiles of."""
        if self.problem.keeps_rows or not self.problem.sink.per_row:
            return super().elements_stored
        lines = ({line for tile in self._tiles_of(device) for line in tile} for device in range(self.devices))
        rows = sum(length(self.grid.rows(line)) for own in lines for line in own)
        return self.problem.sink.count(rows, self.elements)

    def _in_rounds(self) -> Sequence[Tile]:
        """Return the tiles in rounds of one tile per device. `NO_TILE` stands for those that are missing."""
        if not self.each:
            return self.tiles
        return [tile for found in zip_longest(*self.each, fillvalue=NO_TILE) for tile in found]

    def _of_device(self, device: int) -> Schedule:
        tiles = self._tiles_of(device)
        given = self.slots, self.coded, self.last, device, self.ends, self.alternates
        return Schedule(self.problem, self.grid, tiles, *given)

    def _placings(self) -> Iterator[Placing]:
        """Yield the `Placing` of each device. The devices share the host slots."""
        slots, steps = self.slots, self.grid.steps
        pools, in_rounds = pools_of(slots), self._in_rounds()
        uses = [NextUse(in_rounds, steps, axes, self.devices, self.alternates) for axes, _, _ in pools]
        caches = [host_cache(count, steps) for _, _, count in pools]
        everywhere = list[list[Panels]]()
        for device in range(self.devices):
            panels = []
            for (axes, count, _), cache, use in zip(pools, caches, uses, strict=True):
                # A copy per device, because a `NextUse` remembers its latest result.
                host_uses = None if cache is None else partial(self._use, copy(use), device)
                tiles = self._tiles_of(device)
                given = tiles, steps, axes, count, cache, host_uses
                panels.append(Panels(*given, leads=device == 0, alternates=self.alternates))
            everywhere.append(panels)
        self._connect(everywhere)
        last = self.last or (self.tiles[-1] if self.tiles else None)
        for device, panels in enumerate(everywhere):
            tiles = self._tiles_of(device)
            yield Placing(tiles, steps, slots, last, panels, self.ends, self.alternates)

    def _use(self, uses: NextUse, device: int, line: int, step: int, position: int) -> int:
        """Return the number of the next use of a panel by any device, after a position of one device."""
        return uses(line, step, position * self.devices + device)

    def _connect(self, everywhere: Sequence[Sequence[Panels]]) -> None:
        """Let devices copy panels that have no host slots from each other.

        A device prefers to copy from the device before it, which is the latest one to load the panel. So each
        device passes a panel on once.
        """
        for number, operand in enumerate(self.problem.operands):
            if not self.slots.streams(operand):
                continue
            for device, panels in enumerate(everywhere):
                before = [(device - back) % self.devices for back in range(1, self.devices)]
                panels[number].peers = [(other, everywhere[other][number]) for other in before]


def interleaved(streams: Sequence[Iterator[tuple[int, T]]], *, rotating: bool = False) -> Iterator[T]:
    """Merge streams of (number of steps, item). The stream with the fewest steps so far is next.

    If several streams have the fewest steps, the first of them is next. If `rotating`, each stream is the
    first one in turn, from step to step.

    >>> streams = lambda: [iter([(1, "a"), (2, "b"), (1, "c")]), iter([(3, "x"), (1, "y")])]
    >>> list(interleaved(streams())), list(interleaved(streams(), rotating=True))
    (['a', 'x', 'b', 'c', 'y'], ['a', 'x', 'b', 'y', 'c'])
    """
    count = len(streams)
    turns = [(0, number, number) for number in range(count)]
    while turns:
        done, _, number = turns[0]
        found = next(streams[number], None)
        if found is None:
            heappop(turns)
            continue
        done += found[0]
        heapreplace(turns, (done, (number - done) % count if rotating else number, number))
        yield found[1]
