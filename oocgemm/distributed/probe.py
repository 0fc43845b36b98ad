"""Describe a worker's machine to the coordinator, in a child process of the worker."""

import os
import socket
from collections.abc import Mapping
from typing import Any

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.distributed.fence import machine
from oocgemm.distributed.spec import request_of
from oocgemm.jobs.operands import open_operands
from oocgemm.system.installed import __version__
from oocgemm.system.resources import available_memory


def probe(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker has, as plain data: see `survey.Found`. Open A and B, and the device.

    `task` has the request, and the path of a file that only machines with the coordinator's storage can see.
    Raises what `oocgemm.gemm` raises for operands and devices.
    """
    found: dict[str, Any] = {
        "version": __version__,
        "host": socket.gethostname(),
        "machine": machine(),
        "cores": sorted(os.sched_getaffinity(0)),
        "sees": _content(task["nonce"]),
    }
    if found["version"] != task["version"] or found["sees"] != task["content"]:
        return found
    request = request_of(task["request"])
    engine = backends.open_backend(request.backend, request.device)
    _, _, problem = open_operands(request, engine.name)
    return found | {
        "backend": engine.name,
        "kernel": engine.arithmetic(problem, request.kernel),
        "library": library_of(engine),
        "described": engine.describe(),
        "place": _place(engine.name, request.device),
        "free": engine.free_memory(),
        "available": available_memory(),
        "multiprocessors": engine.multiprocessors(),
    }


def library_of(engine: Backend) -> str:
    """Return the library and the device that multiply. If two are equal, so are the bits of products."""
    described = engine.describe()
    if engine.name == "host":
        return f"{described['blas']}, NumPy {described['numpy']}"
    return f"{described['device']}, CUDA {described['cuda']}"


def _place(backend: str, device: int) -> str:
    """Return what identifies the device on its machine, so that workers that share it are found."""
    if backend == "host":
        return "host"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[device].strip() if device < len(visible) and visible[device] else str(device)


def _content(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None
