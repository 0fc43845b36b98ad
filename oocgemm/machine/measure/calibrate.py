"""Measure the rates of kernels, of copies between host and GPU, of memory and of storage.

Measurements use the same code for copies and products as real runs, so the rates are those of real runs. This
code is the same for all backends.
"""

import os
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
from oocgemm.machine.measure.sampling import explained, per_second, typical
from oocgemm.machine.measure.storage import storage_rates
from oocgemm.machine.measure.workbench import Workbench, plan_of, transfer_seconds
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
    TileShape,
    check_fit,
    check_link,
    default_model,
    fit_link,
)
from oocgemm.planning.units import format_size
from oocgemm.system import cache
from oocgemm.system.cpu import CpuTimes, used_since
from oocgemm.system.memory import available_memory

_FREE_SHARE = 0.5  # maximum share of the free device memory that a measurement occupies


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and durations of the measurements of a calibration.

    Attributes:
        side: rows and columns of C in a timed product, halved until the product fits into half of the free
            memory.
        depths: the extents along k of the timed products.
        block: shape of the float64 matrix with which memory, storage and copies are measured.
        copies: Copies between host and GPU are measured with each of these numbers of rows of the matrix.
        seconds: duration of one measurement. Some measurements take three times as long.
    """

    side: int
    depths: tuple[int, ...]
    block: tuple[int, int]
    copies: tuple[int, ...]
    seconds: float


# The default sizes for each backend. `side` is so large that products reach the full rate of the kernel. The
# copied matrix (`block`, 256 MiB) is larger than the processor's caches, so copies use main memory.
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
    """Measure the rates of this machine. With the default sizes, this takes less than a minute.

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
    say = _with_backend(engine, say)
    machine = default_model(engine.name, len(os.sched_getaffinity(0)))
    machine = replace(machine, multiprocessors=engine.multiprocessors())
    sizes = sizes or SIZES[engine.name]
    rows, cols = sizes.block
    # At most four matrices of rows x cols exist at a time. They may take half of the available memory.
    rows = max(1, min(rows, available_memory() // (64 * cols)))
    sizes = replace(sizes, block=(rows, cols), copies=tuple(c for c in sizes.copies if c <= rows))
    source = _numbers(sizes.block)
    kernels, prepare, samples = _kernels(engine, machine, sizes, say)
    rates, copies = _links(engine, machine, sizes, source, say)
    say("issue")
    issue = _issue_seconds(engine, machine, sizes.seconds)
    storage, decode = storage_rates(machine, folder, source, 3 * sizes.seconds, say)
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


def _with_backend(engine: Backend, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a callback that passes messages on to `say`, prefixed with the name of the backend."""
    return lambda doing: say(f"{engine.name}: {doing}")


def _kernels(
    engine: Backend, machine: MachineModel, sizes: Sizes, say: Callable[[str], None]
) -> tuple[dict[str, KernelRate], float, dict[str, dict[str, float]]]:
    """Measure the rate of products for each dtype and precision.

    An emulated product needs a Prepare operation before it, which splits the operands. The rate of Prepare is
    measured for each dtype too.

    Returns:
        - the fitted rates of products, by their names in `RATES`;
        - the lowest of the rates of Prepare, in bytes of operands per second;
        - the measured flop/s, by name and then by extent along k.
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
    """Convert measured flop/s to those that products with infinite m and n would have.

    `rates` and the result have the flop/s by extent along k. A `KernelRate` is fitted to the result. The
    machine model predicts lower flop/s for smaller m and n; this function inverts the reduction.
    """
    tile = plan.tile
    ideal = replace(plan.machine, kernels={plan.problem.rate: KernelRate(1.0, 0.0)})
    loss = ideal.multiply_seconds(plan.problem.rate, 1.0, tile.m, tile.n, tile.k)
    loss *= ideal.wave_quantization(plan.problem.rate, tile.m, tile.n)
    return {depth: rate * loss for depth, rate in rates.items()}


def _fitting(engine: Backend, machine: MachineModel, dtype: str, sizes: Sizes, compute: str) -> TileShape:
    """Return m, n and k of the product to time.

    m and n are `sizes.side`, halved until the product fits into the share `_FREE_SHARE` of the free device
    memory. k is the last of `sizes.depths`.

    Raises:
        BackendError: the product does not fit even if m and n are below 64.
    """
    side, free = sizes.side, engine.free_memory()
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


def _links(
    engine: Backend, machine: MachineModel, sizes: Sizes, source: Array, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure copies within host memory and between host and device, and the cost of page faults.

    Returns:
        - Rates in bytes per second, by name. Two names have other units: `copy_latency` is the part of a
          copy's time that does not depend on its size, in seconds. `arena_seconds_per_byte` is the time to
          fault in new memory.
        - The measured rates of copies, by direction and then by size in bytes.
    """
    say("memory")
    (rows, cols), matrix = sizes.block, stores.open_matrix("A", source)
    tile, first_touch, warm = TileShape(rows, cols, cols), [], []
    for _ in range(3):
        with Workbench(engine, machine, "float64", tile, matrix) as bench:
            before, after = (_fill_seconds(bench) for _ in range(2))
            first_touch.append(max(0.0, before - after) / source.nbytes)
            read = bench.load(Kind.READ, "A")
            warm.append(
                typical(partial(transfer_seconds, bench.staging, read, bench.slot(read)), sizes.seconds)
            )
    rates = {"arena_seconds_per_byte": median(first_touch), "memory": source.nbytes / median(warm)}
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
            return per_second(size, typical(lambda: _total_seconds(bench.intervals(*both)), sizes.seconds))

        def check(found: Mapping[int, float]) -> float:
            (total,) = found.values()
            check_link("half of h2d and d2h at once", total / 2, limit)
            return total

        samples["both ways"], _ = explained(together, [sum(copy.bytes for copy in both)], check)
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
    """Return the time that the host needs to start one operation, in seconds.

    The result is the wall time of a run with tiny tiles, divided by the number of operations. With tiny
    tiles, the operations themselves take almost no time.
    """
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


def _numbers(shape: tuple[int, int]) -> Array:
    """Return normal random numbers, rounded to 1/64 so that they compress about as well as measured data."""
    count = shape[0] * shape[1]
    some = np.round(np.random.default_rng(0).standard_normal(min(count, 1 << 20)) * 64) / 64
    return np.resize(some, count).reshape(shape)


def _total_seconds(intervals: Sequence[tuple[int, int]]) -> float:
    """Return the seconds from the first start to the last end. An interval is (start, end) in nanoseconds."""
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9
