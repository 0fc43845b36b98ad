"""A product like a recent one is prepared from what was found then, with the same results and errors."""

import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import InputError
from oocgemm.jobs import prepare as prepare_module
from oocgemm.jobs import run as running
from tests.support.fake_cuda import Device, Fault, fake_cuda

A = np.arange(40.0 * 30).reshape(40, 30) % 7
B = np.arange(30.0 * 50).reshape(30, 50) % 5
OPTIONS: dict[str, Any] = {"backend": "cuda", "kernel": "cublas"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(running, "RECENT", 60.0)
    with fake_cuda(capacity=1 << 30) as found:
        yield found
        found.check()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that were prepared in full."""
    found: list[Any] = []
    right = prepare_module.prepare

    def prepare(request: Any, *rest: Any, **options: Any) -> Any:
        found.append(request)
        return right(request, *rest, **options)

    monkeypatch.setattr("oocgemm.jobs.run.prepare", prepare)
    return found


def product(a: Any = A, b: Any = B, c: Any = None, **options: Any) -> oocgemm.Result:
    result: oocgemm.Result = oocgemm.gemm(a, b, c, **OPTIONS | options)
    np.testing.assert_array_equal(result.out, np.asarray(a) @ np.asarray(b))
    return result


@pytest.mark.usefixtures("device")
def test_other_arrays_of_the_same_form_are_multiplied(prepared: list[Any]) -> None:
    first = product()
    for scale in (2, 3):
        c = np.empty((40, 50))
        assert product(scale * A, B + scale).plan is first.plan
        assert product(scale * A, B, c).out is c
    assert len(prepared) == 2  # with a new C, and with that of the caller
    assert first.report.wall > 0
    assert [(s.kind, s.operand) for s in first.timeline.spans] == [
        (s.kind, s.operand) for s in product().timeline.spans
    ]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "other",
    [
        {"a": A[:20]},
        {"a": A[::-1]},
        {"a": np.asfortranarray(A)},
        {"a": A.astype("float32"), "b": B.astype("float32")},
        {"a": A.tolist()},
        {"tile": "20x50x30"},
        {"device_memory": "128MiB"},
        {"requests": {"A": 1}},
    ],
    ids=str,
)
def test_other_forms_and_options_are_prepared_anew(prepared: list[Any], other: dict[str, Any]) -> None:
    product()
    product(**other)
    assert len(prepared) == 2


@pytest.mark.usefixtures("device")
def test_a_memory_map_is_not_taken_for_an_array(prepared: list[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", A)
    mapped = np.asarray(np.load(tmp_path / "a.npy", mmap_mode="r+"))
    assert type(mapped) is np.ndarray
    product()
    product(mapped)
    assert len(prepared) == 2


def test_pinned_arrays_are_prepared_anew(device: Device, prepared: list[Any]) -> None:
    runtime = importlib.import_module("cupy").cuda.runtime
    a, b, c = (np.ones((64, 64)) for _ in range(3))
    assert not product(a, b, c).plan.layouts.a.pinned
    for x in (a, b, c):
        runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    assert product(a, b, c).plan.layouts.a.pinned
    for x in (a, b, c):
        runtime.hostUnregister(x.ctypes.data)
    assert not product(a, b, c).plan.layouts.a.pinned
    assert len(prepared) == 3


@pytest.mark.usefixtures("device")
def test_errors_are_those_of_a_full_preparation() -> None:
    a, c = np.ones((40, 40)), np.empty((40, 40))
    product(a, a, c)
    for wrong, said in ((a, "overlaps"), (np.broadcast_to(0.0, (40, 40)), "written")):
        with pytest.raises(InputError, match=said):
            oocgemm.gemm(a, a, wrong, **OPTIONS)
    read_only = np.empty((40, 40))
    read_only.flags.writeable = False
    with pytest.raises(InputError, match="written"):
        oocgemm.gemm(a, a, read_only, **OPTIONS)


@pytest.mark.usefixtures("device")
def test_after_a_while_a_product_is_prepared_anew(
    prepared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    product()
    monkeypatch.setattr(running, "RECENT", 0.0)
    product()
    assert len(prepared) == 2


def test_a_plan_for_which_memory_is_missing_is_not_used_again(device: Device, prepared: list[Any]) -> None:
    product()
    oocgemm.release()
    device.faults["malloc"] = Fault(2, first=device.count("malloc") + 1, times=1)
    product()
    assert len(prepared) == 2


@pytest.mark.usefixtures("device")
def test_no_array_is_kept_alive() -> None:
    a = A.copy()
    there = weakref.ref(a)
    product(a)
    del a
    assert there() is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("given", [{"topk": 5}, {"threshold": 0.5}])
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_each_matrix_is_scaled_by_its_own_norms(given: dict[str, Any], metric: Any) -> None:
    rng = np.random.default_rng(2)
    for _ in range(3):
        e = rng.integers(1, 9, (60, 16)).astype("float32")
        found, right = (
            oocgemm.similarity(e, metric=metric, backend=backend, **given) for backend in ("cuda", "host")
        )
        np.testing.assert_array_equal(found.indices, right.indices)
        np.testing.assert_allclose(found.scores, right.scores, rtol=1e-6)
