"""A process that runs jobs, one after the other: ``python -m oocgemm.service.worker FOLDER``.

It keeps between jobs what takes long to make: imported modules, the CUDA context, cuBLAS, loaded kernels,
streams, and a little pinned memory (`oocgemm.release` says how much). Its standard input is a socket to the
server. Messages of the server are orders: JSON objects with ``attempt``, ``spec``, ``device`` and
``confine``. The worker answers with `BEGUN` when it has the lock of the job, and with `IDLE` when the attempt
has ended and it waits for another order.

A worker ends

- when the server has closed the socket, or has died: after its job, or at once if it has none;
- after SIGTERM, which stops its job;
- after a job that has failed, except by wrong input or budgets. Memory may be short or lost then, and a CUDA
  context is unusable after most errors. The next attempt gets a new process.

The worker restricts itself to its folder, and to the folders that ``confine`` of its first order allows. All
orders of a server allow the same. NumPy starts threads when it is imported, and Landlock would not restrict
them. So NumPy, and every module that uses it, is imported after that. The worker's folder has links to the
files of the present job alone, and temporary files.

Jobs of several owners share a worker. What one leaves in memory are parts of arrays in the roots, which all
owners may read, and its spec. A job runs no code of its owner. So another job could see that only by a defect
of this package or of a library that decodes chunks.
"""

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oocgemm.service import job
from oocgemm.service.confine.process import restrict_to

BEGUN, IDLE = b"begun", b"idle"
# Maximum bytes of an order.
MAX_ORDER = 1 << 18


def main(folder: Path) -> int:
    """Run the orders of a server; return the exit status of the process."""
    server = socket.socket(fileno=os.dup(0))
    _close_input()
    try:
        # A later server removes the folder if it is not locked. It is locked until this process ends.
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
    except FileNotFoundError:
        return job.BUSY
    confined = False
    try:
        signal.signal(signal.SIGTERM, _stop)
        while (order := _receive(server)) is not None:

            def begin(order: Mapping[str, Any] = order) -> None:
                nonlocal confined
                _tell(server, BEGUN)
                if not confined:
                    _confine(folder, order["confine"])
                    confined = True

            status, keep = job.run(folder, order, begin)
            if not keep:
                return status
            _shrink()
            signal.signal(signal.SIGTERM, _stop)
            _tell(server, IDLE)
    except KeyboardInterrupt:
        return job.STOPPED
    return 0


def _shrink() -> None:
    """Free memory that the server does not count as that of an idle worker."""
    from oocgemm.backends import shrink

    shrink()


def _stop(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)


def _receive(server: socket.socket) -> dict[str, Any] | None:
    """Wait for an order; return None if there is no server that could send one."""
    try:
        message = server.recv(MAX_ORDER)
    except ConnectionError:
        return None
    found: dict[str, Any] | None = json.loads(message) if message else None
    return found


def _tell(server: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the server has died
        server.send(message)


def _confine(folder: Path, allowed: Mapping[str, Any] | None) -> None:
    """Restrict this process to its folder, and to the folders that an order allows; None for all."""
    if allowed is not None:
        restrict_to(allowed, folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
