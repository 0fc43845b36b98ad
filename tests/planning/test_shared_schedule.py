"""The schedule of several devices: its waits, its results, its reads, and how tiles are dealt."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.planning import Kind, Schedule, Slots, Tier, TileGrid, TileShape, Traversal
from oocgemm.planning.schedule.dealing import SharedSchedule, arrangement, deal
from oocgemm.planning.schedule.traversal import ROW_BY_ROW, forwards, last
from tests.planning.test_schedule import expected, operands, schedules
from tests.support.schedule_check import verify, waits_of
from tests.support.schedule_problems import problem
from tests.support.simulator import Simulator
from tests.support.suite import each_value, examples

DEVICES = st.integers(1, 8)


def shared(
    schedule: Schedule, devices: int, traversal: Traversal = ROW_BY_ROW, *, apart: bool = False
) -> SharedSchedule:
    """Return the schedule of the same tiles on several devices."""
    arranged = arrangement(devices, schedule.problem, schedule.grid, apart=apart)
    tiles = deal(devices, schedule.grid.shape, traversal, arranged, set(schedule.tiles), apart=apart)
    given = {field.name: getattr(schedule, field.name) for field in fields(Schedule)}
    return SharedSchedule(**(given | {"tiles": tiles}), devices=devices)


@st.composite
def shared_schedules(draw: st.DrawFn) -> SharedSchedule:
    traversal = Traversal(draw(st.integers(0, 1)), draw(st.integers(1, 3)), draw(st.booleans()))
    schedule = draw(schedules())
    slots = schedule.slots
    if not slots.unified:  # panels of operands in host memory or in the page cache need no host slots
        host_a, host_b = (draw(st.sampled_from((0, count))) for count in (slots.host_a, slots.host_b))
        schedule = replace(schedule, slots=replace(slots, host_a=host_a, host_b=host_b))
    return shared(schedule, draw(DEVICES), traversal, apart=draw(st.booleans()))


@given(
    devices=DEVICES,
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    axis=st.integers(0, 1),
    band=st.integers(1, 4),
    turns=st.booleans(),
    left=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))) | st.none(),
)
@settings(max_examples=examples(300), deadline=None)
def test_every_tile_is_dealt_once_in_full_rounds_of_one_direction(
    devices: int, shape: tuple[int, int], axis: int, band: int, turns: bool, left: Any
) -> None:
    grid = TileGrid.of(problem(4 * shape[0], 4 * shape[1], 8), TileShape(4, 4, 4))
    arranged = arrangement(devices, problem(4, 4, 8), grid)
    dealt = deal(devices, shape, Traversal(axis, band, turns), arranged, left)
    every = {(i, j) for i in range(shape[0]) for j in range(shape[1])}
    assert arranged[0] * arranged[1] == devices
    assert sorted(dealt) == sorted(every if left is None else every & left)
    rounds = [dealt[start : start + devices] for start in range(0, len(dealt), devices)]
    mixed = [each for each in rounds if len({forwards(tile) for tile in each}) > 1]
    assert len(mixed) <= 1, "rounds of one direction share panels"
    assert all(each in rounds[-2:] for each in mixed)


@given(
    devices=DEVICES,
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    axis=st.integers(0, 1),
    band=st.integers(1, 4),
    left=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))) | st.none(),
)
@settings(max_examples=examples(200), deadline=None)
def test_every_tile_is_dealt_once_to_devices_that_work_apart(
    devices: int, shape: tuple[int, int], axis: int, band: int, left: Any
) -> None:
    grid = TileGrid.of(problem(4 * shape[0], 4 * shape[1], 8), TileShape(4, 4, 4))
    arranged = arrangement(devices, problem(4, 4, 8), grid, apart=True)
    dealt = deal(devices, shape, Traversal(axis, band), arranged, left, apart=True)
    every = {(i, j) for i in range(shape[0]) for j in range(shape[1])}
    assert arranged[0] * arranged[1] == devices
    assert sorted(dealt) == sorted(every if left is None else every & left)


@pytest.mark.parametrize(
    ("devices", "shape", "rectangle"),
    [
        pytest.param(2, (4, 8), (4, 4), id="the longer side is divided"),
        pytest.param(4, (6, 6), (3, 3), id="both sides are divided"),
        pytest.param(6, (2, 12), (2, 2), id="squares have the fewest panels"),
        pytest.param(2, (1, 4), (1, 2), id="a single row"),
    ],
)
def test_devices_that_work_apart_compute_rectangles(
    devices: int, shape: tuple[int, int], rectangle: tuple[int, int]
) -> None:
    p = problem(8 * shape[0], 8 * shape[1], 64)
    grid = TileGrid.of(p, TileShape(8, 8, 2))
    tiles = deal(devices, shape, Traversal(), arrangement(devices, p, grid, apart=True), apart=True)
    for device in range(devices):
        mine = tiles[device::devices]
        rows, cols = ({tile[axis] for tile in mine} for axis in (0, 1))
        assert (len(rows), len(cols), len(mine)) == (*rectangle, rectangle[0] * rectangle[1])


@given(schedule=shared_schedules(), seed=st.integers(0, 2**16))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_legal_order_breaks_a_schedule_of_several_devices(schedule: SharedSchedule, seed: int) -> None:
    verify(schedule)
    a, b, c = operands(schedule, seed)
    right = expected(schedule, a, b, c)
    Simulator(schedule, a, b, c).run(seed)
    np.testing.assert_array_equal(c, right)


@given(schedule=shared_schedules())
@settings(max_examples=examples(200), deadline=None)
def test_operations_use_the_slots_of_their_own_device(schedule: SharedSchedule) -> None:
    for operation in schedule:
        assert not operation.peer or operation.reads[0].slot.device != operation.device
        for region in (*(() if operation.peer else operation.reads), *operation.writes):
            is_common = region.slot.tier is Tier.HOST and region.slot.operand in "AB"
            assert region.slot.device == (0 if is_common else operation.device)
        assert schedule.tiles.index(operation.tile) % schedule.devices == operation.device


@given(schedule=schedules(), devices=DEVICES)
@settings(max_examples=examples(200), deadline=None)
def test_tiles_are_summed_as_on_one_device(schedule: Schedule, devices: int) -> None:
    """Equal blocks are multiplied in equal order, so that the bits of C are equal."""
    schedule = replace(schedule, last=last(Traversal(), *schedule.grid.shape))

    def multiplications(operations: Any) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {tile: [] for tile in schedule.tiles}
        for o in operations:
            if o.kind is Kind.MULTIPLY:
                found[o.tile].append((o.step, o.m, o.n, o.k, o.first, len(o.reads)))
        return found

    assert multiplications(shared(schedule, devices)) == multiplications(schedule)


@given(schedule=schedules())
@settings(max_examples=examples(100), deadline=None)
def test_a_shared_schedule_of_one_device_has_the_operations_of_a_schedule(schedule: Schedule) -> None:
    given = {field.name: getattr(schedule, field.name) for field in fields(Schedule)}
    assert list(SharedSchedule(**given, devices=1)) == list(schedule)


@given(schedule=shared_schedules())
@settings(max_examples=examples(200), deadline=None)
def test_traffic_is_what_the_operations_of_all_devices_move(schedule: SharedSchedule) -> None:
    moved = dict.fromkeys(("read", "h2d", "d2h", "write"), 0)
    for operation in schedule:
        if operation.bytes and operation.kind is not Kind.PREPARE:
            moved[operation.lane.value] += operation.bytes
    assert schedule.traffic() == moved


def test_a_host_slot_is_overwritten_only_after_its_uploads_to_all_devices() -> None:
    """Two uploads from one host slot are on streams of the same name, but of two devices."""
    p = problem(8, 4, 40)
    grid = TileGrid.of(p, TileShape(2, 4, 2))
    schedule = SharedSchedule(p, grid, [(0, 0), (2, 0)], Slots(host_b=2), devices=2)
    planned = waits_of(schedule)
    for number, (operation, waits) in enumerate(planned):
        if operation.kind is Kind.READ and operation.operand == "B" and operation.step >= 2:
            uploads = [planned[wait][0] for wait in waits if planned[wait][0].kind is Kind.UPLOAD]
            assert {upload.device for upload in uploads} == {0, 1}, number


def _read(operations: Any) -> int:
    return sum(operation.bytes for operation in operations if operation.kind is Kind.READ)


@each_value
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (12, 6), (7, 9)])
def test_devices_in_step_share_panels(devices: int, shape: tuple[int, int]) -> None:
    """Host slots for the panels of a few steps suffice to read a panel once for all tiles of a round."""
    p = problem(8 * shape[0], 8 * shape[1], 64)
    grid = TileGrid.of(p, TileShape(8, 8, 2))
    few = Slots(host_a=3 * devices, host_b=3 * devices)
    arranged = arrangement(devices, p, grid)
    tiles = deal(devices, shape, Traversal(), arranged)
    schedule = SharedSchedule(p, grid, tiles, few, devices=devices)
    read, uploaded = schedule.traffic()["read"], schedule.traffic()["h2d"]
    distinct = 0
    for start in range(0, len(tiles), devices):
        now = tiles[start : start + devices]
        distinct += len({i for i, _ in now}) + len({j for _, j in now})
    assert read <= 1.05 * distinct * 8 * p.k * 8
    assert read < uploaded


@each_value
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (6, 8), (3, 3), (1, 8), (8, 1)])
@pytest.mark.parametrize("host", [(12, 12), (40, 12), (12, 40), (80, 80), (300, 300)])
def test_several_devices_read_no_more_than_one(
    devices: int, shape: tuple[int, int], host: tuple[int, int]
) -> None:
    p = problem(8 * shape[0], 8 * shape[1], 64)
    grid = TileGrid.of(p, TileShape(8, 8, 2))
    slots = Slots(host_a=max(host[0], 3 * devices), host_b=max(host[1], 3 * devices))

    def read(traversal: Traversal, devices: int) -> int:
        tiles = deal(devices, shape, traversal, arrangement(devices, p, grid))
        return _read(SharedSchedule(p, grid, tiles, slots, devices=devices))

    for axis in (0, 1):
        assert read(Traversal(axis), devices) <= 1.05 * read(Traversal(axis), 1), axis


@each_value
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (12, 6), (7, 9)])
def test_devices_pass_panels_without_host_slots_on(devices: int, shape: tuple[int, int]) -> None:
    """Each panel of a round is uploaded to one device. The devices upload about equally many."""
    p = problem(8 * shape[0], 8 * shape[1], 64)
    grid = TileGrid.of(p, TileShape(8, 8, 2))
    tiles = deal(devices, shape, Traversal(), arrangement(devices, p, grid))
    schedule = SharedSchedule(p, grid, tiles, Slots(a=3, b=3, host_a=0, host_b=0), devices=devices)
    uploads = [operation for operation in schedule if operation.kind is Kind.UPLOAD]
    distinct = 0
    for start in range(0, len(tiles), devices):
        now = tiles[start : start + devices]
        distinct += len({i for i, _ in now}) + len({j for _, j in now})
    by_device = [0] * devices
    for operation in uploads:
        by_device[operation.device] += 0 if operation.peer else operation.bytes
    assert sum(by_device) <= 1.05 * distinct * 8 * p.k * 8
    assert sum(by_device) < sum(operation.bytes for operation in uploads)
    assert devices * max(by_device) <= 2 * sum(by_device)


def test_devices_take_turns_step_by_step() -> None:
    p = problem(16, 16, 40)
    grid = TileGrid.of(p, TileShape(4, 4, 2))
    schedule = SharedSchedule(p, grid, deal(4, grid.shape, Traversal(), (2, 2)), Slots(), devices=4)
    begun: dict[int, set[object]] = {device: set() for device in range(4)}
    for operation in schedule:
        if operation.kind is Kind.MULTIPLY:
            begun[operation.device].add((operation.tile, operation.step))
            counts = sorted(map(len, begun.values()))
            assert counts[-1] - counts[0] <= 1
