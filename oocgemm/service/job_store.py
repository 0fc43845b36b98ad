"""The jobs of a service, in an SQLite database. Each change is a transaction, with an event that records it.

A change names the state and the attempt that the job must have, so a change that comes too late does nothing.
The database survives a power failure after each commit (WAL, ``synchronous=FULL``).
"""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from oocgemm.service.backfill import MAX_CONSIDERED, Need, Waiting
from oocgemm.service.protocol import (
    ACTIVE,
    FINAL,
    FOLLOWING,
    Action,
    ConflictError,
    DatabaseError,
    KeyReusedError,
    Reason,
    StaleError,
    State,
    UnknownJobError,
    possible,
    requested,
)
from oocgemm.values import dataclass

# Half-life, in seconds, of the device seconds that an owner has used.
HALF_LIFE = 86400.0
# Maximum seconds from when a retry is scheduled until it is due, even if the clock is set back.
MAX_DELAY = 3600.0
# Seconds to wait for another process that writes to the database, such as `oocgemm token create`. All other
# calls wait meanwhile.
BUSY_SECONDS = 2.0

VERSION = 2
# The column that a database of the previous version lacks.
_WARNINGS = "warnings TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(warnings))"
_MIGRATIONS = {1: f"ALTER TABLE jobs ADD COLUMN {_WARNINGS}"}

# The condition of jobs that have not ended, as indexes and queries state it.
_UNFINISHED = "state NOT IN ('succeeded', 'failed', 'cancelled')"
_SCHEMA = f"""
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, reason TEXT,
    priority INT NOT NULL, spec TEXT NOT NULL CHECK (json_valid(spec)),
    plan TEXT NOT NULL CHECK (json_valid(plan)),
    device_bytes INT NOT NULL, host_bytes INT NOT NULL, disk_bytes INT NOT NULL, predicted_s REAL NOT NULL,
    c_path TEXT NOT NULL, device INT, attempt INT NOT NULL, failures INT NOT NULL, max_attempts INT NOT NULL,
    not_before REAL, deadline REAL, created REAL NOT NULL, started REAL, ended REAL,
    exit_code INT, error TEXT, result TEXT CHECK (result IS NULL OR json_valid(result)), version INT NOT NULL,
    {_WARNINGS}
) STRICT;
CREATE UNIQUE INDEX one_writer ON jobs (c_path) WHERE {_UNFINISHED};
CREATE INDEX by_state ON jobs (state, id);
CREATE INDEX by_owner ON jobs (owner, id);
CREATE INDEX unfinished ON jobs (owner) WHERE {_UNFINISHED};
CREATE INDEX queue ON jobs (owner, priority DESC, created, id) WHERE state = 'queued';
CREATE INDEX delayed ON jobs (not_before) WHERE state = 'queued' AND not_before IS NOT NULL;
CREATE INDEX deadlines ON jobs (deadline) WHERE {_UNFINISHED};
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL CHECK (json_valid(data))
) STRICT;
CREATE INDEX by_job ON events (job, seq);
CREATE TABLE idempotency (
    owner TEXT NOT NULL, key TEXT NOT NULL, body_sha256 TEXT NOT NULL, jobs TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT;
CREATE TABLE usage (owner TEXT PRIMARY KEY, seconds REAL NOT NULL, as_of REAL NOT NULL) STRICT;
CREATE TABLE deps (job TEXT NOT NULL, needs TEXT NOT NULL, PRIMARY KEY (job, needs)) STRICT;
CREATE INDEX needed_by ON deps (needs);
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE, scopes TEXT NOT NULL,
    expires REAL, last_used REAL
) STRICT;
"""
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

# Columns that a change of state may set.
_COLUMNS = {
    *("reason", "device", "attempt", "failures", "not_before", "started", "ended", "exit_code", "error"),
    *("result", "warnings"),
}
# The digits of ids.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to submit.

    Jobs that write the same C are found by `c_path`, its absolute path. `max_attempts` is how often the job
    may fail on its own before it is not started again. The job fails if it has not succeeded by the
    `deadline`, in seconds since 1970. It starts when the jobs with the ids `needs` have succeeded.
    """

    owner: str
    spec: dict[str, Any]
    plan: dict[str, Any]
    need: Need
    seconds: float
    c_path: str
    name: str = ""
    priority: int = 0
    max_attempts: int = 3
    deadline: float | None = None
    needs: Sequence[str] = ()
    held: bool = False


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job as it is stored. Times are in seconds since 1970. `version` counts the changes.

    `attempt` counts its processes, `failures` the processes that failed on their own. `reason` is why a
    queued job waits.
    """

    id: str
    owner: str
    name: str
    state: State
    reason: str | None
    priority: int
    spec: dict[str, Any]
    plan: dict[str, Any]
    need: Need
    predicted_s: float
    c_path: str
    device: int | None
    attempt: int
    failures: int
    max_attempts: int
    not_before: float | None
    deadline: float | None
    created: float
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str | None
    result: dict[str, Any] | None
    version: int
    warnings: list[str]

    @classmethod
    def of(cls, row: sqlite3.Row) -> "JobRecord":
        values = dict(row)
        need = Need(*(values.pop(f"{name}_bytes") for name in ("device", "host", "disk")))
        for name in ("spec", "plan", "result", "warnings"):
            values[name] = None if values[name] is None else json.loads(values[name])
        return cls(**values | {"need": need, "state": State(values["state"])})


class JobStore:
    """The database of a service, for several threads. All methods may raise `DatabaseError`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open a database, and create it if it does not exist."""
        self._path, self._clock = path, clock
        self._lock = threading.RLock()
        self._last_id = 0
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
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version in _MIGRATIONS:
                change = _MIGRATIONS[version]
                self._db.executescript(f"BEGIN; {change}; PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise DatabaseError(
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
            raise DatabaseError(
                f"the database {self._path} fails: {error}: check the space on its disk, its permissions, "
                "and that no other program has opened it"
            ) from error

    def _read(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._errors(), self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def together(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction, or join this thread's. Commit with one flush, or roll back on an error."""
        with self._errors(), self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            for tell in self.observers:
                tell()

    def _event(self, job: str, kind: str, **data: object) -> None:
        self._db.execute(
            "INSERT INTO events (job, at, kind, data) VALUES (?, ?, ?, ?)",
            (job, self._clock(), kind, json.dumps(data)),
        )

    def check_intact(self) -> None:
        """Raise `DatabaseError` if the database is damaged. Another connection reads the whole database."""
        with self._errors(), closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)) as fresh:
            found = fresh.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise DatabaseError(f"the database {self._path} is damaged ({found}): restore it from a copy")

    def check_writable(self) -> None:
        """Raise `DatabaseError` if the database cannot be written."""
        with self._errors(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ROLLBACK")

    # Queries

    def get(self, job: str) -> JobRecord:
        """Return a job. Raises `UnknownJobError` if there is none."""
        found = self._read("SELECT * FROM jobs WHERE id = ?", job)
        if not found:
            raise UnknownJobError(f"there is no job {job}: list the jobs with oocgemm queue")
        return JobRecord.of(found[0])

    def jobs(
        self,
        states: Collection[State] = (),
        owner: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[JobRecord]:
        """Return jobs, the newest first. If given: only in `states`, of `owner`, older than job `after`."""
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
        return [JobRecord.of(row) for row in self._read(query, *values)]

    def some(self, jobs: Sequence[str]) -> list[JobRecord]:
        """Return the jobs with these ids, in this order. Ids without a job are left out."""
        marks = ", ".join("?" * len(jobs))
        rows = self._read(f"SELECT * FROM jobs WHERE id IN ({marks})", *jobs)
        found = {row["id"]: JobRecord.of(row) for row in rows}
        return [found[job] for job in jobs if job in found]

    def active(self) -> list[JobRecord]:
        """Return the jobs whose process may be alive."""
        return self.jobs(ACTIVE)

    def overdue(self, now: float) -> list[JobRecord]:
        """Return the jobs whose deadline has passed, and which have not ended."""
        found = self._read(f"SELECT * FROM jobs WHERE deadline < ? AND {_UNFINISHED}", now)
        return [JobRecord.of(row) for row in found]

    def waiting(self) -> list[tuple[Waiting, str | None]]:
        """Return the queued jobs that are considered now, each with the reason that is stored for it.

        These are the first `MAX_CONSIDERED` jobs of each owner that can start, and up to as many jobs that
        need other jobs, and that wait for a retry.
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

    def needs_of(self, jobs: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {job: [] for job in jobs}
        marks = ", ".join("?" * len(jobs))
        for row in self._read(f"SELECT job, needs FROM deps WHERE job IN ({marks}) ORDER BY needs", *jobs):
            found[row["job"]].append(row["needs"])
        return found

    def events(self, after: int = 0, job: str | None = None) -> list[dict[str, Any]]:
        """Return the first 1000 events after number `after`, each with seq, job, at, kind and data."""
        where, values = ("", ()) if job is None else (" AND job = ?", (job,))
        found = self._read(
            f"SELECT * FROM events WHERE seq > ?{where} ORDER BY seq LIMIT 1000", after, *values
        )
        return [dict(row) | {"data": json.loads(row["data"])} for row in found]

    def newest(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return int(self._read("SELECT coalesce(max(seq), 0) FROM events")[0][0])

    def earlier(self, owner: str, key: str, body_sha256: str) -> list[JobRecord] | None:
        """Return the jobs that were submitted with a key; None if it is new. Raises what `submit` raises."""
        found = self._read(
            "SELECT body_sha256, jobs FROM idempotency WHERE owner = ? AND key = ?", owner, key
        )
        if not found:
            return None
        if found[0]["body_sha256"] != body_sha256:
            raise KeyReusedError(f"the Idempotency-Key {key} was used with another request: send a new key")
        return [self.get(each) for each in json.loads(found[0]["jobs"])]

    def unfinished(self, owner: str) -> int:
        return int(self._read(f"SELECT count(*) FROM jobs WHERE owner = ? AND {_UNFINISHED}", owner)[0][0])

    def counts(self) -> dict[State, int]:
        found = self._read("SELECT state, count(*) AS number FROM jobs GROUP BY state")
        return dict.fromkeys(State, 0) | {State(row["state"]): row["number"] for row in found}

    def usage(self) -> dict[str, float]:
        """Return the device seconds of each owner. Seconds of long ago count less (`HALF_LIFE`)."""
        now = self._clock()
        return {row["owner"]: _decayed(row, now) for row in self._read("SELECT * FROM usage")}

    # Submission

    def submit(
        self, jobs: Sequence[NewJob], key: str | None = None, body_sha256: str = "", owner: str = ""
    ) -> list[JobRecord]:
        """Store new jobs, all or none, and return them. A job may need an earlier job of the call, as ``#0``.

        If the key of this owner has been used for a request with the same digest, its jobs are returned, and
        nothing is stored. Raises `KeyReusedError` if the key was used for another request, `ConflictError` if
        a live job writes the same C, and `UnknownJobError` if a job is needed that does not exist.
        """
        with self.together() as db:
            if key is not None and (found := self.earlier(owner, key, body_sha256)) is not None:
                return found
            ids: list[str] = []
            for job in jobs:
                ids.append(self._insert(db, job, ids))
            if key is not None:
                db.execute(
                    "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)",
                    (owner, key, body_sha256, json.dumps(ids), self._clock()),
                )
            return [self.get(each) for each in ids]

    def _insert(self, db: sqlite3.Connection, job: NewJob, earlier: Sequence[str]) -> str:
        number = self._new_id()
        state = State.HELD if job.held else State.QUEUED
        row = {
            **{"id": number, "owner": job.owner, "name": job.name, "state": state, "priority": job.priority},
            **{"spec": json.dumps(job.spec), "plan": json.dumps(job.plan), "predicted_s": job.seconds},
            **job.need.in_bytes(),
            **{"c_path": job.c_path, "attempt": 0, "failures": 0, "max_attempts": job.max_attempts},
            **{"deadline": job.deadline, "created": self._clock(), "version": 1},
        }
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        with self._one_writer(job.c_path):
            db.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", tuple(row.values()))
        within = {f"#{place}": each for place, each in enumerate(earlier)}
        for name in job.needs:
            needed = within.get(name, name)
            self.get(needed)
            db.execute("INSERT OR IGNORE INTO deps VALUES (?, ?)", (number, needed))
        self._event(number, state, owner=job.owner)
        return number

    def _new_id(self) -> str:
        """Return a ULID: 26 characters that sort by the order of the calls. See github.com/ulid/spec."""
        number = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10))
        self._last_id = number = max(number, self._last_id + 1)
        return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(26)))

    @contextmanager
    def _one_writer(self, c_path: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            if "jobs.c_path" not in str(error):
                raise
            other = self._db.execute(
                f"SELECT id, state FROM jobs WHERE c_path = ? AND {_UNFINISHED}", (c_path,)
            ).fetchone()
            raise ConflictError(
                f"job {other['id']}, which is {other['state']}, writes the same C: cancel it, wait for it, "
                "or give another path for C"
            ) from error

    # Changes

    def move(self, job: JobRecord, to: State, **values: Any) -> JobRecord:
        """Change the state of a job, and columns of its row; return the job as it is now.

        Raises `StaleError` if the job has another state or attempt by now.
        """
        assert to in FOLLOWING[job.state], f"{job.state} -> {to}"
        assert _COLUMNS.issuperset(values), values
        for name in ("result", "warnings"):
            if values.get(name) is not None:
                values[name] = json.dumps(values[name])
        if to in FINAL:
            values.setdefault("ended", self._clock())
        names = "".join(f", {name} = ?" for name in values)
        with self.together() as db, self._one_writer(job.c_path):
            done = db.execute(
                f"UPDATE jobs SET state = ?, version = version + 1{names} "
                "WHERE id = ? AND state = ? AND attempt = ?",
                (to, *values.values(), job.id, job.state, job.attempt),
            )
            if not done.rowcount:
                raise StaleError(f"job {job.id} is no longer {job.state} in attempt {job.attempt}")
            told = ("attempt", "device", "error", "exit_code")
            self._event(job.id, to, **{name: values[name] for name in told if name in values})
            return self.get(job.id)

    def request(self, job: str, action: Action) -> JobRecord:
        """Do what a user requests, or note that it must be done; return the job as it is now.

        Raises `ConflictError` if the state of the job forbids it, or another live job writes the same C.
        """
        with self._lock:  # so that the job does not change between `get` and `move`
            found = self.get(job)
            to = requested(action, found.state)
            if to is None:
                others = ", ".join(possible(found.state)) or "nothing"
                raise ConflictError(
                    f"job {job} is {found.state}: {action} is impossible (possible: {others})"
                )
            if to is found.state:
                return found
            fresh = {"failures": 0, "not_before": None, "ended": None} if action is Action.RETRY else {}
            return self.move(found, to, reason=None, **fresh)

    def update(self, job: str, version: int | None = None, **values: Any) -> JobRecord:
        """Change ``priority``, ``deadline`` or ``max_attempts`` of a job; return the job as it is now.

        Raises `StaleError` if the job does not have this version, and `ConflictError` if it has ended.
        """
        assert {"priority", "deadline", "max_attempts"}.issuperset(values), values
        with self.together() as db:
            found = self.get(job)
            if version is not None and found.version != version:
                raise StaleError(f"job {job} has version {found.version}, not {version}: read it again")
            if found.state in FINAL:
                raise ConflictError(f"job {job} is {found.state}: it can no longer be changed")
            names = "".join(f", {name} = ?" for name in values)
            db.execute(f"UPDATE jobs SET version = version + 1{names} WHERE id = ?", (*values.values(), job))
            self._event(job, "updated", **values)
            return self.get(job)

    def explain(self, reasons: dict[str, Reason | None]) -> None:
        """Store why queued jobs wait. This stores no event, and does not change the versions of jobs."""
        with self.together() as db:
            db.executemany(
                "UPDATE jobs SET reason = ? WHERE id = ? AND state = ?",
                [(reason, job, State.QUEUED) for job, reason in reasons.items()],
            )

    def delete(self, job: str) -> None:
        """Delete the records of a job. Raises `ConflictError` if it has not ended or others need it."""
        with self.together() as db:
            found = self.get(job)
            if found.state not in FINAL:
                raise ConflictError(f"job {job} is {found.state}: cancel it before you delete it")
            needed = db.execute(
                "SELECT jobs.id FROM deps JOIN jobs ON jobs.id = deps.job WHERE deps.needs = ? "
                "AND jobs.state NOT IN (?, ?, ?)",
                (job, *FINAL),
            ).fetchone()
            if needed:
                raise ConflictError(f"job {needed['id']} needs job {job}: delete or cancel that one first")
            for table, column in (("jobs", "id"), ("events", "job"), ("deps", "job"), ("deps", "needs")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (job,))
            self._event(job, "deleted")

    def charge(self, owner: str, seconds: float) -> None:
        now = self._clock()
        with self.together() as db:
            row = db.execute("SELECT * FROM usage WHERE owner = ?", (owner,)).fetchone()
            total = seconds + (_decayed(row, now) if row else 0.0)
            db.execute("INSERT OR REPLACE INTO usage VALUES (?, ?, ?)", (owner, total, now))


def _make_private(path: Path) -> None:
    """Create a database that only its owner can read. SQLite gives its other files the same mode."""
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for each in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))):
            if each.exists() and each.stat().st_mode & 0o077:
                each.chmod(0o600)


def _waiting(row: sqlite3.Row, blocked: Reason | None = None) -> tuple[Waiting, str | None]:
    job, owner, priority, created, device, host, disk, seconds, reason = row
    return Waiting(job, owner, priority, created, Need(device, host, disk), seconds, blocked), reason


def _decayed(row: sqlite3.Row, now: float) -> float:
    seconds: float = row["seconds"]
    weight: float = 0.5 ** (max(0.0, now - row["as_of"]) / HALF_LIFE)
    return seconds * weight
