"""Python imports this when it starts, if the folder is in PYTHONPATH: it kills processes of jobs for tests.

$OOCGEMM_DIE is a point, such as "before result.json": before or after a worker locks the file ``lock`` of its
job, or writes ``owner.json`` or ``result.json``, which is empty before. Each job dies once: the folder
$OOCGEMM_DEAD has a file for each one that has. $OOCGEMM_JOBS is the folder of all jobs.
"""

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEN, _, NAME = os.environ.get("OOCGEMM_DIE", "").partition(" ")


def _die(descriptor: int) -> None:
    """Kill this process if it is at the point, and its job has not died before."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return
    if os.path.basename(path) != NAME:
        return
    # The worker has a link to the file of the job.
    jobs = os.environ["OOCGEMM_JOBS"]
    here = os.fstat(descriptor)
    files = Path(jobs).glob(f"*/{NAME}")  # a job that the server is starting may have none yet
    (job,) = [file.parent.name for file in files if os.path.samestat(file.stat(), here)]
    try:
        os.close(os.open(f"{os.environ['OOCGEMM_DEAD']}/{job}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(right: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: Any, *arguments: Any) -> Any:
        if WHEN == "before":
            _die(int(descriptor))
        found = right(descriptor, *arguments)
        if WHEN == "after":
            _die(int(descriptor))
        return found

    return call


if WHEN and "oocgemm.service.job_worker" in sys.orig_argv:  # not the server
    os.write = _wrapped(os.write)
    fcntl.fcntl = _wrapped(fcntl.fcntl)
