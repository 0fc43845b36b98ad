"""The compiled threads copy blocks through pinned buffers. The device is a fake one (`driver.cpp`)."""

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import ExecutionError
from oocgemm.system.installed import compiled
from oocgemm.system.pool import DRIVER, Pieces, Pool, error_of, memory_block, row_pieces
from tests.support.native import built

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no compiled host code")

SIZE = 256  # maximum bytes of a piece
# The functions of the driver that may fail, by number, and the status of a failure.
COPY, COPY_ROWS, WRITE, QUERY, RECORD = 1, 2, 3, 4, 5
FAILED = 719
STREAMS, END = (1, 2, 3), 1 << 20  # handles


def driver(seed: int = 0, function: int = 0, first: int = 0) -> Any:
    """Return the fake driver after a reset: call number `first` of a function fails."""
    library = built("driver")
    library.fake_reset(seed, function, first)
    return library


@contextmanager
def pool(library: Any, lanes: int = 3, buffers: int = 2, *, uploads: bool) -> Iterator[Pool]:
    memory, marks = np.zeros(lanes * 3 * SIZE, np.uint8), np.ones(lanes * buffers * 64, np.uint8)
    functions = (ctypes.c_void_p * len(DRIVER)).in_dll(library, "fake_driver")
    places = memory.ctypes.data, 3 * SIZE, 2 * SIZE, marks.ctypes.data
    made = Pool([at or 0 for at in functions], 1, places, (lanes, buffers), uploads=uploads)
    try:
        yield made
    finally:
        made.close()


def pieces_of(rows: int, row: int, height: int, width: int) -> Pieces:
    """Cut a block with `rows` rows of `row` bytes into pieces."""
    found = [
        (top, min(height, rows - top), left, min(width, row - left))
        for top in range(0, rows, height)
        for left in range(0, row, width)
    ]
    return np.array(found, np.uintp)


class Copied:
    """An array with gaps between its rows, the device's memory, and the block that is copied between them."""

    def __init__(self, rows: int, row: int, gap: int, height: int, width: int, *, uploads: bool) -> None:
        rng, self.uploads = np.random.default_rng(rows * row + gap), uploads
        self.memory = rng.integers(0, 256, (rows, row + gap)).astype(np.uint8)
        self.device = rng.integers(0, 256, rows * row).astype(np.uint8)
        self.source = (self.memory[:, :row] if uploads else self.device.reshape(rows, row)).copy()
        self.gaps = self.memory[:, row:].copy()
        pieces = pieces_of(rows, row, height, width)
        self.array = self.memory[:, :row]
        self.block = memory_block(self.array, pieces, self.device.ctypes.data, uploads=uploads)

    def check(self) -> None:
        found = self.device.reshape(self.source.shape) if self.uploads else self.array
        np.testing.assert_array_equal(found, self.source)
        np.testing.assert_array_equal(self.memory[:, self.source.shape[1] :], self.gaps)


def copy(made: Pool, library: Any, blocks: Sequence[Copied]) -> None:
    """Copy blocks at once, on several streams."""
    for i, each in enumerate(blocks):
        made.begin(each.block, STREAMS[i % len(STREAMS)], END + i)
    for i, each in enumerate(blocks):
        made.wait_issued(each.block)
        made.wait_finished(each.block)
        assert each.block.error == 0
        assert each.block.issued_at > 0
        library.fake_wait(ctypes.c_void_p(END + i))  # the end comes after the last copy
        each.check()


@given(
    *(st.integers(1, 40), st.integers(1, 60), st.sampled_from([0, 1, 4096])),
    *(
        st.integers(1, 8),
        st.integers(1, 32),
        st.booleans(),
        st.integers(1, 4),
        st.integers(1, 5),
        st.integers(0, 9),
    ),
)
def test_blocks_of_any_shape_are_copied(
    rows: int, row: int, gap: int, height: int, width: int, uploads: bool, lanes: int, buffers: int, seed: int
) -> None:
    library = driver(seed)
    with pool(library, lanes, buffers, uploads=uploads) as made:
        copy(made, library, [Copied(rows, row, gap, height, width, uploads=uploads)])


@pytest.mark.parametrize("uploads", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_many_blocks_are_copied_at_once(seed: int, uploads: bool) -> None:
    library = driver(seed)
    with pool(library, uploads=uploads) as made:
        copy(made, library, [Copied(3 + i, 100, i % 2, 2, 100, uploads=uploads) for i in range(40)])


@pytest.mark.parametrize("uploads", [True, False])
@pytest.mark.parametrize(
    ("function", "first"), [(COPY, 1), (COPY, 9), (COPY_ROWS, 2), (WRITE, 5), (RECORD, 2)]
)
def test_a_failure_of_the_driver_stops_its_block_only(function: int, first: int, uploads: bool) -> None:
    library = driver(first, function, first)
    with pool(library, uploads=uploads) as made:
        blocks = [
            Copied(20, 50, 0, 2, 25 if function == COPY_ROWS else 50, uploads=uploads) for _ in range(3)
        ]
        for i, each in enumerate(blocks):
            made.begin(each.block, STREAMS[i], END + i)
        for each in blocks:
            made.wait_issued(each.block)
            made.wait_finished(each.block)
        assert sorted(each.block.error for each in blocks) == [0, 0, FAILED]
        for i, each in enumerate(blocks):
            if not each.block.error:
                library.fake_wait(ctypes.c_void_p(END + i))
                each.check()
        copy(made, library, [Copied(9, 50, 0, 2, 50, uploads=uploads)])


def test_an_error_of_the_system_is_that_of_the_first_piece_that_fails() -> None:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    move = kind(lambda place, number, piece, buffer: errno.ENOSPC if number == 3 else 0)
    library = driver()
    with pool(library, uploads=True) as made:
        copied = Copied(20, 50, 0, 2, 50, uploads=True)
        copied.block.move = ctypes.cast(move, ctypes.c_void_p)
        made.begin(copied.block, 1, END)
        made.wait_finished(copied.block)
    error = error_of(copied.block)
    assert error is not None
    assert error.errno == errno.ENOSPC


def test_copies_have_been_issued_before_a_download_is_written() -> None:
    library = driver()
    library.fake_hold(ctypes.c_void_p(1))
    with pool(library, lanes=1, uploads=False) as made:
        copied = Copied(4, 50, 0, 2, 50, uploads=False)
        made.begin(copied.block, 1, END)
        made.wait_issued(copied.block)
        assert not made.is_finished(copied.block)
        library.fake_hold(None)
        made.wait_finished(copied.block)
        copied.check()


def test_a_thread_that_has_taken_a_lane_is_waited_for() -> None:
    library = driver()
    with pool(library, lanes=1, uploads=True) as made:
        made.take(0)
        copied = Copied(4, 50, 0, 2, 50, uploads=True)
        made.begin(copied.block, 1, END)
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
    library.fake_hold(ctypes.c_void_p(1))
    with pool(library, lanes=1, uploads=True) as made:
        copied = Copied(4, 50, 0, 2, 50, uploads=True)
        made.begin(copied.block, 1, END)
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
        copy(made, library, [Copied(9, 50, 0, 2, 50, uploads=True)])


@given(st.integers(1, 20), st.integers(1, 200), st.integers(8, 300))
def test_pieces_cover_an_array_once(rows: int, columns: int, size: int) -> None:
    covered = np.zeros((rows, columns), int)
    for row, height, left, width in row_pieces(rows, columns, size).tolist():
        assert height * width <= size
        assert width == columns or height == 1  # contiguous on the device
        covered[row : row + height, left : left + width] += 1
    assert (covered == 1).all()


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
