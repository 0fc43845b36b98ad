"""Large blocks of host memory, and how much of it there is."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import BackendError
from oocgemm.units import format_size


def allocate(size: int) -> Array:
    """`size` bytes, page-aligned, on huge pages where the system has them (first touch is several times
    cheaper), returned to the system when the last view of them goes."""
    try:
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise BackendError(f"the system refuses {format_size(size)} of host memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages is only slower
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)[:size]


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping, limits of the control group included."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        return available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))
