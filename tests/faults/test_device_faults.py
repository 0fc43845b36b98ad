"""A failing device or session ends a run with an error that names the operation."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import oocgemm
from oocgemm import ExecutionError, OutOfMemoryError
from oocgemm.backends.base import Stream
from oocgemm.backends.host.backend import HostSession
from oocgemm.jobs import output
from tests.support.backends_here import staged
from tests.support.faults import ON_DEVICE, Fault, faulty_backend, faulty_stores, nothing_left
from tests.support.faulty_runs import PRODUCT, A, failure, multiply
from tests.support.suite import each_value, slow

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@each_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", [*slow((1,)), 4])
@pytest.mark.parametrize("operation", ["upload", "multiply", "download"])
def test_a_device_that_fails_names_the_operation(
    tmp_path: Path, operation: str, first: int, late: bool
) -> None:
    fault = Fault(RuntimeError("cudaErrorLaunchFailure: unspecified launch failure"), first=first)
    with faulty_backend(late, **{operation: fault}), staged():
        said = failure(tmp_path, A)
    # An asynchronous failure may be noticed first by an operation that waited for the failed one.
    assert late or said.startswith(operation)
    assert "of tile (" in said
    assert "cudaErrorLaunchFailure" in said


def test_a_backend_that_cannot_be_opened_leaves_nothing(tmp_path: Path) -> None:
    with faulty_backend(open=Fault(oocgemm.BackendError("no such kernel here"))):
        assert failure(tmp_path, A) == "no such kernel here"


@pytest.mark.parametrize("first", [2, 1000])
def test_a_session_is_closed_however_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    close = Mock()
    monkeypatch.setattr(HostSession, "close", close)
    with faulty_stores(read_A=Fault(ValueError("no"), first=first)), suppress(ExecutionError):
        multiply(tmp_path, A)
    assert close.call_count == 1


def test_memory_is_freed_while_c_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed, right_close, right_seal = threading.Event(), HostSession.close, output.Journaled.seal
    early = []

    def close(self: HostSession, failed: bool = False) -> None:
        right_close(self)
        freed.set()

    def seal(self: output.Journaled) -> None:
        early.append(freed.wait(30))
        right_seal(self)

    monkeypatch.setattr(HostSession, "close", close)
    monkeypatch.setattr(output.Journaled, "seal", seal)
    multiply(tmp_path, A)
    assert early == [True]


def test_without_a_thread_memory_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        if "oocgemm-free" in str(vars(self)["_thread_name_prefix"]):
            raise RuntimeError("can't start new thread")
        return right(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    multiply(tmp_path, A)


def test_what_fails_to_close_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HostSession.close

    def close(self: HostSession, failed: bool = False) -> None:
        right(self)
        raise RuntimeError("lost")

    monkeypatch.setattr(HostSession, "close", close)
    said = ""
    with nothing_left(tmp_path):
        try:
            multiply(tmp_path, A)
        except RuntimeError as error:
            said = str(error)
    assert said == "lost"


@each_value
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, asynchronous: bool
) -> None:
    monkeypatch.setattr(HostSession, "asynchronous", ON_DEVICE if asynchronous else ())

    @contextmanager
    def worker(self: HostSession, stream: Stream) -> Iterator[None]:
        if begun or stream.lane != "compute":
            yield
        if stream.lane == "compute":
            raise RuntimeError("cudaErrorDevicesUnavailable")

    monkeypatch.setattr(HostSession, "worker", worker)
    with staged():
        assert failure(tmp_path, A) == "stream compute: cudaErrorDevicesUnavailable"


def refused() -> OutOfMemoryError:
    return OutOfMemoryError("the device refuses 90 MiB, 40 MiB are free: pass a smaller --device-memory")


def test_memory_taken_by_others_meanwhile_is_not_planned_with(tmp_path: Path) -> None:
    free = [96 << 20, 48 << 20]
    with nothing_left(tmp_path):
        with faulty_backend(False, free, open=Fault(refused(), times=1)):
            result = multiply(tmp_path, A, tile=None)
        assert result.plan.budgets.device == 48 * 3 / 8 * 2**20
        np.testing.assert_array_equal(result.out[:], PRODUCT)
        del result


def test_a_budget_that_the_device_does_not_have_is_refused(tmp_path: Path) -> None:
    fault = Fault(refused())
    with faulty_backend(open=fault):
        said = failure(tmp_path, A, device_memory="96MiB")
    assert said == str(refused())
