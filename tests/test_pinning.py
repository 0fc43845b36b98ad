"""Arrays in host memory that a thread pins, so that a device copies them without host buffers."""

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import stores
from oocgemm.backends.base import Array, Pinner
from oocgemm.backends.cuda.borders import cut
from oocgemm.backends.host.backend import HostBackend, HostSession
from oocgemm.engine import pinning
from oocgemm.engine.pinning import PinnedOperands
from oocgemm.errors import ExecutionError
from oocgemm.machine import info as system
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
from oocgemm.stores.files import PAGE
from oocgemm.system.memory import allocate
from oocgemm.timeline import metrics as figures
from tests.backends_here import needs_gpu, running_on

KIB = 1 << 10
PLANS = import_module("oocgemm.planning.plan")


def held(rows: int, cols: int) -> Array:
    """Return an array that begins at the start of a page, and whose pages are resident."""
    array = allocate(rows * cols * 8).view(np.float64).reshape(rows, cols)
    array[...] = np.arange(rows * cols).reshape(rows, cols) % 8
    return array


def on_its_own_pages(array: Array) -> Array:
    copied = allocate(array.nbytes).view(array.dtype)[: array.size].reshape(array.shape)
    copied[...] = array
    return copied


class FakePinner:
    """Records what is pinned and unpinned, and fails after `allows` calls."""

    def __init__(self, allows: int | None = None, slow: float = 0.0) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.owned: list[tuple[int, int]] = []  # ranges of arrays that the caller of the library has pinned
        self.allows, self.slow = allows, slow
        self.allowed = threading.Event()
        self.allowed.set()
        self.pinner = Pinner(self.pin, self.unpin)

    def pin(self, address: int, size: int) -> None:
        self.allowed.wait()
        time.sleep(self.slow)
        if self.allows is not None and len(self.calls) >= self.allows:
            raise OSError("refused")
        for begin, length in self.ranges.items():
            assert address + size <= begin or begin + length <= address, "pinned twice"
        self.ranges[address] = size
        self.calls.append((address, size))

    def unpin(self, address: int) -> None:
        del self.ranges[address]

    def own(self, *arrays: Array) -> None:
        """Treat arrays as already pinned by the caller of the library."""
        self.owned += map(np.lib.array_utils.byte_bounds, arrays)

    def is_pinned(self, address: int, size: int) -> bool:
        return any(low <= address and address + size <= high for low, high in self.owned)

    def covers(self, block: Array, borders: Sequence[int]) -> bool:
        """Return whether each piece of a block is within one pinned range."""
        return all(
            any(begin <= low and high <= begin + size for begin, size in self.ranges.items())
            for low, high in map(np.lib.array_utils.byte_bounds, cut(block, borders))
        )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PART", 4 * PAGE)
    monkeypatch.setattr(pinning, "SINGLE_PARTS", 3)
    monkeypatch.setattr(arrays, "MIN_PINNED", 1)
    monkeypatch.setattr(arrays, "MIN_ROW_BYTES", 64)


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


# Runs with pinned arrays.


def product_in_place(a: Array, b: Array, fake: FakePinner, **options: Any) -> oocgemm.Result:
    """Multiply on the host backend with host buffers, as a GPU has, and a fake pinner."""

    def model(backend: str, *known: object) -> MachineModel:
        return replace(default_model(backend, 2), unified=False, io_threads=2, pin=1e12, memory=1e3)

    with (
        patch.object(system, "model", model),
        patch.object(HostSession, "pinner", fake.pinner),
        patch.object(HostBackend, "is_pinned", lambda self, address, size: fake.is_pinned(address, size)),
    ):
        return oocgemm.gemm(a, b, backend="host", **options)


def in_place(result: oocgemm.Result) -> dict[str, tuple[int, int]]:
    """Return, per operand, how many panels were read, and how many of them were copied directly."""
    reads = [span for span in result.timeline.spans if span.kind == "read"]
    return {
        x: (sum(s.operand == x for s in reads), sum(s.operand == x and not s.bytes for s in reads))
        for x in "AB"
    }


def integers(rows: int, cols: int) -> Array:
    return np.random.default_rng(rows).integers(-4, 5, (rows, cols)).astype(np.float64)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_operands_are_multiplied_in_place_unless_verified(
    trans_a: bool, trans_b: bool, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `verify`, all panels go to host buffers, because the host computes checksums of them."""
    monkeypatch.setattr(pinning, "MAX_WAIT_RATIO", 1000)
    left, right = integers(300, 200), integers(200, 250)
    a, b = left.T.copy() if trans_a else left, right.T.copy() if trans_b else right
    options: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "verify": verify}
    fake = FakePinner()
    result = product_in_place(a, b, fake, tile="128x96x40", **options)
    assert np.array_equal(result.out, left @ right)
    counts = in_place(result)
    if verify:
        assert counts["A"][1] == counts["B"][1] == 0
    else:
        # The last panel of a row may be too narrow to be copied directly.
        assert all(0 < there <= read for read, there in counts.values())
        moved = sum(span.bytes for span in result.timeline.spans if span.kind == "read")
        assert moved < result.plan.traffic["read"]
    lying = sum(there for _, there in counts.values())
    said = f"{lying} of {sum(read for read, _ in counts.values())} panels of A and B copied directly from the caller's arrays"  # noqa: E501
    assert figures.in_place(result.timeline) == (said if lying else "")
    uploaded = sum(span.bytes for span in result.timeline.spans if span.kind == "upload")
    assert uploaded == result.plan.traffic["h2d"]
    assert not fake.ranges


def test_operands_that_cannot_be_pinned_are_copied() -> None:
    a, b, fake = integers(300, 200), integers(200, 250), FakePinner(0)
    result = product_in_place(a, b, fake, tile="128x96x40")
    assert np.array_equal(result.out, a @ b)
    assert all(not there for _, there in in_place(result).values())


def strips(result: oocgemm.Result) -> tuple[int, int]:
    """Return how many blocks of rows of C were written, and how many of them directly by the device."""
    writes = [span for span in result.timeline.spans if span.kind == "write"]
    return len(writes), sum(not span.bytes for span in writes)


@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize(("rows", "cols", "tile"), [(300, 250, "128x96x40"), (64, 512, "64x256x40")])
def test_arrays_already_pinned_are_not_pinned_again(beta: float, rows: int, cols: int, tile: str) -> None:
    """All panels are copied directly. C is written directly too, and elements around it do not change."""
    a, b, old, fake = integers(rows, 200), integers(200, cols), integers(rows, cols), FakePinner()
    c = np.full((rows, cols + 10), 7.0)
    c[:, :cols] = old
    fake.own(a, b, c)
    result = product_in_place(a, b, fake, c=c[:, :cols], beta=beta, tile=tile)
    assert np.array_equal(c[:, :cols], a @ b + beta * old)
    assert np.all(c[:, cols:] == 7)
    assert not fake.calls
    assert all(read == there for read, there in in_place(result).values())
    count, there = strips(result)
    assert count == there > 1
    assert f"{there} of {count} strips of C copied directly to the caller's array" in figures.in_place(
        result.timeline
    )
    down = sum(span.bytes for span in result.timeline.spans if span.kind == "download")
    assert down == result.plan.traffic["d2h"]


def test_partly_pinned_arrays_are_copied() -> None:
    a, b, c, fake = integers(300, 200), integers(200, 250), integers(300, 250), FakePinner(0)
    fake.own(a[:299], b[1:], c[:, :249])
    result = product_in_place(a, b, fake, c=c, tile="128x96x40")
    assert np.array_equal(c, a @ b)
    assert all(not there for _, there in in_place(result).values())
    assert strips(result)[1] == 0


def test_verified_strips_are_not_downloaded_in_place() -> None:
    a, b, c, fake = integers(300, 200), integers(200, 250), integers(300, 250), FakePinner()
    fake.own(a, b, c)
    result = product_in_place(a, b, fake, c=c, tile="128x96x40", verify=True)
    assert np.array_equal(c, a @ b)
    assert strips(result)[1] == 0


def test_operands_are_freed_when_their_owner_drops_them() -> None:
    """A run leaves no reference cycle that keeps an operand alive until the garbage collector runs."""
    a, b, c = integers(300, 200), integers(200, 250), np.empty((300, 250))
    kept = [weakref.ref(array) for array in (a, b, c)]
    gc.disable()
    try:
        result = oocgemm.gemm(a, b, c=c, backend="host", tile="128x96x40")
        assert result.report.wall
        del a, b, c, result
        assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("allows", [1, 3, 6])
def test_a_product_of_partly_pinned_operands_is_right(allows: int) -> None:
    a, b, fake = integers(300, 200), integers(200, 250), FakePinner(allows)
    result = product_in_place(a, b, fake, tile="128x96x40")
    assert np.array_equal(result.out, a @ b)
    assert not fake.ranges


def test_a_failed_run_unpins_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, fake = integers(300, 200), integers(200, 250), FakePinner()

    def fail(*arguments: Any) -> None:
        raise OSError("no more")

    monkeypatch.setattr(HostSession, "_multiply", fail)
    with pytest.raises(ExecutionError, match="no more"):
        product_in_place(a, b, fake, tile="128x96x40")
    assert fake.calls
    assert not fake.ranges


GPU: dict[str, Callable[[], tuple[Array, Array, dict[str, Any]]]] = {
    "A B": lambda: (integers(1500, 1100), integers(1100, 1300), {}),
    "odd": lambda: (integers(1501, 1103), integers(1103, 1301), {}),
    "X X^T": lambda: ((x := integers(1500, 1100)), x, {"trans_b": True}),
    "part of a row": lambda: (integers(1500, 1700)[:, 3:1103], integers(1100, 1301)[:, 1:], {}),
    "checked": lambda: (integers(1500, 1100), integers(1100, 1300), {"verify": True}),
    "emulated": lambda: (integers(1500, 1100), integers(1100, 1300), {"compute": "emulated"}),
    "float32": lambda: (
        integers(1500, 1100).astype(np.float32),
        integers(1100, 1300).astype(np.float32),
        {"trans_a": False},
    ),
}


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(pytest.param("cuda", name, marks=needs_gpu) for name in GPU),
        pytest.param("fake-cuda", "odd", marks=pytest.mark.slow),
        pytest.param("fake-cuda", "X X^T", marks=pytest.mark.slow),
        ("fake-cuda", "part of a row"),
    ],
)
@pytest.mark.parametrize("owned", [False, True])
def test_a_gpu_copies_pinned_operands_in_place(
    backend: str, case: str, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A, B and C are copied directly.

    After the run only memory that the caller had pinned is still pinned.
    """
    with running_on(backend) as engine:
        copied_in_place(case, owned, engine, monkeypatch)


def copied_in_place(case: str, owned: bool, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy
    from cupy.cuda import runtime

    monkeypatch.setattr(PLANS, "COPIES_DURING_UPLOADS", 1e-6)
    a, b, options = GPU[case]()
    c = np.ones((a.shape[0], b.shape[0] if options.get("trans_b") else b.shape[1]), a.dtype)
    if owned:
        a, b, c = map(on_its_own_pages, (a, b, c))
        for x in (a, b, c):
            runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    expected = a @ (b.T if options.get("trans_b") else b)
    for _ in range(2):
        c[...] = 1
        result = oocgemm.gemm(
            a, b, c, alpha=2, beta=3, tile="512x640x256", device_memory="512MiB", **engine | options
        )
        assert np.array_equal(c, 2 * expected + 3)
        read, there = map(sum, zip(*in_place(result).values(), strict=True))
        assert 0 < there <= read
        written, there = strips(result)
        assert there == (written if owned and not options.get("verify") else 0)
        for x in (a, b, c):
            if not hasattr(cupy, "asarray"):  # the fake device checks at its end which memory is pinned
                break
            assert np.array_equal(cupy.asarray(x).get(), x)
    for x in (a, b, c) if owned else ():
        runtime.hostUnregister(x.ctypes.data)


@pytest.mark.parametrize("case", [pytest.param("read-only", marks=needs_gpu)])
def test_a_gpu_copies_memory_that_cannot_be_pinned(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The operand is in memory that the process may only read."""
    monkeypatch.setattr(PLANS, "COPIES_DURING_UPLOADS", 1e-6)
    whole = integers(1500, 1100)
    (tmp_path / "a").write_bytes(whole.tobytes())
    with open(tmp_path / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    a = np.frombuffer(mapped, np.float64).reshape(whole.shape)
    result = oocgemm.gemm(a, whole, trans_b=True, backend="cuda", tile="512x640x256", device_memory="1GiB")
    assert np.array_equal(result.out, whole @ whole.T)
