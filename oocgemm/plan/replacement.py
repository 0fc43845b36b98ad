"""Which slot holds which panel, when.

The future being known, the slot to give up is the one whose panel is used furthest ahead (Belady, 1966:
*A study of replacement algorithms for a virtual-storage computer*), with one restriction that streaming
needs: never the slot that the latest step uses, since the copy into it would wait for that step and nothing
would overlap. With two slots this is exactly the alternation of the five-buffer scheme.
"""

from collections.abc import Hashable


class SlotCache:
    """The contents of `count` slots of one operand on one tier, in program order."""

    def __init__(self, count: int) -> None:
        self._keys: list[Hashable | None] = [None] * count
        self._next_use = [0] * count
        self._where: dict[Hashable, int] = {}
        self._latest = -1

    def acquire(self, key: Hashable, next_use: int) -> tuple[int, bool]:
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
