"""The application: the routes of jobs. Other modules add theirs."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from oocgemm.service.http import events, files, machine, page, problems
from oocgemm.service.http.requests import OPEN, Shared, User
from oocgemm.service.http.service import Service
from oocgemm.service.http.submission import dry_run, submit
from oocgemm.service.http.views import (
    BatchBody,
    BatchView,
    ChangeBody,
    JobBody,
    JobsView,
    JobView,
    PlanView,
    ProblemView,
    QueueView,
)
from oocgemm.service.schema import Job
from oocgemm.service.states import Action, State
from oocgemm.system.version import __version__

Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=256)]
Match = Annotated[str | None, Header(max_length=64)]
_ACTIONS = {
    Action.CANCEL: "Cancel a job. Its finished tiles are kept.",
    Action.HOLD: "Keep a queued job from starting.",
    Action.RELEASE: "Let a held job start.",
    Action.PAUSE: "Stop a running job so that it can be resumed.",
    Action.RESUME: "Queue a paused job. Its finished tiles are kept.",
    Action.RETRY: "Queue a job that has failed or was cancelled. Its finished tiles are kept.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemView, "description": "The request is wrong."},
    "5XX": {"model": ProblemView, "description": "The service cannot answer now."},
}


def create(service: Service) -> FastAPI:
    """Return the application of a service."""
    app = FastAPI(
        title="oocgemm",
        version=__version__,
        description="A queue of matrix products in front of the GPUs of one machine.",
        responses=_ERRORS,
        docs_url=None,  # these pages load scripts from another origin
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        separate_input_output_schemas=False,
    )
    app.state.service = service
    routers = (jobs_routes(), events.routes(), files.routes(), machine.routes(), page.routes())
    problems.install(app, [route for router in routers for route in router.routes])
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return app


def jobs_routes() -> APIRouter:
    """Return the routes of jobs."""
    routes = APIRouter(prefix="/v1", tags=["jobs"])

    @routes.post("/jobs", status_code=202, responses={200: {"model": PlanView}})
    async def submit_job(
        body: JobBody,
        request: Request,
        response: Response,
        service: Shared,
        user: User,
        key: Key = None,
        dry: Annotated[bool, Query(alias="dry_run")] = False,
    ) -> JobView | PlanView:
        """Submit a job. With `dry_run`, only plan it.

        With an Idempotency-Key, a repeated request returns the job of the first one.
        """
        if dry:
            response.status_code = 200
            return await service.plans.run(request, user.name, partial(dry_run, service, body, user))
        digest = sha256(await request.body()).hexdigest()
        work = partial(submit, service, [body], user, key, digest)
        jobs = await service.plans.run(request, user.name, work)
        response.headers["Location"] = f"/v1/jobs/{jobs[0].id}"
        return _sent(response, (await run_in_threadpool(service.views, jobs))[0])

    @routes.post("/batches", status_code=202)
    async def submit_batch(
        body: BatchBody, request: Request, service: Shared, user: User, key: Key = None
    ) -> BatchView:
        """Submit jobs, all or none."""
        digest = sha256(await request.body()).hexdigest()
        work = partial(submit, service, body.jobs, user, key, digest)
        jobs = await service.plans.run(request, user.name, work)
        return BatchView(jobs=await run_in_threadpool(service.views, jobs))

    @routes.get("/jobs")
    def list_jobs(
        service: Shared,
        state: Annotated[Sequence[State], Query()] = (),
        owner: str | None = None,
        cursor: Annotated[str | None, Query(max_length=26)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JobsView:
        """List jobs, from the newest to the oldest."""
        found = service.store.jobs(tuple(state), owner, cursor, limit + 1)
        more = len(found) > limit
        return JobsView(jobs=service.views(found[:limit]), next=found[limit - 1].id if more else None)

    @routes.get("/queue")
    def get_queue(service: Shared, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> QueueView:
        """Return the jobs that have not ended, with at most `limit` of those that wait."""
        return service.queue(limit)

    @routes.get(
        "/jobs/{job}", responses={200: {"model": JobView}, 304: {"description": "The job has not changed."}}
    )
    async def get_job(
        job: str,
        response: Response,
        service: Shared,
        user: User,
        wait: Annotated[float, Query(ge=0, le=60)] = 0,
        if_none_match: Match = None,
    ) -> Any:
        """Return a job. With `wait` and If-None-Match, wait so many seconds for a change."""
        clock = asyncio.get_running_loop().time
        end = clock() + wait
        while True:
            woken = service.feed.woken
            if not await run_in_threadpool(service.store.is_valid, user):
                raise HTTPException(401, "the token has been revoked, or has expired: use another one")
            found = await run_in_threadpool(service.store.get, job)
            if not _matches(if_none_match, found.version):
                (view,) = await run_in_threadpool(service.views, [found])
                return _sent(response, view)
            left = end - clock()
            if left <= 0 or service.feed.closed:
                return Response(status_code=304, headers={"ETag": _tag(found.version)})
            await service.feed.wait(woken, left)

    @routes.patch("/jobs/{job}")
    def change_job(
        job: str,
        body: ChangeBody,
        response: Response,
        service: Shared,
        user: User,
        if_match: Match = None,
    ) -> JobView:
        """Change priority, deadline or attempts of a job. With If-Match, only if it has not changed."""
        user.check_change(service.store.get(job))
        changed = service.store.update(job, _version(if_match), **body)
        return _sent(response, service.views([changed])[0])

    @routes.delete("/jobs/{job}", status_code=204)
    def delete_job(job: str, service: Shared, user: User) -> None:
        """Delete the records of a job that has ended. C is kept."""
        user.check_change(service.store.get(job))
        service.store.delete(job)
        files.remove(service.dispatcher.folder_of(job))

    for action in Action:
        routes.post(f"/jobs/{{job}}/{action}", name=f"{action}_job")(_acting(action))
    return routes


def _acting(action: Action) -> Callable[..., JobView]:
    def act(job: str, response: Response, service: Shared, user: User) -> JobView:
        user.check_change(service.store.get(job))
        found: Job = service.store.request(job, action)
        return _sent(response, service.views([found])[0])

    act.__doc__ = f"{_ACTIONS[action]} A repeated request changes nothing."
    return act


def _sent(response: Response, view: JobView) -> JobView:
    response.headers["ETag"] = _tag(view.version)
    return view


def _tag(version: int) -> str:
    return f'"{version}"'


def _matches(header: str | None, version: int) -> bool:
    """Return whether an If-None-Match header names a version. Proxies make tags weak when they compress."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return _tag(version) in tags or "*" in tags


def _version(tag: str | None) -> int | None:
    """Return the version that an If-Match header names; one that no job has if it is malformed."""
    if tag is None or tag == "*":
        return None
    number = tag.strip('"')
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 18 else -1


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description: errors are problem documents, and all requests need a token."""
    if app.openapi_schema is None:
        described = FastAPI.openapi(app)
        for name, path in described["paths"].items():
            for operation in path.values():
                if name in OPEN:
                    operation["security"] = []
                responses = operation["responses"]
                responses.pop("422", None)  # as any 4XX
                for status in ("4XX", "5XX"):
                    shape = {"schema": {"$ref": "#/components/schemas/ProblemView"}}
                    responses[status]["content"] = {problems.MEDIA_TYPE: shape}
        schemas = described["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
        app.openapi_schema = described
    return app.openapi_schema
