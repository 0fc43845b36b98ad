"""Slots: the buffers of a run on the device and on the host, and regions of slots."""

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
    """One buffer, on the device or on the host. Its `operand` says what it stores:

    - A, B: a panel;
    - C: on the device an accumulator, in which a tile of C is summed; on the host a strip (some rows) of a
      tile;
    - D: on the device, a strip to which alpha and beta have been applied;
    - P: on the device, what a Prepare makes of a step's panels: residues, or transformed panels;
    - S: on the device, the checksums of a tile's strips. They have no memory of their own: they are stored
      behind the tile, in the C slot with the same index.

    If a run uses several devices, `device` is the position of the slot's device in their list. Host slots for
    panels are shared by all devices: their `device` is 0. Every device has host slots of its own for strips.
    """

    tier: Tier
    operand: str
    index: int
    device: int = 0

    def __hash__(self) -> int:
        # Every operation looks its slots up in a dict. The generated hash would be slow, since it would
        # include the hash of an Enum.
        return hash((self.operand, self.index, self.device))

    def __str__(self) -> str:
        return f"{self.tier}:{self.operand}{self.index}" + (
            f" of device {self.device}" if self.device else ""
        )


@cache
def slot_of(tier: Tier, operand: str, index: int, device: int = 0) -> Slot:
    """Return the same `Slot` object for equal arguments. Dicts look identical objects up faster."""
    return Slot(tier, operand, index, device)


class Region(NamedTuple):
    """Elements [start, stop) of a slot (a buffer), or strips [start, stop) of a slot for checksums.

    Two operations that access overlapping regions may have to wait for one another. Regions count elements
    instead of rows, because tiles of different widths use the same slot.
    """

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers of slots (buffers) of each kind, and how tiles of C drain (are downloaded and written).

    If a run uses several devices, all numbers are per device, except that all devices share the host slots
    for panels.

    - `a`, `b`, `c`: device slots for panels of op(A), panels of op(B) and accumulators (tiles of C).
    - `host_a`, `host_b`: host slots for panels. `host_c`: host slots for strips of C. An operand without host
      slots is in host memory, and the device copies from or to its array (`streams`).
      For a Gram matrix, `b` and `host_b` are 0: the slots for panels of op(A) are used in both roles.
    - `finish`: device slots for finished strips (D). `planes`: device slots for prepared panels (P).
    - `unified`: device and host share one memory, so that there are no host slots.
    - `strip`: a tile drains in strips of this many rows.
    - `drain`: the last `drain` steps of the last tile run strip by strip, so that its first strips drain
      while later ones are multiplied.
    - `turn`: with one accumulator, `turn` steps run strip by strip at the end of every tile but the last, and
      as many at the start of every tile but the first. 0 means half of `drain`, rounded up.
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
        """Number of steps of the last tile that run strip by strip (some rows of the tile at a time).

        This is the number that `drain` requests. It is limited by `a` and by `b`, since the device must store
        the panels of all these steps at the same time.
        """
        return min(self.drain, min(self.a, self.b) if self.b else max(1, self.a // 2))

    @property
    def turn_steps(self) -> int:
        """Number of steps that run strip by strip at the end of a tile, and at the start of the next one.

        A strip is some rows of a tile. While one strip is multiplied, the strip before it is downloaded and
        written. The last tile ends with `last_steps` such steps instead.

        With two accumulators, the number is 0: the next tile is computed in the other accumulator, so that
        the whole download overlaps it.
        """
        return min(self.turn or -(-self.last_steps // 2), self.last_steps) if self.c == 1 else 0

    def streams(self, operand: str) -> bool:
        """Whether blocks of an operand go between its array and the device without host slots."""
        return not self.unified and self.count(Tier.HOST, operand) == 0

    def count(self, tier: Tier, operand: str) -> int:
        """Return the number of slots (buffers) of an operand on a tier."""
        if tier is Tier.HOST:
            return {"A": self.host_a, "B": self.host_b, "C": self.host_c}.get(operand, 0)
        counts = {"A": self.a, "B": self.b, "C": self.c, "D": self.finish, "P": self.planes, "S": self.c}
        return counts[operand]
