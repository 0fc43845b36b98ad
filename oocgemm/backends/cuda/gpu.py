"""Opens one NVIDIA device, describes it, and opens sessions on it."""

from collections.abc import Mapping, Sequence
from functools import cache

import cupy
from cupy.cuda import runtime

from oocgemm.backends.base import Array, Session, Swept
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import describe_device, properties
from oocgemm.backends.cuda.multiplier import device_name
from oocgemm.backends.cuda.session import SESSIONS, CudaSession, RepeatedSession, is_repeatable, reopened
from oocgemm.backends.cuda.warm import idle_bytes
from oocgemm.backends.registry import pci_limit
from oocgemm.errors import BackendError, OutOfMemoryError
from oocgemm.kernels import tuning
from oocgemm.kernels.ladder import check_plan
from oocgemm.planning import GemmProblem, Plan
from oocgemm.planning.units import format_size

# The error cudaErrorMemoryAllocation of the CUDA runtime.
_OUT_OF_MEMORY = 2
# The device attribute cudaDevAttrPageableMemoryAccessUsesHostPageTables of the CUDA runtime.
_SHARES_PAGE_TABLES = 100


@cache
def _described(device: int) -> Mapping[str, str]:
    found = properties(device)
    return {
        "device": found["name"].decode(),
        "memory": format_size(found["totalGlobalMem"]),
        "cupy": cupy.__version__,
        "cuda": str(runtime.runtimeGetVersion()),
        "driver": str(runtime.driverGetVersion()),
    }


class CudaBackend:
    """An open NVIDIA device. Implements `oocgemm.backends.base.Backend`."""

    name = "cuda"

    def __init__(self, device: int = 0) -> None:
        try:
            count = runtime.getDeviceCount()
            if not 0 <= device < count:
                raise BackendError(
                    f"there is no CUDA device {device}: {count} are visible, numbered from 0; pass one "
                    "of them"
                )
            self._device = device
            self._properties = properties(device)
            with cupy.cuda.Device(device):
                runtime.free(0)  # creates the CUDA context now; its memory is not part of any budget
        except runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise OutOfMemoryError(
                    f"other processes use nearly all memory of CUDA device {device}, so it cannot be opened: "
                    "wait for them, or pass another --device"
                ) from error
            raise BackendError(
                f"no CUDA device answers: {error}; check the driver with nvidia-smi"
            ) from error

    def device_count(self) -> int:
        return int(runtime.getDeviceCount())

    def free_memory(self) -> int:
        with cupy.cuda.Device(self._device):
            return int(runtime.memGetInfo()[0]) + idle_bytes(self._device)

    def is_pinned(self, address: int, size: int) -> bool:
        with cupy.cuda.Device(self._device):
            return cuda_calls.pinned_bytes(address) >= size

    def multiprocessors(self) -> int:
        return int(self._properties["multiProcessorCount"])

    def link_limit(self) -> float | None:
        if runtime.deviceGetAttribute(_SHARES_PAGE_TABLES, self._device):
            # A device that uses the host's page tables is connected by NVLink-C2C, not by PCI Express. The
            # system does not report the rate of NVLink-C2C.
            return None
        return pci_limit(runtime.deviceGetPCIBusId(self._device))

    def describe(self) -> dict[str, str]:
        return dict(_described(self._device))

    def check(self, plan: Plan, kernel: str) -> None:
        check_plan(kernel, plan, describe_device(self._device))

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        known = tuning.load(device_name(self._device))
        return known.describe(kernel, problem.a_dtype, problem.compute)

    def moments(self, given: Swept, axis: int, host: int, device: int) -> Array | None:
        from oocgemm.backends.cuda.expander import moments  # few runs need it

        return moments(self._device, given, axis, host, device)

    def decomposed(self, s: Array, width: int, device: int) -> tuple[Array, Array] | None:
        from oocgemm.backends.cuda.eigen import decomposed  # few runs need it

        return decomposed(self._device, s, width, device)

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> CudaSession:
        if not beside and (repeated := reopened(self._device, plan, kernel)) is not None:
            return repeated
        if not beside and is_repeatable(plan):
            return RepeatedSession(self._device, plan, kernel)
        problem = plan.problem
        session = SESSIONS.get(type(problem.b)) or SESSIONS.get(type(problem.sink), CudaSession)
        return session(self._device, plan, kernel, [x for x in beside if isinstance(x, CudaSession)])
