"""Configurations of the server: unsafe ones are refused, and TLS works."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from oocgemm.errors import InputError
from oocgemm.service.client import Client
from oocgemm.service.http import service as opening
from oocgemm.service.http.service import Config, parse_address
from oocgemm.service.limits import DeviceInfo, Root
from oocgemm.service.protocol import AccessError
from tests.support.command import command
from tests.support.real_server import SECONDS, running_server


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
    assert opening._is_loopback("LOCALHOST")


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
    monkeypatch.setattr(opening, "find_devices", lambda backend: ("host", [DeviceInfo(0, "host", 0)]))
    (tmp_path / "out").mkdir()
    state = tmp_path / "state"
    done = command("serve", "--root", f"out={tmp_path / 'out'}:rw", "--state", state, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (state / "serve.sock").exists()


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
            assert not connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.ask("GET", "/livez").status == 200
