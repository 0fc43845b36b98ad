"""The server's side of workers: it starts them, hands jobs to them, and keeps idle ones for the next job.

It also finds workers that an earlier server has started, by the files of a job (`job_worker`). At most one
worker per device waits for a job, so that the next job on the device starts at once. What it keeps is `KEPT`,
beside the CUDA context. It ends after `KEEP` seconds, and at once if a job elsewhere needs that memory. A
worker that waits has no state of a job: it may die at any time, and no job is affected.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocgemm.service.backfill import Limits, Need, Running
from oocgemm.service.confinement import Confinement, environment
from oocgemm.service.job_planner import needs_before
from oocgemm.service.job_worker import FILES, FLOCK, IDLE, LOCK, LOG, OWNER, RESULT, read_json, start_of

# Seconds for which a worker waits for a job.
KEEP = 300.0
# What a worker on a GPU keeps between jobs, at most: `oocgemm.release` describes it. It keeps a sixteenth of
# the device memory, and no GPU has more than 192 GiB.
KEPT = Need(device=12 << 30, host=(128 + 416) << 20)


@dataclass(eq=False)
class Process:
    """A worker, with the job that it was given last.

    Attributes:
        pid: its number.
        handle: its pidfd.
        channel: the socket to it; None if an earlier server has started it.
        folder: its own folder; None if an earlier server has started it.
        jobs: how many jobs it was given by this server.
        idle: whether it has said that its job has ended and that it waits for another one.
        code: its exit status, or minus the number of the signal that killed it. It is None while the process
            is alive, and if an earlier server has started it.
    """

    pid: int
    handle: int
    channel: socket.socket | None = None
    folder: Path | None = None
    jobs: int = 0
    idle: bool = False
    code: int | None = None

    @property
    def started(self) -> bool:
        """Whether this server has started it."""
        return self.folder is not None

    @property
    def dead(self) -> bool:
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

    @property
    def ended(self) -> bool:
        """Whether its job has ended: it has said so, or the process has ended."""
        while self.channel is not None:
            try:
                message = self.channel.recv(64)
            except BlockingIOError:
                break
            except ConnectionError:
                message = b""
            if message:
                self.idle = message == IDLE
            else:
                self.dismiss()
        return self.idle or self.dead

    @property
    def ready(self) -> bool:
        """Whether it can be given a job."""
        return self.ended and self.idle and not self.dead and self.channel is not None

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when there is news of the process."""
        return [self.handle] if self.channel is None else [self.handle, self.channel.fileno()]

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signum)

    def dismiss(self) -> None:
        """Let the process end when its job has ended."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        """Forget the process. It ends when its job has ended."""
        self.dismiss()
        os.close(self.handle)


def spawn(workers: Path, log: Path) -> Process:
    """Start a worker. It is independent of this process, and ends its job even if this one dies.

    Args:
        workers: in which the worker gets a folder. This folder must exist.
        log: to which the worker appends what it prints before it has a job.
    """
    folder = Path(tempfile.mkdtemp(dir=workers))
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "oocgemm.service.job_worker", str(folder)],
            # Others could replace temporary files in a shared folder by links. The home folder is closed.
            environment(TMPDIR=str(folder), CUPY_CACHE_DIR=f"{folder}/cupy"),
            file_actions=[(os.POSIX_SPAWN_DUP2, its.fileno(), 0)]
            + [(os.POSIX_SPAWN_DUP2, output, descriptor) for descriptor in (1, 2)],
            setsid=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        its.close()
        os.close(output)
    return Process(pid, os.pidfd_open(pid), ours, folder)


def hand(
    process: Process,
    folder: Path,
    attempt: int,
    spec: dict[str, Any],
    device: int,
    confine: Confinement | None = None,
) -> None:
    """Give an attempt of a job to an idle or a new worker. Raises `OSError` if the worker has ended.

    Args:
        process: the worker.
        folder: the folder of the job.
        attempt: the number of the attempt.
        spec: what to compute (`job_planner`).
        device: the number of the device.
        confine: the folders that the worker may use, the same for all its jobs; None if it is not confined.
    """
    assert process.channel is not None
    assert process.folder is not None
    _prepare(folder, attempt, spec)
    for name in FILES:
        os.link(folder / name, process.folder / name)
    order = {"attempt": attempt, "spec": spec, "device": device, "confine": confine}
    process.channel.send(json.dumps(order).encode())
    process.jobs += 1
    process.idle = False


def _prepare(folder: Path, attempt: int, spec: dict[str, Any]) -> None:
    """Make the files of a job, and write the number of the attempt. What an attempt has left is kept."""
    for name in FILES:
        os.close(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    if needs_before(spec["options"]):
        for made in (folder, folder.parent):  # so that the files are there after a power failure
            _make_durable(made)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(lock, b"%020d" % attempt, 0)
    finally:
        os.close(lock)


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(process: Process) -> None:
    """Delete everything in the folder of a worker: the links to the files of its job, and temporary files."""
    assert process.folder is not None
    for path in process.folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def bury(process: Process) -> None:
    """Forget a process that has ended, and delete its folder."""
    process.close()
    if process.folder is not None:
        shutil.rmtree(process.folder, ignore_errors=True)


def remove_folders(workers: Path) -> None:
    """Delete the folders of workers that have ended, or that have not begun."""
    for folder in workers.iterdir():
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


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
    owner = read_json(folder / OWNER)
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
    owner = read_json(folder / OWNER)
    return owner is not None and owner["attempt"] == attempt


def result_of(folder: Path, attempt: int) -> dict[str, Any] | None:
    """Return how the process of an attempt ended: ``exit_code``, ``error`` and figures. None if it died.

    If a process of an earlier attempt has completed the product, its result is returned.
    """
    found = read_json(folder / RESULT)
    if found is None or (found["attempt"] != attempt and found["exit_code"] != 0):
        return None
    return found


class WorkerPool:
    """The idle workers of a server, and those that end."""

    def __init__(
        self,
        folder: Path,
        confine: Confinement | None = None,
        keep: float = KEEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remove what workers of earlier servers have left.

        Args:
            folder: in which each worker has a folder. It is created if it does not exist.
            confine: the folders that jobs may use; None if jobs are not confined.
            keep: seconds for which a worker waits for a job; 0 if each job gets a new worker.
            clock: returns the time in seconds.
        """
        self._folder, self._confine, self._keep, self._clock = folder, confine, keep, clock
        self._idle: dict[int, tuple[Process, Need, float]] = {}  # by device: what it keeps, since when
        self._ending: list[tuple[Process, int, Need]] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_folders(folder)

    @property
    def warm(self) -> frozenset[int]:
        """The devices whose worker waits for a job."""
        return frozenset(self._idle)

    def processes(self) -> list[Process]:
        """Return all workers without a job."""
        return [each[0] for each in (*self._idle.values(), *self._ending)]

    def start(self, folder: Path, attempt: int, spec: dict[str, Any], device: int) -> Process:
        """Start an attempt of a job in the idle worker of a device, or in a new one. See `hand`.

        If the new worker has died before it got its order, it is returned: the attempt has ended.
        """
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if device in self._idle:
            process, kept, _ = self._idle.pop(device)
            try:
                hand(process, folder, attempt, spec, device, self._confine)
                return process
            except OSError:  # it has died
                self._end(process, device, kept)
        process = spawn(self._folder, folder / LOG)
        try:
            with suppress(ConnectionError):  # it has died
                hand(process, folder, attempt, spec, device, self._confine)
        except OSError:
            self._end(process, device, Need())
            raise
        return process

    def rest(self, process: Process, device: int, spec: dict[str, Any], *, reuse: bool) -> None:
        """Take back a worker whose job has ended. It waits for the next job if `reuse`, or it ends."""
        kept = KEPT if spec["options"]["backend"] == "cuda" else Need()
        if process.idle and process.started:
            clear(process)
        if reuse and process.idle and self._keep > 0 and device not in self._idle:
            self._idle[device] = process, kept, self._clock()
        else:
            self._end(process, device, kept)

    def make_room(self, need: Need, device: int, running: Iterable[Running], limits: Limits) -> bool:
        """Return whether a job that fits beside `running` also fits beside the workers without a job.

        If it does not, they are killed, except the one of its device, which the job gets.
        """
        others = [(each, kept) for each, (_, kept, _) in self._idle.items() if each != device]
        others += [(each, kept) for _, each, kept in self._ending]
        if not others:
            return True
        host = need.host + sum(kept.host for _, kept in others)
        memory = need.device + sum(kept.device for each, kept in others if each == device)
        for one in running:
            host += one.need.host
            memory += one.need.device if one.device == device else 0
        if host <= limits.host and memory <= limits.devices.get(device, 0):
            return True
        for each in [each for each in self._idle if each != device]:
            self._end_idle(each)
        return False

    def check(self) -> None:
        """End the workers that have waited too long, and forget those that have ended."""
        for device, (process, _, since) in list(self._idle.items()):
            if not process.ready or self._clock() - since >= self._keep:
                self._end_idle(device)
        for each in [each for each in self._ending if each[0].dead]:
            self._ending.remove(each)
            bury(each[0])

    def close(self) -> None:
        """Let all workers end."""
        for process in self.processes():  # idle ones end since the socket is closed
            process.close()
        self._idle.clear()
        self._ending.clear()

    def _end_idle(self, device: int) -> None:
        process, kept, _ = self._idle.pop(device)
        self._end(process, device, kept)

    def _end(self, process: Process, device: int, kept: Need) -> None:
        process.dismiss()
        process.send(signal.SIGKILL)  # it has no job, and nothing to finish
        self._ending.append((process, device, kept))
