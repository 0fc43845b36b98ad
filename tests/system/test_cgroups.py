"""Every memory cgroup of the process, of version 1 or 2, limits the available memory."""

import os
from math import inf
from pathlib import Path

import pytest

from oocgemm.system import resources

MIB = 1 << 20
CACHE = 60 * MIB  # page cache in each group's usage, which the kernel can reclaim


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a tree of files in place of the system's /proc and /sys."""
    monkeypatch.setattr(resources, "ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def process(root: Path, groups: str, mounts: str) -> None:
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)


def group(root: Path, path: str, limit: str, used: int, high: str = "max") -> None:
    """Create the files of a cgroup. A path with a folder named memory means version 1."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    old = "memory" in folder.parts[len(root.parts) :]
    (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(limit + "\n")
    (folder / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
    if not old:
        (folder / "memory.high").write_text(high + "\n")
    total = "total_" if old else ""
    (folder / "memory.stat").write_text(
        f"anon {30 * MIB}\n{total}inactive_file {40 * MIB}\n{total}active_file {20 * MIB}\n"
    )


V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 master:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def test_the_own_group_bounds_memory(root: Path) -> None:
    process(root, "0::/system.slice/job.service\n", V2)
    group(root, "sys/fs/cgroup/system.slice/job.service", str(100 * MIB), 90 * MIB)
    assert resources.available_memory() == 10 * MIB + CACHE


@pytest.mark.parametrize("level", ["sys/fs/cgroup/a", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a/b/c"])
def test_the_tightest_group_bounds_memory(root: Path, level: str) -> None:
    process(root, "0::/a/b/c\n", V2)
    for folder in ("sys/fs/cgroup/a", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a/b/c"):
        group(root, folder, "max", 90 * MIB)
    # A group that does not contain the process, so its limit does not count.
    group(root, "sys/fs/cgroup/other", str(MIB), MIB)
    group(root, level, str(100 * MIB), 90 * MIB)
    assert resources.available_memory() == 10 * MIB + CACHE


def test_a_soft_limit_bounds_memory(root: Path) -> None:
    process(root, "0::/a\n", V2)
    group(root, "sys/fs/cgroup/a", str(200 * MIB), 90 * MIB, high=str(100 * MIB))
    assert resources.available_memory() == 10 * MIB + CACHE


@pytest.mark.parametrize("level", ["slurm", "slurm/job_1", "slurm/job_1/step_0"])
def test_groups_of_version_1_bound_memory(root: Path, level: str) -> None:
    process(root, "9:name=systemd:/\n4:cpu,memory:/slurm/job_1/step_0\n0::/\n", V1)
    for name in ("", "slurm", "slurm/job_1", "slurm/job_1/step_0"):
        group(root, f"sys/fs/cgroup/memory/{name}", str((1 << 63) - 4096), 90 * MIB)
    group(root, f"sys/fs/cgroup/memory/{level}", str(100 * MIB), 90 * MIB)
    assert resources.available_memory() == 10 * MIB + CACHE


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/1", "/docker/1"),  # a container in which the path of the cgroup is the host's
        ("/", "/"),  # a container in which the path of the cgroup is "/"
        ("/docker/1", "/"),
        ("/../2", "/"),
        ("/docker/1", "/.."),
    ],
)
def test_a_container_is_bounded_by_the_group_at_its_mount_point(root: Path, path: str, mounted: str) -> None:
    process(root, f"0::{path}\n", f"31 23 0:28 {mounted} /sys/fs/cg\\040roup rw - cgroup2 cgroup rw\n")
    group(root, "sys/fs/cg roup", str(100 * MIB), 90 * MIB)
    assert resources.available_memory() == 10 * MIB + CACHE


def test_a_group_that_is_full_leaves_nothing(root: Path) -> None:
    process(root, "0::/a\n", V2)
    group(root, "sys/fs/cgroup/a", str(100 * MIB), 170 * MIB)
    assert resources.available_memory() == 0


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None])
def test_a_group_without_a_limit_leaves_what_the_machine_has(root: Path, limit: str | None) -> None:
    if limit is not None:
        process(root, "0::/a\n", V2)
        group(root, "sys/fs/cgroup/a", limit, 0)
    assert 0 < resources.available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_an_old_answer_counts_only_for_what_takes_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([100, 10])
    monkeypatch.setattr(resources, "_latest", [(-inf, 0)])
    monkeypatch.setattr(resources, "RECENT", 60.0)
    monkeypatch.setattr(resources, "_available_memory", lambda: next(answers))
    assert [resources.available_for(size) for size in (20, 50, 51)] == [100, 100, 10]
