"""Jobs of the client: lists, waiting, actions, progress, logs, reports."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import oocgemm
from oocgemm import Client, InputError
from oocgemm.service import client as client_module
from oocgemm.service import transport
from oocgemm.service.client import Progress
from oocgemm.service.protocol import ConflictError, UnknownJobError, WaitTimeoutError
from oocgemm.service.transport import parse
from tests.support.stub_service import Stub, stub_service


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    monkeypatch.setattr(client_module, "PAUSE_SECONDS", 0.01)
    with stub_service(tmp_path) as found:
        yield found


@pytest.fixture
def client(stub: Stub) -> Client:
    return Client(str(stub.socket))


def test_jobs_are_listed_page_by_page(client: Client, stub: Stub) -> None:
    added = [stub.add(state=state)["id"] for state in ("queued", "failed", "queued", "held", "queued")]
    assert [job.id for job in client.jobs()] == added[::-1]
    assert [job.id for job in client.jobs(states=["failed", "held"])] == [added[3], added[1]]
    assert [job.id for job in client.jobs(limit=3)] == added[:1:-1]
    before = len(stub.requests)
    next(client.jobs())
    assert len(stub.requests) == before + 1, "pages are read when they are needed"


def test_an_unknown_job_is_an_error(client: Client) -> None:
    with pytest.raises(UnknownJobError, match="no job a%2F"):
        client.job("a/../b")


def test_wait_returns_when_the_job_has_ended(client: Client, stub: Stub) -> None:
    info = stub.add(state="running")
    waits = 0

    def on_wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            stub.set(info, attempt=2)
        elif waits == 4:
            stub.set(info, state="failed", exit_code=3, error="too small")

    stub.on_wait = on_wait
    job = client.job(info["id"]).wait()
    assert (job.state, job.exit_code, job.error, job.ended) == ("failed", 3, "too small", True)


def test_wait_survives_a_server_that_is_gone_for_a_while(client: Client, stub: Stub) -> None:
    info = stub.add(state="running")
    job = client.job(info["id"])
    away = stub.socket.with_name("away")

    def restart() -> None:
        time.sleep(0.05)
        stub.set(info, state="succeeded", exit_code=0)
        away.rename(stub.socket)

    def on_wait() -> None:
        if not away.exists() and info["state"] == "running":
            stub.socket.rename(away)
            stub.faults.append("lost")
            threading.Thread(target=restart).start()

    stub.on_wait = on_wait
    assert job.wait().state == "succeeded"


def test_wait_ends_at_its_timeout(client: Client, stub: Stub) -> None:
    job = client.job(stub.add(state="queued")["id"])
    with pytest.raises(WaitTimeoutError, match=r"is queued after 0\.05 s") as caught:
        job.wait(0.05)
    assert isinstance(caught.value, TimeoutError)
    answers = stub.count("GET", "/v1/jobs/.*wait.*")
    assert 1 <= answers <= 7, "a server that answers at once must not be asked again at once"


def test_actions_change_a_job(client: Client, stub: Stub) -> None:
    job = client.job(stub.add()["id"])
    assert job.hold().state == "held"
    assert job.release().state == "queued"
    assert job.cancel().state == "cancelled"
    assert job.retry().state == "queued"
    with pytest.raises(ConflictError, match="pause is impossible"):
        job.pause()
    stub.jobs[job.id]["state"] = "running"
    assert job.pause().state == "pausing"
    stub.jobs[job.id]["state"] = "paused"
    assert job.resume().state == "queued"


def test_an_action_whose_answer_is_lost_has_succeeded(client: Client, stub: Stub) -> None:
    info = stub.add(state="failed")
    stub.on_action = lambda job: stub.set(job, state="running")  # it starts at once
    stub.faults.extend([None, "committed"])
    job = client.job(info["id"])
    assert job.retry().state == "running"
    with pytest.raises(ConflictError):
        job.retry()


def test_progress_resumes_after_the_last_event(client: Client, stub: Stub) -> None:
    info = stub.add(state="succeeded", progress={"done": 4, "total": 4})
    job = client.job(info["id"])
    # As first read, the job was queued. The stream is cut once within each event after the first.
    job.info = info | {"state": "queued", "progress": None}
    stub.events = [
        ("starting", {}),
        ("progress", {"done": 1, "total": 4}),
        ("progress", {"done": 3, "total": 4}),
        ("running", {}),
    ]
    info.update(state="starting", progress=None)
    cuts = [1, 2, 3]

    def cut(sent: int) -> bool:
        if sent == 4 - 1 and cuts == [3]:
            info.update(state="succeeded", progress={"done": 4, "total": 4})
        if cuts and sent == cuts[0]:
            cuts.pop(0)
            return True
        return False

    stub.cut = cut
    found = list(job.progress())
    # Progress events have no number, so the stub sends them again.
    steps = [one.done for one in found]
    assert found[0] == Progress("queued", 0, 0)
    assert found[-1] == Progress("succeeded", 4, 4)
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 3, 4}
    sent = [headers["Last-Event-ID"] for _, path, headers in stub.requests if path.endswith("events")]
    assert sent == ["0", "1", "1", "1"]


def test_progress_does_not_fall_if_the_job_is_read_before_older_events(client: Client, stub: Stub) -> None:
    info = stub.add(state="running", progress={"done": 2, "total": 4})
    job = client.job(info["id"])
    job.info = info | {"state": "starting", "progress": {"done": 0, "total": 4}}
    older, newer = {"done": 1, "total": 4}, {"done": 3, "total": 4}
    stub.events = [("running", {}), ("progress", older), ("progress", newer), ("succeeded", {})]
    found = []
    for progress in job.progress():
        found.append(progress.done)
        if progress.done == 3:
            info.update(state="succeeded", progress={"done": 4, "total": 4})
    assert found == [0, 2, 3, 4]


def test_progress_of_a_job_that_was_retried_does_not_end_at_its_old_failure(
    client: Client, stub: Stub
) -> None:
    info = stub.add(state="queued")
    stub.events = [("queued", {}), ("running", {}), ("failed", {}), ("queued", {})]
    states = []
    for progress in client.job(info["id"]).progress():
        states.append(progress.state)
        if states == ["queued"]:
            stub.set(info, state="running")
        elif states == ["queued", "running"]:
            stub.set(info, state="succeeded")
    assert states == ["queued", "running", "succeeded"]
    sent = [headers["Last-Event-ID"] for _, path, headers in stub.requests if path.endswith("events")]
    assert sent[0] == "0"
    assert sent == sorted(sent)


def test_events_that_are_cut_off_are_left_out() -> None:
    text = b"id: 1\r\nevent: a\r\ndata: x\r\ndata: y\r\n\r\n: ping\n\nid: 2\n\ndata:z\n\nid: 3\ndata: cut"
    found = [(one.id, one.kind, one.data) for one in parse(text.splitlines(keepends=True))]
    assert found == [("1", "a", "x\ny"), (None, "message", "z")]


def test_the_log_is_followed_to_its_end(client: Client, stub: Stub) -> None:
    info = stub.add(state="running")
    stub.log = "größer".encode()[:3]  # half of a character

    def on_wait() -> None:
        if stub.log == "größer\n".encode():
            stub.set(info, state="succeeded")
        stub.log = "größer\n".encode() + b"end\n" * (info["state"] == "succeeded")

    stub.on_wait = on_wait
    job = client.job(info["id"])
    assert list(job.follow()) == ["gr", "ößer\n", "end\n"]
    assert job.log() == "größer\nend\n"


def test_the_report_replaces_a_file(client: Client, stub: Stub, tmp_path: Path) -> None:
    job = client.job(stub.add()["id"])
    job.report(tmp_path / "C.html")
    assert (tmp_path / "C.html").read_text() == "<html>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["C.html", "stub.sock"]
    with pytest.raises(InputError, match="cannot be written to"):
        job.report(tmp_path / "none" / "C.html")


def test_a_dry_run_returns_the_plan(client: Client, stub: Stub) -> None:
    assert client.plan("data:A", "data:B", "data:C", tile="8x8x8")["predicted_s"] == 2.0
    assert stub.bodies[0]["options"] == {"tile": "8x8x8"}
    assert not stub.jobs


def test_the_token_is_sent_to_urls_only(client: Client, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOCGEMM_TOKEN", "secret")
    Client(str(stub.socket)).devices()
    assert "Authorization" not in stub.requests[-1][2]
    assert Client("http://gpu:1")._transport._token == "secret"


def test_the_client_needs_neither_numpy_nor_zarr() -> None:
    code = (
        "import sys, oocgemm; assert 'http' not in sys.modules; oocgemm.Client('/none'); "
        "print({'numpy', 'zarr', 'click', 'rich', 'asyncio'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert oocgemm.Client is Client


def test_a_notebook_shows_a_job(client: Client, stub: Stub) -> None:
    result = {"verdict": "I/O-bound, 70%"}
    done = {"done": 3, "total": 4}
    job = client.job(stub.add(state="running", progress=done, name="<b>", result=result)["id"])
    shown = job._repr_html_()
    assert '<progress value="3" max="4">' in shown
    assert "&lt;b&gt;: running<br>I/O-bound, 70%" in shown
    assert "queued" in client.job(stub.add()["id"])._repr_html_()
