"""Predict the memory accesses of a kernel: sectors of device memory, and bank conflicts in shared memory.

A sector, 32 bytes, is the unit of access to device memory. A sector is counted each time that a warp
requests it, even if a cache serves the request.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

# Threads per warp, banks of shared memory, bytes per bank word, and bytes per sector of device memory.
WARP, BANKS, WORD, SECTOR = 32, 32, 4, 32


@dataclass(frozen=True, slots=True)
class Access:
    """The predicted memory accesses of one launch of a kernel.

    Attributes:
        load_sectors, store_sectors: sectors of 32 bytes that warps load from and store to device memory.
        bank_conflicts: cycles that bank conflicts add to one access of a warp to shared memory, for the
            kernel's worst access pattern.
    """

    load_sectors: int
    store_sectors: int
    bank_conflicts: int = 0


def stores(m: int, n: int, itemsize: int, *, reads: bool) -> tuple[int, int]:
    """Return the numbers of sectors of C that a kernel loads and stores.

    The kernel stores all of C. It loads C only if `reads` is True, that is, if beta is not 0.
    """
    sectors = m * -(-n * itemsize // SECTOR)
    return sectors if reads else 0, sectors


def tiles_sectors(m: int, n: int, k: int, itemsize: int, rows: int, cols: int) -> int:
    """Return the number of sectors of A and B that all thread blocks of a kernel load.

    A thread block computes `rows` x `cols` elements of C. It loads its rows of op(A) and its columns of op(B)
    once, with coalesced accesses.
    """
    return (m * k * -(-n // cols) + k * n * -(-m // rows)) * itemsize // SECTOR


def warps_sectors(m: int, n: int, k: int, itemsize: int, cols: int) -> int:
    """Return the number of sectors of A and B that a kernel loads if each thread computes one element of C.

    A warp computes 32 / cols rows and `cols` columns of C (32 if `cols` is larger). For each index along k,
    it loads one element of op(A) per row, each from another sector, and `cols` contiguous elements of op(B).
    """
    cols = min(cols, WARP)
    rows = WARP // cols
    warps = -(-m // rows) * -(-n // cols)
    return warps * k * (rows + -(-cols * itemsize // SECTOR))


def conflicts(itemsize: int, *patterns: Callable[[int], int]) -> int:
    """Return the cycles that bank conflicts add to the worst of several accesses of a warp to shared memory.

    A pattern describes one access: it maps each thread of the warp, 0 to 31, to the index of the element that
    the thread accesses.

    >>> [conflicts(4, lambda thread: stride * thread) for stride in (0, 1, 32, 33)]
    [0, 0, 31, 0]
    >>> conflicts(8, lambda thread: thread), conflicts(8, lambda thread: thread // 16 * 16)
    (0, 0)
    """
    return max(_extra_cycles(itemsize, pattern) for pattern in patterns)


def _extra_cycles(itemsize: int, pattern: Callable[[int], int]) -> int:
    # Only threads that are served at the same time can conflict: a warp for elements of up to 4 bytes, half a
    # warp for 8 bytes, and a quarter for 16 bytes.
    together = WARP * WORD // max(WORD, itemsize)
    extra = 0
    for first in range(0, WARP, together):
        addresses = (pattern(lane) * itemsize for lane in range(first, first + together))
        words = {address + part for address in addresses for part in range(0, itemsize, WORD)}
        banks = Counter(word // WORD % BANKS for word in words)
        extra += max(banks.values()) - -(-len(words) // BANKS)
    return extra
