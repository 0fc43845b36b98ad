"""Traversals and sets of tiles: their order, their next uses, and the loads that caches save."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oocgemm.planning import TileGrid, TileSet, TileShape
from oocgemm.planning.schedule.placement import SlotCache
from oocgemm.planning.schedule.traversal import NEVER, NextUse, Traversal, last, step_order, walk
from oocgemm.planning.tiling import Coverage
from tests.support.schedule_problems import traversals


def loaded(
    tiles: Sequence[tuple[int, int]], steps: int, axis: int, count: int, spread: int
) -> list[list[int]]:
    """Return, for each tile, which of its steps load a panel of one operand into `count` buffers."""
    cache, next_use = SlotCache(count, spread), NextUse(tiles, steps, (axis,))
    found: list[list[int]] = []
    for position, tile in enumerate(tiles):
        found.append([])
        for number, step in enumerate(step_order(tile, steps)):
            _, hit = cache.acquire((tile[axis], step), next_use(tile[axis], step, position))
            cache.advance()
            if not hit:
                found[-1].append(number)
    return found


@given(traversals, *(st.integers(1, most) for most in (4, 4, 30)), st.integers(0, 1), st.integers(2, 60))
def test_spreading_loads_adds_no_loads(
    traversal: Traversal, rows: int, cols: int, steps: int, axis: int, count: int
) -> None:
    tiles = walk(traversal, rows, cols)
    furthest, spread = (sum(map(len, loaded(tiles, steps, axis, count, s))) for s in (1, steps))
    assert spread == furthest


@pytest.mark.parametrize("count", [12, 25, 50, 80])
@pytest.mark.parametrize("turns", [True, False])
def test_panels_not_cached_load_evenly_over_a_tile(count: int, turns: bool) -> None:
    """Loads are spread evenly over the steps of a tile, so that multiplications hide them."""
    steps, tiles = 100, walk(Traversal(0, 1, turns), 1, 4)
    for numbers in loaded(tiles, steps, 0, count, steps)[1:]:
        assert len(numbers) == steps - count
        for first, share in itertools.product(range(0, steps, 10), (0.2, 0.5)):
            stop = first + int(share * steps)
            if stop <= steps:
                here = sum(first <= number < stop for number in numbers)
                assert abs(here - (steps - count) * share) <= 4
    in_a_row = loaded(tiles, steps, 0, count, 1)[1]
    assert in_a_row == list(range(count, steps))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(2, 5))
def test_replacement_never_evicts_what_the_latest_step_uses(keys: list[int], count: int) -> None:
    cache = SlotCache(count)
    where: dict[int, int] = {}
    latest = None
    for position, key in enumerate(keys):
        later = next((p for p in range(position + 1, len(keys)) if keys[p] == key), NEVER)
        slot, hit = cache.acquire((0, key), later)
        cache.advance()
        assert hit == (where.get(slot) == key)
        assert not (latest == slot and not hit)
        where = {s: k for s, k in where.items() if s != slot} | {slot: key}
        latest = slot


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.randoms())
def test_next_use_is_the_first_later_one(
    rows: int, cols: int, steps: int, alternates: bool, random: Any
) -> None:
    tiles = list(walk(Traversal(), rows, cols))
    random.shuffle(tiles)
    assume(tiles)
    next_use = [NextUse(tiles, steps, (axis,), alternates=alternates) for axis in (0, 1)]
    order = [(t, step) for t in tiles for step in step_order(t, steps, alternates)]
    for position, tile in enumerate(tiles):
        for axis, step in itertools.product((0, 1), range(steps)):
            start = (position + 1) * steps
            uses = [
                p for p in range(start, len(order)) if order[p][0][axis] == tile[axis] and order[p][1] == step
            ]
            assert next_use[axis](tile[axis], step, position) == (uses[0] if uses else NEVER)


@given(traversals, st.integers(1, 9), st.integers(1, 9))
def test_the_last_tile_of_a_walk_has_a_closed_form(traversal: Traversal, rows: int, cols: int) -> None:
    tiles = walk(traversal, rows, cols)
    assert last(traversal, rows, cols) == tiles[-1]
    assert len(set(tiles)) == len(tiles) == rows * cols
    if traversal.band == 1 and not traversal.turns:
        assert tiles[-1] == (rows - 1, cols - 1)


def listed(traversal: Traversal, tile_rows: int, tile_cols: int) -> list[tuple[int, int]]:
    """Return the tiles of a traversal in order, computed by plain loops."""
    if traversal.axis == 1:
        return [(i, j) for j, i in listed(traversal.along_rows, tile_cols, tile_rows)]
    found = []
    for band, top in enumerate(range(0, tile_rows, traversal.band)):
        backwards = traversal.turns and band % 2 == 1
        for number, j in enumerate(reversed(range(tile_cols)) if backwards else range(tile_cols)):
            rows = range(top, min(top + traversal.band, tile_rows))
            found += [(i, j) for i in (reversed(rows) if number % 2 else rows)]
    return found


@given(traversals, st.integers(0, 7), st.integers(0, 7), st.randoms(use_true_random=False))
def test_a_walk_is_computed_from_positions(traversal: Traversal, rows: int, cols: int, random: Any) -> None:
    tiles = listed(traversal, rows, cols)
    assert list(walk(traversal, rows, cols)) == tiles
    done = frozenset(tile for tile in tiles if random.random() < 0.5)
    left = [tile for tile in tiles if tile not in done]
    found = walk(traversal, rows, cols, left)
    assert list(found) == left == list(found[:])
    for axis, extent in enumerate((rows, cols)):
        expected, computed = NextUse(left, 2, (axis,)), NextUse(found, 2, (axis,))
        for line, step, position in itertools.product(range(extent), range(2), range(len(left))):
            assert computed(line, step, position) == expected(line, step, position)


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    m, n = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return TileGrid(m, n, 6, TileShape(draw(st.integers(1, 5)), draw(st.integers(1, 5)), 3))


def assert_covers(tiles: TileSet, listed: set[tuple[int, int]]) -> None:
    """Check that the count, coverage, order and membership of a set agree with a list of its tiles."""
    grid = tiles.grid
    assert list(tiles) == sorted(listed)
    assert tiles.count == len(listed)
    every = itertools.product(range(-1, grid.shape[0] + 1), range(-1, grid.shape[1] + 1))
    assert {tile for tile in every if tile in tiles} == listed
    covered = np.zeros((grid.m, grid.n), bool)
    for i, j in listed:
        covered[slice(*grid.rows(i)), slice(*grid.cols(j))] = True
    assert tiles.coverage == Coverage(covered.any(1).sum(), covered.any(0).sum(), covered.sum())
    assert tiles.is_whole == bool(covered.all())


@given(grids(), st.data())
def test_parts_and_remaining_tiles_partition_a_rectangle(grid: TileGrid, data: st.DataObject) -> None:
    whole = TileSet.of(grid)
    down, across = grid.shape
    every = set(itertools.product(range(down), range(across)))
    assert_covers(whole, every)
    done = data.draw(st.sets(st.sampled_from(sorted(every))))
    left = whole.remaining(done)
    assert_covers(left, every - done)
    cut = data.draw(st.integers(0, grid.shape[0]))
    parts = [left.part(rows, (0, grid.shape[1])) for rows in ((0, cut), (cut, grid.shape[0]))]
    assert parts[0].count + parts[1].count == left.count
    for part, above in zip(parts, (True, False), strict=True):
        assert_covers(part, {tile for tile in every - done if (tile[0] < cut) == above})
