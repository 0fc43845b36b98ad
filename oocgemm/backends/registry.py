"""Find and open backends by name, and use several devices of one host as one backend.

Deciding what `auto` means does not import cupy, which is slow. The sessions of several `Devices` pass each
operation to the session of its device. All devices are of one kind, so that the same tile has the same bits
on each of them. They share the host slots for panels, which are pinned for all devices. If a device is listed
twice, it runs two sessions, each with half of the device's memory.
"""

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from oocgemm.backends.base import (
    Array,
    Backend,
    Checksums,
    ElementNumbers,
    Finishing,
    HostBlock,
    Pageable,
    Session,
    Stream,
    SumsOfStrips,
    Swept,
    Token,
)
from oocgemm.errors import BackendError, ExecutionError, InputError, OutOfMemoryError
from oocgemm.kernels import RUNGS
from oocgemm.planning import GemmProblem, Kind, Operation, Plan, Region
from oocgemm.system import threads
from oocgemm.system.threads import wake

NAMES = ("auto", "cuda", "host")
_CUDA, _MULTIPLIER = "oocgemm.backends.cuda.gpu", "oocgemm.backends.cuda.multiplier"
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
    """Import the modules of a backend, create its device context and load cuBLAS, before a run needs them.

    Errors are ignored: `open_backend` raises them later.
    """
    if resolve(name) == "cuda" and not missing_for_cuda() and (wake(device) or _CUDA not in sys.modules):
        # If cupy cannot be imported, `open_backend` raises an error or falls back to the host.
        with suppress(ImportError):
            _preload(device)
            importlib.import_module(_CUDA)


def _preload(device: int) -> None:
    importlib.import_module(_MULTIPLIER).preload(device)


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


class Devices:
    """Several devices of one kind, by their numbers. Implements `Backend`."""

    def __init__(self, numbers: Sequence[int], each: Sequence[Backend]) -> None:
        self.numbers, self.each = tuple(numbers), tuple(each)
        self._first = each[0]
        self.name = self._first.name

    def described(self) -> list[dict[str, str]]:
        """Return names and versions of every device, in the order of the spans' attribute `device`."""
        return [
            {"number": str(number)} | engine.describe()
            for number, engine in zip(self.numbers, self.each, strict=True)
        ]

    def device_count(self) -> int:
        return self._first.device_count()

    def free_memory(self) -> int:
        """Return the bytes that each session could allocate now."""
        sessions = Counter(self.numbers)
        if self.name == "host":
            return self._first.free_memory() // len(self.numbers)
        return min(
            engine.free_memory() // sessions[number]
            for number, engine in zip(self.numbers, self.each, strict=True)
        )

    def multiprocessors(self) -> int:
        return self._first.multiprocessors()

    def is_pinned(self, address: int, size: int) -> bool:
        return self._first.is_pinned(address, size)

    def link_limit(self) -> float | None:
        return self._first.link_limit()

    def describe(self) -> dict[str, str]:
        return self._first.describe()

    def check(self, plan: Plan, kernel: str) -> None:
        for engine in self.each:
            engine.check(plan, kernel)

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        """Describe the common arithmetic. Raises `InputError` if two devices would compute other bits."""
        first = self._first.arithmetic(problem, kernel)
        for number, engine in zip(self.numbers, self.each, strict=True):
            if engine.arithmetic(problem, kernel) != first:
                raise InputError(
                    f"devices {self.numbers[0]} and {number} would use different kernels, whose results are "
                    "rounded differently: pass devices of one kind, or name a kernel with --kernel"
                )
        return first

    def moments(self, given: Swept, axis: int, host: int, device: int) -> Array | None:
        return self._first.moments(given, axis, host, device)

    def decomposed(self, s: Array, width: int, device: int) -> tuple[Array, Array] | None:
        return self._first.decomposed(s, width, device)

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> "DevicesSession":
        """Open a session on every device. An `OutOfMemoryError` names the device."""
        opened: list[Session] = []
        try:
            for number, engine in zip(self.numbers, self.each, strict=True):
                try:
                    opened.append(engine.open(plan, kernel, opened))
                except BackendError as error:
                    raise type(error)(f"device {number}: {error}") from error
        except BaseException:
            for session in reversed(opened):
                session.close(failed=True)
            raise
        return DevicesSession(opened, self.numbers)


class DevicesSession:
    """The sessions of one plan on several devices. Implements `Session`."""

    repeats = False
    begins_at_once = False  # `engine.executor.Prefetch` supports one device

    def __init__(self, each: Sequence[Session], numbers: Sequence[int]) -> None:
        self._each, self._numbers = each, numbers
        first = each[0]
        self.host_arena: Array | None = first.host_arena
        self.asynchronous: Collection[Kind] = first.asynchronous
        found = [session.checksums for session in each]
        summing = [checksums for checksums in found if checksums is not None]
        self.checksums: Checksums | None = DevicesChecksums(summing) if summing else None
        taking = [session.strip_sums for session in each if session.strip_sums is not None]
        self.strip_sums: SumsOfStrips | None = DevicesStrips(taking) if taking else None

    @contextmanager
    def worker(self, stream: Stream) -> Iterator[None]:
        with self._named(stream.device), self._each[stream.device].worker(stream):
            yield

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> Token:
        with self._named(operation.device):
            return self._each[operation.device].submit(operation, host, after)

    def keeps(self, operation: Operation) -> bool:
        return False

    def begin(self, operation: Operation, host: Pageable, after: Sequence[Token]) -> Callable[[], Token]:
        with self._named(operation.device):
            ended = self._each[operation.device].begin(operation, host, after)

        def finish() -> Token:
            with self._named(operation.device):
                return ended()

        return finish

    @contextmanager
    def _named(self, device: int) -> Iterator[None]:
        """Add the number of a device to the errors of the `with` block."""
        try:
            yield
        except Exception as error:
            named = f"device {self._numbers[device]}: {error or type(error).__name__}"
            raise ExecutionError(named) from error

    def pin(self, host: Sequence[Array]) -> None:
        self._each[0].pin(host)

    def view(self, operation: Operation, region: Region) -> Array:
        return self._each[operation.device].view(operation, region)

    def use_in_place(self, arrays: Mapping[str, Array]) -> None:
        for session in self._each:
            session.use_in_place(arrays)

    def use_numbers(self, elements: ElementNumbers, finishing: Finishing) -> None:
        for session in self._each:
            session.use_numbers(elements, finishing)

    def use_factor(self, factor: Array) -> None:
        for session in self._each:
            session.use_factor(factor)

    def kernels_used(self) -> list[str]:
        return list(dict.fromkeys(name for session in self._each for name in session.kernels_used()))

    def device_bytes(self) -> int:
        """Measure the device memory of the largest session. Sessions of one device count as equally large."""
        sessions = Counter(self._numbers)
        measured = dict[int, int]()
        for number, session in zip(self._numbers, self._each, strict=True):
            # The first session of a device measures the memory of all of them.
            measured.setdefault(number, session.device_bytes())
        return max(size // sessions[number] for number, size in measured.items())

    def close(self, failed: bool = False) -> None:
        # The first session unpins the host slots, when no other one copies from them any more.
        for session in reversed(self._each):
            session.close(failed)


class DevicesChecksums:
    """The checksums that several devices compute during one run. Implements `Checksums`."""

    def __init__(self, each: Sequence[Checksums]) -> None:
        self._each = each
        self.room, self.busy = each[0].room, each[0].busy
        for checksums in each:
            checksums.busy = self.busy  # the time in which at least one device is busy

    @property
    def expected(self) -> tuple[int, int]:
        return self._each[0].expected

    @expected.setter
    def expected(self, digests: tuple[int, int]) -> None:
        # One of these devices runs the next Multiply.
        for checksums in self._each:
            checksums.expected = digests

    def begin(self, seed: int) -> None:
        for checksums in self._each:
            checksums.begin(seed)


class DevicesStrips:
    """The sums of strips that several devices take of their accumulators. Implements `SumsOfStrips`."""

    def __init__(self, each: Sequence[SumsOfStrips]) -> None:
        self._each = each

    def begin(self, seed: int) -> None:
        for sums in self._each:
            sums.begin(seed)

    def take(self, operation: Operation) -> tuple[Array, Array]:
        return self._each[operation.device].take(operation)


def open_devices(name: str, numbers: Sequence[int] | str) -> Devices:
    """Open several devices of a backend by their numbers, or all devices if `numbers` is "all".

    Raises:
        BackendError: a device cannot be opened.
        InputError: the devices are not of one kind.
    """
    first = open_backend(name, 0 if isinstance(numbers, str) or resolve(name) == "host" else numbers[0])
    if isinstance(numbers, str):
        numbers = range(first.device_count())
    if first.name == "host" and set(numbers) != {0}:
        other = next(number for number in numbers if number)
        raise InputError(
            f"there is no device {other}: the host backend has one, number 0; pass 0 once per session "
            "(--devices 0,0), or --backend cuda"
        )
    opened = {numbers[0]: first}
    for number in numbers:
        if number not in opened:
            opened[number] = open_backend(first.name, number)
    kinds = {number: engine.describe()["device"] for number, engine in opened.items()}
    for number, kind in kinds.items():
        if kind != kinds[numbers[0]]:
            raise InputError(
                f"device {number} is {kind}, device {numbers[0]} is {kinds[numbers[0]]}: they may round "
                "differently; pass devices of one kind"
            )
    return Devices(numbers, [opened[number] for number in numbers])
