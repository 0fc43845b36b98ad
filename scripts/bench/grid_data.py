"""Operands of `bench_grid.py`: fast to make, checked without a second product, reused between cases.

An operand repeats a small random block. The block extents are primes, so that a block read from a wrong place
gives a wrong product. A row of C is checked against float64 sums over the blocks.
"""

import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from grid_cases import CHUNKS, COLD, Case

from oocgemm.backends.base import numpy_dtype

CORES = len(os.sched_getaffinity(0))
A_BLOCK, B_BLOCK = (251, 1021), (509, 509)
BAND_BYTES = 32 << 20
CHECKED_ROWS = 5
# Rounding errors allowed, in units of the accumulator's eps times |A| |B|, and of C's eps times |C|.
SUM_UNITS, RESULT_UNITS = 64, 4


class Operands:
    """A, B and C of the current case in three reused buffers of host memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}
        self._made: dict[str, tuple[Any, ...]] = {}
        self._pool = ThreadPoolExecutor(CORES)

    def make(self, case: Case) -> tuple[Any, Any, Any]:
        """Return A, B and C of a case. C is filled with bytes that are no product."""
        a = self._operand("a", (case.m, case.k), case.dtype, A_BLOCK)
        b = self._operand("b", (case.k, case.n), case.dtype, B_BLOCK)
        c = self._view("c", (case.m, case.n), case.c_dtype)
        self.spoil(c)
        return a, b, c

    def spoil(self, c: Any) -> None:
        """Overwrite C with 0xff: NaN for floats."""
        flat = c.reshape(-1).view(np.uint8)
        list(
            self._pool.map(lambda at: flat[at : at + BAND_BYTES].fill(0xFF), range(0, flat.size, BAND_BYTES))
        )

    def _operand(self, which: str, shape: tuple[int, int], dtype: str, extents: tuple[int, int]) -> Any:
        x = self._view(which, shape, dtype)
        if self._made.get(which) != (shape, dtype):
            self._made.pop(which, None)
            self._fill(x, block(dtype, extents))
            self._made[which] = (shape, dtype)
        return x

    def _view(self, which: str, shape: tuple[int, int], dtype: str) -> Any:
        size = math.prod(shape) * numpy_dtype(dtype).itemsize
        if which not in self._buffers or self._buffers[which].size < size:
            self._made.pop(which, None)
            self._buffers.pop(which, None)  # free the old one first
            self._buffers[which] = np.empty(size, np.uint8)
        return self._buffers[which][:size].view(numpy_dtype(dtype)).reshape(shape)

    def _fill(self, x: Any, source: Any) -> None:
        """Repeat a block over x, by all cores."""
        x, source = (y.view(f"u{y.itemsize}") if y.itemsize < 16 else y for y in (x, source))
        height = min(x.shape[0], source.shape[0])

        def row(i: int) -> None:
            x[i] = np.resize(source[i], x.shape[1])

        list(self._pool.map(row, range(height)))
        if x.shape[1] * x.itemsize > BAND_BYTES // 16:
            list(self._pool.map(lambda i: np.copyto(x[i], x[i % height]), range(height, x.shape[0])))
            return
        # Bands of whole repetitions; a narrow operand gets a band of many.
        count = max(1, BAND_BYTES // (height * x.shape[1] * x.itemsize))
        band = np.concatenate([x[:height]] * count) if count > 1 else x[:height]

        def copy(first: int) -> None:
            part = x[first : first + len(band)]
            part[...] = band[: len(part)]

        list(self._pool.map(copy, range(height, x.shape[0], len(band))))


def block(dtype: str, extents: tuple[int, int]) -> Any:
    """Return the random block that an operand repeats: integers up to 8 for int8, else normal numbers."""
    rng = np.random.default_rng(extents)
    if dtype == "int8":
        return rng.integers(-8, 9, extents, np.int8)
    found = rng.standard_normal(extents)
    if dtype.startswith("complex"):
        found = found + 1j * rng.standard_normal(extents)
    return found.astype(numpy_dtype(dtype))


def is_right(case: Case, c: Any) -> bool:
    """Return whether rows of C, in memory or stored, are right within rounding error."""
    wide = np.complex128 if case.dtype.startswith("complex") else np.float64
    left, right = (block(case.dtype, extents).astype(wide) for extents in (A_BLOCK, B_BLOCK))
    columns = np.arange(case.n) % B_BLOCK[1]
    for i in sorted({(case.m - 1) * part // (CHECKED_ROWS - 1) for part in range(CHECKED_ROWS)}):
        row = np.resize(left[i % A_BLOCK[0]], case.k)
        expected, size = (
            (_folded(x, B_BLOCK[0]) @ y)[columns] for x, y in ((row, right), (abs(row), abs(right)))
        )
        found = np.asarray(c[i : i + 1, :]).reshape(-1).astype(wide)
        if case.dtype == "int8":
            limit = np.zeros(case.n)
        else:
            stored = _eps(case.dtype)
            limit = SUM_UNITS * min(stored, 2.0**-23) * size + RESULT_UNITS * stored * abs(expected)
        if not np.all(abs(found - expected) <= limit):  # NaN is not
            return False
    return True


def _eps(dtype: str) -> float:
    known = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "complex64": 2.0**-23}
    return known.get(dtype, 2.0**-52)


def _folded(row: Any, period: int) -> Any:
    """Return the sums of the elements of a row whose positions are equal modulo a period."""
    whole = np.zeros(-(-row.size // period) * period, row.dtype)
    whole[: row.size] = row
    return whole.reshape(-1, period).sum(axis=0)


class Files:
    """Stored operands below a folder. They are kept for the next case, and removed to make room."""

    def __init__(self, folder: Path, max_bytes: int = 16 << 30) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._made: dict[Path, int] = {}

    def store(self, case: Case, a: Any, b: Any) -> tuple[Path, Path]:
        """Return the paths of A and B, written and synced to the disk if they are not there yet."""
        found = []
        for name, x in (("a", a), ("b", b)):
            path = self._folder / f"{name}-{x.shape[0]}x{x.shape[1]}-{case.dtype}-{_format(case)}"
            path = path.with_suffix(_ending(case))
            found.append(path)
            if path not in self._made:
                self._make_room(x.nbytes, found)
                self._write(path, case, x)
                self._made[path] = x.nbytes
        return found[0], found[1]

    def product(self, case: Case, who: str) -> Path:
        """Return the path of C; nothing exists there."""
        path = self._folder / f"c-{who}{_ending(case)}"
        remove(path)
        return path

    def open_product(self, case: Case, path: Path) -> Any:
        """Create C for a loop that writes slices; chunks are those of the operands."""
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, "w+", case.c_dtype, (case.m, case.n))
        return _new_zarr(path, (case.m, case.n), case)

    def _make_room(self, size: int, needed: list[Path]) -> None:
        for path in list(self._made):
            if path not in needed and sum(self._made.values()) + size > self._max_bytes:
                remove(path)
                del self._made[path]

    def _write(self, path: Path, case: Case, x: Any) -> None:
        remove(path)
        if path.suffix == ".npy":
            np.save(path, x)
        else:
            array = _new_zarr(path, x.shape, case)
            step = array.chunks[0] if x.shape[0] >= x.shape[1] else array.chunks[1]
            long = 0 if x.shape[0] >= x.shape[1] else 1

            def fill(first: int) -> None:
                part = (slice(first, first + step), slice(None))[:: 1 if long == 0 else -1]
                array[part] = x[part]

            with ThreadPoolExecutor(min(8, CORES)) as pool:
                list(pool.map(fill, range(0, x.shape[long], step)))
        sync(path)


def read_array(path: Path) -> Any:
    """Return a stored array, read by slicing."""
    return np.load(path, mmap_mode="r") if path.suffix == ".npy" else zarr.open_array(path, mode="r")


def files_of(*paths: Path) -> list[Path]:
    """Return the files that hold elements of stored arrays."""
    return [file for path in paths for file in _files(path) if file.name != "zarr.json"]


def sync(*paths: Path) -> None:
    """Have the disk hold all files of stored arrays."""

    def one(file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [file for path in paths for file in _files(path)]))


def evict(*paths: Path) -> None:
    """Evict stored arrays from the page cache."""
    sync(*paths)
    for file in files_of(*paths):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a stored array, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(path: Path) -> Iterator[Path]:
    return filter(Path.is_file, path.rglob("*")) if path.is_dir() else iter((path,))


def _format(case: Case) -> str:
    return case.source.removeprefix("cold-") if case.source in COLD else case.source


def _ending(case: Case) -> str:
    return ".zarr" if case.source in CHUNKS else ".npy"


def _new_zarr(path: Path, shape: tuple[int, int], case: Case) -> Any:
    side = CHUNKS[case.source]
    chunks = tuple(min(side, extent) for extent in shape)
    return zarr.create_array(path, shape=shape, dtype=case.c_dtype, chunks=chunks, compressors=None)
