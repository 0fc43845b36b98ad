"""Decide which queued jobs start now, on which device, and why the others wait.

Jobs are ordered by priority, then by the device seconds that their owners have used lately, then by age. A
job starts if its memory fits beside that of the running jobs. The first job that does not fit gets a
reservation: the earliest time at which it fits, if running jobs take as long as predicted. Jobs behind it
start now only if they do not delay it. This is EASY backfill (Lifka, *The ANL/IBM SP scheduling system*,
1995). Only the first jobs of each owner are considered, so that many queued jobs do not make a pass longer.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from math import inf
from typing import Any

from oocgemm.service.protocol import Reason
from oocgemm.values import dataclass

# Maximum number of queued jobs per owner that are considered for a start, and maximum number of jobs whose
# start is predicted.
MAX_CONSIDERED = 200


@dataclass(frozen=True, slots=True)
class Need:
    """What a job occupies while it runs, in bytes: memory of its device, memory of the host, and disk."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def in_bytes(self) -> dict[str, Any]:
        """Return ``device_bytes``, ``host_bytes`` and ``disk_bytes``."""
        return {f"{name}_bytes": size for name, size in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job. `blocked` is why it cannot start now, whatever else runs; None if it can start."""

    id: str
    owner: str
    priority: int
    created: float
    need: Need
    seconds: float
    blocked: Reason | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A job with a process. `ends` is when it is predicted to end, `device` the number of its device."""

    id: str
    owner: str
    device: int
    need: Need
    ends: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What all running jobs may occupy, in bytes. Unless `shared`, one job runs per device."""

    devices: Mapping[int, int]  # memory by number
    host: int
    disk: int
    shared: bool = False

    def lacking(self, need: Need) -> tuple[Reason, int, int] | None:
        """Return why a job never fits, with the bytes that it needs and the limit; None if it fits alone."""
        device = max(self.devices.values(), default=0)
        for reason, needed, limit in (
            (Reason.DEVICE_MEMORY, need.device, device),
            (Reason.HOST_MEMORY, need.host, self.host),
            (Reason.DISK, need.disk, self.disk),
        ):
            if needed > limit:
                return reason, needed, limit
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """A job starts now on `device`, or waits (None) because of `reason`. `start` is None if unknown."""

    id: str
    device: int | None
    reason: Reason | None
    start: float | None


@dataclass
class _Occupied:
    limits: Limits
    devices: dict[int, int] = field(default_factory=dict)  # free bytes
    jobs: dict[int, int] = field(default_factory=dict)
    host: int = 0
    disk: int = 0

    @classmethod
    def by(cls, limits: Limits, running: Iterable[Running]) -> "_Occupied":
        made = cls(limits, dict(limits.devices), dict.fromkeys(limits.devices, 0))
        for job in running:
            made.add(job.device, job.need)
        return made

    def add(self, device: int, need: Need, sign: int = 1) -> None:
        if device in self.devices:  # a device that has been removed from the limits has no room
            self.devices[device] -= sign * need.device
            self.jobs[device] += sign
        self.host += sign * need.host
        self.disk += sign * need.disk

    def place(self, need: Need) -> int | Reason:
        """Return the device with the least free memory on which a job fits; or the reason why none does."""
        free = [
            (room, device)
            for device, room in self.devices.items()
            if room >= need.device and (self.limits.shared or not self.jobs[device])
        ]
        if not free:
            return Reason.DEVICE_MEMORY
        if self.host + need.host > self.limits.host:
            return Reason.HOST_MEMORY
        if self.disk + need.disk > self.limits.disk:
            return Reason.DISK
        return min(free)[1]


def decide(
    queued: Sequence[Waiting],
    running: Sequence[Running],
    limits: Limits,
    usage: Mapping[str, float],
    now: float,
    *,
    draining: bool = False,
) -> list[Decision]:
    """Return whether each queued job starts now, in the order in which jobs are considered.

    `usage` are the device seconds that each owner has used lately, `now` is in the seconds of `Running.ends`.
    """
    occupied = _Occupied.by(limits, running)
    active = list(running)
    found: list[tuple[Waiting, int | None, Reason | None]] = []
    head: Waiting | None = None
    reserved, later = inf, occupied  # when `head` starts, and what jobs occupy then

    order = _Order(queued, running, usage, now)
    for job in order:
        reason = Reason.DRAINING if draining else job.blocked
        if reason is None:
            place = occupied.place(job.need)
            if isinstance(place, Reason):
                reason = place
                if head is None and limits.lacking(job.need) is None:
                    head = job
                    reserved = _starts([job], active, limits, now)[0]
                    later = _Occupied.by(limits, (one for one in active if one.ends > reserved))
            elif head is not None and not _leaves_room(job, place, head, reserved, later, now):
                reason = Reason.PRIORITY
            else:
                order.started(job)
                occupied.add(place, job.need)
                active.append(Running(job.id, job.owner, place, job.need, now + job.seconds))
                if head is not None and now + job.seconds > reserved:
                    later.add(place, job.need)
                found.append((job, place, None))
                continue
        found.append((job, None, reason))
    waiting = [job for job, device, _ in found if device is None and not job.blocked]
    predicted = {} if draining else _predicted(waiting[:MAX_CONSIDERED], active, limits, now)
    return [
        Decision(job.id, device, reason, now if device is not None else predicted.get(job.id))
        for job, device, reason in found
    ]


class _Order:
    """Iterates over queued jobs in their order. When a job starts, other jobs of its owner come later."""

    def __init__(
        self, queued: Iterable[Waiting], running: Iterable[Running], usage: Mapping[str, float], now: float
    ) -> None:
        self._usage = defaultdict(float, usage)
        for one in running:  # count what running jobs will have used
            self._usage[one.owner] += max(0.0, one.ends - now)
        self._of: defaultdict[str, deque[Waiting]] = defaultdict(deque)
        for job in sorted(queued, key=lambda job: (-job.priority, job.created, job.id)):
            self._of[job.owner].append(job)
        self._heap = [self._entry(owner) for owner in self._of]
        heapq.heapify(self._heap)

    def _entry(self, owner: str) -> tuple[int, float, float, str, str]:
        first = self._of[owner][0]
        return -first.priority, self._usage[owner], first.created, first.id, owner

    def __iter__(self) -> Iterator[Waiting]:
        while self._heap:
            owner = heapq.heappop(self._heap)[-1]
            yield self._of[owner].popleft()
            if self._of[owner]:
                heapq.heappush(self._heap, self._entry(owner))

    def started(self, job: Waiting) -> None:
        """Count the predicted seconds of the job that the iterator has just returned."""
        self._usage[job.owner] += job.seconds


def _leaves_room(
    job: Waiting, device: int, head: Waiting, reserved: float, later: _Occupied, now: float
) -> bool:
    """Return whether a job can start now without a delay of `head`, the job with the reservation."""
    if now + job.seconds <= reserved:
        return True
    later.add(device, job.need)
    fits = not isinstance(later.place(head.need), Reason)
    later.add(device, job.need, -1)
    return fits


def _predicted(
    waiting: Sequence[Waiting], active: Sequence[Running], limits: Limits, now: float
) -> dict[str, float]:
    possible = [job for job in waiting if limits.lacking(job.need) is None]
    return dict(zip((job.id for job in possible), _starts(possible, active, limits, now), strict=True))


def _starts(jobs: Sequence[Waiting], active: Sequence[Running], limits: Limits, now: float) -> list[float]:
    """Return when jobs start if they start in this order. Each job must fit when nothing else runs."""
    occupied = _Occupied.by(limits, active)
    # A job that takes longer than predicted is expected to end at once.
    ends = [(max(one.ends, now), number, one) for number, one in enumerate(active)]
    heapq.heapify(ends)
    found: list[float] = []
    for job in jobs:
        while isinstance(place := occupied.place(job.need), Reason):
            if not ends:  # the limits have become smaller than what a running job has
                return found + [inf] * (len(jobs) - len(found))
            now, _, ended = heapq.heappop(ends)
            occupied.add(ended.device, ended.need, -1)
        found.append(now)
        occupied.add(place, job.need)
        one = Running(job.id, job.owner, place, job.need, now + job.seconds)
        heapq.heappush(ends, (one.ends, len(active) + len(found), one))
    return found
