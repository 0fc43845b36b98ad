"""Servers, jobs and workers are killed at random instants, and servers at each point of a job's life."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from oocgemm.service import dispatcher
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import call, planned
from oocgemm.service.job_spec import out_of, with_paths
from oocgemm.service.job_store import JobRecord, JobStore, NewJob
from oocgemm.service.job_worker import TILES
from oocgemm.service.protocol import FINAL, State
from tests.support.service_server import POINTS
from tests.support.services import LIMITS, TILE, product_job, product_of, store_operands
from tests.support.suite import slow

TILE_COUNT = 16
# How often a server dies at each point.
DEATHS = 20


def process_with(argument: str) -> int | None:
    """Return the process that has an argument in its command line; None if there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    return None


class Victims:
    """A server and its jobs, which are killed."""

    def __init__(self, folder: Path, seed: int, specs: Sequence[dict[str, Any]] = ()) -> None:
        """`specs` are the jobs that are submitted in turns, A B by default. Each is planned once."""
        self.folder, self.rng = folder, random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.server: subprocess.Popen[bytes] | None = None
        store_operands(folder)
        self.jobs = [verb_job(folder, spec) for spec in specs] or [product_job(folder, "C.npy")]
        self.store = JobStore(folder / "db")
        self.submitted = 0

    def submit(self, count: int) -> None:
        for number in range(self.submitted, self.submitted + count):
            first = self.jobs[number % len(self.jobs)]
            place = Path(first.c_path)
            path = str(place.with_name(f"C{number}{place.suffix}"))
            spec = with_paths(first.spec, lambda name, old, write, new=path: new if write else old)  # type: ignore[misc]
            values = vars(first) | {"c_path": path, "spec": spec, "max_attempts": 1000}
            self.store.submit([type(first)(**values)])
        self.submitted += count

    def start(self, *options: str) -> None:
        with open(self.folder / "server.log", "ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.service_server", str(self.folder), *options],
                stdout=log,
                stderr=log,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        self.kills["server"] += 1
        self.start()

    def kill_worker(self) -> None:
        """Kill a random worker, if there is one, whether it has a job or not."""
        workers = list((self.folder / "workers").glob("*"))
        if workers and (pid := process_with(str(self.rng.choice(workers)))) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills["worker"] += 1

    def kill_job(self) -> None:
        """Kill the process of a random job, if there is one."""
        active = self.store.active()
        if not active:
            return
        process = dispatcher.attach(self.folder / "jobs" / self.rng.choice(active).id)
        if process is not None:
            if not process.ended:
                process.send(signal.SIGKILL)
                self.kills["job"] += 1
            process.close()

    def finish(self, server_kills: int, job_kills: int, seconds: float) -> list[JobRecord]:
        """Kill at random until there were so many kills; return all jobs when they have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.server is not None
            if self.server.poll() is not None:
                self.start()
            left = self.submitted - len(self.store.jobs(FINAL))
            wanted = [
                max(0, server_kills - self.kills["server"]),
                max(0, job_kills - self.kills["job"]),
                max(0, job_kills - self.kills["worker"]),
            ]
            if not left and not any(wanted):
                return self.store.jobs()
            if any(wanted):
                if left < 2:  # on a fast machine, the jobs may end before the last kills
                    self.submit(2)
                    left += 2
                (kill,) = self.rng.choices([self.kill_server, self.kill_job, self.kill_worker], wanted)
                kill()
                # The kills are spread over the time of all jobs.
                pause = min(1.0, 0.35 * left / sum(wanted))
                time.sleep(self.rng.uniform(0, 2 * pause))
            else:
                time.sleep(0.1)
        raise AssertionError(Counter(job.state for job in self.store.jobs()))

    def check(self, jobs: list[JobRecord]) -> None:
        """Check that every product is right, and that no finished tile was computed again."""
        right = product_of(self.folder)
        for job in jobs:
            assert job.state is State.SUCCEEDED, (job.state, job.error)
            np.testing.assert_array_equal(np.load(job.c_path), right)
            # The last process computed exactly the tiles that were not in C's journal when it began.
            lines = (self.folder / "jobs" / job.id / TILES).read_text().split("\n")[:-1]
            assert job.result is not None
            last = [line for line in lines if line.startswith(f"{job.result['attempt']} ")]
            assert len(last) == len({*last}) == TILE_COUNT - job.result["kept_tiles"]
            kinds = [one["kind"] for one in self.store.events(job=job.id)]
            assert kinds.count("starting") == job.attempt
            assert kinds.count("succeeded") == 1

    @property
    def dead(self) -> bool:
        """Whether the server has killed itself."""
        assert self.server is not None
        return self.server.poll() == -signal.SIGKILL

    def close_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def close(self) -> None:
        self.close_server()
        self.store.close()


# Jobs of which each verb returns, stores or saves its result in another way, with small tiles.
MIXED: list[dict[str, Any]] = [
    {"a": "A.npy", "b": "B.npy", "c": "0.npy"},
    {"verb": "gram", "x": "A.npy", "out": "1.zarr", "options": {"uplo": "lower"}},
    {"verb": "similarity", "e": "A.npy", "out": "2.zarr", "options": {"topk": 3}},
    {"verb": "pca", "x": "A.npy", "k": 3, "out": "3.zarr", "options": {"tol": 0, "scores": True}},
    {"verb": "grm", "x": "G.npy", "out": "4.zarr", "options": {"pairwise": True}},
    {"verb": "corr", "x": "A.npy", "y": "B.npy", "out": "5.zarr", "options": {"threshold": 0.1}},
    {"verb": "reduce", "a": "A.npy", "to": {"Reduce": {"kind": "sum"}}, "out": "6.npy"},
    {"verb": "ld_scores", "x": "G.npy", "out": "7.npy", "options": {"window": 5, "constant": "drop"}},
    {"verb": "lstsq", "x": "T.npy", "y": "Y.npy", "out": "8.zarr"},
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("jobs", "kills"), [(len(MIXED), 2), *slow((200, 167))])
def test_results_of_all_verbs_are_those_of_direct_runs_if_servers_and_jobs_are_killed(
    tmp_path: Path, jobs: int, kills: int
) -> None:
    rng = np.random.default_rng(7)
    np.save(tmp_path / "G.npy", rng.integers(-1, 3, (64, 64)).astype(np.int8))
    np.save(tmp_path / "T.npy", rng.standard_normal((64, 16)))
    np.save(tmp_path / "Y.npy", rng.standard_normal(64))
    victims = Victims(tmp_path, seed=jobs, specs=MIXED)
    right = [directly(tmp_path / "direct", job.spec) for job in victims.jobs]
    victims.submit(jobs)
    victims.start()
    try:
        ended = sorted(victims.finish(kills, kills, 1700), key=lambda job: job.id)
    finally:
        victims.close()
    for number, job in enumerate(ended):
        assert job.state is State.SUCCEEDED, (job.spec, job.error)
        found, expected = arrays_at(Path(job.c_path)), right[number % len(MIXED)]
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{job.spec} {name}")
        beside = Path(job.c_path).parent / f".{Path(job.c_path).name}.job"
        assert not beside.exists()
    print(jobs, dict(victims.kills))


def verb_job(folder: Path, spec: dict[str, Any]) -> NewJob:
    """Return a job of a spec whose paths are in a folder. Its tiles are small."""
    tile = {"tile": TILE} if spec.get("verb") not in ("pca", "lstsq") else {}
    options = tile | spec.get("options", {})
    given = with_paths(spec | {"options": options}, lambda name, path, write: str(folder / path))
    found = planned(checked(given), LIMITS, "host")
    return NewJob(
        owner="user", spec=found.spec, plan=found.summary, need=found.need, seconds=found.seconds,
        c_path=out_of(found.spec),
    )  # fmt: skip


def directly(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a spec's result, which its verb computes in this process."""
    folder.mkdir(exist_ok=True)
    place = folder / Path(out_of(spec)).name
    found = call(with_paths(spec, lambda name, path, write: str(place) if write else path))
    if not place.exists():
        found.save(place) if hasattr(found, "save") else np.save(place, found)
    return arrays_at(place)


def arrays_at(path: Path) -> dict[str, Any]:
    """Return the arrays of a result by name."""
    if path.suffix == ".npy":
        return {"": np.load(path)}
    stored: Any = zarr.open(path, mode="r")
    if isinstance(stored, zarr.Array):
        return {"": stored[:]}
    return {name: array[:] for name, array in stored.arrays()}


def until(ready: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("jobs", "kills"), [(8, 2), *slow((1000, 100))])
def test_no_job_is_lost_or_wrong_if_servers_and_jobs_are_killed(
    tmp_path: Path, jobs: int, kills: int
) -> None:
    victims = Victims(tmp_path, seed=jobs)
    victims.submit(jobs)
    victims.start()
    start = time.monotonic()
    try:
        victims.check(victims.finish(kills, kills, 800))
    finally:
        victims.close()
    assert victims.kills == {"server": kills, "job": kills, "worker": kills}
    print(jobs, dict(victims.kills), f"{time.monotonic() - start:.0f} s")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("point", "deaths"), [(POINTS[0], 2), *slow(*((each, DEATHS) for each in POINTS))])
def test_a_server_may_die_at_any_point(tmp_path: Path, point: str, deaths: int) -> None:
    """It dies when it gets to the point for the first, second, third or fourth time, again and again."""
    victims = Victims(tmp_path, seed=1)
    died = 0
    try:
        for _ in range(3 * deaths):
            if died == deaths:
                break
            if len(victims.store.jobs(set(State) - FINAL)) < 4:
                victims.submit(4)
            if "attach" in point:  # only a server that finds processes of another one gets there
                victims.start()
                until(lambda: State.RUNNING in {job.state for job in victims.store.active()})
                victims.close_server()
            number = 1 if "attach" in point else 1 + died % 4
            victims.start(*point.split(), str(number))
            until(lambda: victims.dead or not victims.store.jobs(set(State) - FINAL))
            died += victims.dead
            victims.close_server()
        victims.start()
        victims.check(victims.finish(0, 0, 400))
    finally:
        victims.close()
    # The jobs of a server that has died may all have ended before the next one could find their workers.
    assert died == deaths or "attach" in point
    print(point, died)


def test_the_lock_of_a_job_is_free_when_its_process_is_dead(tmp_path: Path) -> None:
    victims = Victims(tmp_path, seed=2)
    victims.submit(1)
    victims.start()
    try:
        (job,) = victims.store.jobs()
        folder = tmp_path / "jobs" / job.id
        while not dispatcher.has_begun(folder, 1):
            time.sleep(0.001)
        victims.kill_server()
        victims.check(victims.finish(1, 0, 60))
        assert not dispatcher.is_alive(folder)
    finally:
        victims.close()
