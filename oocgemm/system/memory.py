"""Allocate large blocks of host memory, and query how much host memory the process may use."""

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

# /proc and the mount points of the cgroup file systems are below this folder. Tests use another folder.
ROOT = Path("/")
# For each cgroup version: the files with the limits, the file with the usage, and the lines of memory.stat
# that count page cache. Page cache is part of the usage, but Linux frees it on demand, so it counts as
# available.
CGROUP_FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def allocate(size: int) -> npt.NDArray[Any]:
    """Return a page-aligned array of `size` bytes, in huge pages where the system has them.

    With huge pages, the page faults of the first writes take a fraction of the time. The memory is freed
    when the array and all views of it are deleted. Raises `OutOfMemoryError`.
    """
    try:
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemoryError(
            f"the system refuses {format_size(size)} of host memory ({error}), "
            f"{format_size(available_memory())} are available: pass a smaller --host-memory (on the host "
            "backend --device-memory is host memory too: lower both)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the memory can also be used without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)[:size]


def available_memory() -> int:
    """Return the bytes of host memory that this process can allocate now without swapping.

    The limits of its memory cgroup and of all parent cgroups are respected.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    left = (_left(kind, group) for kind, group in _memory_groups())
    return max(0, int(min([available, *left])))


def memory_limit() -> int:
    """Return the bytes of host memory that this process may use in total, whether free now or not.

    This is the memory of the machine, or the smallest limit of the process's cgroups if that is less.
    """
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([installed, *(_limit(kind, group) for kind, group in _memory_groups())]))


def _memory_groups() -> Iterator[tuple[str, Path]]:
    """Yield the memory cgroup of this process and all cgroups above it: (version, folder) for each.

    The version is a key of `CGROUP_FILES`. Yield nothing where no cgroup file system is mounted. See
    cgroups(7) and, for the fields of mountinfo, proc_pid_mountinfo(5).
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
        below = PurePosixPath()  # use the mount point itself if the process's cgroup is not below it
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
