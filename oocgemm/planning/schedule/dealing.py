"""Deal the tiles of C to several devices.

The devices work on one tile each at the same time: a *round*. Tiles of a round that are in one tile row use
the same panels of op(A), and those in one tile column the same panels of op(B). Such a panel is read once for
all of them (`shared`), provided that they use it at about the same time. So a round takes tiles that have the
same direction along k, which is that of the sum of their coordinates: even or odd. With four devices, for
example, the first round takes every other tile of two tile rows and of two tile columns:

    0 . 1 .
    . . . .
    2 . 3 .

The next round takes the tiles to the right of these. So a device keeps its panels of op(A) at the turn.

Sessions on the CPU share no panels. They work *apart*: each takes a rectangle of C, so that it loads as few
panels as possible.

If something is kept of each row of C (`GemmProblem.keeps_rows`), a device takes whole tile rows
(`deal_rows`). Then it alone adds what the tiles of a row contribute, in an order that does not depend on the
other devices.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise, product, zip_longest

from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import Traversal, forwards, walk
from oocgemm.planning.tiling import Tile, TileGrid, ceil_div

# `arrangement` compares the panels that are loaded in this many rounds.
COMPARED_ROUNDS = 64


def deal(
    devices: int,
    shape: tuple[int, int],
    traversal: Traversal,
    arranged: tuple[int, int],
    tiles: Container[Tile] | None = None,
    *,
    apart: bool = False,
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
        apart: whether devices share no panels. `arranged` then counts rectangles down and across.

    >>> deal(2, (3, 2), Traversal(), (2, 1))
    [(0, 0), (2, 0), (0, 1), (2, 1), (1, 1), (1, 0)]
    >>> deal(2, (4, 2), Traversal(), (2, 1), apart=True)
    [(0, 0), (2, 0), (0, 1), (2, 1), (1, 1), (3, 1), (1, 0), (3, 0)]
    """
    order = (_rectangles if apart else _blocks)(shape, traversal, arranged)
    return deal_in_order(devices, order, tiles, apart=apart)


def deal_in_order(
    devices: int, order: Iterable[Tile], tiles: Container[Tile] | None = None, *, apart: bool = False
) -> list[Tile]:
    """Deal tiles, or those of them that are in `tiles`, in the given order. `deal` describes the result.

    >>> deal_in_order(2, [(0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (2, 2)])
    [(0, 0), (1, 1), (1, 0), (2, 1), (2, 0), (2, 2)]
    """
    found = order if tiles is None else (tile for tile in order if tile in tiles)
    return list((_pieces if apart else _rounds)(devices, found))


def deal_rows(
    devices: int, shape: tuple[int, int], traversal: Traversal, tiles: Container[Tile] | None = None
) -> list[list[Tile]]:
    """Deal whole tile rows of a grid. Return the tiles of each device in order: all, or those of `tiles`.

    The devices visit the columns in the same order. The tile rows of a round have the same direction along k,
    as long as there are two per device.

    >>> deal_rows(2, (3, 2), Traversal(turns=False))
    [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1)]]
    >>> [sorted({i for i, _ in own}) for own in deal_rows(2, (7, 1), Traversal())]
    [[0, 1, 4, 6], [2, 3, 5]]
    """
    whole = shape[0] // (2 * devices) * 2 * devices
    lines = [*_lines(whole, devices)]
    lines += [range(top, min(top + devices, shape[0])) for top in range(whole, shape[0], devices)]
    found: list[list[Tile]] = [[] for _ in range(devices)]
    band = max(1, traversal.band // (devices, 1)[traversal.axis])
    for i, j in walk(replace(traversal, band=band), len(lines), shape[1]):
        for own, row in zip(found, lines[i], strict=False):
            if tiles is None or (row, j) in tiles:
                own.append((row, j))
    return found


def arrangement(
    devices: int, problem: GemmProblem, grid: TileGrid, *, apart: bool = False
) -> tuple[int, int]:
    """Choose over how many tile rows and tile columns the tiles of a round are spread.

    The product of both numbers is `devices`. They are chosen so that the panels of a round have as few bytes
    as possible. They depend on the whole grid, not on the tiles that are left to compute. If the devices work
    `apart`, the numbers are those of rectangles, and the panels are those of a whole rectangle.
    """
    if problem.keeps_rows:
        return devices, 1
    if 0 in grid.shape:
        return 1, devices
    a, b = grid.tile.m * problem.itemsizes["A"], grid.tile.n * problem.itemsizes["B"]
    rows, cols = grid.shape

    def loaded(arranged: tuple[int, int]) -> tuple[int, float]:
        if apart:
            return a * ceil_div(rows, arranged[0]) + b * ceil_div(cols, arranged[1]), 0.0
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


def _pieces(devices: int, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Cut a sequence of tiles into one piece per device. Yield the first tile of each, then the second."""
    every = list(tiles)
    cuts = [ceil_div(number * len(every), devices) for number in range(devices + 1)]
    pieces = sorted((every[start:stop] for start, stop in pairwise(cuts)), key=len, reverse=True)
    for found in zip_longest(*pieces):
        yield from (tile for tile in found if tile is not None)


def _rectangles(shape: tuple[int, int], traversal: Traversal, arranged: tuple[int, int]) -> Iterator[Tile]:
    """Yield the tiles of a grid rectangle by rectangle."""
    rows, cols = (
        list(pairwise(number * count // parts for number in range(parts + 1)))
        for count, parts in zip(shape, arranged, strict=True)
    )
    order = replace(traversal, band=max(1, traversal.band // arranged[traversal.axis]))
    for (top, bottom), (left, right) in product(rows, cols):
        for i, j in walk(order, bottom - top, right - left):
            yield top + i, left + j


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
