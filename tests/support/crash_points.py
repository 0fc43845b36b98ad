"""End runs just before each system call that changes a file, resume them, and compare the results.

A run can end in two ways. A kill leaves everything that was written. A power cut leaves only what was synced
to the disk. This is a program, because it forks, and a process that forks must not have started threads
before: `python -m tests.support.crash_points CASE FOLDER [STRIDE]`.
"""

import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import zarr

import oocgemm
from oocgemm.jobs.journal import read
from oocgemm.stores import sidecar
from oocgemm.stores.genetics import companions
from tests.support.plink import genotypes, write_bed

STEPS = (
    *("replace", "fsync", "fdatasync", "write", "pwritev"),
    *("ftruncate", "unlink", "rmdir", "mkdir", "setxattr"),
)
CASES = ("new", "new.npy", "in place", "sharded in place", "in place.npy", "new.grm.bin")
CRASHED, DIFFERS, DONE = 99, 98, 0
EXTENT, TILE = 16, 8


def operand(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((EXTENT, EXTENT))


def prepare(case: str, folder: Path) -> None:
    """Create A and B and, for a product that updates C in place, the old C."""
    folder.mkdir()
    if case.endswith(".grm.bin"):
        write_bed(folder / "X.bed", genotypes(np.random.default_rng(0), EXTENT, EXTENT))
        return
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
    return below / f"C{''.join(Path(case).suffixes)}"


def multiply(case: str, folder: Path) -> None:
    if case.endswith(".grm.bin"):
        given: Any = {"tile": f"{TILE}x{TILE}x{TILE}", "backend": "host", "memory": "64MiB"}
        oocgemm.grm(folder / "X.bed", c_of(case, folder), **given, resume=True, trust_operands=True)
        return
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
        # After a simulated power cut files are created anew, which changes their inode times. Operands would
        # count as changed.
        trust_operands=True,
    )


# `Names` is the content of folders: inode of the folder -> name -> (inode, whether it is a folder). `Files`
# is the content of files: inode -> (bytes, modification time, extended attributes).
Names = dict[int, dict[str, tuple[int, bool]]]
Files = dict[int, tuple[bytes, int, dict[str, bytes]]]
_recording = threading.Lock()  # files are synced in several threads


@dataclass
class Disk:
    """What a power cut leaves at the least: folders and files as they were when each was last synced."""

    names: Names = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    # What most file systems leave in addition: files as they were when they were renamed.
    renamed: Files = field(default_factory=dict)

    def sync(self, target: Any, act: Callable[[], Any], *, renames: bool = False) -> Any:
        """Call `act`, which syncs a file or folder, and record what that file or folder contained before."""
        status = os.stat(target)
        if os.path.isdir(target):
            found = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(target)}
            done = act()
            with _recording:
                # An entry that was moved here is no longer in its old folder.
                for other, names in self.names.items():
                    left = {name: what for name, what in names.items() if what not in found.values()}
                    self.names[other] = left
                self.names[status.st_ino] = found
            return done
        path = f"/proc/self/fd/{target}" if isinstance(target, int) else target
        attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        held = Path(path).read_bytes(), status.st_mtime_ns, attributes
        done = act()
        with _recording:
            self.renamed[status.st_ino] = held
            if not renames:
                self.files[status.st_ino] = held
        return done

    def save(self, place: Path) -> None:
        """Write this to a file."""
        with _recording:
            place.write_bytes(pickle.dumps(self))

    def sync_all(self, folder: Path) -> None:
        """Record everything in a folder as synced."""
        for place in (folder, *folder.rglob("*")):
            self.sync(place, lambda: None)


def make(folder: Path, inode: int, names: Names, files: Files) -> None:
    """Create a folder as it was on the disk. A file whose content was never synced becomes empty."""
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
    """Run until just before system call number `point`, or to the end, and save what is on the disk then."""
    lock, passed = threading.Lock(), 0
    disk, kept = Disk(), folder.with_name("disk")
    disk.sync_all(folder)

    def step(name: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal passed
        with lock:
            passed += 1
            if passed == point:
                disk.save(kept)
                os._exit(CRASHED)
        if name in ("fsync", "fdatasync", "replace"):
            return disk.sync(arguments[0], partial(act, *arguments, **named), renames=name == "replace")
        return act(*arguments, **named)

    for name in STEPS:
        patch.object(os, name, partial(step, name, getattr(os, name))).start()
    multiply(case, folder)
    disk.save(kept)


def undisturbed(case: str, folder: Path) -> None:
    """Run without a crash, and write the names of the modules that are loaded then to the file `modules`."""
    shutil.copytree(folder.with_name("begin"), folder)
    multiply(case, folder)
    folder.with_name("modules").write_text("\n".join(sys.modules))


def check(case: str, folder: Path, ended: bool = False) -> None:
    """Resume the run unless it `ended`. Compare C with that of an undisturbed run of the same plan."""
    if not ended:
        multiply(case, folder)
    journal = sidecar(c_of(case, folder))
    assert journal is not None
    record = read(journal)
    assert record is not None
    assert record.complete is not None
    found = [content(case, place) for place in (folder, folder.with_name("undisturbed"))]
    if found[0] != found[1]:
        os._exit(DIFFERS)


def content(case: str, folder: Path) -> bytes:
    c = c_of(case, folder)
    if case.endswith(".npy"):
        return bytes(np.load(c).data)
    if case.endswith(".grm.bin"):
        return b"".join(place.read_bytes() for place in (c, *companions(c)))
    array = zarr.open_array(c, mode="r")
    assert "oocgemm" not in array.attrs
    assert not list(c.rglob("*.partial"))
    return bytes(np.asarray(array[:]).data)


def forked(act: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a forked process, and return the exit code of that process."""
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
    """End a run before every `stride`-th system call that changes a file, and resume.

    Resume once from what a kill leaves, and once from what a power cut at that moment leaves. File names that
    were created since the last sync may or may not be on the disk after a power cut. After some kills, also
    end the resumed run.
    """
    assert forked(prepare, case, work / "begin") == DONE
    assert forked(undisturbed, case, work / "undisturbed") == DONE
    for name in (work / "modules").read_text().splitlines():  # so that no other process has to import them
        with suppress(ImportError):
            import_module(name)
    assert threading.active_count() == 1
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
