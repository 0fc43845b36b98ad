"""Runs whose C is in an object store are resumed after a kill, and never written by two processes at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs import journal as journals
from oocgemm.jobs.journal import JOURNAL, LOCK, ObjectJournal, owner
from oocgemm.stores import sidecar
from oocgemm.stores.base import RemoteFolder
from oocgemm.stores.objects import Bucket, ObjectFolder
from tests.support.command import run
from tests.support.object_runs import TILE, A, B, C, start, store, stored, url
from tests.support.object_server import SECRET, Proxy
from tests.support.suite import slow

OPTIONS: dict[str, Any] = {"tile": "8x10x16", "backend": "host"}


def folder() -> RemoteFolder:
    found = sidecar(url("C"))
    assert isinstance(found, ObjectFolder)
    return found


def journal() -> str:
    found = folder().get(JOURNAL)
    return "" if found is None else found[0].decode()


def content(name: str) -> dict[str, str]:
    """Return the ETags, which moto computes from the content, of the chunks of an array."""
    return {key: tag for key, (_, tag) in Bucket(url(name)).listing("c").items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "beta"), [(2, 0), *slow((25, 0), (25, 0.5))])
def test_a_killed_run_is_resumed_to_the_same_bits(s3: Proxy, kills: int, beta: float) -> None:
    """A run is killed at each of `kills` PUTs, from the first to the last, and then resumed."""
    store("A", A), store("B", B)
    line = url("A"), url("B"), url("C"), "--beta", str(beta)

    def begin() -> None:
        Bucket(url("C")).delete(list(Bucket(url("C")).listing()))
        if beta:
            store("C", C)

    begin()
    s3.requests.clear()
    with start(*line) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    writes = sum(method == "PUT" for method, _ in s3.requests)
    right = content("C")
    np.testing.assert_array_equal(stored("C"), A @ B + beta * C)
    for number in range(kills):
        begin()
        last = 1 + number * (writes - 1) // kills
        kill = Kill(last)
        s3.at, s3.lose = (kill, s3.lose) if number % 2 == 0 else (s3.at, kill)
        with start(*line) as process:
            kill.started(process.pid)
            process.communicate(timeout=120)
        # How many tiles are recorded by one PUT varies, so that the last PUTs may be missing.
        assert process.returncode == -signal.SIGKILL or last > 2 * writes // 3
        s3.at, s3.lose = (lambda method, path: None), (lambda method, path: False)
        product(beta=beta, resume=True)
        assert content("C") == right, f"after PUT {last} of {writes}"
        assert not Bucket(url("C")).listing(".oocgemm/redo")


class Kill:
    """Kills a process at one of its PUTs: before it is passed on, or before its answer."""

    def __init__(self, number: int) -> None:
        self._left, self._pid, self._started = number, 0, threading.Event()

    def started(self, pid: int) -> None:
        self._pid = pid
        self._started.set()

    def __call__(self, method: str, path: str) -> bool:
        self._left -= method == "PUT"
        if method != "PUT" or self._left or not self._started.wait(60):
            return False
        os.kill(self._pid, signal.SIGKILL)
        return True


class Held:
    """Pauses a run in another thread at its first PUT of a chunk of C."""

    def __init__(self, s3: Proxy, act: Callable[[], object]) -> None:
        self.paused, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._s3, self._act = s3, act
        s3.at = self._at
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.paused.wait(60)

    def _at(self, method: str, path: str) -> None:
        if method == "PUT" and "C.zarr/c/" in path and not self.paused.is_set():
            self.paused.set()
            self.go.wait(60)

    def _run(self) -> None:
        try:
            self._act()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self.go.set()
        self._thread.join()


def product(**options: Any) -> None:
    oocgemm.gemm(url("A"), url("B"), url("C"), **OPTIONS, **options)


def test_a_second_run_on_the_same_c_is_refused(s3: Proxy) -> None:
    store("A", A), store("B", B)
    first = Held(s3, product)
    try:
        for more in ([], ["--resume"], ["--overwrite"]):
            done = run(url("A"), url("B"), url("C"), *TILE, *more)
            assert done.code == 2
            assert "another run is writing C (process" in done.err
    finally:
        first.join()
    assert first.error is None
    np.testing.assert_array_equal(stored("C"), A @ B)
    assert owner(folder()) is None


def test_a_run_that_lost_its_lease_changes_nothing(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is taken for one on another machine that has ended. It has not, and comes back."""
    store("A", A), store("B", B)
    first = Held(s3, product)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "_is_alive", lambda identity: None)
        patch.setattr(journals, "_changes", lambda folder, content: False)
        try:
            product(resume=True)
            before, chunks = journal(), content("C")
        finally:
            first.join()
    assert isinstance(first.error, ExecutionError)
    assert "another run has taken over C" in str(first.error)
    assert (journal(), content("C")) == (before, chunks)
    np.testing.assert_array_equal(stored("C"), A @ B)


def test_a_lease_that_cannot_be_renewed_is_lost(s3: Proxy) -> None:
    held = journals.Lease(folder())
    try:
        held.check()
        held._renewed -= journals.LEASE_SECONDS
        with pytest.raises(ExecutionError, match=r"was not renewed for 30 s"):
            held.check()
    finally:
        held.release()


def test_objects_that_another_process_overwrites_are_noticed(s3: Proxy) -> None:
    store("A", A), store("B", B)

    def overwrite(method: str, path: str) -> None:
        if (
            method == "GET"
            and "list-type" in path
            and "prefix=C.zarr" in path
            and Bucket(url("C")).get("c/2/1")
        ):
            s3.at = lambda method, path: None
            Bucket(url("C")).put("c/0/0", np.zeros(640, np.uint8))

    s3.at = overwrite
    with pytest.raises(ExecutionError, match=r"objects of C at s3://bucket/C.zarr were changed by another"):
        product()
    with pytest.raises(InputError, match="unfinished run"):
        product()
    product(resume=True)
    np.testing.assert_array_equal(stored("C"), A @ B)


def test_of_two_processes_that_take_the_lease_at_once_one_fails(s3: Proxy) -> None:
    gate, waiting = threading.Barrier(2), [1, 2]
    taken: list[ObjectJournal] = []
    errors: list[Exception] = []

    def at(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(f"/{LOCK}") and waiting:
            waiting.pop()
            gate.wait(60)

    s3.at = at

    def take() -> None:
        try:
            taken.append(ObjectJournal(folder()))
        except InputError as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(errors)) == (1, 1)
    assert "another run is writing C" in str(errors[0])
    taken[0].close()


def test_a_store_that_ignores_conditions_is_refused(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    store("A", A), store("B", B)
    whole = Bucket._put
    monkeypatch.setattr(Bucket, "_put", lambda self, key, data, mode: whole(self, key, data, None))
    with pytest.raises(InputError, match="ignores the conditions of PUT requests"):
        product()


def test_a_lease_of_another_machine_counts_as_abandoned_if_nobody_renews_it(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = journals.Lease(folder())
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    try:
        with monkeypatch.context() as patch:
            patch.setattr(journals, "_is_alive", lambda identity: None)
            patch.setattr(journals, "_now", lambda: clock[0])
            patch.setattr(time, "sleep", lambda seconds: held.confirm())
            assert str(owner(folder())).startswith("process ")
            patch.setattr(time, "sleep", wait)
            assert owner(folder()) is None
            assert journals.LEASE_SECONDS <= clock[0] <= journals.LEASE_SECONDS + journals.LOOK_SECONDS
    finally:
        held.release()


def test_changed_operands_and_lost_chunks_are_noticed(s3: Proxy) -> None:
    store("A", A), store("B", B)
    product()
    Bucket(url("C")).delete(["c/0/0"])
    with pytest.raises(InputError, match="C has changed since it was completed"):
        product(resume=True)
    product(overwrite=True)
    Bucket(url("A")).put("c/0/0", np.zeros(320, np.uint8))
    with pytest.raises(InputError, match="the content of A has changed"):
        product(resume=True)


def test_a_failed_run_leaves_nothing_behind(s3: Proxy) -> None:
    store("A", A), store("B", B)
    s3.faults = lambda method, path: 503 if "A.zarr/c/" in path else None
    done = run(url("A"), url("B"), url("C"), *TILE)
    assert done.code == 1
    assert Bucket(url("C")).listing() == {}
    s3.faults = lambda method, path: None
    product()
    assert SECRET not in journal()
    assert "s3://bucket/A.zarr" in journal()


def test_the_identity_of_a_process_tells_whether_it_is_alive() -> None:
    here = journals._identity(os.getpid())
    assert here is not None
    assert journals._is_alive(here)
    assert journals._is_alive([*here[:3], "1"]) is False  # its number belongs to another process now
    assert journals._is_alive(["another boot", *here[1:]]) is None
    assert journals._is_alive(None) is None


def test_a_lease_that_cannot_be_opened_is_free_again(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: journals.Lease) -> None:
        raise ExecutionError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(journals.Lease, "_check_conditions", fails)
        with pytest.raises(ExecutionError, match="no answer"):
            journals.Lease(folder())
    assert journals.lease_holder(folder()) is None
    journals.Lease(folder()).release()
