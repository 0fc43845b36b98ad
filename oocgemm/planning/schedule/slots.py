"""Slots: the buffers of a run, on both tiers, and regions of them."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Tier(StrEnum):
    """Where a slot is."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer: A and B hold a panel, C a tile (device) or a strip of one (host), D a finished strip
    (device), P the residues of a step's panels (device), S the checksums of a tile's strips, behind it in its own slot."""

    tier: Tier
    operand: str
    index: int
    device: int = 0

    def __hash__(self) -> int:
        return hash((self.operand, self.index))  # an Enum's own is slow, and slots are looked up all the time

    def __str__(self) -> str:
        return f"{self.tier}:{self.operand}{self.index}"


@cache
def slot_of(tier: Tier, operand: str, index: int) -> Slot:
    """A slot, always the same object: found in a dict without being compared."""
    return Slot(tier, operand, index)


class Region(NamedTuple):
    """Elements [start, stop) of a slot, strips of an S: what hazards are derived on. Elements, not rows: tiles of different
    widths take turns in a slot, and a row of one is not where that row of the other was."""

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slots:
    """How many slots of each kind, how many rows of a tile drain at a time, over how many steps the last tile does, and over how
    many those before it, 0 being half as many.

    The five buffers of Liang et al. are c = 1, a = b = 2. `unified` means that device and host memory are one: there
    are no host slots, panels are read straight into the device's slots and tiles written straight from them.
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
        """Of the last tile the steps that go strip by strip at its end: their panels are there at once."""
        return min(self.drain, self.a, self.b)

    @property
    def turn_steps(self) -> int:
        """Of the tiles before it the steps that do, and as many at the beginning of the next: with a second accumulator a tile
        leaves while the next is multiplied, and only the last one must hurry; with one, half will do, since the next tile's first
        steps hide the other half."""
        return min(self.turn or -(-self.last_steps // 2), self.last_steps) if self.c == 1 else 0

    def count(self, tier: Tier, operand: str) -> int:
        """Slots of an operand on a tier."""
        if tier is Tier.HOST:
            return {"A": self.host_a, "B": self.host_b, "C": self.host_c}.get(operand, 0)
        return {"A": self.a, "B": self.b, "C": self.c, "D": self.finish, "P": self.planes, "S": self.c}[
            operand
        ]
