"""Backends by name. Which one `auto` means is found without importing cupy."""

import ctypes
import importlib
import importlib.util
import threading
from contextlib import suppress
from pathlib import Path

from oocgemm.backends import ladder
from oocgemm.backends.base import Backend, Session
from oocgemm.errors import BackendError, InputError, OutOfMemoryError

__all__ = [
    "NAMES",
    "Backend",
    "Session",
    "check_kernel",
    "cuda_extra",
    "identity",
    "missing_for_cuda",
    "open_backend",
    "resolve",
]

NAMES = ("auto", "cuda", "host")
# What multiplies on each backend; auto is the fastest of them.
KERNELS = {"cuda": ("auto", "cublas", *ladder.names()), "host": ("auto", "blas")}


def missing_for_cuda() -> str | None:
    """What keeps the cuda backend from working here, and the remedy; None if nothing is seen to."""
    extra = cuda_extra()
    if extra is None:
        return "no NVIDIA device is visible"
    if importlib.util.find_spec("cupy") is None:
        return f"an NVIDIA device is there but cupy is not: pip install 'oocgemm[{extra}]'"
    return None


def cuda_extra() -> str | None:
    """The extra of this package that brings cupy for the driver that is installed; None if no device is visible."""
    if not any(Path(node).exists() for node in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")):
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
            importlib.import_module("oocgemm.backends.cuda")


def _wake(device: int) -> None:
    """Create the context of a device, which takes a fifth of a second, beside what is imported meanwhile. Whoever opens the
    backend is told what fails."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(number), device):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)


def open_backend(name: str, device: int = 0) -> Backend:
    """The backend of that name. `auto` falls back to host where no device answers; `cuda` raises then."""
    chosen = resolve(name)
    if chosen == "cuda":
        missing = missing_for_cuda()
        if missing:
            raise BackendError(f"the cuda backend cannot run: {missing}; --backend host runs without a GPU")
        try:
            from oocgemm.backends.cuda import CudaBackend

            return CudaBackend(device)
        except ImportError as error:
            if name != "auto":
                raise BackendError(f"cupy is installed but cannot be imported: {error}") from error
        except BackendError as error:
            if name != "auto" or isinstance(error, OutOfMemoryError):
                raise
    from oocgemm.backends.host import HostBackend

    return HostBackend()


def identity(engine: Backend) -> str:
    """What the rates of a backend belong to: its device, and the library that multiplies where it could be another."""
    described = engine.describe()
    return ", ".join(described[part] for part in ("device", "blas") if part in described)
