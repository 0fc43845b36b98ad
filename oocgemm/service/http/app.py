"""The HTTP application: its routes, its errors as problem documents, and its OpenAPI description."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from oocgemm.errors import OocGemmError
from oocgemm.service.http import event_stream, routes
from oocgemm.service.http.security import OPEN
from oocgemm.service.http.service import Service
from oocgemm.service.http.views import MEDIA_TYPE, ProblemView, problem, problem_of
from oocgemm.system.installed import __version__

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemView, "description": "The request is wrong."},
    "5XX": {"model": ProblemView, "description": "The service cannot answer now."},
}
# The slug for a status of the framework. Its other ones are for invalid requests.
_BY_STATUS = {401: "unauthorized", 404: "not-found", 408: "too-slow", 413: "too-large", 503: "unavailable"}


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
    routers = (
        routes.job_routes(),
        event_stream.routes(),
        routes.file_routes(),
        routes.machine_routes(),
        routes.page_routes(),
    )
    _answer_errors(app, [route for router in routers for route in router.routes])
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return app


def _answer_errors(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer all errors of an application, which has these routes, by problem documents."""

    async def package(_: Request, error: Exception) -> Response:
        return problem_of(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
        return problem("invalid-request", "; ".join(found).encode(errors="replace").decode())

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
                    responses[status]["content"] = {MEDIA_TYPE: shape}
        schemas = described["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
        app.openapi_schema = described
    return app.openapi_schema
