"""Takes sums on the device, with which `oocgemm.integrity` verifies C."""

import ctypes
from collections.abc import Callable

import cupy

from oocgemm.backends.checksums import DeviceChecksums, DeviceStripSums
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.planning import Plan, Region


def opened(
    plan: Plan, address: Callable[[Region], int], kernels: Kernels
) -> tuple[DeviceChecksums | None, DeviceStripSums | None]:
    """Load the kernels for the sums that a run needs. Return the checksums, and the sums of strips.

    `address` returns the device address of a region of a device slot.
    """
    device, checksums, strip_sums = SumsDevice(kernels), None, None
    if plan.problem.checked == "device":
        checksums = DeviceChecksums(plan, address, device)
    if plan.problem.checks_sums:
        strip_sums = DeviceStripSums(plan, address, device, cupy.cuda.alloc_pinned_memory)
    return checksums, strip_sums


class SumsDevice:
    """Launches the checksum kernels and copies device memory, on cupy's current stream.

    Implements `oocgemm.backends.checksums.Device`.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def load(self, entry: str, macros: tuple[str, ...]) -> None:
        self._kernels.plain("check_sums", entry, macros)

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], given: ctypes.Structure
    ) -> None:
        self._kernels.plain("check_sums", entry, macros)(grid, given)

    def zero(self, address: int, size: int) -> None:
        cuda_calls.make(cuda_calls.fill(address, size, cupy.cuda.get_current_stream()))

    def copy(self, to: int, source: int, size: int) -> None:
        cuda_calls.make(cuda_calls.copy(to, source, size, cupy.cuda.get_current_stream()))
