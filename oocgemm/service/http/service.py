"""What all requests share: the configuration, the database, the dispatcher, the feed of changes, and turns.

*Turns.* A limited number of requests wait for planning, and users take turns. All other requests that plan
are refused, and may be sent again. Planning opens arrays of users, which may be slow. So a separate thread
plans, and requests that read the queue never wait for planning.
"""

import asyncio
import errno
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from shutil import disk_usage
from time import monotonic
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from oocgemm.errors import InputError
from oocgemm.service.backfill import Limits
from oocgemm.service.confinement import abi
from oocgemm.service.dispatcher import KEEP, Dispatcher
from oocgemm.service.http.security import Identity, LoginCode, Tokens
from oocgemm.service.http.views import ActivityView, JobView, ProgressView, QueueView
from oocgemm.service.job_planner import Planner
from oocgemm.service.job_spec import parameters, with_paths
from oocgemm.service.job_store import JobRecord
from oocgemm.service.job_worker import LIVE, TILES, read_json
from oocgemm.service.limits import (
    DeviceInfo,
    Root,
    allowed_folders,
    display,
    display_all,
    find_devices,
    free_space,
    limits,
    replace_folder,
)
from oocgemm.service.protocol import DatabaseError, State, UnavailableError, possible
from oocgemm.values import dataclass

# Maximum number of requests that plan or wait for planning, of all users and of one user.
MAX_PLANS, MAX_PLANS_OF_USER = 256, 128

T = TypeVar("T")


class Plans:
    """The requests that plan jobs. One thread plans, and the users whose requests wait for it take turns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "oocgemm-plan")
        self._present: Counter[str] = Counter()
        self._waiting: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # by user, in the order of their next turns
        self._busy = False

    async def run(self, request: Request, user: str, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a request, and return its result, unless the client closes the connection.

        The body must have been received. Raises `UnavailableError` if too many requests wait, or the client
        has gone.
        """
        total, own = self._present.total(), self._present[user]
        if total >= MAX_PLANS or own >= MAX_PLANS_OF_USER:
            work.close()
            raise UnavailableError(
                f"{own} requests of {user} and {total - own} of others wait for their plans, and "
                f"{MAX_PLANS_OF_USER} per user and {MAX_PLANS} in all may: send the request again"
            )
        self._present[user] += 1
        doing, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise UnavailableError("the client has gone: send the request again")
            return doing.result()
        finally:
            doing.cancel()
            gone.cancel()
            self._present -= Counter((user,))

    async def turn(self, user: str, work: Callable[[], T]) -> T:
        """Call `work` in the thread that plans when it is the turn of a user, and return its result."""
        loop = asyncio.get_running_loop()
        if self._busy:
            called = loop.create_future()
            self._waiting.setdefault(user, deque()).append(called)
            try:
                await called
            except asyncio.CancelledError:
                if not called.cancelled():  # the turn came in the same moment: pass it on
                    self._call()
                raise
        self._busy = True
        done = loop.run_in_executor(self._thread, work)
        done.add_done_callback(lambda _: self._call())
        # If the request is cancelled, the thread still finishes `work`, and then the next turn comes.
        return await asyncio.shield(done)

    def _call(self) -> None:
        """Give the turn to the next request that waits, if there is one."""
        self._busy = False
        while self._waiting and not self._busy:
            user = next(iter(self._waiting))
            own = self._waiting.pop(user)
            called = own.popleft()
            if own:
                self._waiting[user] = own  # behind all other users
            if not called.done():  # cancelled
                called.set_result(None)
                self._busy = True

    def close(self) -> None:
        """End the thread when it has finished its present plan."""
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _gone(request: Request) -> None:
    """Return when the client of a request has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# The database in the state folder.
DATABASE = "service.db"
# Bytes that must be free on the disks of the writable roots and of the state folder.
MIN_FREE = 64 << 20
# After a check has read the database, no check reads it for this many times the duration of that read.
CHECK_PAUSE = 20.0

logger = logging.getLogger("oocgemm")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `oocgemm serve`.

    `listen` is host and port of the TCP socket, where port 0 is any free one. `certificate` and `key` are PEM
    files. `hosts` are further names that requests may have in their Host header. Sizes are in bytes or as
    "8GiB"; None means the defaults of `limits.limits`. An owner may have `max_jobs` unfinished jobs.
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


class Feed:
    """Wakes coroutines when the database has changed: sets `woken`, and replaces it by a new event."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.closed = False

    def wake(self) -> None:
        """Wake all that wait. Only the thread of the event loop may call this."""
        self.woken.set()
        self.woken = asyncio.Event()

    async def wait(self, woken: asyncio.Event, seconds: float) -> None:
        """Wait for a change since `woken` was read from this object, but at most `seconds`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), seconds)


@dataclass(eq=False)
class Service:
    """The service of a state folder. `fixed` are the limits of what jobs may occupy, found at the start."""

    config: Config
    store: Tokens
    dispatcher: Dispatcher
    planner: Planner
    backend: str
    devices: Sequence[DeviceInfo]
    fixed: Limits
    login: LoginCode = field(default_factory=LoginCode)
    feed: Feed = field(default_factory=Feed)
    plans: Plans = field(default_factory=Plans)
    _next_check: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def limits(self) -> Limits:
        """Return what jobs may occupy now. Without a disk quota, they may use the free space of the disk."""
        return _current(self.config, self.fixed)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the dispatcher. From now on, changes of the database wake requests."""

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed when the server ends
                loop.call_soon_threadsafe(self.feed.wake)

        self.store.observers.append(wake)
        self._thread = threading.Thread(target=self.dispatcher.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the dispatcher, and give the state folder to another server. Processes of jobs go on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.plans.close()
        self.planner.close()
        self.dispatcher.close()
        self.store.close()

    def end_streams(self) -> None:
        self.feed.closed = True
        self.feed.wake()

    def view(self, job: JobRecord, needs: Sequence[str] = ()) -> JobView:
        spec, verb = job.spec, job.spec.get("verb", "gemm")
        starts = self.dispatcher.starts if job.state is State.QUEUED else {}
        stored: dict[str, Any] = {
            name: getattr(job, name) for name in JobView.model_fields if hasattr(job, name)
        }
        shown: dict[str, Any] = with_paths(spec, lambda name, path, write: display(self.config.roots, path))
        operands: dict[str, Any] = {name: shown.get(name) for name in parameters(verb)}
        if job.result is not None and "verdict" in job.result:
            stored["result"] = job.result | {"verdict": self.shown(job.result["verdict"])}
        stored["error"] = None if job.error is None else self.shown(job.error)
        stored["warnings"] = [self.shown(each) for each in job.warnings]
        return JobView(
            **stored,
            **operands,
            verb=verb,
            options={name: value for name, value in shown["options"].items() if name != "backend"},
            **job.need.in_bytes(),
            predicted_start=starts.get(job.id),
            needs=list(needs),
            actions=list(possible(job.state)),
            progress=self.progress(job),
            activity=self.activity(job),
        )

    def shown(self, text: str) -> str:
        """Return a text for users: paths in roots as they write them, and no other path of the service."""
        return replace_folder(display_all(self.config.roots, text), self.config.state, "STATE/")

    def views(self, jobs: Sequence[JobRecord]) -> list[JobView]:
        needs = self.store.needs_of([job.id for job in jobs])
        return [self.view(job, needs[job.id]) for job in jobs]

    def queue(self, limit: int) -> QueueView:
        """Return the jobs that have not ended: all active jobs, and the first `limit` of those that wait."""
        starts = self.dispatcher.starts
        queued = sorted(
            (job for job, _ in self.store.waiting()),
            key=lambda job: (starts.get(job.id, math.inf), -job.priority, job.id),
        )[:limit]
        waiting = self.store.some([job.id for job in queued])
        if len(waiting) < limit:
            waiting += self.store.jobs((State.HELD, State.PAUSED), limit=limit - len(waiting))
        return QueueView(
            active=self.views(self.store.active()), waiting=self.views(waiting), counts=self.store.counts()
        )

    def progress(self, job: JobRecord) -> ProgressView | None:
        """Return how many tiles of all passes have been finished; None before the first attempt."""
        if not job.attempt:
            return None
        rows, columns = job.plan["tiles"]
        total = job.plan.get("work", rows * columns)
        # There may be fewer passes than planned.
        done = total if job.state is State.SUCCEEDED else min(total, len(self._noted(job)))
        return ProgressView(done=done, total=total)

    def activity(self, job: JobRecord) -> ActivityView | None:
        """Return what a running job has done in the last seconds; None if that is unknown."""
        if job.state is not State.RUNNING:
            return None
        found = read_json(self.dispatcher.folder_of(job.id) / LIVE)
        return None if found is None else ActivityView.model_validate(found)

    def tiles(self, job: JobRecord) -> frozenset[tuple[int, int]]:
        """Return row and column of the tiles that have been finished in the last pass that has begun."""
        rows, columns = job.plan["tiles"]
        if job.state is State.SUCCEEDED:
            return frozenset((row, column) for row in range(rows) for column in range(columns))
        noted = self._noted(job)
        last = max((number for number, _, _ in noted), default=0)
        found = ((row, column) for number, row, column in noted if number == last)
        return frozenset((row, column) for row, column in found if row < rows and column < columns)

    def _noted(self, job: JobRecord) -> frozenset[tuple[int, ...]]:
        """Return pass, row and column of the tiles that have been finished."""
        path = self.dispatcher.folder_of(job.id) / TILES
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return frozenset()
        return _noted(path, size)

    def problems(self) -> list[str]:
        """Return why the service is not ready; nothing if it is."""
        found = []
        try:
            self.store.check_writable()
        except DatabaseError:
            found.append("the database cannot be written: see the log of the server")
        try:
            self._check_database()
        except DatabaseError as error:
            logger.error("%s", error)
            found.append("the database is damaged: see the log of the server")
        try:
            free = free_space(self.config.roots.values()), disk_usage(self.config.state).free
            if min(free) < MIN_FREE:
                found.append(
                    "less than 64 MiB are free on the disk of a writable root or of the state folder"
                )
        except OSError:
            found.append("a root cannot be read: see that its disk is mounted")
        if self._thread is not None and not self._thread.is_alive():
            found.append("no jobs are started, because of a defect: see the log of the server")
        return found

    def _check_database(self) -> None:
        """Check the whole database, unless that was done lately: checks take at most 5% of the time."""
        begun = monotonic()
        if begun < self._next_check:
            return
        self.store.check_intact()
        self._next_check = monotonic() + CHECK_PAUSE * (monotonic() - begun)


@lru_cache(maxsize=256)
def _noted(path: Path, size: int) -> frozenset[tuple[int, ...]]:
    """Return the tiles in the first `size` bytes of a file of finished tiles."""
    lines = path.read_bytes()[:size].split(b"\n")[:-1]
    return frozenset(tuple(map(int, line.split()[-3:])) for line in lines)


def _current(config: Config, fixed: Limits) -> Limits:
    if config.disk_quota is not None:
        return fixed
    # The free space is rounded down, so that not every written byte makes the schedule be computed again.
    disk = free_space(config.roots.values()) >> 28 << 28
    return Limits(fixed.devices, fixed.host, disk, fixed.shared)


def open_service(config: Config) -> Service:
    """Take over a state folder. On a GPU, this takes seconds.

    Raises `BackendError` if a device cannot be opened, `DatabaseError` if the database cannot be opened, and
    `InputError` if a limit exceeds what the machine has, jobs cannot be confined, or another server uses the
    state folder.
    """
    if config.confine and not abi():
        raise InputError(
            "jobs cannot be confined: this kernel has no Landlock (Linux 5.13 or later, with landlock in "
            "lsm=). Boot with it, or pass --no-confine if you trust all who may submit jobs"
        )
    backend, devices = find_devices(config.backend)
    fixed = limits(
        devices,
        config.roots.values(),
        device_memory=config.device_memory,
        host_memory=config.host_memory,
        disk_quota=config.disk_quota,
        shared=config.share_device,
    )
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Tokens(config.state / DATABASE)
    confine = allowed_folders(config.roots.values()) if config.confine else None
    try:
        dispatcher = Dispatcher(
            store, config.state, lambda: _current(config, fixed), confine=confine, keep=config.keep_warm
        )
    except InputError:
        store.close()
        raise
    return Service(config, store, dispatcher, Planner(confine), backend, devices, fixed)


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def _user(request: Request) -> Identity:
    found: Identity = request.scope["identity"]
    return found


# The service, and who sends the request (`security.RequestGuard` finds that out).
Shared = Annotated[Service, Depends(_service)]
User = Annotated[Identity, Depends(_user)]
