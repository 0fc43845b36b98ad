"""Where the server listens: a unix socket, or a TCP port with or without TLS."""

import http.client
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from oocgemm.errors import InputError

# Environment variables with the address of the server, and with the token that it asks for.
SERVICE, TOKEN = "OOCGEMM_SERVICE", "OOCGEMM_TOKEN"
# Seconds in which a connection must be established.
CONNECT_SECONDS = 10.0


def default_socket() -> Path:
    """Return the path of the socket on which a server of this user listens by default."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "oocgemm" / "serve.sock"


@dataclass(frozen=True)
class Address:
    """The address of a server.

    Attributes:
        text: the address as the user wrote it, for messages.
        path: the path of a unix socket; None for TCP.
        host, port: where the server listens; None for the default port of the scheme.
        tls: whether the connection is encrypted.
        prefix: the path under which a proxy serves the service, such as ``/gpu``, or "".
    """

    text: str
    path: str | None
    host: str = "localhost"
    port: int | None = None
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, text: str | None) -> "Address":
        """Return the address for a URL, or for the path of a unix socket.

        Args:
            text: such as ``https://gpu1:8642``, ``/run/oocgemm.sock`` or ``unix:/run/oocgemm.sock``. None
                means $OOCGEMM_SERVICE, and else the default socket.

        Raises:
            InputError: it is no such address.
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
        """Return an open connection. Raises `OSError` if there is none."""
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
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
