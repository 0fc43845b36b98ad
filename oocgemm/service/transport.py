"""How a client reaches the server: addresses, requests that are repeated, error responses, and events.

Every request of the client may be repeated: submissions have an Idempotency-Key, and all other requests
change nothing, or nothing when they are repeated. Each request has its own connection, so threads share
nothing.
"""

import http.client
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oocgemm.errors import BudgetError, InputError, OocGemmError
from oocgemm.service.protocol import PROBLEMS, AccessError, ServiceError, UnavailableError
from oocgemm.system.installed import __version__
from oocgemm.values import dataclass

# Environment variables with the address of the server, and with the token that it asks for.
SERVICE, TOKEN = "OOCGEMM_SERVICE", "OOCGEMM_TOKEN"
# Seconds in which a connection must be established.
CONNECT_SECONDS = 10.0
# PATIENCE: seconds for which a request is repeated. LONG_PATIENCE: the same for a request that waits for a
# job; it covers a restart of the machine.
PATIENCE, LONG_PATIENCE = 60.0, 600.0
# Seconds between attempts: the first delay, and the maximum. Each delay is twice the one before.
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
# Seconds in which the server must send something.
ANSWER_SECONDS = 60.0
# Statuses with which a server, or a proxy before it, asks to try again later.
BUSY = frozenset({429, 502, 503, 504})
# The exceptions of a connection that breaks.
LOST = (OSError, http.client.HTTPException)
# Messages for problems whose detail addresses users of a browser.
MESSAGES = {
    "unauthorized": "the token is missing, wrong, revoked or has expired: set $OOCGEMM_TOKEN, or pass "
    "token=, to one that oocgemm token create has made"
}


def default_state() -> Path:
    """Return the default state folder of a server of this user."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "oocgemm"


def default_socket() -> Path:
    """Return the path of the socket on which a server of this user listens by default."""
    return default_state() / "serve.sock"


@dataclass(frozen=True)
class Address:
    """The address of a server: the path of a unix socket, or host and port, where None is the default port.

    `text` is what the user wrote, `prefix` the path under which a proxy serves the service, such as ``/gpu``.
    """

    text: str
    path: str | None
    host: str = "localhost"
    port: int | None = None
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, text: str | None) -> "Address":
        """Return the address for a URL, or for the path of a unix socket, such as ``unix:/run/oocgemm.sock``.

        None means the address in $OOCGEMM_SERVICE, or the default socket if that is unset. Raises
        `InputError` if the text is no address.
        """
        text = text or os.environ.get(SERVICE) or str(default_socket())
        if "://" not in text or text.startswith("unix:"):
            path = text.removeprefix("unix:")
            path = "/" + path.lstrip("/") if path.startswith("//") else path
            return cls(text, os.path.abspath(os.path.expanduser(path)))
        try:
            url = urlsplit(text)
            port, host = url.port, url.hostname
        except ValueError as error:
            raise InputError(f"the address {text} is no URL: {error}") from None
        if url.scheme not in ("http", "https") or not host:
            raise InputError(
                f"the address {text} must be http://HOST:PORT, https://HOST:PORT, or the path of a socket"
            )
        return cls(text, None, host, port, url.scheme == "https", url.path.rstrip("/"))

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection, and return it. Raises `OSError` if that fails."""
        connection: http.client.HTTPConnection
        if self.path is not None:
            connection = _SocketConnection(self.path)
        elif self.tls:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Answer:
    """A response. `lost` is whether an earlier attempt may have been carried out, but got no answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    lost: bool = False

    def json(self) -> Any:
        """Return the body as plain data. Raises `ServiceError` if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ServiceError(
                "the answer is not JSON: the address is not that of oocgemm serve, or a proxy changes answers"
            ) from None


class Backoff:
    """Delays between attempts, for a limited time."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.restart()

    def restart(self) -> None:
        self._until = time.monotonic() + self._patience
        self._delay = FIRST_DELAY

    def wait(self, at_least: float = 0.0) -> bool:
        """Sleep until the next attempt, and return True. Return False at once if time would run out."""
        delay = max(at_least, self._delay * random.uniform(0.5, 1.0))
        if time.monotonic() + delay > self._until:
            return False
        time.sleep(delay)
        self._delay = min(2 * self._delay, MAX_DELAY)
        return True


class Transport:
    """Sends requests to one server. Several threads may use it."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        self._token = token
        self._reached = False

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> Answer:
        """Send a request, with `body` as JSON, and return the answer, whatever its status.

        The path is below the root of the service. The request is repeated for `patience` seconds, and the
        server has `answer_seconds` for each part of an answer. Raises `UnavailableError` if there is no
        connection for longer than that, and `AccessError` if the socket or the certificate of the server
        forbids it.
        """
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        backoff, lost = Backoff(patience), False
        while True:
            try:
                with self.open(method, path, data, headers, answer_seconds) as response:
                    answer = Answer(response.status, response.headers, response.read(), lost)
            except LOST as error:
                if not self.may_retry(error) or not backoff.wait():
                    raise self.failure(error) from error
                lost = True
                continue
            if answer.status in BUSY and backoff.wait(retry_after(answer.headers)):
                lost = lost or answer.status in (502, 504)
                continue
            return answer

    def call(self, method: str, path: str, body: object = None, **more: Any) -> Answer:
        """Send a request as `request` does. Raises the error that the answer describes."""
        answer = self.request(method, path, body, **more)
        if answer.status >= 400:
            raise error_of(answer.status, answer.body)
        return answer

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request once; yield the response, whose body has not been read.

        Raises `OSError` or `http.client.HTTPException` if the connection is lost.
        """
        connection = self.address.connect()
        self._reached = True
        try:
            connection.sock.settimeout(answer_seconds)
            sent = {"User-Agent": f"oocgemm/{__version__}", "Connection": "close"} | dict(headers or {})
            if data is not None:
                sent["Content-Type"] = "application/json"
            # The server knows who uses a unix socket.
            if self._token and self.address.path is None:
                sent["Authorization"] = f"Bearer {self._token}"
            connection.request(method, self.address.prefix + path, data, sent)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def may_retry(self, error: Exception) -> bool:
        """Return whether another attempt may succeed: the server has been reached before."""
        return self._reached and not isinstance(error, PermissionError | ssl.SSLCertVerificationError)

    def failure(self, error: Exception) -> ServiceError:
        """Return the exception for a connection that is lost for good."""
        where = self.address.text
        if isinstance(error, PermissionError):
            return AccessError(f"{where} belongs to another user: ask for a TCP address and a token")
        if isinstance(error, ssl.SSLCertVerificationError):
            return AccessError(
                f"the certificate of {where} is not trusted ({error.verify_message}): name its authority by "
                "$SSL_CERT_FILE"
            )
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return AccessError(f"{where} does not use TLS: write http:// instead of https://")
        if not self._reached:
            return UnavailableError(
                f"no service answers at {where} ({_reason(error)}): start one with oocgemm serve, or give "
                f"its address by ${SERVICE} or --service"
            )
        return UnavailableError(
            f"the connection to {where} is lost ({_reason(error)}): jobs that run are not affected; check "
            "that oocgemm serve runs, and try again"
        )


def retry_after(headers: http.client.HTTPMessage) -> float:
    """Return after how many seconds the server asks to try again; 0 if it does not say."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def error_of(status: int, body: bytes) -> OocGemmError:
    """Return the exception for a response whose status is 400 or more."""
    problem = _object(body)
    slug = str(problem.get("type", "")).rpartition("/")[2]
    message = MESSAGES.get(slug) or str(problem.get("detail") or problem.get("title") or "")
    if not message:
        message = (
            f"the server answered with HTTP status {status}: see that the address is that of oocgemm serve"
        )
    if slug == "budget-too-small":
        smallest = problem.get("smallest")
        needed = None
        if isinstance(smallest, dict) and {"device_memory", "host_memory"} <= smallest.keys():
            needed = int(smallest["device_memory"]), int(smallest["host_memory"])
        return BudgetError(message, needed=needed)
    if slug in PROBLEMS:
        return PROBLEMS[slug].error(message)
    return UnavailableError(message) if status in (502, 503, 504) else ServiceError(message)


@dataclass(frozen=True)
class Message:
    """A server-sent event: its ``id:``, ``event:`` and ``data:``. `id` is None if the event has none."""

    id: str | None
    kind: str
    data: str

    def json(self) -> dict[str, Any]:
        """Return the data as an object; an empty one if it is something else."""
        return _object(self.data)


def parse(lines: Iterable[bytes]) -> Iterator[Message]:
    """Yield the events of a stream. An event that is cut off is left out.

    >>> list(parse([b"id: 3\\n", b"event: running\\n", b"data: {}\\n", b"\\n", b"data: cut"]))
    [Message(id='3', kind='running', data='{}')]
    """
    number, kind, data = None, "message", list[str]()
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield Message(number, kind, "\n".join(data))
            number, kind, data = None, "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "id":
                number = value
            case "event":
                kind = value
            case "data":
                data.append(value)


def messages(transport: Transport, path: str) -> Iterator[Message]:
    """Yield all events of a path, from the first one that is stored. The stream never ends by itself.

    After a lost connection, the stream continues with the event after the last one. Raises `UnavailableError`
    if there was no event for `LONG_PATIENCE` seconds, or the error that the server answers.
    """
    last, backoff = "0", Backoff(LONG_PATIENCE)
    failed: Exception | None = None
    while True:
        pause = 0.0
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
        try:
            with transport.open("GET", path, headers=headers) as response:
                if response.status >= 400:
                    failed = error_of(response.status, response.read())
                    if response.status not in BUSY:
                        raise failed
                    pause = retry_after(response.headers)
                else:
                    for message in parse(response):
                        backoff.restart()
                        last = message.id or last
                        yield message
        except LOST as error:
            failed = transport.failure(error)
            if not transport.may_retry(error):
                raise failed from error
        if not backoff.wait(pause):
            raise failed or transport.failure(ConnectionError("the stream of events ends at once"))


def _object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
