"""Start real dask clusters, find the processes of a run, and compare results."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zarr

from tests.support import TOP
from tests.support.built import copy_built

# Every process of a test has its folder in this variable, so that processes of other tests are not found.
MARK = "OOCGEMM_TEST_MARK"
# One thread per BLAS: results of different numbers of threads may differ in the last bit.
THREADS = {"OPENBLAS_NUM_THREADS": "1"}
SECONDS_TO_END = 3.0


def environment(mark: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))
    return os.environ | THREADS | {"PYTHONPATH": path, MARK: str(mark)}


def processes(mark: Path, *words: str) -> list[psutil.Process]:
    """Return the live processes of a test whose command lines contain all of these words."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if all(word in line for word in words) and process.environ().get(MARK) == str(mark):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def children(mark: Path) -> list[psutil.Process]:
    """Return the processes that compute parts."""
    return processes(mark, "oocgemm.distributed.child")


def all_ended(mark: Path) -> bool:
    """Wait until no child process is left, for at most `SECONDS_TO_END`. Return whether that is so."""
    until = time.monotonic() + SECONDS_TO_END
    while children(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def cluster(folder: Path, workers: int, *options: str, **settings: str) -> Iterator[Path]:
    """Start a scheduler and workers as a user does; yield the path of the scheduler's file.

    `options` are those of the workers. `settings` are variables of the environment of all processes.
    """
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    common = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--no-dashboard"]
    started = []
    with open(folder / "cluster.log", "ab") as log:

        def start(*words: str) -> None:
            started.append(
                subprocess.Popen(
                    words, cwd=folder, env=environment(folder) | settings, stdout=log, stderr=log
                )
            )

        try:
            start(*dask, *common, "--port", "0")
            worker = [*dask[:-1], "distributed.cli.dask_worker", *common, "--nthreads", "1"]
            for number in range(workers):
                start(*worker, "--local-directory", str(folder / f"scratch{number}"), *options)
            until = time.monotonic() + 60
            while not file.exists() and time.monotonic() < until:
                time.sleep(0.05)
            yield file
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(3)  # some workers of dask do not end by themselves
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for one in processes(folder, "distributed"):
                one.kill()


def store_operands(folder: Path, extent: int, dtype: str = "float64", seed: int = 0) -> None:
    """Store random A, B and the old C, each as a zarr array."""
    copy_built(f"operands-{extent}-{dtype}-{seed}", partial(_build_operands, extent, dtype, seed), folder)


def _build_operands(extent: int, dtype: str, seed: int, folder: Path) -> None:
    rng = np.random.default_rng(seed)
    for name in ("A", "B", "old"):
        array = _random(rng, extent, dtype)
        zarr.create_array(folder / f"{name}.zarr", data=array, chunks=(extent // 12, extent // 12))


def _random(rng: np.random.Generator, extent: int, dtype: str) -> Any:
    if dtype == "int8":
        return rng.integers(-128, 128, (extent, extent), dtype=np.int8)
    array = rng.standard_normal((extent, extent))
    if dtype.startswith("complex"):
        array = array + 1j * rng.standard_normal((extent, extent))
    return array.astype(dtype)


def fresh(folder: Path, c: Path, *, old: bool) -> None:
    """Remove C and what runs keep of it. With `old`, store the old C there."""
    for path in (c, c.with_name(c.name + ".oocgemm")):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    if old and c.suffix == ".npy":
        np.save(c, zarr.open_array(folder / "old.zarr", mode="r")[:])
    elif old:
        shutil.copytree(folder / "old.zarr", c)


def content(c: Path) -> bytes:
    """Return the bytes of C, which must be complete."""
    if c.suffix == ".npy":
        return bytes(np.load(c).data)
    array = zarr.open_array(c, mode="r")
    assert "oocgemm" not in array.attrs
    assert not list(c.rglob("*.partial"))
    assert sorted(path.name for path in (c / ".oocgemm").iterdir() if path.is_dir()) == []
    return bytes(np.asarray(array[:]).data)
