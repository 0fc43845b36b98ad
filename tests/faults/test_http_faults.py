"""Faults of the machine: a full disk, a database that cannot be written, a wrong clock, restarts."""

import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from oocgemm.service import dispatcher
from oocgemm.service.http.service import DATABASE
from oocgemm.service.job_store import VERSION
from oocgemm.service.job_worker import OWNER
from tests.support.command import command
from tests.support.real_server import JOB, SECONDS, RealServer, running_server
from tests.support.suite import slow

HOUR = 3600.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    quickly = {"oocgemm.service.job_store:BUSY_SECONDS": 0.2}
    with running_server(tmp_path_factory.mktemp("server"), "--share-device", set=quickly) as found:
        yield found


@contextmanager
def full_disk(server: RealServer) -> Iterator[None]:
    """Let no file of the server grow, as on a full disk."""
    before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(server: RealServer) -> Iterator[None]:
    assert server.process is not None
    server.process.send_signal(signal.SIGUSR1)
    until = time.monotonic() + SECONDS
    while server.ask("POST", "/v1/jobs", JOB | {"c": "out:probe.npy", "held": True}).status != 503:
        assert time.monotonic() < until
        with closing(sqlite3.connect(server.state / DATABASE)) as db:  # the next probe writes the same C
            db.execute("DELETE FROM jobs WHERE c_path LIKE '%probe.npy'")
            db.commit()
    yield
    server.process.send_signal(signal.SIGUSR2)


@contextmanager
def locked(server: RealServer) -> Iterator[None]:
    with closing(sqlite3.connect(server.state / DATABASE, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


@pytest.mark.parametrize("fault", [full_disk, read_only, locked])
def test_a_database_that_cannot_be_written_is_a_clear_problem(server: RealServer, fault: object) -> None:
    """Jobs can still be read. When the fault is over, all goes on."""
    name = fault.__name__  # type: ignore[attr-defined]
    job = server.submit(f"{name}.npy", held=True)
    token = server.token("submit", name=job["owner"])
    path = f"/v1/jobs/{job['id']}"
    with fault(server):  # type: ignore[operator]
        for method, rest, body in (
            ("POST", "/v1/jobs", JOB | {"c": f"out:{name}2.npy"}),
            ("POST", "/v1/batches", {"jobs": [JOB | {"c": f"out:{name}2.npy"}]}),
            ("POST", f"{path}/release", None),
            ("PATCH", path, {"priority": 1}),
        ):
            reply = server.ask(method, rest, body)
            assert (reply.problem(503), reply.headers["Retry-After"]) == ("unavailable", "1")
            assert "check the space on its disk, its permissions" in reply.json()["detail"]
        assert server.job(job["id"]) == job
        assert server.ask("GET", "/v1/jobs", tcp=True, token=token).status == 200
        assert server.ask("GET", "/livez").status == 200
        if fault is locked:
            assert server.ask("GET", "/readyz").json()["problems"][0].startswith("the database cannot be")
    until = time.monotonic() + SECONDS
    while (reply := server.ask("POST", f"{path}/release")).status == 503:
        assert time.monotonic() < until
    assert reply.status == 200
    assert server.until(job["id"], "succeeded", "failed")["state"] == "succeeded"
    server.check(f"{name}.npy")


def test_a_full_disk_of_results_is_reported_by_the_job(server: RealServer) -> None:
    reply = server.ask("POST", "/v1/jobs", JOB | {"c": "out:full.npy", "held": True, "max_attempts": 1})
    number = reply.json()["id"]
    with full_disk(server):  # the process of the job inherits the limit
        assert server.ask("GET", "/readyz").status in (200, 503)
    assert server.job(number)["state"] == "held"


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_by_an_hour_loses_nothing(tmp_path: Path, hours: int) -> None:
    with running_server(tmp_path) as server:
        token = server.token(expires=time.time() + 30 * 60)
        waiting = server.submit("first.npy", held=True)
        late = server.submit("late.npy", held=True, deadline=time.time() + 30 * 60)
        server.end()
        server.changes = {"clock": hours * HOUR}
        server.start()
        assert server.ask("GET", "/v1/jobs", tcp=True, token=token).status == (401 if hours > 0 else 200)
        server.ask("POST", f"/v1/jobs/{waiting['id']}/release")
        assert server.until(waiting["id"], "succeeded", "failed")["state"] == "succeeded"
        second = server.submit("second.npy")
        assert second["id"] != waiting["id"]
        assert server.until(second["id"], "succeeded", "failed")["state"] == "succeeded"
        if hours < 0:
            server.ask("POST", f"/v1/jobs/{late['id']}/release")
            assert server.until(late["id"], "succeeded", "failed")["state"] == "succeeded"
        else:
            server.ask("POST", f"/v1/jobs/{late['id']}/release")
            failed = server.until(late["id"], "succeeded", "failed")
            assert (failed["state"], failed["error"]) == ("failed", "the deadline has passed")
        server.check("first.npy", "second.npy")


def test_a_second_server_on_the_same_folder_is_refused(server: RealServer) -> None:
    other = command(*server.arguments())
    assert other.code == 2
    assert f"another server, process {server.pid}, uses the state folder {server.state}" in other.err
    assert server.ask("GET", "/readyz").status == 200


def test_a_socket_of_another_server_is_not_taken(server: RealServer, tmp_path: Path) -> None:
    other = RealServer(tmp_path, "--socket", str(server.socket))
    done = command(*other.arguments())
    assert done.code == 2
    assert "(another server listens on it): pass another --socket" in done.err
    assert server.ask("GET", "/readyz").status == 200


def test_a_state_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    server = RealServer(tmp_path)
    server.state.mkdir()
    with closing(sqlite3.connect(server.state / DATABASE)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    done = command(*server.arguments())
    assert done.code == 1
    assert f"database format {VERSION + 1}" in done.err


@pytest.mark.parametrize("signum", [signal.SIGTERM, *slow((signal.SIGKILL,))])
def test_jobs_go_on_when_the_server_ends_and_the_next_one_finds_them(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with running_server(tmp_path) as server:
        rng = np.random.default_rng(1)
        big = rng.integers(-4, 5, (512, 512)).astype(np.float64)
        np.save(server.data / "big.npy", big)
        job = {"a": "data:big.npy", "b": "data:big.npy", "c": "out:big.npy", "options": {"tile": "32x32x32"}}
        number = server.ask("POST", "/v1/jobs", job).json()["id"]
        queued = server.submit("queued.npy", needs=[number])["id"]
        folder = server.state / "jobs" / number
        server.until(number, "running")
        process = dispatcher.attach(folder)
        assert process is not None
        process.send(signal.SIGSTOP)  # so that the job cannot end before the server does
        assert server.end(signum) == (0 if signum == signal.SIGTERM else -signum)
        assert server.socket.exists() == (signum == signal.SIGKILL)
        owner = (folder / OWNER).read_bytes()
        assert dispatcher.is_alive(folder)
        server.start()
        found = server.job(number)
        assert (found["state"], found["attempt"]) == ("running", 1)
        process.send(signal.SIGCONT)
        process.close()
        ended = server.until(number, "succeeded", "failed")
        assert (ended["state"], ended["attempt"], (folder / OWNER).read_bytes()) == ("succeeded", 1, owner)
        np.testing.assert_array_equal(np.load(server.out / "big.npy"), big @ big)
        assert server.until(queued, "succeeded", "failed")["state"] == "succeeded"
        assert server.log() == ""


def test_a_job_that_died_while_no_server_ran_is_started_again(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        number = server.submit("C.npy", options={"tile": "8x8x8"})["id"]
        folder = server.state / "jobs" / number
        server.until(number, "running")
        process = dispatcher.attach(folder)
        assert process is not None
        process.send(signal.SIGSTOP)
        server.end(signal.SIGKILL)
        process.send(signal.SIGKILL)
        process.close()
        server.start()
        ended = server.until(number, "succeeded", "failed")
        assert (ended["state"], ended["attempt"], ended["failures"]) == ("succeeded", 2, 0)
        server.check("C.npy")


def test_a_draining_server_starts_nothing_and_says_so(server: RealServer) -> None:
    assert server.ask("POST", "/v1/drain", {"draining": True}).json() == {"draining": True}
    assert server.ask("GET", "/v1/devices").json()["draining"]
    number = server.submit("drained.npy")["id"]
    until = time.monotonic() + SECONDS
    while server.job(number)["reason"] != "draining":
        assert time.monotonic() < until
    server.ask("POST", "/v1/drain", {"draining": False})
    assert server.until(number, "succeeded", "failed")["state"] == "succeeded"


def test_health_devices_and_metrics(server: RealServer) -> None:
    assert server.ask("GET", "/livez").json() == {"status": "ok", "problems": []}
    assert server.ask("GET", "/readyz").json() == {"status": "ok", "problems": []}
    found = server.ask("GET", "/v1/devices").json()
    assert [device["index"] for device in found["devices"]] == [0]
    assert found["host"]["memory"] > found["host"]["reserved"] == 0
    text = server.ask("GET", "/metrics").body.decode()
    jobs = server.ask("GET", "/v1/jobs?limit=1000").json()["jobs"]
    succeeded = sum(job["state"] == "succeeded" for job in jobs)
    assert f'oocgemm_jobs{{state="succeeded"}} {succeeded}.0\n' in text
    assert "oocgemm_host_reserved_bytes 0.0\n" in text
    server.out.rename(server.folder / "away")
    try:
        reply = server.ask("GET", "/readyz")
        assert (reply.status, reply.json()["status"]) == (503, "unavailable")
        assert reply.json()["problems"] == ["a root cannot be read: see that its disk is mounted"]
    finally:
        (server.folder / "away").rename(server.out)
    number = server.submit("after.npy")["id"]  # the dispatcher has survived that
    assert server.until(number, "succeeded", "failed")["state"] == "succeeded"
