"""What runs in a worker: give a task to a child process, and return its result."""

import json
import signal
import time
from contextlib import suppress
from threading import Event
from typing import Any

from oocgemm.distributed.child import Child, Key, environment_with, keep, take
from oocgemm.distributed.watchdog import EXIT_IDLE

# The "error" of a task whose child process has died without a result.
DIED = "Died"


def run(text: str, stop: Event | None = None) -> dict[str, Any]:
    """Do a task in a child process, and return its result. It has the key "error" if the task failed.

    Args:
        text: the task, as JSON. Its "environment" has variables for the child process; null unsets one.
        stop: makes the child process stop soon after it is set.
    """
    environment = environment_with(json.loads(text).get("environment", {}))
    key = Key.of(environment)
    while True:
        try:
            child = take(key) or Child(environment)
        except (OSError, RuntimeError) as error:
            return {"error": "BackendError", "message": f"no process can be started: {error}", "fatal": False}
        stays = False
        try:
            answer = child.ask(text, stop)
            if not answer and child.wait() == EXIT_IDLE:
                continue  # it has ended without a look at the task
            result = _result(child, answer)
            stays = result.pop("stays", False) and not (stop is not None and stop.is_set())
        finally:
            if stays:
                keep(key, child)
            else:
                child.end()
        return result


def ping(text: str) -> int:
    """Return the wall clock of this machine in nanoseconds."""
    return time.time_ns()


def _result(child: Child, answer: bytes) -> dict[str, Any]:
    """Return the result that a process has answered, or how it died."""
    try:
        result: dict[str, Any] = json.loads(answer)
        return result
    except ValueError:
        pass
    code = child.wait()
    how = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            how += ", perhaps for lack of memory"
        if -code == signal.SIGILL:
            how += ": the processor lacks an instruction that the coordinator's kernels use"
    lines = child.printed().splitlines()
    last = f"; it printed: {lines[-1]}" if lines else ""
    return {"error": DIED, "message": f"its process ended ({how}){last}", "fatal": False}
