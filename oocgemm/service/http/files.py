"""The files of a job: its log, its timeline, the report on it, and its tiles."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Header, HTTPException
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from oocgemm.service.http.requests import Shared
from oocgemm.service.http.service import Service
from oocgemm.service.http.views import TilesView
from oocgemm.service.job import LOG, TIMELINE

# A report is a page with scripts of its own. In this sandbox, they can neither read the service nor send
# anything.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:; frame-ancestors 'self'"
)
_PIECE = 1 << 16

Range = Annotated[str | None, Header(max_length=64)]


def _answers(media: str) -> dict[int | str, dict[str, Any]]:
    content = {"content": {media: {"schema": {"type": "string"}}}}
    return {
        200: content | {"description": "The whole file."},
        206: content | {"description": "The range of bytes that was asked for."},
    }


def routes() -> APIRouter:
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
        service.store.get(job)
        path = service.dispatcher.folder_of(job) / TIMELINE
        if not path.exists():
            raise HTTPException(404, f"job {job} has no timeline yet: wait until it has ended")
        return _file(service, path, range, "application/x-ndjson")

    @router.get("/report", response_class=HTMLResponse, responses=_answers("text/html"))
    def get_report(job: str, service: Shared, range: Range = None) -> Response:  # noqa: A002 - a header
        """Return the report on the last attempt, as a page."""
        from oocgemm.reports.page import page
        from oocgemm.timeline import read_log

        found = service.store.get(job)
        path = service.dispatcher.folder_of(job) / TIMELINE
        if not path.exists():
            raise HTTPException(404, f"job {job} has no report yet: wait until it has ended")
        html = service.shown(page([(found.name or job, read_log(str(path)))])).encode()
        answer = _part(io.BytesIO(html), len(html), range, "text/html; charset=utf-8")
        answer.headers["Content-Security-Policy"] = REPORT_POLICY
        return answer

    return router


def remove(folder: Path) -> None:
    """Delete the folder of a job."""
    shutil.rmtree(folder, ignore_errors=True)


def _file(service: Service, path: Path, asked: str | None, media: str) -> Response:
    """Return a file with the paths that users know, or a range of its bytes. The file may be growing.

    The last line is left out until it is complete: a path may be written in two parts.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    content = content[: content.rfind(b"\n") + 1]
    shown = service.shown(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    return _part(io.BytesIO(shown), len(shown), asked, media)


def _part(file: BinaryIO, size: int, asked: str | None, media: str) -> Response:
    """Return the first `size` bytes of an open file, or a range of these."""
    found = None if asked is None else _range(asked, size)
    begin, end = found or (0, size)
    headers = {"Accept-Ranges": "bytes"}
    if found is not None and begin >= end:
        file.close()
        headers["Content-Range"] = f"bytes */{size}"
        raise HTTPException(416, f"the file has {size} bytes: ask for some of these", headers)
    headers["Content-Length"] = str(end - begin)
    if found is not None:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    status = 200 if found is None else 206
    return StreamingResponse(_pieces(file, begin, end), status, headers, media_type=media)


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(_PIECE, end - begin))):
            begin += len(piece)
            yield piece


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """Return begin and end of a Range header; None if it is malformed or has several ranges: ignore it."""
    unit, _, span = asked.partition("=")
    first, dash, last = span.strip().partition("-")
    numbers = (first, last)
    if unit != "bytes" or not dash or not all(not n or (n.isascii() and n.isdecimal()) for n in numbers):
        return None
    if not first:
        return (max(0, size - int(last)), size) if last and size else None
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size
