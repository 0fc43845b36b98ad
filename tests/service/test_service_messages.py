"""What users read when a service cannot be started or reached. The remedies work."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import command
from tests.support.real_server import RealServer, running_server


def refused(*arguments: str | Path) -> str:
    """Run a command that fails because of its input; return its message, which is one line."""
    done = command(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "Errno" not in done.err
    return done.err.removeprefix("Error: ").rstrip("\n")


@pytest.mark.parametrize("line", ["serve --root data={folder}:ro --backend host", "token create alice"])
def test_a_state_folder_that_cannot_be_written(tmp_path: Path, line: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "data").mkdir()
    state = tmp_path / "file" / "state"
    message = refused(*line.format(folder=tmp_path / "data").split(), "--state", state)
    reason = "cannot be written (Not a directory)"
    assert message == f"the state folder {state} {reason}: pass --state with another one"


def test_a_root_that_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    message = refused("serve", "--root", f"data={missing}:ro", "--state", tmp_path / "state")
    reason = "cannot be used (No such file or directory)"
    assert message == f"root data: {missing} {reason}: create the folder, or pass another one"
    assert not (tmp_path / "state").exists()


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        server = RealServer(tmp_path, "--listen", f"127.0.0.1:{port}")
        done = subprocess.run(server.command(), capture_output=True, text=True, check=False)
    said = f"Error: 127.0.0.1:{port} cannot be used (Address already in use): pass another --listen\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_server_names_its_socket_if_other_commands_would_not_find_it(tmp_path: Path) -> None:
    server = RealServer(tmp_path)
    process = subprocess.Popen(server.command(), stdout=subprocess.PIPE, text=True)
    server.process = process
    assert process.stdout is not None
    try:
        printed = iter(process.stdout.readline, "")
        assert f"for other commands: export OOCGEMM_SERVICE={server.socket}\n" in printed
        assert any(line.startswith("listening on http") for line in printed)
        server.process.terminate()
        assert list(printed) == ["the server has stopped; jobs that are running go on\n"]
    finally:
        server.close()
        process.stdout.close()


def test_http_and_https_are_told_apart(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        done = command("queue", "--service", server.url.replace("http:", "https:"))
        assert (done.code, done.out) == (1, "")
        assert "does not use TLS: write http:// instead of https://" in done.err


@pytest.mark.parametrize("line", ["serve --root data={folder}:ro", "token list"])
def test_packages_of_the_server_that_are_missing(tmp_path: Path, line: str) -> None:
    words = ["oocgemm", *line.format(folder=tmp_path).split(), "--state", str(tmp_path / "state")]
    code = (
        "import sys; sys.modules |= dict.fromkeys(('fastapi', 'pydantic', 'uvicorn'))\n"
        f"sys.argv = {words}\n"
        "from oocgemm.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is missing: pip install 'oocgemm[service]'" in done.stderr
