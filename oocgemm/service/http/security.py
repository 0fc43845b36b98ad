"""What a request passes before its route, in this order.

1. The Host header must be allowed, so that no page of another site reaches the service by DNS rebinding.
2. The requests at a time are limited, and the body of each one, in size and in time.
3. A token, the cookie of a browser, or the unix socket says who sends it.
4. Their scope must allow the method. Routes check the owner of a job, and the scope admin.
5. Requests that change something must not come from another site.

There is no CORS, so pages of other sites cannot read answers. Every answer forbids browsers to load anything
from another origin.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any

from fastapi import HTTPException
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from oocgemm.service.errors import StoreError
from oocgemm.service.http.identity import Identity, Scope, own_name
from oocgemm.service.http.page import COOKIE
from oocgemm.service.http.problems import problem, problem_of
from oocgemm.service.http.requests import OPEN
from oocgemm.service.http.service import Service

# The largest body, in bytes, and the seconds in which all of it must come.
MAX_BODY, BODY_SECONDS = 1 << 20, 30.0
# Requests at a time, of each socket. Streams of events and long polls count.
MAX_REQUESTS = 1000
_TOO_LARGE = f"the body has {{}} bytes, and {MAX_BODY} are allowed: send less"
SAFE = frozenset({"GET", "HEAD"})
_UNAUTHORIZED = (
    "this needs a token: make one with oocgemm token create, or open the URL that oocgemm serve has printed"
)
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Guard:
    """Checks all requests of an application. `local` requests come by the unix socket, from its user."""

    def __init__(self, app: App, service: Service, *, local: bool) -> None:
        """Guard an application."""
        self._app, self._service, self._local = app, service, local
        self._requests = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        receiving = _Receiving(receive, _length(headers))
        sending = _Sending(send, receiving)
        self._requests += 1
        try:
            refused = await self._refused(scope, headers)
            await (self._app if refused is None else refused)(scope, receiving, sending)
        finally:
            self._requests -= 1

    async def _refused(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> Response | None:
        """Return the answer to a request that is refused. Else store who sends it in the scope."""
        refused = self._wrong_host(headers) or self._too_many() or _wrong_length(headers)
        if refused is not None:
            return refused
        try:
            user = await self._identify(headers)
        except StoreError as error:
            return problem_of(error)
        scope["identity"] = user
        if user is None:
            return _wrong_site(scope, headers) if _is_open(scope) else problem("unauthorized", _UNAUTHORIZED)
        return _wrong_scope(scope, user) or _wrong_site(scope, headers)

    def _wrong_host(self, headers: dict[str, str]) -> Response | None:
        host, allowed = headers.get("host", ""), self._service.config.allowed_hosts
        if _name(host) in allowed:
            return None
        return problem(
            "host-refused",
            f"the Host header {host!r} is not one of {', '.join(sorted(allowed))}: "
            "use one of these, or start the server with --allow-host",
        )

    def _too_many(self) -> Response | None:
        if self._requests <= MAX_REQUESTS:
            return None
        return problem("unavailable", f"{MAX_REQUESTS} other requests are being answered: try again")

    async def _identify(self, headers: dict[str, str]) -> Identity | None:
        if self._local:
            return Identity(own_name(), Scope.ADMIN, local=True)
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return await run_in_threadpool(self._service.store.identify, secret.strip())
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if cookie is None else await run_in_threadpool(self._service.store.identify, cookie.value)


class _Receiving:
    """Receives a body, limited in size and in time. `complete` is whether all of it has come."""

    def __init__(self, receive: Receive, length: int | None) -> None:
        self._receive, self._length, self._size, self.complete = receive, length, 0, length == 0
        self._end = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self.complete:  # the only thing to come is that the client goes, or an empty message
            return await self._receive()
        if self._length is not None and self._length > MAX_BODY:
            raise HTTPException(413, _TOO_LARGE.format(self._length))
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come in {BODY_SECONDS:g} s: send it faster") from None
        self._size += len(message.get("body", b""))
        if self._size > MAX_BODY:
            raise HTTPException(413, _TOO_LARGE.format("more"))
        self.complete = not message.get("more_body", False)
        return message

    async def drain(self) -> None:
        """Receive the rest of the body, as long as it is within the limits."""
        with suppress(HTTPException):
            while not self.complete:
                await self()


class _Sending:
    """Sends an answer with the headers that all answers have, unless it has others of the same name.

    Clients that send a body may read no answer before, so the rest of it is received first. If it exceeds the
    limits, the connection is closed. Else, the client could keep it by sending a body for ever.
    """

    def __init__(self, send: Send, receiving: _Receiving) -> None:
        self._send, self._receiving = send, receiving

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._receiving.drain()
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            more = HEADERS if self._receiving.complete else {**HEADERS, "connection": "close"}
            headers += [
                (name.encode(), value.encode())
                for name, value in more.items()
                if name.encode() not in present
            ]
            message = {**message, "headers": headers}
        await self._send(message)


def _length(headers: dict[str, str]) -> int | None:
    """Return the length of the body as the headers tell it; None if they do not."""
    if "transfer-encoding" in headers:
        return None
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdecimal() else None


def _wrong_length(headers: dict[str, str]) -> Response | None:
    length = _length(headers)
    if length is None and "content-length" in headers:
        return problem(
            "invalid-request", "the length of the body is given twice: send Content-Length alone", 400
        )
    if length is None or length <= MAX_BODY:
        return None
    return problem("too-large", _TOO_LARGE.format(length))


def _is_open(scope: MutableMapping[str, Any]) -> bool:
    path = scope["path"]
    if (scope["method"], path) == ("POST", "/login"):
        return True
    return scope["method"] in SAFE and (path in OPEN or path.startswith("/static/"))


def _wrong_scope(scope: MutableMapping[str, Any], user: Identity) -> Response | None:
    needed = Scope.READ if scope["method"] in SAFE else Scope.SUBMIT
    if user.scope >= needed:
        return None
    return problem(
        "forbidden",
        f"the token of {user.name} has the scope {user.scope.name.lower()}, and this needs "
        f"{needed.name.lower()}: use another token",
    )


def _wrong_site(scope: MutableMapping[str, Any], headers: dict[str, str]) -> Response | None:
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    same = origin is None or origin.lower().partition("://")[2] == headers.get("host", "").lower()
    if scope["method"] in SAFE or (same and site in ("same-origin", "none")):
        return None
    return problem("cross-site", f"the request comes from {origin or site}: use the page of this service")


def _name(host: str) -> str:
    """Return the name in a Host header, without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
