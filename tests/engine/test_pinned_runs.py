"""Operands in host memory: a device copies pinned ones directly, and others through pinned buffers."""

import gc
import mmap
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm import stores
from oocgemm.backends.base import Array
from oocgemm.backends.host.backend import HostBackend
from oocgemm.planning import (
    Budgets,
    InMemory,
    Kind,
    Layouts,
    TileShape,
    default_model,
    make_plan,
)
from oocgemm.stores import arrays
from oocgemm.system.resources import allocate
from oocgemm.timeline import metrics as figures
from tests.support.backends_here import needs_gpu, running_on, staged
from tests.support.products import product_of
from tests.support.suite import each_value


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MIN_ROW_BYTES", 64)


def held(rows: int, cols: int) -> Array:
    return np.arange(rows * cols, dtype=np.float64).reshape(rows, cols) % 8


def product(a: Array, b: Array, *owned: Array, **options: Any) -> oocgemm.Result:
    """Multiply on the host backend with copies to a device, as a GPU has. Their owner has pinned `owned`."""
    ranges = [np.lib.array_utils.byte_bounds(x) for x in owned]

    def is_pinned(self: HostBackend, address: int, size: int) -> bool:
        return any(low <= address and address + size <= high for low, high in ranges)

    with staged(2), patch.object(HostBackend, "is_pinned", is_pinned):
        result: oocgemm.Result = oocgemm.gemm(a, b, backend="host", **options)
        return result


def integers(rows: int, cols: int) -> Array:
    return np.random.default_rng(rows).integers(-4, 5, (rows, cols)).astype(np.float64)


def kinds(result: oocgemm.Result, operands: str) -> set[str]:
    """Return the kinds of the operations that moved blocks of some operands."""
    return {span.kind for span in result.timeline.spans if span.operand in operands} - {"multiply"}


def direct(result: oocgemm.Result) -> str:
    """Return the operands that the device copied directly."""
    return "".join(filter(result.plan.is_direct, "ABC"))


@each_value
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_operands_in_memory_need_no_host_slots(trans_a: bool, trans_b: bool, pinned: bool) -> None:
    left, right = integers(300, 200), integers(200, 250)
    a, b = left.T.copy() if trans_a else left, right.T.copy() if trans_b else right
    options: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b}
    result = product(a, b, *((a, b) if pinned else ()), tile="128x96x40", **options)
    assert np.array_equal(result.out, left @ right)
    assert kinds(result, "AB") == {"upload"}
    assert kinds(result, "C") == {"download"}
    assert direct(result) == ("AB" if pinned else "")
    assert result.plan.traffic["read"] == result.plan.traffic["write"] == 0
    moved = {kind: sum(s.bytes for s in result.timeline.spans if s.kind == kind) for kind in KINDS}
    assert moved == {"upload": result.plan.traffic["h2d"], "download": result.plan.traffic["d2h"]}
    assert ("directly" in figures.in_place(result.timeline)) == pinned


KINDS = "upload", "download"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu), "fake-cuda"])
def test_files_by_rows_need_no_host_slots(backend: str, transposed: bool, tmp_path: Any) -> None:
    """Pieces of a block are rows. Files by columns, which have no rows in one piece, are read into slots."""
    left, right = integers(300, 200), integers(200, 250)
    np.save(tmp_path / "a.npy", left.T.copy() if transposed else left)
    np.save(tmp_path / "b.npy", np.asfortranarray(right))
    options: dict[str, Any] = {"tile": "128x96x40", "trans_a": transposed}
    with running_on(backend) as engine:
        result = oocgemm.gemm(tmp_path / "a.npy", tmp_path / "b.npy", **options, **engine)
        oocgemm.release()
    assert np.array_equal(result.out, left @ right)
    assert kinds(result, "A") == {"upload"}
    assert kinds(result, "B") == {"read", "upload"}


def test_verified_operands_pass_through_host_slots() -> None:
    """On the host backend, checksums are computed in host slots."""
    a, b, c = integers(300, 200), integers(200, 250), integers(300, 250)
    result = product(a, b, a, b, c, c=c, tile="128x96x40", verify=True)
    assert np.array_equal(c, a @ b)
    assert direct(result) == ""
    assert kinds(result, "C") == {"download", "write"}
    assert kinds(result, "AB") == {"read", "upload"}


@each_value
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize(("rows", "cols", "tile"), [(300, 250, "128x96x40"), (64, 512, "64x256x40")])
def test_elements_around_c_do_not_change(beta: float, rows: int, cols: int, tile: str, pinned: bool) -> None:
    a, b, old = integers(rows, 200), integers(200, cols), integers(rows, cols)
    c = np.full((rows, cols + 10), 7.0)
    c[:, :cols] = old
    result = product(a, b, *((a, b, c) if pinned else ()), c=c[:, :cols], beta=beta, tile=tile)
    assert np.array_equal(c[:, :cols], a @ b + beta * old)
    assert np.all(c[:, cols:] == 7)
    assert direct(result) == ("ABC" if pinned else "")
    assert kinds(result, "C") == ({"download", "upload"} if beta else {"download"})
    assert ("strips of C copied directly" in figures.in_place(result.timeline)) == pinned


def test_partly_pinned_arrays_are_not_copied_directly() -> None:
    a, b, c = integers(300, 200), integers(200, 250), integers(300, 250)
    result = product(a, b, a[:299], b[1:], c[:, :249], c=c, tile="128x96x40")
    assert np.array_equal(c, a @ b)
    assert direct(result) == ""


def test_operands_are_freed_when_their_owner_drops_them() -> None:
    """A run leaves no reference cycle that keeps an operand alive until the garbage collector runs."""
    a, b, c = integers(300, 200), integers(200, 250), np.empty((300, 250))
    kept = [weakref.ref(array) for array in (a, b, c)]
    gc.disable()
    try:
        result = product(a, b, c=c, tile="128x96x40")
        assert result.report.wall
        del a, b, c, result
        assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


GPU: dict[str, Callable[[], tuple[Array, Array, dict[str, Any]]]] = {
    "A B": lambda: (integers(1500, 1100), integers(1100, 1300), {}),
    "odd": lambda: (integers(1501, 1103), integers(1103, 1301), {}),
    "X X^T": lambda: ((x := integers(1500, 1100)), x, {"trans_b": True}),
    "part of a row": lambda: (integers(1500, 1700)[:, 3:1103], integers(1100, 1301)[:, 1:], {}),
    "every second column": lambda: (integers(700, 1100)[:, ::2], integers(1100, 500)[::2], {}),
    "byte order": lambda: (integers(700, 1100).astype(">f8"), integers(1100, 500), {}),
    "checked": lambda: (integers(1500, 1100), integers(1100, 1300), {"verify": True}),
    "emulated": lambda: (integers(1500, 1100), integers(1100, 1300), {"compute": "emulated"}),
    "float32": lambda: (
        integers(1500, 1100).astype(np.float32),
        integers(1100, 1300).astype(np.float32),
        {"trans_a": False},
    ),
}


@each_value
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(pytest.param("cuda", name, marks=needs_gpu) for name in GPU),
        *(pytest.param("fake-cuda", x, marks=pytest.mark.slow) for x in ("odd", "X X^T", "byte order")),
        ("fake-cuda", "part of a row"),
        ("fake-cuda", "every second column"),
        ("fake-cuda", "checked"),
    ],
)
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("host", ["512MiB", "2MiB"])
def test_a_gpu_copies_from_and_to_memory(backend: str, case: str, owned: bool, host: str) -> None:
    with running_on(backend) as engine:
        copied(case, owned, host, engine)


def copied(case: str, owned: bool, host: str, engine: dict[str, Any]) -> None:
    import cupy
    from cupy.cuda import runtime

    a, b, options = GPU[case]()
    if options.get("verify"):
        host = "512MiB"
    c = np.ones((a.shape[0], b.shape[0] if options.get("trans_b") else b.shape[1]), a.dtype.newbyteorder("="))
    if owned:
        a, b, c = map(on_its_own_pages, (a, b, c))
        for x in (a, b, c):
            runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    expected = a @ (b.T if options.get("trans_b") else b)
    for _ in range(2):
        c[...] = 1
        budgets = {"device_memory": "512MiB", "host_memory": host}
        every: dict[str, Any] = budgets | engine | options
        result = oocgemm.gemm(a, b, c, alpha=2, beta=3, tile="512x640x256", **every)
        assert np.array_equal(c, 2 * expected + 3)
        assert kinds(result, "AB") <= {"upload", "prepare"}
        assert ("write" in kinds(result, "C")) == bool(options.get("verify"))
        if owned and a.dtype.isnative:
            assert "B" in direct(result)
        for x in (a, b, c):
            if not hasattr(cupy, "asarray"):  # the fake device checks at its end which memory is pinned
                break
            assert np.array_equal(cupy.asarray(np.ascontiguousarray(x)).get(), x)
    oocgemm.release()
    for x in (a, b, c) if owned else ():
        runtime.hostUnregister(x.ctypes.data)


@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu), "fake-cuda"])
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
def test_a_gram_matrix_in_pinned_memory_is_symmetric_or_a_triangle(backend: str, uplo: str) -> None:
    x = np.random.default_rng(4).standard_normal((700, 300))
    c = on_its_own_pages(np.full((700, 700), np.nan))
    kept: Any = {"lower": np.tril, "upper": np.triu, "full": np.asarray}[uplo]
    with running_on(backend) as engine:
        from cupy.cuda import runtime

        runtime.hostRegister(c.ctypes.data, c.nbytes, 0)
        result = oocgemm.gram(x, c, uplo=uplo, tile="256x256x128", **engine)
        oocgemm.release()
        runtime.hostUnregister(c.ctypes.data)
    assert ("C" in direct(result)) == (uplo != "full")
    np.testing.assert_allclose(kept(np.nan_to_num(c)), kept(x @ x.T), atol=1e-10)
    for top in range(0, 700, 256):
        for first in range(top, min(700, top + 256), result.plan.slots.strip):
            at = slice(first, min(first + result.plan.slots.strip, top + 256))
            if uplo == "full":
                np.testing.assert_array_equal(c[at, at], c[at, at].T)
    assert np.all(np.isnan(c[kept(np.ones(c.shape)) == 0]))  # what lies outside of a triangle is untouched


def on_its_own_pages(array: Array) -> Array:
    copy = allocate(array.nbytes).view(array.dtype)[: array.size].reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu), "fake-cuda"])
def test_a_failed_copy_ends_the_run(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The error names the operand and the range. The next run works."""
    a, b = integers(700, 600), integers(600, 500)
    np.save(tmp_path / "b.npy", b)
    b = np.load(tmp_path / "b.npy", mmap_mode="r")
    right = arrays.ArrayMatrix.read

    def read(self: Any, rows: Any, cols: Any, out: Array) -> None:
        if self.name == "B" and rows[0] >= 100:
            raise ValueError("damaged")
        right(self, rows, cols, out)

    with running_on(backend) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(arrays.ArrayMatrix, "read", read)
            with pytest.raises(oocgemm.ExecutionError, match=r"reading B\[.*damaged"):
                oocgemm.matmul(a, b, tile="256x256x64", **engine)
        assert np.array_equal(oocgemm.matmul(a, b, tile="256x256x64", **engine), a @ b)
        oocgemm.release()


@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu), "fake-cuda"])
def test_memory_that_the_process_may_only_read(backend: str, tmp_path: Any) -> None:
    whole = integers(500, 400)
    (tmp_path / "a").write_bytes(whole.tobytes())
    with open(tmp_path / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    a = np.frombuffer(mapped, np.float64).reshape(whole.shape)
    with running_on(backend) as engine:
        options: dict[str, Any] = {"tile": "128x160x64", "device_memory": "1GiB"} | engine
        assert np.array_equal(oocgemm.gemm(a, whole, trans_b=True, **options).out, whole @ whole.T)
        oocgemm.release()


WIDE = held(32, 64)


@pytest.mark.parametrize(
    ("array", "wide"),
    [
        (WIDE, 8),
        (WIDE[:, :5], 5),
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
def test_rows_long_enough_are_copied_directly(array: Array, wide: int) -> None:
    assert getattr(stores.open_matrix("A", array).layout, "zero_copy_width", None) == wide


def test_files_are_not_copied_directly(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", WIDE)
    for source in (tmp_path / "a.npy", np.load(tmp_path / "a.npy", mmap_mode="r")):
        assert not stores.open_matrix("A", source).layout.contiguous_rows


def test_panels_of_pinned_arrays_are_wide() -> None:
    """The link is slower for narrow panels."""
    pageable = InMemory(zero_copy_width=4096)
    pinned, n = replace(pageable, pinned=True), 24576
    problem = product_of(n, n, n, "float64", "float64", "float64", "float64")
    cuda, budgets = default_model("cuda", 16), Budgets(3 << 30, 8 << 30)
    through, straight = (make_plan(problem, budgets, cuda, Layouts(x, x, x)) for x in (pageable, pinned))
    assert all(map(straight.is_direct, "ABC"))
    assert not any(map(through.is_direct, "ABC"))
    assert straight.tile.k >= pinned.zero_copy_width / 2
    assert max(plan.prediction.lanes["read"] for plan in (straight, through)) < 1e-3
    assert straight.prediction.total <= through.prediction.total
    assert not {op.kind for op in straight.schedule()} & {Kind.READ, Kind.WRITE}
    assert pinned.is_direct((8192, 2048))
    assert not pinned.is_direct((8192, 2047))
    assert not pageable.is_direct((8192, 4096))


@pytest.mark.parametrize("checked", ["", "device", "host"])
def test_checked_runs_have_host_slots_for_what_the_host_checks(checked: str) -> None:
    memory = InMemory(zero_copy_width=4096, pinned=True)
    problem = product_of(8192, 8192, 8192, "float64", "float64", "float64", "float64", checked=checked)
    plan = make_plan(
        problem, Budgets(1 << 30, 1 << 30), default_model("cuda", 16), Layouts(memory, memory, memory),
        TileShape(4096, 4096, 2048),
    )  # fmt: skip
    slots = plan.slots
    assert (slots.host_a > 0, slots.host_b > 0, slots.host_c > 0) == (
        (checked == "host", checked == "host", checked != "")
    )


@pytest.mark.parametrize("budget", [1 << 30, 64 << 20, 1 << 20, 136 << 10])
def test_the_ring_is_within_the_host_budget(budget: int) -> None:
    memory = InMemory()
    problem = product_of(600, 600, 600, "float64", "float64", "float64", "float64")
    machine = replace(default_model("cuda", 16), host_reserve=0)
    plan = make_plan(problem, Budgets(1 << 30, budget), machine, Layouts(memory, memory, memory))
    assert 0 < plan.footprint.host["ring"] <= budget // 4
    assert plan.footprint.host_total <= budget
