"""The fastest that blocks go between the device and memory that is not pinned, without a product.

They go piece by piece through pinned buffers: threads fill one buffer while the link copies another one. Some
ways here are plain threads, with several sizes of pieces. One is the ring of oocgemm.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from grid_loop import DOWN, UP

from oocgemm.backends.base import Pageable
from oocgemm.planning.cost.footprint import COMPILED_LANES, PIECE, RingShape

REPEATS = 3
# Threads, and bytes of pieces.
THREADS, PIECES = (4, 8, 12), (4 << 20, 16 << 20)
ROW = 1 << 16  # bytes of a row of the block that the ring copies
Copy = Callable[[Any, Any], object]  # copies bytes to the first array from the second
Fill = Callable[[int, Any], object]  # moves the piece at a position to or from a buffer
Begin = Callable[[], Iterator[None]]


def piped(pageable: Any, copies: dict[str, Copy], path: Path | None) -> dict[str, dict[str, float]]:
    """Return bytes per second by way: "staged_h2d" and "staged_d2h" for an array, "page_h2d" for a file."""
    size, ways = pageable.size, dict[str, dict[str, float]]()
    for name, copy in copies.items():

        def fill(at: int, buffer: Any, copy: Copy = copy) -> None:
            copy(buffer, pageable[at : at + buffer.size])

        def empty(at: int, buffer: Any, copy: Copy = copy) -> None:
            copy(pageable[at : at + buffer.size], buffer)

        ways.setdefault("staged_h2d", {}).update(_rates(size, name, before=fill))
        ways.setdefault("staged_d2h", {}).update(_rates(size, name, after=empty))
    with _ring() as ring:
        for name, uploads in (("staged_h2d", True), ("staged_d2h", False)):
            ways[name]["ring"] = size / _seconds(partial(_by_ring, ring, pageable, uploads))
    if path is not None:
        with path.open("rb") as file:

            def read(at: int, buffer: Any) -> None:
                os.preadv(file.fileno(), [buffer], at)

            ways["page_h2d"] = _rates(path.stat().st_size, "", before=read)
    return ways


def _rates(size: int, how: str, before: Fill | None = None, after: Fill | None = None) -> dict[str, float]:
    """Return the rates of plain threads that copy `size` bytes to the device, or from it.

    `before` fills a buffer before it is uploaded. `after` empties one after it has been downloaded.
    """
    found = {}
    for piece in PIECES:
        for threads in THREADS:
            seconds = _seconds(partial(_run, size, threads, piece, before, after))
            found[f"{threads} threads, {piece >> 20} MiB{how}"] = size / seconds
    return found


def _run(size: int, threads: int, piece: int, before: Fill | None, after: Fill | None) -> Iterator[None]:
    """Copy once per `next`. Each thread has two buffers, and a stream for each of them."""
    import cupy
    from cupy.cuda import runtime

    device = cupy.empty(size, np.uint8)
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(2 * threads * piece), np.uint8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2 * threads)]

    def serve(thread: int) -> None:
        held: list[int | None] = [None, None]

        def end(turn: int) -> None:
            """Wait for the latest copy of a buffer, and empty the buffer."""
            streams[2 * thread + turn].synchronize()
            at = held[turn]
            if after is not None and at is not None:
                after(at, buffer(turn, at))

        def buffer(turn: int, at: int) -> Any:
            start = (2 * thread + turn) * piece
            return memory[start : start + min(piece, size - at)]

        with cupy.cuda.Device():
            for number, at in enumerate(range(thread * piece, size, threads * piece)):
                turn = number % 2
                end(turn)
                held[turn], here = at, buffer(turn, at)
                if before is not None:
                    before(at, here)
                ends = (
                    (device.data.ptr + at, here.ctypes.data)
                    if before
                    else (here.ctypes.data, device.data.ptr + at)
                )
                runtime.memcpyAsync(*ends, here.size, UP if before else DOWN, streams[2 * thread + turn].ptr)
            end(0)
            end(1)

    with ThreadPoolExecutor(threads) as pool:
        while True:
            yield
            list(pool.map(serve, range(threads)))


def piped_both(pageable: Any, copy: Copy, alone: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Return the rates of uploads and of downloads that run at the same time, in bytes per second.

    The keys name the ways of copying. One half of an array is uploaded. The other half receives what is
    downloaded. `alone` are the rates of uploads and of downloads that run alone.
    """
    import cupy

    half = pageable.size // 2
    up, down = pageable[:half], pageable[half : 2 * half]

    def fill(at: int, buffer: Any) -> None:
        copy(buffer, up[at : at + buffer.size])

    def empty(at: int, buffer: Any) -> None:
        copy(down[at : at + buffer.size], buffer)

    ways: dict[str, tuple[Begin, Begin]] = {
        f"{threads} threads, {piece >> 20} MiB": (
            partial(_run, half, threads, piece, fill, None),
            partial(_run, half, threads, piece, None, empty),
        )
        for piece in PIECES
        for threads in THREADS
    }
    found = {}
    with ThreadPoolExecutor(2, initializer=partial(cupy.cuda.runtime.setDevice, 0)) as pool, _ring() as ring:
        ways["ring"] = partial(_by_ring, ring, up, True), partial(_by_ring, ring, down, False)
        for way, pair in ways.items():
            found[way] = max((_while_both(half, times, alone) for times in _times(pair, pool)), key=sum)
    return found


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


def _while_both(size: int, times: Sequence[float], alone: tuple[float, float]) -> tuple[float, float]:
    """Return the rates of uploads and downloads while both ran, from the seconds that each took.

    Each copied `size` bytes. After the faster one had ended, the slower one ran at its rate in `alone`.
    """
    until = min(times)
    up, down = (
        max(0.0, size - rate * (each - until)) / until for each, rate in zip(times, alone, strict=True)
    )
    return up, down


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
