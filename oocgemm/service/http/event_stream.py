"""Changes of jobs as a stream of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from oocgemm.service.http.security import Identity
from oocgemm.service.http.service import Service, Shared, User
from oocgemm.service.protocol import FINAL, DatabaseError, State

# A stream sends at most once in so many seconds: all events since, and the progress of running jobs.
SEND_SECONDS = 0.5
# Seconds without events after which a comment shows that the connection is alive.
ALIVE_SECONDS = 15.0
# Proxies such as nginx would collect the events otherwise.
HEADERS = {"X-Accel-Buffering": "no"}

Number = Annotated[int, Query(ge=0, lt=2**62)]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, each with its number as id."}
}
_ENDED: dict[int | str, dict[str, Any]] = {
    204: {"description": "The job has ended, and the client has all its events."}
}

logger = logging.getLogger("oocgemm")


def routes() -> APIRouter:
    """Return the routes of events."""
    router = APIRouter(prefix="/v1", tags=["events"], default_response_class=StreamingResponse)

    @router.get("/events", responses=_STREAM)
    async def all_events(
        service: Shared,
        user: User,
        after: Number | None = None,
        last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    ) -> StreamingResponse:
        """Send the changes of all jobs, from now on or after the event with a number."""
        seen = _after(after, last)
        return _stream(
            service, user, None, await run_in_threadpool(service.store.newest) if seen is None else seen
        )

    @router.get("/jobs/{job}/events", responses=_STREAM | _ENDED)
    async def job_events(
        job: str,
        service: Shared,
        user: User,
        after: Number | None = None,
        last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    ) -> Response:
        """Send the changes of a job, all or those after the event with a number, until it has ended."""
        found = await run_in_threadpool(service.store.get, job)
        seen = _after(after, last)
        if found.state in FINAL and seen and not await run_in_threadpool(service.store.events, seen, job):
            return Response(status_code=204)  # tells an EventSource not to connect again
        return _stream(service, user, job, seen or 0)

    return router


def _after(after: int | None, last: str | None) -> int | None:
    """Return the number of the last event that a client has: of its Last-Event-ID, or else `after`."""
    valid = last is not None and last.isascii() and last.isdecimal() and len(last) < 19
    return int(last) if last is not None and valid else after


def _stream(service: Service, user: Identity, job: str | None, after: int) -> StreamingResponse:
    events = _events(service, user, job, after)
    return StreamingResponse(events, headers=HEADERS, media_type="text/event-stream")


async def _events(service: Service, user: Identity, job: str | None, after: int) -> AsyncIterator[str]:
    """Yield the text of events until the server ends, or the job, or the token of the user."""
    known: dict[tuple[str, str], BaseModel] = {}
    clock = asyncio.get_running_loop().time
    alive = clock()
    yield ": connected\n\n"
    while not service.feed.closed:
        begun, woken = clock(), service.feed.woken
        try:
            if not await run_in_threadpool(service.store.is_valid, user):
                return  # the client connects again, and is told why that fails
            found = await run_in_threadpool(service.store.events, after, job)
            progress = await run_in_threadpool(_progress, service, job, known)
        except DatabaseError as error:
            logger.error("%s", error)
            return  # the client connects again, and is told why that fails
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
    """Return the events of progress and activity since `known`, which is brought up to date."""
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
