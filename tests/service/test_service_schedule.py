"""Which queued jobs start, and why the others wait."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.service.backfill import Decision, Limits, Need, Running, Waiting, decide
from oocgemm.service.protocol import ACTIVE, FINAL, FOLLOWING, Action, Reason, State, possible, requested

ONE = Limits({0: 100}, 1000, 1000)
TWO = Limits({0: 100, 1: 50}, 1000, 1000)


def job(name: str, device: int = 10, seconds: float = 10, **options: object) -> Waiting:
    """Return a queued job. The digits in its name are its age."""
    made = Waiting(name, "user", 0, float(name[1:]), Need(device, 10, 10), seconds)
    return replace(made, **options)  # type: ignore[arg-type]


def running(name: str, device: int, ends: float, need: int = 10, owner: str = "other") -> Running:
    return Running(name, owner, device, Need(need, 10, 10), ends)


def started(decisions: Iterable[Decision]) -> dict[str, int]:
    return {one.id: one.device for one in decisions if one.device is not None}


def reasons(decisions: Iterable[Decision]) -> dict[str, Reason | None]:
    return {one.id: one.reason for one in decisions if one.device is None}


def test_jobs_start_by_priority_and_age_one_per_device() -> None:
    found = decide([job("a2"), job("a1"), job("a3", priority=1)], [], TWO, {}, 0)
    assert started(found) == {"a3": 1, "a1": 0}
    assert reasons(found) == {"a2": Reason.DEVICE_MEMORY}
    assert [one.start for one in found] == [0, 0, 10]


def test_a_shared_device_takes_jobs_while_they_fit() -> None:
    shared = replace(ONE, shared=True)
    found = decide([job("a1", 60), job("a2", 40), job("a3", 1)], [], shared, {}, 0)
    assert started(found) == {"a1": 0, "a2": 0}
    assert reasons(found) == {"a3": Reason.DEVICE_MEMORY}


def test_a_job_takes_the_smallest_device_that_has_room() -> None:
    assert started(decide([job("a1", 50), job("a2", 60)], [], TWO, {}, 0)) == {"a1": 1, "a2": 0}


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need(0, 995, 0), Reason.HOST_MEMORY),
        (Need(0, 0, 995), Reason.DISK),
        (Need(101, 0, 0), Reason.DEVICE_MEMORY),
    ],
)
def test_a_job_says_what_it_waits_for(need: Need, reason: Reason) -> None:
    found = decide([job("a1", need=need)], [running("r", 0, 5)], TWO, {}, 0)
    assert reasons(found) == {"a1": reason}


def test_jobs_that_cannot_start_whatever_runs_do_not_block_others() -> None:
    waits = [job("a1", blocked=Reason.DEPENDENCY), job("a2", blocked=Reason.RETRY_AT), job("a3")]
    found = decide(waits, [], ONE, {}, 0)
    assert started(found) == {"a3": 0}
    assert reasons(found) == {"a1": Reason.DEPENDENCY, "a2": Reason.RETRY_AT}
    drained = decide([job("a1")], [], ONE, {}, 0, draining=True)
    assert reasons(drained) == {"a1": Reason.DRAINING}


def test_the_second_user_comes_next() -> None:
    """A user with 100 jobs, of which one runs, beside a user with one."""
    many = [job(f"a{number}", owner="many") for number in range(100)]
    found = decide([*many, job("b500", owner="few")], [running("r", 0, 9, owner="many")], ONE, {}, 0)
    assert found[0].id == "b500"
    both = decide([*many, job("b500", owner="few")], [], TWO, {}, 0)
    assert {*started(both)} == {"a0", "b500"}
    used = decide([job("a1", owner="many"), job("b2", owner="few")], [], ONE, {"many": 5.0, "few": 4.0}, 0)
    assert {*started(used)} == {"b2"}


def test_a_large_job_starts_under_a_stream_of_small_ones() -> None:
    """Small jobs of 10 s come all the time. The large one waits for both devices' host memory."""
    limits = Limits({0: 100, 1: 100}, 100, 1000)
    large = job("a5", 10, 10, need=Need(10, 90, 0))
    now, number, active = 0.0, 100, [running("r", 0, 7), running("s", 1, 4)]
    active = [replace(one, need=Need(10, 40, 0)) for one in active]
    for _ in range(20):
        small = [job(f"b{number + place}", 10, 10, need=Need(10, 40, 0), owner="user") for place in range(4)]
        found = decide([large, *small], active, limits, {}, now)
        places = started(found)
        if large.id in places:
            break
        waits = {one.id: one.start for one in found}
        assert waits[large.id] == 7
        active += [
            running(each.id, places[each.id], now + each.seconds) for each in small if each.id in places
        ]
        now = min(one.ends for one in active)
        active = [one for one in active if one.ends > now]
        number += 4
    assert now == 7


def test_a_short_job_starts_before_a_reservation_that_it_does_not_delay() -> None:
    active = [running("r", 0, 20, 100)]
    head, short, long, small = (
        job("a1", 100),
        job("a2", 50, 20),
        job("a3", 50, 21),
        job("a4", 50, 30),
    )
    found = decide([head, short], active, TWO, {}, 0)
    assert started(found) == {"a2": 1}
    # A long job may start where the head does not need its device.
    assert started(decide([head, long], active, TWO, {}, 0)) == {"a3": 1}
    # The head needs nearly all host memory: the long job would delay it, the short one would not.
    greedy = replace(head, need=Need(100, 995, 0))
    found = decide([greedy, small], active, TWO, {}, 0)
    assert reasons(found) == {"a1": Reason.DEVICE_MEMORY, "a4": Reason.PRIORITY}
    assert started(decide([greedy, short], active, TWO, {}, 0)) == {"a2": 1}


def test_a_job_that_never_fits_gets_no_reservation() -> None:
    found = decide([job("a1", 200), job("a2")], [], ONE, {}, 0)
    assert started(found) == {"a2": 0}
    assert ONE.lacking(Need(200)) == (Reason.DEVICE_MEMORY, 200, 100)


NEEDS = st.builds(Need, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
OWNERS = st.sampled_from("xyz")


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[Running], Limits]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    limits = Limits(dict(enumerate(sizes)), 80, 80, draw(st.booleans()))
    queued = [
        Waiting(
            str(number),
            draw(OWNERS),
            draw(st.integers(0, 1)),
            float(number),
            draw(NEEDS),
            draw(st.floats(0, 9)),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    return queued, [], limits


@given(situations(), st.lists(st.floats(0.1, 9), max_size=30))
def test_limits_are_kept_and_every_job_that_fits_starts_in_the_end(
    situation: tuple[list[Waiting], list[Running], Limits], errors: list[float]
) -> None:
    """Jobs take longer or shorter than predicted."""
    queued, active, limits = situation
    now, order = 0.0, list[str]()
    possible_ids = {each.id for each in queued if limits.lacking(each.need) is None}
    while True:
        found = decide(queued, active, limits, {}, now)
        assert sorted(one.id for one in found) == sorted(each.id for each in queued)
        by_id = {each.id: each for each in queued}
        for one in found:
            if one.device is not None:
                each = by_id[one.id]
                error = errors[len(order) % len(errors)] if errors else 1.0
                active.append(Running(each.id, each.owner, one.device, each.need, now + each.seconds * error))
                queued.remove(each)
                order.append(each.id)
        check_limits(active, limits)
        if not active:
            break
        now = min(one.ends for one in active)
        active = [one for one in active if one.ends > now]
    assert {*order} == possible_ids


def check_limits(active: list[Running], limits: Limits) -> None:
    assert sum(one.need.host for one in active) <= limits.host
    assert sum(one.need.disk for one in active) <= limits.disk
    count = Counter(one.device for one in active)
    assert limits.shared or max(count.values(), default=0) <= 1
    for device, room in limits.devices.items():
        assert sum(one.need.device for one in active if one.device == device) <= room


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", Action)
def test_requests_lead_to_legal_states_and_are_idempotent(state: State, action: Action) -> None:
    to = requested(action, state)
    assert (action in possible(state)) == (to not in (None, state))
    if to not in (None, state):
        assert to in FOLLOWING[state]
        again = requested(action, to)
        assert again is to or (action is Action.CANCEL and to is State.CANCELLING)


def test_every_state_can_be_left_unless_it_is_final() -> None:
    for state, after in FOLLOWING.items():
        assert after or state is State.SUCCEEDED
        assert state in FINAL or after & (FINAL | ACTIVE | {State.QUEUED})
