"""An S3 server for tests (moto), and a proxy that delays or refuses requests, or breaks connections."""

import http.client
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

BUCKET = "bucket"
# No error, log, journal or report may contain this text.
SECRET = "SECRET-KEY-OF-THE-TESTS"
# Seconds until a request that waits for others gives up, so that a failing test ends.
PATIENCE = 30.0

_SIGNED = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
# What a fault does: refuse with an HTTP status, close the connection before the response or amid its body, or
# send a body that is shorter than its Content-Length without closing it properly.
Fault = int | str
DROP, TRUNCATE = "drop", "truncate"
# Chooses the fault of a request, given its method and path; None for no fault.
Faults = Callable[[str, str], Fault | None]


@dataclass
class Proxy:
    """A proxy before an S3 server.

    - `faults`: chooses the fault of each request.
    - `hold`: GETs of an array's chunks wait until so many have been in flight at once, or `PATIENCE` is over.
      Arrays are given by the first part of their keys.
    - `lose`: chooses requests that are passed on, but whose answers are lost.
    - `requests`: the method and path of all requests so far.
    - `most`: the largest number of GETs of chunks that were in flight at once, by the first part of the key.
    - `at`: called with each request before it is passed on.
    """

    upstream: str
    faults: Faults = lambda method, path: None
    hold: Mapping[str, int] = field(default_factory=dict)
    lose: Callable[[str, str], bool] = lambda method, path: False
    at: Callable[[str, str], object] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    url: str = ""
    _now: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def getting(self, method: str, path: str) -> Iterator[None]:
        """Count a GET of a chunk as in flight, and hold it if that was asked for."""
        parts = urlsplit(path).path.split("/")
        if method != "GET" or len(parts) < 4 or "c" not in parts[3:]:
            yield
            return
        name = parts[2]
        with self._changed:
            self._now[name] = self._now.get(name, 0) + 1
            self.most[name] = max(self.most.get(name, 0), self._now[name])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most[name] >= self.hold.get(name, 0), PATIENCE)
        try:
            yield
        finally:
            with self._changed:
                self._now[name] -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *arguments: Any) -> None:
        pass

    def _pass_on(self) -> None:
        proxy, method = self.proxy, self.command
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        proxy.requests.append((method, self.path))
        with proxy.getting(method, self.path):
            proxy.at(method, self.path)
            fault = proxy.faults(method, self.path)
            if fault == DROP:
                self._break()
                return
            if isinstance(fault, int):
                self._send(fault, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            upstream = http.client.HTTPConnection(proxy.upstream, timeout=PATIENCE)
            headers = {k.title(): v for k, v in self.headers.items() if k.lower() != "connection"}
            # moto checks that requests are signed, but not by whom. A web server checks nothing.
            headers.setdefault("Authorization", _SIGNED)
            upstream.request(method, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            if proxy.lose(method, self.path):
                self._break()
                return
            kept = {
                k: v
                for k, v in answer.getheaders()
                if k.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server")
            }
            if method == "HEAD":
                kept["Content-Length"] = answer.getheader("Content-Length", "0")
        # It is no longer counted when it is sent: the client may begin its next request at once.
        self._send(answer.status, kept, content, cut=fault == TRUNCATE)

    def _send(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._pass_on)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that a test kills


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a moto server with an empty bucket. Yields its address, host:port."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"{host if host != '0.0.0.0' else '127.0.0.1'}:{port}"
    try:
        yield address
    finally:
        server.stop()


@contextmanager
def proxy_before(address: str) -> Iterator[Proxy]:
    """Run a proxy before the server at an address."""
    proxy = Proxy(address)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def create_bucket(address: str) -> None:
    """Create the bucket, or delete all its objects if it exists."""
    for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        connection.request(method, path)
        connection.getresponse().read()
        connection.close()


def environment(url: str) -> dict[str, str]:
    """Return the environment variables by which obstore finds a server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "NO_PROXY": os.environ.get("NO_PROXY", "") + ",127.0.0.1",
    }
