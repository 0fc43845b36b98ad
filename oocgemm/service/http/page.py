"""The page of the service, and signing in to it."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, RedirectResponse, Response

from oocgemm.service.http.requests import Shared
from oocgemm.service.http.tokens import SESSION_SECONDS

FOLDER = Path(__file__).parents[1] / "page"
COOKIE = "oocgemm"


def routes() -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index() -> Response:
        return _file("index.html")

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        return _file(name)

    @router.get("/login")
    def log_in(
        request: Request, service: Shared, code: Annotated[str, Query(max_length=128)] = ""
    ) -> Response:
        cookie = service.sessions.log_in(code)
        if cookie is None:
            raise HTTPException(
                401, "the login code is wrong or was used before: oocgemm serve has printed the newest URL"
            )
        response = RedirectResponse("/", 303)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=int(SESSION_SECONDS),
            path="/",
            secure=service.config.encrypted,
            httponly=True,
            samesite="strict",
        )
        return response

    return router


def _file(name: str) -> Response:
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")}
    if name not in known:
        raise HTTPException(404, f"there is no file {name!r}")
    return FileResponse(known[name], headers={"Cache-Control": "no-cache"})
