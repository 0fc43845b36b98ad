"""Follows which panel is in which slot while the tiles and their steps go by."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee, zip_longest
from math import inf
from typing import NamedTuple

from oocgemm.planning.schedule.eviction import NEVER, Panel, SlotCache
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import NextUse, Walk, forwards, step_order
from oocgemm.planning.tiling import Tile


def step_groups(
    order: Sequence[int], slots: Slots, *, first: bool, last: bool
) -> Iterator[tuple[bool, Sequence[int]]]:
    """The steps of a tile in groups that are loaded together; True marks those that go strip by strip.

    `first` and `last` tell the tiles of a product that nothing leaves before or is multiplied after.
    """
    tail = min(slots.last_steps if last else slots.turn_steps, len(order))
    stop = len(order) - tail
    head = 0 if first else min(slots.turn_steps, stop)
    if head:
        yield True, order[:head]
    for step in order[head:stop]:
        yield False, (step,)
    if tail:
        yield True, order[stop:]


class Placed(NamedTuple):
    """Where a panel is for a step, and whether it had to be loaded on the way."""

    device_slot: int
    upload: bool
    host_slot: int
    read: bool


Step = tuple[int, Placed, Placed]

# Panels in the situations that counting remembers, about 100 bytes each and each several times.
MAX_REMEMBERED = 300_000
# Slots whose contents are compared in the time of one placement.
SLOTS_PER_PLACEMENT = 4


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes of panels that a run loads: over the link to the device (`up`) and from the stores (`read`)."""

    a_up: float
    b_up: float
    a_read: float
    b_read: float


# What the slots of an operand hold, on each tier, seen from a tile: the panels that are used again, soonest first, and
# those of the latest steps, tile rows (or columns) counted from the tile's own.
Contents = tuple[tuple[tuple[Panel, ...], tuple[Panel | None, ...]], ...]


class Panels:
    """Follows the panels of one operand through its slots on both tiers."""

    def __init__(self, tiles: Sequence[Tile], steps: int, axis: int, device: int, host: int | None) -> None:
        self._tiles = tiles
        self._steps = steps
        self._axis = axis
        self._known = -1, 0  # a position and its line: steps of a tile share them
        self._next_use = NextUse(tiles, steps, axis)
        self._tiers = [SlotCache(device)]
        if host is not None:
            self._tiers.append(SlotCache(host, spread=max(1, steps)))
        self.slots = device + (host or 0)

    def line(self, position: int) -> int:
        """The tile row (or column) of tile number `position`."""
        if self._known[0] != position:
            self._known = position, self._tiles[position][self._axis]
        return self._known[1]

    def place(self, position: int, step: int) -> Placed:
        """Where the panel of a step of tile number `position` goes."""
        row = self.line(position)
        use = self._next_use(row, step, position)
        slot, hit = self._tiers[0].acquire((row, step), use)
        if hit:
            for cache in self._tiers[1:]:
                cache.postpone((row, step), use)
            return Placed(slot, upload=False, host_slot=0, read=False)
        if len(self._tiers) == 1:
            return Placed(slot, upload=True, host_slot=0, read=True)
        host_slot, on_host = self._tiers[1].acquire((row, step), use)
        return Placed(slot, upload=True, host_slot=host_slot, read=not on_host)

    def advance(self) -> None:
        """The steps placed since the last call run together; others come now."""
        for cache in self._tiers:
            cache.advance()

    def contents(self, position: int) -> Contents:
        """What the slots hold, seen from tile number `position`."""
        own = self.line(position)
        return tuple(
            (
                tuple((row - own, step) for _, (row, step) in cache.live()),
                tuple(None if key is None else (key[0] - own, key[1]) for key in cache.latest()),
            )
            for cache in self._tiers
        )

    def refill(self, contents: Contents, position: int) -> None:
        """Take over contents seen from another tile after it, as if seen from tile number `position` after it."""
        own = self.line(position)
        for cache, (live, latest) in zip(self._tiers, contents, strict=True):
            panels = [(row + own, step) for row, step in live]
            cache.refill(
                [(self._next_use(row, step, position), (row, step)) for row, step in panels],
                [None if key is None else (key[0] + own, key[1]) for key in latest],
            )

    def situation(self, position: int) -> object:
        """All that decides which panels tile number `position` loads, and what its slots hold then. Of the next uses
        only the order counts, and where among them the tile's own panels come next."""
        row = self.line(position)
        later = self._next_use.tile(row, position)
        directions = [t is not None and forwards(self._tiles[t]) for t in (position, later)]
        first = NEVER if later is None else later * self._steps
        sooner = [sum(use < first for use, _ in cache.live()) for cache in self._tiers]
        return self.contents(position), *directions, later is None, *sooner


class _TooMuchWork(Exception):  # noqa: N818 - not an error: counting stops
    """Counting loads takes more placements than allowed."""


class Placing:
    """Follows which panel is in which slot, tile by tile, on both tiers.

    How the steps of a tile are grouped hangs on its coordinates alone, as their order does: a strip may be summed in
    another way than a whole tile, and a run over what is left of the tiles shall give the same bits.
    """

    def __init__(
        self, tiles: Sequence[Tile], steps: int, slots: Slots, ramp: int = 0, last: Tile | None = None
    ) -> None:
        self._tiles = tiles
        self._last = last if last is not None or not tiles else tiles[-1]
        self._steps = steps
        self._ramp = ramp
        self._slots = slots
        host_a, host_b = (None, None) if slots.unified else (slots.host_a, slots.host_b)
        self._a = Panels(tiles, steps, 0, slots.a, host_a)
        self._b = Panels(tiles, steps, 1, slots.b, host_b)
        self._work, self._max_work = 0, inf

    def groups(self, position: int) -> Iterator[tuple[bool, list[Step]]]:
        """The steps of tile number `position` with the places of their panels, as `step_groups` gives them. Tiles
        must be asked for in order."""
        for by_strips, steps in self._step_groups(position):
            yield by_strips, [(s, self._a.place(position, s), self._b.place(position, s)) for s in steps]
            self._a.advance()
            self._b.advance()

    def loads(
        self,
        depths: Sequence[int],
        height: Callable[[int], int],
        width: Callable[[int], int],
        max_work: float = inf,
    ) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Elements of the panels of op(A), and of op(B), that are uploaded and that are read; None where counting them takes
        more than `max_work` placements. `depths` are those of the steps, `height` and `width` the extents of a row and of
        a column of tiles.

        Bands of a walk that are alike and find the slots alike load the same panels, and so do tiles that find the slots in the same
        situation, seen from where they are: each is walked through once.
        """
        self._work, self._max_work = 0, max_work
        try:
            return self._operand_loads(self._a, depths, height), self._operand_loads(self._b, depths, width)
        except _TooMuchWork:
            return None

    def _operand_loads(
        self, panels: Panels, depths: Sequence[int], extent: Callable[[int], int]
    ) -> tuple[int, int]:
        """Elements of one operand's panels that are uploaded and that are read."""
        tiles: dict[object, tuple[tuple[int, int], Contents]] = {}
        known: dict[object, tuple[tuple[int, int], Contents, Contents]] = {}
        up = read = 0
        if not self._tiles:
            return up, read
        seen, passed = panels.contents(0), None
        bands, following = tee(self._bands())
        next(following)
        for (start, stop, alike), (_, _, then) in zip_longest(bands, following, fillvalue=(0, 0, None)):
            self._add_work(1 + panels.slots // SLOTS_PER_PLACEMENT)
            key = seen, start == 0, alike, then
            if key in known:
                loaded, passed, seen = known[key]
            else:
                if passed is not None:
                    panels.refill(passed, start - 1)
                loaded = 0, 0
                for position in range(start, stop):
                    deep = self._tile_loads(panels, position, depths, tiles)
                    elements = extent(panels.line(position))
                    loaded = loaded[0] + deep[0] * elements, loaded[1] + deep[1] * elements
                after, seen = panels.contents(stop - 1), panels.contents(min(stop, len(self._tiles) - 1))
                if len(known) * panels.slots > MAX_REMEMBERED:
                    known.clear()
                known[key] = loaded, after, seen
                passed = None
            up, read = up + loaded[0], read + loaded[1]
        return up, read

    def _bands(self) -> Iterator[tuple[int, int, object]]:
        """The bands of a walk over all tiles (`Walk.bands`). Any other sequence of tiles is a single one."""
        if isinstance(self._tiles, Walk) and len(self._tiles) == self._tiles.whole:
            return self._tiles.bands()
        return iter([(0, len(self._tiles), "all")])

    def _tile_loads(
        self,
        panels: Panels,
        position: int,
        depths: Sequence[int],
        known: dict[object, tuple[tuple[int, int], Contents]],
    ) -> tuple[int, int]:
        # Many slots take longer to look at than a few steps to walk through.
        memoised = panels.slots <= 4 * len(depths)
        situation: object = None
        if memoised:
            tile = self._tiles[position]
            self._add_work(1 + panels.slots // SLOTS_PER_PLACEMENT)
            situation = panels.situation(position), position == 0, tile == (0, 0), tile == self._last
            if situation in known:
                found, after = known[situation]
                panels.refill(after, position)
                return found
        self._add_work(len(depths))
        up = read = 0
        for _, steps in self._step_groups(position):
            for step in steps:
                placed = panels.place(position, step)
                up += depths[step] if placed.upload else 0
                read += depths[step] if placed.read else 0
            panels.advance()
        if memoised:
            if len(known) * panels.slots > MAX_REMEMBERED:
                known.clear()
            known[situation] = (up, read), panels.contents(position)
        return up, read

    def _add_work(self, placements: int) -> None:
        self._work += placements
        if self._work > self._max_work:
            raise _TooMuchWork

    def _step_groups(self, position: int) -> Iterator[tuple[bool, Sequence[int]]]:
        tile = self._tiles[position]
        order = step_order(tile, self._steps, self._ramp)
        return step_groups(order, self._slots, first=tile == (0, 0), last=tile == self._last)
