"""Start the processes of jobs, and find those that an earlier server has started."""

import fcntl
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocgemm.service.job import FLOCK, LOCK, LOG, ORDER, OWNER, RESULT, start_of, write_json


@dataclass(eq=False)
class Process:
    """A process of a job. `handle` is its pidfd. `started` is set if this process has started it.

    `code` is its exit status, or minus the number of the signal that killed it. It is None while it is alive,
    and if an earlier server has started it.
    """

    pid: int
    handle: int
    started: bool = False
    code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        # Unlike select(2), poll(2) takes descriptors above 1023: a server may have many connections.
        asking = select.poll()
        asking.register(self.handle, select.POLLIN)
        if not asking.poll(0):
            return False
        if self.started and self.code is None:
            found = os.waitid(os.P_PIDFD, self.handle, os.WEXITED)
            assert found is not None
            self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return True

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signum)

    def close(self) -> None:
        """Forget the process."""
        os.close(self.handle)


# The folders that jobs may "read", and those that they may "write" too: see `confine.paths.confinement`.
Confinement = Mapping[str, Sequence[str]]


def start(
    folder: Path, attempt: int, spec: dict[str, Any], device: int, confine: Confinement | None = None
) -> Process:
    """Start the process of a job's attempt. It is independent of this process, and outlives it.

    Args:
        folder: the folder of the job. It is created if it does not exist.
        attempt: the number of the attempt.
        spec: what to compute (`oocgemm.service.spec`).
        device: the number of the device.
        confine: the folders that the process may use; None if it is not confined.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)
    order = {"attempt": attempt, "spec": spec, "device": device, "confine": confine}
    write_json(folder / ORDER, order)
    command = [sys.executable, "-m", "oocgemm.service.job", str(folder), str(attempt)]
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        nothing = os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0
        output = [(os.POSIX_SPAWN_DUP2, log, descriptor) for descriptor in (1, 2)]
        pid = os.posix_spawn(
            sys.executable, command, os.environ, file_actions=[nothing, *output], setsid=True
        )
    finally:
        os.close(log)
    return Process(pid, os.pidfd_open(pid), started=True)


def is_alive(folder: Path) -> bool:
    """Return whether a process has the lock of a job. The lock is not taken, so no process is disturbed."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    finally:
        os.close(descriptor)
    return bool(struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK)


def attach(folder: Path) -> Process | None:
    """Return the process that has the lock of a job; None if it has not yet said which one it is."""
    owner = _read(folder / OWNER)
    if owner is None:
        return None
    try:
        handle = os.pidfd_open(owner["pid"])
    except ProcessLookupError:
        return None
    if start_of(owner["pid"]) != owner["start"]:  # another process has this pid by now
        os.close(handle)
        return None
    return Process(owner["pid"], handle)


def has_begun(folder: Path, attempt: int) -> bool:
    """Return whether the process of an attempt has taken the lock of its job."""
    owner = _read(folder / OWNER)
    return owner is not None and owner["attempt"] == attempt


def result_of(folder: Path, attempt: int) -> dict[str, Any] | None:
    """Return how the process of an attempt ended: ``exit_code``, ``error`` and figures. None if it died.

    If a process of an earlier attempt has completed the product, its result is returned.
    """
    found = _read(folder / RESULT)
    if found is None or (found["attempt"] != attempt and found["exit_code"] != 0):
        return None
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found
