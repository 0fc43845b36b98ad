"""Choose which panel to evict from the slots of an operand.

All future uses are known. The policy is therefore Belady's: evict the panel whose next use is furthest away
(Belady, 1966, *A study of replacement algorithms for a virtual-storage computer*). There are two deviations:

- *Streaming.* A panel of the steps that run now is never evicted. A panel of the step before is evicted only
  if no other can be: the copy into its slot would wait for that step, and nothing would overlap. With two
  slots, this is the alternation of the five-buffer scheme.
- *Spreading (host tier).* If a tile's panels do not all fit, the tile loads the same number of panels
  whichever are kept. Belady keeps those that are used first, so that all misses follow one another and run at
  the rate of the store. Instead, the panels to evict are spread evenly over the next tile's steps, so that
  loads overlap multiplications.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import gcd

# Next use of a panel that is never used again.
NEVER = 1 << 62

# The panels of this many steps at the start of a tile keep their Belady rank. With fewer, spreading would
# load more panels in all than Belady's policy does.
UNSPREAD_STEPS = 3

# Heap entries per slot, stale ones included, before the heap is rebuilt.
MAX_HEAP_PER_SLOT = 8

# A panel of op(A) or op(B): its tile row or column, and its step along k.
Panel = tuple[int, int]


class SlotCache:
    """The contents of `count` slots of one operand on one tier, in program order.

    `spread` is the number of steps per tile over which evicted panels are spread; 1 gives Belady's policy.
    """

    def __init__(self, count: int, spread: int = 1) -> None:
        self._count = count
        self._steps = spread
        self._spread_steps = max(0, spread - UNSPREAD_STEPS)
        self._stride = _even_stride(self._spread_steps)
        self._keys: list[Panel | None] = [None] * count
        self._next_use = [0] * count
        # Time of the last use: among equal next uses, the least recently used panel is evicted.
        self._used = [-1] * count
        self._clock = 0
        self._where: dict[Panel, int] = {}
        self._current: list[int] = []  # slots of the steps being placed
        self._latest: list[int] = []  # slots of the steps placed before them
        self._heap: list[tuple[int, int, int]] = []

    def acquire(self, key: Panel, next_use: int) -> tuple[int, bool]:
        """Return the slot for panel `key` and whether it is a hit. `next_use` is the use after this one."""
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

    def postpone(self, key: Panel, next_use: int) -> None:
        """Update the next use of panel `key`, if cached: another tier served the use before."""
        slot = self._where.get(key)
        if slot is not None:
            self._rank(slot, next_use)

    def advance(self) -> None:
        """End a group of steps that run together; the next panels are those of the next group."""
        self._latest, self._current = self._current, []

    def live(self) -> list[tuple[int, Panel]]:
        """List the panels that are used again with their next use, soonest first."""
        pairs = zip(self._next_use, self._keys, strict=True)
        return sorted((use, key) for use, key in pairs if key is not None and use != NEVER)

    def latest(self) -> list[Panel | None]:
        """List the panels of the latest group of steps; None stands for a panel that is not used again."""
        slots = list(dict.fromkeys(reversed(self._latest)))[::-1]  # steps may have had to share a slot
        return [self._keys[slot] if self._next_use[slot] != NEVER else None for slot in slots]

    def refill(self, live: Sequence[tuple[int, Panel]], latest: Sequence[Panel | None]) -> None:
        """Replace the contents by what `live` and `latest` returned, in any order of slots."""
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
        """Set the next use of the panel in a slot."""
        self._next_use[slot] = self._ranked(next_use)
        # An entry becomes stale when its slot is used again. Only evictions pop stale entries.
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
        """Permute next uses within a tile, so that any number of the highest is spread over its steps.

        The first steps keep their rank: no panel of the tile can be evicted in favour of another before it is
        used.
        """
        tile, step = divmod(next_use, self._steps)
        if step < UNSPREAD_STEPS or next_use == NEVER:
            return next_use
        permuted = (step - UNSPREAD_STEPS) * self._stride % self._spread_steps
        return tile * self._steps + UNSPREAD_STEPS + permuted

    def _victim(self) -> int:
        if len(self._where) < self._count:
            return len(self._where)  # empty slots fill in order
        current, latest = self._current, self._latest
        for avoided in ((*current, *latest), (*current, *latest[-1:]), current):
            slot = self._furthest(avoided)
            if slot is not None:
                return slot
        return self._current[0]  # a single slot: every step waits for the step before

    def _furthest(self, avoided: Sequence[int]) -> int | None:
        """Return the slot with the furthest next use that is not avoided; None if all are avoided."""
        if len(set(avoided)) >= self._count:
            return None
        passed, found = [], None
        while found is None:
            entry = heappop(self._heap)
            use, used, slot = entry
            if self._used[slot] != used or -use != self._next_use[slot]:
                continue  # stale
            passed.append(entry)
            if slot not in avoided:
                found = slot
        for entry in passed[:-1]:
            heappush(self._heap, entry)
        return found


def _even_stride(steps: int) -> int:
    """Choose a stride that visits all steps, and whose first visits, however many, are spread evenly.

    It is near the golden section of `steps` and coprime to it. By the three-gap theorem (Sos, 1958), the gaps
    between visited steps have at most three lengths.
    """
    return next(stride for stride in range(round(0.618 * steps), 2 * steps + 2) if gcd(stride, steps) == 1)
