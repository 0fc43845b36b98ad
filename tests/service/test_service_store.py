"""The database of a service: legal changes only, all or none, and clear errors."""

import sqlite3
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from oocgemm.service.backfill import MAX_CONSIDERED, Limits, Need, Running, decide
from oocgemm.service.job_store import HALF_LIFE, JobRecord, JobStore
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
    requested,
)
from tests.support.services import plain_job
from tests.support.suite import examples


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    found = JobStore(tmp_path / "db")
    yield found
    found.close()


def test_a_job_is_stored_with_its_event(store: JobStore) -> None:
    (job,) = store.submit([plain_job("/c", name="first", need=Need(1, 2, 3), priority=4)])
    assert store.get(job.id) == job
    assert (job.state, job.need, job.priority, job.version) == (State.QUEUED, Need(1, 2, 3), 4, 1)
    assert [(one["job"], one["kind"]) for one in store.events()] == [(job.id, "queued")]
    assert len(job.id) == 26


def test_a_batch_is_stored_whole_or_not_at_all(store: JobStore) -> None:
    with pytest.raises(ConflictError, match=r"queued, writes the same C: cancel it"):
        store.submit([plain_job("/c"), plain_job("/d"), plain_job("/c")])
    with pytest.raises(UnknownJobError):
        store.submit([plain_job("/c"), plain_job("/d", needs=("nobody",))])
    assert store.jobs() == []
    assert store.events() == []
    first, second = store.submit([plain_job("/c"), plain_job("/d", needs=("#0",))])
    assert store.needs_of([second.id]) == {second.id: [first.id]}
    assert {job.id for job, _ in store.waiting() if job.blocked} == {second.id}


def test_two_live_jobs_never_share_a_c(store: JobStore) -> None:
    (job,) = store.submit([plain_job("/c")])
    with pytest.raises(ConflictError, match=job.id):
        store.submit([plain_job("/c")])
    store.request(job.id, Action.CANCEL)
    (other,) = store.submit([plain_job("/c")])
    with pytest.raises(ConflictError, match=other.id):
        store.request(job.id, Action.RETRY)


def test_one_key_gives_one_job_whoever_comes_first(store: JobStore) -> None:
    def submit(number: int) -> list[JobRecord]:
        return store.submit([plain_job("/c")], key="k", body_sha256="body", owner="user")

    with ThreadPoolExecutor(20) as pool:
        found = {job.id for jobs in pool.map(submit, range(100)) for job in jobs}
    assert len(found) == 1
    with pytest.raises(KeyReusedError, match="send a new key"):
        store.submit([plain_job("/d")], key="k", body_sha256="another", owner="user")
    assert store.submit([plain_job("/d")], key="k", body_sha256="another", owner="other")


def test_a_late_change_does_nothing(store: JobStore) -> None:
    (job,) = store.submit([plain_job()])
    store.move(job, State.STARTING, attempt=1)
    with pytest.raises(StaleError):
        store.move(job, State.STARTING, attempt=1)
    assert store.get(job.id).attempt == 1


def test_versions_protect_changes_by_users(store: JobStore) -> None:
    (job,) = store.submit([plain_job()])
    assert store.update(job.id, job.version, priority=3).priority == 3
    with pytest.raises(StaleError, match="has version 2, not 1"):
        store.update(job.id, job.version, priority=4)
    store.request(job.id, Action.CANCEL)
    with pytest.raises(ConflictError, match="cancelled"):
        store.update(job.id, priority=4)


def test_records_of_ended_jobs_can_be_deleted(store: JobStore) -> None:
    first, second = store.submit([plain_job("/c"), plain_job("/d", needs=("#0",))])
    with pytest.raises(ConflictError, match="cancel it"):
        store.delete(first.id)
    store.request(first.id, Action.CANCEL)
    with pytest.raises(ConflictError, match=second.id):
        store.delete(first.id)
    store.request(second.id, Action.CANCEL)
    store.delete(first.id)
    with pytest.raises(UnknownJobError, match=r"no job .* oocgemm queue"):
        store.get(first.id)


def test_pages_of_jobs_have_all_jobs_once(store: JobStore) -> None:
    ids = [store.submit([plain_job(f"/{number}")])[0].id for number in range(10)]
    seen: list[str] = []
    while page := store.jobs(after=seen[-1] if seen else None, limit=3):
        seen += [job.id for job in page]
    assert seen == ids[::-1]


def test_usage_counts_half_after_a_day(tmp_path: Path) -> None:
    now = 1e9
    store = JobStore(tmp_path / "db", lambda: now)
    store.charge("user", 100)
    now += HALF_LIFE
    store.charge("user", 10)
    assert store.usage()["user"] == pytest.approx(60)
    now -= 2 * HALF_LIFE  # the clock was set back
    assert store.usage()["user"] == pytest.approx(60)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_delays_no_retry_for_long(tmp_path: Path, hours: int) -> None:
    now = 1e9
    store = JobStore(tmp_path / "db", lambda: now)
    (job,) = store.submit([plain_job()])
    job = store.move(job, State.STARTING, attempt=1)
    store.move(job, State.QUEUED, not_before=now + 80)
    assert store.waiting()[0][0].blocked is Reason.RETRY_AT
    now += 3600 * hours
    assert store.waiting()[0][0].blocked is None


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(DatabaseError, match="database format 99, this one has format 2"):
        JobStore(tmp_path / "db")


def test_a_locked_database_is_an_error_that_says_so(store: JobStore, tmp_path: Path) -> None:
    store._db.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(tmp_path / "db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseError, match=r"database is locked: check the space"):
        store.submit([plain_job()])
    other.execute("ROLLBACK")
    assert store.submit([plain_job()])


def test_a_full_disk_is_an_error_and_nothing_is_stored(store: JobStore) -> None:
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(DatabaseError, match=r"disk is full"):
        store.submit([plain_job("/c", spec={"big": "x" * 100_000})])
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.jobs() == []


def test_a_database_that_cannot_be_written_is_an_error(store: JobStore) -> None:
    store._db.execute("PRAGMA query_only = 1")
    with pytest.raises(DatabaseError, match="readonly"):
        store.submit([plain_job()])


@pytest.mark.slow
def test_submissions_stay_fast_with_many_queued_jobs(store: JobStore) -> None:
    """The time is compared with that in an empty database, since it is mostly that of the disk."""

    def times(first: int, count: int) -> list[float]:
        found = []
        for number in range(first, first + count):
            start = time.perf_counter()
            store.submit([plain_job(f"/{number}")])
            found.append(time.perf_counter() - start)
        return found

    few = times(0, 200)
    store.submit([plain_job(f"/{number}") for number in range(1000, 11000)])
    many = times(20000, 200)
    assert statistics.median(many) < 5 * statistics.median(few) + 0.005
    print(statistics.median(few), sorted(many)[-2])


def test_the_first_jobs_of_each_owner_that_can_start_are_considered(store: JobStore) -> None:
    few = MAX_CONSIDERED // 2
    (held,) = store.submit([plain_job("/held", held=True)])
    needing = store.submit([plain_job(f"/needing{i}", needs=(held.id,)) for i in range(MAX_CONSIDERED + 2)])
    ready = store.submit([plain_job(f"/ready{i}") for i in range(MAX_CONSIDERED + 2)])
    other = store.submit([plain_job(f"/other{i}", owner="other") for i in range(few)])
    (urgent,) = store.submit([plain_job("/urgent", priority=1)])
    (late,) = store.submit([plain_job("/late")])
    late = store.move(late, State.STARTING, attempt=1)
    store.move(late, State.QUEUED, not_before=time.time() + 60)

    found = {job.id: job.blocked for job, _ in store.waiting()}
    can_start = [urgent, *ready[: MAX_CONSIDERED - 1], *other]
    assert {job for job, blocked in found.items() if blocked is None} == {job.id for job in can_start}
    blocked = {job.id: Reason.DEPENDENCY for job in needing[:MAX_CONSIDERED]}
    assert {job: why for job, why in found.items() if why} == blocked | {late.id: Reason.RETRY_AT}


class Model(RuleBasedStateMachine):
    """Random calls, compared with a model: a dict of states."""

    jobs = Bundle("jobs")

    @initialize()
    def open(self) -> None:
        self.folder = TemporaryDirectory()
        self.store = JobStore(Path(self.folder.name) / "db")
        self.store._db.execute("PRAGMA synchronous = OFF")  # nothing crashes here
        self.states: dict[str, State] = {}
        self.c: dict[str, str] = {}
        self.limits = Limits({0: 10, 1: 5}, 20, 1 << 40)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def taken(self, c: str, but: str = "") -> bool:
        return any(self.c[job] == c and job != but and self.states[job] not in FINAL for job in self.states)

    @rule(target=jobs, c=st.sampled_from("abcdef"), device=st.integers(0, 6), host=st.integers(0, 12))
    def submit(self, c: str, device: int, host: int) -> str:
        new = plain_job(c, need=Need(device, host, 0), owner=c)
        if self.taken(c):
            with pytest.raises(ConflictError):
                self.store.submit([new])
            return ""
        (job,) = self.store.submit([new])
        self.states[job.id], self.c[job.id] = State.QUEUED, c
        return job.id

    @rule(job=jobs, action=st.sampled_from(Action))
    def ask(self, job: str, action: Action) -> None:
        if not job:
            return
        to = requested(action, self.states[job])
        if to is None or (self.states[job] in FINAL and to not in FINAL and self.taken(self.c[job], job)):
            with pytest.raises(ConflictError):
                self.store.request(job, action)
        else:
            assert self.store.request(job, action).state is to
            self.states[job] = to

    @rule()
    def start(self) -> None:
        now = time.time()
        running = [
            Running(job.id, job.owner, job.device or 0, job.need, now + 1) for job in self.store.active()
        ]
        waiting = [job for job, _ in self.store.waiting()]
        for one in decide(waiting, running, self.limits, self.store.usage(), now):
            if one.device is not None:
                job = self.store.get(one.id)
                self.store.move(job, State.STARTING, attempt=job.attempt + 1, device=one.device)
                self.states[one.id] = State.STARTING

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """A process begins, ends or dies."""
        active = sorted(job for job, state in self.states.items() if state in ACTIVE)
        if active:
            name = data.draw(st.sampled_from(active))
            job = self.store.get(name)
            to = data.draw(st.sampled_from(sorted(FOLLOWING[job.state])))
            self.states[name] = self.store.move(job, to).state

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        found = self.store.jobs()
        assert {job.id: job.state for job in found} == self.states
        active = [job for job in found if job.state in ACTIVE]
        assert sum(job.need.host for job in active) <= self.limits.host
        devices = [job.device for job in active]
        assert len(devices) == len({*devices})
        live = [job.c_path for job in found if job.state not in FINAL]
        assert len(live) == len({*live})


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=examples(20, quick=8), stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_ten_thousand_random_calls_lead_to_legal_states_only() -> None:
    class Long(Model):
        pass

    case = Long.TestCase
    case.settings = settings(max_examples=examples(200, quick=20), stateful_step_count=50, deadline=None)
    case("runTest").runTest()


def test_changes_made_together_are_one_transaction(store: JobStore) -> None:
    told: list[int] = []
    store.observers.append(lambda: told.append(len(store.jobs())))
    with store.together():
        (job,) = store.submit([plain_job()])
        store.charge("user", 1.0)
    assert told == [1]

    def charge_late() -> None:
        with store.together():
            store.charge("user", 1.0)
            store.move(replace(job, attempt=7), State.STARTING)

    with pytest.raises(StaleError):
        charge_late()
    assert store.usage()["user"] == pytest.approx(1.0)
    assert told == [1]
