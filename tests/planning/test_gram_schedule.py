"""Schedules of Gram matrices: one set of slots for both roles, and staircases on the diagonal."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.planning import GemmProblem, Kind, Op, Schedule, Slots, TileGrid, TileSet, TileShape
from oocgemm.planning.cover import Triangle
from oocgemm.planning.schedule.dealing import SharedSchedule, deal_in_order
from oocgemm.planning.tiling import length
from tests.support.problems import integers
from tests.support.products import changed, product_of
from tests.support.schedule_check import verify, waits_of
from tests.support.simulator import Simulator
from tests.support.suite import examples


def problem(n: int, k: int, gram: str = "lower", **options: Any) -> GemmProblem:
    finishes = options.pop("finishes", False)
    stored, accumulated = ("float16", "float32") if finishes else ("float64", "float64")
    return product_of(*(n, n, k, stored, stored, accumulated, stored), trans_b=Op.T, gram=gram, **options)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p = problem(
        *(
            draw(st.integers(1, 9)),
            draw(st.integers(0, 9)),
            draw(st.sampled_from(["lower", "upper", "full"])),
        ),
        alpha=draw(st.sampled_from([1, 2])),
        beta=draw(st.sampled_from([0, 1, 3])),
        finishes=draw(st.booleans()),
    )
    side = draw(st.integers(1, 5))
    tile, strip = TileShape(side, side, draw(st.integers(1, 5))), draw(st.integers(1, side))
    grid = TileGrid.of(p, tile, strip=strip)
    tiles = p.cover.order(grid.shape[0], draw(st.integers(1, 3)), side)
    last = draw(st.sampled_from([None, tiles[-1]]))
    if draw(st.booleans()):
        tiles = draw(st.permutations(tiles))[: draw(st.integers(1, len(tiles)))]
    unified = draw(st.booleans())
    streams = not unified and draw(st.booleans())  # C
    if not (unified or streams):
        p = changed(p, checked=draw(st.sampled_from(["", "device"])))
    a, drain = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    host = (0, 0, 0) if unified else (draw(st.integers(2, 9)), 0, 0 if streams else draw(st.integers(1, 3)))
    slots = Slots(
        *(a, 0, draw(st.integers(1, 3)), *host),
        drain=drain,
        turn=draw(st.integers(0, 3)),
        planes=draw(st.sampled_from([0, a])),
        unified=unified,
        finish=draw(st.integers(1, 2)) if p.finishes else 0,
        strip=strip,
    )
    return Schedule(p, grid, tiles, slots, last=last)


def operands(schedule: Schedule, seed: int) -> tuple[Any, Any]:
    p, rng = schedule.problem, np.random.default_rng(seed)
    x, c = integers(rng, (p.m, p.k), "float64"), integers(rng, (p.m, p.m), "float64")
    return x, c if p.reads_c else np.full((p.m, p.m), np.nan)


def expected(schedule: Schedule, x: Any, c: Any) -> Any:
    """Compute each strip of each tile. Leave all other elements of C alone, except those that are turned."""
    p, grid, out = schedule.problem, schedule.grid, c.copy()
    for tile in schedule.tiles:
        top, bottom = grid.rows(tile[0])
        for start in range(top, bottom, schedule.slots.strip):
            rows = start, min(start + schedule.slots.strip, bottom)
            at = slice(*rows), slice(*grid.span(tile, rows))
            value = p.alpha * (x[at[0]] @ x[at[1]].T)
            out[at] = value + p.beta * c[at] if p.reads_c else value
            if schedule.slots.streams("C"):
                first, end = grid.mirrored(tile, rows)
                out[first:end, slice(*rows)] = out[slice(*rows), first:end].T
    return out


@given(schedule=schedules(), seed=st.integers(0, 2**16))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_legal_order_breaks_the_schedule_of_a_gram_matrix(schedule: Schedule, seed: int) -> None:
    verify(schedule)
    x, c = operands(schedule, seed)
    right = expected(schedule, x, c)
    Simulator(schedule, x, x.T, c).run(seed)
    np.testing.assert_array_equal(c, right)


@st.composite
def shared_schedules(draw: st.DrawFn) -> SharedSchedule:
    schedule = draw(schedules())
    if not schedule.slots.unified and draw(st.booleans()):  # A is in host memory or in the page cache
        schedule = replace(schedule, slots=replace(schedule.slots, host_a=0))
    devices = draw(st.integers(1, 5))
    tiles = deal_in_order(devices, schedule.tiles, apart=draw(st.booleans()))
    fields_of = {field.name: getattr(schedule, field.name) for field in fields(Schedule)}
    return SharedSchedule(**(fields_of | {"tiles": tiles}), devices=devices)


@given(schedule=shared_schedules(), seed=st.integers(0, 2**16))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_legal_order_breaks_a_gram_matrix_on_several_devices(schedule: SharedSchedule, seed: int) -> None:
    verify(schedule)
    x, c = operands(schedule, seed)
    right = expected(schedule, x, c)
    Simulator(schedule, x, x.T, c).run(seed)
    np.testing.assert_array_equal(c, right)


@given(schedule=shared_schedules())
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_loads_of_several_devices_are_those_of_the_operations(schedule: SharedSchedule) -> None:
    loads, moved = schedule.loads(), {"read": 0, "upload": 0}
    for operation in schedule:
        if operation.operand == "A":
            moved[operation.kind] = moved.get(operation.kind, 0) + operation.bytes
    assert (loads.b_up, loads.b_read) == (0, 0)
    if schedule.slots.unified:
        assert loads.a_read == moved["read"]
    else:
        assert loads.a_up == moved["upload"]
        assert schedule.slots.streams("A") or loads.a_read == moved["read"]


def test_the_simulator_detects_an_omitted_wait_of_a_gram_matrix() -> None:
    p = problem(6, 6, beta=1)
    grid = TileGrid.of(p, TileShape(2, 2, 2), strip=1)
    schedule = Schedule(p, grid, Triangle().order(3, 1, 2), Slots(a=2, b=0, host_a=2, host_b=0, strip=1))
    dropped = range(0, sum(len(waits) for _, waits in waits_of(schedule)), 29)
    caught = 0
    for wait in dropped:
        for seed in range(12):
            x, c = operands(schedule, seed)
            right = expected(schedule, x, c)
            try:
                Simulator(schedule, x, x.T, c).run(seed, drop_wait=wait)
                np.testing.assert_array_equal(c, right)
            except AssertionError:
                caught += 1
                break
    # The other waits are implied by further waits, or by the order of a stream.
    assert caught > len(dropped) / 6


def test_an_accumulator_is_used_again_after_both_downloads_of_its_strips() -> None:
    """They are copied by different threads, and end in any order."""
    p = problem(6, 4, "full")
    grid = TileGrid.of(p, TileShape(2, 2, 2), strip=2)
    operations = waits_of(
        Schedule(p, grid, Triangle().order(3, 1, 2), Slots(a=4, b=0, host_a=2, host_b=0, host_c=0, strip=2))
    )
    reading, checked = set[int](), 0
    for number, (op, waits) in enumerate(operations):
        if op.kind is Kind.DOWNLOAD:
            reading.add(number)
        elif op.kind is Kind.MULTIPLY and op.first:
            assert reading <= set(waits)
            checked += len(reading) == 2
            reading = set()
    assert checked == 3  # as many tiles off the diagonal


@given(schedule=schedules())
@settings(max_examples=examples(200), deadline=None)
def test_traffic_of_a_gram_matrix_is_what_the_operations_move(schedule: Schedule) -> None:
    moved = dict.fromkeys(("read", "h2d", "d2h", "write"), 0)
    for operation in schedule:
        if operation.bytes and operation.kind is not Kind.PREPARE:
            moved[operation.lane.value] += operation.bytes
    assert schedule.traffic() == moved


@given(
    n=st.integers(1, 30),
    side=st.integers(1, 12),
    strip=st.integers(1, 12),
    gram=st.sampled_from(["lower", "upper"]),
)
def test_staircases_cover_the_triangle_and_are_stored_without_gaps(
    n: int, side: int, strip: int, gram: str
) -> None:
    side = min(n, side)
    grid = TileGrid.of(problem(n, 1, gram), TileShape(side, side, 1), strip=min(side, strip))
    covered, tiles = np.zeros((n, n), int), TileSet.of(grid)
    assert tiles.is_whole
    assert sorted(tiles) == sorted(grid.cover.order(grid.shape[0], 1, grid.tile.m))
    for tile in tiles:
        top, bottom = grid.rows(tile[0])
        stored = 0
        for start in range(top, bottom, grid.strip):
            rows = start, min(start + grid.strip, bottom)
            assert grid.above(tile, start) == stored
            stored += length(rows) * length(grid.span(tile, rows))
            covered[slice(*rows), slice(*grid.span(tile, rows))] += 1
        assert grid.elements(tile) == stored
    assert covered.max() == 1
    wanted = np.tril(covered) if gram == "lower" else np.triu(covered)
    assert np.count_nonzero(wanted) == n * (n + 1) // 2
    assert tiles.coverage.elements == covered.sum()
    assert tiles.coverage.elements - n * (n + 1) // 2 <= n * grid.strip


@pytest.mark.parametrize("band", [1, 2, 3, 7])
def test_successive_tiles_of_a_triangle_have_a_line_in_common(band: int) -> None:
    tiles = Triangle().order(7, band, 2)
    assert sorted(tiles) == [(i, j) for i in range(7) for j in range(i + 1)]
    apart = sum(not set(x) & set(y) for x, y in pairwise(tiles))
    assert apart <= 7
