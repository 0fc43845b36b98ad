"""The loop of the service: it starts jobs on workers, notices how they end, and does what users request.

The dispatcher may die at any point. The order of its actions lets the next dispatcher go on:

1. The dispatcher commits ``starting``, with the number of the attempt.
2. It writes this number into the lock file of the job, and sends the job to a worker (`job_worker`), new or
   idle. The worker takes the lock. If the dispatcher dies before the worker has the lock, the next dispatcher
   queues the job again. The late worker finds another number in the lock file, or another process with the
   lock, and ends.
3. The worker writes the result, and frees the lock. Then it says that it is idle, or it ends. The dispatcher
   commits the state that follows from the result. Without a result, the job is queued again.
4. Only then does the worker get another job. So a signal that is meant for a job never meets another one.

A worker has one job at a time, and holds the lock of the job exactly while it computes the job. The next
dispatcher need not know how many jobs a worker had before: it asks which process has the lock of a job, and
waits until that process ends. Workers end after their job if their dispatcher has died, since the socket
between them is closed.

*Workers.* The pool starts workers, hands jobs to them, and keeps idle ones for the next job. By the files of
a job (`job_worker`), the pool also finds workers that an earlier server has started. At most one worker per
device waits for a job, so that the next job on the device starts at once. A waiting worker keeps the memory
`KEPT`, and its CUDA context. It ends after `KEEP` seconds, and at once if a job on another device needs the
memory. A waiting worker has no state of a job: it may die at any time, and no job is affected.
"""

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.service.backfill import Limits, Need, Running, Waiting, decide
from oocgemm.service.confinement import Confinement, environment
from oocgemm.service.job_planner import needs_before
from oocgemm.service.job_store import JobRecord, JobStore
from oocgemm.service.job_worker import (
    BUSY,
    FILES,
    FLOCK,
    IDLE,
    LOCK,
    LOG,
    OWNER,
    RESULT,
    STOPPED,
    read_json,
)
from oocgemm.service.protocol import ServiceError, StaleError, State
from oocgemm.system.threads import process_start
from oocgemm.values import dataclass

# Seconds for which a worker waits for a job.
KEEP = 300.0
# The maximum memory that a worker on a GPU keeps between jobs, as `oocgemm.release` describes. It keeps a
# sixteenth of the device memory, and no GPU has more than 192 GiB.
KEPT = Need(device=12 << 30, host=(128 + 416) << 20)


@dataclass(eq=False)
class Process:
    """A worker, with the job that it was given last.

    Attributes:
        pid, handle: the process id of the worker, and its pidfd.
        channel, folder: the socket to the worker, and its folder; None if an earlier server has started it.
        jobs: how many jobs this server has given to the worker.
        idle: whether it has said that its job has ended and that it waits for another one.
        code: its exit status, or minus the signal that killed it; None if it is alive or unknown.
        device: the number of its device.
        kept: the memory that it occupies without a job.
        since: since when it has had no job.
    """

    pid: int
    handle: int
    channel: socket.socket | None = None
    folder: Path | None = None
    jobs: int = 0
    idle: bool = False
    code: int | None = None
    device: int = 0
    kept: Need = field(default_factory=Need)
    since: float = 0.0

    @property
    def dead(self) -> bool:
        # Unlike select(2), poll(2) takes descriptors above 1023: a server may have many connections.
        asking = select.poll()
        asking.register(self.handle, select.POLLIN)
        if not asking.poll(0):
            return False
        if self.folder is not None and self.code is None:
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
        return self.ended and self.idle and not self.dead and self.channel is not None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that become readable when there is news of the process."""
        return [self.handle] if self.channel is None else [self.handle, self.channel.fileno()]

    def send(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signum)

    def dismiss(self) -> None:
        """Let the process end when its job has ended."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        """Forget the process, which ends when its job has ended."""
        self.dismiss()
        os.close(self.handle)


def spawn(workers: Path, log: Path) -> Process:
    """Start a worker, and return its process. The worker gets a folder in `workers`.

    It finishes its job even if this process dies. What it prints before it has a job is appended to `log`.
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
    """Give an attempt of a job to an idle or a new worker. Raises `OSError` if the worker has ended."""
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
    """Make the files of a job, and write the number of the attempt. Files of earlier attempts are kept."""
    for name in FILES:
        os.close(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    if needs_before(spec):
        for made in (folder, folder.parent):  # so that the files are there after a power failure
            descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(lock, b"%020d" % attempt, 0)
    finally:
        os.close(lock)


def clear(process: Process) -> None:
    """Empty the folder of a worker: delete the links to the files of its job, and temporary files."""
    assert process.folder is not None
    for path in process.folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
    """Return the process that has the lock of a job; None if it has not yet written its id."""
    owner = read_json(folder / OWNER)
    if owner is None:
        return None
    try:
        handle = os.pidfd_open(owner["pid"])
    except ProcessLookupError:
        return None
    if process_start(owner["pid"], ended=True) != owner["start"]:  # another process has this pid by now
        os.close(handle)
        return None
    return Process(owner["pid"], handle)


def has_begun(folder: Path, attempt: int) -> bool:
    """Return whether the process of an attempt has taken the lock of its job."""
    owner = read_json(folder / OWNER)
    return owner is not None and owner["attempt"] == attempt


def result_of(folder: Path, attempt: int) -> dict[str, Any] | None:
    """Return the result of an attempt, or of an earlier one that succeeded; None if the process died."""
    found = read_json(folder / RESULT)
    if found is None or (found["attempt"] != attempt and found["exit_code"] != 0):
        return None
    return found


class WorkerPool:
    """The workers of a server that have no job: those that are idle, and those that are about to end."""

    def __init__(self, folder: Path, confine: Confinement | None = None, keep: float = KEEP) -> None:
        """Remove the folders that workers of earlier servers have left.

        An idle worker waits for `keep` seconds for a job. If `keep` is 0, each job gets a new worker.
        """
        self._folder, self._confine, self._keep = folder, confine, keep
        self._clock = time.monotonic
        self._idle: dict[int, Process] = {}  # by device
        self._ending: list[Process] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_folders(folder)

    @property
    def warm(self) -> frozenset[int]:
        """The devices whose worker waits for a job."""
        return frozenset(self._idle)

    def processes(self) -> list[Process]:
        """Return all workers without a job."""
        return [*self._idle.values(), *self._ending]

    def start(self, folder: Path, attempt: int, spec: dict[str, Any], device: int) -> Process:
        """Start an attempt in the idle or a new worker of a device. Return the worker; it may have died."""
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if device in self._idle:
            process = self._idle.pop(device)
            try:
                hand(process, folder, attempt, spec, device, self._confine)
                return process
            except OSError:  # the idle worker has died
                self._end(process)
        process = spawn(self._folder, folder / LOG)
        try:
            with suppress(ConnectionError):  # the new worker has died
                hand(process, folder, attempt, spec, device, self._confine)
        except OSError:
            process.device = device
            self._end(process)
            raise
        return process

    def rest(self, process: Process, device: int, spec: dict[str, Any], *, reuse: bool) -> None:
        """Take back a worker whose job has ended. It waits for the next job if `reuse`, or it ends."""
        process.device, process.since = device, self._clock()
        process.kept = KEPT if spec["options"]["backend"] == "cuda" else Need()
        if process.idle and process.folder is not None:
            clear(process)
        if reuse and process.idle and self._keep > 0 and device not in self._idle:
            self._idle[device] = process
        else:
            self._end(process)

    def make_room(self, need: Need, device: int, running: Iterable[Running], limits: Limits) -> bool:
        """Return whether a job that fits beside `running` also fits beside the workers without a job.

        If it does not fit, these workers are killed, except the one on its device, which the job gets.
        """
        idle = [each for each in self._idle.values() if each.device != device]
        needs = [(each.device, each.kept) for each in (*idle, *self._ending)]
        if not needs:
            return True
        needs += [(device, need), *((one.device, one.need) for one in running)]
        memory = sum(each.device for where, each in needs if where == device)
        if sum(each.host for _, each in needs) <= limits.host and memory <= limits.devices.get(device, 0):
            return True
        for each in idle:
            self._end(self._idle.pop(each.device))
        return False

    def check(self) -> None:
        """End the workers that have waited too long, and forget those that have ended."""
        for each in list(self._idle.values()):
            if not each.ready or self._clock() - each.since >= self._keep:
                self._end(self._idle.pop(each.device))
        for each in [each for each in self._ending if each.dead]:
            self._ending.remove(each)
            each.close()
            if each.folder is not None:
                shutil.rmtree(each.folder, ignore_errors=True)

    def close(self) -> None:
        for process in self.processes():  # closing the socket makes idle workers end
            process.close()
        self._idle.clear()
        self._ending.clear()

    def _end(self, process: Process) -> None:
        process.dismiss()
        process.send(signal.SIGKILL)  # the worker has no job, and nothing to finish
        self._ending.append(process)


# INTERVAL: seconds between two passes of the loop if nothing happens. Deadlines and delays of retries are
# noticed at most this late. GRACE: seconds until a process that was asked to end is killed.
INTERVAL, GRACE = 0.1, 30.0
# Seconds from a failure to the next attempt: RETRY * RETRY_FACTOR ** (number of failures - 1).
RETRY, RETRY_FACTOR = 5.0, 4.0
# Exit statuses with which a job would end in every attempt: wrong input, and budgets that are too small.
HOPELESS = frozenset({2, 3})

logger = logging.getLogger("oocgemm")


class Dispatcher:
    """Runs the jobs of a store. `step` is one pass of the loop; `run` repeats it.

    The dispatcher starts no jobs while `draining`. `starts` has the predicted starts of queued jobs, in
    seconds since 1970.
    """

    def __init__(
        self,
        store: JobStore,
        folder: Path,
        limits: Callable[[], Limits],
        confine: Confinement | None = None,
        keep: float = KEEP,
    ) -> None:
        """Take over the state folder of a store. Raises `InputError` if another server uses it."""
        self.draining = False
        self.starts: dict[str, float] = {}
        self._store, self._folder, self._limits = store, folder, limits
        self._processes: dict[str, Process] = {}
        self._asked: dict[str, float] = {}  # jobs whose process was asked to end, and when
        self._decided: tuple[Any, ...] = ()
        self._lock = _take(folder / "server.lock")
        self.workers = WorkerPool(folder / "workers", confine, keep)
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = 0  # the thread that runs the loop
        store.observers.append(self._wake)

    def close(self) -> None:
        """Give the state folder to another server. Workers go on until their jobs have ended."""
        self._store.observers.remove(self._wake)
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self.workers.close()
        os.close(self._woken)
        os.close(self._lock)

    def run(self, stop: threading.Event) -> None:
        """Repeat `step` until `stop` is set. Errors are logged, and the loop goes on."""
        self._thread = threading.get_ident()
        while not stop.is_set():
            try:
                self.step()
            except (ServiceError, OSError) as error:  # the database failed, or a disk is full
                logger.error("%s", error)
                stop.wait(1.0)
            except Exception:  # a defect that concerns one job must not keep other jobs from starting
                logger.exception("a pass of the dispatcher failed")
                stop.wait(1.0)
            self.wait(INTERVAL)

    def wait(self, seconds: float) -> None:
        """Wait until there is news of a process, or until another thread has changed a job."""
        news = select.poll()
        news.register(self._woken, select.POLLIN)
        for process in (*self._processes.values(), *self.workers.processes()):
            for descriptor in process.descriptors:
                news.register(descriptor, select.POLLIN)
        news.poll(seconds * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def _wake(self) -> None:
        if threading.get_ident() != self._thread:
            os.eventfd_write(self._woken, 1)

    def folder_of(self, job: str) -> Path:
        return self._folder / "jobs" / job

    def step(self) -> None:
        """Commit the changes of state since the last pass, and start the jobs that can start."""
        for job in self._store.active():
            with suppress(StaleError):  # a user has changed the state meanwhile: the next pass sees that
                self._look_after(job)
        self.workers.check()
        self._check_deadlines()
        self._start_jobs()

    def predict(self, job: Waiting) -> float | None:
        """Return when a job would start if it were submitted now, in seconds since 1970; None if unknown."""
        now = time.time()
        running = [_running(one, now) for one in self._store.active()]
        waiting = [one for one, _ in self._store.waiting()] + [job]
        decisions = decide(waiting, running, self._limits(), self._store.usage(), now, draining=self.draining)
        (found,) = (one for one in decisions if one.id == job.id)
        return now if found.device is not None else found.start

    # Processes

    def _look_after(self, job: JobRecord) -> None:
        """Notice that the process of a job has begun or ended, and ask it to end if a user wants that."""
        folder = self.folder_of(job.id)
        process = self._processes.get(job.id)
        if process is not None and process.ended and is_alive(folder):
            # An earlier attempt's process has the lock, so this one has ended at once.
            self._forget(job)
            process = None
        if process is None and is_alive(folder):
            process = attach(folder)
            if process is None:
                return  # the process has just taken the lock
            self._processes[job.id] = process
        if process is None or process.ended:
            # A worker may die between two jobs. Such a death is no failure of the second job.
            known = process is not None and (process.jobs < 2 or has_begun(folder, job.attempt))
            code = process.code if process is not None else None
            self._finish(job, result_of(folder, job.attempt), code, known=known)
            self._forget(job)
        elif job.state is State.STARTING:
            if has_begun(folder, job.attempt) or process.folder is None:
                self._store.move(job, State.RUNNING, started=time.time())
        elif job.state in (State.CANCELLING, State.PAUSING):
            self._end(job, process)

    def _end(self, job: JobRecord, process: Process) -> None:
        """Ask a process to end; kill it if it does not end within `GRACE` seconds."""
        now = time.monotonic()
        asked = self._asked.get(job.id)
        if asked is None:
            self._asked[job.id] = now
            process.send(signal.SIGTERM)
        elif now - asked > GRACE:
            process.send(signal.SIGKILL)

    def _forget(self, job: JobRecord) -> None:
        """Take the process of a job back. If it was sent a signal for this job, it gets no other job."""
        asked = self._asked.pop(job.id, None)
        process = self._processes.pop(job.id, None)
        if process is not None:
            self.workers.rest(process, job.device or 0, job.spec, reuse=asked is None)

    def _finish(
        self, job: JobRecord, result: dict[str, Any] | None, code: int | None, *, known: bool
    ) -> None:
        """Commit the state that follows when the process of a job has ended with an exit status.

        `known` is whether this dispatcher has seen the process alive.
        """
        with self._store.together():
            if job.state is State.STARTING and has_begun(self.folder_of(job.id), job.attempt):
                # The process has begun and ended the job since the last call of `_look_after`.
                own = result if result is not None and result["attempt"] == job.attempt else {}
                started = time.time() - own.get("seconds", 0.0)
                job = self._store.move(job, State.RUNNING, started=started)
            if job.started is not None:
                self._store.charge(job.owner, max(0.0, time.time() - job.started))
            status = result["exit_code"] if result is not None else code
            failed = {"exit_code": status, "error": _why(result, code)}
            counted = failed | {"failures": job.failures + 1}
            if result is not None and status == 0:
                to, values = State.SUCCEEDED, {"exit_code": 0, "result": result, "error": None}
            elif job.state is State.CANCELLING:
                to, values = State.CANCELLED, {"exit_code": status, "error": job.error}
            elif status in HOPELESS:
                to, values = State.FAILED, failed
            elif job.state is State.PAUSING:
                to, values = State.PAUSED, {}
            elif status in (BUSY, STOPPED) or not known:
                # The job did not fail on its own: the machine was rebooted, or someone stopped the process.
                to, values = State.QUEUED, {"started": None}
            elif job.failures + 1 >= job.max_attempts:
                to, values = State.FAILED, counted
            else:
                at = time.time() + RETRY * RETRY_FACTOR**job.failures
                to, values = State.QUEUED, counted | {"not_before": at, "started": None}
            new = [] if result is None else result.get("warnings", [])
            self._store.move(job, to, **values, warnings=list(dict.fromkeys([*job.warnings, *new])))

    def _check_deadlines(self) -> None:
        now = time.time()
        for job in self._store.overdue(now):
            with suppress(StaleError):
                if job.state in (State.QUEUED, State.STARTING, State.RUNNING):
                    to = State.FAILED if job.state is State.QUEUED else State.CANCELLING
                    self._store.move(job, to, error="the deadline has passed")

    # Starting

    def _start_jobs(self) -> None:
        """Start the jobs that fit, and store why the others wait."""
        limits, now = self._limits(), time.time()
        running = [_running(job, now) for job in self._store.active()]
        waiting = self._store.waiting()
        # If no job could start in the last pass, none can start until the state changes.
        state = (limits, [(one.id, one.device) for one in running], waiting, self.draining)
        if state == self._decided or not waiting:
            return
        decisions = decide(
            [job for job, _ in waiting], running, limits, self._store.usage(), now, draining=self.draining
        )
        stored = {job.id: reason for job, reason in waiting}
        changed = {
            one.id: one.reason for one in decisions if one.device is None and one.reason != stored[one.id]
        }
        self.starts = {one.id: one.start for one in decisions if one.device is None and one.start is not None}
        starting = [(one.id, one.device) for one in decisions if one.device is not None]
        for name, device in starting:
            job = self._store.get(name)
            if not self.workers.make_room(job.need, device, running, limits):
                break  # no job starts until workers have ended
            with suppress(StaleError):
                self._start(job, device)
                running.append(_running(job, now, device))
        if changed:  # committed after the starts, so that these do not wait for this commit
            self._store.explain(changed)
        self._decided = () if starting else state

    def _start(self, job: JobRecord, device: int) -> None:
        if job.state is not State.QUEUED:
            return
        job = self._store.move(job, State.STARTING, attempt=job.attempt + 1, device=device, reason=None)
        try:
            process = self.workers.start(self.folder_of(job.id), job.attempt, job.spec, device)
        except OSError as error:
            self._store.move(job, State.FAILED, error=f"its process cannot be started: {error}")
            return
        self._processes[job.id] = process
        logger.info("job %s: attempt %d on device %d", job.id, job.attempt, device)


def _running(job: JobRecord, now: float, device: int | None = None) -> Running:
    since = now if job.started is None else min(job.started, now)
    place = device if device is not None else job.device or 0
    return Running(job.id, job.owner, place, job.need, since + job.predicted_s)


def _why(result: dict[str, Any] | None, code: int | None) -> str:
    if result is not None:
        return str(result["error"])
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return "its process died" if code is None else f"its process ended with exit status {code}"


def _take(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise InputError(
            f"another server, process {pid}, uses the state folder {path.parent}: end it, or give another "
            "folder"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock
