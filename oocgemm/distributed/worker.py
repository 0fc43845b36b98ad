"""What runs in a worker: start a child process for a task, and return its result."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import IO, Any

from oocgemm.distributed.watchdog import INTERVAL, PATIENCE

# Seconds between two looks whether the coordinator, in the same process, wants the task to stop.
POLL = 0.05
# Seconds after which a child process that was told to stop is killed.
MAX_STOP = INTERVAL + PATIENCE + 0.5
# The "error" of a task whose child process has died without a result.
DIED = "Died"
# Longest part of what a failed child process printed that is returned, in bytes.
MAX_PRINTED = 2000


def run(text: str, stop: Event | None = None) -> dict[str, Any]:
    """Do a task in a child process, and return its result. It has the key "error" if the task failed.

    Args:
        text: the task, as JSON. Its "environment" has variables for the child process; null unsets one.
        stop: makes the child process stop soon after it is set.
    """
    environment = dict(os.environ)
    for name, value in json.loads(text).get("environment", {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    # The child process must import the package that this process has imported.
    top = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (top, environment.get("PYTHONPATH"))))
    # -P: the current folder may contain files with the names of modules.
    command = [sys.executable, "-P", "-m", "oocgemm.distributed.part"]
    with TemporaryFile() as answer, TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=answer, stderr=printed, env=environment
            )
        except OSError as error:
            return {"error": "BackendError", "message": f"no process can be started: {error}", "fatal": False}
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # the process has died already
                process.stdin.write(text.encode() + b"\n")
                process.stdin.flush()
            _wait(process, stop)
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
        return _result(process.returncode, answer, printed)


def ping(text: str) -> int:
    """Return the wall clock of this machine in nanoseconds."""
    return time.time_ns()


def _wait(process: "subprocess.Popen[bytes]", stop: Event | None) -> None:
    """Wait until a process has ended. If `stop` is set, tell it to stop, and return after `MAX_STOP` s."""
    if stop is None:
        process.wait()
        return
    while process.poll() is None and not stop.wait(POLL):
        pass
    if process.poll() is None:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(MAX_STOP)


def _result(code: int, answer: IO[bytes], printed: IO[bytes]) -> dict[str, Any]:
    """Return the result that a process has printed, or how it died."""
    answer.seek(0)
    try:
        result: dict[str, Any] = json.loads(answer.read())
        return result
    except ValueError:
        pass
    how = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            how += ", perhaps for lack of memory"
        if -code == signal.SIGILL:
            how += ": the processor lacks an instruction that the coordinator's kernels use"
    printed.seek(0)
    lines = printed.read()[-MAX_PRINTED:].decode(errors="replace").strip().splitlines()
    last = f"; it printed: {lines[-1]}" if lines else ""
    return {"error": DIED, "message": f"its process ended ({how}){last}", "fatal": False}
