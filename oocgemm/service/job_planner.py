"""The plans of a job. The planning process: ``python -m oocgemm.service.job_planner ALLOWED``.

A job calls its verb. Its plans are what a dry run of the same call returns (`job_arguments`).

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from oocgemm.errors import BackendError, BudgetError, InputError
from oocgemm.jobs.support import VERBS
from oocgemm.planning.sinks import SPARSE
from oocgemm.planning.units import format_size
from oocgemm.service.backfill import Limits, Need
from oocgemm.service.confinement import Confinement, environment, restrict_to
from oocgemm.service.job_arguments import arguments, checked
from oocgemm.service.job_spec import in_memory, out_of
from oocgemm.service.protocol import Reason, UnavailableError
from oocgemm.system.text import LINES, plain
from oocgemm.values import dataclass

if TYPE_CHECKING:
    from oocgemm.jobs.run import Plan

# Bytes of host memory beyond what the plan needs: a C that exists, as in later attempts, needs more buffers
# than a new C.
MARGIN = 64 << 20
# Maximum number of matrices in float64 of the size of C that `lstsq` and `svd` have in memory after a pass.
MATRICES = 12
# If elements are selected by their size, one in SPARSE is assumed to be, which takes ENTRY bytes.
ENTRY = 16
# Options that only the run takes, not the plan.
_RUN = frozenset({"overwrite", "trust_operands"})
_BUDGETS = ("memory", "device_memory", "host_memory")
# Maximum seconds for planning a job. Planning takes milliseconds.
SECONDS = 30.0


@dataclass(frozen=True)
class Planned:
    """A job that can be queued. Its spec has absolute paths and explicit budgets."""

    spec: dict[str, Any]
    summary: dict[str, Any]
    need: Need
    seconds: float


def call(spec: Mapping[str, Any], **options: Any) -> Any:
    """Call the verb of a spec, with its arguments and further `options`."""
    import oocgemm

    verb = spec.get("verb", "gemm")
    try:
        return getattr(oocgemm, verb)(**arguments(spec) | options)
    except TypeError as error:
        if "required keyword-only argument" in str(error):
            raise InputError(f"{error}: pass it as an option") from error
        raise


def needs_before(spec: Mapping[str, Any]) -> bool:
    """Return whether a job replaces or changes an old C, or saves its result at the end."""
    return bool(spec.get("saves") or spec["options"].get("overwrite") or spec["options"].get("beta"))


def planned(spec: Mapping[str, Any], limits: Limits, backend: str) -> Planned:
    """Plan a job, whose spec `checked` has returned.

    The budgets default to the limits: the memory of the largest device, and an equal part of the host memory
    for each device. The budgets are lowered to what the plans of all passes need, so that other jobs can run
    beside this one.

    Raises `InputError` if the product is impossible. Raises `BudgetError` if the budgets or the limits are
    too small; the error names the smallest budgets that would do.
    """
    given, out = spec["options"], out_of(spec)
    asked = {name: value for name, value in given.items() if name not in _RUN}
    plain = dict(spec) | {"options": {name: x for name, x in asked.items() if name not in _BUDGETS}}
    plan_with = partial(call, plain, backend=backend, dry_run=True)
    host = limits.host // max(1, len(limits.devices))
    if backend == "host":  # both budgets are host memory
        budgets: dict[str, Any] = {"device_memory": host * 3 // 4, "host_memory": host // 4}
    else:
        budgets = {"device_memory": max(limits.devices.values(), default=0), "host_memory": host}
    if "memory" in asked:
        budgets = {} if backend == "host" else {"device_memory": budgets["device_memory"]}
    budgets |= {name: asked[name] for name in _BUDGETS if name in asked}
    if not needs_before(spec):
        _check_incomplete(out)
    kept = in_memory(spec)
    of = partial(PlannedPasses.of, in_memory=kept, beside="passes" in VERBS[spec.get("verb", "gemm")].uses)
    passes = of(plan_with(**budgets))
    saves = kept or passes.saved
    if saves:
        _check_saving(out, single=passes.single)
    # The job itself gets both budgets, as small as they may be.
    budgets, used = passes.budgets, passes.used
    try:
        lowered = of(plan_with(**used))
        if lowered.method == passes.method:
            passes, budgets = lowered, used
    except BudgetError:  # the search finds no plan for exactly this much memory
        pass
    device, memory = budgets["device_memory"], budgets["host_memory"] + passes.held
    exists = os.path.exists(out)
    disk = passes.disk(replaces=exists)
    need = Need(0, device + memory, disk) if backend == "host" else Need(device, memory, disk)
    if (lacking := limits.lacking(need)) is not None:
        reason, needed, limit = lacking
        what = {Reason.DEVICE_MEMORY: "device memory", Reason.HOST_MEMORY: "host memory"}.get(reason, "disk")
        text = f"the job needs {format_size(needed)} of {what}, and the service has {format_size(limit)}: "
        if reason is Reason.DISK:
            raise InputError(text + "free space in the folder of C, or raise --disk-quota of the service")
        text += "pass smaller budgets, or raise the limit of the service"
        raise BudgetError(text, needed=_smallest(plan_with))
    continues = exists and not (given.get("overwrite") or passes.last.problem.updates_c)
    stored = {name: value for name, value in given.items() if name != "memory"}
    stored |= {"backend": backend} | budgets
    new = dict(spec) | {"options": stored} | ({"saves": True} if saves else {})
    return Planned(new, passes.summary() | {"c_exists": continues}, need, passes.seconds)


@dataclass(frozen=True)
class PlannedPasses:
    """The plans of all products of a job, in sequence, as a dry run of its verb returns them.

    - `reads`: how often the operand of `pca` is read; 1 for other verbs.
    - `method`: how `pca` computes; "" for other verbs.
    - `stored`: bytes that are stored beside what the plans say.
    - `saved`: whether several arrays are saved at the end.
    - `in_memory`: whether the result is kept in memory, and saved then.
    - `beside`: whether matrices of the size of C are computed from it in memory, as by `lstsq`.
    """

    plans: "Sequence[Plan]"
    reads: int = 1
    method: str = ""
    stored: int = 0
    saved: bool = False
    in_memory: bool = False
    beside: bool = False

    @classmethod
    def of(cls, found: Any, *, in_memory: bool, beside: bool) -> "PlannedPasses":
        if (plan := getattr(found, "pass_plan", None)) is not None:
            reads = found.passes + found.statistics + found.checks
            return cls([plan], reads, found.method, found.bytes_stored, saved=True)
        return cls(found if isinstance(found, tuple) else [found], in_memory=in_memory, beside=beside)

    @property
    def last(self) -> "Plan":
        """The plan of the result."""
        return self.plans[-1]

    @property
    def single(self) -> bool:
        """Whether a result in memory is one array. Selected elements have indices, too."""
        problem = self.last.problem
        return not (self.saved or problem.sink.stores_c or problem.c_dtype.startswith("void"))

    @property
    def budgets(self) -> dict[str, int]:
        """The budgets of the plans. The plans have the same ones, unless they take different shares."""
        return {
            "device_memory": max(plan.budgets.device for plan in self.plans),
            "host_memory": max(plan.budgets.host for plan in self.plans),
        }

    @property
    def used(self) -> dict[str, int]:
        """What the plans use of the budgets."""
        host = max(plan.footprint.host_total for plan in self.plans)
        return {
            "device_memory": max(plan.footprint.device_total for plan in self.plans),
            "host_memory": min(host + MARGIN, self.budgets["host_memory"]),
        }

    @property
    def held(self) -> int:
        """Bytes of a result that is in memory until it is saved, of a copy, and of what it is made of."""
        problem = self.last.problem
        beside = MATRICES * 8 * problem.m * problem.n if self.beside and problem.sink.stores_c else 0
        return 2 * self._size + beside if self.in_memory else 0

    def disk(self, *, replaces: bool) -> int:
        """Return the bytes of new files. With beta, finished tiles are kept beside C until it is complete."""
        if self.saved:
            return self.stored
        before = sum(
            plan.problem.m * plan.problem.n * plan.problem.itemsizes["C"] for plan in self.plans[:-1]
        )
        return before + (0 if replaces and not self.last.problem.updates_c else self._size)

    @property
    def _size(self) -> int:
        """The bytes of the result. It is estimated if it depends on the elements of C."""
        problem = self.last.problem
        if not problem.sink.stores_c:
            return int(problem.sink.count(problem.m, problem.m * problem.n) * problem.itemsizes["C"])
        elements = problem.m * problem.n
        return elements // SPARSE * ENTRY if self.in_memory else int(elements * problem.itemsizes["C"])

    @property
    def seconds(self) -> float:
        """The predicted time of all passes."""
        return self.reads * sum(plan.prediction.total for plan in self.plans)

    def summary(self) -> dict[str, Any]:
        """Return what a job shows of its plans. `work` is the number of tiles of all passes."""
        problem, tile, grid = self.last.problem, self.last.tile, self.last.grid
        return {
            **{"m": problem.m, "n": problem.n, "k": problem.k, "a_dtype": problem.a_dtype},
            **{"c_dtype": problem.c_dtype, "tile": [tile.m, tile.n, tile.k], "tiles": list(grid.shape)},
            **{"flops": self.reads * sum(plan.flops for plan in self.plans)},
            **{"predicted_seconds": self.seconds},
            **{"work": self.reads * sum(plan.grid.count for plan in self.plans)},
        }


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


def _check_saving(out: str, *, single: bool) -> None:
    """Raise `InputError` if a result cannot be saved at a path: a `single` array, or several in a group."""
    from oocgemm.stores.zarr_matrix import check_free

    if not single:
        check_free(out)
    elif not out.endswith(".npy"):
        raise InputError(f"{out}: the result is one array, which is saved as a .npy file: give {out}.npy")
    elif os.path.lexists(out):
        raise InputError(f"something exists at {out}: give another path, or remove it")


def _smallest(plan_with: Callable[..., object]) -> tuple[int, int] | None:
    """Return the minimum device memory and host memory with which a job can run; None if unknown."""
    try:
        plan_with(device_memory=1, host_memory=1)
    except BudgetError as error:
        return error.needed
    return None


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
