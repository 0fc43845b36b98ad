"""Large blocks of host memory, and how much of it there is."""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import OutOfMemoryError
from oocgemm.units import format_size

GROUP = Path("/sys/fs/cgroup")  # as a container sees its own control group


def allocate(size: int) -> Array:
    """`size` bytes, page-aligned, on huge pages where the system has them (first touch is several times
    cheaper), returned to the system when the last view of them goes."""
    try:
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemoryError(
            f"the system refuses {format_size(size)} of host memory ({error}), {format_size(available_memory())} are "
            "available: pass a smaller --host-memory, and on the host backend a smaller --device-memory"
        ) from error
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
        limit = (GROUP / "memory.max").read_text().strip()
        used = int((GROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    if limit == "max":
        return available
    cached = int(parts.get("active_file", 0)) + int(
        parts.get("inactive_file", 0)
    )  # given up when others want it
    return max(0, min(available, int(limit) - used + cached))


def cut(block: Array, borders: Sequence[int]) -> Iterator[Array]:
    """A block in pieces that have none of these addresses inside, in order: whole rows, or a part of one."""
    (height, width), low = block.shape, block.ctypes.data
    high = low + (height - 1) * block.strides[0] + width * block.itemsize
    places = [divmod(border - low, block.strides[0]) for border in borders if low < border < high]
    columns = [(r, inside // block.itemsize) for r, inside in places]
    row, col = 0, 0
    for r, c in [*((r, c) if c < width else (r + 1, 0) for r, c in columns), (height, 0)]:
        if row < r and col:
            yield block[row : row + 1, col:]
            row, col = row + 1, 0
        if row < r:
            yield block[row:r]
            row = r
        if c > col:
            yield block[row : row + 1, col:c]
            col = c
