"""Find and open backends by name. Deciding what `auto` means does not import cupy, which is slow."""

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from oocgemm.backends.base import Backend
from oocgemm.errors import BackendError, InputError, OutOfMemoryError
from oocgemm.kernels import RUNGS
from oocgemm.system import threads
from oocgemm.system.threads import wake

NAMES = ("auto", "cuda", "host")
_CUDA = "oocgemm.backends.cuda.gpu"
# The names of each backend's kernels. `auto` stands for the fastest one.
KERNELS = {"cuda": ("auto", "cublas", *RUNGS), "host": ("auto", "blas")}

# Files that exist if an NVIDIA device is visible, and files that exist if its driver is loaded. A container
# without access to the GPU has only files of the second kind, because it sees the host's /proc/driver.
DEVICE_NODES = "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"
DRIVER_FILES = "/proc/driver/nvidia/version", "/dev/nvidia-uvm", "/dev/nvidia-modeset"
# The folder in which the system describes PCI devices.
PCI_DEVICES = Path("/sys/bus/pci/devices")
# A PCI Express link has at most this many lanes. A larger number in sysfs is wrong, and is not used.
MAX_PCI_LANES = 32


def missing_for_cuda() -> str | None:
    """Return why the cuda backend cannot work here, with the remedy; None if no reason is known.

    This function neither imports cupy nor opens a device. So it is fast, but it does not notice a broken
    cupy.
    """
    if not _any_exists(DEVICE_NODES):
        if not _any_exists(DRIVER_FILES):
            return "no NVIDIA device is visible"
        return (
            "an NVIDIA driver is loaded but no device is visible: start the container with its GPUs, such as "
            "docker run --gpus all"
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={shown!r} hides the NVIDIA devices: unset it"
    if sys.modules.get("cupy") is None and importlib.util.find_spec("cupy") is None:
        return f"an NVIDIA device is there but cupy is not: pip install 'oocgemm[{cuda_extra()}]'"
    return None


def fall_back(reason: str | None) -> None:
    """Warn that `auto` falls back to the host, and why. Do nothing on a machine without any sign of a GPU."""
    if reason and _any_exists((*DEVICE_NODES, *DRIVER_FILES)):
        warnings.warn(f"running on the host: {reason}", stacklevel=3)


def _any_exists(paths: Iterable[str]) -> bool:
    return any(map(os.path.exists, paths))


def cuda_extra() -> str | None:
    """Return the package extra that installs cupy for the loaded driver; None if no device is visible."""
    if not _any_exists(DEVICE_NODES):
        return None
    version = ctypes.c_int(13000)  # CUDA 13.0, if the driver reports no version
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return "cuda13" if version.value >= 13000 else "cuda12"


def pci_limit(address: str, devices: Path = PCI_DEVICES) -> float | None:
    """Return the maximum rate of a device's PCI Express link in one direction, in bytes per second.

    This is an upper bound: the maximum transfer rate per PCIe lane, times the maximum number of lanes. The
    link's current speed is not used, because an idle link slows down.

    `address` is the device's PCI address, such as 0000:1B:00.0. Returns None if the system does not report
    the link, as in some virtual machines.
    """
    folder = devices / address.lower()
    try:
        speed = re.match(r"([\d.]+) GT/s", (folder / "max_link_speed").read_text(encoding="utf-8"))
        lanes = int((folder / "max_link_width").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if speed is None or not 0 < lanes <= MAX_PCI_LANES:
        return None
    return float(speed[1]) * 1e9 / 8 * lanes


def resolve(name: str) -> str:
    """Return `cuda` or `host` for a name. `auto` is `cuda` if a device and cupy seem to be there."""
    if name not in NAMES:
        raise BackendError(f"unknown backend {name!r}: choose one of {', '.join(NAMES)}")
    if name == "auto":
        return "host" if missing_for_cuda() else "cuda"
    return name


def check_kernel(backend: str, kernel: str) -> None:
    """Raise `InputError` if the backend `backend` has no kernel of the name `kernel`."""
    if kernel not in KERNELS[backend]:
        names = ", ".join(KERNELS[backend])
        raise InputError(f"the {backend} backend has no kernel {kernel!r}: choose one of {names}")


def load(name: str, device: int = 0) -> None:
    """Import the modules of a backend and create its device context, so that a run does not have to.

    Errors are ignored: `open_backend` raises them later.
    """
    if resolve(name) == "cuda" and not missing_for_cuda() and (wake(device) or _CUDA not in sys.modules):
        # If cupy cannot be imported, `open_backend` raises an error or falls back to the host.
        with suppress(ImportError):
            importlib.import_module(_CUDA)


def open_backend(name: str, device: int = 0) -> Backend:
    """Open a backend by name.

    `auto` opens the host backend if the CUDA backend cannot be opened. This gives a warning if the machine
    shows signs of a GPU.

    Raises:
        InputError: the host backend has no such device.
        BackendError: the name is `cuda`, and the CUDA backend cannot be opened.
        OutOfMemoryError: other processes use the memory of the device. `auto` does not fall back in this
            case, because the device works.
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
    if device:
        raise InputError(
            f"there is no device {device}: the host backend has one, number 0; drop device (--device), or "
            "pass backend='cuda' (--backend cuda)"
        )
    from oocgemm.backends.host.backend import HostBackend

    return HostBackend()


def _open_cuda(device: int) -> Backend:
    missing = missing_for_cuda()
    if missing:
        raise BackendError(f"the cuda backend cannot run: {missing}; --backend host runs without a GPU")
    try:
        from oocgemm.backends.cuda.gpu import CudaBackend
    except ImportError as error:
        raise BackendError(f"cupy is installed but cannot be imported: {error}") from error
    return CudaBackend(device)


def identity(backend: Backend) -> str:
    """Return the key of measured rates: the name of the device, and on the host also the name of the BLAS."""
    described = backend.describe()
    return ", ".join(described[part] for part in ("device", "blas") if part in described)


def release() -> None:
    """Free what the library keeps between calls: memory, streams, idle threads and idle child processes.

    After a product on a GPU, up to 128 MiB of host slots, 416 MiB of the ring and a sixteenth of the device's
    memory stay allocated per device, because allocating them takes milliseconds. For one second, up to a
    quarter of the device's memory stays allocated. The next product allocates all of this again. Runs in
    progress are not disturbed.
    """
    end_children = getattr(sys.modules.get("oocgemm.distributed.processes"), "release", None)
    if end_children is not None:
        end_children()
    for module in ("host_memory", "warm", "multiplier"):
        _call(module, "release")
    threads.release()


def shrink() -> None:
    """Free device memory that is kept for one second only (`release`) at once."""
    _call("warm", "shrink")


def _call(module: str, name: str) -> None:
    """Call a function of a module of the CUDA backend. If the module is not imported, it has kept nothing."""
    # Another thread may be importing the module.
    function = getattr(sys.modules.get(f"oocgemm.backends.cuda.{module}"), name, None)
    if function is not None:
        function()
