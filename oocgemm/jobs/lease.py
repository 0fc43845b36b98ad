"""The lease on a result in an object store: only its holder may write C and the journal.

The lease is an object, ``.oocgemm/lock`` below C. It contains the holder, an epoch (a number that grows with
each holder), and a number that the holder changes every `BEAT_SECONDS`. Each change is a conditional PUT: it
succeeds only if the object is still the one that the writer saw last. Of two processes that take the lease at
once, one fails.

A lease whose holder has ended is taken over. If the holder ran on this machine, the system says whether it is
alive. Otherwise the lease counts as abandoned if it does not change for `LEASE_SECONDS`. Clocks of different
machines are never compared.

A holder that was suspended may come back after another process has taken the lease. It then finds that its
lease was not renewed for `LEASE_SECONDS / 2`, and writes nothing more. Its next conditional PUT would fail in
any case. A write that was in flight when it was suspended is found when the other process completes C
(`ObjectMatrix.set_finished`).
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores.base import ChangedError, RemoteFolder
from oocgemm.system.threads import start

LOCK = "lock"
# Seconds between renewals, and after which a lease that is not renewed counts as abandoned.
BEAT_SECONDS, LEASE_SECONDS = 10.0, 60.0
# Seconds between looks at a lease whose holder may have ended.
LOOK_SECONDS = 2.0

logger = logging.getLogger("oocgemm")
# The versions of leases that were found to be abandoned, so that no process waits for them twice.
_abandoned: set[str] = set()


def owner(folder: RemoteFolder) -> str | None:
    """Return which process holds the lease in a folder, as text; None if none does.

    This can take `LEASE_SECONDS` if the last holder ran on another machine and was killed.
    """
    found = folder.get(LOCK)
    if found is None:
        return None
    state, version = _parsed(found[0]), json.dumps(found[1])
    if not state.get("held") or version in _abandoned:
        return None
    holder = str(state.get("owner", "an unknown process"))
    alive = _is_alive(state.get("process"))
    if alive is None:
        logger.info("waiting up to %g s to see whether %s still writes C", LEASE_SECONDS, holder)
        alive = _changes(folder, found[0])
    if alive:
        return holder
    _abandoned.add(version)
    return None


class Lease:
    """The lease of this process on the result whose journal is in a folder. A thread renews it.

    Raises `InputError` if another process holds it, or if the store does not support conditional PUTs.
    """

    def __init__(self, folder: RemoteFolder) -> None:
        holder = owner(folder)
        if holder is not None:
            raise InputError(busy(folder, holder))
        found = folder.get(LOCK)
        before = _parsed(found[0]) if found is not None else {}
        self._folder = folder
        self.epoch = int(before.get("epoch", 0)) + 1
        self._lost: str | None = None
        self._beats = 0
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        try:
            self._version = folder.replace(LOCK, self._state(held=True), None if found is None else found[1])
        except ChangedError:
            raise InputError(busy(folder, "a process that has just started")) from None
        self._renewed = _now()
        self._thread = threading.Thread(target=self._renew, name="oocgemm-lease")
        try:
            self._check_conditions()
            start(self._thread)
        except BaseException:
            self._free()
            raise

    def _check_conditions(self) -> None:
        """Raise `InputError` if the store ignores the condition of a PUT."""
        with suppress(ChangedError):
            self._folder.replace(LOCK, self._state(held=False), None)
            raise InputError(
                f"C: the store of {self._folder} ignores the conditions of PUT requests (If-None-Match), so "
                "a second run on the same C could not be refused: write C to another store, or open it by "
                "zarr and pass the array"
            )

    def check(self) -> None:
        """Raise `ExecutionError` if this process may no longer write C."""
        if self._lost is None and _now() - self._renewed > LEASE_SECONDS / 2:
            self._lost = f"was not renewed for {LEASE_SECONDS / 2:g} s"
        if self._lost is not None:
            raise ExecutionError(
                f"the lease on C in {self._folder} {self._lost}, so another run may write C: continue with "
                "--resume (resume=True)"
            )

    def release(self) -> None:
        """Stop the thread, and let other processes take the lease at once."""
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            self._free()

    def _free(self) -> None:
        with suppress(OSError):  # the lease is then found to be abandoned when this process has ended
            self._folder.replace(LOCK, self._state(held=False), self._version)

    def confirm(self) -> None:
        """Renew the lease now. Raises `ExecutionError` if this process may no longer write C."""
        with self._renewing:
            started = _now()
            try:
                self._version = self._folder.replace(LOCK, self._state(held=True), self._version)
                self._renewed = started
            except ChangedError:
                self._lost = "was taken by another process"
        self.check()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self._lost is None:
            try:
                self.confirm()
            except Exception as error:  # the next renewal may succeed
                logger.warning("the lease on C could not be renewed: %s", error)

    def _state(self, *, held: bool) -> bytes:
        """Return the content of the object, which is unique."""
        self._beats += 1
        return json.dumps(
            {
                "epoch": self.epoch,
                "held": held,
                "owner": f"process {os.getpid()} on {socket.gethostname()}",
                "process": _identity(os.getpid()),
                "beat": self._beats,
                "nonce": uuid.uuid4().hex,
            }
        ).encode()


def busy(folder: RemoteFolder, holder: str) -> str:
    """Return the error message for a C that another run is writing. `holder` is the process of that run."""
    return f"another run is writing C ({holder}, which holds {folder}/{LOCK}): wait for it, or stop it"


def _now() -> float:
    """Return seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    return {}


def _changes(folder: RemoteFolder, content: bytes) -> bool:
    """Return whether the lease changes within `LEASE_SECONDS`."""
    until = _now() + LEASE_SECONDS
    while _now() < until:
        time.sleep(LOOK_SECONDS)
        found = folder.get(LOCK)
        if found is None or found[0] != content:
            return found is not None and bool(_parsed(found[0]).get("held"))
    return False


def _identity(pid: int) -> list[str] | None:
    """Return what identifies a process of this machine: boot, PID namespace, PID and start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
        # The name of the command, in parentheses, may contain spaces. The start time is field 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return [boot, names, str(pid), fields[19]]


def _is_alive(identity: Any) -> bool | None:
    """Return whether a process is alive; None if it is not known, since it ran on another machine."""
    here = _identity(os.getpid())
    if here is None or not isinstance(identity, list) or len(identity) != 4 or identity[:2] != here[:2]:
        return None
    return identity == _identity(int(identity[2])) and not _is_zombie(int(identity[2]))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
