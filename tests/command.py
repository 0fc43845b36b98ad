"""Run the command line in tests, and compare folders."""

import io
import json
import os
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oocgemm.cli import main as cli


@dataclass(frozen=True)
class Finished:
    """What a command leaves: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; anything beside it is an error."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def command(*arguments: str | Path) -> Finished:
    """`oocgemm ARGUMENTS`, by its entry point in this process. An exception that gets out of it, gets out."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["oocgemm", *map(str, arguments)]
    code: object = None
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Finished(code, out.getvalue(), err.getvalue())


def run(*arguments: str | Path) -> Finished:
    """`oocgemm run` on the host."""
    return command("run", "--backend", "host", *arguments)


def contents(folder: Path) -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links, and which folders there are."""
    found: dict[str, object] = {}
    for place in sorted(folder.rglob("*")):
        name = str(place.relative_to(folder))
        if place.is_symlink():
            found[name] = "link to " + os.readlink(place)
        else:
            found[name] = place.read_bytes() if place.is_file() else "folder"
    return found


# Threads of runs that were alive when the current test began: an earlier test leaked them, and has failed for
# it.
_leaked: set[threading.Thread] = set()


def forget_threads() -> None:
    """Count only threads of runs that begin from now on."""
    _leaked.update(_alive())


def own_threads() -> list[str]:
    """Names of the live threads of runs that the current test has begun."""
    return [thread.name for thread in _alive() if thread not in _leaked]


def _alive() -> list[threading.Thread]:
    # Threads whose start was interrupted stay in Python's list but never run.
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("oocgemm") and thread.is_alive()
    ]
