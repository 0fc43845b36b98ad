"""Sends requests to the server, and repeats them when the connection is lost or the server is busy.

Every request of the client may be repeated: submissions have an Idempotency-Key, and all others change
nothing, or change nothing the second time. Each request has its own connection, so threads share nothing.
"""

import http.client
import json
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oocgemm.service.client.address import SERVICE, Address
from oocgemm.service.client.problems import error_of
from oocgemm.service.errors import AccessError, ServiceError, UnavailableError
from oocgemm.system.version import __version__

# Seconds for which a request is repeated, and for which one that waits for a job is repeated. The latter
# covers a restart of the machine.
PATIENCE, LONG_PATIENCE = 60.0, 600.0
# Seconds between attempts: the first delay, and the maximum. Each delay is twice the one before.
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
# Seconds in which the server must send something.
ANSWER_SECONDS = 60.0
# Statuses with which a server, or a proxy before it, asks to try again later.
BUSY = frozenset({429, 502, 503, 504})
# What a connection raises that breaks.
LOST = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Answer:
    """A response. `lost` is whether an earlier attempt may have been carried out, without an answer."""

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
        """Begin anew, after a success."""
        self._until = time.monotonic() + self._patience
        self._delay = FIRST_DELAY

    def wait(self, at_least: float = 0.0) -> bool:
        """Sleep until the next attempt. Return False at once if the time would be over by then."""
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
        """Send a request, and return the answer, whatever its status.

        Args:
            method, path: of the request. The path is below the root of the service, and may have a query.
            body: plain data, sent as JSON; None sends no body.
            headers: of the request.
            patience: how long to repeat the request, in seconds.
            answer_seconds: how long to wait for each part of an answer, in seconds.

        Raises:
            UnavailableError: the connection was lost for longer than that, or there never was one.
            AccessError: the socket or the certificate of the server forbids the connection.
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
