"""The commands of the queue and `oocgemm.Client`, with the real server."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import BudgetError, InputError
from oocgemm.service.protocol import AccessError, ConflictError, State, UnknownJobError
from tests.support.command import Finished, command
from tests.support.real_server import SECONDS, RealServer, running_server

OPERANDS = ("data:A.npy", "data:B.npy")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--share-device") as found:
        yield found


@pytest.fixture
def _address(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOCGEMM_SERVICE", str(server.socket))


def submitted(done: Finished) -> str:
    assert (done.code, done.err) == (0, "")
    return str(done.json()["id"])


@pytest.mark.usefixtures("_address")
def test_a_product_is_submitted_waited_for_and_reported(server: RealServer, tmp_path: Path) -> None:
    """The paths are local ones, which the client turns into paths of the roots."""
    done = command(
        *("submit", server.data / "A.npy", server.data / "B.npy", server.out / "first.npy"),
        *("--tile", "16x16x16", "--name", "first", "--wait", "--json"),
    )
    assert done.code == 0, done.err
    assert (done.json()["state"], done.json()["c"]) == ("succeeded", "out:first.npy")
    server.check("first.npy")
    number = done.json()["id"]
    assert "first" in command("status", number).out
    assert command("status", number[-8:], "--json").json()["progress"] == {"done": 16, "total": 16}
    assert command("wait", "last").code == 0
    assert command("logs", "last").out == command("logs", "-f", "last").out
    oocgemm.Client().job(number).report(tmp_path / "report.html")
    assert b"first" in (tmp_path / "report.html").read_bytes()


@pytest.mark.usefixtures("_address")
def test_a_dry_run_submits_nothing(server: RealServer) -> None:
    before = len(command("queue", "--all", "--json").json()["jobs"])
    done = command("submit", *OPERANDS, "out:dry.npy", "--dry-run", "--json")
    assert done.json()["plan"]["m"] == 64
    assert command("submit", *OPERANDS, "out:dry.npy", "--dry-run").code == 0
    assert len(command("queue", "--all", "--json").json()["jobs"]) == before


@pytest.mark.usefixtures("_address")
def test_jobs_are_held_released_cancelled_and_retried(server: RealServer) -> None:
    number = submitted(command("submit", *OPERANDS, "out:acted.npy", "--hold", "--json"))
    assert number in {job["id"] for job in command("queue", "--json").json()["jobs"]}
    assert number[-6:] in command("queue").out
    assert command("hold", number).out == f"job {number} is held\n"
    assert command("cancel", number).out == f"job {number} is cancelled\n"
    assert command("release", number).code == 1
    assert command("wait", number).code == 1  # it was cancelled
    assert command("retry", number).code == 0
    done = command("wait", number)
    assert (done.code, done.out) == (0, f"job {number} succeeded\n")
    server.check("acted.npy")
    assert number not in {job["id"] for job in command("queue", "--json").json()["jobs"]}
    assert number in {job["id"] for job in command("queue", "--state", "succeeded", "--json").json()["jobs"]}


@pytest.mark.usefixtures("_address")
def test_commands_have_the_exit_code_of_the_job(server: RealServer) -> None:
    assert command("submit", "data:none.npy", OPERANDS[1], "out:C.npy", "--wait").code == 2
    small = command("submit", *OPERANDS, "out:C.npy", "--device-memory", "1KiB", "--json")
    assert small.code == 3
    number = submitted(command("submit", *OPERANDS, "out:failing.npy", "--hold", "--json"))
    (server.data / "A.npy").rename(server.data / "away.npy")
    try:
        assert command("release", number).code == 0
        failed = command("wait", number)
    finally:
        (server.data / "away.npy").rename(server.data / "A.npy")
    assert failed.code == 2
    assert "there is nothing at" in failed.err
    assert "there is nothing at" in command("logs", "-f", number).out


def test_interrupting_a_wait_leaves_the_job(server: RealServer) -> None:
    job = server.client().submit(*OPERANDS, "out:waited.npy", held=True)
    environment = os.environ | {"OOCGEMM_SERVICE": str(server.socket)}
    # A shell may have started the tests with SIGINT ignored, and child processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command_line = [sys.executable, "-m", "oocgemm", "wait", job.id]
        waiting = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    assert waiting.stderr is not None
    shown = waiting.stderr.read(1)  # it shows the state when it waits
    waiting.send_signal(signal.SIGINT)
    shown += waiting.communicate(timeout=SECONDS)[1]
    assert waiting.returncode == 130
    assert f"oocgemm wait {job.id}" in shown
    assert job.refresh().state == "held"
    job.cancel()


# The client


def test_the_client_submits_and_waits(server: RealServer) -> None:
    client = server.client()
    job = client.submit(*OPERANDS, "out:client.npy", tile="16x16x16", name="client", priority=2)
    seen = [progress.state for progress in job.progress()]
    assert seen[-1] == State.SUCCEEDED
    assert (job.ended, job.exit_code, job.error) == (True, 0, None)
    assert client.job(job.id).info["name"] == "client"
    server.check("client.npy")
    assert [device["index"] for device in client.devices()["devices"]] == [0]


def test_the_client_maps_products(server: RealServer) -> None:
    client = server.client()
    jobs = client.map([(*OPERANDS, f"out:map{number}.npy") for number in range(4)], name="map", held=True)
    listed = [job.id for job in client.jobs() if job.info["name"] == "map"]
    assert listed == [job.id for job in jobs][::-1]
    chained = client.map(
        [(*OPERANDS, "out:chain0.npy"), {"a": "data:A.npy", "b": "data:B.npy", "c": "out:chain1.npy"}]
    )
    for job in chained:
        assert job.wait(SECONDS).state == State.SUCCEEDED
    for job in jobs:
        assert job.cancel().state == State.CANCELLED


def test_errors_of_the_server_are_those_of_the_library(server: RealServer, tmp_path: Path) -> None:
    client = server.client()
    with pytest.raises(BudgetError) as small:
        client.submit(*OPERANDS, "out:C.npy", device_memory="1KiB")
    assert small.value.needed
    device, host = small.value.needed
    assert client.plan(*OPERANDS, "out:C.npy", device_memory=device, host_memory=host)["predicted_s"] > 0
    with pytest.raises(InputError, match="there is nothing at this path"):
        client.submit("data:none.npy", OPERANDS[1], "out:C.npy")
    with pytest.raises(InputError, match="is beneath no folder of the service"):
        client.submit(tmp_path / "A.npy", OPERANDS[1], "out:C.npy")
    with pytest.raises(UnknownJobError):
        client.job("nobody")
    job = client.submit(*OPERANDS, "out:errors.npy", held=True)
    with pytest.raises(ConflictError, match="writes the same C"):
        client.submit(*OPERANDS, "out:errors.npy")
    with pytest.raises(ConflictError, match="pause is impossible"):
        job.pause()
    job.cancel()


def test_a_client_of_another_machine_needs_a_token(server: RealServer) -> None:
    with pytest.raises(AccessError, match=r"set \$OOCGEMM_TOKEN, or pass token="):
        oocgemm.Client(server.url).submit(*OPERANDS, "out:remote.npy")
    client = oocgemm.Client(server.url, token=server.token("submit", name="ann"))
    job = client.submit(*OPERANDS, "out:remote.npy").wait(SECONDS)
    assert (job.state, job.info["owner"]) == (State.SUCCEEDED, "ann")
    server.check("remote.npy")
    with pytest.raises(AccessError, match="belongs to"):
        client.job(server.client().submit(*OPERANDS, "out:other.npy", held=True).id).cancel()


def test_waiting_survives_a_restart_of_the_server(server: RealServer) -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(-4, 5, (128, 128)).astype(np.float64)
    np.save(server.data / "big.npy", values)
    job = server.client().submit(
        "data:big.npy", "data:big.npy", "out:restart.npy", tile="16x16x16", held=True
    )
    states: list[str] = []
    waiting = threading.Thread(target=lambda: states.append(job.wait(120).state))
    waiting.start()
    server.restart(signal.SIGKILL)
    server.client().job(job.id).release()
    server.restart()
    waiting.join()
    assert states == [State.SUCCEEDED]
    np.testing.assert_array_equal(np.load(server.out / "restart.npy"), values @ values)
    assert json.loads(json.dumps(job.info)) == server.job(job.id)
