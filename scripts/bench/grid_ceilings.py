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
from pathlib import Path
from typing import Any

import numpy as np
from grid_cases import ITEM_BYTES, Case
from grid_data import block
from grid_loop import DOWN, UP, multiplier
from grid_piped import piped
from grid_runs import free_memory

from oocgemm.system.installed import compiled

PIECE = 16 << 20
THREADS = (1, 4, 8, 12, 16)
DEPTHS = (4, 8, 16, 32)  # of reads past the page cache
CUBE, PIECE_EXTENT = 8192, 4096  # extents of pieces whose products are timed
KERNEL_SECONDS = 0.1
# Extents (m, k, n) of steps of emulated products. A piece of fewer rows or columns is prepared more often.
EMULATED = (16384, 8192, 16384), (16384, 16384, 16384), (16384, 4096, 16384)
PARTS = 16  # copies per direction when the rates of the link are measured


def links(folder: Path, size: int, on_gpu: bool, stored: bool) -> dict[str, Any]:
    """Return the rates of all links; `size` bytes are copied for each sample.

    Keys: `h2d`, `d2h`, each alone, `h2d_both`, `d2h_both` at once; those of `piped`, for pageable memory and
    files in the page cache; `page_read`: from the page cache to pinned memory; `disk_write`: to the disk,
    synced. `threads` holds every sample.
    """
    memory: Any = _pinned(size) if on_gpu else np.frombuffer(mmap.mmap(-1, size), np.uint8)
    found: dict[str, Any] = _pcie(memory) if on_gpu else {}
    threads: dict[str, dict[Any, Any]] = {}
    pieces, half = range(0, size, PIECE), range(0, size // 2, PIECE)
    path = folder / "ceiling.bin"

    def transfer(number: int, reading: bool) -> None:
        descriptor = os.open(path, os.O_RDONLY if reading else os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        call = os.preadv if reading else os.pwritev
        _parallel(lambda at: call(descriptor, [memory[at : at + PIECE]], at), pieces, number)
        os.close(descriptor)

    if stored:
        transfer(4, False)
        rates = threads["page_read"] = {
            number: size / _best(lambda number: transfer(number, True), number) for number in THREADS
        }
        found["page_read"] = max(rates.values())
    if on_gpu:
        rates, samples = piped(np.ones(2 * size, np.uint8), path if stored else None)
        found, threads = found | rates, threads | samples
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


def staged(size: int) -> float:
    """Return the fastest rate at which threads of compiled code copy `size` bytes between two arrays."""
    library, (to, source) = compiled(), (np.ones(size, np.uint8) for _ in range(2))
    assert library is not None
    rows = library.ooc_copy_rows
    rows.restype, rows.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t] * 2 + [ctypes.c_size_t] * 2

    def copy(at: int) -> None:
        few = min(PIECE, size - at)
        rows(to.ctypes.data + at, few, source.ctypes.data + at, few, few, 1)

    return max(
        size / _best(lambda number: _parallel(copy, range(0, size, PIECE), number), number)
        for number in THREADS
    )


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


def kernel_seconds(case: Case, copies: float = 0.0) -> tuple[float, str] | None:
    """Return the seconds of the product in core, and which product was timed; None if that fails.

    That is the fastest of the case's own product as a whole, where it fits on the device, and of products of
    pieces of it, scaled. Prepare is included: for int8, B is copied so that it is contiguous along k. Pieces
    are not timed if the whole takes less than half of the `copies`, whose seconds are then the bound.
    """
    import cupy

    if case.compute == "emulated":
        return _emulated_seconds(case)
    packing = _packing_seconds(case) if case.dtype == "int8" else 0.0
    found = list[tuple[float, str]]()
    for m, k, n in shapes(case):
        size = (m + n) * k * ITEM_BYTES[case.dtype] + m * n * case.c_item_bytes
        if size * 1.2 > free_memory() or (found and min(found)[0] < copies / 2):
            continue
        with suppress(cupy.cuda.memory.OutOfMemoryError):
            own = (m, k, n) == (case.m, case.k, case.n)
            scale = case.m * case.k * case.n / (m * k * n)
            found.append((scale * _seconds(case, m, k, n), "own" if own else f"{m}x{k}x{n}"))
    return (min(found)[0] + packing, min(found)[1]) if found else None


def _seconds(case: Case, m: int, k: int, n: int) -> float:
    """Return the seconds of the product of m x k by k x n elements. int8 is contiguous along k."""
    a, b, c = _random((m, k), case.dtype), _random((n, k), case.dtype), _raw((m, n), case.c_dtype)
    multiply, packed = multiplier(case.dtype), case.dtype == "int8"
    stored = b if packed else b.reshape(k, n)
    return sustained(lambda: multiply(a, stored, c, k < case.k, b_transposed=packed))


def shapes(case: Case) -> list[tuple[int, int, int]]:
    """Return the extents (m, k, n) of a product and of pieces of it, whose kernels may be faster.

    >>> shapes(Case(1000, 20000, 5000, "int8", "pinned"))
    [(1000, 20000, 5000), (1000, 20000, 4096), (1000, 8192, 5000)]
    """
    m, k, n = case.m, case.k, case.n
    pieces = (m, k, min(n, PIECE_EXTENT)), (min(m, PIECE_EXTENT), k, n), (m, min(k, CUBE), n)
    cube = min(m, CUBE), min(k, CUBE), min(n, CUBE)
    return list(dict.fromkeys([(m, k, n), *pieces, cube]))


def _packing_seconds(case: Case) -> float:
    """Return the seconds in which oocgemm copies B to the layout that int8 products need."""
    import cupy

    from oocgemm.backends.cuda.multiplier import Multiplier, packed
    from oocgemm.kernels.spec import Call
    from oocgemm.planning import Op
    from oocgemm.planning.emulation import workspace_layout

    k, n = min(case.k, CUBE), min(case.n, CUBE)
    used = Multiplier(0)
    try:
        a, b = cupy.zeros((16, k), np.int8), cupy.zeros((k, n), np.int8)
        work = cupy.empty(workspace_layout(16, n, k).end, np.int8)
        call = Call(
            *("int8", Op.N, Op.N, 16, n, k, 1, a.data.ptr, k, b.data.ptr, n, 0, 0, n), work=work.data.ptr
        )
        return sustained(lambda: packed(used.kernels, call)) * case.k * case.n / (k * n)
    finally:
        used.close()


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
    """Return the seconds of the emulated product with Prepare: the fastest of steps of several extents."""
    found = list[tuple[float, str]]()
    for most in EMULATED:
        m, k, n = (min(extent, limit) for extent, limit in zip((case.m, case.k, case.n), most, strict=True))
        scale = case.m * case.k * case.n / (m * k * n)
        found.append((scale * _emulated_step(case, m, k, n), f"emulated {m}x{k}x{n}"))
        free_memory()
    return min(found)


def _emulated_step(case: Case, m: int, k: int, n: int) -> float:
    import cupy

    from oocgemm.backends.cuda.multiplier import Multiplier
    from oocgemm.planning import Op
    from oocgemm.planning.emulation import MODULI_COUNTS, plane_offsets, work_bytes

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

            return sustained(step)
    finally:
        multiplier.close()


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
