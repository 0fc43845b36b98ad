"""The child processes of a worker: start them, give them tasks, and keep those that wait for another one."""

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Lock
from time import monotonic

from oocgemm.distributed.watchdog import INTERVAL, PATIENCE

# Seconds between two looks whether the coordinator, in the same process, wants the task to stop.
POLL = 0.05
# Seconds after which a child process that was told to stop is killed.
MAX_STOP = INTERVAL + PATIENCE + 0.5
# Longest part of what a failed child process printed that is returned, in bytes.
MAX_PRINTED = 2000


class Child:
    """A child process, which does one task at a time."""

    def __init__(self, changes: Mapping[str, str | None]) -> None:
        """Start a process. `changes` are those of the environment. Raises `OSError`."""
        environment = dict(os.environ)
        for name, value in changes.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        # The child process must import the package that this process has imported.
        top = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (top, environment.get("PYTHONPATH"))))
        # -P: the current folder may contain files with the names of modules.
        command = [sys.executable, "-P", "-m", "oocgemm.distributed.part"]
        self._printed = TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout

    def ask(self, text: str, stop: Event | None) -> bytes:
        """Give the process a task, and return its answer; b"" if it has ended without one.

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
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self) -> int:
        """Return the exit code of a process that is ending or is killed."""
        return self._process.wait()

    def printed(self) -> str:
        """Return the end of what the process has printed."""
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - MAX_PRINTED))
        return self._printed.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Kill the process, and release its files."""
        self._process.kill()
        self._process.wait()
        for file in (self._tasks, self._answers, self._printed):
            with suppress(BrokenPipeError):
                file.close()


# Child processes that wait for another task, by the process that started them and by their environment.
_idle: dict[tuple[int, str], list[Child]] = {}
_lock = Lock()


def take(key: tuple[int, str]) -> Child | None:
    """Return a child process that waits for a task, if there is one."""
    with _lock:
        waiting = _idle.get(key, [])
        while waiting:
            child = waiting.pop()
            if not child.ended:
                return child
            child.end()
    return None


def keep(key: tuple[int, str], child: Child) -> None:
    """Let a child process wait for another task. If none comes, it ends by itself."""
    with _lock:
        _idle.setdefault(key, []).append(child)
