"""Small services for tests: jobs on the host backend, with state and arrays in one folder."""

from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.service import dispatcher
from oocgemm.service.backfill import Limits, Need
from oocgemm.service.confinement import Confinement
from oocgemm.service.dispatcher import Dispatcher
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import planned
from oocgemm.service.job_store import JobRecord, JobStore, NewJob
from oocgemm.service.job_worker import LOG
from oocgemm.service.protocol import FINAL

# Two devices: two jobs run at a time. On the host backend, a job needs no device memory.
LIMITS = Limits({0: 0, 1: 0}, 4 << 30, 1 << 40)
EXTENT, TILE = 64, "16x16x16"


def plain_job(c: str = "/c", **options: Any) -> NewJob:
    """Return a job that is never run."""
    defaults: dict[str, Any] = {"owner": "user", "spec": {}, "plan": {}, "need": Need(), "seconds": 1.0}
    return NewJob(**defaults | {"c_path": c} | options)


def store_operands(folder: Path, extent: int = EXTENT) -> None:
    """Write A and B, of small integers."""
    rng = np.random.default_rng(3)
    for name in "AB":
        np.save(folder / f"{name}.npy", rng.integers(-4, 5, (extent, extent)).astype(np.float64))


def product_of(folder: Path) -> Any:
    """Return A B."""
    return np.load(folder / "A.npy") @ np.load(folder / "B.npy")


def product_job(folder: Path, c: str, owner: str = "user", **options: Any) -> NewJob:
    """Return a job that stores A B in an array of a folder."""
    spec = {"a": str(folder / "A.npy"), "b": str(folder / "B.npy"), "c": str(folder / c)}
    found = planned(checked(spec | {"options": {"tile": TILE} | options}), LIMITS, "host")
    return NewJob(
        owner=owner, spec=found.spec, plan=found.summary, need=found.need, seconds=found.seconds,
        c_path=found.spec["c"],
    )  # fmt: skip


def start_job(
    folder: Path, attempt: int, spec: dict[str, Any], confine: Confinement | None = None
) -> dispatcher.Process:
    """Start an attempt of a job in a new worker, as a dispatcher does."""
    for made in (folder, folder.parent.parent / "workers"):
        made.mkdir(parents=True, exist_ok=True)
    process = dispatcher.spawn(folder.parent.parent / "workers", folder / LOG)
    dispatcher.hand(process, folder, attempt, spec, 0, confine)
    return process


def run_all(dispatcher: Dispatcher, store: JobStore, passes: int = 6000) -> list[JobRecord]:
    """Repeat passes until all jobs have ended; return them."""
    for _ in range(passes):
        dispatcher.step()
        jobs = store.jobs()
        if all(job.state in FINAL for job in jobs):
            return jobs
        dispatcher.wait(0.02)
    raise AssertionError([(job.state, job.reason, job.error) for job in store.jobs()])
