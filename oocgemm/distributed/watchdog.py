"""End a child process soon after its worker or its coordinator has ended, and when it has been idle."""

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep

from oocgemm.errors import ExecutionError
from oocgemm.system.threads import Cancel, start

# Seconds between two looks at the coordinator, and seconds in which a run must stop before the process exits.
# Together they are well below the 2 s after which no child process may be left.
INTERVAL, PATIENCE = 0.5, 0.8
# Exit codes of a process that did not stop in time, and of one that got no further task in `IDLE` seconds.
EXIT_STOPPED, EXIT_IDLE = 70, 71
# Backends whose processes stay for another task. To import CuPy and to start CUDA takes a second or two.
# A process that multiplies with a CPU starts fast, and its BLAS keeps the number of threads of its start.
STAYING, IDLE = ("cuda",), 30.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends.

    This covers a worker that is killed. Where the system cannot do it, `watch` ends the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Watch:
    """A thread that stops the run when the worker closes its end of a pipe, or has died."""

    def __init__(
        self, pipe: int, cancel: Cancel, reason: Callable[[], str | None], clean_up: Callable[[], object]
    ) -> None:
        """Start to watch.

        Args:
            pipe: file descriptor of the end of the pipe that this process reads. The worker writes nothing
                to it until `end` has been called.
            cancel: stops the run. If the run does not stop within `PATIENCE` seconds, the process exits,
                which is safe at any time.
            reason: returns why the process should end for another reason, or None. It is called every
                `INTERVAL` seconds.
            clean_up: called before the process exits.
        """
        self._pipe, self._cancel, self._reason, self._clean_up = pipe, cancel, reason, clean_up
        self._ended, self._end = os.pipe()
        self._fired = False
        self._thread = threading.Thread(target=self._work, name="oocgemm-watchdog", daemon=True)
        start(self._thread)

    def end(self) -> bool:
        """Stop to watch. Return False if the process is about to exit."""
        os.close(self._end)
        while self._thread.is_alive() and not self._fired:
            self._thread.join(0.01)
        if not self._fired:
            os.close(self._ended)
        return not self._fired

    def _work(self) -> None:
        why = None
        while why is None:
            readable, _, _ = select.select([self._pipe, self._ended], [], [], INTERVAL)
            if self._ended in readable:
                return
            worker_ended = readable and not os.read(self._pipe, 1 << 10)
            why = "its worker has ended" if worker_ended else self._reason()
        self._fired = True
        self._cancel.request(ExecutionError(f"the part was stopped: {why}"))
        sleep(PATIENCE)
        self._clean_up()
        os._exit(EXIT_STOPPED)
