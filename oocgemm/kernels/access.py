"""What a kernel's access pattern costs, counted on paper: sectors of device memory and conflicts in shared memory.

Nothing here is measured. Sectors are what threads ask for, before any cache.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

WARP, BANKS, WORD, SECTOR = 32, 32, 4, 32


@dataclass(frozen=True, slots=True)
class Access:
    """Sectors of 32 bytes loaded from and stored to device memory, and extra cycles a warp's access to shared memory
    for bank conflicts: the worst of its patterns."""

    load_sectors: int
    store_sectors: int
    bank_conflicts: int = 0


def stores(m: int, n: int, itemsize: int, *, reads: bool) -> tuple[int, int]:
    """Sectors loaded and stored for C itself."""
    sectors = m * -(-n * itemsize // SECTOR)
    return sectors if reads else 0, sectors


def tiles_sectors(m: int, n: int, k: int, itemsize: int, rows: int, cols: int) -> int:
    """Sectors of A and B where a block loads them once for a rows x cols tile of C, by consecutive threads."""
    return (m * k * -(-n // cols) + k * n * -(-m // rows)) * itemsize // SECTOR


def warps_sectors(m: int, n: int, k: int, itemsize: int, cols: int) -> int:
    """Sectors of A and B where each thread loads both for itself: a warp is `cols` threads wide, and its rows' elements
    of A lie in a sector each."""
    cols = min(cols, WARP)
    rows = WARP // cols
    warps = -(-m // rows) * -(-n // cols)
    return warps * k * (rows + -(-cols * itemsize // SECTOR))


def conflicts(itemsize: int, *patterns: Callable[[int], int]) -> int:
    """Extra cycles of the worst of some accesses of a warp, each a function from the lane to an element's place.

    >>> conflicts(4, lambda lane: lane), conflicts(4, lambda lane: 32 * lane), conflicts(4, lambda lane: 33 * lane)
    (0, 31, 0)
    >>> conflicts(8, lambda lane: lane), conflicts(8, lambda lane: lane // 16 * 16), conflicts(4, lambda lane: 0)
    (0, 0, 0)
    """
    return max(_extra_cycles(itemsize, pattern) for pattern in patterns)


def _extra_cycles(itemsize: int, pattern: Callable[[int], int]) -> int:
    # Elements of 8 bytes are served to half a warp at a time, of 16 to a quarter.
    together = WARP * WORD // max(WORD, itemsize)
    extra = 0
    for first in range(0, WARP, together):
        addresses = (pattern(lane) * itemsize for lane in range(first, first + together))
        words = {address + part for address in addresses for part in range(0, itemsize, WORD)}
        banks = Counter(word // WORD % BANKS for word in words)
        extra += max(banks.values()) - -(-len(words) // BANKS)
    return extra
