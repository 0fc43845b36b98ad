"""The routes of jobs, of their files, of the machine, of the page, and of the stream of changes.

A request that submits jobs is planned in the turns of its user (`Plans`).
"""

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from oocgemm.errors import OocGemmError
from oocgemm.service.backfill import Waiting
from oocgemm.service.http.form import forms
from oocgemm.service.http.security import COOKIE, SESSION_SECONDS, Identity, Scope
from oocgemm.service.http.service import Service, Shared, User
from oocgemm.service.http.views import (
    AnyJob,
    BatchBody,
    BatchView,
    ChangeBody,
    DevicesView,
    DeviceView,
    DiskView,
    DrainBody,
    DrainView,
    HealthView,
    HostView,
    JobBody,
    JobsView,
    JobView,
    LoginBody,
    PlanView,
    QueueView,
    RootsView,
    RootView,
    TilesView,
    UserView,
    problem,
)
from oocgemm.service.job_spec import out_of, parameters, with_paths
from oocgemm.service.job_store import JobRecord, NewJob
from oocgemm.service.job_worker import LOG, TIMELINE
from oocgemm.service.limits import resolve
from oocgemm.service.protocol import FINAL, AccessError, Action, DatabaseError, State, TooManyJobsError

# Seconds between two messages of a stream. A message has all events since the last one, and the progress of
# running jobs.
SEND_SECONDS = 0.5
# Seconds without events after which a comment shows that the connection is alive.
ALIVE_SECONDS = 15.0
# Without this header, proxies such as nginx would buffer the events.
HEADERS = {"X-Accel-Buffering": "no"}

Number = Annotated[int, Query(ge=0, lt=2**62)]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, each with its number as id."}
}
_ENDED: dict[int | str, dict[str, Any]] = {
    204: {"description": "The job has ended, and the client has all its events."}
}

logger = logging.getLogger("oocgemm")


def _after(
    after: Number | None = None, last: Annotated[str | None, Header(alias="Last-Event-ID")] = None
) -> int | None:
    """Return the number of the last event that a client has: its Last-Event-ID, or else `after`."""
    valid = last is not None and last.isascii() and last.isdecimal() and len(last) < 19
    return int(last) if last is not None and valid else after


After = Annotated[int | None, Depends(_after)]


def event_routes() -> APIRouter:
    """Return the routes of events."""
    router = APIRouter(prefix="/v1", tags=["events"], default_response_class=StreamingResponse)

    @router.get("/events", responses=_STREAM)
    async def all_events(service: Shared, user: User, after: After) -> StreamingResponse:
        """Send the changes of all jobs, from now on or after the event with a number."""
        after = await run_in_threadpool(service.store.newest) if after is None else after
        return _stream(_events(service, user, None, after))

    @router.get("/jobs/{job}/events", responses=_STREAM | _ENDED)
    async def job_events(job: str, service: Shared, user: User, after: After) -> Response:
        """Send the changes of a job, all or those after the event with a number, until it has ended."""
        found = await run_in_threadpool(service.store.get, job)
        if found.state in FINAL and after and not await run_in_threadpool(service.store.events, after, job):
            return Response(status_code=204)  # tells an EventSource not to connect again
        return _stream(_events(service, user, job, after or 0))

    return router


def _stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, headers=HEADERS, media_type="text/event-stream")


async def _events(service: Service, user: Identity, job: str | None, after: int) -> AsyncIterator[str]:
    """Yield the text of events until the server or the job ends, or the token of the user is invalid."""
    known: dict[tuple[str, str], BaseModel] = {}
    clock = asyncio.get_running_loop().time
    alive = clock()
    yield ": connected\n\n"
    while not service.feed.closed:
        begun, woken = clock(), service.feed.woken
        try:
            if not await run_in_threadpool(service.store.is_valid, user):
                return  # the client connects again, and gets the reason as an error
            found = await run_in_threadpool(service.store.events, after, job)
            progress = await run_in_threadpool(_progress, service, job, known)
        except DatabaseError as error:
            logger.error("%s", error)
            return  # the client connects again, and gets the reason as an error
        for one in found:
            if isinstance(one["data"].get("error"), str):
                one["data"]["error"] = service.shown(one["data"]["error"])
        texts = [f"id: {one['seq']}\nevent: {one['kind']}\ndata: {json.dumps(one)}\n\n" for one in found]
        if found or progress:
            alive = clock()
            yield "".join(texts + progress)
        elif clock() - alive > ALIVE_SECONDS:
            alive = clock()
            yield ": alive\n\n"
        if found:
            after = found[-1]["seq"]
            if job is not None and found[-1]["kind"] in (*FINAL, "deleted"):
                return
        await service.feed.wait(woken, SEND_SECONDS)
        await asyncio.sleep(begun + SEND_SECONDS - clock())


def _progress(service: Service, job: str | None, known: dict[tuple[str, str], BaseModel]) -> list[str]:
    """Return the events of progress and activity that differ from `known`, and update `known`."""
    texts = []
    for one in service.store.jobs((State.RUNNING,)):
        if job is not None and one.id != job:
            continue
        for kind, found in (("progress", service.progress(one)), ("activity", service.activity(one))):
            if found is not None and known.get((one.id, kind)) != found:
                known[one.id, kind] = found
                event = {"job": one.id, "kind": kind, "data": found.model_dump()}
                texts.append(f"event: {kind}\ndata: {json.dumps(event)}\n\n")
    return texts


# A report is a page with scripts of its own. In this sandbox, the scripts can neither read the service nor
# send anything.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:; frame-ancestors 'self'"
)
FOLDER = Path(__file__).parents[1] / "page"
# The page looks as the report does, so it uses the same style.
REPORT_STYLE = Path(__file__).parents[2] / "reports" / "web" / "page.css"
_ACTIONS = {
    Action.CANCEL: "Cancel a job. Its finished tiles are kept.",
    Action.HOLD: "Keep a queued job from starting.",
    Action.RELEASE: "Let a held job start.",
    Action.PAUSE: "Stop a running job so that it can be resumed.",
    Action.RESUME: "Queue a paused job. Its finished tiles are kept.",
    Action.RETRY: "Queue a job that has failed or was cancelled. Its finished tiles are kept.",
}

Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=256)]
Match = Annotated[str | None, Header(max_length=64)]
Range = Annotated[str | None, Header(max_length=64)]


def job_routes() -> APIRouter:
    """Return the routes of jobs."""
    router = APIRouter(prefix="/v1", tags=["jobs"])

    @router.post("/jobs", status_code=202, responses={200: {"model": PlanView}})
    async def submit_job(
        body: AnyJob,
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
            return await service.plans.run(request, user.name, _dry_run(service, body, user))
        digest = sha256(await request.body()).hexdigest()
        work = _submit(service, [body], user, key, digest)
        jobs = await service.plans.run(request, user.name, work)
        response.headers["Location"] = f"/v1/jobs/{jobs[0].id}"
        return _sent(response, (await run_in_threadpool(service.views, jobs))[0])

    @router.post("/batches", status_code=202)
    async def submit_batch(
        body: BatchBody, request: Request, service: Shared, user: User, key: Key = None
    ) -> BatchView:
        """Submit jobs, all or none."""
        digest = sha256(await request.body()).hexdigest()
        work = _submit(service, body.jobs, user, key, digest)
        jobs = await service.plans.run(request, user.name, work)
        return BatchView(jobs=await run_in_threadpool(service.views, jobs))

    @router.get("/jobs")
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

    @router.get("/queue")
    def get_queue(service: Shared, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> QueueView:
        """Return the jobs that have not ended, with at most `limit` of those that wait."""
        return service.queue(limit)

    @router.get(
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
        """Return a job. With `wait` and If-None-Match, wait up to `wait` seconds for a change."""
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
            await service.feed.wait(woken, min(left, SEND_SECONDS))  # a token may be revoked meanwhile

    @router.patch("/jobs/{job}")
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

    @router.delete("/jobs/{job}", status_code=204)
    def delete_job(job: str, service: Shared, user: User) -> None:
        """Delete the records of a job that has ended. C is kept."""
        user.check_change(service.store.get(job))
        service.store.delete(job)
        shutil.rmtree(service.dispatcher.folder_of(job), ignore_errors=True)

    for action in Action:
        router.post(f"/jobs/{{job}}/{action}", name=f"{action}_job")(_acting(action))
    return router


def _acting(action: Action) -> Callable[..., JobView]:
    def act(job: str, response: Response, service: Shared, user: User) -> JobView:
        user.check_change(service.store.get(job))
        found: JobRecord = service.store.request(job, action)
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
    """Return the version that an If-Match header names; None without one; -1 if it is malformed."""
    if tag is None or tag == "*":
        return None
    number = tag.strip('"')
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 18 else -1


async def _submit(
    service: Service, bodies: list[JobBody], user: Identity, key: str | None, digest: str
) -> list[JobRecord]:
    """Plan jobs in turns, store all or none, and return them. `digest` and `key` are of the request."""
    store = service.store

    async def earlier() -> list[JobRecord] | None:
        return None if key is None else await run_in_threadpool(store.earlier, user.name, key, digest)

    if (found := await earlier()) is not None:
        return found
    try:
        new = await _new_jobs(service, bodies, user)
        return await run_in_threadpool(store.submit, new, key, digest, user.name)
    except OocGemmError:
        # The same request may have been carried out meanwhile. Then the error is because of its jobs.
        if (found := await earlier()) is not None:
            return found
        raise


async def _dry_run(service: Service, body: JobBody, user: Identity) -> PlanView:
    """Return the plan of a job that is not submitted. Raises what `_new_job` raises."""

    def plan() -> tuple[NewJob, float | None]:
        job = _new_job(service, body, user)
        waiting = Waiting("~", job.owner, job.priority, time.time(), job.need, job.seconds)
        return job, None if body.held or body.needs else service.dispatcher.predict(waiting)

    job, start = await service.plans.turn(user.name, plan)
    return PlanView(plan=job.plan, **job.need.in_bytes(), predicted_s=job.seconds, predicted_start=start)


async def _new_jobs(service: Service, bodies: list[JobBody], user: Identity) -> list[NewJob]:
    limit, present = service.config.max_jobs, await run_in_threadpool(service.store.unfinished, user.name)
    if present + len(bodies) > limit:
        raise TooManyJobsError(
            f"{user.name} has {present} jobs that have not ended, and {limit} are allowed: wait for some, or "
            "cancel some"
        )
    jobs = []
    for number, body in enumerate(bodies):
        try:
            jobs.append(await service.plans.turn(user.name, partial(_new_job, service, body, user)))
        except OocGemmError as error:
            if len(bodies) > 1:
                error.args = (f"job #{number}: {error}",)
            raise
    return jobs


def _new_job(service: Service, body: JobBody, user: Identity) -> NewJob:
    """Plan a job. Raises `PathError` for a path that is not allowed, and what `Planner.plan` raises."""
    roots = service.config.roots
    fields = {*parameters(body.verb), "verb", "options"}
    given = body.model_dump(include=fields, exclude_unset=True) | {"verb": body.verb}
    spec = with_paths(given, lambda name, path, write: str(resolve(roots, path, write=write)))
    try:
        found = service.planner.plan(spec, service.limits(), service.backend)
    except Exception as error:
        # Messages name absolute paths. Replace these by the names that users write.
        error.args = tuple(service.shown(each) if isinstance(each, str) else each for each in error.args)
        raise
    return NewJob(
        owner=user.name,
        spec=found.spec,
        plan=found.summary,
        need=found.need,
        seconds=found.seconds,
        c_path=out_of(found.spec),
        **body.model_dump(exclude=fields),
    )


def file_routes() -> APIRouter:
    """Return the routes of files."""
    router = APIRouter(prefix="/v1/jobs/{job}", tags=["files"])

    @router.get("/tiles")
    def get_tiles(job: str, service: Shared) -> TilesView:
        """Return the tiles of C that have been written."""
        found = service.store.get(job)
        rows, columns = found.plan["tiles"]
        return TilesView(
            rows=rows, columns=columns, done=[list(tile) for tile in sorted(service.tiles(found))]
        )

    @router.get("/log", response_class=PlainTextResponse, responses=_answers("text/plain"))
    def get_log(job: str, service: Shared, range: Range = None) -> Response:  # noqa: A002 - a header
        """Return what the processes of a job have printed."""
        service.store.get(job)
        path = service.dispatcher.folder_of(job) / LOG
        return _file(service, path, range, "text/plain; charset=utf-8")

    @router.get("/timeline", response_class=PlainTextResponse, responses=_answers("application/x-ndjson"))
    def get_timeline(job: str, service: Shared, range: Range = None) -> Response:  # noqa: A002 - a header
        """Return the timeline of the last attempt, for `oocgemm report`."""
        return _file(service, _recorded(service, job, "timeline"), range, "application/x-ndjson")

    @router.get("/report", response_class=HTMLResponse, responses=_answers("text/html"))
    def get_report(job: str, service: Shared, range: Range = None) -> Response:  # noqa: A002 - a header
        """Return the report on the last attempt, as a page."""
        from oocgemm.reports.exports import page
        from oocgemm.timeline import read_log

        path, name = _recorded(service, job, "report"), service.store.get(job).name
        html = service.shown(page([(name or job, read_log(str(path)))])).encode()
        answer = _part(html, range, "text/html; charset=utf-8")
        answer.headers["Content-Security-Policy"] = REPORT_POLICY
        return answer

    return router


def _recorded(service: Service, job: str, what: str) -> Path:
    """Return the path of a job's timeline, from which `what` is made. Raises an error without a timeline."""
    service.store.get(job)
    path = service.dispatcher.folder_of(job) / TIMELINE
    if not path.exists():
        raise HTTPException(404, f"job {job} has no {what} yet: wait until it has ended")
    return path


def _answers(media: str) -> dict[int | str, dict[str, Any]]:
    content = {"content": {media: {"schema": {"type": "string"}}}}
    return {
        200: content | {"description": "The whole file."},
        206: content | {"description": "The range of bytes that was asked for."},
    }


def _file(service: Service, path: Path, asked: str | None, media: str) -> Response:
    """Return the complete lines of a file that may grow, or a range of them, with paths as ROOT:PATH."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    content = content[: content.rfind(b"\n") + 1]
    shown = service.shown(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    return _part(shown, asked, media)


def _part(content: bytes, asked: str | None, media: str) -> Response:
    found = None if asked is None else _range(asked, len(content))
    headers = {"Accept-Ranges": "bytes"}
    if found is None:
        return Response(content, headers=headers, media_type=media)
    begin, end = found
    if begin >= end:
        headers["Content-Range"] = f"bytes */{len(content)}"
        raise HTTPException(416, f"the file has {len(content)} bytes: ask for some of these", headers)
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
    return Response(content[begin:end], 206, headers, media_type=media)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """Return begin and end of a Range header; None for a header to ignore: malformed, or several ranges."""
    found = re.fullmatch("bytes=\\s*([0-9]*)-([0-9]*)\\s*", asked)
    if found is None:
        return None
    first, last = found.groups()
    if not first:
        return (max(0, size - int(last)), size) if last and size else None
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size


def machine_routes() -> APIRouter:
    """Return the routes of the machine."""
    router = APIRouter(tags=["machine"])

    @router.get("/v1/devices")
    def get_devices(service: Shared) -> DevicesView:
        """Return the devices, and what the running jobs reserve."""
        return devices(service)

    @router.get("/v1/roots")
    def get_roots(service: Shared, user: User) -> RootsView:
        """Return the folders of operands and results. Users of the unix socket see where they lie."""
        found = [
            RootView(name=root.name, folder=str(root.folder) if user.local else None, writable=root.writable)
            for root in service.config.roots.values()
        ]
        return RootsView(roots=found)

    @router.get("/v1/user")
    def get_user(user: User) -> UserView:
        """Return who sends the request."""
        return UserView.model_validate({"name": user.name, "scope": user.scope.name.lower()})

    @router.post("/v1/drain")
    def drain(body: DrainBody, service: Shared, user: User) -> DrainView:
        """Start no more jobs, or start jobs again. Running jobs go on."""
        if user.scope < Scope.ADMIN:
            raise AccessError("only an admin may drain the service: use a token with the scope admin")
        service.dispatcher.draining = body.draining
        return DrainView(draining=body.draining)

    @router.get("/livez")
    async def live() -> HealthView:
        """Answer while the server works."""
        return HealthView(status="ok")

    @router.get("/readyz", responses={503: {"model": HealthView}})
    def ready(service: Shared, response: Response) -> HealthView:
        """Say whether the database can be written and there is disk space."""
        found = service.problems()
        response.status_code = 503 if found else 200
        return HealthView(status="unavailable" if found else "ok", problems=found)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics(service: Shared) -> Response:
        """Return the metrics for Prometheus."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Figures(service))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def devices(service: Service) -> DevicesView:
    """Return the devices, and what the running jobs reserve."""
    limits, active, warm = service.limits(), service.store.active(), service.dispatcher.workers.warm
    shown = []
    for device in service.devices:
        jobs = [job for job in active if job.device == device.number]
        shown.append(
            DeviceView(
                index=device.number,
                name=device.name,
                state="running" if jobs else "warm" if device.number in warm else "idle",
                memory=limits.devices.get(device.number, 0),
                reserved=sum(job.need.device for job in jobs),
                jobs=[job.id for job in jobs],
            )
        )
    return DevicesView(
        devices=shown,
        host=HostView(memory=limits.host, reserved=sum(job.need.host for job in active)),
        disk=DiskView(quota=limits.disk, reserved=sum(job.need.disk for job in active)),
        draining=service.dispatcher.draining,
    )


class _Figures(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        states = GaugeMetricFamily("oocgemm_jobs", "Jobs by state.", labels=["state"])
        for state, number in service.store.counts().items():
            states.add_metric([state], number)
        yield states
        found = devices(service)
        for name, what, of in (
            ("memory", "Memory for jobs", "memory"),
            ("reserved", "Memory that the running jobs reserve", "reserved"),
        ):
            family = GaugeMetricFamily(
                f"oocgemm_device_{name}_bytes", f"{what}, per device.", labels=["device"]
            )
            for device in found.devices:
                family.add_metric([str(device.index)], getattr(device, of))
            yield family
            yield GaugeMetricFamily(
                f"oocgemm_host_{name}_bytes", f"{what}, of the host.", getattr(found.host, of)
            )
        yield GaugeMetricFamily("oocgemm_disk_quota_bytes", "Disk space for results.", found.disk.quota)
        yield GaugeMetricFamily("oocgemm_disk_reserved_bytes", "Of it, reserved.", found.disk.reserved)
        usage = CounterMetricFamily("oocgemm_events", "Changes of jobs since the state folder was created.")
        usage.add_metric([], service.store.newest())
        yield usage


def page_routes() -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index() -> Response:
        return _page_file("index.html")

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        return _page_file(name)

    @router.get("/login")
    def log_in(service: Shared, code: Annotated[str, Query(max_length=128)] = "") -> Response:
        """Sign the user of the server in by the URL that it has printed."""
        if not service.login.use(code):
            return RedirectResponse("/#/login-code-used", 303)
        response = RedirectResponse("/", 303)
        _set_cookie(response, service, service.store.open_session())
        return response

    @router.post("/login", status_code=204)
    def log_in_by_token(body: LoginBody, service: Shared) -> Response:
        """Sign a user in by a token."""
        if service.store.identify(body.token) is None:
            return problem(
                "unauthorized",
                "the token is wrong, revoked, or has expired: make one with oocgemm token create",
            )
        response = Response(status_code=204)
        _set_cookie(response, service, body.token)
        return response

    return router


def _set_cookie(response: Response, service: Service, secret: str) -> None:
    response.set_cookie(
        COOKIE,
        secret,
        max_age=int(SESSION_SECONDS),
        path="/",
        secure=service.config.encrypted,
        httponly=True,
        samesite="strict",
    )


def _page_file(name: str) -> Response:
    headers = {"Cache-Control": "no-cache"}
    if name == "options.js":
        module = f"export const VERBS = {json.dumps(forms())};\n"
        return Response(module, headers=headers, media_type="text/javascript")
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")}
    known["report.css"] = REPORT_STYLE
    if name not in known:
        raise HTTPException(404, f"there is no file {name!r}")
    return FileResponse(known[name], headers=headers)
