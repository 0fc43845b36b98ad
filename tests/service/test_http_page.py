"""What the page of the service needs of the server: signing in, the user, the queue, what jobs do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oocgemm.service import job_worker
from oocgemm.timeline import Span
from tests.support.real_server import RealServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def test_the_page_and_its_files_are_open_and_others_are_not(server: RealServer) -> None:
    for path, media in {
        "/": "text/html",
        "/static/main.js": "text/javascript",
        "/static/page.css": "text/css",
        "/static/report.css": "text/css",
        "/static/icon.svg": "image/svg+xml",
    }.items():
        reply = server.ask("GET", path, tcp=True)
        assert reply.status == 200
        assert reply.headers["Content-Type"].split(";")[0] == media
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'self';")
    for path in ("/static/page.py", "/static/..%2fpage.py", "/static/none.js"):
        assert server.ask("GET", path, tcp=True).problem(404) == "not-found"


def test_a_token_signs_in_and_its_cookie_survives_a_restart(server: RealServer) -> None:
    token = server.token("submit", "ana")
    reply = server.ask("POST", "/login", {"token": token}, tcp=True)
    assert reply.status == 204
    cookie, *attributes = reply.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    server.restart()
    found = server.ask("GET", "/v1/user", headers={"Cookie": cookie}, tcp=True)
    assert found.json() == {"name": "ana", "scope": "submit"}


def test_wrong_tokens_and_other_sites_cannot_sign_in(server: RealServer) -> None:
    token = server.token("submit", "bo")
    for wrong in ("", "oocgemm_0_0", token[:-1]):
        assert server.ask("POST", "/login", {"token": wrong}, tcp=True).problem(401) == "unauthorized"
    other = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert server.ask("POST", "/login", {"token": token}, other, tcp=True).problem(403) == "cross-site"


def test_the_printed_code_signs_the_user_of_the_server_in_once(server: RealServer) -> None:
    path = server.login.removeprefix(server.url)
    first = server.ask("GET", path, tcp=True)
    assert (first.status, first.headers["Location"]) == (303, "/")
    cookie = first.headers["Set-Cookie"].split("; ")[0]
    assert server.ask("GET", "/v1/user", headers={"Cookie": cookie}, tcp=True).json()["scope"] == "admin"
    second = server.ask("GET", path, tcp=True)
    assert (second.status, second.headers["Location"]) == (303, "/#/login-code-used")
    assert "Set-Cookie" not in second.headers


def test_the_queue_is_in_the_order_of_starts_with_held_jobs_last(server: RealServer) -> None:
    assert server.ask("POST", "/v1/drain", {"draining": True}).status == 200
    low = server.submit("low.npy", priority=-1)["id"]
    high = server.submit("high.npy", priority=1)["id"]
    held = server.submit("held.npy", priority=2, held=True)["id"]
    found = server.ask("GET", "/v1/queue").json()
    assert [job["id"] for job in found["waiting"]] == [high, low, held]
    assert found["active"] == []
    assert (found["counts"]["queued"], found["counts"]["held"]) == (2, 1)
    assert [job["id"] for job in server.ask("GET", "/v1/queue?limit=1").json()["waiting"]] == [high]
    assert server.ask("POST", "/v1/drain", {"draining": False}).status == 200
    for job in (low, high):
        server.until(job, "succeeded")
    assert server.job(high)["started"] < server.job(low)["started"]


def test_a_job_says_what_it_does_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / job_worker.LIVE
    path.write_text("of an earlier attempt")

    class Plan:
        flops = 16

    monkeypatch.setattr(job_worker, "LIVE_SECONDS", 0.0)
    observe = job_worker.live_observer(Plan(), path)
    assert job_worker.read_json(path) is None
    observe(Span(0, "read", "A", "read", "read", 0, (0, 0), 0, 0, 50, 8, 0))
    assert job_worker.read_json(path) == {"busy": {"read": 1.0}, "limit": None}
    observe(Span(1, "multiply", "A", "compute", "compute", 0, (0, 0), 0, 50, 100, 0, 16))
    found = job_worker.read_json(path)
    limit = "compute-bound, 50.0%; largest stall: start-up 50.0%"
    assert found == {"busy": {"read": 0.5, "compute": 0.5}, "limit": limit}
    observe(Span(2, "read", "A", "read", "read", 0, (0, 0), 0, 100, 100, 0, 0))  # the lines differ in length
    assert job_worker.read_json(path) is not None
