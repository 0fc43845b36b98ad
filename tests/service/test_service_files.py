"""The files in docs/service are valid. They work with a real server, where other programs are installed."""

import doctest
import http.client
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
import http_api  # type: ignore[import-not-found]
import pytest

from oocgemm.cli.main import cli
from tests.support import TOP
from tests.support.real_server import SECONDS, RealServer, running_server

FILES = TOP / "docs" / "service"
UNIT, CONTAINER = FILES / "oocgemm.service", FILES / "Containerfile"
HOST = "gpu.example.org"


def parsed(arguments: list[str]) -> click.Context:
    """Parse the arguments of `oocgemm serve`."""
    return cli.commands["serve"].make_context("serve", arguments)


def test_the_unit_starts_a_server_whose_jobs_survive_it() -> None:
    text = UNIT.read_text().replace("\\\n", " ")
    command = re.search(r"^ExecStart=(.*)$", text, re.M)
    assert command
    program, subcommand, *arguments = shlex.split(command[1])
    assert (Path(program).name, subcommand) == ("oocgemm", "serve")
    found = parsed(arguments).params
    assert found["state"] == Path("/var/lib/oocgemm")
    assert "StateDirectory=oocgemm\n" in text
    assert {root.rpartition(":")[0].partition("=")[2] for root in found["roots"]} == {"/srv/data", "/srv/out"}
    # With the default, systemd would kill the jobs too.
    assert "\nKillMode=process\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/oocgemm/bin/oocgemm", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_starts_a_server() -> None:
    found = dict(re.findall(r"^(ENTRYPOINT|CMD) \[(.*)\]$", CONTAINER.read_text(), re.M))
    words = [word.strip().strip('"') for part in ("ENTRYPOINT", "CMD") for word in found[part].split(",")]
    assert words[:2] == ["oocgemm", "serve"]
    options = parsed(words[2:]).params
    assert options["listen"] == "0.0.0.0:8642"
    assert options["allow_remote"]
    assert options["behind_proxy"]


def test_the_container_copies_what_the_wheel_needs() -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", CONTAINER.read_text(), re.M)
    top = FILES.parent.parent
    names = {name for line in copied for name in line.split()}
    assert all((top / name).exists() for name in names)
    assert names >= {"pyproject.toml", "oocgemm", "kernels", "README.md", "LICENSE"}


def test_alerts_and_the_list_of_metrics_agree_with_the_server(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        text = server.ask("GET", "/metrics").body.decode()
    real = set(re.findall(r"^(oocgemm_\w+)", text, re.M))
    assert {name.rstrip("{") for name in re.findall(r"`(oocgemm_\w+)", http_api.metrics())} == real
    alerts = set(re.findall(r"\boocgemm_\w+", (FILES / "alerts.yml").read_text()))
    assert alerts
    assert alerts <= real


def test_the_reference_of_the_api_shows_every_operation_and_type() -> None:
    page = http_api.fill((FILES.parent / "reference" / "http-api.md").read_text())
    described = http_api.described()
    operations = [(path, method) for path, methods in described["paths"].items() for method in methods]
    assert len(operations) > 20
    assert all(f"### `{method.upper()} {path}`\n" in page for path, method in operations)
    assert all(f"### {name}\n" in page for name in described["components"]["schemas"])
    assert "<!-- http-api" not in page
    assert doctest.testmod(http_api) == (0, 1)


# A proxy


@contextmanager
def nginx(folder: Path, server: RealServer) -> Iterator[int]:
    """Run nginx with the configuration of the guide in front of a server; yield its port."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"),
            *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        capture_output=True,
        check=True,
    )
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    site = (FILES / "nginx.conf").read_text()
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        (f"/etc/ssl/certs/{HOST}.pem", str(folder / "cert.pem")),
        (f"/etc/ssl/private/{HOST}.key", str(folder / "key.pem")),
        ("http://127.0.0.1:8642", server.url),
    ):
        assert old in site
        site = site.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{site}}}\n"
    )
    with subprocess.Popen(["nginx", "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port, process)
            yield port
        finally:
            process.terminate()


def wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("nginx did not start")


class _Through(http.client.HTTPSConnection):
    """A connection to a name for which there is no DNS entry."""

    def __init__(self, port: int, authority: Path) -> None:
        trusted = ssl.create_default_context(cafile=authority)
        super().__init__(HOST, port, timeout=SECONDS, context=trusted)
        self._trusted = trusted

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        self.sock = self._trusted.wrap_socket(plain, server_hostname=HOST)


@pytest.mark.skipif(None in map(shutil.which, ("nginx", "openssl")), reason="needs nginx and openssl")
def test_the_service_works_behind_nginx(tmp_path: Path) -> None:
    options = "--behind-proxy", "--allow-host", HOST
    with running_server(tmp_path, *options) as server, nginx(tmp_path, server) as port:
        token, same = (
            server.token("admin"),
            {"Origin": f"https://{HOST}:{port}", "Sec-Fetch-Site": "same-origin"},
        )
        with closing(_Through(port, tmp_path / "cert.pem")) as connection:
            body = f'{{"token": "{token}"}}'
            connection.request("POST", "/login", body, same | {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            cookie = answer.headers["Set-Cookie"]
            assert answer.status == 204
            assert "Secure" in cookie
            signed_in = {"Cookie": cookie.partition(";")[0]}

            connection.request("GET", "/v1/events", headers=signed_in)
            stream = connection.getresponse()
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            # The stream stays open. A proxy that buffers would hold the event back.
            assert stream.readline() == b": connected\n"
            job = server.submit(held=True)["id"]
            assert any(job.encode() in line for line in iter(stream.readline, b""))
        with closing(_Through(port, tmp_path / "cert.pem")) as connection:
            for origin, status in ((same["Origin"], 200), ("https://evil.example", 403)):
                headers = signed_in | {"Origin": origin}
                connection.request("POST", f"/v1/jobs/{job}/cancel", headers=headers)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status, origin
            connection.request("GET", "/v1/jobs", headers={"Host": "evil.example"} | signed_in)
            assert connection.getresponse().status == 403
