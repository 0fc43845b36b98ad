"""Schedules: all waits are derived, and every order that the waits allow gives the right result."""

import itertools
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.planning import Kind, Op, Operation, Schedule, Slots, TileGrid, TileShape
from oocgemm.planning.schedule.operation import HazardTracker, Program
from oocgemm.planning.schedule.placement import Placing
from oocgemm.planning.schedule.traversal import Traversal, walk
from tests.support.problems import integers
from tests.support.products import changed
from tests.support.schedule_check import ScheduleError, verify, waits_of
from tests.support.schedule_problems import problem
from tests.support.simulator import Simulator
from tests.support.suite import examples, slow


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p = problem(
        *(draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 9))),
        alpha=draw(st.sampled_from([1, 2])),
        beta=draw(st.sampled_from([0, 1, 3])),
        finishes=draw(st.booleans()),
    )
    tile = TileShape(*(draw(st.integers(1, 5)) for _ in range(3)))
    grid = TileGrid.of(p, tile)
    traversal = Traversal(draw(st.integers(0, 1)), draw(st.integers(1, 3)), draw(st.booleans()))
    tiles = list(walk(traversal, *grid.shape))
    if draw(st.booleans()):  # a schedule may visit tiles in any order, and leave tiles out
        tiles = draw(st.permutations(tiles))[: draw(st.integers(1, len(tiles)))]
    counts = st.integers(1, 7)
    unified = draw(st.booleans())
    if not unified:
        p = changed(p, checked=draw(st.sampled_from(["", "device"])))
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
    return Schedule(p, grid, tiles, slots, last=last, alternates=draw(st.booleans()))


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


@pytest.mark.parametrize("stride", [*slow((1,), (5,)), 13])
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
    for number, operation in enumerate(itertools.islice(schedule, 2000)):
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
    def by_strips(*, first: bool, last: bool) -> tuple[list[int], ...]:
        tile = (0, 0) if first else (2, 0)
        placing = Placing([tile], 10, slots, last=tile if last else (3, 3))
        groups = [(by, [step for step, *_ in steps]) for by, steps in placing.groups(0)]
        assert [step for _, steps in groups for step in steps] == list(range(10))
        return tuple(steps for by, steps in groups if by)

    assert by_strips(first=True, last=False) == first
    assert by_strips(first=False, last=False) == between
    assert by_strips(first=False, last=True) == last


@given(schedules(), st.sampled_from(list(Op)), st.sampled_from(list(Op)))
def test_an_operation_carries_what_follows_from_its_place(schedule: Schedule, op_a: Op, op_b: Op) -> None:
    schedule = replace(schedule, problem=changed(schedule.problem, trans_a=op_a, trans_b=op_b))
    grid, writes, parts = schedule.grid, Counter[Any](), dict[Any, int]()
    for one in schedule:
        assert one.whole == (grid.rows(one.tile[0]), grid.cols(one.tile[1]))
        assert one.lane == {Kind.MULTIPLY: "compute", Kind.FINISH: "compute"}.get(one.kind, one.lane)
        assert one.stream in (one.lane, f"{one.lane}-c")
        assert (one.stream != one.lane) == (one.operand == "C" and one.kind in (Kind.READ, Kind.UPLOAD))
        swaps = one.operand in "AB" and (op_a if one.operand == "A" else op_b) is not Op.N
        assert one.stored == (one.block[::-1] if swaps else one.block)
        if one.kind is Kind.WRITE:
            writes[one.tile] += 1
            assert parts.setdefault(one.tile, one.parts) == one.parts
    assert writes == parts


@given(schedules(), st.lists(st.integers(0, 40), max_size=5))
def test_waits_are_derived_when_they_are_first_needed(schedule: Schedule, steps: list[int]) -> None:
    expected, taken = waits_of(schedule), 0

    def operations() -> Iterator[Operation]:
        nonlocal taken
        for operation in schedule:
            taken += 1
            yield operation

    program, most = Program(operations()), 0
    for count in steps:
        found = list(itertools.islice(program, count))
        assert found == expected[:count]
        most = max(most, len(found))
        assert taken == most
        if found:
            assert program[len(found) - 1] == found[-1]
    assert list(program) == expected
    assert len(program) == len(expected) == taken


def test_threads_share_a_program() -> None:
    p = problem(9, 9, 9)
    grid = TileGrid.of(p, TileShape(2, 2, 2))
    schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots())
    program, expected = Program(schedule), waits_of(schedule)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: list(program) == expected, range(8)))


def test_a_program_can_be_pickled() -> None:
    p = problem(9, 9, 9)
    grid = TileGrid.of(p, TileShape(4, 4, 4))
    program = Program(Schedule(p, grid, walk(Traversal(), *grid.shape), Slots()))
    next(iter(program))
    assert list(pickle.loads(pickle.dumps(program))) == list(program)


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


def peak_of_iterating(cols: int) -> int:
    """Return the peak memory of iterating over the schedule of a row of tiles that reuse panels of op(A).

    Other threads of the process, such as the one that receives messages of pytest-xdist, are traced too.
    So the least of three peaks counts.
    """
    p = problem(4, 4 * cols, 8)
    grid = TileGrid.of(p, TileShape(4, 4, 1))
    peaks = []
    for _ in range(3):
        schedule = Schedule(p, grid, walk(Traversal(), *grid.shape), Slots(10, 4, host_a=10, host_b=4))
        tracemalloc.start()
        for _ in schedule:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)


def test_a_schedule_takes_no_memory_for_more_steps() -> None:
    peak_of_iterating(10)  # the first call fills caches of Python, which are not counted
    assert peak_of_iterating(400) < peak_of_iterating(100) + 15_000


def test_waits_are_derived_again_after_an_exception() -> None:
    """Plans are kept: the next run must not take the part of the program for the whole."""
    p = problem(9, 9, 9)
    grid = TileGrid.of(p, TileShape(4, 4, 4))
    schedule, failing = list(Schedule(p, grid, walk(Traversal(), *grid.shape), Slots())), True

    class Interrupted:
        def __iter__(self) -> Iterator[Operation]:
            for i, operation in enumerate(schedule):
                if failing and i == 7:
                    raise MemoryError
                yield operation

    program = Program(Interrupted())
    assert next(iter(program))[0] == schedule[0]
    with pytest.raises(MemoryError):
        len(program)
    failing = False
    assert list(program) == list(waits_of(schedule))
