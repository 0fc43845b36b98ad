"""The schedule of several devices of one host.

Every device computes tiles of its own (`dealing`). In program order, the devices take turns: the device with
the fewest steps so far is next. So a panel that several devices use at about the same time is read once:

- With host slots, which all devices share, it is uploaded to each of them from there.
- Without, it is uploaded to one device. The next device copies it from there, and so on.

The waits are derived from this one program, as for one device.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heapreplace
from itertools import zip_longest
from typing import TypeVar

from oocgemm.planning.schedule.operation import Operation
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.schedule.placement import Loads, Panels, Placing, SharedHost, SlotCache, Step
from oocgemm.planning.schedule.traversal import NextUse
from oocgemm.planning.tiling import Tile, length

T = TypeVar("T")
# Not in any grid.
NO_TILE: Tile = (-1, -1)


@dataclass(frozen=True)
class SharedSchedule(Schedule):
    """The operations of a run on several devices.

    `each` are the tiles of each device. If it is empty, the tile at position p is for device p modulo
    `devices`.
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
        """Count the bytes of panels that the run loads, or return None if that takes too long.

        `max_work` limits the number of placements of one panel in slots. Each takes about 10 us.
        """
        depths = [length(self.grid.depth(p)) for p in range(self.grid.steps)]
        if 2 * len(self.tiles) * self.grid.steps > max_work:
            return None
        steps = [self._placed(device, placing) for device, placing in enumerate(self._placings())]
        a_up = b_up = a_read = b_read = 0
        for tile, group in interleaved(steps, rotating=self._streams):
            if self.problem.b.shares:
                for step, *panels in group:
                    for line, placed in dict(zip(tile, panels, strict=True)).items():
                        elements = depths[step] * length(self.grid.rows(line))
                        a_up += elements * placed.upload
                        a_read += elements * placed.read
                continue
            height, width = length(self.grid.rows(tile[0])), length(self.grid.cols(tile[1]))
            for step, a, b in group:
                a_up += height * depths[step] * a.upload
                b_up += width * depths[step] * b.upload
                a_read += height * depths[step] * a.read
                b_read += width * depths[step] * b.read
        a_size, b_size = self.problem.itemsizes["A"], self.problem.itemsizes["B"]
        return Loads(a_up * a_size, b_up * b_size, a_read * a_size, b_read * b_size)

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
        given = self.slots, self.coded, self.last, device, self.ends
        return Schedule(self.problem, self.grid, tiles, *given)

    def _placings(self) -> Iterator[Placing]:
        """Yield what places the panels of each device, with common host slots."""
        slots, steps = self.slots, self.grid.steps
        # Per operand with panels, the axes of its pool and its numbers of slots.
        pools: list[tuple[tuple[int, ...], int, int]] = [((0, 1), slots.a, slots.host_a)]
        if not self.problem.b.shares:
            pools = [((0,), slots.a, slots.host_a), ((1,), slots.b, slots.host_b)]
        in_rounds = self._in_rounds()
        uses = [NextUse(in_rounds, steps, axes, self.devices) for axes, _, _ in pools]
        on_host = [0 if slots.unified else count for _, _, count in pools]
        caches = [SlotCache(count, spread=max(1, steps)) if count else None for count in on_host]
        everywhere = list[list[Panels]]()
        for device in range(self.devices):
            panels = []
            for (axes, count, _), cache, use in zip(pools, caches, uses, strict=True):
                own = copy(use)  # it remembers its latest result
                shared = None if cache is None else SharedHost(cache, own, device, self.devices)
                panels.append(Panels(self._tiles_of(device), steps, axes, count, shared))
            everywhere.append(panels)
        self._connect(everywhere)
        last = self.last or (self.tiles[-1] if self.tiles else None)
        for device, panels in enumerate(everywhere):
            yield Placing(self._tiles_of(device), steps, slots, last, (panels[0], panels[-1]), self.ends)

    def _connect(self, everywhere: Sequence[Sequence[Panels]]) -> None:
        """Let devices copy panels that have no host slots from each other.

        A device prefers the one before it: it is the latest one to load the panel. So each device passes a
        panel on once.
        """
        for number, operand in enumerate(self.problem.operands):
            if not self.slots.streams(operand):
                continue
            for device, panels in enumerate(everywhere):
                before = [(device - back) % self.devices for back in range(1, self.devices)]
                panels[number].peers = [(other, everywhere[other][number]) for other in before]


def interleaved(streams: Sequence[Iterator[tuple[int, T]]], *, rotating: bool = False) -> Iterator[T]:
    """Merge streams of (number of steps, item). The stream with the fewest steps so far is next.

    Of several, it is the first one. If `rotating`, each is the first one in turn, from step to step.

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
