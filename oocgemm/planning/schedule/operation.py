"""One operation of a schedule: a copy or a computation, and the parts of buffers that it uses."""

from enum import StrEnum
from typing import NamedTuple

from oocgemm.planning.schedule.slots import Region
from oocgemm.planning.tiling import Range, Tile


class Kind(StrEnum):
    """What an operation does: copy from or to storage, copy from or to the device, or compute."""

    READ = "read"
    UPLOAD = "upload"
    PREPARE = "prepare"
    MULTIPLY = "multiply"
    FINISH = "finish"
    DOWNLOAD = "download"
    WRITE = "write"


class Lane(StrEnum):
    """Where an operation runs. Reports have one row per lane."""

    READ = "read"
    DECODE = "decode"
    H2D = "h2d"
    PREPARE = "prepare"
    COMPUTE = "compute"
    D2H = "d2h"
    ENCODE = "encode"
    WRITE = "write"


LANES = {
    Kind.READ: Lane.READ,
    Kind.UPLOAD: Lane.H2D,
    Kind.PREPARE: Lane.PREPARE,
    Kind.MULTIPLY: Lane.COMPUTE,
    Kind.FINISH: Lane.COMPUTE,
    Kind.DOWNLOAD: Lane.D2H,
    Kind.WRITE: Lane.WRITE,
}


# Replacements of lanes in `LANES`, for Reads that decode chunks and Writes that encode chunks.
_CODED = {Lane.READ: Lane.DECODE, Lane.WRITE: Lane.ENCODE}
_LOADS = (Kind.READ, Kind.UPLOAD)
# Lanes by the kind of an operation and whether it is coded; streams by these and by whether it is of C.
_LANE = {
    (kind, coded): _CODED.get(lane, lane) if coded else lane
    for kind, lane in LANES.items()
    for coded in (False, True)
}
_STREAM = {
    (*key, of_c): f"{lane.value}-c" if of_c and key[0] in _LOADS else lane.value
    for key, lane in _LANE.items()
    for of_c in (False, True)
}


class Operation(NamedTuple):
    """One copy or one computation.

    - `kind`, `operand`: what the operation does, and with which operand.
    - `tile`, `step`: the tile of C and the step along k that it belongs to.
    - `reads`, `writes`: the regions of slots (buffers) that it reads and writes.
    - `m`, `n`, `k`: ranges of indices of the product. A copy of a panel of op(A) has m and k, one of op(B)
      has k and n, and one of C has m and n. A Prepare and a Multiply have all three.
    - `bytes`: bytes that it copies. `flops`: real floating-point operations.
    - `first`: it is the first Multiply of its tile, which applies beta.
    - `coded`: it is a Read that decodes or a Write that encodes.
    - `device`: the device of its tile, as a position in the list of the run's devices.
    - `turned`: it is a Download of the conjugate transpose of a strip. `m` and `n` are where C stores it.
    - `peer`: it is an Upload from a slot of another device.
    """

    kind: Kind
    operand: str
    tile: Tile
    step: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    m: Range = (0, 0)
    n: Range = (0, 0)
    k: Range = (0, 0)
    bytes: int = 0
    flops: int = 0
    first: bool = False
    coded: bool = False
    device: int = 0
    turned: bool = False
    peer: bool = False

    @property
    def strip(self) -> Range:
        """Range of rows of the strip of C that a Download copies."""
        return self.n if self.turned else self.m

    @property
    def lane(self) -> Lane:
        """Where the operation runs.

        A Read that decodes is in "decode" instead of "read". A Write that encodes is in "encode" instead of
        "write".
        """
        return _LANE[self.kind, self.coded]

    @property
    def stream(self) -> str:
        """The name of the queue that the operation is issued to.

        It is the name of the operation's lane. Only loads of C have queues of their own, such as "read-c", so
        that they do not queue behind loads of A and B. Both Downloads of a strip of a whole Gram matrix read
        the same elements, and may end in any order. So the second one has a queue of its own, too. So have
        copies from other devices, which may have to wait for these.
        """
        if self.peer:
            return "peer"
        return "d2h-turned" if self.turned else _STREAM[self.kind, self.coded, self.operand == "C"]

    @property
    def block(self) -> tuple[Range, Range]:
        """Ranges of rows and columns that the operation accesses in op(A), op(B) or C."""
        if self.operand == "A":
            return self.m, self.k
        return (self.k if self.operand == "B" else self.m), self.n

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.block
        return f"{self.kind} {self.operand}[{r0}:{r1}, {c0}:{c1}] of tile {self.tile}, step {self.step}"
