"""The HTTP server: its routes and errors, its OpenAPI description, its sockets, and its life."""

import asyncio
import os
import resource
import signal
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from uvicorn.protocols.http.h11_impl import H11Protocol

from oocgemm.errors import InputError, OocGemmError
from oocgemm.jobs.support import VERBS
from oocgemm.service.http import routes
from oocgemm.service.http.security import OPEN, RequestGuard
from oocgemm.service.http.service import Config, Service, open_service
from oocgemm.service.http.views import MEDIA_TYPE, ProblemView, problem, problem_of
from oocgemm.system.installed import __version__

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemView, "description": "The request is wrong."},
    "5XX": {"model": ProblemView, "description": "The service cannot answer now."},
}
# The slug for each status that the framework sends. Its other statuses are for invalid requests.
_BY_STATUS = {401: "unauthorized", 404: "not-found", 408: "too-slow", 413: "too-large", 503: "unavailable"}


def create(service: Service) -> FastAPI:
    """Return the application of a service."""
    app = FastAPI(
        title="oocgemm",
        version=__version__,
        description="A queue of matrix products, and of more, in front of the GPUs of one machine.",
        responses=_ERRORS,
        docs_url=None,  # these pages load scripts from another origin
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        separate_input_output_schemas=False,
    )
    app.state.service = service
    routers = (
        routes.job_routes(),
        routes.event_routes(),
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
        found = [f"{'.'.join(_places(each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
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


def _places(found: Sequence[str | int]) -> Iterator[str]:
    """Yield where in a request an error is, without the verbs, which tell what the request is checked by."""
    for at, place in enumerate(found):
        if not (place in VERBS and (at == 1 or isinstance(found[at - 1], int))):
            yield str(place)


def _methods(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """Return the methods of all routes for a request's path. Starlette names those of the first route."""
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
                responses.pop("422", None)  # 4XX covers it
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


# HEAD_SECONDS: in which a client must send the head of a request. END_SECONDS: for which requests may go on
# when the server ends.
HEAD_SECONDS, END_SECONDS = 10.0, 3
# Seconds after which a thread gives the GIL to another one. The dispatcher decides about all queued
# jobs at once, and a request must not wait for that.
SWITCH_SECONDS = 0.001
# Maximum bytes of the head of a request, concurrent connections per socket, and open files for all
# connections.
MAX_HEAD, MAX_CONNECTIONS, MAX_FILES = 1 << 16, 2000, 8192


class _Protocol(H11Protocol):
    """HTTP/1.1. It closes connections of other users, and those on which no request comes in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS or _is_foreign(transport.get_extra_info("socket")):
            transport.close()
        self._late = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is no HTTP, or whose head is too large."""
        answer = problem("invalid-request", "this is no HTTP/1.1 request, or its head is too large", 400)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """A server of one socket. It has no signal handlers, because a process may have two servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def serve(config: Config, ready: Callable[[Service, list[str]], None]) -> None:
    """Run a server until SIGTERM or SIGINT. Jobs go on, and the next server finds them.

    `ready` is called with the service and its addresses when it can be reached. Raises what `open_service`
    raises, and `InputError` if an address cannot be used.
    """
    service = open_service(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        _allow_files()
        with _sockets(config) as (sockets, addresses):
            asyncio.run(_serve(service, sockets, lambda: ready(service, addresses)))
    finally:
        service.close()


@contextmanager
def _sockets(config: Config) -> Iterator[tuple[list[tuple[socket.socket, bool]], list[str]]]:
    """Open the sockets of a server. Yield them, each with whether it is a unix socket, and the addresses."""
    with ExitStack() as stack:
        unix = stack.enter_context(_unix_socket(config.socket))
        stack.callback(config.socket.unlink, missing_ok=True)
        sockets, addresses = [(unix, True)], [str(config.socket)]
        if config.listen is not None:
            _check_tls(config)
            bound = stack.enter_context(_tcp_socket(*config.listen))
            sockets.append((bound, False))
            host, port = config.listen[0], bound.getsockname()[1]
            scheme = "https" if config.certificate is not None else "http"
            shown = f"[{host}]" if ":" in host else host
            addresses.append(f"{scheme}://{shown}:{port}")
        yield sockets, addresses


async def _serve(
    service: Service, sockets: list[tuple[socket.socket, bool]], ready: Callable[[], None]
) -> None:
    loop, config = asyncio.get_running_loop(), service.config
    app = create(service)
    servers = [
        _Server(
            uvicorn.Config(
                RequestGuard(app, service.store, config.allowed_hosts, local=local),
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD,
                timeout_graceful_shutdown=END_SECONDS,
                ssl_certfile=None if local else config.certificate,
                ssl_keyfile=None if local else config.key,
            )
        )
        for _, local in sockets
    ]

    def stop() -> None:
        service.end_streams()
        for server in servers:
            server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    tasks = [
        asyncio.create_task(server.serve(sockets=[bound]))
        for server, (bound, _) in zip(servers, sockets, strict=True)
    ]
    while not all(server.started for server in servers):
        if any(task.done() for task in tasks):
            break
        await asyncio.sleep(0.01)
    else:
        service.start(loop)
        ready()
    await asyncio.gather(*tasks)


def _allow_files() -> None:
    """Let this process open as many files as it may have connections, if the system allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_tls(config: Config) -> None:
    if config.certificate is not None and config.key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.key)
        except OSError as error:
            raise InputError(
                f"{config.certificate} and {config.key} cannot be used for TLS: {error}: pass a certificate "
                "and its key as PEM files"
            ) from error


def _unix_socket(path: Path) -> socket.socket:
    """Return a listening socket that only this user can reach. The state folder's lock is held already."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path)
        os.umask(0o177)
        made.bind(str(path))
    except OSError as error:
        made.close()
        reason = error.strerror or error
        raise InputError(f"the socket {path} cannot be made ({reason}): pass another --socket") from error
    finally:
        os.umask(before)
    made.listen(128)
    return made


def _remove_dead(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError("another server listens on it")


def _tcp_socket(host: str, port: int) -> socket.socket:
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            made = stack.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(128)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{host}:{port} cannot be used ({reason}): pass another --listen") from error
        stack.pop_all()
    return made


def _is_foreign(connection: socket.socket) -> bool:
    """Return whether a unix socket is connected to a process of a user who is not this one nor root."""
    if connection.family != socket.AF_UNIX:
        return False
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1] not in (0, os.getuid())
