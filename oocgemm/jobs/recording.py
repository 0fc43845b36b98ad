"""Begin the log of a run: its header, its calibrated rates, and checks of its path."""

import os
import tempfile
from pathlib import Path
from typing import Any

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.request import Request
from oocgemm.machine.info import versions
from oocgemm.stores import Matrix
from oocgemm.timeline import Recorder


def recorder(job: PreparedRun, c: Matrix, known: dict[str, Any]) -> Recorder:
    """Start the log of a run. Raises `InputError` if its file cannot be created.

    `known` contains the parts of the header that describe the machine and the backend.
    """
    operands = {"A": job.a} if job.plan.problem.b.shares else {"A": job.a, "B": job.b}
    header = known | {
        "operands": {name: x.describe() for name, x in (operands | {"C": c}).items()},
        "rates": rates(job, c),
    }
    path = job.request.timeline
    try:
        return Recorder(header, path, {"plan": job.plan.to_dict, "versions": versions})
    except OSError as error:
        raise InputError(
            f"the timeline cannot be written to {path}: {error.strerror}; give another path"
        ) from error


def rates(job: PreparedRun, c: Matrix) -> dict[str, float] | None:
    """Return the calibrated rates of the kernel, the links and the stores of a run, by name.

    They are in flop/s or bytes/s. Return None instead if any of them has not been measured.
    """
    machine, problem = job.plan.machine, job.plan.problem
    old = [] if not problem.reads_c else [c if job.d is None else job.d]
    sources = [job.a, job.b, *old]
    stored = [x.layout for x in (*sources, c) if not x.layout.in_memory]
    if problem.compute not in ("native", "emulated"):
        return None  # a calibration does not measure the kernel in tf32 or bf16
    if not machine.calibrated or (stored and not machine.storage_calibrated):
        return None
    known = {"kernel": machine.kernels[problem.rate].peak}
    if not machine.unified:
        known |= {"h2d": machine.h2d, "d2h": machine.d2h}
    if any(x.layout.decode_bytes for x in sources):
        # The rate of reading is left out: it is unknown how many encoded bytes the run reads.
        known["decode"] = machine.decode
    elif not any(x.layout.in_memory or x.layout.requests for x in sources):
        known["read"] = machine.read
    if c.describe().get("direct", not c.layout.in_memory) and not c.layout.requests:
        known["write"] = machine.write
    return known


def check_places(request: Request, wanted: int) -> None:
    """Raise `InputError` if C or the log of a run cannot be created. Call this before an operand is read.

    `wanted` is how many bytes C takes on its disk at least.
    """
    request.c.check_place(lambda: wanted)
    if request.timeline is not None:
        check_log(request.timeline)


def check_log(timeline: str | os.PathLike[str]) -> None:
    """Raise `InputError` if no log can be created at a path."""
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise InputError(f"the timeline's folder {path.parent} does not exist: create it")
    if path.is_dir():
        raise InputError(f"the timeline's path {path} is a folder: give the path of a file")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(
            f"the timeline cannot be written to {path}: {error.strerror}; give another path"
        ) from error


def check_log_apart(timeline: str, job: PreparedRun) -> None:
    """Raise `InputError` if the log would overwrite an operand or the result."""
    for matrix in (job.a, job.b, job.output.matrix):
        if matrix is not None:
            stores.check_apart("the timeline", timeline, matrix)
    if job.request.c.is_same_path(timeline):
        raise InputError(f"the timeline at {timeline} would overwrite C: give it another path")
