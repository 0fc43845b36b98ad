"""Ends runs at every step that changes a file, and goes on with them: by a kill, which leaves all that was written, and
by cuts of the power, which leave what was brought to the disk. A program of its own: `python -m tests.crash_points CASE
FOLDER [STRIDE]`; it forks, which wants that no thread was started before."""

import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import zarr

import oocgemm
from oocgemm.jobs.journal import read
from oocgemm.stores import sidecar

STEPS = (
    *("replace", "fsync", "fdatasync", "write", "pwritev"),
    *("ftruncate", "unlink", "rmdir", "mkdir", "setxattr"),
)
CASES = ("new", "new.npy", "in place", "sharded in place", "in place.npy")
CRASHED, DIFFERS, DONE = 99, 98, 0
EXTENT, TILE = 16, 8


def operand(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((EXTENT, EXTENT))


def prepare(case: str, folder: Path) -> None:
    """Operands and, for a product in place, the old C."""
    folder.mkdir()
    for seed, name in enumerate("AB"):
        np.save(folder / f"{name}.npy", operand(seed))
    if case == "in place.npy":
        np.save(folder / "C.npy", operand(2))
    elif "in place" in case:
        shards = (TILE, TILE) if "sharded" in case else None
        zarr.create_array(
            folder / "C",
            data=operand(2),
            chunks=(4, 8) if shards else (8, 8),
            shards=shards,
            compressors=None,
        )


def c_of(case: str, folder: Path) -> Path:
    below = folder if "in place" in case else folder / "new" / "folders"
    return below / ("C.npy" if case.endswith(".npy") else "C")


def multiply(case: str, folder: Path) -> None:
    oocgemm.gemm(
        folder / "A.npy",
        folder / "B.npy",
        c_of(case, folder),
        beta=0.5 if "in place" in case else 0,
        compressor="zstd" if case == "zstd" else None,
        tile=f"{TILE}x{TILE * 2}x{TILE}",
        device_memory="24MiB",
        host_memory="64MiB",
        backend="host",
        resume=True,
        trust_operands=True,  # files made anew after a cut of the power have other times of inode change
    )


# By inode: what a folder holds, by name (inode, whether it is a folder); what a file holds, when it was changed, and its
# extended attributes.
Names = dict[int, dict[str, tuple[int, bool]]]
Files = dict[int, tuple[bytes, int, dict[str, bytes]]]


@dataclass
class Disk:
    """What a cut of the power leaves at least: folders and files as they were when each was last synced."""

    names: Names = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    # These and, as most file systems see to, files as they were when they were renamed.
    renamed: Files = field(default_factory=dict)

    def sync(self, target: Any, act: Callable[[], Any], *, renames: bool = False) -> Any:
        """Do what brings a file or folder to the disk: what it holds before is there afterwards."""
        status = os.stat(target)
        if os.path.isdir(target):
            found = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(target)}
            done = act()
            for other, names in list(self.names.items()):  # what was moved is not where it was
                self.names[other] = {name: what for name, what in names.items() if what not in found.values()}
            self.names[status.st_ino] = found
            return done
        path = f"/proc/self/fd/{target}" if isinstance(target, int) else target
        attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        held = Path(path).read_bytes(), status.st_mtime_ns, attributes
        done = act()
        self.renamed[status.st_ino] = held
        if not renames:
            self.files[status.st_ino] = held
        return done

    def sync_all(self, folder: Path) -> None:
        """All that is there now."""
        for place in (folder, *folder.rglob("*")):
            self.sync(place, lambda: None)


def make(folder: Path, inode: int, names: Names, files: Files) -> None:
    """A folder as it was on a disk: what is not known of a file is lost."""
    folder.mkdir()
    for name, (number, is_folder) in names.get(inode, {}).items():
        if is_folder:
            make(folder / name, number, names, files)
        else:
            content, modified, attributes = files.get(number, (b"", 0, {}))
            (folder / name).write_bytes(content)
            for attribute, value in attributes.items():
                os.setxattr(folder / name, attribute, value)
            os.utime(folder / name, ns=(modified, modified))


def crash_at(point: int, case: str, folder: Path) -> None:
    """Run until just before step number `point`, or to the end, and say what is on the disk then."""
    lock, passed = threading.Lock(), 0
    disk, kept = Disk(), folder.with_name("disk")
    disk.sync_all(folder)

    def step(name: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal passed
        with lock:
            passed += 1
            if passed == point:
                kept.write_bytes(pickle.dumps(disk))
                os._exit(CRASHED)
        if name in ("fsync", "fdatasync", "replace"):
            return disk.sync(arguments[0], partial(act, *arguments, **named), renames=name == "replace")
        return act(*arguments, **named)

    for name in STEPS:
        patch.object(os, name, partial(step, name, getattr(os, name))).start()
    multiply(case, folder)
    kept.write_bytes(pickle.dumps(disk))


def check(case: str, folder: Path, ended: bool = False) -> None:
    """Go on to the end, unless it `ended`, and compare with an undisturbed run of the same plan."""
    if not ended:
        multiply(case, folder)
    journal = sidecar(c_of(case, folder))
    assert journal is not None
    record = read(journal)
    assert record is not None
    assert record.complete is not None
    right = folder.with_name("undisturbed")
    if not right.exists():
        shutil.copytree(folder.with_name("begin"), right)
        multiply(case, right)
    found = [content(case, place) for place in (folder, right)]
    if found[0] != found[1]:
        os._exit(DIFFERS)


def content(case: str, folder: Path) -> bytes:
    c = c_of(case, folder)
    if case.endswith(".npy"):
        return bytes(np.load(c).data)
    array = zarr.open_array(c, mode="r")
    assert "oocgemm" not in array.attrs
    assert not list(c.rglob("*.partial"))
    return bytes(np.asarray(array[:]).data)


def forked(act: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process that does something."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act(*arguments)
            code = DONE
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(case: str, work: Path, stride: int = 1) -> None:
    """Crash at every `stride`-th step of a run, and resume.

    Resume from what a kill leaves, and from what a power cut at that moment leaves. Names made later may or may
    not have reached the disk by then. After some kills, crash at a step of the next run, too.
    """
    assert forked(prepare, case, work / "begin") == DONE
    folder, point, ended = work / "run", 1 - stride, False
    while not ended:
        point += stride
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "begin", folder)
        codes = [forked(crash_at, point, case, folder)]
        ended = codes[-1] == DONE
        inode, now = folder.stat().st_ino, Disk()
        now.sync_all(folder)
        disk: Disk = pickle.loads((work / "disk").read_bytes())
        if point % 4 == 1:
            codes.append(forked(crash_at, 1 + point * 7 % 23, case, folder))
        codes.append(forked(check, case, folder))
        strict = ended or point % 2
        shutil.rmtree(folder)
        make(folder, inode, *((disk.names, disk.files) if strict else (now.names, disk.renamed)))
        codes.append(forked(check, case, folder, ended))
        assert set(codes) <= {CRASHED, DONE}, f"{case}: crashed before step {point}: {codes}"
        assert codes[-1] == DONE
    print(point - 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
