"""Measures what a machine does: kernels, links, memory and storage.

All of it goes through the engine's own pieces, a session and a staging, with operations made by hand: so that what
is measured is what runs get, and no device needs code of its own here.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from oocgemm import backends, stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Array, known_dtypes, numpy_dtype
from oocgemm.engine.executor import Run
from oocgemm.engine.staging import Staging
from oocgemm.errors import BackendError, InputError
from oocgemm.machine.sampling import explained, per_second, typical
from oocgemm.machine.workbench import Workbench, moving, plan_of
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
from oocgemm.planning.tiling import Range
from oocgemm.system import cache
from oocgemm.system.cpu import CpuTimes, used_since
from oocgemm.system.memory import allocate, available_memory

_FREE_SHARE = 0.5  # of the memory that is free


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured on, and for how long: tiles of `side` squared with panels of these depths, copies of these
    many rows of the `block`, and for each measurement so many seconds (storage three times that)."""

    side: int
    depths: tuple[int, ...]
    block: tuple[int, int]
    copies: tuple[int, ...]
    seconds: float


# Tiles that saturate the kernel, and a block well above the processor's caches: 256 MiB in float64.
SIZES = {
    "cuda": Sizes(8192, (256, 512, 1024, 2048, 4096), (8192, 4096), (32, 128, 512, 2048, 8192), 0.3),
    "host": Sizes(2048, (64, 128, 256, 512, 1024), (8192, 4096), (), 0.3),
}


def calibrate(
    backend: str = "auto",
    device: int = 0,
    path: str | os.PathLike[str] | None = None,
    *,
    sizes: Sizes | None = None,
    say: Callable[[str], None] = lambda doing: None,
) -> Calibration:
    """Measure this machine, in under a minute; nothing else should run on it meanwhile.

    Args:
        backend: "cuda", "host", or "auto": cuda where a device answers.
        device: number of the CUDA device.
        path: the folder whose storage is measured, by files that are taken away again; None for the current one.
        sizes: how much is measured on; None for what suits the backend.
        say: called with what is being measured.

    Returns:
        A `Calibration`: flop/s, bytes per second, seconds. It is not kept: `oocgemm.system.cache.save` does that.

    Raises:
        InputError: a folder that cannot be written to.
        BackendError: no such device, not the memory to measure in, or rates that cannot be or that no fit explains.
        ExecutionError: a disk that fails or is full.
    """
    started, cpu = perf_counter(), CpuTimes.now()
    folder = Path.cwd() if path is None else Path(path)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(
            f"storage cannot be measured in {folder}: give a folder that can be written to with --path"
        )
    engine = backends.open_backend(backend, device)
    say = _naming(engine, say)
    machine = default_model(engine.name, len(os.sched_getaffinity(0)))
    machine = replace(machine, multiprocessors=engine.multiprocessors())
    sizes = sizes or SIZES[engine.name]
    rows, cols = sizes.block
    rows = max(1, min(rows, available_memory() // (64 * cols)))  # four blocks are held at a time, at most
    sizes = replace(sizes, block=(rows, cols), copies=tuple(c for c in sizes.copies if c <= rows))
    source = _numbers(sizes.block)
    kernels, prepare, samples = _kernels(engine, machine, sizes, say)
    rates, copies = _links(engine, machine, sizes, source, say)
    say("issuing")
    issue = _issuing(engine, machine, sizes.seconds)
    storage, decode = _storage(machine, folder, sizes, source, say)
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
            "copies": copies,
            "path": str(folder.absolute()),
            "link_limit": engine.link_limit(),
            "seconds": seconds,
            "cores_used_by_others": round(others / seconds, 2),
        },
    )


def _naming(engine: Backend, say: Callable[[str], None]) -> Callable[[str], None]:
    """Have `say` name the backend that is measured."""
    return lambda doing: say(f"{engine.name}: {doing}")


def _kernels(
    engine: Backend, machine: MachineModel, sizes: Sizes, say: Callable[[str], None]
) -> tuple[dict[str, KernelRate], float, dict[str, dict[str, float]]]:
    """Measure the multiplication, by what is multiplied and how.

    Returns:
        Fitted rates; bytes per second of panels that are split into planes of residues, of the dtype where that is slowest;
        measured flop/s by panel depth.
    """
    numbers = _numbers((64, 1024)).reshape(-1)
    fitted, prepare, samples = {}, [], {}
    for name, (dtype, compute) in RATES.items():
        if dtype not in known_dtypes():
            continue
        tile = _fitting(engine, machine, dtype, sizes, compute)
        with Workbench(engine, machine, dtype, tile, compute=compute) as bench:
            for operand in "AB":
                bench.fill(operand, numbers.astype(numpy_dtype(dtype)))
            fitted[name], rates = _kernel(bench, name, sizes, say)
            if bench.plan.problem.planes:
                split = bench.prepare(max(rates))
                prepare.append(split.bytes / typical(partial(bench.seconds, split), sizes.seconds))
            samples[name] = {str(depth): rate for depth, rate in rates.items()}
    return fitted, min(prepare), samples


def _kernel(
    bench: Workbench, name: str, sizes: Sizes, say: Callable[[str], None]
) -> tuple[KernelRate, dict[int, float]]:
    """Measure the multiplication on a bench; return what is fitted to flop/s by panel depth, and these."""
    seen: dict[int, float] = {}

    def rate(depth: int) -> float:
        say(f"{name}, panels {depth} deep")
        if bench.plan.problem.planes:
            bench.intervals(bench.prepare(depth))
        if not seen:
            bench.intervals(bench.multiply(depth, first=True))  # whatever C held is gone
        operation = bench.multiply(depth)
        seen[depth] = per_second(operation.flops, typical(partial(bench.seconds, operation), sizes.seconds))
        return seen[depth]

    def depths() -> Iterator[int]:
        for depth in sizes.depths:
            if len(seen) >= 2 and bench.multiply(depth).flops > 4 * sizes.seconds * max(seen.values()):
                return  # a slow machine: two depths make a line
            yield depth

    def fit(rates: Mapping[int, float]) -> KernelRate:
        ideal = _whole(bench.plan, rates)
        found = KernelRate.fitted(ideal)
        check_fit(
            name, "FLOP", ideal, lambda r: found.peak / (1 + found.half_depth / r), "panels {} deep".format
        )
        return found

    return explained(rate, depths(), fit)


def _whole(plan: Plan, rates: Mapping[int, float]) -> dict[int, float]:
    """Rates as they would be on a tile without end: the model accounts for the extents of tiles by itself."""
    tile = plan.tile
    ideal = replace(plan.machine, kernels={plan.problem.rate: KernelRate(1.0, 0.0)})
    loss = ideal.multiply_seconds(plan.problem.rate, 1.0, tile.m, tile.n, tile.k)
    loss *= ideal.wave_quantization(plan.problem.rate, tile.m, tile.n)
    return {depth: rate * loss for depth, rate in rates.items()}


def _fitting(engine: Backend, machine: MachineModel, dtype: str, sizes: Sizes, compute: str) -> TileShape:
    """The tile to multiply on: smaller where memory is short. Raises `BackendError` where there is next to none."""
    side, free = sizes.side, engine.free_memory()
    while True:
        tile = TileShape(side, side, sizes.depths[-1])
        if plan_of(machine, dtype, tile, compute).footprint.device_total <= _FREE_SHARE * free:
            return tile
        if side < 64:
            raise BackendError(f"{free} bytes of free memory are too few to calibrate in: free some of it")
        side //= 2


def _links(
    engine: Backend, machine: MachineModel, sizes: Sizes, source: Array, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Copies within memory, and over the links where there are any; what the first use of memory costs."""
    say("memory")
    (rows, cols), matrix = sizes.block, stores.open_matrix("A", source)
    tile, first_use, again = TileShape(rows, cols, cols), [], []
    for _ in range(3):
        with Workbench(engine, machine, "float64", tile, matrix) as bench:
            before, after = (_fill_seconds(bench) for _ in range(2))
            first_use.append(max(0.0, before - after) / source.nbytes)
            read = bench.load(Kind.READ, "A")
            again.append(typical(partial(_wall, bench.staging, read, bench.slot(read)), sizes.seconds))
    rates = {"arena_seconds_per_byte": median(first_use), "memory": source.nbytes / median(again)}
    if machine.unified:
        return rates | {"h2d": rates["memory"], "d2h": rates["memory"]}, {}
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
        both = [bench.load(Kind.UPLOAD, "A"), bench.download(rows)] * 4

        def together(size: int) -> float:
            return per_second(size, typical(lambda: _span(bench.intervals(*both)), sizes.seconds))

        def check(found: Mapping[int, float]) -> float:
            (total,) = found.values()
            check_link("half of h2d and d2h at once", total / 2, limit)
            return total

        samples["both ways"], _ = explained(together, [sum(copy.bytes for copy in both)], check)
    return rates, samples


def _fill_seconds(bench: Workbench) -> float:
    """Seconds to bring a panel from memory onto the device."""
    started = perf_counter()
    read = bench.load(Kind.READ, "A")
    bench.staging.transfer(read, [bench.slot(read)])
    if not bench.plan.machine.unified:
        bench.intervals(bench.load(Kind.UPLOAD, "A"))
    return perf_counter() - started


def _issuing(engine: Backend, machine: MachineModel, seconds: float) -> float:
    """Seconds an operation of a run that has next to nothing to do but to issue them."""
    side, tile = 8 * 64, TileShape(64, 64, 64)
    host = 0 if machine.unified else 2
    slots = Slots(2, 2, 1, host, host, host, strip=tile.m, unified=machine.unified)
    room = available_memory()
    problem = GemmProblem(side, side, side, "float64", "float64", "float64", "float64")
    plan = Plan(problem, Layouts(), Budgets(room, room), machine, Candidate(tile, slots))
    matrices = {name: stores.open_matrix(name, _numbers((side, side))) for name in "ABC"}
    with ExitStack() as cleanup:
        staging = Staging(plan, matrices)
        cleanup.callback(staging.close)
        session = engine.open(plan, "auto")
        cleanup.callback(session.close)

        def once() -> float:
            ended: list[int] = []
            origin = perf_counter_ns()
            Run(plan, session, staging, origin, lambda span: ended.append(span.end)).execute()
            return max(ended) / 1e9 / len(ended)

        return typical(once, 3 * seconds)


def _storage(
    machine: MachineModel, folder: Path, sizes: Sizes, source: Array, say: Callable[[str], None]
) -> tuple[StoreRates, float]:
    """Rates of the file system at a folder, and bytes a second that all cores decode."""
    data = source.reshape(2 * source.shape[0], -1)
    rows, cols = data.shape
    side, cores = max(1, cols // 2), len(os.sched_getaffinity(0))
    room = allocate(data.nbytes).view(data.dtype).reshape(data.shape)
    place = tempfile.TemporaryDirectory(prefix=".oocgemm-calibrate-", dir=folder)
    with place, ExitStack() as cleanup:

        def array(name: str, compressor: str, threads: int) -> Staging:
            where = os.path.join(place.name, name)
            matrix = stores.create_output(name, where, data.shape, data.dtype, (side, side), compressor)
            plan = plan_of(replace(machine, io_threads=threads), "float64", TileShape(rows, cols, cols))
            staging = Staging(plan, {"A": matrix, "C": matrix})
            cleanup.callback(staging.close)
            return staging

        def rate(staging: Staging, columns: Range = (0, cols), *, cold: bool = False) -> float:
            operation = moving(Kind.READ, "A", (0, rows), columns, data.itemsize)

            def once() -> float:
                if cold:
                    _evict(Path(place.name))
                return _wall(staging, operation, room[:, : columns[1] - columns[0]])

            return operation.bytes / typical(once, 3 * sizes.seconds)

        fill = moving(Kind.WRITE, "C", (0, rows), (0, cols), data.itemsize)
        raw, packed = array("raw", "none", machine.io_threads), array("packed", "zstd", cores)
        say(f"writing in {folder}")
        write = fill.bytes / typical(partial(_wall, raw, fill, data), 3 * sizes.seconds)
        say(f"reading in {folder}")
        cold, read = rate(raw, cold=True), rate(raw)
        scattered = rate(raw, (side // 2, side // 2 + side))  # half of the columns of each chunk
        say("decoding zstd")
        _wall(packed, fill, data)
        decode = rate(packed)
    return StoreRates(read=read, read_scattered=scattered, read_cold=cold, write=write), decode


def _evict(folder: Path) -> None:
    """Have the system forget the contents of files, as far as it will: of those not yet on disk, it begins to write
    them and forgets them the next time. Waiting for that instead would take as long as other programs write."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _numbers(shape: tuple[int, int]) -> Array:
    """Numbers as measurements are: normal, of limited resolution, so that they can be compressed somewhat."""
    count = shape[0] * shape[1]
    some = np.round(np.random.default_rng(0).standard_normal(min(count, 1 << 20)) * 64) / 64
    return np.resize(some, count).reshape(shape)


def _wall(staging: Staging, operation: Operation, view: Array) -> float:
    started = perf_counter()
    staging.transfer(operation, [view])
    return perf_counter() - started


def _span(intervals: Sequence[tuple[int, int]]) -> float:
    """Seconds from the first beginning to the last end."""
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9
