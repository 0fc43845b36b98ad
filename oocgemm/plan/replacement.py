"""Which slot holds which panel, when.

The future being known, the slot to give up is the one whose panel is used furthest ahead (Belady, 1966:
*A study of replacement algorithms for a virtual-storage computer*), with one restriction that streaming
needs: never the slot that the latest step uses, since the copy into it would wait for that step and nothing
would overlap. With two slots this is exactly the alternation of the five-buffer scheme.
"""

# The next use of a panel that is not used again.
NEVER = 1 << 62

# A panel: the tile row or column it belongs to, and its step along k.
Panel = tuple[int, int]
# Contents of a cache seen from a tile: for each slot the panel and its next use, relative to the tile's row or
# column and to the tile's first step (or that it is never used again); and the slot used latest.
State = tuple[tuple[tuple[int, int, int] | None, ...], int]


class SlotCache:
    """The contents of `count` slots of one operand on one tier, in program order."""

    def __init__(self, count: int) -> None:
        self._keys: list[Panel | None] = [None] * count
        self._next_use = [0] * count
        self._where: dict[Panel, int] = {}
        self._latest = -1

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
        self._next_use[slot] = next_use
        self._latest = slot
        return slot, hit

    def state(self, row: int, position: int) -> State:
        """The contents relative to a tile's row (or column) and the position of its first step."""
        slots = tuple(
            None
            if key is None
            else (0, -1, NEVER)
            if use == NEVER
            else (key[0] - row, key[1], use - position)
            for key, use in zip(self._keys, self._next_use, strict=True)
        )
        return slots, self._latest

    def restore(self, state: State, row: int, position: int) -> None:
        """Take over contents that were seen from another tile as if they had been seen from this one."""
        slots, self._latest = state
        self._keys = [
            None if s is None else (-1, slot) if s[2] == NEVER else (s[0] + row, s[1])
            for slot, s in enumerate(slots)
        ]
        self._next_use = [0 if s is None else NEVER if s[2] == NEVER else s[2] + position for s in slots]
        self._where = {key: slot for slot, key in enumerate(self._keys) if key is not None}

    def _victim(self) -> int:
        best, best_use = 0, -1
        for slot, key in enumerate(self._keys):
            if slot == self._latest and len(self._keys) > 1:
                continue
            if key is None:
                return slot
            if self._next_use[slot] > best_use:
                best, best_use = slot, self._next_use[slot]
        return best
