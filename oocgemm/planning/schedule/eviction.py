"""Choose which panel of A or B to evict from the slots (buffers) that cache panels.

All future uses are known. The policy is therefore Belady's: evict the panel whose next use is furthest away
(Belady, 1966, *A study of replacement algorithms for a virtual-storage computer*). There are two deviations:

- *Streaming.* Panels of the steps that run now, and of the step before, are evicted last: a copy into their
  slots would have to wait for these steps. With two slots, this is double buffering.
- *Spreading (on the host).* If a tile's panels do not all fit, Belady's policy would cache the panels that
  are used first. All misses would follow one another, and multiplications would wait for storage. Instead,
  the misses are spread evenly over the tile's steps, so that loads overlap multiplications.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import gcd

# Next use of a panel that is never used again, larger than every step number.
NEVER = 1 << 62

# Misses are spread over all steps of a tile except this many at its start, whose panels are evicted in
# Belady's order. With fewer, more panels would be loaded than under Belady's policy.
UNSPREAD_STEPS = 3

# Maximum heap entries per slot. A full heap is rebuilt without its stale entries, which bounds the memory.
MAX_HEAP_PER_SLOT = 8

# A panel of op(A) or op(B): its tile row or column, and its step along k.
Panel = tuple[int, int]


class SlotCache:
    """Simulate a cache of `count` slots for the panels of one operand, on the device or on the host.

    Panels are acquired in program order. If `spread` is 1, the panel whose next use is furthest away is
    evicted. To spread misses over the steps of a tile, pass the number of steps per tile as `spread`.
    """

    def __init__(self, count: int, spread: int = 1) -> None:
        self._count = count
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
        # The slots of the panels that are placed together now, and of those that were placed together before.
        self._current: list[int] = []
        self._latest: list[int] = []
        self._heap: list[tuple[int, int, int]] = []

    def acquire(self, key: Panel, next_use: int) -> tuple[int, bool]:
        """Return the slot for panel `key`, and whether the panel is cached there already.

        `next_use` is the step number of the use after this one.
        """
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
        """Return the slot of panel `key`, or None if it is not cached."""
        return self._where.get(key)

    def postpone(self, key: Panel, next_use: int) -> None:
        """Update the next use of panel `key` if it is cached.

        A panel that is cached on the device is not acquired on the host. This call tells the host's cache of
        the use.
        """
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
        """List the panels of the group of steps that ended last.

        A panel that is not used again is listed as None.
        """
        # A slot that two steps have used is listed once.
        slots = list(dict.fromkeys(reversed(self._latest)))[::-1]
        return [self._keys[slot] if self._next_use[slot] != NEVER else None for slot in slots]

    def refill(self, live: Sequence[tuple[int, Panel]], latest: Sequence[Panel | None]) -> None:
        """Restore the contents that `live` and `latest` returned. Panels may get other slots than before."""
        dead = self._count - len(live)
        self._keys = [*(key for _, key in live), *((-1, slot) for slot in range(dead))]
        self._next_use = [*(self._ranked(use) for use, _ in live), *([NEVER] * dead)]
        self._where = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        self._used = list(range(-self._count, 0))
        self._clock = 0
        unused = iter(range(len(live), self._count))
        self._latest = [next(unused) if key is None else self._where[key] for key in latest]
        self._rebuild_heap()

    def _rank(self, slot: int, next_use: int) -> None:
        """Set the next use of the panel in a slot, and push the slot onto the heap."""
        self._next_use[slot] = self._ranked(next_use)
        # A heap entry becomes stale when its slot is used again. Evictions remove stale entries. Without
        # evictions, the heap would grow without bound, and is therefore rebuilt.
        if len(self._heap) >= MAX_HEAP_PER_SLOT * self._count:
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
        if len(self._where) < self._count:
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
        """Return the slot outside `avoided` whose panel has the furthest next use.

        Returns None if `avoided` has all slots.
        """
        if len(set(avoided)) >= self._count:
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
