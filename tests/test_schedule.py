"""Schedules: all waits are derived, and every order that the waits allow gives the right result."""

import itertools
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from oocgemm.errors import ScheduleError
from oocgemm.planning import GemmProblem, Kind, Op, Schedule, Slots, TileGrid, TileSet, TileShape
from oocgemm.planning.schedule.eviction import NEVER, SlotCache
from oocgemm.planning.schedule.hazards import HazardTracker, verify, waits_of
from oocgemm.planning.schedule.placement import step_groups
from oocgemm.planning.schedule.traversal import NextUse, Traversal, last, step_order, walk
from oocgemm.planning.tile_set import Coverage
from tests.problems import integers
from tests.simulator import Simulator
from tests.suite import examples, slow


def problem(
    m: int, n: int, k: int, *, alpha: float = 1, beta: float = 0, finishes: bool = False
) -> GemmProblem:
    stored = "float16" if finishes else "float64"
    accumulated = "float32" if finishes else "float64"
    return GemmProblem(m, n, k, stored, stored, accumulated, stored, alpha, beta, Op.N, Op.N)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p = problem(
        *(draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 9))),
        alpha=draw(st.sampled_from([1, 2])),
        beta=draw(st.sampled_from([0, 1, 3])),
        finishes=draw(st.booleans()),
    )
    tile = TileShape(*(draw(st.integers(1, 5)) for _ in range(3)))
    ramps = [r for r in (0, 1, 2) if tile.k % 2**r == 0 and (r == 0 or p.depth > tile.k)]
    grid = TileGrid.of(p, tile, draw(st.sampled_from(ramps)))
    traversal = Traversal(draw(st.integers(0, 1)), draw(st.integers(1, 3)), draw(st.booleans()))
    tiles = list(walk(traversal, *grid.shape))
    if draw(st.booleans()):  # a schedule may visit tiles in any order, and leave tiles out
        tiles = draw(st.permutations(tiles))[: draw(st.integers(1, len(tiles)))]
    counts = st.integers(1, 7)
    unified = draw(st.booleans())
    if not unified:
        p = replace(p, checked=draw(st.sampled_from(["", "device"])))
    host = (0, 0, 0) if unified else draw(st.tuples(counts, counts, st.integers(1, 3)))
    a, b, drain = draw(counts), draw(counts), draw(st.integers(1, 4))
    slots = Slots(
        *(a, b, draw(st.integers(1, 3)), *host),
        drain=drain,
        turn=draw(st.integers(0, 3)),
        planes=draw(st.sampled_from([0, min(a, b, drain), 1 + min(a, b, drain)])),
        unified=unified,
        finish=draw(st.integers(1, 2)) if p.finishes else 0,
        strip=draw(st.integers(1, 5)),
    )
    last = draw(st.sampled_from([None, walk(traversal, *grid.shape)[-1]]))
    return Schedule(p, grid, tiles, slots, last=last)


def operands(schedule: Schedule, seed: int) -> tuple[Any, Any, Any]:
    p = schedule.problem
    rng = np.random.default_rng(seed)
    shapes = (p.m, p.k), (p.k, p.n), (p.m, p.n)
    a, b, c = (integers(rng, shape, "float64") for shape in shapes)
    return a, b, c if p.reads_c else np.full((p.m, p.n), np.nan)


def expected(schedule: Schedule, a: Any, b: Any, c: Any) -> Any:
    p, out = schedule.problem, c.copy()
    for tile in schedule.tiles:
        rows, cols = slice(*schedule.grid.rows(tile[0])), slice(*schedule.grid.cols(tile[1]))
        value = p.alpha * (a[rows] @ b[:, cols])
        out[rows, cols] = value + p.beta * c[rows, cols] if p.reads_c else value
    return out


@given(schedule=schedules(), seed=st.integers(0, 2**16))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_legal_order_breaks_a_schedule(schedule: Schedule, seed: int) -> None:
    verify(schedule)
    a, b, c = operands(schedule, seed)
    right = expected(schedule, a, b, c)
    Simulator(schedule, a, b, c).run(seed)
    np.testing.assert_array_equal(c, right)


@pytest.mark.parametrize("stride", [*slow((1,)), 5])
def test_the_simulator_detects_an_omitted_wait(stride: int) -> None:
    """Check that the test above can fail: omit each wait in turn, and try several orders of operations."""
    p = problem(4, 4, 6, beta=1)
    grid = TileGrid.of(p, TileShape(2, 2, 2))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots(strip=1))
    dropped = range(0, sum(len(waits) for _, waits in waits_of(schedule)), stride)
    caught = 0
    for wait in dropped:
        for seed in range(12):
            a, b, c = operands(schedule, seed)
            right = expected(schedule, a, b, c)
            try:
                Simulator(schedule, a, b, c).run(seed, drop_wait=wait)
                np.testing.assert_array_equal(c, right)
            except AssertionError:
                caught += 1
                break
    # The other waits are implied by further waits, or by the order of a stream.
    assert caught > len(dropped) / 4


@given(schedule=schedules())
@settings(max_examples=examples(200), deadline=None)
def test_traffic_is_what_the_operations_move(schedule: Schedule) -> None:
    moved = dict.fromkeys(("read", "h2d", "d2h", "write"), 0)
    for operation in schedule:
        # A Prepare works within the device, so its bytes cross no link.
        if operation.bytes and operation.kind is not Kind.PREPARE:
            moved[operation.lane.value] += operation.bytes
    assert schedule.traffic() == moved


@given(schedule=schedules())
@settings(max_examples=examples(100), deadline=None)
def test_a_schedule_can_be_iterated_repeatedly(schedule: Schedule) -> None:
    assert list(schedule) == list(schedule)


@given(schedule=schedules(), random=st.randoms())
@settings(max_examples=examples(200), deadline=None)
def test_a_resumed_schedule_multiplies_the_same_blocks_in_order(schedule: Schedule, random: Any) -> None:
    """A resumed run gives the same bits if it multiplies blocks of the same shapes in the same order."""

    def multiplications(s: Schedule) -> dict[tuple[int, int], list[object]]:
        found: dict[tuple[int, int], list[object]] = {tile: [] for tile in s.tiles}
        for o in s:
            if o.kind is Kind.MULTIPLY:
                found[o.tile].append((o.step, o.m, o.n, o.k, o.first, len(o.reads)))
        return found

    whole = replace(schedule, tiles=walk(Traversal(), *schedule.grid.shape), last=None)
    left = [tile for tile in whole.tiles if random.random() < 0.5]
    part = replace(whole, tiles=left, last=whole.tiles[-1])
    verify(part)
    expected = multiplications(whole)
    assert multiplications(part) == {tile: expected[tile] for tile in left}


def test_operations_are_created_during_iteration() -> None:
    p = problem(10**7, 10**7, 10**9)
    grid = TileGrid.of(p, TileShape(10**4, 10**4, 100))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots(strip=100))
    tracker: HazardTracker[int] = HazardTracker()
    for number, operation in enumerate(itertools.islice(schedule, 20_000)):
        waits = tracker.admit(operation, number)
        assert len(waits) <= 100 + 16  # at most all blocks of rows of a tile, and the panels
    assert sum(len(a) for a in tracker._accesses.values()) < 500


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        (Slots(a=1), "one A slot: the next panel must wait for the multiplication"),
        (Slots(host_a=1), "one host slot: the next read must wait for the upload"),
        (Slots(c=1), "one accumulator: the next tile must wait for the download"),
    ],
)
def test_scarce_slots_cause_waits_not_errors(slots: Slots, why: str) -> None:
    p = problem(6, 6, 6)
    grid = TileGrid.of(p, TileShape(3, 3, 2))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), slots)
    verify(schedule)
    a, b, c = operands(schedule, 1)
    Simulator(schedule, a, b, c).run(1)
    np.testing.assert_array_equal(c, a @ b)


def test_verify_refuses_strips_that_share_a_chunk() -> None:
    p = problem(8, 8, 4)
    grid = TileGrid.of(p, TileShape(8, 8, 4))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots(strip=3))
    verify(schedule, chunks=(3, 8))
    with pytest.raises(ScheduleError, match="write C"):
        verify(schedule, chunks=(2, 8))


@pytest.mark.parametrize(
    ("slots", "first", "between", "last"),
    [
        (Slots(9, 8, drain=8, turn=2), ([8, 9],), ([0, 1], [8, 9]), ([0, 1], [2, 3, 4, 5, 6, 7, 8, 9])),
        # With 4 buffers for panels of B, 4 such steps are possible at the end of a run, and 2 between tiles.
        (Slots(6, 4, drain=6), ([8, 9],), ([0, 1], [8, 9]), ([0, 1], [6, 7, 8, 9])),
        (Slots(6, 3, drain=3, turn=5), ([7, 8, 9],), ([0, 1, 2], [7, 8, 9]), ([0, 1, 2], [7, 8, 9])),
        # Two accumulators: a tile is downloaded while the next is multiplied.
        (Slots(6, 4, 2, drain=3, turn=2), (), (), ([7, 8, 9],)),
    ],
)
def test_steps_run_by_strips_between_tiles_and_at_the_end(
    slots: Slots, first: Any, between: Any, last: Any
) -> None:
    def by_strips(**which: bool) -> tuple[list[int], ...]:
        groups = [(by, list(steps)) for by, steps in step_groups(range(10), slots, **which)]
        assert [step for _, steps in groups for step in steps] == list(range(10))
        return tuple(steps for by, steps in groups if by)

    assert by_strips(first=True, last=False) == first
    assert by_strips(first=False, last=False) == between
    assert by_strips(first=False, last=True) == last


def test_uploads_of_the_next_panels_do_not_wait_for_multiplies() -> None:
    """While the first panels A0 and B0 are multiplied, the next ones, A1 and B1, are uploaded.

    This takes five buffers.
    """
    p = problem(4, 4, 8)
    grid = TileGrid.of(p, TileShape(4, 4, 2))
    planned = waits_of(Schedule(p, grid, walk(Traversal(), *grid.shape), Slots()))
    kinds = [operation.kind for operation, _ in planned]
    multiplies = [i for i, kind in enumerate(kinds) if kind is Kind.MULTIPLY]
    for operation, waits in planned:
        if operation.kind is Kind.UPLOAD and operation.step >= 1:
            behind = [multiplies.index(w) for w in waits if w in multiplies]
            assert all(step <= operation.step - 2 for step in behind)


def test_a_cached_panel_is_not_loaded_again() -> None:
    # Each panel is as deep as k. Tiles of a row share a panel of A, and the first tile of a new row reuses
    # the panel of B.
    p = problem(6, 9, 2)
    grid = TileGrid.of(p, TileShape(3, 3, 2))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots())
    uploads = [o.operand for o in schedule if o.kind is Kind.UPLOAD]
    assert uploads.count("A") == 2
    assert uploads.count("B") == 4


traversals = st.builds(Traversal, st.integers(0, 1), st.integers(1, 4), st.booleans())


def loaded(
    tiles: Sequence[tuple[int, int]], steps: int, axis: int, count: int, spread: int
) -> list[list[int]]:
    """Return, for each tile, which of its steps load a panel of one operand into `count` buffers."""
    cache, next_use = SlotCache(count, spread), NextUse(tiles, steps, axis)
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


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_next_use_is_the_first_later_one(rows: int, cols: int, steps: int, random: Any) -> None:
    tiles = list(walk(Traversal(), rows, cols))
    random.shuffle(tiles)
    assume(tiles)
    next_use = NextUse(tiles, steps, 0), NextUse(tiles, steps, 1)
    order = [(t, step) for t in tiles for step in step_order(t, steps)]
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
        expected, computed = NextUse(left, 2, axis), NextUse(found, 2, axis)
        for line, step, position in itertools.product(range(extent), range(2), range(len(left))):
            assert computed(line, step, position) == expected(line, step, position)


def peak_of_iterating(cols: int) -> int:
    """Return the peak memory of iterating over the schedule of a row of tiles that reuse panels of op(A)."""
    p = problem(4, 4 * cols, 8)
    grid = TileGrid.of(p, TileShape(4, 4, 1))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots(10, 4, host_a=10, host_b=4))
    tracemalloc.start()
    for _ in schedule:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_a_schedule_takes_no_memory_for_more_steps() -> None:
    peak_of_iterating(10)  # the first call fills caches of Python, which are not counted
    assert peak_of_iterating(1000) < peak_of_iterating(100) + 20_000


@st.composite
def grids(draw: st.DrawFn, square: bool = False) -> TileGrid:
    m = draw(st.integers(1, 12))
    n = m if square else draw(st.integers(1, 12))
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
    whole = TileSet.rectangle(grid)
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


@given(grids(square=True))
def test_a_triangle_has_each_tile_with_lower_elements(grid: TileGrid) -> None:
    lower = {
        (i, j)
        for i, j in itertools.product(*map(range, grid.shape))
        if grid.cols(j)[0] <= grid.rows(i)[1] - 1
    }
    assert_covers(TileSet.triangle(grid), lower)


def test_a_triangle_needs_a_square_c() -> None:
    with pytest.raises(ValueError, match="a square C, not 4 x 5"):
        TileSet.triangle(TileGrid(4, 5, 6, TileShape(2, 2, 2)))


@given(grids(square=True), traversals)
def test_a_schedule_over_a_triangle_is_valid(grid: TileGrid, traversal: Traversal) -> None:
    p = problem(grid.m, grid.n, grid.k)
    tiles = walk(traversal, *grid.shape, TileSet.triangle(grid))
    schedule = Schedule(p, grid, tiles, Slots())
    verify(schedule)
    assert schedule.elements == TileSet.triangle(grid).coverage.elements
