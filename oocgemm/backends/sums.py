"""The sums that a device takes during a run, with which `oocgemm.integrity` verifies C."""

from typing import Any, Protocol

from numpy.typing import NDArray

from oocgemm.planning import Operation
from oocgemm.planning.check_blocks import StripOffsets
from oocgemm.timeline.spans import BusyTime


class Checksums(Protocol):
    """The checksums that a device computes during one run.

    Attributes:
        expected: the host's digests of the next Multiply's two panels. The engine sets them before it submits
            the Multiply. The device compares them with digests of the panels that it received.
        busy: the time that the device spends on checksums.
        room: the memory layout of the checksums of one strip of C.
    """

    expected: tuple[int, int]
    busy: BusyTime
    room: StripOffsets

    def begin(self, seed: int) -> None:
        """Set the seed of the random signs that the checksums of later operations use."""


class SumsOfStrips(Protocol):
    """The sums of strips that a device takes of the accumulator before a Finish changes its elements."""

    def begin(self, seed: int) -> None:
        """Set the seed of the random signs that later sums use."""

    def take(self, operation: Operation) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the sums and the norms of the blocks of a strip, once.

        `operation` is the Finish of the strip, which has ended, or another operation on the same rows.
        """
