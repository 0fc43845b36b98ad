"""Allocates device memory."""

from cupy.cuda import runtime

from oocgemm.errors import OutOfMemoryError
from oocgemm.planning.units import format_size


def allocate(size: int) -> int:
    """Allocate `size` bytes on the current device, and return their address. Raises `OutOfMemoryError`."""
    try:
        return int(runtime.malloc(max(size, 1)))
    except runtime.CUDARuntimeError as error:
        free = runtime.memGetInfo()[0]
        raise OutOfMemoryError(
            f"the device refuses {format_size(size)}, {format_size(free)} are free: "
            "pass a smaller --device-memory"
        ) from error
