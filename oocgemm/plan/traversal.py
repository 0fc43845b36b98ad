"""The order in which tiles and steps are visited.

Rows of tiles are walked as a snake, and k runs backwards on every other tile, so that at each turn the
panels just used are used again. The direction of k hangs on the tile's coordinates alone, never on its place
in the sequence: a run over any part of the tiles sums every element in the same order.
"""

from collections.abc import Iterator, Sequence

from oocgemm.plan.replacement import NEVER
from oocgemm.plan.tiling import Tile


def snake(tile_rows: int, tile_cols: int) -> tuple[Tile, ...]:
    """All tiles, row by row, every other row from the right.

    >>> snake(2, 3)
    ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0))
    """
    return tuple(
        (i, j)
        for i in range(tile_rows)
        for j in (range(tile_cols) if i % 2 == 0 else range(tile_cols - 1, -1, -1))
    )


def step_order(tile: Tile, steps: int) -> range:
    """The steps of a tile in the order they run.

    >>> list(step_order((0, 0), 3)), list(step_order((0, 1), 3))
    ([0, 1, 2], [2, 1, 0])
    """
    i, j = tile
    return range(steps) if (i + j) % 2 == 0 else range(steps - 1, -1, -1)


class NextUse:
    """When a panel is used next, the whole future being known: positions counted in steps of the run."""

    def __init__(self, tiles: Sequence[Tile], steps: int) -> None:
        self._steps = steps
        self._tiles = tiles
        self._after: tuple[list[int], list[int]] = (list(_next_with(tiles, 0)), list(_next_with(tiles, 1)))

    def __call__(self, axis: int, position: int, step: int) -> int:
        """First use, after tile number `position`, of the panel `step` of that tile's row (axis 0, a panel of
        op(A)) or column (axis 1, a panel of op(B)); NEVER if there is none."""
        later = self._after[axis][position]
        if later >= len(self._tiles):
            return NEVER
        order = step_order(self._tiles[later], self._steps)
        return later * self._steps + (step if order.step > 0 else self._steps - 1 - step)


def _next_with(tiles: Sequence[Tile], axis: int) -> Iterator[int]:
    """For each tile the position of the next one with the same row (axis 0) or column (axis 1)."""
    seen: dict[int, int] = {}
    found = [0] * len(tiles)
    for position in range(len(tiles) - 1, -1, -1):
        found[position] = seen.get(tiles[position][axis], len(tiles))
        seen[tiles[position][axis]] = position
    return iter(found)
