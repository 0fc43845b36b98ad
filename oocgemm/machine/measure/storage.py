"""Measure the rates of a file system: reading, writing, and decoding zstd chunks."""

import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Array
from oocgemm.engine.blocks import located, slot_views
from oocgemm.engine.transfers import Transfers
from oocgemm.machine.measure.sampling import per_second, typical
from oocgemm.machine.measure.streaming import loading_seconds, rate_of, streaming
from oocgemm.machine.measure.workbench import block_copy, plan_of
from oocgemm.planning import Kind, MachineModel, StoreRates, TileShape
from oocgemm.stores.retries import Retries
from oocgemm.system.memory import allocate

# The compressed matrix is this much smaller than the uncompressed one: encoding takes longest.
PACKED_SHARE = 4
CACHED_AT_ONCE = 1 << 20  # bytes that a thread reads into the page cache at a time


def storage_rates(
    engine: Backend,
    machine: MachineModel,
    folder: Path,
    source: Array,
    chunk: int,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[StoreRates, float]:
    """Measure the rates of the file system of a folder, with the products of `streaming`.

    Args:
        engine, machine: the backend and its model.
        folder: where temporary zarr arrays are written.
        source: a float64 matrix, the content of these arrays.
        chunk: rows and columns of the chunks.
        seconds: duration of each measurement.
        say: called with a description of each measurement before it starts.

    Returns:
        The rates of the file system, and the rate at which all cores together decode zstd chunks. All are in
        bytes per second.
    """
    temporary = tempfile.TemporaryDirectory(prefix=".oocgemm-calibrate-", dir=folder)
    with temporary:

        def rate(path: Path, depth: int, *, cold: bool = False) -> float:
            place = _evict if cold else _cache
            place(path)
            matrix = stores.open_matrix("A", str(path))  # finds out whether the page cache has the files
            with streaming(engine, machine, matrix, depth) as run:

                def once() -> float:
                    if cold:
                        _evict(path)
                    return loading_seconds(run())

                return rate_of(matrix, typical(once, seconds))

        say(f"writing in {folder}")
        raw, write = _written(machine, temporary.name, source, chunk, "none", seconds)
        say(f"reading in {folder}")
        cold, read = rate(raw, chunk, cold=True), rate(raw, chunk)
        # Panels with half of the columns of each chunk, so that the bytes to read are not contiguous.
        scattered = rate(raw, max(1, chunk // 2))
        say("decoding zstd")
        fewer = max(1, source.shape[1] // PACKED_SHARE)
        packed, _ = _written(machine, temporary.name, source[:, :fewer], chunk, "zstd", 0.0)
        decode = rate(packed, min(chunk, fewer))
    return StoreRates(read=read, read_scattered=scattered, read_cold=cold, write=write), decode


def _written(
    machine: MachineModel, folder: str, source: Array, chunk: int, compressor: str, seconds: float
) -> tuple[Path, float]:
    """Write a matrix to a new array, strip by strip, as a run writes a tile of C.

    Writing is repeated for `seconds`. Returns the path of the array, and the bytes per second including the
    flush to the disk.
    """
    rows, cols = source.shape
    shape = min(chunk, rows), min(chunk, cols)
    where = Path(folder, compressor)
    matrix = stores.create_output("C", str(where), source.shape, source.dtype, shape, compressor)
    threads = max(1, machine.codec_threads) if compressor != "none" else machine.io_threads
    plan = plan_of(replace(machine, io_threads=threads), "float64", TileShape(rows, cols, 1))
    layouts = replace(plan.layouts, c=matrix.layout)
    plan = replace(plan, layouts=layouts)
    fill = block_copy(Kind.WRITE, "C", (0, rows), (0, cols), source.itemsize)
    columns = slot_views(plan, fill, allocate(source.nbytes), source.dtype)
    for _, (first, last), part in located(plan, fill, columns):
        part[...] = source[:, first:last]
    with closing(Transfers(plan, {"C": matrix}, Retries())) as transfers:

        def once() -> float:
            started = perf_counter()
            transfers.write(fill, columns)
            matrix.sync()
            return perf_counter() - started

        return where, per_second(fill.bytes, typical(once, seconds))


def _evict(folder: Path) -> None:
    """Evict the files in a folder from the page cache, so that the next read comes from the disk.

    Linux cannot evict dirty pages. It starts to write them back, and a later call evicts them. A sync is
    not used, because it could wait for the writes of other programs.
    """
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _cache(folder: Path) -> None:
    """Read the files in a folder, so that the page cache has them. Large chunks are written past it."""
    with ThreadPoolExecutor() as pool:
        deque(pool.map(_read_through, _files(folder)), maxlen=0)


def _read_through(path: Path) -> None:
    buffer = bytearray(CACHED_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
