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
from oocgemm.system.threads import IDLE


@dataclass(frozen=True)
class Finished:
    """The exit code of a command, and what it printed on stdout and stderr."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Return the JSON object on stdout. Raises an error if stdout contains anything else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def command(*arguments: str | Path) -> Finished:
    """Run `oocgemm ARGUMENTS` in this process, by its entry point.

    Exceptions of the command are not caught.
    """
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
    """Run `oocgemm run ARGUMENTS` on the host backend."""
    return command("run", "--backend", "host", *arguments)


def contents(folder: Path) -> dict[str, object]:
    """Return everything below a folder by its path: the bytes of files, the targets of links, and folders."""
    found: dict[str, object] = {}
    for place in sorted(folder.rglob("*")):
        name = str(place.relative_to(folder))
        if place.is_symlink():
            found[name] = "link to " + os.readlink(place)
        else:
            found[name] = place.read_bytes() if place.is_file() else "folder"
    return found


# Threads of runs that were alive when the current test began. An earlier test leaked them and has failed for
# that, so that the current test must not fail for them too.
_leaked: set[threading.Thread] = set()


def forget_threads() -> None:
    """From now on, ignore the threads of runs that are alive at this moment."""
    _leaked.update(_alive())


# Threads that are kept for the next run, until `oocgemm.release`.
KEPT = ("oocgemm-upload-", "oocgemm-download-")


def own_threads(*, kept: bool = False) -> list[str]:
    """Return the names of the live threads of runs that the current test has started.

    Those that are kept for the next run are included only if `kept`.
    """
    alive = [thread.name for thread in _alive() if thread not in _leaked]
    return [name for name in alive if kept or not name.startswith(KEPT)]


def _alive() -> list[threading.Thread]:
    """Return the live threads of runs, without those that wait for the next run."""
    # Threads whose start was interrupted stay in Python's list but never run.
    found = [t for t in threading.enumerate() if t.name.startswith("oocgemm") and t.is_alive()]
    return [thread for thread in found if thread.name != IDLE]
