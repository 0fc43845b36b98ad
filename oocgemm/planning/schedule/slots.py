"""Slots: the buffers of a run on both tiers, and regions of them."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Tier(StrEnum):
    """The memory that a slot is in."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Slot:
    """One buffer of a tier. Its `operand` says what it stores:

    - A, B: a panel;
    - C: a tile (device), or a strip of one (host);
    - D: a finished strip (device);
    - P: the residues of a step's panels (device);
    - S: the checksums of a tile's strips (device). They are stored behind the tile, in the C slot of the same
      index.
    """

    tier: Tier
    operand: str
    index: int
    device: int = 0

    def __hash__(self) -> int:
        # Slots are looked up for every operation, and the generated hash would include that of an Enum, which
        # is slow.
        return hash((self.operand, self.index))

    def __str__(self) -> str:
        return f"{self.tier}:{self.operand}{self.index}"


@cache
def slot_of(tier: Tier, operand: str, index: int) -> Slot:
    """Return a slot, always the same object, so that dict lookups compare identities."""
    return Slot(tier, operand, index)


class Region(NamedTuple):
    """Elements [start, stop) of a slot, or strips [start, stop) of an S slot.

    Hazards are derived from regions.
    Regions count elements rather than rows. Tiles of different widths use the same slot in turn, and one row
    index is at different offsets in them.
    """

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Number of slots of each kind, and how tiles drain.

    `a`, `b` and `c` are device slots of panels of op(A), panels of op(B) and accumulators. `host_a`, `host_b`
    and `host_c` are the host slots. `finish` is the number of D slots and `planes` that of P slots. The five
    buffers of Liang et al. are c = 1, a = b = 2. With `unified`, device and host memory are one: there are no
    host slots, and panels are read into device slots and tiles written from them.

    A tile drains in strips of `strip` rows. The last `drain` steps of the last tile run strip by strip. Of
    the tiles before it, the last `turn` steps do; 0 means half of `drain`.
    """

    a: int = 2
    b: int = 2
    c: int = 1
    host_a: int = 2
    host_b: int = 2
    host_c: int = 2
    finish: int = 0
    strip: int = 1
    drain: int = 1
    planes: int = 0
    unified: bool = False
    turn: int = 0

    @property
    def last_steps(self) -> int:
        """Steps that run strip by strip at the end of the last tile, all with their panels in slots."""
        return min(self.drain, self.a, self.b)

    @property
    def turn_steps(self) -> int:
        """Steps that run strip by strip at the end of every other tile and at the start of the next.

        With a second accumulator it is 0: a tile drains while the next one is multiplied. With one
        accumulator, half of the drain time is hidden by the tile's last steps and half by the next tile's
        first steps.
        """
        return min(self.turn or -(-self.last_steps // 2), self.last_steps) if self.c == 1 else 0

    def count(self, tier: Tier, operand: str) -> int:
        """Return the number of slots of an operand on a tier."""
        if tier is Tier.HOST:
            return {"A": self.host_a, "B": self.host_b, "C": self.host_c}.get(operand, 0)
        counts = {"A": self.a, "B": self.b, "C": self.c, "D": self.finish, "P": self.planes, "S": self.c}
        return counts[operand]
