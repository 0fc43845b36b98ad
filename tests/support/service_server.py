"""A server without HTTP: ``python -m tests.support.service_server FOLDER [POINT NUMBER]``.

With POINT and NUMBER, the server kills itself at a point of the life of a job, when it gets there for the
NUMBER-th time. `POINTS` lists the points.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oocgemm.service import confinement, dispatcher, job_worker
from oocgemm.service.dispatcher import KEEP, Dispatcher
from oocgemm.service.job_store import JobStore
from tests.support.services import LIMITS

# Functions that the server calls on the way of a job, in this order. It dies before or after the call.
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "commit": (JobStore, "move"),
    "spawn": (os, "posix_spawn"),
    "order": (dispatcher, "hand"),
    "links": (os, "link"),
    "clear": (dispatcher, "clear"),
    "attach": (dispatcher, "attach"),
    "result": (dispatcher, "result_of"),
    "charge": (JobStore, "charge"),
}
POINTS = [f"{when} {name}" for name in FUNCTIONS for when in ("before", "after")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, number: int) -> None:
    """Make this process die at a point."""
    when, name = point.split()
    owner, attribute = FUNCTIONS[name]
    right: Callable[..., Any] = getattr(owner, attribute)
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            die()
        found = right(*arguments, **options)
        if calls == number and when == "after":
            die()
        return found

    setattr(owner, attribute, wrapped)


def main(folder: Path, keep: float) -> None:
    # Workers get the variables by which tests/dying kills them.
    confinement.VARIABLES |= {"OOCGEMM_DIE", "OOCGEMM_DEAD", "OOCGEMM_JOBS"}
    dispatcher.RETRY, dispatcher.RETRY_FACTOR = 0.05, 1.0  # however often a job is killed
    store = JobStore(folder / "db")
    Dispatcher(store, folder, lambda: LIMITS, keep=keep).run(threading.Event())


if __name__ == "__main__":
    assert job_worker  # imported, so that a job's module is compiled before the first job
    if len(sys.argv) > 2:
        arm(f"{sys.argv[2]} {sys.argv[3]}", int(sys.argv[4]))
    # Without warm workers, each job spawns a process.
    main(Path(sys.argv[1]), keep=0.0 if "spawn" in sys.argv else KEEP)
