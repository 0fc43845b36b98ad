"""The fastest that blocks go between the device and memory that is not pinned, without a product.

They go piece by piece through pinned buffers: threads fill one buffer while the link copies another one. The
plain loop in C (`staging_loop.py`) runs with several numbers of threads and sizes of pieces. The ring of
oocgemm copies the same arrays.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from grid_loop import UP

from oocgemm.backends.base import Pageable
from oocgemm.planning.cost.footprint import COMPILED_LANES, PIECE, RingShape

KIB = 1 << 10
REPEATS = 3
# The ways of staging that are timed: the number of threads per direction, the number of buffers per thread,
# and the size of a buffer in KiB. ALONE is for copies in one direction, BOTH for both directions at once.
ALONE, BOTH = tuple(product((6, 8, 12), (2, 3), (4096,))), tuple(product((5, 6, 8), (2,), (2048, 4096)))
# The same for the small arrays of SMALL bytes. For these, the first and the last piece take a larger share.
FEW_ALONE, FEW_BOTH = (
    tuple(product((8, 12), (2,), (512, 1024, 2048, 4096))),
    tuple(product((6, 8), (2,), (512, 1024, 2048))),
)
SMALL = (16 << 20, 64 << 20, 256 << 20)
# The number of threads that read a file from the page cache, and the bytes of the pieces that they read.
FILE_WAYS = tuple(product((8, 12, 16), (4 << 20, 16 << 20)))
ROW = 1 << 16  # bytes of a row of the block that the ring copies
Ways = Sequence[tuple[int, int, int]]
Begin = Callable[[], Iterator[None]]


def piped(pageable: Any, path: Path | None = None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the rates of staging in bytes per second, and those of each way of staging.

    The rates are `staged_h2d` and `staged_d2h`, each alone; `staged_h2d_both` and `staged_d2h_both`, at once;
    `staged_small`, by bytes, the same for small arrays; `page_h2d`, from a file in the page cache, if `path`
    is given. The first half of `pageable` is uploaded, and its second half receives what is downloaded.
    """
    import cupy

    half = pageable.nbytes // 2
    device = cupy.empty(2 * half, np.uint8)

    def samples(size: int, alone: Ways, both: Ways) -> dict[str, dict[str, Any]]:
        up, down = ((pageable[at : at + size], device[at : at + size]) for at in (0, half))
        found: dict[str, dict[str, Any]] = {
            "staged_h2d": _alone(*up, alone, uploads=True),
            "staged_d2h": _alone(*down, alone, uploads=False),
        }
        fastest = max(found["staged_h2d"].values()), max(found["staged_d2h"].values())
        return found | {"staged_both": _both(up, down, both, fastest)}

    threads = samples(half, ALONE, BOTH)
    threads["ring"] = ring_rates(pageable)
    found: dict[str, Any] = best_of(threads)
    found["staged_small"] = {
        size: best_of(samples(size, FEW_ALONE, FEW_BOTH)) for size in SMALL if size <= half // 2
    }
    if path is not None:
        threads["page_h2d"] = {
            f"{count} threads, {piece >> 20} MiB": path.stat().st_size
            / _seconds(partial(_from_file, path, count, piece))
            for count, piece in FILE_WAYS
        }
        found["page_h2d"] = max(threads["page_h2d"].values())
    return found, threads


def _alone(array: Any, device: Any, ways: Ways, *, uploads: bool) -> dict[str, float]:
    """Return the rates of the loop in one direction, by its way of copying."""
    from staging_loop import Loop, Way, seconds

    found = {}
    for (threads, buffers, kib), streamed in product(ways, (False, True)):
        way = Way(threads, buffers, kib * KIB, streamed)
        with closing(Loop(array, device, way, uploads=uploads)) as loop:
            name = f"{threads} threads, {buffers} x {kib} KiB{', streamed' if streamed else ''}"
            found[name] = array.nbytes / min(seconds([loop])[0] for _ in range(REPEATS))
    return found


def _both(
    up: tuple[Any, Any], down: tuple[Any, Any], ways: Ways, alone: tuple[float, float]
) -> dict[str, tuple[float, float]]:
    """Return the rates of uploads and of downloads at the same time, by the way of copying."""
    from staging_loop import Loop, Way, seconds

    found = {}
    for (threads, buffers, kib), streamed in product(ways, (False, True)):
        with ExitStack() as closed:
            loops = [
                closed.enter_context(
                    closing(Loop(*ends, Way(threads, buffers, kib * KIB, stores), uploads=uploads))
                )
                for ends, stores, uploads in ((up, streamed, True), (down, True, False))
            ]
            name = (
                f"{threads} + {threads} threads, {buffers} x {kib} KiB{', up streamed' if streamed else ''}"
            )
            found[name] = max(
                (while_both(up[0].nbytes, seconds(loops), alone) for _ in range(REPEATS)), key=sum
            )
    return found


def best_of(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the best rate of each mode, by the loop or by the ring."""
    ring = samples.get("ring", {})
    alone = {name: max(ring.get(name, 0.0), *samples[name].values()) for name in ("staged_h2d", "staged_d2h")}
    both = [*samples["staged_both"].values(), *(ring[name] for name in ("staged_both",) if name in ring)]
    up, down = max(both, key=sum)
    return alone | {"staged_h2d_both": up, "staged_d2h_both": down}


def while_both(size: int, times: Sequence[float], alone: tuple[float, float]) -> tuple[float, float]:
    """Return the rates of uploads and downloads while both ran, from the seconds that each took.

    Each direction copied `size` bytes. When the faster direction had ended, the slower one was alone. The
    bytes that it then copied, at its rate in `alone`, are not counted.

    >>> while_both(100, (10.0, 5.0), (15.0, 15.0))
    (5.0, 20.0)
    """
    until = min(times)
    up, down = (
        max(0.0, size - rate * (each - until)) / until for each, rate in zip(times, alone, strict=True)
    )
    return up, down


def _from_file(path: Path, threads: int, piece: int) -> Iterator[None]:
    """Upload a file once per `next`. Each thread has two buffers, and a stream for each of them."""
    import cupy
    from cupy.cuda import runtime

    size = path.stat().st_size
    device = cupy.empty(size, np.uint8)
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(2 * threads * piece), np.uint8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2 * threads)]

    def serve(thread: int) -> None:
        with cupy.cuda.Device(), path.open("rb") as file:
            for number, at in enumerate(range(thread * piece, size, threads * piece)):
                turn = 2 * thread + number % 2
                streams[turn].synchronize()
                here = memory[turn * piece : turn * piece + min(piece, size - at)]
                os.preadv(file.fileno(), [here], at)
                runtime.memcpyAsync(device.data.ptr + at, here.ctypes.data, here.size, UP, streams[turn].ptr)
            for turn in range(2):
                streams[2 * thread + turn].synchronize()

    with ThreadPoolExecutor(threads) as pool:
        while True:
            yield
            list(pool.map(serve, range(threads)))


def ring_rates(pageable: Any) -> dict[str, Any]:
    """Return the rates of oocgemm's ring: uploads alone, downloads alone, and both at once, as a pair."""
    import cupy

    half = pageable.nbytes // 2
    up, down = pageable[:half], pageable[half : 2 * half]
    with ThreadPoolExecutor(2, initializer=partial(cupy.cuda.runtime.setDevice, 0)) as pool, _ring() as ring:
        pair = partial(_by_ring, ring, up, True), partial(_by_ring, ring, down, False)
        alone = half / _seconds(pair[0]), half / _seconds(pair[1])
        both = max((while_both(half, times, alone) for times in _times(pair, pool)), key=sum)
    return {"staged_h2d": alone[0], "staged_d2h": alone[1], "staged_both": both}


def _times(pair: tuple[Begin, Begin], pool: ThreadPoolExecutor) -> Iterator[list[float]]:
    """Advance two iterators at the same time, several times. Yield the seconds that each step took."""

    def timed(steps: Iterator[None]) -> float:
        started = perf_counter()
        next(steps)
        return perf_counter() - started

    both = [begin() for begin in pair]
    for number in range(2 + REPEATS):
        times = list(pool.map(timed, both))
        if number >= 2:  # the first step begins, and the second warms up
            yield times


@contextmanager
def _ring() -> Iterator[Any]:
    import cupy

    from oocgemm.backends.cuda.pageable import Ring

    ring = Ring(cupy.cuda.Device(), RingShape(1 + COMPILED_LANES, PIECE))
    try:
        yield ring
    finally:
        ring.close()


def _by_ring(ring: Any, pageable: Any, uploads: bool) -> Iterator[None]:
    """Copy one large block through the pinned buffers of `ring`, once per `next`."""
    import cupy

    rows = pageable[: pageable.size // ROW * ROW].reshape(-1, ROW)
    device = cupy.empty(rows.size, np.uint8)

    def move(down: Any, along: Any, part: Any) -> None:
        here = rows[slice(*down), slice(*along)]
        np.copyto(*((part, here) if uploads else (here, part)))

    block = Pageable(rows.shape, rows.dtype, move, memory=rows)
    while True:
        yield
        work = (ring.upload if uploads else ring.download)(device.data.ptr, block, [])()
        work.end.synchronize()
        work.finish()


def _seconds(begin: Begin) -> float:
    """Return the least seconds of a step of an iterator. The first step begins, and the second warms up."""
    steps, found = begin(), []
    next(steps)
    next(steps)
    for _ in range(REPEATS):
        started = perf_counter()
        next(steps)
        found.append(perf_counter() - started)
    return min(found)
