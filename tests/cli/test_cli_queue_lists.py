"""The commands that show the jobs of a service: `oocgemm queue` and `oocgemm status`."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from oocgemm.cli import display
from oocgemm.service import transport
from tests.support.command import command
from tests.support.stub_service import Stub, stub_service


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    with stub_service(tmp_path) as found:
        monkeypatch.setenv("OOCGEMM_SERVICE", str(found.socket))
        yield found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time, which does not pass."""
    monkeypatch.setattr(display, "time", SimpleNamespace(time=lambda: 1e9))
    return 1e9


def test_queue_lists_live_jobs_by_their_start(
    stub: Stub, now: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    soon = now + 3600
    late = stub.add(predicted_start=soon + 7200, name="late", reason="device-memory")["id"]
    stub.add(state="failed")
    early = stub.add(predicted_start=soon, priority=5)["id"]
    held = stub.add(state="held", reason=None)["id"]
    begun = {"progress": {"done": 3, "total": 8}, "started": now - 9}
    runs = stub.add(state="running", reason=None, owner="ada", **begun)["id"]
    done = command("queue", "--json").json()
    assert [job["id"] for job in done["jobs"]] == [runs, early, late, held]
    shown = command("queue").out
    lines = [line.split() for line in shown.splitlines()]
    product = ["C", "=", "A", "×", "B"]
    assert lines[0] == ["id", "name", "owner", "state", "reason", "priority", "progress", "start"]
    assert lines[1] == [runs[-6:], *product, "ada", "running", "0", "37%,", "15", "s", "left"]
    assert lines[4] == [held[-6:], *product, "user", "held", "until", "released", "0", "when", "released"]
    assert lines[3][:6] == [late[-6:], "late", "user", "queued", "device-memory", "0"]
    assert lines[2][-3:-1] == ["5", "in"] or "in" in lines[2]
    assert len(lines) == 5


def test_queue_filters(stub: Stub) -> None:
    failed = stub.add(state="failed")["id"]
    held = stub.add(state="held")["id"]

    def listed(*options: str) -> list[str]:
        return [job["id"] for job in command("queue", "--json", *options).json()["jobs"]]

    assert listed("--state", "failed") == [failed]
    assert listed("--state", "failed", "--state", "held") == [held, failed]
    assert listed("--all") == [held, failed]
    assert listed() == [held]
    assert command("queue", "--owner", "ada").code == 0
    assert "owner=ada" in stub.requests[-1][1]
    assert command("queue", "--state", "asleep").code == 2


def test_an_empty_queue_is_no_error(stub: Stub) -> None:
    assert command("queue").out == "no job waits or runs; --all lists those that have ended\n"
    assert command("queue", "--all").out == "no jobs\n"
    assert command("queue", "--json").json() == {"jobs": []}
    assert not stub.jobs


def test_status_shows_one_job(stub: Stub) -> None:
    stub.add(
        state="failed", reason=None, error="no [room]", exit_code=1, options={"beta": 1}, created=0.0,
        plan={"m": 3, "n": 4, "k": 5, "a_dtype": "float64"}, progress={"done": 3, "total": 8},
    )  # fmt: skip
    shown = command("status", "last").out
    for part in ("failed", "no [room]", "data:A @ data:B -> data:C", "3 x 4 x 5 float64", "3 of 8 tiles"):
        assert part in shown
    assert "1970" in shown or "1969" in shown
    assert "device 1 GiB, host 2 GiB" in shown


def test_status_says_what_is_left_and_what_a_held_job_waits_for(stub: Stub, now: float) -> None:
    job = stub.add(state="running", reason=None, started=now - 1.0, progress={"done": 1, "total": 2})
    # Two tiles or more give a rate. Before, there is only the prediction of 90 s.
    assert "left       89 s\n" in command("status", "last").out
    job.update(started=now - 30.0, progress={"done": 3, "total": 4})
    assert "left       10 s\n" in command("status", "last").out
    job.update(started=now, progress={"done": 4, "total": 4})
    assert "left       ends soon\n" in command("status", "last").out
    job.update(state="held", started=None, progress=None)
    shown = command("status", "last").out
    assert "state      held (until released)\n" in shown
    assert "starts     when released\n" in shown
    assert "left" not in shown
