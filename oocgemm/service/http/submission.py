"""From the body of a request to a job of the store."""

import time
from collections.abc import Mapping
from typing import Any

from oocgemm.errors import OocGemmError
from oocgemm.service.confine.paths import resolve
from oocgemm.service.errors import TooManyJobsError
from oocgemm.service.http.identity import Identity
from oocgemm.service.http.plans import Turn
from oocgemm.service.http.service import Service
from oocgemm.service.http.views import JobBody, PlanView
from oocgemm.service.planner import Planned
from oocgemm.service.schedule import Waiting
from oocgemm.service.schema import Job, NewJob


def plan_job(service: Service, body: JobBody) -> Planned:
    """Plan a job.

    Raises:
        PathError: a path is not allowed.
        InputError: the product is impossible.
        BudgetError: the budgets, or the limits of the service, are too small.
    """
    paths = {
        name: str(resolve(service.roots, getattr(body, name), write=name == "c")) for name in ("a", "b", "c")
    }
    spec: Mapping[str, Any] = {**paths, "options": dict(body.options)}
    try:
        return service.planner.plan(spec, service.limits(), service.backend)
    except Exception as error:
        # Messages name absolute paths. Users see the names that they have written.
        error.args = tuple(service.shown(each) if isinstance(each, str) else each for each in error.args)
        raise


def submit(
    service: Service, bodies: list[JobBody], user: Identity, key: str | None, digest: str, turn: Turn
) -> list[Job]:
    """Plan and store jobs, all or none.

    Args:
        service: the service.
        bodies: the jobs.
        user: their owner.
        key: the Idempotency-Key of the request, if it has one.
        digest: the SHA-256 of the request.
        turn: of the request, in which each job is planned.

    Raises:
        TooManyJobsError: the owner has too many jobs.
        OocGemmError: as `plan_job` and `Store.submit` raise them.
    """
    store = service.store
    if key is not None and (found := store.earlier(user.name, key, digest)) is not None:
        return found
    try:
        return store.submit(_new_jobs(service, bodies, user, turn), key, digest, user.name)
    except OocGemmError:
        # The same request may have been carried out meanwhile. Its job, or its C, is the reason then.
        if key is not None and (found := store.earlier(user.name, key, digest)) is not None:
            return found
        raise


def dry_run(service: Service, body: JobBody, user: Identity, turn: Turn) -> PlanView:
    """Return the plan of a job that is not submitted. Raises what `plan_job` raises."""
    with turn():
        job = _new_job(service, body, user)
        waiting = Waiting("~", job.owner, job.priority, time.time(), job.need, job.seconds)
        start = None if body.held or body.needs else service.dispatcher.predict(waiting)
    return PlanView(
        plan=job.plan,
        device_bytes=job.need.device,
        host_bytes=job.need.host,
        disk_bytes=job.need.disk,
        predicted_s=job.seconds,
        predicted_start=start,
    )


def _new_jobs(service: Service, bodies: list[JobBody], user: Identity, turn: Turn) -> list[NewJob]:
    limit, present = service.config.max_jobs, service.store.unfinished(user.name)
    if present + len(bodies) > limit:
        raise TooManyJobsError(
            f"{user.name} has {present} jobs that have not ended, and {limit} are allowed: wait for some, or "
            "cancel some"
        )
    jobs = []
    for number, body in enumerate(bodies):
        try:
            with turn():
                jobs.append(_new_job(service, body, user))
        except OocGemmError as error:
            if len(bodies) > 1:
                error.args = (f"job #{number}: {error}",)
            raise
    return jobs


def _new_job(service: Service, body: JobBody, user: Identity) -> NewJob:
    found = plan_job(service, body)
    return NewJob(
        owner=user.name,
        spec=found.spec,
        plan=found.summary,
        need=found.need,
        seconds=found.seconds,
        c_path=found.spec["c"],
        name=body.name,
        priority=body.priority,
        max_attempts=body.max_attempts,
        deadline=body.deadline,
        needs=tuple(body.needs),
        held=body.held,
    )
