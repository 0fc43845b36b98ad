"""The fastest that blocks go between the device and memory that is not pinned, without a product.

They go piece by piece through pinned buffers: threads fill one buffer while the link copies another one. Some
ways here are plain threads, with several sizes of pieces. One is the ring of oocgemm.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from grid_loop import DOWN, UP

from oocgemm.backends.base import Pageable
from oocgemm.planning.cost.ring import COMPILED_LANES, PIECE, RingShape

REPEATS = 3
# Threads, and bytes of pieces.
THREADS, PIECES = (4, 8, 12), (4 << 20, 16 << 20)
ROW = 1 << 16  # bytes of a row of the block that the ring copies
Copy = Callable[[Any, Any], object]  # copies bytes to the first array from the second
Fill = Callable[[int, Any], object]  # moves the piece at a position to or from a buffer


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
    for name, rate in zip(ways, _by_ring(pageable), strict=True):
        ways[name]["ring"] = rate
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


def _by_ring(pageable: Any) -> tuple[float, float]:
    """Return the rates of uploads and downloads of one large block by the ring of oocgemm."""
    import cupy

    from oocgemm.backends.cuda.ring import Ring

    rows = pageable[: pageable.size // ROW * ROW].reshape(-1, ROW)
    device = cupy.empty(rows.size, np.uint8)
    ring = Ring(cupy.cuda.Device(), RingShape(1 + COMPILED_LANES, PIECE))

    def read(down: Any, along: Any, part: Any) -> None:
        np.copyto(part, rows[slice(*down), slice(*along)])

    def write(down: Any, along: Any, part: Any) -> None:
        np.copyto(rows[slice(*down), slice(*along)], part)

    def copies(begin: Any, move: Any) -> Iterator[None]:
        block = Pageable(rows.shape, rows.dtype, move, memory=rows)
        while True:
            yield
            work = begin(device.data.ptr, block, [])()
            work.end.synchronize()
            work.finish()

    try:
        up, down = (_seconds(partial(copies, *of)) for of in ((ring.upload, read), (ring.download, write)))
    finally:
        ring.close()
    return rows.size / up, rows.size / down


def _seconds(begin: Callable[[], Iterator[None]]) -> float:
    """Return the least seconds of a step of an iterator. The first step begins, and the second warms up."""
    steps, found = begin(), []
    next(steps)
    next(steps)
    for _ in range(REPEATS):
        started = perf_counter()
        next(steps)
        found.append(perf_counter() - started)
    return min(found)
