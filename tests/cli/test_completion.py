"""Shells complete commands, options and the paths of operands."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from oocgemm.cli.main import cli
from tests.support import TOP
from tests.support.suite import slow


@pytest.mark.parametrize(
    "words",
    [
        *(["run"], ["run", "A.zarr"], ["run", "A.zarr", "B.zarr"]),
        *(["plan"], ["plan", "A.zarr"], ["plan", "A.zarr", "B.zarr"]),
        *(["verify"], ["verify", "A.zarr"], ["verify", "A.zarr", "B.zarr"]),
        *(["verify", "--c-before"], ["report"], ["report", "a.jsonl"], ["calibrate", "--path"]),
    ],
    ids=" ".join,
)
def test_a_shell_is_asked_for_file_names(words: list[str]) -> None:
    found = BashComplete(cli, {}, "oocgemm", "_OOCGEMM_COMPLETE").get_completions(words, "C")
    assert [(item.type, item.value) for item in found] == [("file", "C")]


def typed(folder: Path, text: str, until: str) -> str:
    """Type `text` into an interactive bash in a folder, and return what it shows.

    Waits until it shows `until`, or for 20 s.
    """
    program = folder / "bin" / "oocgemm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oocgemm "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    ours, theirs = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={"PATH": path, "PYTHONPATH": str(TOP), "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(theirs)

    def answer(line: str, end: str) -> str:
        os.write(ours, line.encode())
        shown, deadline = "", time.monotonic() + 20
        while end not in shown and time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096).decode()
        return shown

    try:
        answer('eval "$(_OOCGEMM_COMPLETE=bash_source oocgemm)"; echo "re""ady"\n', "ready\r\n")
        return answer(text, until)
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("oocgemm run my\t", "my\\ A.zarr/"),
        ("oocgemm plan 'my A.zarr' ot\t", "other.npy"),
        *slow(("oocgemm verify x y oth\t", "other.npy")),
    ],
)
def test_bash_completes_the_paths_of_arrays(tmp_path: Path, text: str, until: str) -> None:
    (tmp_path / "my A.zarr").mkdir()
    (tmp_path / "other.npy").touch()
    assert until in typed(tmp_path, text, until)
