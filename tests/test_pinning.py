"""Arrays are pinned part by part in order of first use, where copying them would take longer."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm import stores
from oocgemm.backends.base import Array
from oocgemm.backends.cuda.borders import cut
from oocgemm.engine import pinning
from oocgemm.engine.pinning import PinnedOperands
from oocgemm.errors import ExecutionError
from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Kind,
    Layout,
    Layouts,
    MachineModel,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.stores import arrays
from oocgemm.system.memory import allocate
from tests.fake_pinner import KIB, FakePinner, held, pin_small_parts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_small_parts(monkeypatch)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.lists(st.integers(-2, 130), max_size=6, unique=True),
)
def test_a_block_is_cut_at_borders_and_nowhere_else(
    height: int, width: int, more: int, places: list[int]
) -> None:
    block = np.arange(height * (width + more)).reshape(height, width + more)[:, :width]
    borders = [block.ctypes.data + 8 * place for place in sorted(places)]
    pieces = list(cut(block, borders))
    assert [x for piece in pieces for x in piece.ravel()] == block.ravel().tolist()
    for piece in pieces:
        low, high = np.lib.array_utils.byte_bounds(piece)
        assert not any(low < border < high for border in borders)
        assert len(piece) == 1 or piece.shape[1] == width
    # Each border adds at most three pieces: the end of a row, whole rows, and the start of a row.
    assert len(pieces) <= 1 + 3 * len(borders)


def test_each_page_is_pinned_once_in_order_of_first_use() -> None:
    a, b, fake = held(64, 4 * KIB), held(64, 4 * KIB), FakePinner()
    b_rows = [b[r : r + 8, :KIB] for r in range(0, 64, 8)]
    pinned = PinnedOperands([a, b], [a[:, : KIB // 2], *b_rows], fake.pinner)
    found = [pinned.await_block(block) for block in b_rows]
    assert all(
        one is not None and one[0] is block and fake.covers(block, one.borders)
        for one, block in zip(found, b_rows, strict=True)
    )
    pinned._thread.join()
    assert sum(size for _, size in fake.calls) == a.nbytes + b.nbytes
    in_b = [b.ctypes.data <= begin < b.ctypes.data + b.nbytes for begin, _ in fake.calls]
    # The first panel of A is a part of every row. If all its pages were pinned for it, all of A would come
    # before B.
    assert in_b == sorted(in_b, reverse=True)
    assert any(in_b)
    assert {size for _, size in fake.calls[:3]} == {pinning.PART}
    assert max(size for _, size in fake.calls[3:]) == pinning.PARTS_PER_CALL * pinning.PART
    assert pinned.await_block(a[:, KIB : 2 * KIB]) is not None
    pinned.release()
    assert not fake.ranges


@settings(deadline=None)
@given(st.integers(0, 7), st.integers(1, 64), st.integers(0, 63), st.integers(0, 12), st.integers(1, 16))
def test_operands_may_share_memory(offset: int, rows: int, top: int, left: int, width: int) -> None:
    """The operands are parts of one array, at any address, and overlap."""
    whole, fake = held(130, 1024).reshape(-1)[offset:][: 128 * 1024].reshape(128, 1024), FakePinner()
    parts = [whole[:96], whole[48:], whole[top : top + rows]]
    pinned = PinnedOperands(parts, [], fake.pinner)
    pinned._thread.join()
    for part in parts:
        block = part[:, 64 * left : 64 * (left + width)]
        found = pinned.await_block(block)
        if block.size:
            assert found is not None
            assert fake.covers(block, found.borders)
    pinned.release()
    assert not fake.ranges


def test_a_block_not_pinned_soon_is_not_waited_for() -> None:
    a, fake = held(256, KIB), FakePinner()
    fake.allowed.clear()
    pinned = PinnedOperands([a], [], fake.pinner)
    # All pages before these rows must be pinned first, which takes too long to wait for.
    assert pinned.await_block(a[200:201]) is None
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(pinned.await_block(a[:8])))
    thread.start()
    fake.allowed.set()
    thread.join()
    assert waiting[0] is not None
    pinned.release()


@pytest.mark.parametrize("allows", [0, 2])
def test_blocks_the_system_refuses_to_pin_are_copied(allows: int) -> None:
    a, fake = held(64, KIB), FakePinner(allows)
    pinned = PinnedOperands([a], [], fake.pinner)
    pinned._thread.join()
    first = pinned.await_block(a[:2])
    assert (first is not None) == bool(allows)
    assert pinned.await_block(a[48:]) is None
    assert len(fake.ranges) == allows
    pinned.release()
    assert not fake.ranges


def test_pages_never_written_are_not_pinned() -> None:
    """An array that was never written, such as np.zeros, has no resident pages."""
    empty, fake = allocate(1 << 20).view(np.float64).reshape(128, 1024), FakePinner()
    pinned = PinnedOperands([empty], [], fake.pinner)
    pinned._thread.join()
    assert not fake.calls
    assert pinned.await_block(empty[:1]) is None
    pinned.release()


def test_a_stop_ends_waiting_and_pinning() -> None:
    a, fake = held(64, KIB), FakePinner(slow=0.01)
    pinned = PinnedOperands([a], [a], fake.pinner)
    pinned.stop()
    assert pinned.await_block(a) is None
    pinned.release()
    assert len(fake.calls) < 8
    assert not fake.ranges


def test_without_a_thread_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    a, fake = held(64, KIB), FakePinner()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ExecutionError, match="oocgemm-pin"):
        PinnedOperands([a], [a], fake.pinner)


# Which arrays are pinned, and which of their panels are copied directly.

WIDE = held(32, 64)


@pytest.mark.parametrize(
    ("array", "wide"),
    [
        (WIDE, 8),
        (WIDE[:, :5], 0),  # pinning would include the rest of each row
        (WIDE[:, :48], 8),
        (WIDE[:, :32][:, ::2], 0),
        (WIDE[::-1], 0),
        (WIDE.T, 0),
        (WIDE[:, :4].copy(), 4),  # the rows are contiguous
        (WIDE.astype(">f8"), 0),
        # The address is no multiple of 8.
        (np.frombuffer(bytearray(8 * 64 + 1), np.float64, 64, 1).reshape(8, 8), 0),
        (np.broadcast_to(WIDE[:1], (32, 64)), 0),
    ],
)
def test_rows_long_enough_are_copied_in_place(array: Array, wide: int) -> None:
    assert stores.open_matrix("A", array).layout.zero_copy_width == wide


def test_files_are_not_pinned(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", WIDE)
    for source in (tmp_path / "a.npy", np.load(tmp_path / "a.npy", mmap_mode="r")):
        assert stores.open_matrix("A", source).layout.zero_copy_width == 0


def test_small_arrays_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MIN_PINNED", WIDE.nbytes + 1)
    assert stores.open_matrix("A", WIDE).layout.zero_copy_width == 0


def test_operands_are_pinned_where_copying_would_take_longer() -> None:
    """Arrays are pinned if copying their panels to host buffers would take longer.

    In X X^T, panels of both operands are as wide as they are deep. In A B, those of B are as wide as a tile.
    """
    memory = Layout(in_memory=True, zero_copy_width=4096)
    cuda, budgets = default_model("cuda", 16), Budgets(3 << 30, 8 << 30)

    def locked(machine: MachineModel, depth: int, layout: Layout = memory, n: int = 98304) -> set[str]:
        problem = GemmProblem(n, n, n, "float64", "float64", "float64", "float64")
        layouts = Layouts(layout, layout, Layout(in_memory=True))
        return make_plan(problem, budgets, machine, layouts, TileShape(12288, 12288, depth)).operands_to_pin

    assert locked(cuda, 1024) == {"B"}
    assert locked(cuda, 4096) == {"A"}  # the operands have the same size, and it suffices to pin one of them
    assert locked(replace(cuda, memory=10e9), 4096) == {"A", "B"}
    # Each panel is read only once or twice, so pinning would take longer than copying.
    assert locked(cuda, 1024, n=24576) == set()
    assert locked(replace(cuda, memory=200e9), 1024) == set()
    assert locked(replace(cuda, pin=0.0), 1024) == set()
    assert locked(cuda, 1024, Layout(in_memory=True)) == set()
    assert locked(cuda, 1024, Layout(in_memory=True, zero_copy_width=20_000)) == set()
    assert default_model("host", 2).pin == 0


def test_panels_of_pinned_arrays_are_wide_enough_for_zero_copy() -> None:
    """Nothing is copied to host buffers then, but the link is slower for narrow panels."""
    pageable = Layout(in_memory=True, zero_copy_width=4096)
    held, n = replace(pageable, pinned=True), 24576
    problem = GemmProblem(n, n, n, "float64", "float64", "float64", "float64")
    cuda, budgets = default_model("cuda", 16), Budgets(3 << 30, 8 << 30)
    through, straight = (make_plan(problem, budgets, cuda, Layouts(x, x, x)) for x in (pageable, held))
    assert straight.operands_to_pin == set()
    assert straight.tile.k >= held.zero_copy_width / 2 > through.tile.k
    assert straight.prediction.lanes["read"] < 1e-3 < through.prediction.lanes["read"]
    assert straight.prediction.total < through.prediction.total
    reads = [op for op in straight.schedule() if op.kind is Kind.READ]
    assert reads
    assert all(map(straight.is_zero_copy, reads))
    narrow = cuda.upload_rate(held, (8192, 2048))
    assert narrow == cuda.upload_rate(held, (8192, 4096), (8192, 1024))
    assert narrow < cuda.upload_rate(held, (8192, 4096)) == cuda.h2d
    assert cuda.upload_rate(pageable, (8192, 2048)) == cuda.h2d
    # A thin panel is copied directly only if most panels of its operand are wide.
    assert held.is_direct((8192, 4096), (8192, 512))
    assert not held.is_direct((8192, 4096), (8192, 511))
    assert not held.is_direct((8192, 1024))
    assert not pageable.is_direct((8192, 4096))
    # Digests are computed from the arrays themselves, so that checks need no host buffers.
    checked = make_plan(replace(problem, checked="device"), budgets, cuda, Layouts(held, held, held))
    assert straight.prediction.total < checked.prediction.total < 1.02 * straight.prediction.total
