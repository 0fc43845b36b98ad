"""The window gives every unfinished tile to some worker until it is done, whatever workers do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.distributed.coordinator import MAX_ATTEMPTS, Window

TILES = {0: [(0, 0), (0, 1)], 1: [(1, 0)], 2: [(1, 1)]}


def test_each_worker_gets_one_part_and_each_part_one_worker() -> None:
    window = Window(TILES)
    assert [window.next(worker, "ab") for worker in "ab"] == [(0, 1), (1, 1)]
    window.tile_done((1, 0))
    window.ended("b", None)
    assert window.next("b", "ab") == (2, 1)
    window.tile_done((1, 1))
    window.ended("b", None)
    assert window.next("b", "ab") is None


def test_a_part_whose_worker_died_goes_to_another_worker() -> None:
    window = Window({0: [(0, 0)]})
    assert window.next("a", "ab") == (0, 1)
    assert window.ended("a", "it died") is None
    assert window.next("a", "ab") is None
    assert window.next("b", "ab") == (0, 2)


def test_a_part_whose_worker_died_goes_to_the_same_worker_if_there_is_no_other() -> None:
    window = Window({0: [(0, 0)]})
    assert window.next("a", "a") == (0, 1)
    window.ended("a", "it died")
    assert window.next("a", "a") == (0, 2)


def test_three_attempts_without_a_finished_tile_are_too_many() -> None:
    window = Window({0: [(0, 0)]})
    found = []
    for _ in range(MAX_ATTEMPTS):
        window.next("a", "a")
        found.append(window.ended("a", "it died"))
    assert found[:-1] == [None] * (MAX_ATTEMPTS - 1)
    assert found[-1] is not None
    assert (found[-1].part, found[-1].why) == (0, "it died")


def test_an_attempt_that_finished_a_tile_does_not_count() -> None:
    tiles = [(0, j) for j in range(2 * MAX_ATTEMPTS)]
    window = Window({0: tiles})
    for tile in tiles[:-1]:
        window.next("a", "a")
        window.tile_done(tile)
        assert window.ended("a", "it died") is None


def test_a_worker_that_always_fails_is_not_used_any_more() -> None:
    window = Window({number: [(number, 0), (number, 1)] for number in range(5)})
    for _ in range(MAX_ATTEMPTS):
        assert window.next("bad", ("bad", "good")) is not None
        window.ended("bad", "no GPU")
    assert window.next("bad", ("bad", "good")) is None
    assert window.next("good", ("bad", "good")) is not None


def test_a_tile_counts_once() -> None:
    window = Window(TILES)
    assert [window.tile_done((0, 0)), window.tile_done((0, 0)), window.tile_done((9, 9))] == [
        True,
        False,
        False,
    ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["done", "dies", "tile"])), max_size=200))
def test_every_tile_is_done_once_whatever_happens(events: list[tuple[str, str]]) -> None:
    """Workers get parts, finish tiles or parts, or die, in any order. Then one worker computes the rest."""
    parts = {number: [(number, j) for j in range(1 + number % 3)] for number in range(6)}
    window, running, done = Window(parts), dict[str, int](), list[tuple[int, int]]()

    def finish(tile: tuple[int, int]) -> None:
        assert window.tile_done(tile)
        done.append(tile)

    for worker, event in events:
        if worker not in running:
            given_part = window.next(worker, "abc")
            if given_part is not None:
                assert given_part[0] not in running.values()
                running[worker] = given_part[0]
            continue
        left = sorted(window.left(running[worker]))
        if event == "tile" and left:
            finish(left[0])
        elif event == "done":
            for tile in left:
                finish(tile)
            running.pop(worker)
            assert window.ended(worker, None) is None
        elif event == "dies":
            running.pop(worker)
            if window.ended(worker, "it died") is not None:
                return  # the run fails
    for worker in list(running):
        running.pop(worker)
        if window.ended(worker, "it died") is not None:
            return
    while not window.complete:
        number, _ = window.next("d", "d") or pytest.fail("a tile is left, and no part is given")
        for tile in sorted(window.left(number)):
            finish(tile)
        window.ended("d", None)
    assert sorted(done) == sorted(tile for tiles in parts.values() for tile in tiles)
