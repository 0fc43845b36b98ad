"""Who sends a request, and what it passes before its route.

Users of the TCP socket identify themselves by tokens. The cookie of a browser contains a token, too. A
request must pass these checks, in this order:

1. The Host header must be allowed, so that no page of another site reaches the service by DNS rebinding.
2. The number of concurrent requests is limited, and the body of each request, in size and in time.
3. A token, the cookie of a browser, or the unix socket says who sends it.
4. The scope of the sender must allow the method. Routes check the owner of a job, and the scope admin.
5. Requests that change something must not come from another site.

There is no CORS, so pages of other sites cannot read answers. Every answer forbids browsers to load anything
from another origin.
"""

import asyncio
import hmac
import os
import pwd
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Set
from contextlib import suppress
from enum import IntEnum
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Any

from fastapi import HTTPException
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from oocgemm.errors import InputError
from oocgemm.service.http.views import problem, problem_of
from oocgemm.service.job_store import JobRecord, JobStore
from oocgemm.service.protocol import AccessError, DatabaseError
from oocgemm.values import dataclass

# A secret starts with this, so that scanners of source code recognise it.
PREFIX = "oocgemm"
# Resolution, in seconds, of the stored time of the last use of a token.
USE_SECONDS = 60.0
# Seconds for which the code in the URL that the server prints is valid.
LOGIN_SECONDS = 600.0
# Seconds for which a browser stays signed in.
SESSION_SECONDS = 7 * 86400.0
# The cookie of a browser that is signed in.
COOKIE = "oocgemm"
# Maximum bytes of a body, and seconds in which the whole body must arrive.
MAX_BODY, BODY_SECONDS = 1 << 20, 30.0
# Maximum number of concurrent requests per socket. Streams of events and long polls count.
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
# What anyone may read. The page has no data of its own.
OPEN = frozenset({"/", "/livez", "/readyz", "/login"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Scope(IntEnum):
    """What a user may do. Each scope includes those that are listed before it."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3


@dataclass(frozen=True)
class Identity:
    """A user: the owner of the jobs that they submit. `local` users need no token on the unix socket."""

    name: str
    scope: Scope
    local: bool = False
    token: str | None = None

    def check_change(self, job: JobRecord) -> None:
        """Raise `AccessError` if the user may not change a job: it is not theirs, and they are no admin."""
        own = self.scope >= Scope.SUBMIT and job.owner == self.name
        if not own and self.scope < Scope.ADMIN:
            raise AccessError(
                f"job {job.id} belongs to {job.owner}, and you are {self.name}: ask its owner, or use a "
                "token with the scope admin"
            )


def own_name() -> str:
    """Return the name of the user of this process; the user id if there is no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@dataclass(frozen=True)
class AccessToken:
    """A token without its secret. Times are in seconds since 1970."""

    id: str
    name: str
    scope: Scope
    expires: float | None
    last_used: float | None


class Tokens(JobStore):
    """The tokens in the database of a service. Only the SHA-256 of a secret is stored."""

    def create(self, name: str, scope: Scope, expires: float | None = None) -> tuple[AccessToken, str]:
        """Store a new token; return it and its secret, which cannot be read again. Delete expired tokens.

        Raises `InputError` if the name of its owner is empty, longer than 64 characters, or cannot be
        printed.
        """
        if not 0 < len(name) <= 64 or not name.isprintable():
            raise InputError(f"the name of a token must be 1 to 64 printable characters, not {name!r}")
        number = secrets.token_hex(4)
        secret = f"{PREFIX}_{number}_{secrets.token_urlsafe(32)}"
        with self.together() as db:
            db.execute("DELETE FROM tokens WHERE expires < ?", (self._clock(),))
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, NULL)",
                (number, name, _digest(secret), scope.name.lower(), expires),
            )
        return AccessToken(number, name, scope, expires, None), secret

    def open_session(self) -> str:
        """Return the secret of a new token of the user of the server, for a browser."""
        return self.create(own_name(), Scope.ADMIN, self._clock() + SESSION_SECONDS)[1]

    def list(self) -> list[AccessToken]:
        rows = self._read("SELECT id, name, scopes, expires, last_used FROM tokens ORDER BY name, id")
        return [
            AccessToken(number, name, Scope[scope.upper()], *times) for number, name, scope, *times in rows
        ]

    def revoke(self, number: str) -> None:
        """Delete a token. Raises `InputError` if no token has this id."""
        with self.together() as db:
            if not db.execute("DELETE FROM tokens WHERE id = ?", (number,)).rowcount:
                raise InputError(f"there is no token {number}: list the tokens with oocgemm token list")

    def identify(self, secret: str) -> Identity | None:
        """Return the user to whom a secret belongs; None if it is wrong, revoked or expired."""
        prefix, _, rest = secret.partition("_")
        if prefix != PREFIX:
            return None
        # The id finds the row. Only the comparison of the digests depends on the secret.
        found = self._read("SELECT * FROM tokens WHERE id = ?", rest.partition("_")[0])
        stored = found[0]["sha256"] if found else ""
        if not hmac.compare_digest(stored.encode(), _digest(secret).encode()):
            return None
        row, now = found[0], self._clock()
        if row["expires"] is not None and row["expires"] <= now:
            return None
        if row["last_used"] is None or now - row["last_used"] > USE_SECONDS:
            with suppress(DatabaseError), self.together() as db:  # a full disk does not keep readers out
                db.execute("UPDATE tokens SET last_used = ? WHERE id = ?", (now, row["id"]))
        return Identity(row["name"], Scope[row["scopes"].upper()], token=row["id"])

    def is_valid(self, user: Identity) -> bool:
        """Return whether the token of a user has neither been revoked nor expired since they used it."""
        if user.token is None:
            return True
        query = "SELECT 1 FROM tokens WHERE id = ? AND (expires IS NULL OR expires > ?)"
        return bool(self._read(query, user.token, self._clock()))


class LoginCode:
    """The code with which the user of the server signs in in a browser: once, within `LOGIN_SECONDS`.

    `changed` is called with the next code after each use, also after a use that came too late.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed: Callable[[str], None] = lambda code: None
        self._clock, self._lock = clock, threading.Lock()
        self._renew()

    def use(self, code: str) -> bool:
        """Return whether a code is right and in time. A right code is replaced by the next one."""
        with self._lock:
            if not hmac.compare_digest(code.encode(errors="replace"), self.code.encode()):
                return False
            in_time = self._clock() < self._end
            self._renew()
        self.changed(self.code)
        return in_time

    def _renew(self) -> None:
        self.code, self._end = secrets.token_urlsafe(32), self._clock() + LOGIN_SECONDS


def _digest(secret: str) -> str:
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


class RequestGuard:
    """Checks all requests of an application. `local`: they come by the unix socket, from its user."""

    def __init__(self, app: App, tokens: Tokens, hosts: Set[str], *, local: bool) -> None:
        """Guard an application that is reached by the host names `hosts`, with the tokens of a database."""
        self._app, self._tokens, self._hosts, self._local = app, tokens, hosts, local
        self._requests = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
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
        """Return the answer to a request that is refused; else None. Store the sender in `scope`."""
        refused = self._wrong_host(headers) or self._too_many() or _wrong_length(headers)
        if refused is not None:
            return refused
        try:
            user = await self._identify(headers)
        except DatabaseError as error:
            return problem_of(error)
        scope["identity"] = user
        if user is None:
            return _wrong_site(scope, headers) if _is_open(scope) else problem("unauthorized", _UNAUTHORIZED)
        return _wrong_scope(scope, user) or _wrong_site(scope, headers)

    def _wrong_host(self, headers: dict[str, str]) -> Response | None:
        host = headers.get("host", "")
        if _name(host) in self._hosts:
            return None
        return problem(
            "host-refused",
            f"the Host header {host!r} is not one of {', '.join(sorted(self._hosts))}: "
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
            return await run_in_threadpool(self._tokens.identify, secret.strip())
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if cookie is None else await run_in_threadpool(self._tokens.identify, cookie.value)


class _Receiving:
    """Receives a body, limited in size and in time. `complete` is whether the whole body has arrived."""

    def __init__(self, receive: Receive, length: int | None) -> None:
        self._receive, self._length, self._size, self.complete = receive, length, 0, length == 0
        self._end = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self.complete:  # what may still come is an empty message, or that the client has gone
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
    """Sends an answer. Adds the headers that all answers have, except those that the answer has already.

    Some clients read no answer before they have sent the whole body, so the rest of the body is received
    first. If the body exceeds the limits, the connection is closed. Otherwise a client could keep it open by
    sending for ever.
    """

    def __init__(self, send: Send, receiving: _Receiving) -> None:
        self._send, self._receiving = send, receiving

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._receiving.drain()
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            more = HEADERS if self._receiving.complete else {**HEADERS, "connection": "close"}
            added = [(name.encode(), value.encode()) for name, value in more.items()]
            headers += [each for each in added if each[0] not in present]
            message = {**message, "headers": headers}
        await self._send(message)


def _length(headers: dict[str, str]) -> int | None:
    """Return the length of the body that the headers state; None if they state none."""
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
