"""Measure the rates of kernels, of copies between host and GPU, of memory and of storage.

Measurements use the same code for copies and products as real runs, so the rates are those of real runs. This
code is the same for all backends.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from oocgemm.backends.base import Array
from oocgemm.engine.executor import Run
from oocgemm.engine.staging import Staging
from oocgemm.errors import BackendError, InputError
from oocgemm.machine.measure.kernel_rates import kernel_rates
from oocgemm.machine.measure.sampling import explained, numbers, per_second, typical
from oocgemm.machine.measure.sizes import SIZES, Sizes
from oocgemm.machine.measure.storage import storage_rates
from oocgemm.machine.measure.streaming import loading_seconds, rate_of, streaming
from oocgemm.machine.measure.workbench import Workbench
from oocgemm.planning import (
    Budgets,
    Calibration,
    Candidate,
    GemmProblem,
    Kind,
    Layouts,
    MachineModel,
    Operation,
    Plan,
    Slots,
    TileShape,
    check_link,
    default_model,
    fit_link,
)
from oocgemm.system import cache
from oocgemm.system.compiled import compiled
from oocgemm.system.cpu import CpuTimes, used_since
from oocgemm.system.memory import available_memory

AT_ONCE = 4  # copies in each direction that are timed at once


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
    say = _with_backend(engine, say)
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
    memory = _memory_rate(engine, machine, source, 2 * sizes.chunk, 3 * sizes.seconds)
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


def _memory_rate(engine: Backend, machine: MachineModel, source: Array, depth: int, seconds: float) -> float:
    """Return the bytes per second at which the panels of a matrix in memory are staged by all threads."""
    matrix = stores.open_matrix("A", source)
    with streaming(engine, machine, matrix, min(depth, source.shape[1])) as run:
        return rate_of(matrix, typical(lambda: loading_seconds(run()), seconds))


def _with_backend(engine: Backend, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a callback that passes messages on to `say`, prefixed with the name of the backend."""
    return lambda doing: say(f"{engine.name}: {doing}")


def _links(
    engine: Backend, machine: MachineModel, sizes: Sizes, source: Array, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure copies between host and device, and the cost of page faults.

    Returns:
        - Rates in bytes per second, by name. Two names have other units: `copy_latency` is the part of a
          copy's time that does not depend on its size, in seconds. `arena_seconds_per_byte` is the time to
          fault in new memory.
        - The measured rates of copies, by direction and then by size in bytes.
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
        # Runs copy in both directions at once, where this makes a difference.
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
    matrices = {name: stores.open_matrix(name, numbers((side, side))) for name in "ABC"}
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


def _total_seconds(intervals: Sequence[tuple[int, int]]) -> float:
    """Return the seconds from the first start to the last end. An interval is (start, end) in nanoseconds."""
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9
