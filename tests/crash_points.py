"""Ends runs at every step that changes a file, and goes on with them. A program of its own: `python -m tests.crash_points
CASE FOLDER`; it forks, which wants that no thread was started before."""

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import zarr

import oocgemm

STEPS = ("replace", "fsync", "fdatasync", "write", "pwritev", "ftruncate", "unlink", "rmdir", "mkdir")
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


def multiply(case: str, folder: Path) -> None:
    oocgemm.gemm(
        folder / "A.npy",
        folder / "B.npy",
        folder / ("C.npy" if case.endswith(".npy") else "C"),
        beta=0.5 if "in place" in case else 0,
        compressor="zstd" if case == "zstd" else None,
        tile=f"{TILE}x{TILE * 2}x{TILE}",
        device_memory="24MiB",
        host_memory="64MiB",
        backend="host",
        resume=True,
    )


def crash_at(point: int, case: str, folder: Path) -> None:
    """Run until just before step number `point`."""
    lock, passed = threading.Lock(), 0

    def step(act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal passed
        with lock:
            passed += 1
            if passed == point:
                os._exit(CRASHED)
        return act(*arguments, **named)

    for name in STEPS:
        patch.object(os, name, partial(step, getattr(os, name))).start()
    multiply(case, folder)


def check(case: str, folder: Path) -> None:
    """Go on to the end, and compare with an undisturbed run of the same plan."""
    multiply(case, folder)
    right = folder.with_name("undisturbed")
    if not right.exists():
        shutil.copytree(folder.with_name("begin"), right)
        multiply(case, right)
    found = [content(case, place) for place in (folder, right)]
    if found[0] != found[1]:
        os._exit(DIFFERS)


def content(case: str, folder: Path) -> bytes:
    if case.endswith(".npy"):
        return bytes(np.load(folder / "C.npy").data)
    array = zarr.open_array(folder / "C", mode="r")
    assert "oocgemm" not in array.attrs
    assert not list((folder / "C").rglob("*.partial"))
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


def main(case: str, work: Path) -> None:
    """Crash at every step of a run, and at some step of the run that goes on with it."""
    assert forked(prepare, case, work / "begin") == DONE
    folder, point, ended = work / "run", 0, False
    while not ended:
        point += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "begin", folder)
        codes = [forked(crash_at, point, case, folder)]
        ended = codes[-1] == DONE
        if point % 2:
            codes.append(forked(crash_at, 1 + point * 7 % 23, case, folder))
        codes.append(forked(check, case, folder))
        assert set(codes) <= {CRASHED, DONE}, codes
        assert codes[-1] == DONE, f"{case}: crashed before step {point}: {codes}"
    print(point - 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
