"""Backends by name. Which one `auto` means is found without importing cupy."""

import ctypes
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from oocgemm.backends.base import Backend, Session
from oocgemm.errors import BackendError, InputError, OutOfMemoryError
from oocgemm.kernels import registry as ladder

__all__ = [
    "NAMES",
    "Backend",
    "Session",
    "check_kernel",
    "cuda_extra",
    "fall_back",
    "identity",
    "missing_for_cuda",
    "open_backend",
    "resolve",
]

NAMES = ("auto", "cuda", "host")
# What multiplies on each backend; auto is the fastest of them.
KERNELS = {"cuda": ("auto", "cublas", *ladder.names()), "host": ("auto", "blas")}


# Where a driver shows a device, and where it shows itself: containers see /proc/driver of their host.
DEVICE_NODES = "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"
DRIVER_FILES = "/proc/driver/nvidia/version", "/dev/nvidia-uvm", "/dev/nvidia-modeset"


def missing_for_cuda() -> str | None:
    """Return what keeps the cuda backend from working here, with the remedy; None if nothing is known to.

    Imports no cupy and touches no device: a cupy that cannot be imported is not noticed here.
    """
    extra = cuda_extra()
    if extra is None:
        if not _any_exists(DRIVER_FILES):
            return "no NVIDIA device is visible"
        return (
            "an NVIDIA driver is loaded but no device is visible: start the container with its GPUs, such as "
            "docker run --gpus all"
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={shown!r} hides the NVIDIA devices: unset it"
    if importlib.util.find_spec("cupy") is None:
        return f"an NVIDIA device is there but cupy is not: pip install 'oocgemm[{extra}]'"
    return None


def fall_back(reason: str | None) -> None:
    """Warn that `auto` means the host for this reason. Say nothing where there is no sign of a GPU."""
    if reason and _any_exists((*DEVICE_NODES, *DRIVER_FILES)):
        warnings.warn(f"running on the host: {reason}", stacklevel=3)


def _any_exists(paths: Iterable[str]) -> bool:
    return any(Path(path).exists() for path in paths)


def cuda_extra() -> str | None:
    """Return the extra of this package that brings cupy for the installed driver; None if no device is visible."""
    if not _any_exists(DEVICE_NODES):
        return None
    version = ctypes.c_int(13000)  # where the driver cannot be asked
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return "cuda13" if version.value >= 13000 else "cuda12"


def resolve(name: str) -> str:
    """`cuda` or `host` for a name; `auto` is cuda where a device and cupy are seen. Touches no device."""
    if name not in NAMES:
        raise BackendError(f"unknown backend {name!r}: choose one of {', '.join(NAMES)}")
    if name == "auto":
        return "host" if missing_for_cuda() else "cuda"
    return name


def check_kernel(backend: str, kernel: str) -> None:
    """Raise `InputError` for a kernel that a backend has not."""
    if kernel not in KERNELS[backend]:
        names = ", ".join(KERNELS[backend])
        raise InputError(f"the {backend} backend has no kernel {kernel!r}: choose one of {names}")


def load(name: str, device: int = 0) -> None:
    """Import what the backend of that name needs, if it can be, and wake its device: neither is part of a run's time."""
    if resolve(name) == "cuda" and not missing_for_cuda():
        with suppress(RuntimeError):  # the system has no room for the thread
            threading.Thread(target=_wake, args=(device,), name="oocgemm-wake", daemon=True).start()
        with suppress(ImportError):  # open_backend says so, or takes another
            importlib.import_module("oocgemm.backends.cuda.backend")


def _wake(device: int) -> None:
    """Create the context of a device, which takes a fifth of a second, beside what is imported meanwhile. Whoever opens the
    backend is told what fails."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(number), device):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)


def open_backend(name: str, device: int = 0) -> Backend:
    """Open the backend of that name. `auto` falls back to host, with a warning where there are signs of a GPU.

    Raises `BackendError` if `cuda` cannot be opened, and `OutOfMemoryError`, for `auto` too, if others hold the device's
    memory.
    """
    if resolve(name) == "cuda":
        try:
            return _open_cuda(device)
        except OutOfMemoryError:
            raise
        except BackendError as error:
            if name == "cuda":
                raise
            fall_back(str(error))
    elif name == "auto":
        fall_back(missing_for_cuda())
    from oocgemm.backends.host.backend import HostBackend

    return HostBackend()


def _open_cuda(device: int) -> Backend:
    missing = missing_for_cuda()
    if missing:
        raise BackendError(f"the cuda backend cannot run: {missing}; --backend host runs without a GPU")
    try:
        from oocgemm.backends.cuda.backend import CudaBackend
    except ImportError as error:
        raise BackendError(f"cupy is installed but cannot be imported: {error}") from error
    return CudaBackend(device)


def identity(engine: Backend) -> str:
    """What the rates of a backend belong to: its device, and the library that multiplies where it could be another."""
    described = engine.describe()
    return ", ".join(described[part] for part in ("device", "blas") if part in described)
