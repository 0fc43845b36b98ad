"""End a child process soon after its worker or its coordinator has ended."""

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
# Exit code of a process that did not stop in time.
EXIT_STOPPED = 70
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends.

    This covers a worker that is killed. Where the system cannot do it, `watch` ends the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(
    pipe: int, cancel: Cancel, reason: Callable[[], str | None], clean_up: Callable[[], object]
) -> None:
    """Start a thread that stops the run when the worker closes its end of a pipe, or has died.

    Args:
        pipe: file descriptor of the end of the pipe that this process reads. The worker writes nothing to it.
        cancel: stops the run. If the run does not stop within `PATIENCE` seconds, the process exits, which is
            safe at any time.
        reason: returns why the process should end for another reason, or None. It is called every `INTERVAL`
            seconds.
        clean_up: called before the process exits.
    """

    def work() -> None:
        why = None
        while why is None:
            readable, _, _ = select.select([pipe], [], [], INTERVAL)
            worker_ended = readable and not os.read(pipe, 1 << 10)
            why = "its worker has ended" if worker_ended else reason()
        cancel.request(ExecutionError(f"the part was stopped: {why}"))
        sleep(PATIENCE)
        clean_up()
        os._exit(EXIT_STOPPED)

    start(threading.Thread(target=work, name="oocgemm-watchdog", daemon=True))
