"""The compiled threads copy blocks through pinned buffers. The device is a fake one (`driver.cpp`)."""

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import ExecutionError
from oocgemm.system.installed import compiled
from oocgemm.system.pool import DRIVER, CopiedBlock, CopyLane, Pieces, Pool, error_of, memory_block
from tests.support.native import built

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no compiled host code")

SIZE = 256  # maximum bytes of a piece
# The functions of the driver that may fail, by number, and the status of a failure.
COPY, COPY_ROWS, WRITE, QUERY, RECORD, WAIT = 1, 2, 3, 4, 5, 6
FAILED = 719
# Handles: the streams of the lanes, of the ends, and of what copies wait for; events.
LANES, ENDS, OTHER, START, END, LEFT = 1, 50, 60, 1 << 19, 1 << 20, 1 << 21


def driver(seed: int = 0) -> Any:
    """Return the fake driver after a reset."""
    library = built("driver")
    library.fake_reset(seed)
    return library


@contextmanager
def pool(library: Any, lanes: int = 3, size: int = 2 * SIZE, *, uploads: bool) -> Iterator[Pool]:
    """Open a pool whose lanes have `size` bytes each."""
    pitch = size + SIZE
    memory, marks = np.full(lanes * pitch, 77, np.uint8), np.ones(lanes * 16, np.uint32)
    functions = (ctypes.c_void_p * len(DRIVER)).in_dll(library, "fake_driver")
    given = [
        CopyLane(memory.ctypes.data + i * pitch, size, marks.ctypes.data + 64 * i, LANES + i, LEFT + i)
        for i in range(lanes)
    ]
    made = Pool([at or 0 for at in functions], 1, ENDS, given, uploads=uploads)
    try:
        yield made
    finally:
        made.close()
    assert (memory.reshape(lanes, pitch)[:, size:] == 77).all()  # nobody has written behind a lane


def pieces_of(rows: int, row: int, height: int, width: int) -> Pieces:
    """Cut a block with `rows` rows of `row` bytes into pieces."""
    found = [
        (top, min(height, rows - top), left, min(width, row - left))
        for top in range(0, rows, height)
        for left in range(0, row, width)
    ]
    return np.array(found, np.uintp)


class Copied:
    """An array with gaps between its rows, the device's memory, and the block that is copied between them.

    The pool cuts the block. To upload, `cut` may say how high and how wide its pieces are instead.
    """

    def __init__(
        self, rows: int, row: int, gap: int = 0, cut: tuple[int, int] | None = None, *, uploads: bool
    ) -> None:
        rng, self.uploads = np.random.default_rng(rows * row + gap), uploads
        self.memory = rng.integers(0, 256, (rows, row + gap)).astype(np.uint8)
        self.device = rng.integers(0, 256, rows * row).astype(np.uint8)
        self.source = (self.memory[:, :row] if uploads else self.device.reshape(rows, row)).copy()
        self.gaps = self.memory[:, row:].copy()
        self.array = self.memory[:, :row]
        self.block = memory_block(self.array, self.device.ctypes.data, uploads=uploads)
        if cut is not None:
            assert uploads
            self._pieces = pieces_of(rows, row, *cut)
            self.block.pieces = self._pieces.ctypes.data
            self.block.move = ctypes.cast(built("driver").fake_move, ctypes.c_void_p)

    def check(self) -> None:
        found = self.device.reshape(self.source.shape) if self.uploads else self.array
        np.testing.assert_array_equal(found, self.source)
        np.testing.assert_array_equal(self.memory[:, self.source.shape[1] :], self.gaps)


def begin(made: Pool, block: CopiedBlock, number: int = 0, waits: Sequence[int] = ()) -> None:
    made.begin(block, waits, START + number, END + number)


def copy(made: Pool, library: Any, blocks: Sequence[Copied], waits: Sequence[int] = ()) -> None:
    """Copy blocks at once."""
    for i, each in enumerate(blocks):
        begin(made, each.block, i, waits)
    for i, each in enumerate(blocks):
        made.wait_issued(each.block)
        made.wait_finished(each.block)
        assert each.block.error == 0
        assert each.block.started_at > 0
        assert library.fake_recordings(ctypes.c_void_p(START + i)) == 1
        library.fake_wait(ctypes.c_void_p(END + i))  # the end comes after the last copy
        each.check()
        assert library.fake_recordings(ctypes.c_void_p(END + i)) == 1


@given(
    *(st.integers(1, 40), st.integers(1, 60), st.sampled_from([0, 1, 4096])),
    *(st.integers(1, 8), st.integers(1, 32), st.sampled_from([None, False, True])),
    *(st.integers(1, 4), st.integers(SIZE, 5 * SIZE), st.integers(0, 9)),
)
def test_blocks_of_any_shape_are_copied(
    rows: int,
    row: int,
    gap: int,
    height: int,
    width: int,
    uploads: bool | None,
    lanes: int,
    size: int,
    seed: int,
) -> None:
    library, cut = driver(seed), (height, width) if uploads is None else None
    with pool(library, lanes, size, uploads=uploads is not False) as made:
        copy(made, library, [Copied(rows, row, gap, cut, uploads=uploads is not False)])


def test_an_upload_starts_when_its_first_piece_is_moved() -> None:
    library, moved, started = driver(), list[int](), list[int]()

    def move(*_: object) -> int:
        started.append(library.fake_recordings(ctypes.c_void_p(START)))
        moved.append(perf_counter_ns())
        return 0

    copied = Copied(8, 64, cut=(2, 64), uploads=True)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    called = kind(move)
    copied.block.move = ctypes.cast(called, ctypes.c_void_p)
    with pool(library, lanes=1, uploads=True) as made:
        begin(made, copied.block)
        made.wait_finished(copied.block)
    assert 0 < copied.block.started_at <= moved[0]
    assert started == [1, 1, 1, 1]


@pytest.mark.parametrize("uploads", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_many_blocks_are_copied_at_once(seed: int, uploads: bool) -> None:
    library = driver(seed)
    with pool(library, uploads=uploads) as made:
        copy(made, library, [Copied(3 + i, 100, i % 2, uploads=uploads) for i in range(40)])


@pytest.mark.parametrize("uploads", [True, False])
def test_large_blocks_are_copied_in_pieces_of_several_sizes(uploads: bool) -> None:
    library = driver()
    with pool(library, 2, 8 << 20, uploads=uploads) as made:
        copy(made, library, [Copied(4000 + i, 3000, i % 2, uploads=uploads) for i in range(3)])


@pytest.mark.parametrize("uploads", [True, False])
def test_copies_wait_for_events(uploads: bool) -> None:
    library, events = driver(), (1, 2)
    for event in events:
        library.fake_record(ctypes.c_void_p(event), ctypes.c_void_p(OTHER))
    library.fake_hold(ctypes.c_void_p(OTHER))
    with pool(library, lanes=2, size=4096, uploads=uploads) as made:
        copied = Copied(20, 100, uploads=uploads)
        begin(made, copied.block, 0, events)
        made.wait_issued(copied.block)
        for _ in range(50):
            library.fake_step()
        assert not library.fake_reached(ctypes.c_void_p(START))
        library.fake_hold(None)
        made.wait_finished(copied.block)
        library.fake_wait(ctypes.c_void_p(END))
        copied.check()


@pytest.mark.parametrize(
    ("function", "first", "uploads"),
    [
        (COPY_ROWS, 2, True),  # downloads need no such copies
        *(
            (function, first, uploads)
            for function, first in (
                (COPY, 1),
                (COPY, 9),
                (WRITE, 5),
                (RECORD, 1),
                (RECORD, 4),
                (WAIT, 1),
                (WAIT, 4),
            )
            for uploads in (True, False)
        ),
    ],
)
def test_a_failure_of_the_driver_stops_its_block_only(function: int, first: int, uploads: bool) -> None:
    library, cut = driver(first), (2, 25) if function == COPY_ROWS else None
    library.fake_record(ctypes.c_void_p(1), ctypes.c_void_p(OTHER))
    library.fake_fail(function, first)
    with pool(library, uploads=uploads) as made:
        blocks = [Copied(20, 50, 0, cut, uploads=uploads) for _ in range(3)]
        for i, each in enumerate(blocks):
            begin(made, each.block, i, [1])
        for each in blocks:
            made.wait_issued(each.block)
            made.wait_finished(each.block)
        assert sorted(each.block.error for each in blocks) == [0, 0, FAILED]
        for i, each in enumerate(blocks):
            if not each.block.error:
                library.fake_wait(ctypes.c_void_p(END + i))
                each.check()
        library.fake_fail(0, 0)
        others = [Copied(9, 50, uploads=uploads)]
        made.begin(others[0].block, [], START + 9, END + 9)
        made.wait_finished(others[0].block)
        library.fake_wait(ctypes.c_void_p(END + 9))
        others[0].check()


def test_an_error_of_the_system_is_that_of_the_first_piece_that_fails() -> None:
    at = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, at, ctypes.POINTER(ctypes.c_size_t), at, ctypes.c_int)
    move = kind(lambda place, piece, buffer, cached: errno.ENOSPC if piece[2] == 3 * SIZE else 0)
    library = driver()
    with pool(library, uploads=True) as made:
        copied = Copied(20, 50, uploads=True)
        copied.block.move = ctypes.cast(move, ctypes.c_void_p)
        begin(made, copied.block)
        made.wait_finished(copied.block)
    error = error_of(copied.block)
    assert error is not None
    assert error.errno == errno.ENOSPC


@given(
    *(st.integers(1, 9), st.integers(1, 9000), st.integers(0, 3), st.floats(0, 1), st.floats(0, 1)),
    *(st.booleans(), st.integers(0, 64)),
)
def test_a_piece_is_moved_from_anywhere_in_a_block_to_anywhere(
    rows: int, row: int, gap: int, first: float, part: float, cached: bool, shift: int
) -> None:
    copied = Copied(rows, row, gap, uploads=True)
    begins = int(first * (rows * row - 1))
    size = max(1, int(part * (rows * row - begins)))
    piece, buffer = np.array([0, 1, begins, size], np.uintp), np.zeros(shift + size + 64, np.uint8)
    at = ctypes.c_void_p
    move = ctypes.CFUNCTYPE(ctypes.c_int, at, at, at, ctypes.c_int)(copied.block.move)
    assert move(copied.block.place, piece.ctypes.data, buffer.ctypes.data + shift, cached) == 0
    expected = np.zeros_like(buffer)
    expected[shift : shift + size] = copied.source.reshape(-1)[begins : begins + size]
    np.testing.assert_array_equal(buffer, expected)


def test_copies_have_been_issued_before_a_download_is_written() -> None:
    library = driver()
    library.fake_hold(ctypes.c_void_p(LANES))
    with pool(library, lanes=1, uploads=False) as made:
        copied = Copied(4, 50, uploads=False)
        begin(made, copied.block)
        made.wait_issued(copied.block)
        assert not made.is_finished(copied.block)
        library.fake_hold(None)
        made.wait_finished(copied.block)
        copied.check()


def test_a_thread_that_has_taken_a_lane_is_waited_for() -> None:
    library = driver()
    with pool(library, lanes=1, uploads=True) as made:
        made.take(0)
        copied = Copied(4, 50, uploads=True)
        begin(made, copied.block)
        waiting = threading.Thread(target=made.wait_issued, args=(copied.block,))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        made.give(0)
        waiting.join()
        library.fake_wait(ctypes.c_void_p(END))
        copied.check()


def test_no_copy_is_in_flight_on_a_lane_that_is_taken() -> None:
    library = driver()
    library.fake_hold(ctypes.c_void_p(LANES))
    with pool(library, lanes=1, uploads=True) as made:
        copied = Copied(4, 50, uploads=True)
        begin(made, copied.block)
        made.wait_issued(copied.block)

        def use() -> None:
            made.take(0)
            made.give(0)

        taking = threading.Thread(target=use)
        taking.start()
        taking.join(0.05)
        assert taking.is_alive()
        library.fake_hold(None)
        taking.join()
        copied.check()


def test_a_pool_closes_in_its_own_process_only() -> None:
    library = driver()
    with pool(library, uploads=True) as made:
        if (child := os.fork()) == 0:
            made.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        copy(made, library, [Copied(9, 50, uploads=True)])


def test_a_pool_needs_all_of_its_threads() -> None:
    library = driver()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # there is no room for so many stacks
        try:
            with pool(library, lanes=2000, uploads=True):
                os._exit(1)
        except ExecutionError as error:
            os._exit(0 if "raise the limit (ulimit -v)" in str(error) else 2)
    assert os.waitpid(child, 0)[1] == 0
