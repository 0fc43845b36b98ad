"""Streams of events: complete, without duplicates, and at most twice a second, with the real server."""

import http.client
import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from oocgemm.service.protocol import FINAL
from tests.support.real_server import RealServer, running_server
from tests.support.suite import slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    # Streams send as soon as they can, so that the tests are quick.
    quickly = {"oocgemm.service.http.routes:SEND_SECONDS": 0.02}
    with running_server(tmp_path_factory.mktemp("server"), set=quickly) as found:
        yield found


@dataclass(frozen=True)
class Event:
    id: int | None
    kind: str
    data: dict[str, Any]


class Stream:
    """A connection that receives events."""

    def __init__(self, server: RealServer, path: str, last: int | str | None = None) -> None:
        self.connection = server.connect()
        self.connection.request("GET", path, headers={} if last is None else {"Last-Event-ID": str(last)})
        self.reply: http.client.HTTPResponse = self.connection.getresponse()

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for raw in self.reply:
            line = raw.decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            else:
                if "data" in fields:
                    number = int(fields["id"]) if "id" in fields else None
                    yield Event(number, fields["event"], json.loads(fields["data"]))
                fields = {}

    def close(self) -> None:
        self.reply.close()
        self.connection.close()


def change(server: RealServer, job: dict[str, Any], times: int) -> None:
    """Make events of a job."""
    for _ in range(times):
        assert server.ask("PATCH", f"/v1/jobs/{job['id']}", {"priority": 1}).status == 200


def newest(server: RealServer) -> int:
    """Return the number of the newest event."""
    return int(
        float(server.ask("GET", "/metrics").body.decode().split("\noocgemm_events_total ")[1].split()[0])
    )


def test_a_stream_has_all_changes_of_a_job_until_its_end(server: RealServer) -> None:
    job = server.submit("C.npy", options={"tile": "16x16x16"})
    with closing(Stream(server, f"/v1/jobs/{job['id']}/events")) as stream:
        assert stream.reply.headers["Content-Type"].startswith("text/event-stream")
        assert stream.reply.headers["X-Accel-Buffering"] == "no"
        events = list(stream)  # it ends with the job
    stored = [event for event in events if event.id is not None]
    assert [event.kind for event in stored] == ["queued", "starting", "running", "succeeded"]
    assert [event.id for event in stored] == sorted(event.id or 0 for event in stored)
    assert {event.data["job"] for event in events} == {job["id"]}
    assert {event.kind for event in events if event.id is None} <= {"progress"}
    # A browser is told not to connect again. The whole history can still be read.
    with closing(Stream(server, f"/v1/jobs/{job['id']}/events", stored[-1].id)) as stream:
        assert stream.reply.status == 204
    with closing(Stream(server, f"/v1/jobs/{job['id']}/events")) as stream:
        assert [event.id for event in stream] == [event.id for event in stored]


@pytest.mark.parametrize("reconnects", [20, *slow((200,))])
def test_reconnecting_leaves_no_gap_and_no_duplicate(server: RealServer, reconnects: int) -> None:
    """Connections break at random places, also in the middle of an event, while jobs change."""
    rng = random.Random(7)
    job = server.submit(f"R{reconnects}.npy", held=True)
    last = first = newest(server)
    received = list[int]()
    for _ in range(reconnects):
        change(server, job, rng.randrange(3))
        with closing(Stream(server, "/v1/events", last)) as stream:
            change(server, job, 2)  # while it is connected
            wanted = rng.randint(1, 2)  # there are at least two
            for event in stream:
                if event.id is not None:
                    received.append(event.id)
                    last = event.id
                    wanted -= 1
                    if not wanted:
                        break
            if rng.random() < 0.5:
                stream.reply.read(rng.randrange(1, 40))  # a part of the next event, which is lost
    server.ask("POST", f"/v1/jobs/{job['id']}/cancel")
    with closing(Stream(server, "/v1/events", last)) as stream:
        for event in stream:
            if event.id is not None:
                received.append(event.id)
                if event.kind == "cancelled":
                    break
    assert received == list(range(first + 1, newest(server) + 1))


def test_reconnecting_to_another_server_leaves_no_gap(server: RealServer) -> None:
    job = server.submit("restarted.npy", held=True)
    path = f"/v1/jobs/{job['id']}/events"
    with closing(Stream(server, path)) as stream:
        events = iter(stream)
        first = next(events)
        server.restart()
        assert list(events) == []
    server.ask("POST", f"/v1/jobs/{job['id']}/cancel")
    with closing(Stream(server, path, first.id)) as again:
        assert [event.kind for event in again] == ["cancelled"]


def test_where_a_stream_begins(server: RealServer) -> None:
    job = server.submit("begins.npy", held=True)
    number = job["id"]
    change(server, job, 3)
    server.ask("POST", f"/v1/jobs/{number}/cancel")
    with closing(Stream(server, f"/v1/jobs/{number}/events")) as stream:
        ids = [event.id for event in stream if event.id is not None]
    for last, query, begin in (
        (None, f"?after={ids[1]}", 2),
        (ids[0], f"?after={ids[1]}", 1),  # as a browser sends it later
        ("nonsense", "", 0),
        ("-1", "", 0),
        ("9" * 30, "", 0),
    ):
        with closing(Stream(server, f"/v1/jobs/{number}/events{query}", last)) as stream:
            assert [event.id for event in stream if event.id is not None] == ids[begin:]
    with closing(Stream(server, "/v1/events")) as stream:  # from now on
        server.submit("later.npy", held=True)
        assert next(iter(stream)).data["kind"] == "held"
    assert server.ask("GET", "/v1/events?after=-1").problem(422) == "invalid-request"
    assert server.ask("GET", "/v1/jobs/nobody/events").problem(404) == "not-found"


def test_a_stream_ends_when_its_job_is_deleted(server: RealServer) -> None:
    number = server.submit("gone.npy", held=True)["id"]
    with closing(Stream(server, "/v1/events")) as stream:
        server.ask("POST", f"/v1/jobs/{number}/cancel")
        server.ask("DELETE", f"/v1/jobs/{number}")
        kinds = []
        for event in stream:
            kinds.append(event.kind)
            if event.kind == "deleted":
                break
    assert kinds[-1] == "deleted"
    assert set(FINAL) & {*kinds} or kinds == ["deleted"]


def test_a_stream_sends_at_most_twice_a_second(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Many changes are sent together. The pieces are counted, not timed."""
    with running_server(tmp_path_factory.mktemp("slow")) as server:
        job = server.submit("C.npy", held=True)
        with closing(Stream(server, f"/v1/jobs/{job['id']}/events")) as stream:
            assert next(iter(stream)).kind == "held"
            change(server, job, 20)
            server.ask("POST", f"/v1/jobs/{job['id']}/cancel")
            pieces = []
            while piece := stream.reply.read1():
                pieces.append(piece)
        assert b"".join(pieces).count(b"event: updated") == 20
        assert len(pieces) < 20
