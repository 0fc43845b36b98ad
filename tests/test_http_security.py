"""Who may reach the server, and what they may do: with the real server, by TCP and by its unix socket."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from oocgemm.errors import InputError
from oocgemm.service.client import Client
from oocgemm.service.client.problems import ERRORS
from oocgemm.service.confine.paths import Root
from oocgemm.service.errors import AccessError
from oocgemm.service.http import config as configuration
from oocgemm.service.http import service as opening
from oocgemm.service.http.config import Config, parse_address
from oocgemm.service.http.problems import PROBLEMS
from oocgemm.service.http.security import MAX_BODY
from oocgemm.service.http.server import MAX_HEAD
from oocgemm.service.limits import Device
from tests.command import command
from tests.real_server import JOB, SECONDS, RealServer, Reply, running_server
from tests.suite import slow

MAX_JOBS, MAX_REQUESTS = 3, 20
MAX_RSS = 200 << 20
# Timeouts as short as a busy machine allows.
QUICKLY = {
    "oocgemm.service.http.server:HEAD_SECONDS": 1.5,
    "oocgemm.service.http.security:BODY_SECONDS": 1.5,
    "oocgemm.service.http.security:MAX_REQUESTS": MAX_REQUESTS,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, "--max-jobs", str(MAX_JOBS), "--allow-host", "gpu1", set=QUICKLY) as found:
        yield found


@pytest.fixture(scope="module")
def tokens(server: RealServer) -> Mapping[str, str]:
    return {scope: server.token(scope, name=f"{scope}-user") for scope in ("read", "submit", "admin")}


def ask(server: RealServer, token: str | None, method: str, path: str, body: object = None) -> Reply:
    return server.ask(method, path, body, tcp=True, token=token)


# Tokens and scopes


def test_only_a_valid_token_is_accepted(server: RealServer, tokens: Mapping[str, str]) -> None:
    right = tokens["read"]
    assert ask(server, right, "GET", "/v1/jobs").status == 200
    prefix, number, secret = right.split("_", 2)
    other = tokens["submit"].split("_", 2)
    wrong = [
        "",
        "x",
        right[:-1],
        right + "x",
        f"{prefix}_{number}_{'A' * len(secret)}",
        f"{prefix}_{number}_{other[2]}",  # the secret of another token
        f"{prefix}_{number}_",
        f"{prefix}_%_{secret}",
        f"{prefix}_{number}' OR 1=1 --_{secret}",
        f"other_{number}_{secret}",
        "x" * 10_000,
        "\xff\xfe",
    ]
    for each in wrong:
        for path in ("/v1/jobs", "/metrics", "/v1/openapi.json", "/v1/events", "/nothing"):
            reply = ask(server, each, "GET", path)
            assert reply.problem(401) == "unauthorized"
            assert reply.headers["WWW-Authenticate"] == "Bearer"
    for headers in (
        {},
        {"Authorization": right},
        {"Authorization": f"Basic {right}"},
        {"Cookie": "oocgemm=x"},
    ):
        assert server.ask("GET", "/v1/jobs", headers=headers, tcp=True).problem(401) == "unauthorized"
    assert server.ask("GET", f"/v1/jobs?token={right}", tcp=True).problem(401) == "unauthorized"


def test_a_token_is_stored_as_a_digest_of_256_random_bits(
    server: RealServer, tokens: Mapping[str, str]
) -> None:
    stored = b"".join(path.read_bytes() for path in server.state.glob("service.db*"))
    for secret in tokens.values():
        assert len(secret.split("_", 2)[2]) == 43  # 256 bits in base64
        assert secret.encode() not in stored
        assert secret.split("_", 2)[2].encode() not in stored


def test_a_token_ends(server: RealServer) -> None:
    assert ask(server, server.token(expires=time.time() + 3600), "GET", "/v1/jobs").status == 200
    assert ask(server, server.token(expires=time.time() - 1), "GET", "/v1/jobs").status == 401


def test_tokens_are_made_listed_and_revoked_by_commands(server: RealServer) -> None:
    made = command("token", "create", "ann", "--scope", "read", "--state", server.state, "--json").json()
    assert ask(server, made["token"], "GET", "/v1/jobs").status == 200
    listed = command("token", "list", "--state", server.state, "--json").json()["tokens"]
    (found,) = (each for each in listed if each["id"] == made["id"])
    assert (found["name"], found["scope"], found["last_used"] is None) == ("ann", "read", False)
    assert "token" not in found
    assert command("token", "revoke", made["id"], "--state", server.state).code == 0
    assert ask(server, made["token"], "GET", "/v1/jobs").status == 401
    assert command("token", "revoke", made["id"], "--state", server.state).code == 2


def test_scopes_limit_what_a_token_may_do(server: RealServer, tokens: Mapping[str, str]) -> None:
    body = JOB | {"c": "out:scoped.npy", "held": True}
    assert ask(server, tokens["read"], "POST", "/v1/jobs", body).problem(403) == "forbidden"
    assert ask(server, tokens["read"], "POST", "/v1/jobs?dry_run=1", body).problem(403) == "forbidden"
    job = ask(server, tokens["submit"], "POST", "/v1/jobs", body).json()
    assert job["owner"] == "submit-user"
    path = f"/v1/jobs/{job['id']}"
    others = [("read", 403), ("submit", 200), ("admin", 200)]
    stranger = server.token("submit", name="stranger")
    for method, rest, sent in (("POST", "/hold", None), ("PATCH", "", {"priority": 1})):
        assert ask(server, stranger, method, path + rest, sent).problem(403) == "forbidden"
        for scope, status in others:
            assert ask(server, tokens[scope], method, path + rest, sent).status == status
    for scope in ("read", "submit"):
        reply = ask(server, tokens[scope], "POST", "/v1/drain", {"draining": True})
        assert reply.problem(403) == "forbidden"
    assert ask(server, tokens["admin"], "POST", "/v1/drain", {"draining": False}).status == 200
    assert ask(server, tokens["read"], "GET", path).status == 200
    assert ask(server, stranger, "DELETE", path).problem(403) == "forbidden"
    assert ask(server, tokens["submit"], "POST", f"{path}/cancel").status == 200
    assert ask(server, tokens["submit"], "DELETE", path).status == 204


def test_a_user_with_too_many_jobs_is_refused(server: RealServer) -> None:
    token = server.token(name="busy")
    for number in range(MAX_JOBS + 1):
        body = JOB | {"c": f"out:busy{number}.npy", "held": True}
        reply = ask(server, token, "POST", "/v1/jobs", body)
        assert number == MAX_JOBS or reply.status == 202
    assert (reply.problem(429), reply.headers["Retry-After"]) == ("too-many-jobs", "60")
    assert ask(server, server.token(name="idle"), "POST", "/v1/jobs", body).status == 202


def test_folders_of_the_machine_are_told_to_its_users_only(
    server: RealServer, tokens: Mapping[str, str]
) -> None:
    (data, out) = server.ask("GET", "/v1/roots").json()["roots"]
    assert data == {"name": "data", "folder": str(server.data), "writable": False}
    assert (out["name"], out["writable"]) == ("out", True)
    roots = ask(server, tokens["admin"], "GET", "/v1/roots").json()["roots"]
    assert [root["folder"] for root in roots] == [None, None]
    reply = ask(server, tokens["submit"], "POST", "/v1/jobs", JOB | {"a": "data:none.npy", "c": "out:C.npy"})
    assert str(server.folder) not in reply.body.decode()


# Other sites


@pytest.mark.parametrize("tcp", [False, True])
def test_a_host_that_is_not_allowed_is_refused(
    server: RealServer, tokens: Mapping[str, str], tcp: bool
) -> None:
    token = tokens["admin"]
    evil = (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "localhost.",
        "192.168.1.1",
        "[::2]",
    )
    for host in evil:
        for path in ("/v1/jobs", "/", "/livez", "/login"):
            reply = server.ask("GET", path, headers={"Host": host}, tcp=tcp, token=token)
            assert reply.problem(403) == "host-refused"
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8642", "gpu1", "GPU1:8642"):
        assert server.ask("GET", "/v1/jobs", headers={"Host": host}, tcp=tcp, token=token).status == 200


@pytest.mark.parametrize("tcp", [False, True])
def test_changes_from_another_site_are_refused(
    server: RealServer, tokens: Mapping[str, str], tcp: bool
) -> None:
    job = JOB | {"c": "out:cross.npy"}
    own = server.url.removeprefix("http://") if tcp else "localhost"
    refused = [
        *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "odd")),
        *({"Origin": origin} for origin in ("http://evil.example", "null", "http://[", "http://localhost:1")),
    ]
    for headers in refused:
        for method, path in (
            ("POST", "/v1/jobs?dry_run=1"),
            ("DELETE", "/v1/jobs/x"),
            ("PATCH", "/v1/jobs/x"),
        ):
            reply = server.ask(method, path, job, headers, tcp=tcp, token=tokens["admin"])
            assert reply.problem(403) == "cross-site"
        # They may not read either: there is no CORS.
        reply = server.ask("GET", "/v1/jobs", headers=headers, tcp=tcp, token=tokens["admin"])
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]
    for headers in ({"Sec-Fetch-Site": "same-origin", "Origin": f"http://{own}"}, {"Sec-Fetch-Site": "none"}):
        reply = server.ask(
            "POST", "/v1/jobs?dry_run=1", job, {"Host": own} | headers, tcp=tcp, token=tokens["admin"]
        )
        assert reply.status == 200
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    reply = server.ask("OPTIONS", "/v1/jobs", headers=preflight, tcp=tcp, token=tokens["admin"])
    assert reply.status in (403, 405)
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_a_form_of_another_site_is_no_request(server: RealServer, tokens: Mapping[str, str]) -> None:
    """Browsers send these types without asking the server first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        body = b'{"a": "data:A.npy", "b": "data:B.npy", "c": "out:form.npy"}'
        reply = server.ask("POST", "/v1/jobs", body, {"Content-Type": kind}, tcp=True, token=tokens["admin"])
        assert reply.problem(422) == "invalid-request"


def test_a_browser_signs_in_once_and_gets_a_cookie(server: RealServer) -> None:
    path = server.login.removeprefix(server.url)
    assert server.ask("GET", f"{path}x", tcp=True).problem(401) == "unauthorized"
    assert server.ask("GET", "/login", tcp=True).problem(401) == "unauthorized"
    reply = server.ask("GET", path, tcp=True)
    assert (reply.status, reply.headers["Location"]) == (303, "/")
    cookie, *attributes = reply.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {*attributes}
    assert server.ask("GET", path, tcp=True).problem(401) == "unauthorized"
    headers = {"Cookie": cookie}
    assert server.ask("GET", "/v1/jobs", headers=headers, tcp=True).status == 200
    assert server.ask("POST", "/v1/drain", {"draining": False}, headers, tcp=True).status == 200
    cross = headers | {"Sec-Fetch-Site": "cross-site"}
    assert server.ask("POST", "/v1/drain", {"draining": True}, cross, tcp=True).problem(403) == "cross-site"
    assert server.ask("GET", "/v1/jobs", headers={"Cookie": f"{cookie}x"}, tcp=True).status == 401


def test_every_answer_forbids_other_origins(server: RealServer, tokens: Mapping[str, str]) -> None:
    token = tokens["admin"]
    for path in ("/", "/v1/jobs", "/v1/openapi.json", "/metrics", "/nothing", "/livez", "/v1/jobs/x/report"):
        headers = ask(server, token, "GET", path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_what_anyone_may_read(server: RealServer) -> None:
    for path in ("/livez", "/readyz", "/"):
        assert server.ask("GET", path, tcp=True).status == 200
    for path in (
        "/docs",
        "/redoc",
        "/openapi.json",
        "/v1/devices",
        "/static/../views.py",
        "/static/%2e%2e/x",
    ):
        assert server.ask("GET", path, tcp=True).status in (401, 404)


# The unix socket


def test_only_its_user_reaches_the_socket(server: RealServer) -> None:
    assert stat.S_IMODE(os.stat(server.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(server.state).st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_gets_no_answer_even_if_they_can_open_the_socket(server: RealServer) -> None:
    open_to_all = [server.socket, *server.socket.parents]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in open_to_all}
    code = (
        "import os, socket, sys; os.setuid(65534); made = socket.socket(socket.AF_UNIX); "
        "made.connect(sys.argv[1])\n"
        "try:\n made.sendall(b'GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'); print(made.recv(99))\n"
        "except OSError: print(b'')"
    )
    try:
        for path, mode in modes.items():
            path.chmod(mode | 0o777)
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, str(server.socket)], capture_output=True, text=True, check=True
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.stdout == "b''\n"
    assert server.ask("GET", "/livez").status == 200


# Limits


def rss(server: RealServer) -> int:
    """Return the largest resident memory that the server has had, in bytes."""
    (line,) = (line for line in Path(f"/proc/{server.pid}/status").read_text().split("\n") if "VmHWM" in line)
    return int(line.split()[1]) << 10


def opened(server: RealServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), SECONDS)


def answer(connection: socket.socket) -> bytes:
    """Return all that a server sends until it closes a connection."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def head(token: str, *more: str, path: str = "/v1/jobs") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", *more]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/x/cancel", "/nothing"])
def test_a_body_that_is_too_large_is_refused_by_its_length(
    server: RealServer, tokens: Mapping[str, str], path: str
) -> None:
    for length in (MAX_BODY + 1, 1 << 30, 10**18):
        with opened(server) as connection:
            connection.sendall(head(tokens["admin"], f"Content-Length: {length}", path=path))
            found = answer(connection)
        assert found.startswith(b"HTTP/1.1 413 ")
        assert b"application/problem+json" in found


@pytest.mark.parametrize("size", [64 << 20, *slow((1 << 30,))])
@pytest.mark.parametrize("form", ["chunks", "length", "no route", "no token"])
def test_a_huge_body_does_not_fill_the_memory(
    server: RealServer, tokens: Mapping[str, str], form: str, size: int
) -> None:
    token = "wrong" if form == "no token" else tokens["admin"]
    path = "/v1/jobs/x/cancel" if form == "no route" else "/v1/jobs"
    piece = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    with opened(server) as connection:
        length = f"Content-Length: {size}" if form == "length" else "Transfer-Encoding: chunked"
        connection.sendall(head(token, length, path=path))
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(size >> 16):
                connection.sendall(piece)
            raise AssertionError("the server has taken the whole body")
    print(form, size, rss(server) >> 20, "MiB")
    assert rss(server) < MAX_RSS
    assert server.ask("GET", "/livez").status == 200


def test_a_head_that_is_too_large_or_no_http_is_refused(server: RealServer) -> None:
    for sent in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEAD) + b"\r\n\r\n",
        b"GET /" + b"x" * (2 * MAX_HEAD) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        head("x", "Content-Length: 1", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    ):
        with opened(server) as connection:
            found = b""
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(sent)
                found = connection.recv(1 << 16)
        assert found == b"" or found.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"HTTP/1.1 403 ")), found
    assert server.ask("GET", "/livez").status == 200


@pytest.mark.parametrize("count", [20, *slow((1000,))])
def test_clients_that_send_slowly_are_disconnected(
    server: RealServer, tokens: Mapping[str, str], count: int
) -> None:
    """Other clients are answered meanwhile."""
    with ExitStack() as stack:
        heads = [stack.enter_context(opened(server)) for _ in range(count)]
        for connection in heads:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-")
        bodies = [stack.enter_context(opened(server)) for _ in range(MAX_REQUESTS // 2)]
        for connection in bodies:
            connection.sendall(head(tokens["admin"], "Content-Length: 100") + b"{")
        late = [stack.enter_context(opened(server)) for _ in range(5)]
        for connection in late:  # the second request of a connection
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
        assert server.ask("GET", "/livez", tcp=True).status == 200
        for connection in heads:  # bytes that drip in do not prolong the time
            with suppress(OSError):
                connection.sendall(b"x")
        assert {answer(connection) for connection in heads} == {b""}
        for connection in bodies:
            assert answer(connection).startswith(b"HTTP/1.1 408 ")
        for connection in late:
            assert answer(connection).count(b"HTTP/1.1 200 ") == 1
    assert rss(server) < MAX_RSS


def test_more_requests_than_the_limit_are_asked_to_come_later(
    server: RealServer, tokens: Mapping[str, str]
) -> None:
    request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
    with ExitStack() as stack:
        streams = [stack.enter_context(opened(server)) for _ in range(MAX_REQUESTS)]
        for connection in streams:
            connection.sendall(request + tokens["read"].encode() + b"\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        reply = ask(server, tokens["read"], "GET", "/v1/jobs")
        assert (reply.problem(503), reply.headers["Retry-After"]) == ("unavailable", "1")
        assert server.ask("GET", "/v1/jobs").status == 200  # the socket has a limit of its own
    end = time.monotonic() + SECONDS
    while ask(server, tokens["read"], "GET", "/v1/jobs").status == 503:
        assert time.monotonic() < end


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")
def test_a_server_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, *files]
    subprocess.run(made, check=True, capture_output=True)
    with running_server(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        url = server.url.replace("127.0.0.1", "localhost")
        with pytest.raises(AccessError, match="is not trusted"):
            Client(url, token=server.token()).devices()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = Client(url, token=server.token(name="ann"))
        job = client.submit("data:A.npy", "data:B.npy", "out:C.npy").wait(SECONDS)
        assert (job.state, job.info["owner"]) == ("succeeded", "ann")
        server.check("C.npy")
        plain = server.url.removeprefix("https://").split(":")
        with socket.create_connection((plain[0], int(plain[1])), SECONDS) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not answer(connection).startswith(b"HTTP/1.1 200 ")
        assert server.ask("GET", "/livez").status == 200


# The configuration


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Root]:
    (tmp_path / "out").mkdir()
    return {"out": Root("out", tmp_path / "out", True)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"roots": {}}, "no root"),
        ({"listen": ("0.0.0.0", 1)}, r"0.0.0.0:1 is reachable from other machines: pass --allow-remote"),
        ({"listen": ("::", 1)}, "pass --allow-remote"),
        ({"listen": ("gpu1", 1)}, "pass --allow-remote"),
        ({"listen": ("0.0.0.0", 1), "allow_remote": True}, "would receive tokens unencrypted"),
        ({"listen": ("0.0.0.0", 1), "behind_proxy": True}, "pass --allow-remote"),
        ({"certificate": Path("x")}, "needs both"),
        ({"key": Path("x")}, "needs both"),
    ],
)
def test_an_unsafe_configuration_is_refused(
    tmp_path: Path, roots: dict[str, Root], values: dict[str, object], message: str
) -> None:
    whole = {"state": tmp_path / "state", "roots": roots, "socket": tmp_path / "socket"} | values
    with pytest.raises(InputError, match=message):
        Config(**whole)  # type: ignore[arg-type]


def test_a_safe_configuration_is_accepted(tmp_path: Path, roots: dict[str, Root]) -> None:
    whole = {"state": tmp_path / "state", "roots": roots, "socket": tmp_path / "socket"}
    remote = {"listen": ("0.0.0.0", 1), "allow_remote": True}
    for values in (
        {"listen": ("127.0.0.2", 1)},
        {"listen": ("::1", 1)},
        {"listen": ("localhost", 1)},
        remote | {"behind_proxy": True},
        remote | {"certificate": Path("x"), "key": Path("x")},
    ):
        Config(**whole | values)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["out", "out/state", "."])
def test_jobs_cannot_reach_the_state_folder(tmp_path: Path, roots: dict[str, Root], state: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / state)
    for folder in (tmp_path / state, tmp_path / "link"):
        with pytest.raises(InputError, match="contain one another"):
            Config(state=folder, roots=roots, socket=tmp_path / "socket")


def test_without_landlock_the_server_does_not_start_unless_it_is_told(
    tmp_path: Path, roots: dict[str, Root], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "abi", lambda: 0)
    whole = {"state": tmp_path / "state", "roots": roots, "socket": tmp_path / "socket", "backend": "host"}
    with pytest.raises(InputError, match=r"this kernel has no Landlock .* pass --no-confine"):
        opening.open_service(Config(**whole))  # type: ignore[arg-type]
    opening.open_service(Config(**whole, confine=False)).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["8642", "localhost", ":1", "localhost:x", "localhost:65536", "a:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write HOST:PORT"):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:8642") == ("127.0.0.1", 8642)
    assert parse_address("[::1]:0") == ("::1", 0)
    assert configuration._is_loopback("LOCALHOST")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "pass --allow-remote"),
        (["--listen", "192.0.2.1:0", "--allow-remote", "--behind-proxy"], "cannot be used"),
        (["--socket", "/" + "x" * 200], "pass another --socket"),
        (
            ["--listen", "127.0.0.1:0", "--tls-cert", __file__, "--tls-key", __file__],
            "cannot be used for TLS",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(opening, "find_devices", lambda backend: ("host", [Device(0, "host", 0)]))
    (tmp_path / "out").mkdir()
    state = tmp_path / "state"
    done = command("serve", "--root", f"out={tmp_path / 'out'}:rw", "--state", state, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (state / "serve.sock").exists()


def test_the_client_knows_every_problem() -> None:
    assert {*PROBLEMS} - {"budget-too-small", "internal"} == {*ERRORS}
