"""Backends: the devices that can run a plan. `open_backend` opens one by name. cupy is imported only if the
CUDA backend is opened."""

from oocgemm.backends.base import Backend, Session
from oocgemm.backends.registry import (
    KERNELS,
    NAMES,
    Devices,
    check_kernel,
    cuda_extra,
    fall_back,
    identity,
    load,
    missing_for_cuda,
    open_backend,
    open_devices,
    release,
    resolve,
    shrink,
)

__all__ = [
    "KERNELS",
    "NAMES",
    "Backend",
    "Devices",
    "Session",
    "check_kernel",
    "cuda_extra",
    "fall_back",
    "identity",
    "load",
    "missing_for_cuda",
    "open_backend",
    "open_devices",
    "release",
    "resolve",
    "shrink",
]
