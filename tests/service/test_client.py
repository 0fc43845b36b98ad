"""The client repeats lost requests without harm, and turns answers into jobs and errors."""

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm import BudgetError, Client, InputError, OocGemmError, TileShape
from oocgemm.service import transport
from oocgemm.service.protocol import (
    AccessError,
    ConflictError,
    ServiceError,
    TooManyJobsError,
    UnavailableError,
    UnknownJobError,
)
from oocgemm.service.transport import Address, Backoff, error_of
from tests.support.stub_service import Stub, stub_service


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    with stub_service(tmp_path) as found:
        yield found


@pytest.fixture
def client(stub: Stub) -> Client:
    return Client(str(stub.socket))


# Addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://gpu:8642", ("gpu", 8642, False, "")),
        ("https://gpu", ("gpu", None, True, "")),
        ("https://proxy/queue/", ("proxy", None, True, "/queue")),
        ("http://[::1]:80", ("::1", 80, False, "")),
    ],
)
def test_urls(text: str, expected: tuple[str, int | None, bool, str]) -> None:
    found = Address.parse(text)
    assert (found.host, found.port, found.tls, found.prefix) == expected
    assert found.path is None


@pytest.mark.parametrize("text", ["/run/x.sock", "unix:/run/x.sock", "unix:///run/x.sock"])
def test_paths_of_sockets(text: str) -> None:
    assert Address.parse(text).path == "/run/x.sock"


@pytest.mark.parametrize("text", ["ftp://gpu", "http://", "http://gpu:port", "http://[::1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="the address"):
        Address.parse(text)


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.delenv("OOCGEMM_SERVICE", raising=False)
    assert Address.parse(None).path == "/state/oocgemm/serve.sock"
    monkeypatch.setenv("OOCGEMM_SERVICE", "http://gpu:1")
    assert Address.parse(None).port == 1


# Submission


def test_a_job_is_submitted_with_its_options(client: Client, stub: Stub, tmp_path: Path) -> None:
    first = client.submit("data:A", tmp_path / "B", tmp_path / "sub" / "C", name="one")
    second = client.submit(
        "data:A", "data:B", "data:D", priority=2, deadline=datetime(2027, 1, 1, tzinfo=UTC),
        needs=[first, "x"], held=True, alpha=1j, tile=TileShape(8, 8, 4), out_dtype=np.float32, beta=None,
    )  # fmt: skip
    assert stub.bodies[0] == {
        **{"a": "data:A", "b": "data:B", "c": "data:sub/C", "name": "one"},
        **{"needs": [], "options": {}},
    }
    assert stub.bodies[1]["needs"] == [first.id, "x"]
    assert stub.bodies[1]["deadline"] == 1798761600.0
    assert stub.bodies[1]["options"] == {"alpha": "1j", "tile": "8x8x4", "out_dtype": "float32"}
    assert (stub.bodies[1]["priority"], stub.bodies[1]["held"]) == (2, True)
    assert repr(second) == f"<Job {second.id} queued>"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(["lost"], id="the request is lost"),
        pytest.param(["committed"], id="the answer is lost after the commit"),
        pytest.param(["committed", "lost", "committed"], id="several times"),
        pytest.param([(503, {"Retry-After": "0"}), (429, {}), (502, {})], id="the server is busy"),
    ],
)
def test_a_submission_is_repeated_and_carried_out_once(client: Client, stub: Stub, faults: list[Any]) -> None:
    stub.faults.extend(faults)
    job = client.submit("data:A", "data:B", "data:C")
    assert [*stub.jobs] == [job.id]
    sent = [headers["Idempotency-Key"] for method, _, headers in stub.requests if method == "POST"]
    assert len(sent) == len(faults) + 1
    assert len(set(sent)) == 1
    client.submit("data:A", "data:B", "data:D")
    assert len(stub.jobs) == 2, "another submission must have another key"


def test_a_batch_is_carried_out_once(client: Client, stub: Stub, tmp_path: Path) -> None:
    stub.faults.append(None)  # the request for the roots
    stub.faults.append("committed")
    jobs = client.map(
        [
            (tmp_path / "A", "data:B", "data:C"),
            {"a": "data:C", "b": "data:B", "c": "data:D", "needs": ["#0"]},
        ],
        compute="emulated",
    )
    assert [job.id for job in jobs] == [*stub.jobs]
    sent = stub.bodies[-1]["jobs"]
    assert [(each["a"], each["needs"], each["options"]) for each in sent] == [
        ("data:A", [], {"compute": "emulated"}),
        ("data:C", ["#0"], {"compute": "emulated"}),
    ]
    assert stub.count("GET", "/v1/roots") == 1


def test_retry_after_is_respected(client: Client, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    stub.faults.extend([(503, {"Retry-After": "7"}), (429, {"Retry-After": "3"})])
    client.submit("data:A", "data:B", "data:C")
    assert slept == [7.0, 3.0]


def test_a_server_that_stays_busy_is_an_error(
    client: Client, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody waits that long"))
    stub.faults.append((503, {"Retry-After": "3600"}))
    with pytest.raises(UnavailableError, match="busy"):
        client.devices()


def test_a_service_that_does_not_run_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("there is nothing to wait for"))
    with pytest.raises(UnavailableError, match=r"none\.sock .*oocgemm serve"):
        Client(str(tmp_path / "none.sock")).devices()
    with pytest.raises(UnavailableError, match="refused"):
        Client("http://127.0.0.1:1").devices()


def test_a_connection_that_stays_lost_is_an_error(client: Client, stub: Stub) -> None:
    client.devices()
    stub.socket.unlink()
    with pytest.raises(UnavailableError, match="jobs that run are not affected"):
        client._transport.request("GET", "/v1/devices", patience=0.05)


def test_the_delays_between_attempts_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = Backoff(60.0)
    while backoff.wait():
        pass
    assert slept[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert 55.0 <= now <= 60.0


# Errors


@pytest.mark.parametrize(
    ("slug", "kind"),
    [
        ("invalid-request", InputError),
        ("path-refused", InputError),
        ("too-large", InputError),
        ("budget-too-small", BudgetError),
        ("not-found", UnknownJobError),
        ("conflict", ConflictError),
        ("unauthorized", AccessError),
        ("host-refused", AccessError),
        ("too-many-jobs", TooManyJobsError),
        ("unavailable", UnavailableError),
        ("another", ServiceError),
    ],
)
def test_a_problem_becomes_an_error(slug: str, kind: type[OocGemmError]) -> None:
    error = error_of(422, f'{{"type": "/problems/{slug}", "detail": "what and why"}}'.encode())
    assert type(error) is kind
    assert str(error).startswith("the token is" if slug == "unauthorized" else "what and why")


def test_a_budget_error_has_the_smallest_budgets() -> None:
    body = b'{"type": "/problems/budget-too-small", "smallest": {"device_memory": 5, "host_memory": 7}}'
    error = error_of(422, body)
    assert isinstance(error, BudgetError)
    assert error.needed == (5, 7)


def test_a_missing_token_is_explained() -> None:
    assert "missing, wrong, revoked or has expired: set $OOCGEMM_TOKEN" in str(
        error_of(401, b'{"type": "/problems/unauthorized", "detail": "No."}')
    )


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff"])
def test_an_answer_that_is_no_problem_is_an_error(body: bytes) -> None:
    assert "HTTP status 500" in str(error_of(500, body))
    assert isinstance(error_of(502, body), UnavailableError)
