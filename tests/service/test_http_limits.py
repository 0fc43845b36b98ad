"""Requests that are too large, too slow or too many: the real server refuses them, and stays small."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from oocgemm.service.http.security import MAX_BODY
from oocgemm.service.http.server import MAX_HEAD
from tests.support.real_server import SECONDS, RealServer, running_server
from tests.support.suite import slow

MAX_REQUESTS = 20
MAX_RSS = 200 << 20
# Timeouts as short as a busy machine allows.
QUICKLY = {
    "oocgemm.service.http.server:HEAD_SECONDS": 1.5,
    "oocgemm.service.http.security:BODY_SECONDS": 1.5,
    "oocgemm.service.http.security:MAX_REQUESTS": MAX_REQUESTS,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server"), set=QUICKLY) as found:
        yield found


@pytest.fixture(scope="module")
def token(server: RealServer) -> str:
    return server.token("admin")


def rss(server: RealServer) -> int:
    """Return the largest resident memory that the server has had, in bytes."""
    (line,) = (line for line in Path(f"/proc/{server.pid}/status").read_text().split("\n") if "VmHWM" in line)
    return int(line.split()[1]) << 10


def opened(server: RealServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), SECONDS)


def answer(connection: socket.socket) -> bytes:
    """Return all that a server sends until it closes a connection."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def head(token: str, *more: str, path: str = "/v1/jobs") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", *more]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/x/cancel", "/nothing"])
def test_a_body_that_is_too_large_is_refused_by_its_length(server: RealServer, token: str, path: str) -> None:
    for length in (MAX_BODY + 1, 1 << 30, 10**18):
        with opened(server) as connection:
            connection.sendall(head(token, f"Content-Length: {length}", path=path))
            found = answer(connection)
        assert found.startswith(b"HTTP/1.1 413 ")
        assert b"application/problem+json" in found


@pytest.mark.parametrize("size", [64 << 20, *slow((1 << 30,))])
@pytest.mark.parametrize("form", ["chunks", "length", "no route", "no token"])
def test_a_huge_body_does_not_fill_the_memory(server: RealServer, token: str, form: str, size: int) -> None:
    sent = "wrong" if form == "no token" else token
    path = "/v1/jobs/x/cancel" if form == "no route" else "/v1/jobs"
    piece = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    with opened(server) as connection:
        length = f"Content-Length: {size}" if form == "length" else "Transfer-Encoding: chunked"
        connection.sendall(head(sent, length, path=path))
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(size >> 16):
                connection.sendall(piece)
            raise AssertionError("the server has taken the whole body")
    print(form, size, rss(server) >> 20, "MiB")
    assert rss(server) < MAX_RSS
    assert server.ask("GET", "/livez").status == 200


def test_a_head_that_is_too_large_or_no_http_is_refused(server: RealServer) -> None:
    for sent in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEAD) + b"\r\n\r\n",
        b"GET /" + b"x" * (2 * MAX_HEAD) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        head("x", "Content-Length: 1", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    ):
        with opened(server) as connection:
            found = b""
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(sent)
                found = connection.recv(1 << 16)
        assert found == b"" or found.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"HTTP/1.1 403 ")), found
    assert server.ask("GET", "/livez").status == 200


@pytest.mark.parametrize("count", [20, *slow((1000,))])
def test_clients_that_send_slowly_are_disconnected(server: RealServer, token: str, count: int) -> None:
    """Other clients are answered meanwhile."""
    with ExitStack() as stack:
        heads = [stack.enter_context(opened(server)) for _ in range(count)]
        for connection in heads:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-")
        bodies = [stack.enter_context(opened(server)) for _ in range(MAX_REQUESTS // 2)]
        for connection in bodies:
            connection.sendall(head(token, "Content-Length: 100") + b"{")
        late = [stack.enter_context(opened(server)) for _ in range(5)]
        for connection in late:  # the second request of a connection
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
        assert server.ask("GET", "/livez", tcp=True).status == 200
        for connection in heads:  # bytes that drip in do not prolong the time
            with suppress(OSError):
                connection.sendall(b"x")
        assert {answer(connection) for connection in heads} == {b""}
        for connection in bodies:
            assert answer(connection).startswith(b"HTTP/1.1 408 ")
        for connection in late:
            assert answer(connection).count(b"HTTP/1.1 200 ") == 1
    assert rss(server) < MAX_RSS


def test_more_requests_than_the_limit_are_asked_to_come_later(server: RealServer, token: str) -> None:
    request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
    with ExitStack() as stack:
        streams = [stack.enter_context(opened(server)) for _ in range(MAX_REQUESTS)]
        for connection in streams:
            connection.sendall(request + token.encode() + b"\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        reply = server.ask("GET", "/v1/jobs", tcp=True, token=token)
        assert (reply.problem(503), reply.headers["Retry-After"]) == ("unavailable", "1")
        assert server.ask("GET", "/v1/jobs").status == 200  # the socket has a limit of its own
    end = time.monotonic() + SECONDS
    while server.ask("GET", "/v1/jobs", tcp=True, token=token).status == 503:
        assert time.monotonic() < end
