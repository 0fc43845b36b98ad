"""Query the host memory that this process may use, and the processor time that it has used."""

import mmap
import os
import re
from contextlib import suppress
from functools import lru_cache
from math import inf
from pathlib import Path, PurePosixPath
from time import monotonic, process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from oocgemm.errors import OutOfMemoryError
from oocgemm.planning.units import format_size
from oocgemm.values import dataclass

# /proc and the mount points of the cgroup file systems are below this folder. Tests use another folder.
ROOT = Path("/")
# A call of the library queries the available memory several times. An answer that is at most this many
# seconds old is used again, since a query reads a dozen files, which takes up to 1 ms.
RECENT = 0.5
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

# A memory cgroup: its version (a key of `CGROUP_FILES`), its folder, and its existing files with limits.
_Group = tuple[str, str, tuple[str, ...]]
# The time of `monotonic` at which `available_memory` last read the files, and its answer.
_latest: list[tuple[float, int]] = [(-inf, 0)]


def allocate(size: int) -> npt.NDArray[Any]:
    """Return a page-aligned array of `size` bytes, in huge pages where the system has them.

    With huge pages, the page faults of the first writes take a fraction of the time. The memory is freed
    when the array and all views of it are deleted. Raises `OutOfMemoryError`.
    """
    if not size:
        return np.empty(0, np.uint8)
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def available_memory(max_age: float = 0.0) -> int:
    """Return the bytes of host memory that this process can allocate now without swapping.

    The limits of its memory cgroup and of all parent cgroups are respected. An answer that is at most
    `max_age` seconds old is returned again.
    """
    now, (asked, available) = monotonic(), _latest[0]
    if now - asked > max_age:
        available = _available_memory()
        _latest[0] = now, available
    return available


def available_for(size: int) -> int:
    """Return `available_memory`. A recent answer may be returned if it is at least twice `size`."""
    recent = available_memory(RECENT)
    return recent if 2 * size <= recent else available_memory()


def _available_memory() -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+)", read_text("/proc/meminfo"), re.MULTILINE)
        available = int(found[1]) * 1024 if found else available
    left = (_left(kind, folder, limits) for kind, folder, limits in _memory_groups())
    return max(0, int(min([available, *left])))


def memory_limit() -> int:
    """Return the bytes of host memory that this process may use in total, whether free now or not.

    This is the memory of the machine, or the smallest limit of the process's cgroups if that is less.
    """
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([installed, *(_limit(limits) for _, _, limits in _memory_groups())]))


def read_text(path: str) -> str:
    """Return the text of a file of /proc or a cgroup. This takes a third of the time of `Path.read_text`."""
    file = os.open(path, os.O_RDONLY)
    try:
        parts = list(iter(lambda: os.read(file, 1 << 16), b""))
    finally:
        os.close(file)
    return b"".join(parts).decode(errors="replace")


def _memory_groups() -> tuple[_Group, ...]:
    """Return the memory cgroup of this process and all cgroups above it; () without a cgroup file system."""
    try:
        return _groups_of(ROOT, read_text(f"{ROOT}/proc/self/cgroup"))
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _groups_of(root: Path, membership: str) -> tuple[_Group, ...]:
    """Return the memory cgroups of a process, from the text of its file /proc/self/cgroup.

    See cgroups(7) and, for the fields of mountinfo, proc_pid_mountinfo(5). A later change of the mounts is
    not noticed.
    """
    paths: dict[str, PurePosixPath] = {}
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(path)
    groups: list[_Group] = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :]
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted, place = (
            re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5]
        )
        below = PurePosixPath()  # use the mount point itself if the process's cgroup is not below it
        if paths[kind].is_relative_to(mounted):
            below = paths[kind].relative_to(mounted)
        for group in (below, *below.parents):
            folder = root / place.lstrip("/") / group
            limits = (folder / name for name in CGROUP_FILES[kind][0])
            groups.append((kind, str(folder), tuple(str(file) for file in limits if file.exists())))
    return tuple(groups)


def _left(kind: str, folder: str, limits: tuple[str, ...]) -> float:
    """Return the bytes that the processes of a cgroup may still allocate; infinity without a limit."""
    _, used, caches = CGROUP_FILES[kind]
    limit = _limit(limits)
    if limit == inf:
        return inf
    try:
        parts = dict(line.split() for line in read_text(f"{folder}/memory.stat").splitlines())
        return limit - int(read_text(f"{folder}/{used}")) + sum(int(parts.get(name, 0)) for name in caches)
    except OSError:
        return inf


def _limit(limits: tuple[str, ...]) -> float:
    """Return the bytes that the processes of a cgroup may allocate in total; infinity without a limit."""
    try:
        texts = [read_text(file).strip() for file in limits]
    except OSError:
        return inf
    return min((int(text) for text in texts if text != "max"), default=inf)


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Counters of processor time, read at one moment. Only the difference of two readings has a meaning.

    - `own`: the seconds that this process used.
    - `busy`: the seconds that all programs together used on the cores that this process may run on.
    """

    own: float
    busy: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """Return the counters now; None without /proc/stat. On Linux, `busy` advances in ticks of 10 ms."""
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = 0.0
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                for name, *ticks in (line.split() for line in file):
                    if name in cores:  # add user, nice, system, irq, softirq, steal; skip idle and iowait
                        busy += sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7))
        except (OSError, IndexError, ValueError):
            return None
        return cls(process_time(), busy / os.sysconf("SC_CLK_TCK"))


def used_since(start: CpuTimes | None) -> dict[str, float] | None:
    """Return the processor time used since `start`, as a dict of numbers; None if it cannot be measured.

    "cores" is the number of cores that this process may use, "own_seconds" the time of this process, and
    "busy_seconds" the time of all programs together on these cores.
    """
    if start is None or (end := CpuTimes.now()) is None:
        return None
    own = end.own - start.own
    busy = max(own, end.busy - start.busy)  # `busy` is rounded to ticks: its increase can be less than `own`
    return {"cores": len(os.sched_getaffinity(0)), "own_seconds": own, "busy_seconds": busy}
