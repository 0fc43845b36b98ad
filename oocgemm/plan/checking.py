"""How tiles are cut into the blocks that are checked, and the memory that their checksums take.

Blocks are near `SIDE` x `SIDE` and never reach over a strip: a strip is judged when it leaves.
"""

from collections.abc import Iterator

from oocgemm.plan.problem import DTYPES, GemmProblem
from oocgemm.plan.slots import Slots
from oocgemm.plan.tiling import TileShape, ceil_div

# Small blocks find small errors and cost memory, one part in SIDE of the panels.
SIDE = 128
# Elements that a thread brings to double precision at a time, where operands are narrower.
WIDENED = 1 << 18


def borders(extent: int, strip: int) -> list[int]:
    """Where the blocks of a tile begin along one axis, and the end. Strips are cut evenly, a shorter last one as the
    others, so that a strip alone is cut as it is in its tile.

    >>> borders(500, 200), borders(450, 200), borders(3, 128)
    ([0, 100, 200, 300, 400, 500], [0, 100, 200, 300, 400, 450], [0, 3])
    """
    strip = max(1, strip)
    size = ceil_div(strip, ceil_div(strip, SIDE))
    return [0, *(b for top in range(0, extent, strip) for b in _inside(top, min(top + strip, extent), size))]


def _inside(top: int, bottom: int, size: int) -> Iterator[int]:
    for border in range(top + size, bottom + size, size):
        yield min(border, bottom)


def panel_check_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int]:
    """Bytes of the checksums of one panel of op(A), and of op(B); none for a problem that is not checked."""
    if not problem.checked:
        return 0, 0
    down, across, deep = _blocks(problem, tile, strip)
    return down * (deep + 1) * _wide(problem), across * (deep + 1) * _wide(problem)


def check_bytes(problem: GemmProblem, tile: TileShape, slots: Slots, io_threads: int) -> int:
    """Host memory that checking takes: checksums of every panel held, sums of the tiles in work, signs, and room to
    bring narrow elements to double precision."""
    if not problem.checked:
        return 0
    a, b = panel_check_bytes(problem, tile, slots.strip)
    down, across, _ = _blocks(problem, tile, slots.strip)
    wide = _wide(problem)
    tiles = (slots.c + 1) * down * across * (2 * wide + 16)
    widened = 0 if problem.itemsizes["A"] == wide else (io_threads + 2) * WIDENED * wide
    return (
        (slots.a + slots.host_a) * a
        + (slots.b + slots.host_b) * b
        + tiles
        + 8 * (problem.m + problem.n)
        + widened
    )


def _blocks(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int, int]:
    """Blocks of a tile down and across, and the depth of its panels."""
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    return len(borders(w, strip)) - 1, len(borders(h, h)) - 1, r


def _wide(problem: GemmProblem) -> int:
    """Bytes of a number in double precision."""
    return 16 if DTYPES[problem.acc_dtype].is_complex else 8
