"""The first uploads of a run begin before the rest of it is prepared."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs import output
from oocgemm.jobs import run as running
from oocgemm.machine import info
from tests.engine.test_repeated_sessions import OPTIONS
from tests.support.fake_cuda import Device, Fault, fake_cuda

M, K, N = 60, 50, 70
A = np.arange(float(M * K)).reshape(M, K) % 7
B = np.arange(float(K * N)).reshape(K, N) % 5


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(running, "RECENT", 60.0)
    with fake_cuda() as found:
        yield found
        oocgemm.release()
        found.check()
        assert not found.memory.allocated


def check(a: Any, b: Any, c: Any = None, **options: Any) -> oocgemm.Result:
    result: oocgemm.Result = oocgemm.gemm(a, b, c, **OPTIONS | options)
    np.testing.assert_array_equal(result.out[:], A @ B)
    return result


def stored(folder: Path, kind: str) -> tuple[Any, Any]:
    """Return A and B: arrays in memory, or the paths of files."""
    if kind == "memory":
        return A.copy(), B.copy()
    paths = folder / f"a.{kind}", folder / f"b.{kind}"
    for path, x in zip(paths, (A, B), strict=True):
        if kind == "npy":
            np.save(path, x)
        else:
            zarr.create_array(path, data=x, chunks=(16, 16), compressors=None)
    return paths


def watching(device: Device, act: Callable[..., Any], seen: list[bool]) -> Callable[..., Any]:
    """Return `act`, which first waits until the device has begun to copy, and notes whether it has."""

    def waits(*arguments: Any, **options: Any) -> Any:
        end = time.monotonic() + 10
        while not (found := any(name.startswith("cuMemcpy") for name, _ in device.calls)):
            if time.monotonic() > end:
                break
            time.sleep(1e-3)
        seen.append(found)
        return act(*arguments, **options)

    return waits


@pytest.mark.parametrize("kind", ["memory", "npy", "zarr"])
def test_blocks_are_uploaded_before_c_is_created(
    kind: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(output, "create_output", watching(device, output.create_output, seen))
    result = check(*stored(tmp_path, kind), tmp_path / "c.zarr")
    assert seen == [True]
    uploads = [(s.operand, s.tile, s.step) for s in result.timeline.spans if s.kind == "upload"]
    assert len(set(uploads)) == len(uploads)  # none was made twice


def test_a_product_like_the_last_one_is_uploaded_before_it_is_checked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    a, b, c = A.copy(), B.copy(), np.empty((M, N))
    check(a, b, c)
    monkeypatch.setattr(info, "machine", watching(device, info.machine, seen))
    for _ in range(2):
        device.calls.clear()
        c[:] = np.nan
        check(a, b, c)
    assert seen == [True, True]


def test_errors_that_are_found_after_uploads_have_begun(device: Device, tmp_path: Path) -> None:
    a, b, c = A.copy(), B.copy(), np.full((M, N), 3.0)
    check(a, b)
    check(a, b, c)
    c[:] = 3.0
    for _ in range(2):
        with pytest.raises(InputError, match="timeline"):
            check(a, b, c, timeline=tmp_path / "no-folder" / "log")
        assert np.all(c == 3.0)
        with pytest.raises(ZeroDivisionError):
            check(a, b, c, progress=lambda plan: 1 // 0)
        check(a, b, c)
        c[:] = 3.0


def test_c_that_cannot_be_created(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = output.create_output

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "create_output", full)
    with pytest.raises(ExecutionError, match="No space left"):
        check(*stored(tmp_path, "zarr"), tmp_path / "c.zarr")
    assert not (tmp_path / "c.zarr").exists()
    monkeypatch.setattr(output, "create_output", right)
    check(tmp_path / "a.zarr", tmp_path / "b.zarr", tmp_path / "c.zarr")


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuEventRecord"])
def test_uploads_that_fail(name: str, device: Device) -> None:
    a, b = A.copy(), B.copy()
    check(a, b)
    device.faults[name] = Fault(first=device.count(name) + 1, times=1)
    with pytest.raises(ExecutionError, match=r"upload [AB].*error"):
        oocgemm.gemm(a, b, **OPTIONS)
    device.faults.clear()
    check(a, b)


def test_files_that_python_reads_are_left_to_the_run(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that fail are repeated for some seconds. Only a run can be told to stop that."""
    monkeypatch.setattr("oocgemm.engine.staging.cached_chunks", lambda matrix: None)
    right, copied = output.create_output, list[bool]()

    def create(*arguments: Any) -> Any:
        copied.append(any(name.startswith("cuMemcpy") for name, _ in device.calls))
        return right(*arguments)

    monkeypatch.setattr(output, "create_output", create)
    check(*stored(tmp_path, "npy"), tmp_path / "c.zarr")
    assert copied == [False]
