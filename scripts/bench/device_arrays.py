"""Operands for benchmarks on several devices: made, faulted in, pinned, digested and removed on all cores."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.system.resources import available_memory

CORES = len(os.sched_getaffinity(0))
# Rows of NumPy arrays that are filled, or whose digest is computed, at a time.
BAND = 512
PAGE = 4096


def remove(c: Path) -> None:
    """Delete a zarr array in memory, with all cores: to free its pages takes seconds."""
    rows = list(c.glob("c/*"))
    spread(lambda number: shutil.rmtree(rows[number], ignore_errors=True), len(rows))
    shutil.rmtree(c, ignore_errors=True)


def spread(work: Callable[[int], Any], count: int) -> list[Any]:
    """Call `work` with the numbers below `count`, in one thread per core."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(work, range(count)))


def fault_in(size: int) -> None:
    """Write to each page of `size` bytes once: a virtual machine may get its memory at the first use."""
    begun, size = time.time(), min(size, available_memory() * 3 // 4)
    memory = np.empty(size, np.uint8)
    part = -(-size // CORES)

    def touch(number: int) -> None:
        memory[number * part : (number + 1) * part : PAGE] = 1

    spread(touch, CORES)
    print(f"{size >> 30} GiB faulted in in {time.time() - begun:.1f} s", flush=True)


def filled(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    """Return an array of small integers. Each band of rows is a different rotation of the same rows."""
    made = np.empty(shape, dtype)
    one = np.random.default_rng(seed).integers(-3, 4, (min(BAND, shape[0]), shape[1])).astype(dtype)

    def fill(number: int) -> None:
        top = number * BAND
        rows, shift = min(BAND, shape[0] - top), number * 37 % shape[1]
        made[top : top + rows, shift:] = one[:rows, : shape[1] - shift]
        made[top : top + rows, :shift] = one[:rows, shape[1] - shift :]

    spread(fill, -(-shape[0] // BAND))
    return made


def touched(shape: tuple[int, int], dtype: str) -> Any:
    """Return an array for C whose pages are faulted in."""
    made = np.empty(shape, dtype)

    def touch(number: int) -> None:
        made[number * BAND : (number + 1) * BAND] = 0

    spread(touch, -(-shape[0] // BAND))
    return made


def pin(*arrays: Any) -> None:
    """Pin arrays for all GPUs. They stay pinned until the process ends."""
    from cupy.cuda import runtime

    for array in arrays:
        runtime.hostRegister(array.ctypes.data, array.nbytes, 1)


def digest_of(c: Any, size: int, dtype: str) -> int:
    """Return a digest of the bits of C that does not depend on how C is stored.

    It is the sum over all elements of their bits times a random weight of their row and of their column,
    modulo 2^64.
    """
    weights = np.random.default_rng(99).integers(0, 2**63, (2, size), np.uint64) * np.uint64(2) + np.uint64(1)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")

    def part(block: Any, top: int, left: int) -> int:
        rows, cols = block.shape
        across = block.view(bits).astype(np.uint64, copy=False) @ weights[1, left : left + cols]
        return int((across * weights[0, top : top + rows]).sum())

    if not isinstance(c, Path):
        parts = spread(lambda n: part(c[n * BAND : (n + 1) * BAND], n * BAND, 0), -(-size // BAND))
        return int(sum(parts)) % 2**64
    height, width = json.loads((c / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"]
    files = [(int(path.parent.name), int(path.name), path) for path in c.glob("c/*/*")]

    def stored(number: int) -> int:
        i, j, path = files[number]
        block = np.fromfile(path, dtype).reshape(height, width)
        top, left = i * height, j * width
        return part(np.ascontiguousarray(block[: size - top, : size - left]), top, left)

    return int(sum(spread(stored, len(files)))) % 2**64
