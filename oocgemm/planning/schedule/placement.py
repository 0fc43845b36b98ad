"""Assign slots (buffers) to the panels of A and B, step by step, and count the panels that are loaded.

All future uses are known. The policy that chooses which panel to evict is therefore Belady's: evict the panel
whose next use is furthest away (Belady, 1966, *A study of replacement algorithms for a virtual-storage
computer*). There are two deviations:

- *Streaming.* Panels of the steps that run now, and of the step before, are evicted last: a copy into their
  slots would have to wait for these steps. With two slots, this is double buffering.
- *Spreading (on the host).* If a tile's panels do not all fit, Belady's policy would cache the panels that
  are used first. All misses would follow one another, and multiplications would wait for storage. Instead,
  the misses are spread evenly over the tile's steps, so that loads overlap multiplications.

`Schedule.loads` counts the loaded bytes exactly, one panel after the other. The estimates at the end are for
the clock and the search, which cannot count, and for runs of so many steps that counting would take too long.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import tee, zip_longest
from math import gcd, inf
from typing import NamedTuple

from oocgemm.planning.cover import Cover
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import NEVER, NextUse, Panel, Traversal, Walk, forwards, step_order
from oocgemm.planning.tiling import Tile, TileGrid, ceil_div
from oocgemm.values import dataclass

# Misses are spread over all steps of a tile except this many at its start, whose panels are evicted in
# Belady's order. With fewer, more panels would be loaded than under Belady's policy.
UNSPREAD_STEPS = 3

# Maximum heap entries per slot. A full heap is rebuilt without its stale entries, which bounds the memory.
MAX_HEAP_PER_SLOT = 8


class SlotCache:
    """Simulate a cache of `count` slots for the panels of one operand, on the device or on the host.

    Panels are acquired in program order. If `spread` is 1, the panel whose next use is furthest away is
    evicted. To spread misses over the steps of a tile, pass the number of steps per tile as `spread`.
    """

    def __init__(self, count: int, spread: int = 1) -> None:
        self.count = count
        self._steps = spread
        self._spread_steps = max(0, spread - UNSPREAD_STEPS)
        self._stride = _even_stride(self._spread_steps)
        self._keys: list[Panel | None] = [None] * count
        self._next_use = [0] * count
        # Per slot, the time of its latest use. If several panels have the same next use, the least recently
        # used one is evicted.
        self._used = [-1] * count
        self._clock = 0
        self._where: dict[Panel, int] = {}
        # The slots of the panels that are being placed together.
        self._current: list[int] = []
        # The slots of the panels that were placed together before these.
        self._latest: list[int] = []
        self._heap: list[tuple[int, int, int]] = []

    def acquire(self, key: Panel, next_use: int) -> tuple[int, bool]:
        """Return the slot for panel `key`, and whether it is cached there. `next_use` is a step number."""
        slot = self._where.get(key)
        hit = slot is not None
        if slot is None:
            slot = self._victim()
            old = self._keys[slot]
            if old is not None:
                del self._where[old]
            self._keys[slot] = key
            self._where[key] = slot
        self._used[slot] = self._clock
        self._clock += 1
        self._rank(slot, next_use)
        self._current.append(slot)
        return slot, hit

    def find(self, key: Panel) -> int | None:
        return self._where.get(key)

    def postpone(self, key: Panel, next_use: int) -> None:
        """Update the next use of a panel that is cached on the device, and is not acquired here."""
        slot = self._where.get(key)
        if slot is not None:
            self._rank(slot, next_use)

    def advance(self) -> None:
        """End a group of steps that are loaded together. Panels acquired later belong to the next group."""
        self._latest, self._current = self._current, []

    def live(self) -> list[tuple[int, Panel]]:
        """List (next use, panel) for the cached panels that are used again, soonest first."""
        pairs = zip(self._next_use, self._keys, strict=True)
        return sorted((use, key) for use, key in pairs if key is not None and use != NEVER)

    def latest(self) -> list[Panel | None]:
        """List the panels of the group of steps that ended last; None for those that are not used again."""
        # A slot that two steps have used is listed once.
        slots = list(dict.fromkeys(reversed(self._latest)))[::-1]
        return [self._keys[slot] if self._next_use[slot] != NEVER else None for slot in slots]

    def refill(self, live: Sequence[tuple[int, Panel]], latest: Sequence[Panel | None]) -> None:
        """Restore the contents that `live` and `latest` returned. Panels may get other slots than before."""
        dead = self.count - len(live)
        self._keys = [*(key for _, key in live), *((-1, slot) for slot in range(dead))]
        self._next_use = [*(self._ranked(use) for use, _ in live), *([NEVER] * dead)]
        self._where = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        self._used = list(range(-self.count, 0))
        self._clock = 0
        unused = iter(range(len(live), self.count))
        self._latest = [next(unused) if key is None else self._where[key] for key in latest]
        self._rebuild_heap()

    def _rank(self, slot: int, next_use: int) -> None:
        """Set the next use of the panel in a slot, and push the slot onto the heap."""
        self._next_use[slot] = self._ranked(next_use)
        # A heap entry becomes stale when its slot is used again. Evictions remove stale entries. Without
        # evictions, the heap would grow without bound, and is therefore rebuilt.
        if len(self._heap) >= MAX_HEAP_PER_SLOT * self.count:
            self._rebuild_heap()
        else:
            heappush(self._heap, (-self._next_use[slot], self._used[slot], slot))

    def _rebuild_heap(self) -> None:
        self._heap = [
            (-use, used, slot)
            for slot, (use, used) in enumerate(zip(self._next_use, self._used, strict=True))
        ]
        heapify(self._heap)

    def _ranked(self, next_use: int) -> int:
        """Return the rank of a next use, a step number. The cached panel with the largest rank is evicted.

        The first `UNSPREAD_STEPS` steps of a tile have their own numbers as ranks. The numbers of the other
        steps are permuted within the tile, so that evictions are spread over the tile.
        """
        tile, step = divmod(next_use, self._steps)
        if step < UNSPREAD_STEPS or next_use == NEVER:
            return next_use
        permuted = (step - UNSPREAD_STEPS) * self._stride % self._spread_steps
        return tile * self._steps + UNSPREAD_STEPS + permuted

    def _victim(self) -> int:
        if len(self._where) < self.count:
            return len(self._where)  # the first empty slot
        current, latest = self._current, self._latest
        for avoided in ((*current, *latest), (*current, *latest[-1:]), current):
            slot = self._furthest(avoided)
            if slot is not None:
                return slot
        # All slots have panels of the current group of steps. The copy into the reused slot waits until its
        # old panel has been used.
        return self._current[0]

    def _furthest(self, avoided: Sequence[int]) -> int | None:
        """Return the slot outside `avoided` whose panel has the furthest next use; None if there is none."""
        if len(set(avoided)) >= self.count:
            return None
        passed, found = [], None
        while found is None:
            entry = heappop(self._heap)
            use, used, slot = entry
            if self._used[slot] != used or -use != self._next_use[slot]:
                continue  # stale: the slot has been used, or its next use has changed, since this entry
            passed.append(entry)
            if slot not in avoided:
                found = slot
        for entry in passed[:-1]:
            heappush(self._heap, entry)
        return found


def _even_stride(steps: int) -> int:
    """Choose a stride s such that the multiples 0, s, 2 s, ... modulo `steps` are spread evenly.

    A stride near 0.618 `steps` (the golden section) spreads the first i multiples evenly for every i: the
    gaps between them have at most three lengths (Sos, 1958), which are similar. The stride is coprime to
    `steps`, so that the first `steps` multiples differ.
    """
    return next(stride for stride in range(round(0.618 * steps), 2 * steps + 2) if gcd(stride, steps) == 1)


def step_groups(order: Sequence[int], head: int, tail: int) -> Iterator[tuple[bool, Sequence[int]]]:
    """Divide the steps of a tile into groups; yield (whether the group runs strip by strip, its steps).

    Strip by strip means that all steps of the group are applied to some rows of the tile, then to the next
    rows. All panels of a group are loaded before it runs. The first `head` steps of a tile form such a group,
    and so do the last `tail` steps. If a tile has fewer steps, these groups are smaller.
    """
    stop = len(order) - min(tail, len(order))
    head = min(head, stop)
    if head:
        yield True, order[:head]
    for step in order[head:stop]:
        yield False, (step,)
    if tail and order:
        yield True, order[stop:]


class Placed(NamedTuple):
    """The device slot and host slot of a panel, and whether it must be uploaded and read before use.

    If another device has the panel, `peer` is that device and its slot. The panel is copied from there.
    """

    device_slot: int
    upload: bool
    host_slot: int
    read: bool
    peer: tuple[int, int] | None = None


# A step, and the buffers of its panels of op(A) and op(B).
Step = tuple[int, Placed, Placed]

# `Placing.loads` drops all memoised results when they describe more slots than this. A result takes 200 to
# 300 bytes per slot of the operand.
MAX_MEMOISED_PANELS = 300_000
# The unit of the work of `Placing.loads` is one placement of a panel in a slot. Comparing the contents of two
# caches takes as long as one placement per SLOTS_PER_PLACEMENT slots, and counts as that many.
SLOTS_PER_PLACEMENT = 4


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes of panels of A and B uploaded to the device (`a_up`, `b_up`) and read (`a_read`, `b_read`)."""

    a_up: float
    b_up: float
    a_read: float
    b_read: float


# Per tier, two lists of an operand's cached panels: `SlotCache.live` and `SlotCache.latest`. The tile rows
# (or columns) of the panels are relative to that of a tile. Thus the contents of the caches before two tiles
# can be equal, although the panels differ.
Contents = tuple[tuple[tuple[Panel, ...], tuple[Panel | None, ...]], ...]


# Returns the number of the next use of a panel (`NextUse`), given its line, its step and a position.
Uses = Callable[[int, int, int], int]


def pools_of(slots: Slots) -> list[tuple[tuple[int, ...], int, int]]:
    """Return per pool (axes of its panels as in `NextUse`, number of device slots, number of host slots).

    There is one pool per operand. So there is only one if an operand has both roles.
    """
    host_a, host_b = (0, 0) if slots.unified else (slots.host_a, slots.host_b)
    if not slots.b:
        return [((0, 1), slots.a, host_a)]
    return [((0,), slots.a, host_a), ((1,), slots.b, host_b)]


def host_cache(count: int, steps: int) -> "SlotCache | None":
    """Return the cache of a pool's host slots, which spreads misses over a tile; None if there are none."""
    return SlotCache(count, spread=max(1, steps)) if count else None


class Panels:
    """Simulate the caches for the panels of one operand, on the device and on the host: a pool of slots.

    Panels are placed in program order. `axes` says which tiles use them (`NextUse`): (0,) for op(A), (1,) for
    op(B), and (0, 1) if one operand has both roles. `device` is the number of device slots. `host` has the
    host slots, if there are any. If several devices share these slots, `host_uses` looks up the next use by
    any device, and only the first device `leads`: it ends groups of steps for all.

    `peers` are the numbers and the panels of the devices from which panels may be copied, the preferred one
    first. `alternates` is that of the traversal.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        steps: int,
        axes: tuple[int, ...],
        device: int,
        host: SlotCache | None,
        host_uses: Uses | None = None,
        *,
        leads: bool = True,
        alternates: bool = True,
    ) -> None:
        self.peers: Sequence[tuple[int, Panels]] = ()
        self._tiles, self._alternates = tiles, alternates
        self._steps = steps
        self._axes = axes
        self._known = -1, 0  # the latest position passed to `line`, and its tile row (or column)
        self._next_use = NextUse(tiles, steps, axes, alternates=alternates)
        self._tiers = [SlotCache(device), *([] if host is None else [host])]
        self._host, self._host_uses, self._leads = host, host_uses, leads
        self.slots = device + (0 if host is None else host.count)

    def line(self, position: int) -> int:
        if self._known[0] != position:
            self._known = position, self._tiles[position][self._axes[0]]
        return self._known[1]

    def place(self, position: int, row: int, step: int) -> Placed:
        """Choose the buffers for the panel of line `row` for `step` of the tile at `position`."""
        use = self._next_use(row, step, position)
        slot, hit = self._tiers[0].acquire((row, step), use)
        if not hit:
            for device, panels in self.peers:
                if (found := panels._tiers[0].find((row, step))) is not None:
                    return Placed(slot, upload=True, host_slot=0, read=False, peer=(device, found))
        host = self._host
        if self._host_uses is not None:
            use = self._host_uses(row, step, position)
        if hit:
            if host is not None:
                host.postpone((row, step), use)
            return Placed(slot, upload=False, host_slot=0, read=False)
        host_slot, on_host = (0, False) if host is None else host.acquire((row, step), use)
        return Placed(slot, upload=True, host_slot=host_slot, read=not on_host)

    def advance(self) -> None:
        """End a group of steps whose panels are loaded together: with several devices, a step of each."""
        for cache in self._tiers if self._leads else self._tiers[:1]:
            cache.advance()

    def contents(self, position: int) -> Contents:
        """Return the cached panels, their lines relative to that of the tile at `position`."""
        own = self.line(position)
        return tuple(
            (
                tuple((row - own, step) for _, (row, step) in cache.live()),
                tuple(None if key is None else (key[0] - own, key[1]) for key in cache.latest()),
            )
            for cache in self._tiers
        )

    def refill(self, contents: Contents, position: int) -> None:
        """Cache the panels in `contents`, which are relative to the tile at `position`, before this tile."""
        own = self.line(position)
        for cache, (live, latest) in zip(self._tiers, contents, strict=True):
            panels = [(row + own, step) for row, step in live]
            cache.refill(
                [(self._next_use(row, step, position), (row, step)) for row, step in panels],
                [None if key is None else (key[0] + own, key[1]) for key in latest],
            )

    def state(self, position: int) -> object:
        """Return a key for the tile at `position` and the caches before it.

        Tiles with equal keys load the same number of panels. The *later tile* is the next one in the same
        tile row (or column), which uses the same panels. The key consists of:

        - the cached panels, soonest next use first, with tile rows (or columns) relative to that of the tile.
        - the directions along k of the tile and of the later tile, and whether there is a later tile.
        - per cache, how many of its panels are used before the later tile.
        """
        row = self.line(position)
        later = self._next_use.tile(row, position)
        both = position, later
        directions = [t is not None and forwards(self._tiles[t], self._alternates) for t in both]
        first = NEVER if later is None else later * self._steps
        sooner = [sum(use < first for use, _ in cache.live()) for cache in self._tiers]
        return self.contents(position), *directions, later is None, *sooner


# Elements that are uploaded and read, of op(A) and of op(B).
Counts = tuple[tuple[int, int], tuple[int, int]]


def loads_of(
    groups: Iterable[tuple[Tile, Sequence[Step]]],
    depths: Sequence[int],
    height: Callable[[int], int],
    width: Callable[[int], int],
    *,
    shares: bool,
) -> Counts:
    """Count the elements of the panels of some groups of steps, each of a tile.

    With `shares`, panels of A have both roles. The panels of a tile on the diagonal then count once.
    """
    found = [0, 0], [0, 0]
    for tile, group in groups:
        roles = ((0, height), (1, width))[: 1 if shares and tile[0] == tile[1] else 2]
        for step, *panels in group:
            for role, extent in roles:
                placed, of = panels[role], found[0 if shares else role]
                elements = depths[step] * extent(tile[role])
                of[0] += elements * placed.upload
                of[1] += elements * placed.read
    (a_up, a_read), (b_up, b_read) = found
    return (a_up, a_read), (b_up, b_read)


class _TooMuchWork(Exception):  # noqa: N818 - not an error: it only ends the count
    """Counting the loads takes more placements of panels than allowed."""


class Placing:
    """Assign slots to the panels of both operands, tile by tile, on the device and on the host.

    Each operand has a pool of slots. If one operand has both roles, so does its pool: a panel that is cached
    for one role is also cached for the other.

    The order of a tile's steps, and which of them run strip by strip, depend only on the tile's coordinates
    and on `alternates` of the traversal. Both affect rounding. A resumed run therefore computes the same bits
    as an uninterrupted run.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        steps: int,
        slots: Slots,
        last: Tile | None = None,
        panels: Sequence[Panels] = (),
        ends: frozenset[Tile] = frozenset(),
        alternates: bool = True,
    ) -> None:
        self._tiles, self._alternates = tiles, alternates
        self._ends: Collection[Tile] = ends or ([last] if last is not None else list(tiles[-1:]))
        self._steps = steps
        self._turn_steps, self._last_steps = slots.turn_steps, slots.last_steps
        self._work, self._max_work = 0, inf
        pools = panels or [
            Panels(tiles, steps, axes, device, host_cache(host, steps), alternates=alternates)
            for axes, device, host in pools_of(slots)
        ]
        self._a, self._b = pools[0], pools[-1]
        self._shares = self._a is self._b  # one pool has the panels of both operands

    def groups(self, position: int) -> Iterator[tuple[bool, list[Step]]]:
        """Place the panels of the tile at `position`, and yield its steps in groups (`step_groups`).

        Call this for all tiles, in ascending order of their positions.
        """
        row, col = self._tiles[position]
        same = row == col and self._shares
        for by_strips, steps in self._step_groups(position):
            group: list[Step] = []
            for step in steps:
                a = self._a.place(position, row, step)
                group.append((step, a, a if same else self._b.place(position, col, step)))
            yield by_strips, group
            self._a.advance()
            if not self._shares:
                self._b.advance()

    def loads(
        self,
        depths: Sequence[int],
        height: Callable[[int], int],
        width: Callable[[int], int],
        max_work: float = inf,
    ) -> Counts | None:
        """Count the elements of all panels that are uploaded and read: (up, read) of op(A), and of op(B).

        `height(i)` is the number of rows in tile row i, and `width(j)` the number of columns in tile column
        j. Returns None if this takes more work than `max_work` placements of one panel in a slot.

        To save placements, results are reused for tiles with the same `Panels.state`, and for bands (groups
        of tile rows or columns) with equal keys (`Walk.bands`) that start with the same cached panels.
        """
        if self._shares:
            if 2 * len(self._tiles) * self._steps > max_work:
                return None
            groups = (
                (tile, group)
                for position, tile in enumerate(self._tiles)
                for _, group in self.groups(position)
            )
            return loads_of(groups, depths, height, width, shares=True)
        self._work, self._max_work = 0, max_work
        try:
            return self._operand_loads(self._a, depths, height), self._operand_loads(self._b, depths, width)
        except _TooMuchWork:
            return None

    def _operand_loads(
        self, panels: Panels, depths: Sequence[int], extent: Callable[[int], int]
    ) -> tuple[int, int]:
        """Count the elements of one operand's panels that are uploaded and read: (up, read)."""
        tiles: dict[object, tuple[tuple[int, int], Contents]] = {}
        known: dict[object, tuple[tuple[int, int], Contents, Contents]] = {}
        up = read = 0
        if not self._tiles:
            return up, read
        seen, passed = panels.contents(0), None
        bands, following = tee(self._bands())
        next(following)
        for (start, stop, band), (_, _, next_band) in zip_longest(bands, following, fillvalue=(0, 0, None)):
            self._add_work(1 + panels.slots // SLOTS_PER_PLACEMENT)
            key = seen, start == 0, band, next_band
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
                if len(known) * panels.slots > MAX_MEMOISED_PANELS:
                    known.clear()
                known[key] = loaded, after, seen
                passed = None
            up, read = up + loaded[0], read + loaded[1]
        return up, read

    def _bands(self) -> Iterator[tuple[int, int, object]]:
        """Return the bands of a walk over all tiles. Any other sequence counts as a single band."""
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
        """Place a tile's panels of one operand. Return two sums of depths: of uploaded and of read panels."""
        # Memoise the result only if that saves time. With large caches and few steps, comparing the contents
        # of caches takes longer than placing the tile's panels.
        memoised = panels.slots <= 4 * len(depths)
        state: object = None
        if memoised:
            tile = self._tiles[position]
            self._add_work(1 + panels.slots // SLOTS_PER_PLACEMENT)
            state = panels.state(position), position == 0, tile == (0, 0), tile in self._ends
            if state in known:
                found, after = known[state]
                panels.refill(after, position)
                return found
        self._add_work(len(depths))
        up = read = 0
        line = panels.line(position)
        for _, steps in self._step_groups(position):
            for step in steps:
                placed = panels.place(position, line, step)
                up += depths[step] if placed.upload else 0
                read += depths[step] if placed.read else 0
            panels.advance()
        if memoised:
            if len(known) * panels.slots > MAX_MEMOISED_PANELS:
                known.clear()
            known[state] = (up, read), panels.contents(position)
        return up, read

    def _add_work(self, placements: int) -> None:
        self._work += placements
        if self._work > self._max_work:
            raise _TooMuchWork

    def _step_groups(self, position: int) -> Iterator[tuple[bool, Sequence[int]]]:
        """Divide the steps of the tile at `position` into groups.

        The first tile of the product does not start with steps that run strip by strip, because no earlier
        tile has strips to download. The last tile ends with `Slots.last_steps` of these steps, other tiles
        with `Slots.turn_steps`.
        """
        tile = self._tiles[position]
        head = 0 if tile == (0, 0) else self._turn_steps
        tail = self._last_steps if tile in self._ends else self._turn_steps
        return step_groups(step_order(tile, self._steps, self._alternates), head, tail)


# Maximum number of tiles of a square cover that are examined. They are taken from the middle of a longer
# list.
MAX_TILES = 256


def cached(slots: int, between: int, steps: int) -> int:
    """Count the panels of a tile that are still in slots if `between` other panels were used since.

    The tile goes through its panels in the opposite order to the tile that used them before.

    >>> cached(10, 0, 4), cached(10, 8, 4), cached(10, 12, 4)
    (4, 2, 0)
    """
    return max(0, min(slots - between, steps))


def cached_of_lines(tiles: Sequence[Tile], steps: int, slots: int) -> list[tuple[int, int]]:
    """Estimate how many panels of the row and of the column of each tile are in slots before the tile.

    A line, which is a tile row and the column with its number, has one panel per step. The `slots` keep
    panels of the lines that are used next (Belady). Unless they have room for all panels, two slots are for
    panels that pass through. `Placing` places panel by panel, but here, lines are kept and evicted tile by
    tile.

    >>> cached_of_lines([(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)], 3, 8)
    [(0, 0), (0, 3), (3, 3), (0, 3), (3, 3), (3, 3)]
    """
    if slots < 1:
        return [(0, 0)] * len(tiles)
    later, uses = dict[int, int](), list[tuple[int, int]]()
    for position in range(len(tiles) - 1, -1, -1):
        i, j = tiles[position]
        uses.append((later.get(i, NEVER), later.get(j, NEVER)))
        later[i] = later[j] = position
    room = slots if slots >= len(later) * steps else max(0, slots - 2)
    found, kept, next_use = list[tuple[int, int]](), dict[int, int](), dict[int, int]()
    furthest, total = list[tuple[int, int]](), 0
    for tile, both in zip(tiles, reversed(uses), strict=True):
        found.append((kept.get(tile[0], 0), kept.get(tile[1], 0)))
        for line, use in dict(zip(tile, both, strict=True)).items():
            total += steps - kept.get(line, 0)
            kept[line], next_use[line] = steps, use
            heappush(furthest, (-use, line))
        while total > room:
            use, line = furthest[0]
            if next_use.get(line) != -use:
                heappop(furthest)  # the line has been used since this entry, or has been evicted
                continue
            dropped = min(kept[line], total - room)
            total -= dropped
            kept[line] -= dropped
            if not kept[line]:
                heappop(furthest)
                del kept[line], next_use[line]
    return found


def estimate_loads(problem: GemmProblem, grid: TileGrid, slots: Slots, traversal: Traversal) -> Loads:
    """Estimate the bytes that `Schedule.loads` counts for all tiles."""
    down, across = grid.shape
    if down * across == 0:
        return Loads(0, 0, 0, 0)
    a = problem.m * problem.depth * problem.itemsizes["A"]
    if problem.cover.square:
        counts = grid.steps, slots.a, 0 if slots.unified else slots.host_a
        up, read = _lines_loaded(problem.cover, down, grid.tile.m, traversal.band, *counts)
        return Loads(a * up / down, 0, a * read / down, 0)
    b = problem.depth * problem.n * problem.itemsizes["B"]
    steps = max(1.0, problem.depth / max(1, grid.tile.k))
    a_up, b_up = _times_loaded(down, across, steps, slots.a, slots.b, traversal)
    if slots.unified:
        return Loads(a * a_up, b * b_up, a * a_up, b * b_up)
    a_read, b_read = _times_loaded(down, across, steps, slots.host_a, slots.host_b, traversal)
    return Loads(a * a_up, b * b_up, a * min(a_up, a_read), b * min(b_up, b_read))


@lru_cache(1024)
def _lines_loaded(
    cover: Cover, lines: int, side: int, band: int, steps: int, device: int, host: int
) -> tuple[float, float]:
    """Estimate how many lines of panels of a square cover are uploaded, and how many are read."""
    tiles = cover.order(lines, band, side)
    left_out = max(0, len(tiles) - MAX_TILES)
    some = tiles[left_out // 2 : left_out // 2 + MAX_TILES]
    up = read = 0
    found = (cached_of_lines(some, steps, count) for count in (device, host))
    for (i, j), here, there in zip(some, *found, strict=True):
        missing = steps - here[0]
        up += missing
        read += min(missing, steps - there[0])
        if i != j:  # a tile on the diagonal has one line
            missing = steps - here[1]
            up += missing
            read += min(missing, steps - there[1])
    times = len(tiles) / len(some) / steps
    return times * up, times * read


def _times_loaded(
    down: int, across: int, steps: float, a_slots: int, b_slots: int, traversal: Traversal
) -> tuple[float, float]:
    """Estimate how many times op(A) and op(B) are loaded into a cache of `a_slots` and `b_slots` panels.

    `steps` is the number of panels along k. If the last one is thinner than the others, it counts as a
    fraction of a panel, since the panels that stay cached are full ones.
    """
    if traversal.axis == 1:
        b, a = _times_loaded(across, down, steps, b_slots, a_slots, traversal.along_rows)
        return a, b
    band = min(traversal.band, down)
    bands = ceil_div(down, band)
    # The hit rate depends on how many panels of the operand are used before the same ones are used again:
    # - A, from one tile column to the next: the panels of all tile rows of the band, band * steps.
    # - B, from one tile row to the next within a band: the panels of one tile column, `steps`.
    # - B, from one band to the next: the panels of all tile columns, across * steps.
    a = 1 + (across - 1) * (1 - _hit_rate(a_slots, band * steps))
    b = 1 + (bands - 1) * (1 - _hit_rate(b_slots, across * steps))
    return a, b + bands * (band - 1) * (1 - _hit_rate(b_slots, steps))


def _hit_rate(slots: int, panels: float) -> float:
    """Return the fraction of uses that find their panel in a cache with `slots` slots.

    The same `panels` panels are used again and again, alternately forwards and backwards. At each turn, the
    cached panels are the ones that are used next. The other panels are loaded again.
    """
    return min(1.0, slots / panels)
