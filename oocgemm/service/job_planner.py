"""What a job computes, and its plan. The planning process: ``python -m oocgemm.service.job_planner ALLOWED``.

A *spec* is plain data: ``a``, ``b`` and ``c``, paths of arrays, and ``options``.

Planning opens the arrays of a job. The server has checked their paths, but whoever may write in a root can
replace a folder by a link after the check, and an array can have such a link from the start. So a process
that Landlock confines does the planning. If an array makes this process end, or wait for ever, the server
still answers. NumPy starts threads when it is imported, and Landlock would not restrict them. So functions of
this module import what uses NumPy when they are called, which is after the process has confined itself. The
server calls none of these functions.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from oocgemm.errors import BackendError, BudgetError, InputError
from oocgemm.jobs import support
from oocgemm.planning.units import format_size
from oocgemm.service.backfill import Limits, Need
from oocgemm.service.confinement import Confinement, environment, restrict_to
from oocgemm.service.protocol import Reason, UnavailableError
from oocgemm.system.text import LINES, plain
from oocgemm.values import dataclass

if TYPE_CHECKING:
    from oocgemm.jobs.option_groups import Option
    from oocgemm.jobs.run import Plan

# Bytes of host memory beyond what the plan needs: a C that exists, as in later attempts, needs more buffers
# than a new C.
MARGIN = 64 << 20
# Options that only the run takes, not the plan.
_RUN = frozenset({"overwrite", "trust_operands"})
# Maximum seconds for planning a job. Planning takes milliseconds.
SECONDS = 30.0


@dataclass(frozen=True)
class Planned:
    """A job that can be queued. Its spec has absolute paths and explicit budgets."""

    spec: dict[str, Any]
    summary: dict[str, Any]
    need: Need
    seconds: float


def checked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with absolute paths. Raises `InputError` for wrong fields, options or types."""
    options, known = spec.get("options", {}), job_options()
    unknown = sorted({*spec} - {"a", "b", "c", "options"})
    if unknown:
        raise InputError(f"unknown fields {', '.join(unknown)}: a job has a, b, c and options")
    if not isinstance(options, Mapping):
        raise InputError('options must be an object, such as {"beta": 1}')
    paths = {}
    for name in "abc":
        path = spec.get(name)
        if not isinstance(path, str) or not path or "\0" in path:
            raise InputError(f"{name} must be the path of an array")
        if "://" in path:
            raise support.refusal(support.SERVICE, "URL", name=name)
        paths[name] = os.path.abspath(path)
    for name, value in options.items():
        if name not in known:
            raise support.refusal(support.SERVICE, "option", name=name, known=", ".join(sorted(known)))
        if type(value) not in (allowed := json_types(name)):
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise InputError(f"option {name} must be of type {kinds}, not {type(value).__name__}")
    return {**paths, "options": dict(options)}


def job_options() -> "dict[str, Option]":
    """Return the options of `oocgemm.gemm` that a job may have, by name."""
    from oocgemm.jobs.options import options_of

    return {name: option for name, option in options_of("gemm").items() if option.service}


def json_types(name: str) -> tuple[type, ...]:
    """Return the types that the value of an option may have in JSON."""
    from oocgemm.jobs.options import types_of

    types = types_of("gemm", name)
    if types == {bool}:
        return (bool,)
    if tuple[int, int] in types:
        return (list,)
    if complex in types:  # a complex, infinite or nan value is a text
        return int, float, str
    return (int, str) if int in types else (str,)


def arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a spec as keyword arguments of `oocgemm.gemm`."""
    return {name: _argument(name, value) for name, value in spec["options"].items()}


def _argument(name: str, value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != 2 or any(type(each) is not int for each in value):
            raise InputError(f"option {name} must be two integers, such as [1024, 1024], not {value}")
        return tuple(value)
    if isinstance(value, str) and float in json_types(name):
        try:
            number = complex(value)
        except ValueError:
            raise InputError(f"option {name} must be a number, such as 1.5 or 2+1j, not {value!r}") from None
        return number if number.imag else number.real
    return value


def _in_json(value: Any) -> bool:
    """Return whether JSON can hold a value. It cannot hold complex, infinite and nan values."""
    return not isinstance(value, complex) and (not isinstance(value, float) or isfinite(value))


def needs_before(options: Mapping[str, Any]) -> bool:
    """Return whether a job with these options replaces or changes an old C."""
    return bool(options.get("overwrite") or options.get("beta"))


def planned(spec: Mapping[str, Any], limits: Limits, backend: str) -> Planned:
    """Plan a job, whose spec `checked` has returned.

    The budgets default to the limits: the memory of the largest device, and an equal part of the host memory
    for each device. The budgets are lowered to what the plan needs, so that other jobs can run beside this
    one.

    Raises `InputError` if the product is impossible. Raises `BudgetError` if the budgets or the limits are
    too small; the error names the smallest budgets that would do.
    """
    from oocgemm.verbs import gemm

    given = arguments(spec)
    if not needs_before(given):
        _check_incomplete(spec["c"])
    plan_with = partial(gemm.plan, *(spec[name] for name in "abc"))
    options: dict[str, Any] = {"backend": backend}
    options |= {name: value for name, value in given.items() if name not in _RUN}
    host = limits.host // max(1, len(limits.devices))
    if backend == "host":  # both budgets are host memory
        defaults = {"device_memory": host * 3 // 4, "host_memory": host // 4}
    else:
        defaults = {"device_memory": max(limits.devices.values(), default=0), "host_memory": host}
    if "memory" in options:
        defaults = {} if backend == "host" else {"device_memory": defaults["device_memory"]}
    plan = plan_with(**defaults | options)
    # The job itself gets both budgets, as small as they may be.
    options.pop("memory", None)
    budgets = {"device_memory": plan.budgets.device, "host_memory": plan.budgets.host}
    used = {
        "device_memory": plan.footprint.device_total,
        "host_memory": min(plan.footprint.host_total + MARGIN, plan.budgets.host),
    }
    try:
        plan = plan_with(**options | used)
        budgets = used
    except BudgetError:  # the search finds no plan for exactly this much memory
        pass
    device, host = budgets.values()
    disk = 0 if os.path.exists(spec["c"]) else plan.problem.m * plan.problem.n * plan.problem.itemsizes["C"]
    need = Need(0, device + host, disk) if backend == "host" else Need(device, host, disk)
    if (lacking := limits.lacking(need)) is not None:
        reason, needed, limit = lacking
        what = {Reason.DEVICE_MEMORY: "device memory", Reason.HOST_MEMORY: "host memory"}.get(reason, "disk")
        text = f"the job needs {format_size(needed)} of {what}, and the service has {format_size(limit)}: "
        if reason is Reason.DISK:
            raise InputError(text + "free space in the folder of C, or raise --disk-quota of the service")
        text += "pass smaller budgets, or raise the limit of the service"
        raise BudgetError(text, needed=_smallest(plan_with, options))
    continues = os.path.exists(spec["c"]) and not (given.get("overwrite") or plan.problem.updates_c)
    stored = {name: value if _in_json(value) else spec["options"][name] for name, value in given.items()}
    stored.pop("memory", None)
    stored |= {"backend": backend} | budgets
    summary = _summary(plan) | {"c_exists": continues}
    return Planned(dict(spec) | {"options": stored}, summary, need, plan.prediction.total)


def _check_incomplete(c: str) -> None:
    """Raise `InputError` if C is complete already: a job would leave it as it is."""
    from oocgemm.jobs import journal
    from oocgemm.jobs.request import Destination
    from oocgemm.stores import exists

    if not exists(c):
        return
    folder = Destination.parse(c).journal_folder
    record = None if folder is None else journal.read(folder)
    if record is not None and record.complete is not None and os.path.exists(c):
        raise InputError(
            f"C exists at {c}: pass --overwrite (overwrite=True) to compute all of it anew, or give another "
            "path"
        )


def _smallest(plan_with: Callable[..., object], options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the minimum device memory and host memory with which a job can run; None if unknown."""
    try:
        plan_with(**dict(options) | {"device_memory": 1, "host_memory": 1})
    except BudgetError as error:
        return error.needed
    return None


def _summary(plan: "Plan") -> dict[str, Any]:
    problem, tile = plan.problem, plan.tile
    return {
        **{"m": problem.m, "n": problem.n, "k": problem.k, "a_dtype": problem.a_dtype},
        **{"c_dtype": problem.c_dtype, "tile": [tile.m, tile.n, tile.k], "tiles": list(plan.grid.shape)},
        **{"flops": plan.flops, "predicted_seconds": plan.prediction.total},
    }


class Planner:
    """Plans jobs in a process, which is started for the first job, and again if it has died."""

    def __init__(self, allowed: Confinement | None) -> None:
        """`allowed` are the folders that jobs may use (`Confinement`); None for all folders."""
        self._allowed = allowed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def plan(self, spec: Mapping[str, Any], limits: Limits, backend: str) -> Planned:
        """Plan a job as `planned` does. Raises `UnavailableError` if the process does not answer."""
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
        """End the process. No other process is started afterwards."""
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
                pass  # the process has died
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
            [sys.executable, "-m", "oocgemm.service.job_planner", json.dumps(self._allowed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(OPENBLAS_NUM_THREADS="1"),  # the process multiplies nothing
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):  # a request that the process has not read cannot be written any more
        process.communicate()


def main(allowed: Confinement | None) -> None:
    """Confine this process, and plan the jobs of stdin until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints go to stderr, since they are no answers
    warnings.showwarning = _show_warning
    if allowed is not None:
        # A C that exists is opened for writing, though planning writes nothing.
        restrict_to(allowed)
    # If the server dies while this process opens an array, the process would still wait for the array.
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
