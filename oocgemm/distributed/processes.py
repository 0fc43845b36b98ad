"""Start the child processes of a worker, give them tasks, and keep those that wait for another task.

`run` and `ping` are the functions that run in a worker.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, RLock
from time import monotonic
from typing import Any

from oocgemm.values import dataclass

# A child process checks at this interval, in seconds, whether its coordinator still runs. If it does not, the
# run has PATIENCE seconds to stop before the process exits. Both times together are well below the 2 s after
# which no child process may be left.
INTERVAL, PATIENCE = 0.5, 0.8
# Exit codes of a process that did not stop in time, and of one that got no further task in `IDLE` seconds.
EXIT_STOPPED, EXIT_IDLE = 70, 71
# Backends whose processes stay for another task. Importing CuPy and starting CUDA takes a second or two.
# A process that multiplies with a CPU starts fast, and its BLAS keeps the number of threads of its start.
STAYING, IDLE = ("cuda",), 30.0
# Poll interval in seconds: a coordinator in the same process may want the task to stop.
POLL = 0.05
# Seconds after which a child process that was told to stop is killed.
MAX_STOP = INTERVAL + PATIENCE + 0.5
# Maximum number of bytes that are returned from the output of a failed child process.
MAX_PRINTED = 2000
_lock = RLock()
# The "error" of a task whose child process has died without a result.
DIED = "Died"


class Child:
    """A child process, which does one task at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start a process. Raises `OSError`, or `RuntimeError` if the system can start no thread."""
        # -P: the current folder may contain files with the names of modules.
        command = [sys.executable, "-P", "-m", "oocgemm.distributed.child"]
        self._printed = TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._starter = _Starter.of_this_process()

        def popen() -> "subprocess.Popen[bytes]":
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._printed, env=environment)

        try:
            self._process = self._starter.call(popen)
        except BaseException:
            self._printed.close()
            self._starter.forget_child()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout

    def ask(self, text: str, stop: Event | None) -> bytes:
        """Give the process a task, and return its answer; b"" if it has ended without an answer.

        If `stop` is set, tell the process to stop, and wait for the answer for at most `MAX_STOP` s.
        """
        with suppress(BrokenPipeError):  # the process has died already
            self._tasks.write(text.encode() + b"\n")
            self._tasks.flush()
        pipe, found, until = self._answers.fileno(), b"", inf
        readable = select.poll()
        readable.register(pipe, select.POLLIN)
        while monotonic() < until:
            if readable.poll(None if stop is None else 1000 * POLL):
                part = os.read(pipe, 1 << 16)
                found += part
                if not part or part.endswith(b"\n"):
                    return found
            elif stop is not None and until == inf and stop.is_set():
                with suppress(BrokenPipeError):
                    self._tasks.close()
                until = monotonic() + MAX_STOP
        self._process.kill()
        return b""

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        return self._process.wait()

    def printed(self) -> str:
        """Return the end of the text that the process has printed."""
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - MAX_PRINTED))
        return self._printed.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Kill the process, and release its files."""
        self._process.kill()
        self._process.wait()
        for file in (self._tasks, self._answers, self._printed):
            with suppress(BrokenPipeError):
                file.close()
        self._starter.forget_child()


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of this process with changes, for a child process. None unsets a variable."""
    environment = {name: value for name, value in os.environ.items() if name not in changes}
    environment |= {name: value for name, value in changes.items() if value is not None}
    # The child process must import the package that this process has imported.
    top = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (top, environment.get("PYTHONPATH"))))
    return environment


@dataclass(frozen=True)
class Key:
    """The properties by which a waiting child process is chosen: it must have those of a newly started one.

    `process` is the id of the process that started it: a fork must not use the pipes of its parent.
    """

    process: int
    folder: str
    environment: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Key":
        """Return the key of a child process that is started now. `folder` is "" if it was removed."""
        folder = ""
        with suppress(OSError):
            folder = os.getcwd()
        return cls(os.getpid(), folder, frozenset(environment.items()))


# Child processes that wait for another task.
_idle: dict[Key, list[Child]] = {}
# Otherwise a fork could copy a locked lock, and the new process does not have the thread that would unlock
# it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Starter:
    """The thread that starts this process's children.

    The system kills the children when this thread ends (`die_with_parent`). So it must outlive the threads
    that give tasks to the children.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="oocgemm-children")
        self._children = 0

    @classmethod
    def of_this_process(cls) -> "_Starter":
        """Return the thread of this process, which stays until `forget_child` is called for a new child."""
        with _lock:
            found = _starters.setdefault(os.getpid(), cls())
            found._children += 1
        return found

    def call(self, popen: Callable[[], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
        return self._pool.submit(popen).result()

    def forget_child(self) -> None:
        """Note that a child process has ended, or could not be started."""
        with _lock:
            self._children -= 1

    def end(self) -> bool:
        """End the thread if it has no children. Return whether it has ended."""
        if not self._children:
            self._pool.shutdown()
        return not self._children


# By process: after a fork, the child process has none of the threads.
_starters: dict[int, _Starter] = {}


def take(key: Key) -> Child | None:
    """Return a child process that waits for a task; None if none waits."""
    with _lock:
        _end_dead()
        waiting = _idle.get(key)
        return waiting.pop() if waiting else None


def keep(key: Key, child: Child) -> None:
    """Let a child process wait for another task. It ends by itself if it gets no task."""
    with _lock:
        _end_dead()
        _idle.setdefault(key, []).append(child)


def release() -> None:
    """End all child processes that wait for another task, and the thread that started them if it can end."""
    process = os.getpid()
    with _lock:
        for key in [key for key in _idle if key.process == process]:
            for child in _idle.pop(key):
                child.end()
        if process in _starters and _starters[process].end():
            del _starters[process]


def _end_dead() -> None:
    """Release the files of child processes that have ended while they waited."""
    for key in [key for key in _idle if key.process == os.getpid()]:
        waiting = _idle.pop(key)
        for child in [child for child in waiting if child.ended]:
            child.end()
            waiting.remove(child)
        if waiting:
            _idle[key] = waiting


def run(text: str, stop: Event | None = None) -> dict[str, Any]:
    """Do a task in a child process, and return its result, which has the key "error" if the task failed.

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
                continue  # it has ended before it read the task
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
    """Return the result that a process has answered, or an error that says how the process died."""
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
