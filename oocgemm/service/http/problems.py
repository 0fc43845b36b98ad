"""Errors as JSON: problem documents of RFC 9457."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from oocgemm.errors import BackendError, BudgetError, InputError, OocGemmError
from oocgemm.service.confine.paths import PathError
from oocgemm.service.errors import (
    AccessError,
    ConflictError,
    KeyReusedError,
    StaleError,
    StoreError,
    TooManyJobsError,
    UnavailableError,
    UnknownJobError,
)

# The slug of a problem's type -> its status and title.
PROBLEMS: dict[str, tuple[int, str]] = {
    "invalid-request": (422, "The request is invalid"),
    "not-found": (404, "There is no such thing"),
    "path-refused": (422, "A path cannot be used"),
    "budget-too-small": (422, "A memory budget is too small"),
    "conflict": (409, "The state does not allow the request"),
    "stale": (412, "The job has changed since it was read"),
    "key-reused": (422, "The Idempotency-Key was used with another request"),
    "unauthorized": (401, "The request has no valid token"),
    "forbidden": (403, "The user may not do this"),
    "host-refused": (403, "The Host header is not allowed"),
    "cross-site": (403, "The request comes from another site"),
    "too-large": (413, "The request is too large"),
    "too-slow": (408, "The request comes too slowly"),
    "too-many-jobs": (429, "The user has too many jobs"),
    "unavailable": (503, "The service cannot answer now"),
    "internal": (500, "The service has a defect"),
}
# The first class that fits decides.
SLUGS: tuple[tuple[type[Exception], str], ...] = (
    (UnknownJobError, "not-found"),
    (StaleError, "stale"),
    (ConflictError, "conflict"),
    (KeyReusedError, "key-reused"),
    (TooManyJobsError, "too-many-jobs"),
    (AccessError, "forbidden"),
    (StoreError, "unavailable"),
    (UnavailableError, "unavailable"),
    (BackendError, "unavailable"),
    (PathError, "path-refused"),
    (BudgetError, "budget-too-small"),
    (InputError, "invalid-request"),
)
# The slug for a status of the framework. Its other ones are for invalid requests.
_BY_STATUS = {401: "unauthorized", 404: "not-found", 408: "too-slow", 413: "too-large", 503: "unavailable"}
MEDIA_TYPE = "application/problem+json"
# Statuses with which a client may try again after so many seconds.
RETRY_SECONDS = {429: 60, 503: 1}


def problem(
    slug: str, detail: str, status: int | None = None, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    """Return the response for a problem.

    Args:
        slug: a key of `PROBLEMS`.
        detail: what is wrong in this case, and the remedy.
        status: another status than that of the slug.
        headers: of the response.
        more: further members of the document.
    """
    usual, title = PROBLEMS[slug]
    status = status or usual
    sent = dict(headers or {})
    if status in RETRY_SECONDS:
        sent.setdefault("Retry-After", str(RETRY_SECONDS[status]))
    if status == 401:
        sent.setdefault("WWW-Authenticate", "Bearer")
    body = {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail} | more
    content = json.dumps(body, ensure_ascii=True)
    return Response(content, status_code=status, headers=sent, media_type=MEDIA_TYPE)


def problem_of(error: Exception) -> Response:
    """Return the response for an error. One that is not of this package is a defect."""
    for kind, slug in SLUGS:
        if isinstance(error, kind):
            more: dict[str, Any] = {}
            if isinstance(error, BudgetError) and error.needed is not None:
                more["smallest"] = dict(zip(("device_memory", "host_memory"), error.needed, strict=True))
            return problem(slug, str(error), **more)
    return problem("internal", f"{type(error).__name__}: see the log of the server")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer all errors of an application, which has these routes, by problem documents."""

    async def package(_: Request, error: Exception) -> Response:
        return problem_of(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
        return problem("invalid-request", _printable("; ".join(found)))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        slug, headers = _BY_STATUS.get(error.status_code, "invalid-request"), dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(routes, request))
        return problem(slug, str(error.detail), error.status_code, headers)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        OocGemmError: package,
        RequestValidationError: invalid,
        HTTPException: http,
        Exception: package,  # uvicorn logs it
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _methods(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """Return the methods of all routes for the path of a request. Starlette names those of the first one."""
    found: set[str] = set()
    for route in routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found.update(getattr(route, "methods", None) or ())
    return sorted(found)


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
