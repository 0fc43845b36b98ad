"""Allocate large blocks of host memory, and query how much there is."""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from oocgemm.errors import OutOfMemoryError
from oocgemm.planning.units import format_size

ROOT = Path("/")  # of /proc and of cgroup mount points; tests replace it
# Per cgroup version: the files of the limits, the file of the usage, and the lines of memory.stat that count
# page cache, which the kernel reclaims on demand.
CGROUP_FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def allocate(size: int) -> npt.NDArray[Any]:
    """Return `size` page-aligned bytes, on huge pages where the system has them.

    Huge pages make the first touch several times cheaper. The memory is freed with the last view of it.
    Raises `OutOfMemoryError`.
    """
    try:
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemoryError(
            f"the system refuses {format_size(size)} of host memory ({error}), "
            f"{format_size(available_memory())} are available: "
            "pass a smaller --host-memory, and on the host backend a smaller --device-memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages is just slower
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)[:size]


def available_memory() -> int:
    """Return the bytes of host memory available without swapping, within the limits of all cgroups."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    left = (_left(kind, group) for kind, group in _memory_groups())
    return max(0, int(min([available, *left])))


def memory_limit() -> int:
    """Return the host memory in bytes that the process may use: the machine's, or less by its cgroups."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([installed, *(_limit(kind, group) for kind, group in _memory_groups())]))


def _memory_groups() -> Iterator[tuple[str, Path]]:
    """Yield version and folder of the process's memory cgroup and its parents, if they are mounted.

    See cgroups(7) and, for the fields of mountinfo, proc_pid_mountinfo(5).
    """
    paths: dict[str, PurePosixPath] = {}
    mounts: list[list[str]] = []
    with suppress(OSError):
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                paths["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(path)
        mounts = [line.split() for line in (ROOT / "proc/self/mountinfo").read_text().splitlines()]
    for fields in mounts:
        kind, _, options = fields[fields.index("-") + 1 :]
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, place = (
            re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5]
        )
        below = PurePosixPath()  # the mount point itself, if the process's group is not below it
        if paths[kind].is_relative_to(root):
            below = paths[kind].relative_to(root)
        for group in (below, *below.parents):
            yield kind, ROOT / place.lstrip("/") / group


def _left(kind: str, group: Path) -> float:
    """Return the bytes that the processes of a cgroup may still allocate; infinity without a limit."""
    _, used, caches = CGROUP_FILES[kind]
    limit = _limit(kind, group)
    if limit == inf:
        return inf
    try:
        parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - int((group / used).read_text()) + sum(int(parts.get(name, 0)) for name in caches)
    except OSError:
        return inf


def _limit(kind: str, group: Path) -> float:
    """Return the bytes that the processes of a cgroup may allocate in total; infinity without a limit."""
    try:
        files = [group / name for name in CGROUP_FILES[kind][0]]
        texts = [file.read_text().strip() for file in files if file.exists()]
    except OSError:
        return inf
    return min((int(text) for text in texts if text != "max"), default=inf)
