"""Calibrate: measure the rates of kernels, of copies between host and GPU, of memory and of storage.

Measurements use the same code for copies and products as real runs, and therefore find the rates of real
runs. The same code measures all backends.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import astuple, replace
from datetime import date
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

from oocgemm import backends, stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Array, known_dtypes, numpy_dtype
from oocgemm.engine.executor import Run
from oocgemm.engine.staging import Staging, Transfers, group_width, located, slot_views
from oocgemm.errors import BackendError, InputError
from oocgemm.machine.workbench import (
    Workbench,
    block_copy,
    explained,
    loading_seconds,
    numbers,
    per_second,
    plan_of,
    rate_of,
    streaming,
    typical,
)
from oocgemm.planning import (
    RATES,
    Budgets,
    Calibration,
    Candidate,
    GemmProblem,
    KernelRate,
    Kind,
    Layouts,
    MachineModel,
    Operation,
    Plan,
    Slots,
    StoreRates,
    TileShape,
    check_fit,
    check_link,
    default_model,
    fit_link,
)
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Retries
from oocgemm.system import cache
from oocgemm.system.installed import compiled
from oocgemm.system.resources import CpuTimes, allocate, available_memory, used_since
from oocgemm.values import dataclass

AT_ONCE = 4  # number of copies in each direction that are timed together
_FREE_SHARE = 0.5  # maximum share of the free device memory that a measurement occupies
# The matrix that is stored compressed is smaller than the other one by this factor: encoding takes longest.
PACKED_SHARE = 4
CACHED_AT_ONCE = 1 << 20  # bytes that a thread reads into the page cache at a time


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and durations of the measurements of a calibration.

    Attributes:
        side: rows and columns of C in a timed product, halved until the product fits into half of the free
            memory.
        depths: the extents along k of the timed products.
        block: shape of the float64 matrix with which page faults and copies are measured.
        copies: numbers of rows of this matrix. Copies between host and GPU are measured with each of them.
        seconds: duration of one measurement. Some measurements take three times as long.
        streamed: shape of the float64 matrix that is streamed from memory and from storage.
        chunk: rows and columns of the chunks in storage.
    """

    side: int
    depths: tuple[int, ...]
    block: tuple[int, int]
    copies: tuple[int, ...]
    seconds: float
    streamed: tuple[int, int] = (8192, 16384)
    chunk: int = 2048


# The default sizes for each backend. `side` is so large that products reach the full rate of the kernel. The
# matrices (256 MiB, and 1 GiB on a GPU) are larger than the processor's caches, so that copies use main
# memory. All threads together are so fast that with smaller matrices, mainly the start of threads would be
# measured.
SIZES = {
    "cuda": Sizes(8192, (256, 512, 1024, 2048, 4096), (8192, 4096), (32, 128, 512, 2048, 8192), 0.1),
    "host": Sizes(2048, (64, 128, 256, 512, 1024), (8192, 4096), (), 0.3, (4096, 8192), 1024),
}


def calibrate(
    backend: str = "auto",
    device: int = 0,
    path: str | os.PathLike[str] | None = None,
    *,
    sizes: Sizes | None = None,
    say: Callable[[str], None] = lambda doing: None,
) -> Calibration:
    """Measure the rates of this machine. With the default sizes, this takes less than a minute.

    Storage and memory are measured by products that the executor runs, with all I/O threads.

    Other programs that run at the same time make the rates lower.

    Args:
        backend: "cuda", "host", or "auto": cuda if a device is available.
        device: number of the CUDA device.
        path: folder whose storage is measured, with temporary files; None is the current folder.
        sizes: sizes and durations of the measurements; None selects `SIZES[backend]`.
        say: called with a description of each measurement before it starts.

    Returns:
        A `Calibration`, in flop/s, bytes per second and seconds. Save it with `oocgemm.system.cache.save`.

    Raises:
        InputError: the folder cannot be written to.
        BackendError: there is no such device or too little free memory, or the measured rates vary so much
            that the machine model cannot be fitted to them.
        ExecutionError: the disk fails or is full.
    """
    started, cpu = perf_counter(), CpuTimes.now()
    folder = Path.cwd() if path is None else Path(path)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(
            f"storage cannot be measured in {folder}: it is not a writable folder; choose one with --path"
        )
    engine = backends.open_backend(backend, device)
    say = partial(_say_for, engine.name, say)
    machine = default_model(engine.name, len(os.sched_getaffinity(0)), compiled() is not None)
    machine = replace(machine, multiprocessors=engine.multiprocessors())
    sizes = sizes or SIZES[engine.name]
    block = _affordable(sizes.block)
    copies = tuple(count for count in sizes.copies if count <= block[0])
    sizes = replace(sizes, block=block, copies=copies, streamed=_affordable(sizes.streamed))
    kernels, prepare, samples = kernel_rates(engine, machine, sizes, say)
    rates, moved = _links(engine, machine, sizes, numbers(sizes.block), say)
    say("issue")
    issue = _issue_seconds(engine, machine, sizes.seconds)
    source = numbers(sizes.streamed)
    say("memory")
    matrix, depth = stores.open_matrix("A", source), min(2 * sizes.chunk, source.shape[1])
    with streaming(engine, machine, matrix, depth) as run:  # all threads stage its panels
        memory = rate_of(matrix, typical(lambda: loading_seconds(run()), 3 * sizes.seconds))
    rates |= {"memory": memory} | ({"h2d": memory, "d2h": memory} if machine.unified else {})
    storage, decode = storage_rates(engine, machine, folder, source, sizes.chunk, 3 * sizes.seconds, say)
    if not all(map(isfinite, (*rates.values(), *astuple(storage), decode))):
        raise BackendError("an operation took no measurable time: run oocgemm calibrate again")
    seconds, used = perf_counter() - started, used_since(cpu)
    others = used["busy_seconds"] - used["own_seconds"] if used else 0.0
    return Calibration(
        machine=cache.machine_key(),
        backend=engine.name,
        device=backends.identity(engine),
        date=date.today().isoformat(),
        multiprocessors=machine.multiprocessors,
        kernels=kernels,
        rates=rates | {"prepare": prepare, "decode": decode, "issue": issue},
        stores={cache.file_system(folder): storage},
        samples={
            "kernels": samples,
            "copies": moved,
            "path": str(folder.absolute()),
            "link_limit": engine.link_limit(),
            "seconds": seconds,
            "cores_used_by_others": round(others / seconds, 2),
        },
    )


def _affordable(shape: tuple[int, int]) -> tuple[int, int]:
    """Return a shape with fewer rows, if four such float64 matrices exceed half of the available memory."""
    rows, cols = shape
    return max(1, min(rows, available_memory() // (64 * cols))), cols


def _say_for(backend: str, say: Callable[[str], None], doing: str) -> None:
    say(f"{backend}: {doing}")


def _links(
    engine: Backend, machine: MachineModel, sizes: Sizes, source: Array, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure copies between host and device, and the cost of page faults. Return rates and samples by name.

    Rates are in bytes per second, except two: `copy_latency`, in seconds, is the part of a copy's time that
    does not depend on its size. `arena_seconds_per_byte` is the time to fault in a byte of new memory. The
    samples are the measured rates of copies, by direction and then by size in bytes.
    """
    say("page faults")
    (rows, cols), matrix = sizes.block, stores.open_matrix("A", source)
    tile, first_touch = TileShape(rows, cols, cols), []
    for _ in range(3):
        with Workbench(engine, machine, "float64", tile, matrix) as bench:
            before, after = (_fill_seconds(bench) for _ in range(2))
            first_touch.append(max(0.0, before - after) / source.nbytes)
    rates = {"arena_seconds_per_byte": median(first_touch)}
    if machine.unified:
        return rates, {}
    samples: dict[str, Any] = {}
    with Workbench(engine, machine, "float64", tile) as bench:
        limit, latencies = engine.link_limit(), []
        for link in ("h2d", "d2h"):
            say(link)
            copies = {
                copy.bytes: copy
                for copy in (
                    bench.load(Kind.UPLOAD, "A", height) if link == "h2d" else bench.download(height)
                    for height in sizes.copies
                )
            }

            def rate(size: int, copies: Mapping[int, Operation] = copies) -> float:
                return per_second(size, typical(partial(bench.seconds, copies[size]), sizes.seconds))

            (latency, rates[link]), found = explained(rate, copies, partial(fit_link, link, limit=limit))
            latencies.append(latency)
            samples[link] = {str(size): found[size] for size in found}
        rates["copy_latency"] = max(latencies)
        say("h2d and d2h at once")
        directions = {"h2d": bench.load(Kind.UPLOAD, "A"), "d2h": bench.download(rows)}
        number = dict(enumerate(directions))

        def together(which: int) -> float:
            """Return the rate of one direction while copies in the other direction take place."""

            def once() -> float:
                intervals = bench.intervals(*list(directions.values()) * AT_ONCE)
                own = intervals[which::2]
                return _total_seconds(own) - AT_ONCE * rates["copy_latency"]

            return per_second(AT_ONCE * directions[number[which]].bytes, typical(once, sizes.seconds))

        def check(found: Mapping[int, float]) -> dict[str, float]:
            for which, rate in found.items():
                check_link(f"{number[which]} at once with the other direction", rate, limit)
            return {number[which]: rate for which, rate in found.items()}

        at_once, _ = explained(together, number, check)
        samples["both ways"] = sum(at_once.values())
        # Runs copy in both directions at once. Use the lower rate if this makes copies slower.
        rates |= {link: min(rates[link], rate) for link, rate in at_once.items()}
    return rates, samples


def _fill_seconds(bench: Workbench) -> float:
    """Copy A from the caller's memory through a host buffer to the device, and return the seconds."""
    started = perf_counter()
    read = bench.load(Kind.READ, "A")
    bench.staging.transfer(read, [bench.slot(read)])
    if not bench.plan.machine.unified:
        bench.intervals(bench.load(Kind.UPLOAD, "A"))
    return perf_counter() - started


def _issue_seconds(engine: Backend, machine: MachineModel, seconds: float) -> float:
    """Return the seconds that the host needs to start an operation, from a run whose tiles are tiny."""
    side, tile = 8 * 64, TileShape(64, 64, 64)
    host = 0 if machine.unified else 2
    slots = Slots(2, 2, 1, host, host, host, strip=tile.m, unified=machine.unified)
    room = available_memory()
    problem = GemmProblem.of(side, side, side, "float64", "float64", "float64", "float64")
    plan = Plan(problem, Layouts(), Budgets(room, room), machine, Candidate(tile, slots))
    matrices = {name: stores.open_matrix(name, numbers((side, side))) for name in "ABC"}
    with ExitStack() as cleanup:
        staging = Staging(plan, matrices)
        cleanup.callback(staging.close)
        session = engine.open(plan, "auto")
        cleanup.callback(session.close)

        def once() -> float:
            ended: list[int] = []
            origin = perf_counter_ns()
            Run(plan, session, staging, origin, [lambda span: ended.append(span.end)]).execute()
            return max(ended) / 1e9 / len(ended)

        return typical(once, 3 * seconds)


def _total_seconds(intervals: Sequence[tuple[int, int]]) -> float:
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9


def kernel_rates(
    engine: Backend, machine: MachineModel, sizes: Sizes, say: Callable[[str], None]
) -> tuple[dict[str, KernelRate], float, dict[str, dict[str, float]]]:
    """Measure the rate of products for each dtype and precision.

    Returns three results: the fitted rates, by their names in `RATES`; the lowest rate, in bytes per second,
    of the operation Prepare, which splits the operands of emulated products; and the measured flop/s, by name
    and then by extent along k.
    """
    some = numbers((64, 1024)).reshape(-1)
    fitted, prepare, samples = {}, [], {}
    for name, (dtype, compute) in RATES.items():
        if dtype not in known_dtypes():
            continue
        tile = _fitting(engine, machine, dtype, sizes, compute)
        with Workbench(engine, machine, dtype, tile, compute=compute) as bench:
            for operand in "AB":
                bench.fill(operand, some.astype(numpy_dtype(dtype)))
            fitted[name], rates = _kernel(bench, name, sizes, say)
            if bench.plan.problem.planes:
                split = bench.prepare(max(rates))
                prepare.append(split.bytes / typical(partial(bench.seconds, split), sizes.seconds))
            samples[name] = {str(depth): rate for depth, rate in rates.items()}
    return fitted, min(prepare), samples


def _kernel(
    bench: Workbench, name: str, sizes: Sizes, say: Callable[[str], None]
) -> tuple[KernelRate, dict[int, float]]:
    """Measure products of several extents along k (depths). Return the fitted rate, and flop/s by depth."""
    seen: dict[int, float] = {}

    def rate(depth: int) -> float:
        say(f"{name}, panels {depth} deep")
        if bench.plan.problem.planes:
            bench.intervals(bench.prepare(depth))
        if not seen:
            bench.intervals(bench.multiply(depth, first=True))  # initialise C, to which later products add
        operation = bench.multiply(depth)
        seen[depth] = per_second(operation.flops, typical(partial(bench.seconds, operation), sizes.seconds))
        return seen[depth]

    def depths() -> Iterator[int]:
        for depth in sizes.depths:
            if len(seen) >= 2 and bench.multiply(depth).flops > 4 * sizes.seconds * max(seen.values()):
                return  # a product of this depth would take too long, and two depths suffice for the fit
            yield depth

    def fit(rates: Mapping[int, float]) -> KernelRate:
        ideal = _of_infinite_tile(bench.plan, rates)
        found = KernelRate.fitted(ideal)
        check_fit(
            name, "FLOP", ideal, lambda r: found.peak / (1 + found.half_depth / r), "panels {} deep".format
        )
        return found

    return explained(rate, depths(), fit)


def _of_infinite_tile(plan: Plan, rates: Mapping[int, float]) -> dict[int, float]:
    """Convert measured flop/s, by extent along k, to those of products with infinite m and n.

    The caller fits a `KernelRate` to the result. The machine model predicts lower flop/s for finite m and n;
    this function inverts the reduction.
    """
    tile = plan.tile
    ideal = replace(plan.machine, kernels={plan.problem.rate: KernelRate(1.0, 0.0)})
    loss = ideal.multiply_seconds(plan.problem.rate, 1.0, tile.m, tile.n, tile.k)
    loss *= ideal.wave_quantization(plan.problem.rate, tile.m, tile.n)
    return {depth: rate * loss for depth, rate in rates.items()}


def _fitting(engine: Backend, machine: MachineModel, dtype: str, sizes: Sizes, compute: str) -> TileShape:
    """Return m, n and k of the product to time. Raises `BackendError` if even a small product does not fit.

    m and n are `sizes.side`, or half of it for emulated products on the host, which take long. They are
    halved until the product fits into the share `_FREE_SHARE` of the free device memory.
    """
    slow = machine.shares_cores and compute == "emulated"
    side, free = sizes.side // 2 if slow else sizes.side, engine.free_memory()
    while True:
        tile = TileShape(side, side, sizes.depths[-1])
        if plan_of(machine, dtype, tile, compute).footprint.device_total <= _FREE_SHARE * free:
            return tile
        if side < 64:
            raise BackendError(
                f"{format_size(free)} of free memory is too little to calibrate: a tile of {side} x {side} "
                "does not fit; end other programs"
            )
        side //= 2


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

    `source` is the float64 content of temporary arrays with chunks of `chunk` rows and columns. Returns the
    rates of the file system, and the rate at which all cores together decode zstd chunks, in bytes per
    second.
    """
    temporary = tempfile.TemporaryDirectory(prefix=".oocgemm-calibrate-", dir=folder)
    with temporary:

        def rate(path: Path, depth: int, *, cold: bool = False) -> float:
            place = _evict if cold else _cache
            place(path)
            matrix = stores.open_matrix("A", str(path))  # checks whether the page cache has the files
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
        # Read panels with half of the columns of each chunk, whose bytes are not contiguous.
        scattered = rate(raw, max(1, chunk // 2))
        say("decoding zstd")
        fewer = max(1, source.shape[1] // PACKED_SHARE)
        packed, _ = _written(machine, temporary.name, source[:, :fewer], chunk, "zstd", 0.0)
        decode = rate(packed, min(chunk, fewer))
    return StoreRates(read=read, read_scattered=scattered, read_cold=cold, write=write), decode


def _written(
    machine: MachineModel, folder: str, source: Array, chunk: int, compressor: str, seconds: float
) -> tuple[Path, float]:
    """Write a matrix to a new array, strip by strip, like a run that writes a tile of C.

    Repeats this for `seconds`. Returns the path of the array, and the bytes per second, including the flush
    to the disk.
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
    columns = slot_views(fill, allocate(source.nbytes), source.dtype, group_width(plan, "C"))
    for _, (first, last), part in located(fill, columns):
        part[...] = source[:, first:last]
    with closing(Transfers(plan, {"C": matrix}, Retries())) as transfers:

        def once() -> float:
            started = perf_counter()
            transfers.write(fill, columns)
            if isinstance(matrix, stores.Resumable):
                matrix.sync_blocks([(fill.m, fill.n)])
            return perf_counter() - started

        return where, per_second(fill.bytes, typical(once, seconds))


def _evict(folder: Path) -> None:
    """Evict the files in a folder from the page cache, so that the next read comes from the disk.

    Linux cannot evict dirty pages: it starts to write them back, and a later call evicts them.
    """
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _cache(folder: Path) -> None:
    """Read the files in a folder into the page cache. Large chunks were written past the page cache."""
    with ThreadPoolExecutor() as pool:
        deque(pool.map(_read_through, _files(folder)), maxlen=0)


def _read_through(path: Path) -> None:
    buffer = bytearray(CACHED_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
