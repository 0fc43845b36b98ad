"""Printing never makes a command fail.

The terminal may lack characters, and stdout may be closed or full.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from oocgemm.cli.process import EXIT_FAILED
from oocgemm.planning import Budgets
from oocgemm.timeline import Timeline
from tests.support.suite import slow
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan, write_log

ASCII_ONLY = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]
FAILING = ["{} | head -c 1", "{} 2>&1 | true", "{} >&-", "{} 2> /dev/full", "{} >&- 2>&-"]
MULTIPLY = ("run", "a.npy", "b.npy", "c.npy", "--backend", "host", "--overwrite")
COMMANDS = [MULTIPLY, ("report", "log"), ("report", "log", "log"), ("plan", "a.npy", "b.npy", "--explain")]
COMMANDS += [("info",), ("verify", "a.npy", "b.npy", "product.npy")]


@cache
def virtual_run() -> Timeline:
    return run_of(virtual_plan((4096, 4096, 4096), Budgets(GIB // 4, GIB), machine()))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    for name in ("a", "b", "product"):
        np.save(f"{name}.npy", np.eye(40))
    write_log("log", virtual_run())
    return tmp_path


def program(*arguments: str, shell: str = "{}", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `oocgemm ARGUMENTS` as a process, within a shell command that contains {} in its place."""
    words = " ".join([sys.executable, "-m", "oocgemm", *arguments])
    line = ["bash", "-o", "pipefail", "-c", shell.format(words)]
    return subprocess.run(line, env=os.environ | environment, capture_output=True, check=False, timeout=120)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        *((command, ASCII_ONLY[2]) for command in COMMANDS),
        *slow(*((MULTIPLY, setting) for setting in ASCII_ONLY if setting != ASCII_ONLY[2])),
    ],
)
def test_every_command_prints_ascii(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = program(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout  # every character that is printed has an ASCII counterpart


@pytest.mark.usefixtures("here")
def test_the_gantt_chart_keeps_its_shades_in_ascii() -> None:
    unicode, ascii_only = (
        program("report", "log", PYTHONIOENCODING=encoding).stdout.decode() for encoding in ("utf-8", "ascii")
    )
    assert "│" in unicode
    bars = [
        re.findall(f"compute {re.escape(frame)}(.*){re.escape(frame)}", text)
        for frame, text in (("│", unicode), ("|", ascii_only))
    ]
    ((one,), (other,)) = bars
    assert len(one) == len(other)
    assert set(zip(one, other, strict=True)) <= set(zip(" ▁▂▃▄▅▆▇█", " .:-=+*%#", strict=True))
    assert program("report", "log", LANG="C.UTF-8").stdout.decode() == unicode


@pytest.mark.usefixtures("here")
def test_names_that_cannot_be_decoded_are_printed() -> None:
    name = os.fsdecode(b"c\xff\xe9.npy")
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", *MULTIPLY[:3], name, *MULTIPLY[4:]],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"C: c\xff\xe9.npy\n" in done.stdout


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "shell"),
    [
        (MULTIPLY, FAILING[0]),
        *slow((MULTIPLY, FAILING[1])),
        (MULTIPLY, FAILING[2]),
        *slow((MULTIPLY, FAILING[3])),
        (MULTIPLY, FAILING[4]),
        *slow(*((other, FAILING[0]) for other in COMMANDS[1:])),
    ],
)
def test_streams_that_cannot_be_written_fail_no_command(arguments: tuple[str, ...], shell: str) -> None:
    done = program(*arguments, shell=shell)
    assert (done.returncode, done.stderr) == (0, b"")
    if arguments is MULTIPLY:
        np.testing.assert_array_equal(np.load("c.npy"), np.eye(40))


@pytest.mark.usefixtures("here")
def test_an_exit_code_outlives_the_reader() -> None:
    np.save("product.npy", np.zeros((40, 40)))
    done = program("verify", "a.npy", "b.npy", "product.npy", shell="{} | true")
    assert done.returncode == EXIT_FAILED
    assert done.stderr.startswith(b"Error: product.npy: C[0:40, 0:40] is wrong")


@pytest.mark.usefixtures("here")
def test_output_that_a_full_disk_refuses_is_an_error() -> None:
    done = program("report", "log", shell="{} > /dev/full")
    assert done.returncode == EXIT_FAILED
    assert done.stderr == b"Error: the output cannot be written: No space left on device\n"


@pytest.mark.usefixtures("here")
def test_progress_on_a_stream_that_fails_ends_no_run() -> None:
    """The library shows progress on stderr, which fails here. The call returns nevertheless.

    Python itself ends with the exit code 120 if it cannot flush stderr.
    """
    code = (
        "import oocgemm, numpy as np; from oocgemm.reports import progress; progress.LINE_SECONDS = 0.0\n"
        "oocgemm.matmul('a.npy', 'b.npy', out='d.npy', backend='host', tile='8x8x8', progress=True)\n"
        "print('done', flush=True)"
    )
    for target in ("/dev/full", "&-"):
        for unbuffered in ("", "1"):
            line = f"'{sys.executable}' -c \"{code}\" 2>{target}; rm d.npy"
            environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=environment)
            assert (done.stdout, done.returncode) == (b"done\n", 0), target
