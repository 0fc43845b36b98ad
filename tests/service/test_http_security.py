"""Who may reach the server, and what they may do: with the real server, by TCP and by its unix socket."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import pytest

from oocgemm.service.protocol import PROBLEMS, ServiceError
from tests.support.command import command
from tests.support.real_server import JOB, RealServer, Reply, running_server

MAX_JOBS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, "--max-jobs", str(MAX_JOBS), "--allow-host", "gpu1") as found:
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


def assert_refused(server: RealServer, path: str) -> None:
    """Check that a link to sign in gives no cookie, and leads to the page that says so."""
    reply = server.ask("GET", path, tcp=True)
    assert (reply.status, reply.headers["Location"]) == (303, "/#/login-code-used")
    assert "Set-Cookie" not in reply.headers


def test_a_browser_signs_in_once_and_gets_a_cookie(server: RealServer) -> None:
    path = server.login.removeprefix(server.url)
    assert_refused(server, f"{path}x")
    assert_refused(server, "/login")
    reply = server.ask("GET", path, tcp=True)
    assert (reply.status, reply.headers["Location"]) == (303, "/")
    cookie, *attributes = reply.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {*attributes}
    assert_refused(server, path)
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


def test_the_client_knows_every_problem() -> None:
    assert [slug for slug, each in PROBLEMS.items() if each.error is ServiceError] == ["internal"]
