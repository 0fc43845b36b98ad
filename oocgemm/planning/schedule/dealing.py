"""Deal the tiles of C to several devices.

The devices work on one tile each at the same time: a *round*. Tiles of a round that are in one tile row use
the same panels of op(A), and those in one tile column the same panels of op(B). Such a panel is read from
storage once for all of them, if they use it at about the same time. So a round takes tiles that have the same
direction along k, which is that of the sum of their coordinates: even or odd. With four devices, for example,
the first round takes every other tile of two tile rows and of two tile columns:

    0 . 1 .
    . . . .
    2 . 3 .

The next round takes the tiles to the right of these. So a device keeps its panels of op(A) at the turn.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import Traversal, forwards, walk
from oocgemm.planning.tiling import Tile, TileGrid

# `arrangement` compares the panels that are loaded in this many rounds.
COMPARED_ROUNDS = 64


def deal(
    devices: int,
    shape: tuple[int, int],
    traversal: Traversal,
    arranged: tuple[int, int],
    tiles: Container[Tile] | None = None,
) -> list[Tile]:
    """Order the tiles of a grid for several devices: every tile once, or every one of `tiles`.

    The tile at position p is for device p modulo `devices`, in round p // `devices`. Only the last round may
    have fewer tiles than there are devices.

    Args:
        devices: number of devices.
        shape: numbers of tile rows and of tile columns of the grid.
        traversal: the order of the rounds. Its bands have the width that they have on one device.
        arranged: over how many tile rows and tile columns the tiles of a round are spread (`arrangement`).
        tiles: the tiles to deal, by default all.

    >>> deal(2, (3, 2), Traversal(), (2, 1))
    [(0, 0), (2, 0), (0, 1), (2, 1), (1, 1), (1, 0)]
    """
    blocks = _blocks(shape, traversal, arranged)
    return list(_rounds(devices, blocks if tiles is None else (tile for tile in blocks if tile in tiles)))


def arrangement(devices: int, problem: GemmProblem, grid: TileGrid) -> tuple[int, int]:
    """Choose over how many tile rows and tile columns the tiles of a round are spread.

    The product of both numbers is `devices`. They are chosen so that the panels of a round have as few bytes
    as possible. They depend on the whole grid, not on the tiles that are left to compute.
    """
    if 0 in grid.shape:
        return 1, devices
    a, b = grid.tile.m * problem.itemsizes["A"], grid.tile.n * problem.itemsizes["B"]

    def loaded(arranged: tuple[int, int]) -> tuple[int, float]:
        rounds = _rounds(devices, _blocks(grid.shape, Traversal(), arranged))
        total = 0
        for _ in range(COMPARED_ROUNDS):
            tiles = list(islice(rounds, devices))
            total += a * len({i for i, _ in tiles}) + b * len({j for _, j in tiles})
        # Of equal ones, choose the one that the grid has enough rows and columns for.
        return total, max(wanted / there for wanted, there in zip(arranged, grid.shape, strict=True))

    return min(((down, devices // down) for down in range(1, devices + 1) if devices % down == 0), key=loaded)


def _rounds(devices: int, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Order tiles so that each round has tiles of one direction along k, as long as there are enough."""
    waiting = list[Tile](), list[Tile]()
    for tile in tiles:
        alike = waiting[forwards(tile)]
        alike.append(tile)
        if len(alike) == devices:
            yield from alike
            alike.clear()
    yield from (*waiting[True], *waiting[False])


def _blocks(shape: tuple[int, int], traversal: Traversal, arranged: tuple[int, int]) -> Iterator[Tile]:
    """Yield the tiles of a grid block by block. The tiles of a block have the same direction along k."""
    rows, cols = (_lines(*pair) for pair in zip(shape, arranged, strict=True))
    band = max(1, traversal.band // arranged[traversal.axis])
    for i, j in walk(replace(traversal, band=band), len(rows), len(cols)):
        yield from product(rows[i], cols[j])


def _lines(count: int, together: int) -> Sequence[Sequence[int]]:
    """Divide tile rows (or columns) into groups of `together` rows, of which none are neighbours.

    >>> [list(group) for group in _lines(7, 2)]
    [[0, 2], [1, 3], [4, 6], [5]]
    """
    if together == 1:
        return [range(i, i + 1) for i in range(count)]
    width = 2 * together
    found = (
        range(first, min(start + width, count), 2)
        for start in range(0, count, width)
        for first in (start, start + 1)
    )
    return [group for group in found if group]
