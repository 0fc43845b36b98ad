"""Plan jobs in a process of their own: ``python -m oocgemm.service.planner CONFINEMENT``.

Planning opens the arrays of a job. The server has checked their paths, but whoever may write in a root can
put a link in the place of a folder in between, and an array can have such a link from the start. So a process
that Landlock confines does it, as it does with jobs. An array that makes the process end, or wait for ever,
does not keep the server from answering. NumPy starts threads when it is imported, and Landlock would not
restrict them. So this process imports what uses NumPy when it has confined itself, and the server never does.

Both sides exchange JSON, one line per job.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from oocgemm.errors import BackendError, BudgetError, InputError
from oocgemm.service.confine.process import restrict_to
from oocgemm.service.environment import environment
from oocgemm.service.errors import UnavailableError
from oocgemm.service.schedule import Limits, Need
from oocgemm.system.text import LINES, plain

# Seconds in which a job must have been planned. Planning takes milliseconds.
SECONDS = 30.0


@dataclass(frozen=True)
class Planned:
    """A job that can be queued.

    `spec` has absolute paths and explicit budgets. `summary` describes the plan, `need` is what the job
    occupies, `seconds` its predicted time.
    """

    spec: dict[str, Any]
    summary: dict[str, Any]
    need: Need
    seconds: float


class Planner:
    """Plans jobs. The process is started for the first one, and again if it has died."""

    def __init__(self, allowed: Mapping[str, Any] | None) -> None:
        """`allowed` are the folders that jobs may use, as an order states them; None for all."""
        self._allowed = allowed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def plan(self, spec: Mapping[str, Any], limits: Limits, backend: str) -> Planned:
        """Plan a job as `oocgemm.service.spec.planned` does.

        Raises:
            InputError: the product is impossible, or an array cannot be read.
            BudgetError: the budgets, or the limits, are too small.
            UnavailableError: the process has died, or did not answer.
        """
        devices = [[number, size] for number, size in limits.devices.items()]
        request = {"spec": spec, "limits": asdict(limits) | {"devices": devices}, "backend": backend}
        answer = self._ask(json.dumps(request).encode() + b"\n")
        message = str(answer.get("message"))
        match answer["kind"]:
            case "planned":
                return Planned(answer["spec"], answer["summary"], Need(**answer["need"]), answer["seconds"])
            case "budget":
                needed = answer["needed"]
                raise BudgetError(message, needed=None if needed is None else (needed[0], needed[1]))
            case "input":
                raise InputError(message)
            case "backend":
                raise BackendError(message)
        raise RuntimeError(message)

    @property
    def pid(self) -> int | None:
        """The number of the process; None if there is none now."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process. No further one is started."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise UnavailableError("the server ends: try again when it has been started again")
            if self._process is None:
                self._process = self._start()
            process, line = self._process, b""
            assert process.stdin is not None
            assert process.stdout is not None
            late = threading.Timer(SECONDS, process.kill)
            late.start()
            try:
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                pass  # it has died
            finally:
                late.cancel()
            if not line.endswith(b"\n"):
                self._process = None
                _end(process)
                raise UnavailableError(
                    f"the process that plans jobs has died, or did not answer in {SECONDS:g} s: see that A, "
                    "B and C can be read, and try again"
                )
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "oocgemm.service.planner", json.dumps(self._allowed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(OPENBLAS_NUM_THREADS="1"),  # it multiplies nothing
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):  # a request that it has not read cannot be written any more
        process.communicate()


def main(allowed: Mapping[str, Any] | None) -> None:
    """Confine this process, and plan the jobs of stdin until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer
    warnings.showwarning = _show_warning
    if allowed is not None:
        # A C that exists is opened for writing, though planning writes nothing.
        restrict_to(allowed)
    # The server may die while an array is opened. This process would wait for the array then.
    threading.Thread(target=_end_with_server, daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning, which may have names of arrays, on one line of the log of the server."""
    print(f"Warning: {plain(str(message))}", file=sys.stderr)


def _end_with_server() -> None:
    """End this process when the server has closed its side of stdin."""
    closed = select.poll()
    closed.register(0, 0)  # a hang-up is always reported
    closed.poll()
    os._exit(0)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from oocgemm.service.spec import checked, planned

    try:
        limits = Limits(**request["limits"] | {"devices": dict(request["limits"]["devices"])})
        found = planned(checked(request["spec"]), limits, request["backend"])
    except BudgetError as error:
        return {"kind": "budget", "message": str(error), "needed": error.needed}
    except (InputError, OSError) as error:
        return {"kind": "input", "message": str(error)}
    except BackendError as error:
        return {"kind": "backend", "message": str(error)}
    except Exception as error:
        print(plain(traceback.format_exc(), keep=LINES), end="", file=sys.stderr)
        return {"kind": "defect", "message": f"{type(error).__name__}: see the log of the server"}
    return {"kind": "planned"} | asdict(found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
