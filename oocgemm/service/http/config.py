"""What `oocgemm serve` was told."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from oocgemm.errors import InputError
from oocgemm.service.confine.paths import Root
from oocgemm.service.workers import KEEP

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a server.

    Attributes:
        state: the state folder. It is created with mode 0700.
        roots: the folders of operands and results, by name.
        socket: the path of the unix socket.
        listen: host and port of the TCP socket; None for none. Port 0 is any free port.
        allow_remote: whether `listen` may be beyond loopback.
        behind_proxy: whether a proxy in front of this server ends TLS.
        certificate, key: PEM files for TLS; None for plain HTTP.
        hosts: further host names that a request may have in its Host header.
        confine: whether jobs are restricted to the roots by Landlock.
        backend: ``auto``, ``cuda`` or ``host``.
        device_memory, host_memory, disk_quota: limits for all running jobs, in bytes or as "8GiB"; None for
            the defaults of `oocgemm.service.limits.limits`.
        share_device: whether several jobs run on a device at a time.
        keep_warm: seconds for which the process of a job is kept for the next one; 0 for no time.
        max_jobs: jobs of one owner that have not ended. More are refused.
    """

    state: Path
    roots: Mapping[str, Root]
    socket: Path
    listen: tuple[str, int] | None = None
    allow_remote: bool = False
    behind_proxy: bool = False
    certificate: Path | None = None
    key: Path | None = None
    hosts: frozenset[str] = field(default=frozenset())
    confine: bool = True
    backend: str = "auto"
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    disk_quota: str | int | None = None
    share_device: bool = False
    keep_warm: float = KEEP
    max_jobs: int = 100_000

    def __post_init__(self) -> None:
        """Raise `InputError` if the configuration is unsafe or incomplete."""
        if not self.roots:
            raise InputError("no root: jobs need a folder, such as --root data=/data:ro --root out=/out:rw")
        state = self.state.resolve()
        for root in self.roots.values():
            if root.folder == state or root.folder in state.parents or state in root.folder.parents:
                raise InputError(
                    f"root {root.name}, {root.folder}, and the state folder {state} contain one another, so "
                    "jobs could change the queue: pass another --root or --state"
                )
        if (self.certificate is None) != (self.key is None):
            raise InputError("TLS needs both --tls-cert and --tls-key")
        if self.listen is None or _is_loopback(self.listen[0]):
            return
        where = f"{self.listen[0]}:{self.listen[1]}"
        if not self.allow_remote:
            raise InputError(
                f"{where} is reachable from other machines: pass --allow-remote, or listen on 127.0.0.1"
            )
        if self.certificate is None and not self.behind_proxy:
            raise InputError(
                f"{where} would receive tokens unencrypted: pass --tls-cert and --tls-key, or --behind-proxy "
                "if a proxy ends TLS"
            )

    @property
    def encrypted(self) -> bool:
        """Whether browsers reach the TCP socket by HTTPS."""
        return self.certificate is not None or self.behind_proxy

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The host names that a request may have in its Host header, without port, in lower case."""
        own = {self.listen[0]} if self.listen is not None else set[str]()
        return frozenset(name.lower() for name in LOOPBACK | self.hosts | own)


def default_state() -> Path:
    """Return the state folder that is used unless another is given."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "oocgemm"


def make_state(folder: Path) -> None:
    """Create a state folder if it does not exist. Raises `InputError` if it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"the state folder {folder} cannot be written ({error.strerror}): pass --state with another one"
        ) from error


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of a text such as ``127.0.0.1:8642`` or ``[::1]:8642``. Raises `InputError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise InputError(f"cannot read {text!r} as an address: write HOST:PORT, such as 127.0.0.1:8642")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
