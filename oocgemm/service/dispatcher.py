"""The loop of the service: it starts jobs, notices how they end, and does what users request.

The dispatcher may die at any point. What it does is ordered so that the next one can go on:

1. It commits ``starting``, with the number of the attempt.
2. It writes this number into the lock file of the job, and sends the job to a worker (`job_worker`), new or
   idle. The worker takes the lock. If the dispatcher dies before the worker has the lock, the next dispatcher
   queues the job again. The late worker finds another number in the lock file, or another process with the
   lock, and ends.
3. The worker writes the result, and frees the lock. Then it says that it is idle, or it ends. The dispatcher
   commits the state that follows from the result. Without a result, the job is queued again.
4. Only then does the worker get another job. So a signal that is meant for a job never meets another one.

A worker has one job at a time, and holds its lock exactly while it computes it. To the next dispatcher, it is
no matter how many jobs a worker had before: it asks who has the lock of a job, and waits for the end of that
process. Workers end after their job if their dispatcher has died, since the socket between them is closed.
"""

import fcntl
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.errors import InputError
from oocgemm.service import worker_pool
from oocgemm.service.backfill import Limits, Running, Waiting, decide
from oocgemm.service.confinement import Confinement
from oocgemm.service.job_store import JobRecord, JobStore
from oocgemm.service.job_worker import BUSY, STOPPED
from oocgemm.service.protocol import ServiceError, StaleError, State
from oocgemm.service.worker_pool import KEEP, WorkerPool

# Seconds between two passes of the loop if nothing happens: deadlines and delays of retries are seen so late.
# Seconds until a process that was asked to end is killed.
INTERVAL, GRACE = 0.1, 30.0
# Seconds from a failure to the next attempt: RETRY * RETRY_FACTOR ** (number of failures - 1).
RETRY, RETRY_FACTOR = 5.0, 4.0
# Exit statuses with which a job would end in every attempt: wrong input, and budgets that are too small.
HOPELESS = frozenset({2, 3})

logger = logging.getLogger("oocgemm")


class Dispatcher:
    """Runs the jobs of a store. `step` is one pass of the loop; `run` repeats it.

    `draining` is set to start no more jobs. `starts` maps queued jobs to their predicted starts, in seconds
    since 1970.
    """

    def __init__(
        self,
        store: JobStore,
        folder: Path,
        limits: Callable[[], Limits],
        clock: Callable[[], float] = time.time,
        confine: Confinement | None = None,
        keep: float = KEEP,
    ) -> None:
        """Take over a state folder.

        Args:
            store: the jobs.
            folder: the state folder. Each job has a folder in it.
            limits: returns what all running jobs together may occupy.
            clock: returns the time in seconds since 1970.
            confine: the folders that jobs may use; None if jobs are not confined.
            keep: seconds for which an idle worker is kept for the next job.

        Raises:
            InputError: another server uses the state folder.
        """
        self.draining = False
        self.starts: dict[str, float] = {}
        self._store, self._folder, self._limits, self._clock = store, folder, limits, clock
        self._processes: dict[str, worker_pool.Process] = {}
        self._asked: dict[str, tuple[State, float]] = {}  # jobs whose process was asked to end, and when
        self._decided: tuple[Any, ...] = ()
        self._lock = _take(folder / "server.lock")
        self.workers = WorkerPool(folder / "workers", confine, keep)
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = 0  # that runs the loop
        store.observers.append(self._wake)

    def close(self) -> None:
        """Give the state folder to another server. WorkerPool go on until their jobs have ended."""
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
            except (ServiceError, OSError) as error:  # of the database, or a disk is full
                logger.error("%s", error)
                stop.wait(1.0)
            except Exception:  # a defect with one job must not keep the other ones from starting
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
        """Return the folder of a job."""
        return self._folder / "jobs" / job

    def step(self) -> None:
        """Notice what has happened, and start the jobs that can start."""
        for job in self._store.active():
            with suppress(StaleError):  # a user has changed the state meanwhile: see the next pass
                self._look_after(job)
        self.workers.check()
        self._check_deadlines()
        self._start_jobs()

    def predict(self, job: Waiting) -> float | None:
        """Return when a job would start if it was submitted now, in seconds since 1970; None if unknown."""
        now = self._clock()
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
        if process is not None and process.ended and worker_pool.is_alive(folder):
            # An earlier attempt's process has the lock, so this one has ended at once.
            self._forget(job)
            process = None
        if process is None and worker_pool.is_alive(folder):
            process = worker_pool.attach(folder)
            if process is None:
                return  # it has just taken the lock
            self._processes[job.id] = process
        if process is None or process.ended:
            # A worker may die between two jobs. That is no failure of the second one.
            known = process is not None and (process.jobs < 2 or worker_pool.has_begun(folder, job.attempt))
            code = process.code if process is not None else None
            self._finish(job, worker_pool.result_of(folder, job.attempt), code, known=known)
            self._forget(job)
        elif job.state is State.STARTING:
            if worker_pool.has_begun(folder, job.attempt) or not process.started:
                self._store.move(job, State.RUNNING, started=self._clock())
        elif job.state in (State.CANCELLING, State.PAUSING):
            self._end(job, process)

    def _end(self, job: JobRecord, process: worker_pool.Process) -> None:
        """Ask a process to end; kill it if it does not end within `GRACE` seconds."""
        now = time.monotonic()
        asked = self._asked.get(job.id)
        if asked is None:
            self._asked[job.id] = (job.state, now)
            process.send(signal.SIGTERM)
        elif now - asked[1] > GRACE:
            process.send(signal.SIGKILL)

    def _forget(self, job: JobRecord) -> None:
        """Take the process of a job back. It gets no other job if it has got a signal for this one."""
        asked = self._asked.pop(job.id, None)
        process = self._processes.pop(job.id, None)
        if process is not None:
            self.workers.rest(process, job.device or 0, job.spec, reuse=asked is None)

    def _finish(
        self, job: JobRecord, result: dict[str, Any] | None, code: int | None, *, known: bool
    ) -> None:
        """Commit the state that follows when the process of a job has ended.

        Args:
            job: the job.
            result: what its process has left, None if it died.
            code: its exit status, None if that is unknown.
            known: whether it was alive when this dispatcher last looked.
        """
        with self._store.together():
            if job.state is State.STARTING and worker_pool.has_begun(self.folder_of(job.id), job.attempt):
                # The process has begun and ended the job since the last call of `_look_after`.
                own = result if result is not None and result["attempt"] == job.attempt else {}
                started = self._clock() - own.get("seconds", 0.0)
                job = self._store.move(job, State.RUNNING, started=started)
            if job.started is not None:
                self._store.charge(job.owner, max(0.0, self._clock() - job.started))
            self._conclude(job, result, code, known=known)

    def _conclude(
        self, job: JobRecord, result: dict[str, Any] | None, code: int | None, *, known: bool
    ) -> None:
        status = result["exit_code"] if result is not None else code
        new = [] if result is None else result.get("warnings", [])
        warned = {"warnings": list(dict.fromkeys([*job.warnings, *new]))}
        if result is not None and status == 0:
            self._store.move(job, State.SUCCEEDED, exit_code=0, result=result, error=None, **warned)
            return
        why = _why(result, code)
        if job.state is State.CANCELLING:
            self._store.move(job, State.CANCELLED, exit_code=status, error=job.error, **warned)
        elif status in HOPELESS:
            self._store.move(job, State.FAILED, exit_code=status, error=why, **warned)
        elif job.state is State.PAUSING:
            self._store.move(job, State.PAUSED, **warned)
        elif status in (BUSY, STOPPED) or not known:
            # It did not fail on its own: the machine was booted, or someone stopped it.
            self._store.move(job, State.QUEUED, started=None, **warned)
        elif job.failures + 1 >= job.max_attempts:
            failed = {"failures": job.failures + 1, "exit_code": status, "error": why}
            self._store.move(job, State.FAILED, **failed, **warned)
        else:
            at = self._clock() + RETRY * RETRY_FACTOR**job.failures
            failed = {"failures": job.failures + 1, "exit_code": status, "error": why}
            self._store.move(job, State.QUEUED, not_before=at, started=None, **failed, **warned)

    def _check_deadlines(self) -> None:
        now = self._clock()
        for job in self._store.overdue(now):
            error = "the deadline has passed"
            with suppress(StaleError):
                if job.state in (State.QUEUED, State.STARTING, State.RUNNING):
                    to = State.FAILED if job.state is State.QUEUED else State.CANCELLING
                    self._store.move(job, to, error=error)

    # Starting

    def _start_jobs(self) -> None:
        """Start the jobs that fit, and store why the others wait."""
        limits, now = self._limits(), self._clock()
        running = [_running(job, now) for job in self._store.active()]
        waiting = self._store.waiting()
        # If nothing could start, nothing can until something changes.
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
                break  # until workers have ended
            with suppress(StaleError):
                self._start(job, device)
                running.append(_running(job, now, device))
        if changed:  # after the starts, which do not have to wait for this commit
            self._store.explain(changed)
        self._decided = () if starting else state

    def _start(self, job: JobRecord, device: int) -> None:
        """Start a queued job."""
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
    """Say how a process ended."""
    if result is not None:
        return str(result["error"])
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return "its process died" if code is None else f"its process ended with exit status {code}"


def _take(path: Path) -> int:
    """Take the lock of a state folder; return its file descriptor."""
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
