"""Routes: how the blocks of an operand travel between its array and the multiplication.

`Setting.routes` has one per operand. Planning chooses it from the layout of the array, the machine and the
problem:

- `Slotted`: threads read blocks into slots in host memory, or write them from there.
- `Encoded`: the same for a C whose chunks a GPU compresses. Its slots contain frames.
- `InPlace`: the CPU multiplies blocks where they are in the caller's memory.
- `Ringed`: blocks go between the array and a GPU through a ring of pinned buffers, piece by piece.
- `Direct`: a GPU copies blocks from or to an array that the caller has pinned. Blocks with short rows still
  go through the ring.
- `Decoded`: compressed chunks go to a GPU, which decodes them.

The other modules ask a route, and never for its kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from oocgemm.planning.cost.machine import DIGEST_SECONDS_PER_BYTE, INSTANT, MachineModel
from oocgemm.planning.layout import Coding, Layout
from oocgemm.planning.tiling import Shape

# Bytes of C per second that a GPU compresses. An H200 compressed 13 to 30 GB/s during products.
ENCODING_RATE = 14e9
# The decoded bytes per second at which a GPU decodes so many bytes of an array that is so compressed.
DecodingRate = Callable[[Coding, int], float]


@dataclass(frozen=True, slots=True)
class Route:
    """How blocks of an array with this layout travel. The base class has the answers of most routes."""

    layout: Layout

    @property
    def streams(self) -> bool:
        """Whether blocks go between the array and the device without host slots."""
        return False

    @property
    def rings(self) -> bool:
        """Whether blocks, or those with short rows, go through the ring."""
        return False

    @property
    def staged_ahead(self) -> bool:
        """Whether threads of the host prepare all blocks, and work ahead if the device has slots for that."""
        return False

    @property
    def lane_scratch(self) -> int:
        """Temporary host memory that a thread of the ring needs to read a block."""
        return 0

    def read_scratch(self, panel: Shape | None) -> int:
        """Return the temporary host memory that a reader thread needs for blocks of this shape.

        If `panel` is None, the memory to read parts of lines does not count.
        """
        return 0

    def read_rate(self, machine: MachineModel, whole: Shape, block: Shape) -> float:
        """Return the bytes per second at which Reads deliver blocks of an array of shape `whole`."""
        return INSTANT

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        """Return the bytes per second at which Writes store strips of C."""
        return self.layout.write_rate(machine, strip)

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        """Return the bytes per second at which blocks cross a link of this rate.

        `decoding` is how fast the GPU decodes. The rows of a block count as if they were contiguous.
        """
        return link

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        """Return the seconds for which the host copies a block of `size` bytes to or from pinned memory."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Slotted(Route):
    """Threads read blocks into host slots, or write them. If `digests`, they compute digests of A and B."""

    digests: bool = False

    def read_scratch(self, panel: Shape | None) -> int:
        lines = 0 if panel is None else self.layout.line_scratch(panel)
        return max(self.layout.decode_bytes, lines)

    def read_rate(self, machine: MachineModel, whole: Shape, block: Shape) -> float:
        rate = self.layout.read_rate(machine, block) / self.layout.read_amplification(whole, block)
        return 1 / (1 / rate + DIGEST_SECONDS_PER_BYTE) if self.digests else rate


@dataclass(frozen=True, slots=True)
class Encoded(Slotted):
    """A GPU compresses chunks of C, and threads write the frames from host slots."""

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        return min(link, ENCODING_RATE)


@dataclass(frozen=True, slots=True)
class InPlace(Route):
    """The CPU multiplies blocks where they are, without copying them."""

    def write_rate(self, machine: MachineModel, strip: Shape) -> float:
        return INSTANT


@dataclass(frozen=True, slots=True)
class Ringed(Route):
    """Blocks go between an array in host memory or the page cache and a GPU through pinned buffers."""

    @property
    def streams(self) -> bool:
        return True

    @property
    def rings(self) -> bool:
        return True

    @property
    def staged_ahead(self) -> bool:
        return True

    @property
    def lane_scratch(self) -> int:
        return self.layout.scratch_bytes

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        return min(link, self.layout.copy_rate(machine, block))

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return size / self.layout.copy_rate(machine, block)


@dataclass(frozen=True, slots=True)
class Direct(Ringed):
    """A GPU copies blocks from or to a pinned array, and those with short rows through the ring."""

    @property
    def staged_ahead(self) -> bool:
        return False

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        if self.layout.is_direct(block):
            return link
        return Ringed.copy_rate(self, link, machine, whole, block, decoding)

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return 0.0 if self.layout.is_direct(block) else Ringed.staged(self, machine, size, block)


@dataclass(frozen=True, slots=True)
class Decoded(Route):
    """Compressed chunks are read into pinned buffers, and go to a GPU, which decodes them."""

    coding: Coding

    @property
    def streams(self) -> bool:
        return True

    @property
    def staged_ahead(self) -> bool:
        return True

    def copy_rate(
        self, link: float, machine: MachineModel, whole: Shape, block: Shape, decoding: DecodingRate
    ) -> float:
        decoded = decoding(self.coding, prod(whole) * self.layout.itemsize)
        rate = min(link / self.coding.stored_share, decoded)
        return rate / self.layout.read_amplification(whole, block)

    def staged(self, machine: MachineModel, size: float, block: Shape) -> float:
        return self.coding.stored_share * size / machine.read
