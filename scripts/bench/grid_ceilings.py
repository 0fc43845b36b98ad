"""The fastest that each link of this machine runs at: what `bench_grid.py` takes its bounds from.

Each figure is the best of several numbers of threads, in bytes per second, with buffers and files that exceed
the caches of the processor.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from grid_cases import Case
from grid_data import block
from grid_loop import DOWN, UP, multiplier
from grid_piped import Copy, piped, piped_both

from oocgemm.system.installed import compiled

PIECE = 16 << 20
THREADS = (1, 4, 8, 12, 16)
# Smaller arrays are staged more slowly, since threads must start and end. These are bytes of such arrays.
SMALL_STAGES = (16 << 20, 64 << 20, 256 << 20)
MIN_STAGED = 1 << 20  # bytes that one thread copies at a time
DEPTHS = (4, 8, 16, 32)  # of reads past the page cache
CUBE = 8192  # side of the product whose rate stands for products that do not fit on the device
KERNEL_SECONDS = 0.2
PARTS = 16  # copies per direction when the rates of the link are measured


def links(folder: Path, size: int, on_gpu: bool, stored: bool) -> dict[str, Any]:
    """Return the rates of all links; `size` bytes are copied for each sample.

    Keys: `h2d`, `d2h`, each alone, `h2d_both`, `d2h_both` at once; `stage`, `unstage`: between pageable and
    pinned memory, by NumPy or by compiled code; `stage_small`, `unstage_small`: the same for fewer bytes, by
    bytes; `page_read`: from the page cache to pinned memory; `disk_write`: to the disk, synced;
    `staged_h2d`, `staged_d2h`, `page_h2d`: from pageable memory to the device, back, and from the page cache
    to the device; `staged_h2d_both`, `staged_d2h_both`: the first two at once. `threads` holds every sample.
    """
    memory: Any = _pinned(size) if on_gpu else np.frombuffer(mmap.mmap(-1, size), np.uint8)
    pageable = np.ones(2 * size, np.uint8)
    found: dict[str, Any] = _pcie(memory) if on_gpu else {}
    threads: dict[str, dict[Any, Any]] = {}
    pieces, half = range(0, size, PIECE), range(0, size // 2, PIECE)

    def sweep(
        name: str, work: Callable[[int], object], numbers: Iterable[int], total: int, how: str = ""
    ) -> None:
        rates = threads[name + how] = {number: total / _best(work, number) for number in numbers}
        found[name] = max(found.get(name, 0.0), *rates.values())

    def stage(copy: Copy, back: bool, number: int) -> None:
        def work(at: int) -> None:
            here = pageable[at : at + PIECE], memory[at % size : at % size + PIECE]
            copy(*(here if back else here[::-1]))

        _parallel(work, range(0, 2 * size, PIECE), number)

    for how, copy in copies().items():
        sweep("stage", partial(stage, copy, False), THREADS, 2 * size, how)
        sweep("unstage", partial(stage, copy, True), THREADS, 2 * size, how)
    fitting = [few for few in SMALL_STAGES if few <= size]
    for name, back in (("stage_small", False), ("unstage_small", True)):
        found[name] = {few: few / _stage_seconds(pageable, memory, few, back) for few in fitting}
    path = folder / "ceiling.bin"
    if stored:

        def transfer(number: int, reading: bool) -> None:
            descriptor = os.open(path, os.O_RDONLY if reading else os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            call = os.preadv if reading else os.pwritev
            _parallel(lambda at: call(descriptor, [memory[at : at + PIECE]], at), pieces, number)
            os.close(descriptor)

        transfer(4, False)
        sweep("page_read", lambda number: transfer(number, True), THREADS, size)
    if on_gpu:
        paths = piped(pageable[:size], copies(), path if stored else None)
        threads |= paths
        found |= {name: max(rates.values()) for name, rates in paths.items()}
        alone = found["staged_h2d"], found["staged_d2h"]
        *_, copy = copies().values()  # the compiled one, if there is one
        threads["staged_both"] = ways = piped_both(pageable, copy, alone)
        found["staged_h2d_both"], found["staged_d2h_both"] = max(ways.values(), key=sum)
    if stored:
        path.unlink()
        ways = {"page cache": 0, "direct": os.O_DIRECT, "direct, in place": os.O_DIRECT}
        threads["disk_write"] = {}
        for way, flag in ways.items():
            taken = []
            for _ in range(2):
                if "in place" not in way:
                    path.unlink(missing_ok=True)
                taken.append(_disk_write(path, memory, half, flag))
            threads["disk_write"][way] = size // 2 / min(taken)
        path.unlink()
        found["disk_write"] = max(threads["disk_write"].values())
    return found | {"threads": threads}


def _stage_seconds(pageable: Any, memory: Any, size: int, back: bool) -> float:
    """Return the least seconds of copying `size` bytes once, by threads that wait for the work already."""

    def timed(copy: Copy, threads: int) -> float:
        piece = max(MIN_STAGED, size // threads)

        def work(at: int) -> None:
            here = pageable[at : min(at + piece, size)], memory[at : min(at + piece, size)]
            copy(*(here if back else here[::-1]))

        with ThreadPoolExecutor(threads) as pool:
            return _best(lambda _: list(pool.map(work, range(0, size, piece))), 0, repeats=8)

    return min(timed(copy, threads) for copy in copies().values() for threads in THREADS)


def copies() -> dict[str, Copy]:
    """Return the functions that copy bytes, by name: NumPy's, and oocgemm's compiled one, if there is one."""
    found: dict[str, Copy] = {"": np.copyto}
    if (library := compiled()) is not None:
        rows = library.ooc_copy_rows
        rows.restype, rows.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t] * 2 + [ctypes.c_size_t] * 2

        def copy(to: Any, source: Any) -> None:
            rows(to.ctypes.data, to.nbytes, source.ctypes.data, source.nbytes, source.nbytes, 1)

        found[" compiled"] = copy
    return found


def disk_read(files: list[Path]) -> float:
    """Return the rate of reading files past the page cache, at the best depth."""
    # Pieces of all files, so that a few large files are read as deep as many small ones.
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]
    total = sum(path.stat().st_size for path in files)

    def timed(depth: int) -> float:
        def read(numbers: range) -> None:
            buffer = mmap.mmap(-1, PIECE)
            for number in numbers:
                path, at = pieces[number]
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                os.preadv(descriptor, [buffer], at)
                os.close(descriptor)

        started = time.perf_counter()
        _parallel(read, [range(first, len(pieces), depth) for first in range(depth)], depth)
        return time.perf_counter() - started

    return total / min(timed(depth) for depth in DEPTHS)


def _disk_write(path: Path, memory: Any, pieces: range, flag: int) -> float:
    """Return the seconds of writing a file and syncing it, through the page cache or by O_DIRECT."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flag)
    started = time.perf_counter()
    try:
        _parallel(lambda at: os.pwritev(descriptor, [memory[at : at + PIECE]], at), pieces, 8)
        os.fsync(descriptor)
        return time.perf_counter() - started
    except OSError:  # the file system has no direct writes, or the buffer is not aligned for them
        return float("inf")
    finally:
        os.close(descriptor)


def _pcie(memory: Any) -> dict[str, float]:
    """Return the rates of copies between pinned memory and the device: each direction alone, and both."""
    import cupy
    from cupy.cuda import runtime

    device, half = cupy.empty(memory.nbytes, np.uint8), memory.nbytes // 2
    streams = {kind: cupy.cuda.Stream(non_blocking=True) for kind in (UP, DOWN)}
    part = half // PARTS

    def rates(*kinds: int) -> list[float]:
        """Return the bytes per second of each direction, while all of them copy."""
        start, ends = cupy.cuda.Event(), {kind: [cupy.cuda.Event() for _ in range(PARTS)] for kind in kinds}
        start.record(streams[kinds[0]])
        for kind in kinds:
            streams[kind].wait_event(start)
        for number in range(PARTS):
            for kind in kinds:
                at = number * part + (half if kind == DOWN else 0)
                here, there = memory.ctypes.data + at, device.data.ptr + at
                to, source = (there, here) if kind == UP else (here, there)
                runtime.memcpyAsync(to, source, part, kind, streams[kind].ptr)
                ends[kind][number].record(streams[kind])
        for kind in kinds:
            streams[kind].synchronize()
        times = [[cupy.cuda.get_elapsed_time(start, end) / 1e3 for end in ends[kind]] for kind in kinds]
        until = min(each[-1] for each in times)
        return [float(np.interp(until, [0.0, *each], range(PARTS + 1))) * part / until for each in times]

    (up,), (down,), (up_both, down_both) = (
        max((rates(*kinds) for _ in range(5)), key=sum) for kinds in ((UP,), (DOWN,), (UP, DOWN))
    )
    return {"h2d": up, "d2h": down, "h2d_both": up_both, "d2h_both": down_both}


def kernel_seconds(case: Case) -> tuple[float, str] | None:
    """Return the seconds of the product in core, and which product was timed; None if that fails.

    That is the case's own product where it fits on the device, else the cube of side `CUBE`, scaled.
    """
    import cupy

    if case.compute == "emulated":
        return _emulated_seconds(case)
    free = cupy.cuda.runtime.memGetInfo()[0]
    own = (case.operand_bytes + case.c_bytes) * 1.2 < free
    m, k, n = (case.m, case.k, case.n) if own else (CUBE,) * 3
    with suppress(cupy.cuda.memory.OutOfMemoryError):
        a, b, c = _random((m, k), case.dtype), _random((n, k), case.dtype), _raw((m, n), case.c_dtype)
        multiply = multiplier(case.dtype)
        stored = b if case.dtype == "int8" else b.reshape(k, n)
        found = sustained(lambda: multiply(a, stored, c, False, b_transposed=case.dtype == "int8"))
        return found * case.m * case.k * case.n / (m * k * n), "own" if own else f"{CUBE}^3"
    return None


def sustained(work: Callable[[], object]) -> float:
    """Return the mean device seconds of calls that run for `KERNEL_SECONDS` together, after one call."""
    import cupy

    def timed(count: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / count

    work()
    once = timed(1)
    return timed(max(1, min(50, round(KERNEL_SECONDS / once))))


def _emulated_seconds(case: Case) -> tuple[float, str] | None:
    """Return the seconds of the emulated product: steps of at most 16384 x 16384 x 8192, scaled."""
    import cupy

    from oocgemm.backends.cuda.multiplier import Multiplier
    from oocgemm.planning import Op
    from oocgemm.planning.emulation import MODULI_COUNTS, plane_offsets, work_bytes

    m, n, k = min(case.m, 16384), min(case.n, 16384), min(case.k, 8192)
    most, multiplier = MODULI_COUNTS[case.dtype][-1], Multiplier(0)
    try:
        with cupy.cuda.Stream(non_blocking=True):
            a, b = (cupy.random.standard_normal(s, cupy.float32).astype(case.dtype) for s in ((m, k), (k, n)))
            c, offsets = cupy.zeros((m, n), case.dtype), plane_offsets(most, m, n, k)
            slot, work = cupy.empty(offsets.end, cupy.int8), cupy.empty(work_bytes(most, m, n), cupy.int8)
            emulated, shape = multiplier.emulated(case.dtype), (m, n, k)

            def step() -> None:
                number = emulated.prepare(a.data.ptr, b.data.ptr, shape, Op.N, Op.N, slot.data.ptr, offsets)
                emulated.multiply(
                    *(slot.data.ptr, offsets, work.data.ptr, (0, m), shape, number, 1, 1, c.data.ptr, n)
                )

            found = sustained(step)
    finally:
        multiplier.close()
    return found * case.m * case.k * case.n / (m * k * n), f"emulated {m}x{k}x{n}"


def _raw(shape: tuple[int, int], dtype: str) -> Any:
    """Return a device array; bfloat16, which cupy may not have, as uint16."""
    import cupy

    return cupy.empty(shape, "uint16" if dtype == "bfloat16" else dtype)


def _random(shape: tuple[int, int], dtype: str) -> Any:
    """Return a device array that repeats a random block: the power that a product takes depends on its
    data."""
    import cupy

    x, source = _raw(shape, dtype), block(dtype, (1021, 1021))
    flat = x.reshape(-1)
    small = cupy.asarray(source.view("uint16") if dtype == "bfloat16" else source).reshape(-1)
    while small.size < min(flat.size, 1 << 24):
        small = cupy.concatenate([small, small])
    for at in range(0, flat.size, small.size):
        flat[at : at + small.size] = small[: flat.size - at]
    return x


def _pinned(size: int) -> Any:
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


def _parallel(work: Callable[[Any], object], items: Iterable[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


def _best(work: Callable[[int], object], argument: int, repeats: int = 2) -> float:
    """Return the least seconds of several calls."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work(argument)
        found.append(time.perf_counter() - started)
    return min(found)
