"""Stores jobs in an SQLite database. Every change of a job is one transaction, with an event that records it.

A change names the state and the attempt that the job must have, so a change that is late does nothing. The
database survives a power failure after each commit (WAL, ``synchronous=FULL``).
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oocgemm.service.errors import ConflictError, StaleError
from oocgemm.service.reading import Reader, decayed
from oocgemm.service.schema import UNFINISHED, Job, NewJob, new_id
from oocgemm.service.states import FINAL, FOLLOWING, Action, Reason, State, possible, requested

# Columns that a change of state may set.
_COLUMNS = frozenset(
    {
        "reason",
        "device",
        "attempt",
        "failures",
        "not_before",
        "started",
        "ended",
        "exit_code",
        "error",
        "result",
        "warnings",
    }
)


class Store(Reader):
    """The jobs of a service, and all changes of them."""

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction; commit it at the end, or roll it back after an error.

        Within another transaction of this thread, this is a part of that one.
        """
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
            self._changes += 1
            self._changed.notify_all()
            for tell in self.observers:
                tell()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all changes in the `with` block one transaction, which takes a single flush of the disk."""
        with self._writing():
            yield

    def check_writable(self) -> None:
        """Raise `StoreError` if the database cannot be written."""
        with self._errors(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ROLLBACK")

    def _event(self, job: str, kind: str, **data: object) -> None:
        self._db.execute(
            "INSERT INTO events (job, at, kind, data) VALUES (?, ?, ?, ?)",
            (job, self._clock(), kind, json.dumps(data)),
        )

    # Submission

    def submit(
        self, jobs: Sequence[NewJob], key: str | None = None, body_sha256: str = "", owner: str = ""
    ) -> list[Job]:
        """Store new jobs, all or none, and return them.

        Args:
            jobs: the jobs. A job may need an earlier one of the same call by ``#0``, ``#1`` and so on.
            key: the Idempotency-Key of `owner`. If it has been used with the same body, the jobs of that
                call are returned, and nothing is stored.
            body_sha256: the digest of the request.
            owner: whose key it is.

        Raises:
            KeyReusedError: the key was used with another body.
            ConflictError: a live job writes the same C.
            UnknownJobError: a job needs one that does not exist.
        """
        with self._writing() as db:
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
        number = new_id()
        state = State.HELD if job.held else State.QUEUED
        row = {
            **{"id": number, "owner": job.owner, "name": job.name, "state": state, "priority": job.priority},
            **{"spec": json.dumps(job.spec), "plan": json.dumps(job.plan), "predicted_s": job.seconds},
            **{"device_bytes": job.need.device, "host_bytes": job.need.host, "disk_bytes": job.need.disk},
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

    @contextmanager
    def _one_writer(self, c_path: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            if "jobs.c_path" not in str(error):
                raise
            other = self._db.execute(
                f"SELECT id, state FROM jobs WHERE c_path = ? AND {UNFINISHED}", (c_path,)
            ).fetchone()
            raise ConflictError(
                f"job {other['id']}, which is {other['state']}, writes the same C: cancel it, wait for it, "
                "or give another path for C"
            ) from error

    # Changes

    def move(self, job: Job, to: State, **values: Any) -> Job:
        """Change the state of a job, and columns of its row; return the job as it is now.

        Raises:
            StaleError: the job has another state or attempt by now.
        """
        assert to in FOLLOWING[job.state], f"{job.state} -> {to}"
        assert _COLUMNS.issuperset(values), values
        if "result" in values and values["result"] is not None:
            values["result"] = json.dumps(values["result"])
        if "warnings" in values:
            values["warnings"] = json.dumps(values["warnings"])
        if to in FINAL:
            values.setdefault("ended", self._clock())
        names = "".join(f", {name} = ?" for name in values)
        with self._writing() as db, self._one_writer(job.c_path):
            done = db.execute(
                f"UPDATE jobs SET state = ?, version = version + 1{names} "
                "WHERE id = ? AND state = ? AND attempt = ?",
                (to, *values.values(), job.id, job.state, job.attempt),
            )
            if not done.rowcount:
                raise StaleError(f"job {job.id} is no longer {job.state} in attempt {job.attempt}")
            data = {
                name: values[name] for name in ("attempt", "device", "error", "exit_code") if name in values
            }
            self._event(job.id, to, **data)
            return self.get(job.id)

    def request(self, job: str, action: Action) -> Job:
        """Do what a user requests, or note that it must be done; return the job as it is now.

        Raises:
            ConflictError: the action is impossible in the state of the job, or another live job writes the
                same C.
        """
        with self._lock:  # so that nothing changes in between
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

    def update(self, job: str, version: int | None = None, **values: Any) -> Job:
        """Change ``priority``, ``deadline`` or ``max_attempts`` of a job; return the job as it is now.

        Raises:
            StaleError: the job does not have this version.
            ConflictError: the job has ended.
        """
        assert {"priority", "deadline", "max_attempts"}.issuperset(values), values
        with self._writing() as db:
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
        """Store why queued jobs wait. This is no event, and does not change a job's version."""
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET reason = ? WHERE id = ? AND state = ?",
                [(reason, job, State.QUEUED) for job, reason in reasons.items()],
            )

    def delete(self, job: str) -> None:
        """Delete the records of a job that has ended. C is kept.

        Raises:
            ConflictError: the job has not ended, or a live job needs it.
        """
        with self._writing() as db:
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
        """Add device seconds to the usage of an owner."""
        now = self._clock()
        with self._writing() as db:
            row = db.execute("SELECT * FROM usage WHERE owner = ?", (owner,)).fetchone()
            total = seconds + (decayed(row, now) if row else 0.0)
            db.execute("INSERT OR REPLACE INTO usage VALUES (?, ?, ?)", (owner, total, now))
