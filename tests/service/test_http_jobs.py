"""Jobs over HTTP, from their submission to their end, with the real server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from oocgemm.timeline import read_log
from tests.support.real_server import JOB, RealServer, Reply, running_server
from tests.support.suite import slow

CLIENTS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--share-device") as found:
        yield found


@pytest.fixture(scope="module")
def ended(server: RealServer) -> dict[str, object]:
    """A job that has succeeded."""
    job = server.submit("ended.npy", name="first", options={"tile": "16x16x16"})
    return server.until(job["id"], "succeeded", "failed")


# A job from its submission to its end


def test_a_product_is_computed(server: RealServer, ended: dict[str, object]) -> None:
    assert (ended["state"], ended["exit_code"], ended["error"]) == ("succeeded", 0, None)
    assert ended["progress"] == {"done": 16, "total": 16}
    assert (ended["a"], ended["c"], ended["name"]) == ("data:A.npy", "out:ended.npy", "first")
    tiles = server.ask("GET", f"/v1/jobs/{ended['id']}/tiles").json()
    assert (tiles["rows"], tiles["columns"], len(tiles["done"])) == (4, 4, 16)
    server.check("ended.npy")


def test_a_submission_returns_the_address_of_its_job(server: RealServer) -> None:
    reply = server.ask("POST", "/v1/jobs", JOB | {"c": "out:held.npy", "held": True})
    assert (reply.status, reply.headers["ETag"]) == (202, '"1"')
    assert reply.headers["Location"] == f"/v1/jobs/{reply.json()['id']}"
    assert server.ask("GET", reply.headers["Location"]).json() == reply.json()


def test_a_dry_run_stores_nothing(server: RealServer) -> None:
    before = len(server.ask("GET", "/v1/jobs?limit=1000").json()["jobs"])
    reply = server.ask("POST", "/v1/jobs?dry_run=1", JOB | {"c": "out:dry.npy"})
    assert reply.status == 200
    assert reply.json()["plan"]["flops"] == 2 * 64**3
    assert reply.json()["host_bytes"] > 0
    assert reply.json()["predicted_start"] > 0
    memory = JOB | {"c": "out:dry.npy", "options": {"memory": "64MiB"}}
    assert server.ask("POST", "/v1/jobs?dry_run=1", memory).json()["host_bytes"] <= 64 << 20
    assert len(server.ask("GET", "/v1/jobs?limit=1000").json()["jobs"]) == before
    assert not (server.out / "dry.npy").exists()


def test_actions_are_idempotent_or_impossible(server: RealServer) -> None:
    number = server.submit("acted.npy", held=True)["id"]

    def act(action: str) -> Reply:
        return server.ask("POST", f"/v1/jobs/{number}/{action}")

    assert [act("hold").json()["state"] for _ in range(2)] == ["held", "held"]
    assert act("pause").problem(409) == "conflict"
    assert [act("cancel").json()["state"] for _ in range(2)] == ["cancelled", "cancelled"]
    assert act("hold").problem(409) == "conflict"
    assert act("retry").status == 200
    assert server.until(number, "succeeded", "failed")["state"] == "succeeded"
    server.check("acted.npy")
    assert act("explode").status in (404, 405)
    assert server.ask("POST", "/v1/jobs/nobody/cancel").problem(404) == "not-found"


def test_two_live_jobs_never_share_a_c(server: RealServer) -> None:
    first = server.submit("shared.npy", held=True)
    reply = server.ask("POST", "/v1/jobs", JOB | {"c": "out:shared.npy"})
    assert reply.problem(409) == "conflict"
    assert first["id"] in reply.json()["detail"]


def test_records_of_ended_jobs_can_be_deleted_and_c_stays(server: RealServer) -> None:
    number = server.submit("deleted.npy")["id"]
    assert server.ask("DELETE", f"/v1/jobs/{number}").problem(409) == "conflict"
    server.until(number, "succeeded")
    assert server.ask("DELETE", f"/v1/jobs/{number}").status == 204
    assert server.ask("GET", f"/v1/jobs/{number}").problem(404) == "not-found"
    assert not (server.state / "jobs" / number).exists()
    server.check("deleted.npy")


# Versions


def test_a_change_needs_the_present_version(server: RealServer) -> None:
    job = server.submit("changed.npy", held=True)
    path = f"/v1/jobs/{job['id']}"
    tag = server.ask("GET", path).headers["ETag"]
    changed = server.ask("PATCH", path, {"priority": 7}, {"If-Match": tag})
    assert (changed.status, changed.json()["priority"], changed.headers["ETag"] != tag) == (200, 7, True)
    for old in (tag, '"x"', "nonsense", '"99999999999999999999"'):
        assert server.ask("PATCH", path, {"priority": 8}, {"If-Match": old}).problem(412) == "stale"
    assert server.ask("PATCH", path, {"priority": 9}, {"If-Match": "*"}).status == 200
    assert server.ask("PATCH", path, {"deadline": 4e9, "max_attempts": 5}).json()["max_attempts"] == 5
    assert server.ask("PATCH", path, {"state": "running"}).problem(422) == "invalid-request"
    server.ask("POST", f"{path}/cancel")
    assert server.ask("PATCH", path, {"priority": 1}).problem(409) == "conflict"


def test_a_job_that_has_not_changed_is_not_sent_again(server: RealServer) -> None:
    path = f"/v1/jobs/{server.submit('same.npy', held=True)['id']}"
    tag = server.ask("GET", path).headers["ETag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        reply = server.ask("GET", path, headers={"If-None-Match": known})
        assert (reply.status, reply.body, reply.headers["ETag"]) == (304, b"", tag)
    assert server.ask("GET", path, headers={"If-None-Match": '"x"'}).status == 200


def test_a_long_poll_ends_when_the_job_changes(server: RealServer) -> None:
    path = f"/v1/jobs/{server.submit('polled.npy', held=True)['id']}"
    tag = server.ask("GET", path).headers["ETag"]
    assert server.ask("GET", f"{path}?wait=0.05", headers={"If-None-Match": tag}).status == 304
    with ThreadPoolExecutor(1) as pool:
        # It would wait for a minute, after which the status is 304.
        polling = pool.submit(server.ask, "GET", f"{path}?wait=60", None, {"If-None-Match": tag})
        server.ask("POST", f"{path}/cancel")
        assert (polling.result().status, polling.result().json()["state"]) == (200, "cancelled")


# Many jobs


@pytest.mark.parametrize("count", [20, *slow((1000,))])
def test_a_batch_is_stored_whole_or_not_at_all(server: RealServer, count: int) -> None:
    name = f"batch{count}"
    jobs = [JOB | {"c": f"out:{name}-{number}.npy", "name": name, "held": True} for number in range(count)]
    wrong = [*jobs[:-1], jobs[-1] | {"a": "data:absent.npy"}]
    reply = server.ask("POST", "/v1/batches", {"jobs": wrong})
    assert reply.problem(422) == "path-refused"
    assert reply.json()["detail"].startswith(f"job #{count - 1}: data:absent.npy")
    assert server.ask("POST", "/v1/batches", {"jobs": [*jobs[:-1], jobs[0]]}).problem(409) == "conflict"
    assert server.ask("POST", "/v1/batches", {"jobs": []}).problem(422) == "invalid-request"
    assert server.ask("POST", "/v1/batches", {"jobs": jobs[:1] * 1001}).problem(422) == "invalid-request"
    assert _count(server, name) == 0
    reply = server.ask("POST", "/v1/batches", {"jobs": jobs}, {"Idempotency-Key": name})
    assert reply.status == 202
    ids = [job["id"] for job in reply.json()["jobs"]]
    again = server.ask("POST", "/v1/batches", {"jobs": jobs}, {"Idempotency-Key": name})
    assert [job["id"] for job in again.json()["jobs"]] == ids
    assert _count(server, name) == count


def _count(server: RealServer, name: str) -> int:
    return sum(job["name"] == name for job in _all_jobs(server, 1000))


def _all_jobs(server: RealServer, limit: int) -> list[dict[str, object]]:
    found, cursor = [], ""
    while True:
        page = server.ask("GET", f"/v1/jobs?limit={limit}{cursor}").json()
        found += page["jobs"]
        if page["next"] is None:
            return found
        cursor = f"&cursor={page['next']}"


def test_pages_of_jobs_have_all_jobs_once(server: RealServer) -> None:
    for number in range(5):
        server.submit(f"page{number}.npy", held=True, name="page")
    whole = _all_jobs(server, 1000)
    pages = _all_jobs(server, max(2, len(whole) // 4))
    assert [job["id"] for job in pages] == [job["id"] for job in whole]
    assert [job["id"] for job in whole] == sorted((str(job["id"]) for job in whole), reverse=True)
    held = server.ask("GET", "/v1/jobs?state=held&state=paused&limit=1000").json()["jobs"]
    assert {job["state"] for job in held} == {"held"}
    assert server.ask("GET", "/v1/jobs?owner=nobody").json() == {"jobs": [], "next": None}
    for query in ("state=odd", "limit=0", "limit=1001", f"cursor={'x' * 27}"):
        assert server.ask("GET", f"/v1/jobs?{query}").problem(422) == "invalid-request"


def test_a_job_waits_for_those_that_it_needs(server: RealServer) -> None:
    first = server.submit("needed.npy", held=True)
    second = server.submit("needing.npy", needs=[first["id"]])
    assert second["needs"] == [first["id"]]
    server.ask("POST", f"/v1/jobs/{first['id']}/release")
    assert server.until(second["id"], "succeeded", "failed")["state"] == "succeeded"
    assert server.job(first["id"])["ended"] <= server.job(second["id"])["started"]
    assert server.ask("POST", "/v1/jobs", JOB | {"c": "out:x", "needs": ["nobody"]}).problem(404)


# Idempotency


def test_a_hundred_clients_with_one_key_submit_one_job(server: RealServer) -> None:
    body = json.dumps(JOB | {"c": "out:once.npy", "name": "once"}).encode()
    headers = {"Idempotency-Key": "once", "Content-Type": "application/json"}
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda _: server.ask("POST", "/v1/jobs", body, headers), range(CLIENTS)))
    assert {reply.status for reply in replies} == {202}
    (number,) = {reply.json()["id"] for reply in replies}
    assert _count(server, "once") == 1
    server.until(number, "succeeded")
    # It stays one job when C exists, which a new job would have to overwrite.
    assert server.ask("POST", "/v1/jobs", body, headers).json()["id"] == number
    reply = server.ask("POST", "/v1/jobs", body.replace(b"once.npy", b"other.npy"), headers)
    assert reply.problem(422) == "key-reused"
    # Keys of different users are different.
    reply = server.ask("POST", "/v1/jobs", JOB | {"c": "out:o.npy"}, headers, tcp=True, token=server.token())
    assert reply.status == 202


# Refusals


def test_a_budget_that_is_too_small_is_refused_with_the_smallest(server: RealServer) -> None:
    np.save(server.data / "big.npy", np.zeros((512, 512)))
    job = {"a": "data:big.npy", "b": "data:big.npy", "c": "out:big.npy"}
    for budgets in ({"device_memory": "1KiB"}, {"host_memory": 1}):
        reply = server.ask("POST", "/v1/jobs", job | {"options": budgets})
        assert reply.problem(422) == "budget-too-small"
        smallest = reply.json()["smallest"]
        assert {*smallest} == {"device_memory", "host_memory"}
        reply = server.ask("POST", "/v1/jobs?dry_run=1", job | {"options": smallest})
        assert reply.status == 200, (budgets, reply.body)


@pytest.mark.parametrize(
    ("body", "slug"),
    [
        (b"", "invalid-request"),
        (b"{", "invalid-request"),
        (b"[" * 100_000, "invalid-request"),
        (b'{"a": 1e999}', "invalid-request"),
        (b'{"a": "\\ud800", "b": "data:B.npy", "c": "out:C"}', "invalid-request"),
        ({"a": "data:A.npy", "b": "data:B.npy"}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "odd": 1}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "options": {"odd": 1}}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "options": {"tile": "nonsense"}}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "options": {"alpha": "nonsense"}}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "options": {"device_memory": "nonsense"}}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "priority": 10**400}, "invalid-request"),
        (JOB | {"c": "out:C.npy", "priority": 1001}, "invalid-request"),
        (JOB | {"c": "data:C.npy"}, "path-refused"),
    ],
)
def test_wrong_requests_are_refused(server: RealServer, body: object, slug: str) -> None:
    reply = server.ask("POST", "/v1/jobs", body, {"Content-Type": "application/json"})
    assert reply.status in (400, 422)
    assert reply.problem(reply.status) == slug


def test_a_method_that_a_path_does_not_have_is_refused_with_those_that_it_has(server: RealServer) -> None:
    reply = server.ask("PUT", "/v1/jobs/x")
    assert reply.problem(405) == "invalid-request"
    assert reply.headers["Allow"] == "DELETE, GET, PATCH"
    assert server.ask("GET", "/nothing").problem(404) == "not-found"


# Files


def test_ranges_of_files(server: RealServer, ended: dict[str, object]) -> None:
    path = f"/v1/jobs/{ended['id']}"
    for name in ("timeline", "report"):
        whole = server.ask("GET", f"{path}/{name}")
        assert (whole.status, whole.headers["Accept-Ranges"]) == (200, "bytes")
        size = len(whole.body)
        for asked, begin, end in (
            ("0-0", 0, 1),
            ("10-19", 10, 20),
            (f"{size - 5}-", size - 5, size),
            ("-7", size - 7, size),
            (f"5-{10 * size}", 5, size),
            (f"-{10 * size}", 0, size),
        ):
            part = server.ask("GET", f"{path}/{name}", headers={"Range": f"bytes={asked}"})
            assert (part.status, part.body) == (206, whole.body[begin:end])
            assert part.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{size}"
        for odd in ("bytes=0-1,3-4", "bytes=x-", "lines=1-2", "bytes=5-2", "bytes=-"):
            assert server.ask("GET", f"{path}/{name}", headers={"Range": odd}).body == whole.body
        beyond = server.ask("GET", f"{path}/{name}", headers={"Range": f"bytes={size}-"})
        assert beyond.problem(416) == "invalid-request"
        assert beyond.headers["Content-Range"] == f"bytes */{size}"


def test_the_timeline_can_be_read_by_report(
    server: RealServer, ended: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "timeline").write_bytes(server.ask("GET", f"/v1/jobs/{ended['id']}/timeline").body)
    assert read_log(str(tmp_path / "timeline")).wall > 0


def test_the_report_is_a_page_in_a_sandbox(server: RealServer, ended: dict[str, object]) -> None:
    reply = server.ask("GET", f"/v1/jobs/{ended['id']}/report")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';")
    assert "allow-same-origin" not in policy
    assert b"first" in reply.body


def test_files_of_a_job_that_has_not_run(server: RealServer) -> None:
    number = server.submit("unrun.npy", held=True)["id"]
    assert server.ask("GET", f"/v1/jobs/{number}/log").body == b""
    assert server.ask("GET", f"/v1/jobs/{number}/tiles").json()["done"] == []
    for name in ("timeline", "report"):
        assert server.ask("GET", f"/v1/jobs/{number}/{name}").problem(404) == "not-found"
    for name in ("log", "tiles", "timeline", "report", "events"):
        assert server.ask("GET", f"/v1/jobs/nobody/{name}").problem(404) == "not-found"


def test_the_log_has_what_the_job_has_printed(server: RealServer) -> None:
    np.save(server.out / "old.npy", np.zeros((64, 64)))
    number = server.submit("old.npy", options={"overwrite": True}, held=True)["id"]
    (server.data / "A.npy").rename(server.data / "moved.npy")
    try:
        server.ask("POST", f"/v1/jobs/{number}/release")
        failed = server.until(number, "failed", "succeeded")
    finally:
        (server.data / "moved.npy").rename(server.data / "A.npy")
    assert (failed["state"], failed["exit_code"]) == ("failed", 2)
    assert b"Error: A: there is nothing at" in server.ask("GET", f"/v1/jobs/{number}/log").body
