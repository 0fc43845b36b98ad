"""A dispatcher runs real processes, in which products are computed."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import BudgetError, InputError
from oocgemm.service import dispatcher
from oocgemm.service import dispatcher as dispatching
from oocgemm.service.backfill import Limits, Need
from oocgemm.service.dispatcher import Dispatcher
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import planned
from oocgemm.service.job_store import JobRecord, JobStore
from oocgemm.service.job_worker import TILES
from oocgemm.service.protocol import FINAL, Action, Reason, State
from tests.support.services import (
    LIMITS,
    plain_job,
    product_job,
    product_of,
    run_all,
    start_job,
    store_operands,
)


class Service:
    """A service in this process."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder, self.limits = folder, limits
        self.store = JobStore(folder / "db")
        self.dispatcher = Dispatcher(self.store, folder, lambda: self.limits)

    def submit(self, *names: str, **options: Any) -> list[JobRecord]:
        return self.store.submit([product_job(self.folder, name, **options) for name in names])

    def until(self, ready: Callable[[], bool]) -> None:
        """Repeat passes until a condition holds."""
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end, [(job.state, job.error) for job in self.store.jobs()]
            self.dispatcher.step()
            time.sleep(0.01)

    def run(self) -> list[JobRecord]:
        return run_all(self.dispatcher, self.store)

    def restart(self) -> None:
        """Replace the dispatcher and the database, as a new server does."""
        self.close()
        self.__init__(self.folder, self.limits)  # type: ignore[misc]

    def close(self) -> None:
        self.dispatcher.close()
        self.store.close()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(dispatching, "RETRY", 0.05)
    store_operands(tmp_path)
    found = Service(tmp_path)
    yield found
    for job in found.store.active():
        found.store.request(job.id, Action.CANCEL)
    found.run()
    found.close()


def stopped_in_c(service: Service, name: str) -> tuple[JobRecord, int]:
    """Run a job until its process has begun; stop that process. Return the job and the process."""
    (job,) = service.submit(name)
    folder = service.dispatcher.folder_of(job.id)
    service.until(lambda: dispatcher.has_begun(folder, 1))
    owner = dispatcher.attach(folder)
    assert owner is not None
    os.kill(owner.pid, signal.SIGSTOP)
    owner.close()
    return job, owner.pid


def test_jobs_run_and_leave_their_results(service: Service) -> None:
    service.submit("C.npy", "D.npy", "E.npy")
    for job in service.run():
        assert (job.state, job.attempt, job.failures, job.exit_code) == (State.SUCCEEDED, 1, 0, 0)
        assert job.result is not None
        assert job.result["flops"] == 2 * 64**3
        np.testing.assert_array_equal(np.load(job.c_path), product_of(service.folder))
        folder = service.dispatcher.folder_of(job.id)
        assert sorted((folder / TILES).read_text().split("\n")[:-1]) == [
            f"1 0 {i} {j}" for i in range(4) for j in range(4)
        ]
        assert oocgemm.report(folder / "timeline").flops == 2 * 64**3
        assert service.store.usage()["user"] > 0


def test_a_job_waits_for_those_that_it_needs(service: Service) -> None:
    first, second = product_job(service.folder, "C.npy"), product_job(service.folder, "D.npy")
    a, b = service.store.submit([first, type(second)(**vars(second) | {"needs": ("#0",)})])
    service.dispatcher.step()
    assert service.store.get(b.id).reason == Reason.DEPENDENCY
    service.run()
    ended, started = service.store.get(a.id).ended, service.store.get(b.id).started
    assert ended is not None
    assert started is not None
    assert ended <= started


def test_a_job_that_has_ended_when_the_dispatcher_looks_has_a_start(service: Service) -> None:
    """A worker that waits for jobs multiplies small matrices in less time than passes are apart."""
    (job,) = service.submit("C.npy")
    service.dispatcher.step()
    folder, begun = service.dispatcher.folder_of(job.id), time.time()
    while dispatcher.result_of(folder, 1) is None or dispatcher.is_alive(folder):
        assert time.time() < begun + 60
        time.sleep(0.01)
    service.run()
    done = service.store.get(job.id)
    assert done.state is State.SUCCEEDED
    assert done.started is not None
    assert done.ended is not None
    assert done.result is not None
    assert job.created <= done.started <= done.ended - done.result["seconds"]
    assert service.store.usage()[job.owner] > 0


def test_a_wrong_job_fails_once_with_the_message_of_the_run(service: Service) -> None:
    new = product_job(service.folder, "C.npy")
    (service.folder / "A.npy").write_bytes(b"nonsense")
    service.store.submit([new])
    (job,) = service.run()
    assert (job.state, job.attempt, job.exit_code) == (State.FAILED, 1, 2)
    assert job.error is not None
    assert "A.npy" in job.error


def test_a_job_whose_process_dies_is_started_again_until_it_has_failed_too_often(service: Service) -> None:
    job, pid = stopped_in_c(service, "C.npy")
    for attempt in (1, 2, 3):
        os.kill(pid, signal.SIGKILL)
        if attempt < 3:
            service.until(partial(dispatcher.has_begun, service.dispatcher.folder_of(job.id), attempt + 1))
            pid = service.dispatcher._processes[job.id].pid
            os.kill(pid, signal.SIGSTOP)
    (job,) = service.run()
    assert (job.state, job.attempt, job.failures) == (State.FAILED, 3, 3)
    assert job.error == "its process was killed by SIGKILL"
    service.store.request(job.id, Action.RETRY)
    (job,) = service.run()
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 4, 0)
    np.testing.assert_array_equal(np.load(job.c_path), product_of(service.folder))


def test_a_new_server_finds_the_processes_of_the_old_one(service: Service) -> None:
    job, pid = stopped_in_c(service, "C.npy")
    with pytest.raises(InputError, match=rf"another server, process {os.getpid()}, uses the state folder"):
        Dispatcher(service.store, service.folder, lambda: LIMITS)
    service.restart()
    service.dispatcher.step()
    assert service.store.get(job.id).state is State.RUNNING
    assert service.dispatcher._processes[job.id].pid == pid
    os.kill(pid, signal.SIGCONT)
    (job,) = service.run()
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1)


def test_a_death_while_no_server_runs_is_no_failure_of_the_job(service: Service) -> None:
    _, pid = stopped_in_c(service, "C.npy")
    service.restart()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (job,) = service.run()
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 0)


def test_a_late_process_of_an_earlier_attempt_cannot_compute_beside_the_next(service: Service) -> None:
    (job,) = service.submit("C.npy")
    store, folder = service.store, service.dispatcher.folder_of(job.id)
    job = store.move(job, State.STARTING, attempt=1, device=0)
    late = start_job(folder, 1, job.spec)
    os.kill(late.pid, signal.SIGSTOP)
    service.until(lambda: dispatcher.has_begun(folder, 2))  # the lock was free: the job was queued again
    os.kill(late.pid, signal.SIGCONT)
    service.run()
    while not late.ended:
        time.sleep(0.01)
    assert late.code == 75
    late.close()
    assert store.get(job.id).state is State.SUCCEEDED
    assert len((folder / TILES).read_text().split("\n")) == 17


def test_a_job_can_be_paused_and_resumed(service: Service) -> None:
    job, pid = stopped_in_c(service, "C.npy")
    service.dispatcher.step()
    assert service.store.request(job.id, Action.PAUSE).state is State.PAUSING
    service.dispatcher.step()  # sends SIGTERM, which waits until the process goes on
    os.kill(pid, signal.SIGCONT)
    service.until(lambda: service.store.get(job.id).state is State.PAUSED)
    assert service.store.get(job.id).failures == 0
    service.store.request(job.id, Action.RESUME)
    (job,) = service.run()
    assert (job.state, job.attempt) == (State.SUCCEEDED, 2)
    np.testing.assert_array_equal(np.load(job.c_path), product_of(service.folder))


def test_a_process_that_does_not_end_is_killed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "GRACE", 0.2)
    job, _ = stopped_in_c(service, "C.npy")
    service.store.request(job.id, Action.CANCEL)
    (job,) = service.run()
    assert job.state is State.CANCELLED


def test_a_deadline_ends_a_queued_and_a_running_job(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "GRACE", 0.2)
    job, _ = stopped_in_c(service, "C.npy")
    (other,) = service.store.submit([plain_job("/x", deadline=time.time() - 1, need=Need(1 << 60))])
    service.store.update(job.id, deadline=time.time() - 1)
    service.run()
    assert service.store.get(other.id).state is State.FAILED
    assert service.store.get(job.id).state is State.CANCELLED
    assert {service.store.get(each.id).error for each in (job, other)} == {"the deadline has passed"}


def test_a_draining_server_starts_nothing(service: Service) -> None:
    (job,) = service.submit("C.npy")
    service.dispatcher.draining = True
    service.dispatcher.step()
    assert (service.store.get(job.id).state, service.store.get(job.id).reason) == (
        State.QUEUED,
        Reason.DRAINING,
    )
    service.dispatcher.draining = False
    assert service.run()[0].state is State.SUCCEEDED


def test_beta_is_applied_once_whatever_was_in_c(service: Service) -> None:
    """Twice in a row, with a process that dies before it has begun to write."""
    right = np.ones((64, 64))
    np.save(service.folder / "C.npy", right)
    for _ in range(2):
        (job,) = service.submit("C.npy", beta=1)
        job = service.store.move(job, State.STARTING, attempt=1, device=0)
        folder = service.dispatcher.folder_of(job.id)
        process = start_job(folder, 1, job.spec)
        while not dispatcher.has_begun(folder, 1):
            time.sleep(0.001)
        process.send(signal.SIGKILL)
        process.close()
        service.run()
        right = right + product_of(service.folder)
        assert service.store.get(job.id).state is State.SUCCEEDED
        np.testing.assert_array_equal(np.load(service.folder / "C.npy"), right)


def test_overwriting_replaces_an_old_product(service: Service) -> None:
    np.save(service.folder / "C.npy", np.ones((64, 64)))
    (job,) = service.submit("C.npy")
    assert service.run()[0].state is State.FAILED
    (job,) = service.submit("C.npy", overwrite=True)
    service.run()
    assert service.store.get(job.id).state is State.SUCCEEDED
    np.testing.assert_array_equal(np.load(service.folder / "C.npy"), product_of(service.folder))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"a": "x", "b": "y"}, "c must be the path"),
        ({"a": "x", "b": "y", "c": "z\0"}, "c must be the path"),
        ({"a": "x", "b": "y", "c": "z", "d": 1}, "unknown fields d"),
        ({"a": "x", "b": "y", "c": "z", "options": [1]}, "options must be an object"),
        (
            {"a": "x", "b": "y", "c": "z", "options": {"workers": 2}},
            "unknown option workers: a job takes alpha",
        ),
        ({"a": "x", "b": "y", "c": "z", "options": {"verify": 1}}, "verify must be of type bool, not int"),
    ],
)
def test_wrong_specifications_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(spec)


def test_a_job_that_never_fits_is_refused_with_the_least_that_would_do(tmp_path: Path) -> None:
    store_operands(tmp_path, 512)
    spec = checked({name: str(tmp_path / f"{name.upper()}.npy") for name in "abc"})
    with pytest.raises(BudgetError, match="MiB") as refused:
        planned(spec, Limits({0: 0}, 1 << 20, 1 << 30), "host")
    assert refused.value.least
    with pytest.raises(InputError, match=r"the job needs 2 MiB of disk, and the service has 1 MiB: free"):
        planned(spec, Limits({0: 0}, 1 << 30, 1 << 20), "host")
    options = {"device_memory": 1 << 30, "host_memory": 1 << 30}
    with pytest.raises(
        BudgetError, match="of host memory, and the service has 64 MiB: pass smaller"
    ) as refused:
        planned(spec | {"options": options}, Limits({0: 0}, 64 << 20, 1 << 30), "host")
    assert refused.value.needed
    device, host = refused.value.needed
    smallest = planned(
        spec | {"options": {"device_memory": device, "host_memory": host}},
        Limits({0: 0}, 1 << 30, 1 << 30),
        "host",
    )
    assert smallest.need.host < 64 << 20
    small = planned(spec, LIMITS, "host")
    assert small.need.host < 1 << 28  # far below the limit: the budgets are lowered to what the plan needs


def test_final_states_need_no_process(service: Service) -> None:
    service.submit("C.npy")
    service.run()
    assert all(job.state in FINAL for job in service.store.jobs())
    assert service.dispatcher._processes == {}
