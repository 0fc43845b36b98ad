"""Count the cost of a kernel's access pattern: sectors of device memory and bank conflicts in shared memory.

Nothing here is measured. A sector is counted each time a warp requests it, before any cache.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

WARP, BANKS, WORD, SECTOR = 32, 32, 4, 32


@dataclass(frozen=True, slots=True)
class Access:
    """Sectors of 32 bytes loaded from and stored to device memory, and cycles lost to bank conflicts.

    `bank_conflicts` are the extra cycles per shared-memory access of a warp, for its worst access pattern.
    """

    load_sectors: int
    store_sectors: int
    bank_conflicts: int = 0


def stores(m: int, n: int, itemsize: int, *, reads: bool) -> tuple[int, int]:
    """Return the sectors loaded and stored for C itself. C is loaded only if the kernel `reads` it."""
    sectors = m * -(-n * itemsize // SECTOR)
    return sectors if reads else 0, sectors


def tiles_sectors(m: int, n: int, k: int, itemsize: int, rows: int, cols: int) -> int:
    """Return the sectors of A and B if each block loads them once per rows x cols tile of C, with coalesced
    accesses."""
    return (m * k * -(-n // cols) + k * n * -(-m // rows)) * itemsize // SECTOR


def warps_sectors(m: int, n: int, k: int, itemsize: int, cols: int) -> int:
    """Return the sectors of A and B if each thread loads both for itself.

    A warp covers `cols` columns of C. Its elements of A are in one sector per row.
    """
    cols = min(cols, WARP)
    rows = WARP // cols
    warps = -(-m // rows) * -(-n // cols)
    return warps * k * (rows + -(-cols * itemsize // SECTOR))


def conflicts(itemsize: int, *patterns: Callable[[int], int]) -> int:
    """Return the extra cycles of the worst of some accesses of a warp, each a function from lane to element
    index.

    >>> conflicts(4, lambda lane: lane), conflicts(4, lambda lane: 32 * lane), conflicts(4, lambda lane: 33 *
    lane) (0, 31, 0)
    >>> conflicts(8, lambda lane: lane), conflicts(8, lambda lane: lane // 16 * 16), conflicts(4, lambda lane:
    0) (0, 0, 0)
    """
    return max(_extra_cycles(itemsize, pattern) for pattern in patterns)


def _extra_cycles(itemsize: int, pattern: Callable[[int], int]) -> int:
    # Elements of 8 bytes are served to half a warp at a time, elements of 16 bytes to a quarter.
    together = WARP * WORD // max(WORD, itemsize)
    extra = 0
    for first in range(0, WARP, together):
        addresses = (pattern(lane) * itemsize for lane in range(first, first + together))
        words = {address + part for address in addresses for part in range(0, itemsize, WORD)}
        banks = Counter(word // WORD % BANKS for word in words)
        extra += max(banks.values()) - -(-len(words) // BANKS)
    return extra
