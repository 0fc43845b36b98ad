"""The commands on jobs of a service: what they print, and their exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from oocgemm.cli.main import cli
from oocgemm.cli.queue import Deadline, JobId
from oocgemm.service import transport
from tests.support import TOP
from tests.support.command import command
from tests.support.stub_service import Stub, stub_service
from tests.support.suite import each_value


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    with stub_service(tmp_path) as found:
        monkeypatch.setenv("OOCGEMM_SERVICE", str(found.socket))
        yield found


# Submission


def test_submit_passes_the_options_that_are_given(stub: Stub) -> None:
    needed = stub.add()["id"]
    options = (
        "--alpha 2i --adjoint-a --transpose-b --tile 8x8x8 --chunks 4x4 --device-memory 1GiB --overwrite"
    )
    done = command(
        *("submit", "data:A", "data:B", "data:C", *options.split(), "--device-memory", "1GiB"),
        *("--name", "n", "--priority", "-2", "--needs", needed[-2:], "--needs", "last", "--hold"),
    )
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"job 01STUB0*1 is queued\n", done.out)
    assert stub.bodies == [
        {
            **{"a": "data:A", "b": "data:B", "c": "data:C", "name": "n", "priority": -2, "held": True},
            "needs": [needed],
            "options": {
                **{"alpha": "2j", "trans_a": "C", "trans_b": "T", "tile": "8x8x8", "chunks": [4, 4]},
                **{"device_memory": "1GiB", "overwrite": True},
            },
        }
    ]


def test_submit_takes_all_options_of_run_that_a_job_takes(stub: Stub) -> None:
    def options(name: str) -> set[str]:
        return {option for parameter in cli.commands[name].params for option in parameter.opts}

    outside = "--backend --device --devices --quiet --resume --timeline --workers"
    # Jobs take no arrays of object stores.
    # Filters read the files before a job is submitted.
    outside += "".join(f" --{x}-{what}" for x in "ab" for what in ("keep", "extract", "maf", "chromosomes"))
    outside += " --scheduler --scheduler-file --requests"
    assert options("run") - options("submit") == set(outside.split())


def test_submit_prints_the_job_as_json(stub: Stub) -> None:
    assert command("submit", "data:A", "data:B", "data:C", "--json").json() == next(iter(stub.jobs.values()))
    assert stub.bodies[0]["options"] == {}


def test_a_dry_run_shows_the_plan(stub: Stub) -> None:
    done = command("submit", "data:A", "data:B", "data:C", "--dry-run")
    assert done.code == 0
    assert "predicted" in done.out
    assert command("submit", "data:A", "data:B", "data:C", "--dry-run", "--json").json()["predicted_s"] == 2.0
    assert not stub.jobs
    assert command("submit", "data:A", "data:B", "data:C", "--dry-run", "--wait").code == 2


def test_a_path_beneath_no_root_is_an_error(stub: Stub) -> None:
    done = command("submit", "/etc/A", "data:B", "data:C", "--json")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "beneath no folder of the service" in done.err
    assert not stub.jobs


@each_value
@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3), ("cancelled", 1)])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_submit_waits_and_has_the_code_of_the_job(stub: Stub, state: str, code: int, form: list[str]) -> None:
    def end() -> None:
        (job,) = stub.jobs.values()
        exit_code = {"succeeded": 0, "failed": 3, "cancelled": None}[state]
        stub.set(job, state=state, exit_code=exit_code, error="no room" if code == 3 else None)

    # The stream of events asks for the state of the job, and so does --json.
    stub.events.append(("queued", {}))
    stub.on_wait = stub.on_read = end
    done = command("submit", "data:A", "data:B", "data:C", "--wait", *form)
    assert done.code == code
    if form:
        assert done.json()["state"] == state
    else:
        assert ("succeeded" in done.out) == (code == 0)
    errors = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert len(errors) == (code != 0)
    assert code != 3 or errors[0].endswith("failed: no room")


# Deadlines and ids


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129600)])
def test_a_deadline_may_be_a_duration(text: str, seconds: float) -> None:
    before = time.time()
    found = Deadline().convert(text, None, None)
    assert before + seconds <= found <= time.time() + seconds


def test_a_deadline_may_be_a_time() -> None:
    assert Deadline().convert("2190-01-31T18:00", None, None) == datetime(2190, 1, 31, 18).timestamp()
    assert (
        Deadline().convert("2190-01-31T18:00Z", None, None)
        == datetime(2190, 1, 31, 18, tzinfo=UTC).timestamp()
    )
    for text, said in (("soon", "is no time"), ("2h30", "is no time"), ("2001-01-01", "in the past")):
        with pytest.raises(click.BadParameter, match=said):
            Deadline().convert(text, None, None)


def test_ids_may_be_abbreviated(stub: Stub) -> None:
    for _ in range(12):
        stub.add()
    ids = list(stub.jobs)
    assert command("status", "--json", ids[3]).json()["id"] == ids[3]
    assert command("status", "--json", ids[3].lower()).json()["id"] == ids[3]
    assert command("status", "--json", "11").json()["id"] == ids[11]
    assert command("status", "--json", "last").json()["id"] == ids[11]
    ambiguous = command("status", "1")
    assert ambiguous.code == 2
    assert all(each in ambiguous.err for each in (ids[1], ids[11], "give more characters"))
    assert "oocgemm queue --all" in command("status", "77").err
    assert command("status", ids[3][:-1] + "Z").code == 2


def test_the_newest_of_no_jobs_is_an_error(stub: Stub) -> None:
    assert "oocgemm submit" in command("wait", "last").err
    assert not stub.jobs


def test_ids_are_completed(stub: Stub) -> None:
    ids = [stub.add(name="one")["id"], stub.add()["id"]]
    context = click.Context(cli.commands["status"], info_name="status")
    context.params = {"service": str(stub.socket)}
    offered = JobId().shell_complete(context, None, "01st")
    assert [item.value for item in offered] == ids[::-1]
    assert offered[1].help == "queued one"
    context.params = {"service": "/none"}
    assert JobId().shell_complete(context, None, "") == []


# Waiting and actions


def test_wait_has_the_largest_code_of_several_jobs(stub: Stub) -> None:
    ids = [
        stub.add(state="succeeded", exit_code=0)["id"],
        stub.add(state="failed", exit_code=2, error="wrong")["id"],
        stub.add(state="failed", exit_code=-9, error="killed")["id"],
        stub.add(state="cancelled", exit_code=143)["id"],
    ]
    assert command("wait", ids[0]).code == 0
    assert command("wait", *ids[:2]).code == 2
    assert command("wait", ids[2]).code == 137
    done = command("wait", *ids)
    assert (done.code, done.out) == (143, f"job {ids[0]} succeeded\n")
    assert [line for line in done.err.splitlines() if line.startswith("Error")] == [
        f"Error: job {ids[1]} failed: wrong",
        f"Error: job {ids[2]} failed: killed",
        f"Error: job {ids[3]} was cancelled",
    ]
    found = command("wait", *ids, "--json")
    assert [job["id"] for job in found.json()["jobs"]] == ids
    assert found.code == 143


def test_actions_on_several_jobs_are_independent(stub: Stub) -> None:
    ids = [stub.add()["id"], stub.add(state="succeeded")["id"], stub.add()["id"]]
    done = command("hold", *ids)
    assert done.code == 1
    assert done.out == f"job {ids[0]} is held\njob {ids[2]} is held\n"
    assert done.err == f"Error: job {ids[1]} is succeeded: hold is impossible\n"
    found = command("release", ids[0], ids[1], "--json")
    assert (found.code, [job["id"] for job in found.json()["jobs"]]) == (1, [ids[0]])


def test_nothing_is_done_if_an_id_is_unknown(stub: Stub) -> None:
    job = stub.add()
    assert command("cancel", job["id"], "UNKNOWN").code == 2
    assert job["state"] == "queued"


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        *(("cancel", "running", "cancelling"), ("hold", "queued", "held"), ("release", "held", "queued")),
        *(("pause", "running", "pausing"), ("resume", "paused", "queued"), ("retry", "failed", "queued")),
    ],
)
def test_each_action_has_a_command(stub: Stub, action: str, before: str, after: str) -> None:
    job = stub.add(state=before)
    done = command(action, "last")
    assert (done.code, done.out) == (0, f"job {job['id']} is {after}\n")
    assert job["state"] == after


def test_logs_are_shown_and_followed(stub: Stub) -> None:
    job = stub.add(state="running")
    stub.log = "größer".encode()
    assert command("logs", "last").out == "größer"
    found = command("logs", "last", "--json").json()
    assert found == {"id": job["id"], "state": "running", "log": "größer"}

    def end() -> None:
        stub.log = b"begin\nend\n"
        stub.set(job, state="succeeded")

    stub.log, stub.on_wait = b"begin\n", end
    assert command("logs", "-f", "last").out == "begin\nend\n"


def test_a_job_that_has_printed_nothing_has_an_empty_log(stub: Stub) -> None:
    job = stub.add(state="running")
    done = command("logs", "last")
    assert (done.code, done.out) == (0, "")
    assert done.err == f"Note: job {job['id']} (running) has printed nothing\n"


# Reports

TIMELINE = TOP / "scripts" / "bench" / "results" / "report.jsonl"


def test_the_report_on_a_job_is_that_on_its_timeline(stub: Stub, tmp_path: Path) -> None:
    stub.timeline = TIMELINE.read_bytes()
    stub.add(state="succeeded")
    done = command("report", "--job", "last", "--html", tmp_path / "run.html")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:-1] == command("report", TIMELINE).out.splitlines()
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert command("report", "--job", "last", "--json").json() == command("report", TIMELINE, "--json").json()


def test_two_jobs_are_compared(stub: Stub) -> None:
    stub.timeline = TIMELINE.read_bytes()
    ids = [stub.add(state="succeeded")["id"] for _ in range(3)]
    done = command("report", "--job", ids[0], "--job", ids[1])
    assert done.code == 0
    assert f"job {ids[0][-6:]}" in done.out
    assert f"job {ids[1][-6:]}" in done.out
    done = command("report", *(word for number in ids for word in ("--job", number)))
    assert (done.code, "given 3 times, and at most two" in done.err) == (2, True)


@pytest.mark.parametrize("arguments", [[], [TIMELINE, "--job", "last"]])
def test_a_report_is_on_a_file_or_on_a_job(stub: Stub, arguments: list[str | Path]) -> None:
    done = command("report", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "give a TIMELINE, or --job ID" in done.err


@pytest.mark.parametrize("arguments", [["queue"], ["status", "X"], ["submit", "r:a", "r:b", "r:c"]])
def test_a_service_that_does_not_run_is_an_error(arguments: list[str]) -> None:
    done = command(*arguments, "--service", "/none", "--json")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "oocgemm serve" in done.err


# Processes


def test_an_interrupted_wait_says_that_the_job_continues(stub: Stub) -> None:
    job = stub.add(state="running")
    # A shell may have started the tests with SIGINT ignored, and child processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "oocgemm", "wait", "last", "--json"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    while not stub.count("GET", ".*wait.*"):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.lstrip().startswith("Interrupted.")
    assert f"oocgemm wait {job['id']}" in err
    assert job["state"] == "running"


def test_commands_on_jobs_start_quickly(stub: Stub) -> None:
    code = (
        "import sys; from oocgemm.cli import main\n"
        "try: main.main()\n"
        "finally: print({'numpy', 'zarr', 'rich', 'oocgemm.planning'} & set(sys.modules), file=sys.stderr)"
    )
    stub.add()
    for line in ("queue --json", "status last --json", "hold last", "logs last"):
        done = subprocess.run(
            [sys.executable, "-c", code, *line.split()],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ,
        )
        assert done.stderr.endswith("set()\n"), line
