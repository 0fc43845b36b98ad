"""What a job computes: its operands and options, as plain data, and what they need."""

import os
from collections.abc import Mapping
from typing import Any

from oocgemm.errors import BudgetError, InputError
from oocgemm.jobs import api, journal
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.plan import Plan
from oocgemm.planning.units import format_size, parse_size
from oocgemm.service.job import needs_before
from oocgemm.service.planner import Planned
from oocgemm.service.schedule import Limits, Need
from oocgemm.service.states import Reason
from oocgemm.stores import exists

# Options of a job, with the types of their values. `oocgemm.gemm` describes each.
OPTIONS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("alpha", "beta"), (int, float, str)),
    **dict.fromkeys(("trans_a", "trans_b", "kernel", "compute", "out_dtype", "tile", "compressor"), (str,)),
    "chunks": (list,),
    **dict.fromkeys(("memory", "device_memory", "host_memory"), (int, str)),
    **dict.fromkeys(("verify", "decode", "overwrite", "trust_operands"), (bool,)),
}
# Bytes of host memory beyond what the plan needs: a C that exists, as in later attempts, needs more
# buffers than one that is created.
MARGIN = 64 << 20
# Options that only the run takes, not the plan.
_RUN = frozenset({"overwrite", "trust_operands"})


def checked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with absolute paths.

    Args:
        spec: ``a``, ``b`` and ``c``, paths of arrays, and ``options``.

    Raises:
        InputError: a field is missing, unknown or of a wrong type.
    """
    options = spec.get("options", {})
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
            raise InputError(f"{name} is a URL, and jobs take no URLs: pass the path of an array")
        paths[name] = os.path.abspath(path)
    for name, value in options.items():
        if name not in OPTIONS:
            raise InputError(f"unknown option {name}: a job takes {', '.join(sorted(OPTIONS))}")
        if type(value) not in OPTIONS[name]:
            kinds = " or ".join(kind.__name__ for kind in OPTIONS[name])
            raise InputError(f"option {name} must be of type {kinds}, not {type(value).__name__}")
    return {**paths, "options": dict(options)}


def arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a spec as keyword arguments of `oocgemm.gemm`."""
    options = dict(spec["options"])
    for name in ("alpha", "beta"):
        if isinstance(options.get(name), str):
            options[name] = _number(name, options[name])
    if "chunks" in options:
        chunks = options["chunks"]
        if len(chunks) != 2 or any(type(each) is not int for each in chunks):
            raise InputError(f"option chunks must be two integers, such as [1024, 1024], not {chunks}")
        options["chunks"] = tuple(chunks)
    return options


def planned(spec: Mapping[str, Any], limits: Limits, backend: str) -> Planned:
    """Plan a job.

    The budgets default to the limits: the memory of the largest device, and an equal part of the host memory
    for each device. They are lowered to what the plan needs, so that other jobs can run beside it.

    Args:
        spec: as `checked` returns it.
        limits: what all jobs together may occupy.
        backend: the backend that computes the job.

    Raises:
        InputError: the product is impossible.
        BudgetError: the budgets, or the limits, are too small. The message names the smallest that would do.
    """
    options: dict[str, Any] = {"backend": backend} | arguments(spec)
    _check_incomplete(spec["c"], options)
    run = {name: options.pop(name) for name in _RUN & {*options}}
    host = limits.host // max(1, len(limits.devices))
    if backend == "host":  # both budgets are host memory
        defaults = {"device_memory": host * 3 // 4, "host_memory": host // 4}
    else:
        defaults = {"device_memory": max(limits.devices.values(), default=0), "host_memory": host}
    if "memory" in options:
        defaults = {} if backend == "host" else {"device_memory": defaults["device_memory"]}
    options = defaults | options
    plan = api.plan(spec["a"], spec["b"], spec["c"], **options)
    # The job itself gets both budgets, as small as they may be.
    options.pop("memory", None)
    options |= {"device_memory": plan.budgets.device, "host_memory": plan.budgets.host}
    used = {
        "device_memory": plan.footprint.device_total,
        "host_memory": min(plan.footprint.host_total + MARGIN, plan.budgets.host),
    }
    try:
        plan = api.plan(spec["a"], spec["b"], spec["c"], **options | used)
        options |= used
    except BudgetError:  # the search finds no plan in exactly this memory
        pass
    need = _need(plan, options, backend, spec["c"])
    if (lacking := limits.lacking(need)) is not None:
        reason, needed, limit = lacking
        what = {Reason.DEVICE_MEMORY: "device memory", Reason.HOST_MEMORY: "host memory"}.get(reason, "disk")
        text = f"the job needs {format_size(needed)} of {what}, and the service has {format_size(limit)}: "
        if reason is Reason.DISK:
            raise InputError(text + "free space in the folder of C, or raise --disk-quota of the service")
        raise BudgetError(
            text + "pass smaller budgets, or raise the limit of the service", needed=_smallest(spec, options)
        )
    continues = os.path.exists(spec["c"]) and not (run.get("overwrite") or plan.problem.updates_c)
    summary = _summary(plan) | {"c_exists": continues}
    return Planned(dict(spec) | {"options": options | run}, summary, need, plan.prediction.total)


def _check_incomplete(c: str, options: Mapping[str, Any]) -> None:
    """Raise `InputError` if there is a complete C, which a job with these options would leave as it is."""
    if needs_before(options) or not exists(c):
        return
    folder = Destination.parse(c).journal_folder
    record = None if folder is None else journal.read(folder)
    if record is not None and record.complete is not None and os.path.exists(c):
        raise InputError(
            f"C exists at {c}: pass --overwrite (overwrite=True) to compute all of it anew, or give another "
            "path"
        )


def _smallest(spec: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the least device memory and host memory in which a job can run; None if that is unknown."""
    try:
        api.plan(spec["a"], spec["b"], spec["c"], **dict(options) | {"device_memory": 1, "host_memory": 1})
    except BudgetError as error:
        return error.needed
    return None


def _need(plan: Plan, options: Mapping[str, Any], backend: str, c: str) -> Need:
    device, host = (parse_size(options[name]) for name in ("device_memory", "host_memory"))
    problem = plan.problem
    disk = 0 if os.path.exists(c) else problem.m * problem.n * problem.itemsizes["C"]
    return Need(0, device + host, disk) if backend == "host" else Need(device, host, disk)


def _summary(plan: Plan) -> dict[str, Any]:
    problem, tile = plan.problem, plan.tile
    return {
        **{"m": problem.m, "n": problem.n, "k": problem.k, "a_dtype": problem.a_dtype},
        **{"c_dtype": problem.c_dtype, "tile": [tile.m, tile.n, tile.k], "tiles": list(plan.grid.shape)},
        **{"flops": plan.flops, "predicted_seconds": plan.prediction.total},
    }


def _number(name: str, text: str) -> complex:
    try:
        value = complex(text)
    except ValueError:
        raise InputError(f"option {name} must be a number, such as 1.5 or 2+1j, not {text!r}") from None
    return value if value.imag else value.real
