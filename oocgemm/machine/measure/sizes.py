"""Sizes and durations of the measurements of a calibration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and durations of the measurements of a calibration.

    Attributes:
        side: rows and columns of C in a timed product, halved until the product fits into half of the free
            memory.
        depths: the extents along k of the timed products.
        block: shape of the float64 matrix with which page faults and copies are measured.
        copies: Copies between host and GPU are measured with each of these numbers of rows of the matrix.
        seconds: duration of one measurement. Some measurements take three times as long.
        streamed: shape of the float64 matrix that is streamed from memory and from storage.
        chunk: rows and columns of the chunks in storage.
    """

    side: int
    depths: tuple[int, ...]
    block: tuple[int, int]
    copies: tuple[int, ...]
    seconds: float
    streamed: tuple[int, int] = (8192, 16384)
    chunk: int = 2048


# The default sizes for each backend. `side` is so large that products reach the full rate of the kernel. The
# matrices (256 MiB, and 1 GiB on a GPU) are larger than the processor's caches, so that copies use main
# memory. All threads together are so fast that smaller matrices would mainly show how threads start.
SIZES = {
    "cuda": Sizes(8192, (256, 512, 1024, 2048, 4096), (8192, 4096), (32, 128, 512, 2048, 8192), 0.1),
    "host": Sizes(2048, (64, 128, 256, 512, 1024), (8192, 4096), (), 0.3, (4096, 8192), 1024),
}
