"""A real server for tests: the process of `oocgemm serve` on the host backend, with its state in a folder.

    with running_server(tmp_path) as server:
        job = server.client().submit("data:A.npy", "data:B.npy", "out:C.npy").wait()
        reply = server.ask("GET", "/v1/jobs", tcp=True, token=server.token("submit"))

Operands lie in ``data``, which is the root `data` (ro); the root `out` (rw) is the folder ``out``.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.service import confinement, dispatcher
from oocgemm.service.client import Client
from oocgemm.service.http.security import Scope, Tokens
from oocgemm.service.http.service import DATABASE
from tests.support.services import product_of, store_operands

SECONDS = 200.0  # within which an answer must begin, or a job end, on a busy machine
JOB = {"a": "data:A.npy", "b": "data:B.npy"}


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def problem(self, status: int) -> str:
        """Check that this is a problem document with a status; return its kind, the end of its type."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["Content-Type"] == "application/problem+json"
        found = self.json()
        assert found["status"] == status
        assert found["title"]
        assert found["detail"]
        return str(found["type"]).rpartition("/")[2]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(str(self._path))


class RealServer:
    """A server process. Its TCP port and its login URL are known as soon as `start` has returned."""

    def __init__(self, folder: Path, *options: str, **changes: Any) -> None:
        """Prepare folders and operands.

        Args:
            folder: for the state and the roots.
            options: further ones of `oocgemm serve`.
            changes: to the server, as `tests.support.odd_server` takes them.
        """
        self.folder, self.options, self.changes = folder, options, changes
        self.state, self.data, self.out = folder / "state", folder / "data", folder / "out"
        self.socket = self.state / "serve.sock"
        self.process: subprocess.Popen[str] | None = None
        self.url = self.login = ""
        for each in (self.data, self.out):
            each.mkdir(exist_ok=True)
        store_operands(self.data)

    # The process

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        program = ["tests.support.odd_server", json.dumps(self.changes)] if self.changes else ["oocgemm"]
        return [sys.executable, "-m", *program, *self.arguments()]

    def arguments(self) -> list[str]:
        """Return the arguments of `oocgemm` that start the server."""
        roots = ["--root", f"data={self.data}:ro", "--root", f"out={self.out}:rw"]
        confined = [] if confinement.abi() else ["--no-confine"]
        where = ["--state", str(self.state), "--listen", "127.0.0.1:0", "--backend", "host"]
        return ["serve", *where, *roots, *confined, *self.options]

    def start(self) -> "RealServer":
        """Start the server, and wait until it can be reached."""
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.fullmatch(r"listening on (\S+); sign in once: (\S+)\n", line):
                self.url, self.login = found.groups()
                return self
        raise AssertionError(f"the server ended at once: {self.log()}")

    def log(self) -> str:
        """Return what the server has printed on stderr."""
        return (self.folder / "server.log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """End the server by a signal; return its exit status. Jobs go on."""
        assert self.process is not None
        self.process.send_signal(signum)
        code = self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def restart(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End the server, and start it on the same state folder."""
        self.end(signum)
        self.start()

    def close(self) -> None:
        """Kill the server and the processes of its jobs."""
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)
        for folder in (self.state / "jobs").glob("*"):
            if dispatcher.is_alive(folder) and (process := dispatcher.attach(folder)) is not None:
                process.send(signal.SIGKILL)
                process.close()

    # Requests

    def token(self, scope: str = "submit", name: str = "user", expires: float | None = None) -> str:
        """Return the secret of a new token."""
        with closing(Tokens(self.state / DATABASE)) as tokens:
            return tokens.create(name, Scope[scope.upper()], expires)[1]

    def client(self) -> Client:
        """Return a client of the unix socket."""
        return Client(str(self.socket))

    def connect(self, *, tcp: bool = False) -> http.client.HTTPConnection:
        """Return a connection, which is opened by its first request."""
        if tcp:
            return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=SECONDS)
        return _UnixConnection(self.socket)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        tcp: bool = False,
        token: str | None = None,
    ) -> Reply:
        """Send a request by the unix socket, or by TCP; return the answer.

        Args:
            method, path: of the request.
            body: bytes, or plain data that is sent as JSON.
            headers: of the request.
            tcp: whether it is sent by TCP.
            token: the secret of a token.
        """
        sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        with closing(self.connect(tcp=tcp)) as connection:
            connection.request(method, path, body, sent | dict(headers or {}))
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())

    def submit(self, c: str = "C.npy", **values: Any) -> dict[str, Any]:
        """Submit the product of A and B; return the job."""
        reply = self.ask("POST", "/v1/jobs", JOB | {"c": f"out:{c}"} | values)
        assert reply.status == 202, reply.body
        found: dict[str, Any] = reply.json()
        return found

    def job(self, number: str) -> dict[str, Any]:
        """Return a job."""
        found: dict[str, Any] = self.ask("GET", f"/v1/jobs/{number}").json()
        return found

    def until(self, number: str, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of some states, by long polls; return it."""
        end, tag = time.monotonic() + SECONDS, ""
        while time.monotonic() < end:
            reply = self.ask("GET", f"/v1/jobs/{number}?wait=10", headers={"If-None-Match": tag})
            if reply.status != 304:
                found: dict[str, Any] = reply.json()
                if found["state"] in states:
                    return found
            tag = reply.headers["ETag"]
        raise AssertionError(self.job(number))

    def check(self, *names: str) -> None:
        """Check that arrays of the root `out` are the product of A and B."""
        right = product_of(self.data)
        for name in names:
            np.testing.assert_array_equal(np.load(self.out / name), right)


@contextmanager
def running_server(folder: Path, *options: str, **changes: Any) -> Iterator[RealServer]:
    """Run a server for a block, as `RealServer` describes it. Its jobs are killed at the end."""
    server = RealServer(folder, *options, **changes)
    try:
        yield server.start()
    finally:
        server.close()
