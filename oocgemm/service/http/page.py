"""The page of the service, and signing in to it."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import FileResponse, RedirectResponse, Response

from oocgemm.service.http.problems import problem
from oocgemm.service.http.requests import Shared
from oocgemm.service.http.service import Service
from oocgemm.service.http.tokens import SESSION_SECONDS
from oocgemm.service.http.views import LoginBody

FOLDER = Path(__file__).parents[1] / "page"
# The page looks as the report does, so it uses the same style.
REPORT_STYLE = Path(__file__).parents[2] / "reports" / "web" / "page.css"
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


def _file(name: str) -> Response:
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")}
    known["report.css"] = REPORT_STYLE
    if name not in known:
        raise HTTPException(404, f"there is no file {name!r}")
    return FileResponse(known[name], headers={"Cache-Control": "no-cache"})
