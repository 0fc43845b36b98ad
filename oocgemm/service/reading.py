"""Reads the jobs of a service from an SQLite database."""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from oocgemm.service.errors import KeyReusedError, StoreError, UnknownJobError
from oocgemm.service.schedule import MAX_CONSIDERED, Need, Waiting
from oocgemm.service.schema import MIGRATIONS, SCHEMA, UNFINISHED, VERSION, Job
from oocgemm.service.states import ACTIVE, Reason, State

# Device seconds of an owner count half after so many seconds.
HALF_LIFE = 86400.0
# A retry is due at most so many seconds after it was scheduled, even if the clock is set back.
MAX_DELAY = 3600.0
# Seconds to wait for another process that writes to the database, such as `oocgemm token create`. All other
# calls wait meanwhile.
BUSY_SECONDS = 2.0


# A queued job cannot start if it needs a job that has not succeeded, or if its next attempt is not due.
_NEEDS = """id IN (SELECT deps.job FROM deps JOIN jobs AS needed ON needed.id = deps.needs
    WHERE needed.state != 'succeeded')"""
_DELAYED = "(not_before IS NOT NULL AND not_before > ? AND not_before < ?)"
_WAITING = """SELECT id, owner, priority, created, device_bytes, host_bytes, disk_bytes, predicted_s, reason
    FROM jobs INDEXED BY {} WHERE state = 'queued' AND {} ORDER BY priority DESC, created, id LIMIT ?"""
_READY = _WAITING.format("queue", f"owner = ? AND NOT {_DELAYED} AND NOT {_NEEDS}")
_LATE = _WAITING.format("delayed", f"{_DELAYED} AND NOT {_NEEDS}")
_NEEDING = _WAITING.format("by_state", _NEEDS)
_OWNERS = "SELECT DISTINCT owner FROM jobs INDEXED BY queue WHERE state = 'queued'"


class Reader:
    """The database of a service. Its methods may be called by several threads, one at a time runs.

    All methods raise `StoreError` if the database cannot be read or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open a database, and create it if it does not exist.

        Args:
            path: the file.
            clock: returns the time in seconds since 1970.
        """
        self._path, self._clock = path, clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._changes = 0
        # Called after each change, by the thread that has made it.
        self.observers: list[Callable[[], object]] = []
        _make_private(path)
        with self._errors():
            self._db = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version in MIGRATIONS:
                change = MIGRATIONS[version]
                self._db.executescript(f"BEGIN; {change}; PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise StoreError(
                    f"{path} was written by a version of oocgemm with database format {version}, this one "
                    f"has format {VERSION}: use that version, or another state folder"
                )

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise StoreError(
                f"the database {self._path} fails: {error}: check the space on its disk, its permissions, "
                "and that no other program has opened it"
            ) from error

    def _read(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._errors(), self._lock:
            return self._db.execute(query, values).fetchall()

    def check_intact(self) -> None:
        """Raise `StoreError` if the database is damaged. All of it is read, by another connection."""
        with self._errors(), closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)) as fresh:
            found = fresh.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise StoreError(f"the database {self._path} is damaged ({found}): restore it from a copy")

    def get(self, job: str) -> Job:
        """Return a job. Raises `UnknownJobError` if there is none."""
        found = self._read("SELECT * FROM jobs WHERE id = ?", job)
        if not found:
            raise UnknownJobError(f"there is no job {job}: list the jobs with oocgemm queue")
        return Job.of(found[0])

    def jobs(
        self,
        states: Collection[State] = (),
        owner: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Return jobs from the newest to the oldest.

        Args:
            states: only jobs in one of these states; all if empty.
            owner: only jobs of this owner.
            after: only jobs that are older than the one with this id.
            limit: the maximum number of jobs.
        """
        where, values = ["1"], list[object]()
        if states:
            where.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if owner is not None:
            where.append("owner = ?")
            values.append(owner)
        if after is not None:
            where.append("id < ?")
            values.append(after)
        rest = "" if limit is None else f" LIMIT {int(limit)}"
        query = f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY id DESC{rest}"
        return [Job.of(row) for row in self._read(query, *values)]

    def some(self, jobs: Sequence[str]) -> list[Job]:
        """Return the jobs with these ids, in this order. Those that do not exist are left out."""
        marks = ", ".join("?" * len(jobs))
        found = {
            row["id"]: Job.of(row) for row in self._read(f"SELECT * FROM jobs WHERE id IN ({marks})", *jobs)
        }
        return [found[job] for job in jobs if job in found]

    def active(self) -> list[Job]:
        """Return the jobs whose process may be alive."""
        return self.jobs(ACTIVE)

    def overdue(self, now: float) -> list[Job]:
        """Return the jobs whose deadline has passed, and which have not ended."""
        found = self._read(f"SELECT * FROM jobs WHERE deadline < ? AND {UNFINISHED}", now)
        return [Job.of(row) for row in found]

    def waiting(self) -> list[tuple[Waiting, str | None]]:
        """Return the queued jobs that are considered now, each with the reason that is stored for it.

        These are the first `MAX_CONSIDERED` jobs of each owner that can start, and as many jobs that cannot.
        """
        now = self._clock()
        delayed = (now, now + MAX_DELAY)
        found = [
            _waiting(row)
            for (owner,) in self._read(_OWNERS)
            for row in self._read(_READY, owner, *delayed, MAX_CONSIDERED)
        ]
        needing, late = self._read(_NEEDING, MAX_CONSIDERED), self._read(_LATE, *delayed, MAX_CONSIDERED)
        found += [_waiting(row, Reason.DEPENDENCY) for row in needing]
        return found + [_waiting(row, Reason.RETRY_AT) for row in late]

    def needs(self, job: str) -> list[str]:
        """Return the ids of the jobs that a job needs."""
        return self.needs_of([job])[job]

    def needs_of(self, jobs: Sequence[str]) -> dict[str, list[str]]:
        """Return the ids of the jobs that each job needs."""
        found: dict[str, list[str]] = {job: [] for job in jobs}
        marks = ", ".join("?" * len(jobs))
        for row in self._read(f"SELECT job, needs FROM deps WHERE job IN ({marks}) ORDER BY needs", *jobs):
            found[row["job"]].append(row["needs"])
        return found

    def events(self, after: int = 0, job: str | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        """Return events with numbers above `after`, in order, each with seq, job, at, kind and data."""
        where, values = ("", ()) if job is None else (" AND job = ?", (job,))
        found = self._read(
            f"SELECT * FROM events WHERE seq > ?{where} ORDER BY seq LIMIT ?", after, *values, limit
        )
        return [dict(row) | {"data": json.loads(row["data"])} for row in found]

    def newest(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return int(self._read("SELECT coalesce(max(seq), 0) FROM events")[0][0])

    @property
    def changes(self) -> int:
        """How many transactions threads of this process have committed through this object."""
        return self._changes

    def wait(self, seconds: float, seen: int | None = None) -> bool:
        """Wait until another thread has changed something. Return False if that took too long.

        Args:
            seconds: how long to wait.
            seen: a value of `changes`; return at once if there are more by now. By default, the present one.
        """
        with self._lock:
            start = self._changes if seen is None else seen
            return self._changed.wait_for(lambda: self._changes != start, seconds)

    def earlier(self, owner: str, key: str, body_sha256: str) -> list[Job] | None:
        """Return the jobs that were submitted with an Idempotency-Key; None if it has not been used.

        Raises:
            KeyReusedError: the key was used with another body.
            UnknownJobError: one of these jobs has been deleted.
        """
        found = self._read(
            "SELECT body_sha256, jobs FROM idempotency WHERE owner = ? AND key = ?", owner, key
        )
        if not found:
            return None
        if found[0]["body_sha256"] != body_sha256:
            raise KeyReusedError(f"the Idempotency-Key {key} was used with another request: send a new key")
        return [self.get(each) for each in json.loads(found[0]["jobs"])]

    def unfinished(self, owner: str) -> int:
        """Return how many jobs of an owner have not ended."""
        return int(self._read(f"SELECT count(*) FROM jobs WHERE owner = ? AND {UNFINISHED}", owner)[0][0])

    def counts(self) -> dict[State, int]:
        """Return how many jobs are in each state."""
        found = self._read("SELECT state, count(*) AS number FROM jobs GROUP BY state")
        return dict.fromkeys(State, 0) | {State(row["state"]): row["number"] for row in found}

    def usage(self) -> dict[str, float]:
        """Return the device seconds of each owner; those of long ago count less (`HALF_LIFE`)."""
        now = self._clock()
        return {row["owner"]: decayed(row, now) for row in self._read("SELECT * FROM usage")}


def _make_private(path: Path) -> None:
    """Create the file of a database if it does not exist, and let nobody but its owner read it.

    SQLite gives its other files the same mode.
    """
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for each in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))):
            if each.exists() and each.stat().st_mode & 0o077:
                each.chmod(0o600)


def _waiting(row: sqlite3.Row, blocked: Reason | None = None) -> tuple[Waiting, str | None]:
    job, owner, priority, created, device, host, disk, seconds, reason = row
    return Waiting(job, owner, priority, created, Need(device, host, disk), seconds, blocked), reason


def decayed(row: sqlite3.Row, now: float) -> float:
    seconds: float = row["seconds"]
    weight: float = 0.5 ** (max(0.0, now - row["as_of"]) / HALF_LIFE)
    return seconds * weight
