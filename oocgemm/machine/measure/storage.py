"""Measure the rates of a file system: reading, writing, and decoding zstd chunks."""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from oocgemm import stores
from oocgemm.backends.base import Array
from oocgemm.engine.staging import Staging
from oocgemm.machine.measure.sampling import typical
from oocgemm.machine.measure.workbench import block_copy, plan_of, transfer_seconds
from oocgemm.planning import Kind, MachineModel, StoreRates, TileShape
from oocgemm.planning.tiling import Range
from oocgemm.system.memory import allocate


def storage_rates(
    machine: MachineModel, folder: Path, source: Array, seconds: float, say: Callable[[str], None]
) -> tuple[StoreRates, float]:
    """Measure the rates of the file system of a folder.

    Args:
        machine: the machine model; only its number of I/O threads is used.
        folder: where temporary zarr arrays are written.
        source: a float64 matrix, the content of these arrays.
        seconds: duration of each measurement.
        say: called with a description of each measurement before it starts.

    Returns:
        The rates of the file system, and the rate at which all cores together decode zstd chunks. All are in
        bytes per second.
    """
    data = source.reshape(2 * source.shape[0], -1)
    rows, cols = data.shape
    side, cores = max(1, cols // 2), len(os.sched_getaffinity(0))
    buffer = allocate(data.nbytes).view(data.dtype).reshape(data.shape)
    temporary = tempfile.TemporaryDirectory(prefix=".oocgemm-calibrate-", dir=folder)
    with temporary, ExitStack() as cleanup:

        def array(name: str, compressor: str, threads: int) -> Staging:
            where = os.path.join(temporary.name, name)
            matrix = stores.create_output(name, where, data.shape, data.dtype, (side, side), compressor)
            plan = plan_of(replace(machine, io_threads=threads), "float64", TileShape(rows, cols, cols))
            staging = Staging(plan, {"A": matrix, "C": matrix})
            cleanup.callback(staging.close)
            return staging

        def rate(staging: Staging, columns: Range = (0, cols), *, cold: bool = False) -> float:
            operation = block_copy(Kind.READ, "A", (0, rows), columns, data.itemsize)

            def once() -> float:
                if cold:
                    _evict(Path(temporary.name))
                return transfer_seconds(staging, operation, buffer[:, : columns[1] - columns[0]])

            return operation.bytes / typical(once, seconds)

        fill = block_copy(Kind.WRITE, "C", (0, rows), (0, cols), data.itemsize)
        raw, packed = array("raw", "none", machine.io_threads), array("packed", "zstd", cores)
        say(f"writing in {folder}")
        write = fill.bytes / typical(partial(transfer_seconds, raw, fill, data), seconds)
        say(f"reading in {folder}")
        cold, read = rate(raw, cold=True), rate(raw)
        # This range covers half of the columns of each chunk, so the bytes to read are not contiguous.
        scattered = rate(raw, (side // 2, side // 2 + side))
        say("decoding zstd")
        transfer_seconds(packed, fill, data)
        decode = rate(packed)
    return StoreRates(read=read, read_scattered=scattered, read_cold=cold, write=write), decode


def _evict(folder: Path) -> None:
    """Evict the files in a folder from the page cache, so that the next read comes from the disk.

    Linux cannot evict dirty pages. It starts to write them back, and a later call evicts them. A sync is
    not used, because it could wait for the writes of other programs.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
