"""Which slot holds which panel, when.

The future being known, the slot to give up is the one whose panel is used furthest ahead (Belady, 1966:
*A study of replacement algorithms for a virtual-storage computer*), with one restriction that streaming
needs: no slot of the steps that run together now, and not that of the latest step either if another can be
had, since the copy into it would wait for that step and nothing would overlap. With two slots this is exactly
the alternation of the five-buffer scheme.

Where a tile's panels do not all fit, it loads as many whichever of them are kept. Belady keeps those it uses first, and all
that are missing are loaded in a row, at the pace of the store. On the host those that are given up lie evenly over the next
tile's steps: its loads then take their time beside the multiplications.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import gcd

# The next use of a panel that is not used again.
NEVER = 1 << 62

# Steps of a tile whose panels are kept before others: with as many, no more is loaded than by Belady's choice.
FIRST = 3

# Heap entries per slot, stale ones included, before the heap is rebuilt.
MAX_HEAP_PER_SLOT = 8

# A panel: the tile row or column it belongs to, and its step along k.
Panel = tuple[int, int]


class SlotCache:
    """The contents of `count` slots of one operand on one tier, in program order. With `spread`, the steps of a tile, those
    given up of the panels that it uses next lie evenly over it."""

    def __init__(self, count: int, spread: int = 1) -> None:
        self._count = count
        self._steps = spread
        self._apart = max(0, spread - FIRST)  # steps of which those given up lie evenly
        self._stride = _even_stride(self._apart)
        self._keys: list[Panel | None] = [None] * count
        self._next_use = [0] * count
        self._used = [
            -1
        ] * count  # when a slot was used last: of equals the one left alone longest is given up
        self._clock = 0
        self._where: dict[Panel, int] = {}
        self._held: list[int] = []  # slots of the steps being placed
        self._latest: list[int] = []  # slots of the steps placed before them
        self._heap: list[tuple[int, int, int]] = []

    def acquire(self, key: Panel, next_use: int) -> tuple[int, bool]:
        """The slot for panel `key`, whose use after this one is at `next_use`, and whether it is there already."""
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
        self._held.append(slot)
        return slot, hit

    def postpone(self, key: Panel, next_use: int) -> None:
        """Panel `key`, if it is here, was not needed after all: another tier had it."""
        slot = self._where.get(key)
        if slot is not None:
            self._rank(slot, next_use)

    def advance(self) -> None:
        """The steps placed since the last call run together; others come now."""
        self._latest, self._held = self._held, []

    def live(self) -> list[tuple[int, Panel]]:
        """The panels that are used again, each with when, soonest first."""
        pairs = zip(self._next_use, self._keys, strict=True)
        return sorted((use, key) for use, key in pairs if key is not None and use != NEVER)

    def latest(self) -> list[Panel | None]:
        """The panels that the latest steps used; None for one that is not used again."""
        slots = list(dict.fromkeys(reversed(self._latest)))[::-1]  # steps may have had to share a slot
        return [self._keys[slot] if self._next_use[slot] != NEVER else None for slot in slots]

    def refill(self, live: Sequence[tuple[int, Panel]], latest: Sequence[Panel | None]) -> None:
        """Take over such contents, in slots of any order."""
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
        """Note when the panel in a slot is used next."""
        self._next_use[slot] = self._ranked(next_use)
        # Entries go stale when their slot is used again. Only evictions pop them, and without evictions they pile up.
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
        """What orders next uses: within a tile not the latest comes last, but those that come last, however many, lie evenly over
        it. A tile's first steps come first: until it has used some panels, there is none to give up for another."""
        tile, step = divmod(next_use, self._steps)
        if step < FIRST or next_use == NEVER:
            return next_use
        return tile * self._steps + FIRST + (step - FIRST) * self._stride % self._apart

    def _victim(self) -> int:
        if len(self._where) < self._count:
            return len(self._where)  # they fill in order
        for avoided in ((*self._held, *self._latest), (*self._held, *self._latest[-1:]), self._held):
            slot = self._furthest(avoided)
            if slot is not None:
                return slot
        return self._held[0]  # a single slot: every step waits for the one before

    def _furthest(self, avoided: Sequence[int]) -> int | None:
        """The slot used furthest ahead that is not to be avoided."""
        if len(set(avoided)) >= self._count:
            return None
        passed, found = [], None
        while found is None:
            entry = heappop(self._heap)
            use, used, slot = entry
            if self._used[slot] != used or -use != self._next_use[slot]:
                continue  # used again since
            passed.append(entry)
            if slot not in avoided:
                found = slot
        for entry in passed[:-1]:
            heappush(self._heap, entry)
        return found


def _even_stride(steps: int) -> int:
    """A stride through so many steps that meets each, and after any number of strides has met some evenly: near the golden
    section, of which there are gaps of three lengths at most (Sos, 1958)."""
    return next(stride for stride in range(round(0.618 * steps), 2 * steps + 2) if gcd(stride, steps) == 1)
