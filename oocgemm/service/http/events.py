"""Changes of jobs as a stream of server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from oocgemm.service.http.requests import Shared
from oocgemm.service.http.service import Service
from oocgemm.service.states import FINAL, State

# Seconds between two looks at the progress of running jobs, and between two signs of life.
PROGRESS_SECONDS, ALIVE_SECONDS = 0.5, 15.0

Number = Annotated[int, Query(ge=0, lt=2**62)]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, each with its number as id."}
}


def routes() -> APIRouter:
    """Return the routes of events."""
    router = APIRouter(prefix="/v1", tags=["events"], default_response_class=StreamingResponse)

    @router.get("/events", responses=_STREAM)
    async def all_events(
        service: Shared,
        after: Number | None = None,
        last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    ) -> StreamingResponse:
        """Send the changes of all jobs, from now on or after the event with a number."""
        return await _stream(service, None, after, last)

    @router.get("/jobs/{job}/events", responses=_STREAM)
    async def job_events(
        job: str,
        service: Shared,
        after: Number | None = None,
        last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    ) -> StreamingResponse:
        """Send the changes of a job, all or those after the event with a number, until it has ended."""
        await run_in_threadpool(service.store.get, job)
        return await _stream(service, job, after, last)

    return router


async def _stream(
    service: Service, job: str | None, after: int | None, last: str | None
) -> StreamingResponse:
    if last is not None and last.isascii() and last.isdecimal() and len(last) < 19:
        after = int(last)
    if after is None:
        after = 0 if job is not None else await run_in_threadpool(service.store.newest)
    return StreamingResponse(_events(service, job, after), media_type="text/event-stream")


async def _events(service: Service, job: str | None, after: int) -> AsyncIterator[str]:
    """Yield the text of events until the server ends, or the job."""
    known: dict[tuple[str, str], BaseModel] = {}
    clock = asyncio.get_running_loop().time
    alive = clock()
    yield ": connected\n\n"
    while not service.feed.closed:
        woken = service.feed.woken
        found = await run_in_threadpool(service.store.events, after, job)
        for event in found:
            after = event["seq"]
            yield f"id: {after}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n"
        if found:
            alive = clock()
            if job is not None and found[-1]["kind"] in (*FINAL, "deleted"):
                return
            continue
        for text in await run_in_threadpool(_progress, service, job, known):
            yield text
            alive = clock()
        if clock() - alive > ALIVE_SECONDS:
            alive = clock()
            yield ": alive\n\n"
        await service.feed.wait(woken, PROGRESS_SECONDS)


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
