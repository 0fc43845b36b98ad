"""Tokens, by which users of the TCP socket identify themselves. The cookie of a browser has one, too."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
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
# The code of the URL that the server prints is valid for so many seconds.
LOGIN_SECONDS = 600.0
# A browser is signed in for so many seconds.
SESSION_SECONDS = 7 * 86400.0


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
        """Store a new token; return it and its secret, which cannot be read again. Delete expired ones.

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
            db.execute("DELETE FROM tokens WHERE expires < ?", (self._clock(),))
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, NULL)",
                (number, name, _digest(secret), scope.name.lower(), expires),
            )
        return Token(number, name, scope, expires, None), secret

    def open_session(self) -> str:
        """Return the secret of a new token of the user of the server, for a browser."""
        return self.create(own_name(), Scope.ADMIN, self._clock() + SESSION_SECONDS)[1]

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
        return Identity(row["name"], Scope[row["scopes"].upper()], token=row["id"])

    def is_valid(self, user: Identity) -> bool:
        """Return whether the token of a user has neither been revoked nor expired since they used it."""
        if user.token is None:
            return True
        query = "SELECT 1 FROM tokens WHERE id = ? AND (expires IS NULL OR expires > ?)"
        return bool(self._read(query, user.token, self._clock()))


class LoginCode:
    """The code with which the user of the server signs in in a browser.

    It is valid once, for `LOGIN_SECONDS`.
    `changed` is called with the next code after each use, also after one that came too late.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed: Callable[[str], None] = lambda code: None
        self._clock, self._lock = clock, threading.Lock()
        self._renew()

    def use(self, code: str) -> bool:
        """Return whether a code is right. It is replaced then."""
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
