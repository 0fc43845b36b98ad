"""Workers run one job after the other, wait for the next one, and are replaced after a failure."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from oocgemm.service import confinement, dispatcher
from oocgemm.service import dispatcher as dispatching
from oocgemm.service.backfill import Limits, Need, Running
from oocgemm.service.dispatcher import KEEP, KEPT, Dispatcher, WorkerPool
from oocgemm.service.http.routes import devices
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import planned
from oocgemm.service.job_store import JobRecord, JobStore, NewJob
from oocgemm.service.job_worker import LOG, OWNER
from oocgemm.service.limits import DeviceInfo, Root, allowed_folders
from oocgemm.service.protocol import Action, State
from tests.support.backends_here import REAL_BACKENDS
from tests.support.fake_cuda import fake_cuda
from tests.support.services import product_job, product_of, start_job, store_operands

# One device: jobs run one after the other.
LIMITS = Limits({0: 1 << 30}, 4 << 30, 1 << 40)
needs_landlock = pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")


class Service:
    """A dispatcher with one device in this process. Its idle workers see the time `now`."""

    def __init__(self, folder: Path, confine: Any = None, keep: float = KEEP) -> None:
        self.folder, self.now, self._confine, self._keep = folder, 0.0, confine, keep
        self.open()

    def open(self) -> None:
        self.store = JobStore(self.folder / "db")
        self.dispatcher = Dispatcher(
            self.store, self.folder, lambda: LIMITS, confine=self._confine, keep=self._keep
        )
        self.dispatcher.workers._clock = lambda: self.now

    def submit(self, *names: str, **options: Any) -> list[JobRecord]:
        return self.store.submit([product_job(self.folder, name, **options) for name in names])

    def until(self, ready: Callable[[], bool]) -> None:
        """Repeat passes until a condition holds."""
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end, [(job.state, job.error) for job in self.store.jobs()]
            self.dispatcher.step()
            self.dispatcher.wait(0.01)

    def ended(self, job: JobRecord, state: State = State.SUCCEEDED) -> JobRecord:
        """Wait until a job has ended in a state."""
        self.until(lambda: self.store.get(job.id).ended is not None)
        found = self.store.get(job.id)
        assert found.state is state, found.error
        return found

    def owner(self, job: JobRecord) -> int:
        """Return the pid of the process that has computed a job, or computes it."""
        found: int = json.loads((self.dispatcher.folder_of(job.id) / OWNER).read_bytes())["pid"]
        return found

    def stopped(self, name: str) -> tuple[JobRecord, dispatcher.Process]:
        """Submit a job, and stop its process as soon as it has begun."""
        (job,) = self.submit(name)
        self.until(
            lambda: dispatcher.has_begun(self.dispatcher.folder_of(job.id), self.store.get(job.id).attempt)
        )
        process = self.dispatcher._processes[job.id]
        process.send(signal.SIGSTOP)
        return job, process

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
    found.until(lambda: not found.store.active())
    found.close()


def wait_for_the_end(pid: int) -> None:
    """Wait until a child process of this one has ended."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def state_of_the_device(service: Service) -> str:
    """Return what the device view says."""
    device = DeviceInfo(0, "device", 1 << 30)
    shared = SimpleNamespace(
        limits=lambda: LIMITS, store=service.store, dispatcher=service.dispatcher, devices=[device]
    )
    (found,) = devices(cast(Any, shared)).devices
    return found.state


def test_a_worker_computes_jobs_of_all_owners_one_after_the_other(service: Service) -> None:
    assert state_of_the_device(service) == "idle"
    jobs = [service.store.submit([product_job(service.folder, f"{x}.npy", owner=x)])[0] for x in "pqr"]
    service.until(lambda: bool(service.store.active()))
    assert state_of_the_device(service) == "running"
    found = [service.ended(job) for job in jobs]
    assert len({service.owner(job) for job in jobs}) == 1
    assert state_of_the_device(service) == "warm"
    for job in found:
        assert (job.attempt, job.failures) == (1, 0)
        np.testing.assert_array_equal(np.load(job.c_path), product_of(service.folder))
        assert (service.dispatcher.folder_of(job.id) / "timeline").stat().st_size > 0
    # Nothing of these jobs is left where the worker could read it.
    (folder,) = (service.folder / "workers").iterdir()
    assert list(folder.iterdir()) == []


def test_a_warm_worker_computes_the_same_bits_as_a_new_process(service: Service) -> None:
    rng = np.random.default_rng(2)
    for name in "AB":
        np.save(service.folder / f"{name}.npy", rng.standard_normal((64, 64)))
    warm = [service.ended(job) for job in service.submit("C.npy", "D.npy")]
    service.dispatcher.workers._keep = 0
    cold = [service.ended(job) for job in service.submit("E.npy", "F.npy")]
    assert len({Path(job.c_path).read_bytes() for job in (*warm, *cold)}) == 1
    assert service.owner(warm[0]) == service.owner(warm[1])
    assert len({service.owner(job) for job in (*warm, *cold)}) == 3
    assert service.dispatcher.workers.warm == set()


def test_an_idle_worker_ends_after_its_time(service: Service) -> None:
    (job,) = service.submit("C.npy")
    service.ended(job)
    service.now = KEEP - 1
    service.dispatcher.step()
    assert service.dispatcher.workers.warm == {0}
    service.now = KEEP
    service.dispatcher.step()
    assert service.dispatcher.workers.warm == set()
    service.until(lambda: not service.dispatcher.workers.processes())
    assert list((service.folder / "workers").iterdir()) == []
    (job,) = service.submit("D.npy")
    service.ended(job)


def test_wrong_input_keeps_a_worker_and_a_defect_replaces_it(service: Service) -> None:
    pids = []
    for name, state, code in (
        ("C.npy", State.SUCCEEDED, 0),
        ("wrong", State.FAILED, 2),
        ("D.npy", State.SUCCEEDED, 0),
        ("defect", State.FAILED, 1),
        ("E.npy", State.SUCCEEDED, 0),
    ):
        new = vars(product_job(service.folder, f"{name}-C.npy")) | {"max_attempts": 1}
        if name == "wrong":
            new["spec"] = new["spec"] | {"a": str(service.folder / "absent.npy")}
        if name == "defect":
            new["spec"] = {"options": {"backend": "host"}}
        (job,) = service.store.submit([NewJob(**new)])
        assert service.ended(job, state).exit_code == code
        pids.append(service.owner(job))
    assert len({*pids[:4]}) == 1
    assert pids[4] != pids[3]
    wait = [each for each in service.dispatcher.workers.processes() if each.pid == pids[3]]
    assert all(each.channel is None for each in wait)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_death_of_an_idle_worker_is_no_failure_of_the_next_job(service: Service, stopped: bool) -> None:
    """It dies before it is sent a job, or with a job in its socket."""
    (job,) = service.submit("C.npy")
    service.ended(job)
    pid = service.owner(job)
    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    (job,) = service.submit("D.npy")
    if stopped:
        service.until(lambda: job.id in service.dispatcher._processes)
        assert service.dispatcher._processes[job.id].pid == pid
        os.kill(pid, signal.SIGKILL)
    wait_for_the_end(pid)
    found = service.ended(job)
    assert (found.attempt, found.failures) == (2 if stopped else 1, 0)
    assert service.owner(job) != pid


def test_a_worker_that_dies_in_a_job_is_replaced(service: Service) -> None:
    (first,) = service.submit("C.npy")
    service.ended(first)
    job, process = service.stopped("D.npy")
    assert process.pid == service.owner(first)
    process.send(signal.SIGKILL)
    found = service.ended(job)
    assert (found.attempt, found.failures) == (2, 1)
    assert service.owner(job) != service.owner(first)
    np.testing.assert_array_equal(np.load(found.c_path), product_of(service.folder))


def test_a_worker_that_was_told_to_stop_a_job_gets_no_other_one(service: Service) -> None:
    (first,) = service.submit("C.npy")
    service.ended(first)
    job, process = service.stopped("D.npy")
    service.until(lambda: service.store.get(job.id).state is State.RUNNING)
    service.store.request(job.id, Action.PAUSE)
    service.dispatcher.step()  # sends SIGTERM, which waits until the process goes on
    process.send(signal.SIGCONT)
    service.until(lambda: service.store.get(job.id).state in (State.PAUSED, State.SUCCEEDED))
    assert service.store.get(job.id).state is State.PAUSED
    assert service.dispatcher.workers.warm == set()
    service.store.request(job.id, Action.RESUME)
    assert service.ended(job).failures == 0
    assert service.owner(job) != service.owner(first)


def test_a_new_server_finds_the_second_job_of_a_worker_which_then_ends(service: Service) -> None:
    (first,) = service.submit("C.npy")
    service.ended(first)
    job, process = service.stopped("D.npy")
    pid = process.pid
    service.close()
    service.open()
    service.dispatcher.step()
    assert service.dispatcher._processes[job.id].pid == pid
    assert len(list((service.folder / "workers").iterdir())) == 1  # locked by the worker
    os.kill(pid, signal.SIGCONT)
    assert service.ended(job).attempt == 1
    wait_for_the_end(pid)
    assert service.dispatcher.workers.warm == set()
    service.close()
    service.open()
    assert list((service.folder / "workers").iterdir()) == []


def test_an_idle_worker_ends_with_its_server(service: Service) -> None:
    (job,) = service.submit("C.npy")
    service.ended(job)
    pid = service.owner(job)
    service.close()
    wait_for_the_end(pid)
    service.open()


def test_a_job_gets_the_memory_of_workers_that_wait(tmp_path: Path) -> None:
    """A job that needs the memory of an idle worker waits until that worker has ended."""
    workers = WorkerPool(tmp_path / "workers")
    process = dispatcher.spawn(tmp_path / "workers", tmp_path / LOG)
    process.idle = True
    workers.rest(process, 0, {"options": {"backend": "cuda"}}, reuse=True)
    limits = Limits({0: 1 << 30, 1: 1 << 30}, 4 << 30, 1 << 40)
    beside = limits.host - KEPT.host
    busy = Running("x", "user", 1, Need(0, 1 << 30), 0.0)
    assert workers.make_room(Need(1 << 30, beside), 1, [], limits)
    assert workers.make_room(Need(1 << 30, 4 << 30), 0, [], limits)  # its own worker counts as part of it
    assert workers.make_room(Need(1 << 30, beside - (1 << 30)), 1, [busy], limits)
    assert workers.warm == {0}
    assert not workers.make_room(Need(1 << 30, beside + 1), 1, [], limits)
    assert workers.warm == set()
    wait_for_the_end(process.pid)
    workers.check()
    assert workers.make_room(Need(1 << 30, 4 << 30), 1, [], limits)
    assert workers.processes() == []


def test_a_worker_keeps_no_more_than_is_counted() -> None:
    with fake_cuda():
        from oocgemm.backends.cuda import host_memory, warm
        from oocgemm.planning import default_model
        from oocgemm.planning.cost.footprint import BUFFERS, PIECE

        ring = 2 * (1 + default_model("cuda", 64).copy_threads) * BUFFERS * PIECE
        assert KEPT.device >= warm.MAX_KEPT_SHARE * (192 << 30)
        assert host_memory.MAX_KEPT + ring <= KEPT.host


@needs_landlock
@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_a_confined_worker_reads_nothing_of_its_earlier_jobs(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs compute; those whose operands link to files of the service do not."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    (tmp_path / "data").mkdir()
    (tmp_path / "state/jobs").mkdir(parents=True)
    store_operands(tmp_path / "data")
    (tmp_path / "state/secret.npy").write_bytes((tmp_path / "data/A.npy").read_bytes())
    limits = Limits({0: 0 if backend == "host" else 1 << 30}, 4 << 30, 1 << 40)
    confine = allowed_folders([Root.parse(f"data={tmp_path}/data:rw")])
    workers = WorkerPool(tmp_path / "state/workers", confine)

    def run(name: str, a: str) -> dict[str, Any]:
        spec = {"a": str(tmp_path / f"data/{a}.npy"), "b": str(tmp_path / "data/B.npy")}
        spec |= {"c": str(tmp_path / f"data/{name}.npy")}
        folder = tmp_path / "state/jobs" / name
        found = planned(checked(spec | {"options": {"tile": "16x16x16"}}), limits, backend)
        process = workers.start(folder, 1, found.spec, 0)
        while not process.ended:
            time.sleep(0.005)
        pids.append(process.pid)
        workers.rest(process, 0, found.spec, reuse=True)
        result = dispatcher.result_of(folder, 1)
        assert result is not None, (folder / LOG).read_text()
        return result

    pids: list[int] = []
    try:
        for name in ("one", "two"):
            assert run(name, "A")["exit_code"] == 0
            np.testing.assert_array_equal(
                np.load(tmp_path / f"data/{name}.npy"), product_of(tmp_path / "data")
            )
        assert pids[0] == pids[1]
        # The second job left a matrix in its folder: a later job must not get it.
        (tmp_path / "state/jobs/two/left.npy").write_bytes((tmp_path / "data/A.npy").read_bytes())
        for number, target in enumerate(("jobs/two/left.npy", "secret.npy")):
            link = tmp_path / f"data/link{number}.npy"
            link.symlink_to(tmp_path / "state" / target)
            result = run(f"three{number}", link.stem)
            assert result["exit_code"] in (1, 2)
            assert "ermission" in result["error"]
    finally:
        workers.close()


def test_a_job_whose_folder_was_removed_ends_without_a_result(tmp_path: Path) -> None:
    """A later server has removed the folder of a worker before it had begun."""
    store_operands(tmp_path)
    job = product_job(tmp_path, "C.npy")
    process = start_job(tmp_path / "state/job", 1, job.spec)
    process.send(signal.SIGSTOP)
    assert process.folder is not None
    if not dispatcher.is_alive(tmp_path / "state/job"):
        dispatcher.remove_folders(tmp_path / "workers")
    process.send(signal.SIGCONT)
    while not process.ended:
        time.sleep(0.005)
    assert process.code in (None, 75)
    process.close()


def test_the_death_of_a_new_worker_before_its_order_is_a_failure_to_repeat(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, dead = dispatcher.spawn, list[int]()

    def killed_once(workers: Path, log: Path) -> dispatcher.Process:
        process = spawn(workers, log)
        if not dead:
            dead.append(process.pid)
            process.send(signal.SIGKILL)
            wait_for_the_end(process.pid)
        return process

    monkeypatch.setattr(dispatcher, "spawn", killed_once)
    (job,) = service.submit("C.npy")
    found = service.ended(job)
    assert len(dead) == 1
    assert (found.attempt, found.failures) == (2, 1)
    np.testing.assert_array_equal(np.load(found.c_path), product_of(service.folder))
