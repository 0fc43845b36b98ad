"""A stub of the service for tests of its client: jobs are plain data, and faults are scripted."""

import json
import re
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oocgemm.service.protocol import Action, State, requested


class Stub:
    """The jobs of a stub, and what it does wrong.

    `faults` has an entry for each of the next requests: None answers it, "lost" drops the connection before
    the request is carried out, "committed" afterwards, and a pair of status and headers is the answer.
    `requests` lists the method, path and headers of each request.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "stub.sock"
        self.roots = [{"name": "data", "folder": str(folder), "writable": True}]
        self.jobs: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, list[str]] = {}
        self.bodies: list[Any] = []
        self.faults: deque[Any] = deque()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        # Called with the number of events that a stream has sent; returns whether the stream is cut.
        self.cut: Callable[[int], bool] = lambda sent: False
        # Called when a client waits for a job or reads it, and after an action on one.
        self.on_wait: Callable[[], object] = lambda: None
        self.on_read: Callable[[], object] = lambda: None
        self.on_action: Callable[[dict[str, Any]], object] = lambda job: None
        self.log = b""
        self.timeline = b""
        self.page = 2  # jobs per page

    def add(self, **values: Any) -> dict[str, Any]:
        number = f"01STUB{len(self.jobs):020d}"
        job: dict[str, Any] = {
            **{"id": number, "owner": "user", "name": "", "state": "queued", "reason": "priority"},
            **{"priority": 0, "a": "data:A", "b": "data:B", "c": "data:C", "options": {}, "plan": {}},
            **{"device_bytes": 1 << 30, "host_bytes": 2 << 30, "disk_bytes": 0, "predicted_s": 90.0},
            **{"predicted_start": None, "device": None, "attempt": 0, "failures": 0, "max_attempts": 3},
            **{"not_before": None, "deadline": None, "created": 1.0, "started": None, "ended": None},
            **{"exit_code": None, "error": None, "result": None, "needs": [], "version": 1, "actions": []},
            **{"progress": None},
        }
        self.jobs[number] = job | values
        return self.jobs[number]

    def set(self, job: dict[str, Any], **values: Any) -> None:
        """Change a job. A change of its state is an event."""
        job.update(values, version=job["version"] + 1)
        if "state" in values:
            self.events.append((values["state"], {}))

    def count(self, method: str, path: str) -> int:
        return sum(1 for one in self.requests if one[0] == method and re.fullmatch(path, one[1]))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def handle_one(self, method: str) -> None:
        stub = self.stub
        stub.requests.append((method, self.path, dict(self.headers)))
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = stub.faults.popleft() if stub.faults else None
        self.close_connection = True
        if fault == "lost":
            return
        if isinstance(fault, tuple):
            status, headers = fault
            self.answer(status, {"type": "/problems/unavailable", "detail": "busy"}, headers)
            return
        status, body = self.carry_out(method, json.loads(raw) if raw else None)
        if fault != "committed" and status:
            self.answer(status, body)

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else b"" if status == 304 else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data:
            self.wfile.write(data)

    def carry_out(self, method: str, body: Any) -> tuple[int, Any]:
        """Return the status and the body of the answer; status 0 if it has been sent."""
        stub, url = self.stub, urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        answer: tuple[int, Any] = 404, {}
        match method, *url.path.strip("/").split("/")[1:]:
            case "GET", "roots":
                answer = 200, {"roots": stub.roots}
            case "GET", "devices":
                answer = 200, {"devices": [], "draining": False}
            case "GET", "jobs":
                answer = 200, self.listed(parse_qs(url.query).get("state"), query)
            case "POST", "jobs" if "dry_run" in query:
                stub.bodies.append(body)
                answer = 200, {"plan": {}, "device_bytes": 1, "predicted_s": 2.0, "predicted_start": None}
            case "POST", "jobs" | "batches":
                answer = 202, self.submitted(body)
            case _, "jobs", number, *_ if number not in stub.jobs:
                answer = 404, {"type": "/problems/not-found", "detail": f"there is no job {number}"}
            case "GET", "jobs", number:
                answer = self.one(stub.jobs[number], "wait" in query)
            case "GET", "jobs", number, "log":
                start = int(self.headers.get("Range", "bytes=0-")[6:-1])
                part = stub.log[start:]
                answer = (416, {}) if start and not part else (206 if start else 200, part)
            case "GET", "jobs", number, "timeline":
                answer = 200, stub.timeline
            case "GET", "jobs", number, "report":
                answer = 200, b"<html>"
            case "GET", "jobs", number, "events":
                self.stream()
                answer = 0, None
            case "POST", "jobs", number, action:
                answer = self.acted(stub.jobs[number], Action(action))
        return answer

    def submitted(self, body: Any) -> dict[str, Any]:
        stub, key = self.stub, self.headers["Idempotency-Key"]
        stub.bodies.append(body)
        if key not in stub.keys:
            stub.keys[key] = [stub.add(name=each.get("name", ""))["id"] for each in body.get("jobs", [body])]
        jobs = [stub.jobs[number] for number in stub.keys[key]]
        return {"jobs": jobs} if "jobs" in body else jobs[0]

    def acted(self, job: dict[str, Any], action: Action) -> tuple[int, Any]:
        to = requested(action, State(job["state"]))
        if to is None:
            detail = f"job {job['id']} is {job['state']}: {action} is impossible"
            return 409, {"type": "/problems/conflict", "detail": detail}
        if to != job["state"]:
            self.stub.set(job, state=str(to))
        self.stub.on_action(job)
        return 200, job

    def one(self, job: dict[str, Any], waits: bool) -> tuple[int, Any]:
        known = self.headers.get("If-None-Match")
        (self.stub.on_wait if waits else self.stub.on_read)()
        return (304, None) if known == f'"{job["version"]}"' else (200, job)

    def listed(self, states: list[str] | None, query: dict[str, str]) -> dict[str, Any]:
        newest = [job for job in reversed(self.stub.jobs.values()) if not states or job["state"] in states]
        start, limit = int(query.get("cursor", 0)), min(self.stub.page, int(query["limit"]))
        end = start + limit
        return {"jobs": newest[start:end], "next": str(end) if end < len(newest) else None}

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for sent, (kind, data) in enumerate(self.stub.events):
            if sent < int(self.headers.get("Last-Event-ID", 0)):
                continue
            if self.stub.cut(sent):
                self.wfile.write(f"id: {sent + 1}\nevent: {kind}\ndata: {{".encode())  # half an event
                return
            number = "" if kind == "progress" else f"id: {sent + 1}\n"
            text = json.dumps({"kind": kind, "data": data})
            self.wfile.write(f": comment\n{number}event: {kind}\ndata: {text}\n\n".encode())


@contextmanager
def stub_service(folder: Path) -> Iterator[Stub]:
    """Run a stub on a unix socket in a folder."""
    stub = Stub(folder)

    class Handler(_Handler):
        pass

    Handler.stub = stub
    with serving(stub, Handler):
        yield stub


@contextmanager
def serving(stub: Stub, handler: type[_Handler]) -> Iterator[None]:
    stub.socket.unlink(missing_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(stub.socket), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()
