"""Python imports this when it starts, if the folder is in PYTHONPATH: it kills processes of jobs for tests.

$OOCGEMM_DIE is a point, such as "before result.json": before or after the process of a job locks the file
``lock`` of its job, or renames ``owner.json`` or ``result.json`` into place. Each job dies once: the folder
$OOCGEMM_DEAD has a file for each one that has.
"""

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

WHEN, _, NAME = os.environ.get("OOCGEMM_DIE", "").partition(" ")


def _die(path: str) -> None:
    """Kill this process if it is at the point, and its job has not died before."""
    if os.path.basename(path) != NAME:
        return
    mark = os.path.join(os.environ["OOCGEMM_DEAD"], os.path.basename(os.path.dirname(path)))
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(right: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        path = path_of(*arguments)
        if WHEN == "before":
            _die(path)
        found = right(*arguments, **options)
        if WHEN == "after":
            _die(path)
        return found

    return call


if WHEN and "oocgemm.service" in " ".join(sys.orig_argv):  # not the server
    os.rename = _wrapped(os.rename, lambda old, new, *_: os.fspath(new))
    fcntl.fcntl = _wrapped(
        fcntl.fcntl, lambda descriptor, *_: os.readlink(f"/proc/self/fd/{int(descriptor)}")
    )
