"""Runs copy panels and strips in place where the arrays are pinned, and unpin them at the end."""

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
from oocgemm.backends.base import Array
from oocgemm.backends.host.backend import HostBackend, HostSession
from oocgemm.engine import pinning
from oocgemm.errors import ExecutionError
from oocgemm.machine import models as rates
from oocgemm.planning import MachineModel, default_model
from oocgemm.timeline import metrics as figures
from tests.backends_here import needs_gpu, running_on
from tests.fake_pinner import PLANS, FakePinner, on_its_own_pages, pin_small_parts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_small_parts(monkeypatch)


def product_in_place(a: Array, b: Array, fake: FakePinner, **options: Any) -> oocgemm.Result:
    """Multiply on the host backend with host buffers, as a GPU has, and a fake pinner."""

    def model(backend: str, *known: object) -> MachineModel:
        return replace(default_model(backend, 2), unified=False, io_threads=2, pin=1e12, memory=1e3)

    with (
        patch.object(rates, "default_model", model),
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
