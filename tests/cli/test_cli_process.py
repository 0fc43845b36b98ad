"""The command as a process: its exit codes, and which packages it imports."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oocgemm.cli.main import COMMANDS, cli
from oocgemm.cli.process import EXIT_USAGE
from tests.support.cli_arrays import A, B, folder_of_arrays, stored


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_of_arrays(tmp_path, monkeypatch)


def _process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.usefixtures("here")
def test_the_module_as_a_process_exits_as_the_entry_point_does() -> None:
    done = _process("-m", "oocgemm", "run", "a", "b", "new", "--backend", "host", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    np.testing.assert_array_equal(stored("new"), A @ B)
    again = _process("-m", "oocgemm", "run", "a", "b", "new", "--backend", "host", "--quiet")
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (EXIT_USAGE, "", 1)


@pytest.mark.usefixtures("here")
def test_a_reader_that_exits_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", "plan", "a", "b", "--backend", "host"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import oocgemm", id="import", marks=pytest.mark.slow),
        pytest.param("import oocgemm.cli.main", id="the command line", marks=pytest.mark.slow),
        pytest.param("from oocgemm.__main__ import main; main()", id="plan"),
    ],
)
def test_cupy_stays_out_even_where_it_is_installed(here: Path, code: str) -> None:
    package = here / "site" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib; pathlib.Path('imported').touch(); raise ImportError"
    )
    report = "import atexit, sys; atexit.register(lambda: print('cupy' in sys.modules, file=sys.stderr)); "
    plan = ("plan", "a", "b", "--backend", "cuda", "--device-memory", "1GiB")
    done = _process("-c", report + code, *plan, PYTHONPATH=str(here / "site"))
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert not (here / "imported").exists()
    assert "ImportError" in _process("-c", "import cupy", PYTHONPATH=str(here / "site")).stderr
    assert (here / "imported").exists()  # the trap works: importing cupy creates this file


def test_shells_can_complete_commands_without_zarr_or_cupy() -> None:
    environment = {"COMP_WORDS": "oocgemm cal", "COMP_CWORD": "1"}
    asked = _process("-m", "oocgemm", _OOCGEMM_COMPLETE="bash_complete", **environment)
    assert (asked.returncode, asked.stdout) == (0, "plain,calibrate\n")
    assert "_oocgemm_completion" in _process("-m", "oocgemm", _OOCGEMM_COMPLETE="bash_source").stdout
    loaded = (
        "import atexit, sys; "
        "atexit.register(lambda: print({'zarr', 'cupy'} & set(sys.modules), file=sys.stderr)); "
    )
    code = loaded + "from oocgemm.__main__ import main; main()"
    slow = _process("-c", code, _OOCGEMM_COMPLETE="bash_complete", **environment)
    assert slow.stderr == "set()\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_array_packages(option: str) -> None:
    code = (
        "import sys; from oocgemm.__main__ import main\n"
        "try: main()\n"
        "finally: print({'numpy', 'zarr', 'rich', 'oocgemm.planning'} & set(sys.modules), file=sys.stderr)"
    )
    done = _process("-c", code, option)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_summaries_are_those_of_the_commands() -> None:
    summaries = {name: command.get_short_help_str(200) for name, command in cli.commands.items()}
    assert summaries == {name: summary for name, (_, summary) in COMMANDS.items()}
    assert list(COMMANDS) == sorted(COMMANDS)
