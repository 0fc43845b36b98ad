"""The tables of the service, and how rows become jobs."""

import json
import os
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from oocgemm.service.schedule import Need
from oocgemm.service.states import State

VERSION = 2
# What brings a database of the version before to this one.
_WARNINGS = "warnings TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(warnings))"
MIGRATIONS = {1: f"ALTER TABLE jobs ADD COLUMN {_WARNINGS}"}

# The condition of jobs that have not ended, as indexes and queries state it.
UNFINISHED = "state NOT IN ('succeeded', 'failed', 'cancelled')"
SCHEMA = f"""
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
CREATE UNIQUE INDEX one_writer ON jobs (c_path) WHERE {UNFINISHED};
CREATE INDEX by_state ON jobs (state, id);
CREATE INDEX by_owner ON jobs (owner, id);
CREATE INDEX unfinished ON jobs (owner) WHERE {UNFINISHED};
CREATE INDEX queue ON jobs (owner, priority DESC, created, id) WHERE state = 'queued';
CREATE INDEX delayed ON jobs (not_before) WHERE state = 'queued' AND not_before IS NOT NULL;
CREATE INDEX deadlines ON jobs (deadline) WHERE {UNFINISHED};
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

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to submit.

    Attributes:
        owner, name: who submits it, and what it is called.
        spec: the product (`oocgemm.service.spec`), as plain data.
        plan: a summary of the plan, as plain data.
        need: what the job occupies while it runs.
        seconds: the predicted time of the run.
        c_path: the absolute path of C, by which jobs that write the same C are found.
        priority: jobs with a higher one start first.
        max_attempts: how often the job may fail on its own before it is not started again.
        deadline: the job fails if it has not succeeded by then, in seconds since 1970.
        needs: ids of jobs that must succeed before.
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
    needs: tuple[str, ...] = ()
    held: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is stored. `attempt` counts its processes, `failures` those that failed on their own.

    `warnings` are those about the data that its runs issued (`oocgemm.DataWarning`).

    `reason` is why a queued job waits. Times are in seconds since 1970. `version` counts the changes.
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
    def of(cls, row: sqlite3.Row) -> "Job":
        """Return the job of a row of the table ``jobs``."""
        values = dict(row)
        need = Need(*(values.pop(f"{name}_bytes") for name in ("device", "host", "disk")))
        for name in ("spec", "plan", "result", "warnings"):
            values[name] = None if values[name] is None else json.loads(values[name])
        return cls(**values | {"need": need, "state": State(values["state"])})


class _Last:
    """The last id that was made."""

    number = 0


def new_id() -> str:
    """Return a ULID: 26 characters that sort by the order of the calls. See github.com/ulid/spec.

    Only one thread at a time may call this.
    """
    number = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10))
    _Last.number = number = max(number, _Last.number + 1)
    return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(26)))
