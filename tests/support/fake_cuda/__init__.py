"""A CUDA device in this process, without a GPU. The CUDA backend runs on it without changes.

It replaces what the backend calls: the modules of cupy, libcuda and libcublas.

- `memory`: device memory, at addresses that the host cannot read. It is NaN at first. Copies need pinned host
  memory.
- `device`: streams run their commands late and overtake each other, in an order drawn from a seed.
  `MisuseError` is raised if two accesses to the same memory are not ordered by a wait. Calls fail on demand.
- `kernels`: NumPy versions of cuBLAS's product and of the kernels `finish`, `tiled` and those for int8. Other
  kernels do not run.
- `libraries`, `cupy_modules`, `objects`: the interfaces that the backend calls.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from oocgemm import backends
from oocgemm.backends import registry
from oocgemm.jobs import run as running
from tests.support.fake_cuda.cupy_modules import modules
from tests.support.fake_cuda.device import Device, Fault
from tests.support.fake_cuda.libraries import Cublas, Driver
from tests.support.fake_cuda.memory import MisuseError
from tests.support.fake_cuda.objects import Objects

__all__ = ["Device", "Fault", "MisuseError", "fake_cuda"]

PACKAGE = "oocgemm.backends.cuda"


@contextmanager
def fake_cuda(seed: int = 0, capacity: int = 1 << 30, devices: int = 1) -> Iterator[Device]:
    """Make the CUDA backend run on new fake devices with `capacity` bytes of memory each, for the block.

    The backend's modules are imported again, on the fake ones. On exit everything is restored. cuBLAS is not
    loaded in advance, so that the calls of a run are the same in every run.
    """
    device = Device(seed, capacity, devices)
    objects = Objects(device)
    cublas = Cublas(device, objects)
    fakes = {"libcuda.so.1": Driver(device, objects), "libcublas.so.13": cublas}
    with (
        patch.dict(sys.modules, modules(device, objects, cublas)),
        patch.dict(vars(backends)),
        patch.object(registry, "missing_for_cuda", lambda: None),
        patch.object(registry, "_preload", lambda device: None),
        patch.object(ctypes, "CDLL", _loader(ctypes.CDLL, fakes)),
        patch.object(ctypes, "PyDLL", _loader(ctypes.PyDLL, fakes)),
    ):
        for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        vars(backends).pop("cuda", None)
        running.forget()
        try:
            yield device
        finally:
            registry.release()  # what runs have kept belongs to this device
            running.forget()


def _loader(kind: Any, fakes: dict[str, Any]) -> Any:
    """Return a subclass of a loader of ctypes, such as `CDLL`, that also loads the fake libraries."""

    class Loader(kind):  # type: ignore[misc]
        def __new__(cls, name: str | None, *rest: Any, **options: Any) -> Any:
            return fakes[name] if name in fakes else super().__new__(cls)

    return Loader
