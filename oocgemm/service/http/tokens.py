"""Tokens, by which users of the TCP socket identify themselves, and sessions of browsers."""

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from oocgemm.errors import InputError
from oocgemm.service.errors import StoreError
from oocgemm.service.http.identity import Identity, Scope, own_name
from oocgemm.service.store import Store

# A secret starts with this, so that scanners of source code recognise it.
PREFIX = "oocgemm"
# The time of the last use of a token is stored to so many seconds.
USE_SECONDS = 60.0
# A session of a browser ends after so many seconds. Beyond so many sessions, the oldest one ends.
SESSION_SECONDS, MAX_SESSIONS = 7 * 86400.0, 100


@dataclass(frozen=True)
class Token:
    """A token without its secret. Times are in seconds since 1970."""

    id: str
    name: str
    scope: Scope
    expires: float | None
    last_used: float | None


class Tokens(Store):
    """The tokens in the database of a service. Only their SHA-256 is stored."""

    def create(self, name: str, scope: Scope, expires: float | None = None) -> tuple[Token, str]:
        """Store a new token; return it and its secret, which cannot be read again.

        Args:
            name: the owner of the jobs that are submitted with it.
            scope: what its holder may do.
            expires: when it ends, in seconds since 1970; None for never.

        Raises:
            InputError: the name is empty, longer than 64 characters, or cannot be printed.
        """
        if not 0 < len(name) <= 64 or not name.isprintable():
            raise InputError(f"the name of a token must be 1 to 64 printable characters, not {name!r}")
        number = secrets.token_hex(4)
        secret = f"{PREFIX}_{number}_{secrets.token_urlsafe(32)}"
        with self._writing() as db:
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, NULL)",
                (number, name, _digest(secret), scope.name.lower(), expires),
            )
        return Token(number, name, scope, expires, None), secret

    def list(self) -> list[Token]:
        """Return all tokens, sorted by name."""
        return [
            Token(row["id"], row["name"], Scope[row["scopes"].upper()], row["expires"], row["last_used"])
            for row in self._read("SELECT * FROM tokens ORDER BY name, id")
        ]

    def revoke(self, number: str) -> None:
        """Delete a token. Raises `InputError` if there is none with this id."""
        with self._writing() as db:
            if not db.execute("DELETE FROM tokens WHERE id = ?", (number,)).rowcount:
                raise InputError(f"there is no token {number}: list the tokens with oocgemm token list")

    def identify(self, secret: str) -> Identity | None:
        """Return who has a secret; None if it is wrong, revoked or has expired."""
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
            with suppress(StoreError), self._writing() as db:  # a full disk does not keep readers out
                db.execute("UPDATE tokens SET last_used = ? WHERE id = ?", (now, row["id"]))
        return Identity(row["name"], Scope[row["scopes"].upper()])


class Sessions:
    """Sessions of browsers. They end with the server.

    The user of the server opens a URL with `code`, which is valid once. The browser gets a cookie for it.
    """

    def __init__(self) -> None:
        self.code = secrets.token_urlsafe(32)
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, float] = OrderedDict()  # by the digest of the cookie

    def log_in(self, code: str) -> str | None:
        """Return the value of a new cookie; None if the code is wrong. A right code is replaced."""
        with self._lock:
            if not hmac.compare_digest(code.encode(errors="replace"), self.code.encode()):
                return None
            self.code = secrets.token_urlsafe(32)
            cookie = secrets.token_urlsafe(32)
            self._ends[_digest(cookie)] = time.monotonic() + SESSION_SECONDS
            while len(self._ends) > MAX_SESSIONS:
                self._ends.popitem(last=False)
            return cookie

    def identify(self, cookie: str) -> Identity | None:
        """Return who has a cookie: the user of the server, or None."""
        # The digest of a guess tells nothing about those that are stored, so a dict is safe.
        end = self._ends.get(_digest(cookie))
        if end is None or end < time.monotonic():
            return None
        return Identity(own_name(), Scope.ADMIN)


def _digest(secret: str) -> str:
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()
