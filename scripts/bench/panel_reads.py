"""Read the panels of a matrix into a slot, as a run does, and time several ways of doing so in turns."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from oocgemm.engine.staging import Cutter
from oocgemm.stores import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.system.threads import short_switch_interval

THREADS = 2
PANEL = 2048  # rows and columns of a panel, at most


def panels(shape: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the panels of a matrix: rows and columns."""
    return list(pieces((0, shape[0]), (0, shape[1]), (PANEL, PANEL), 1))


def ours(matrix: Matrix, slot: Array, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Read the panels of a matrix into a slot, in parts that threads take one at a time, as a run does."""
    chunk = matrix.layout.read_chunk
    grouped = not matrix.layout.partial_reads and chunk[0] * chunk[1] * slot.itemsize >= BATCH_BYTES
    with short_switch_interval():
        for rows, cols in panels(matrix.shape):
            width = chunk[1] if grouped else PANEL
            work = []
            for left in range(cols[0], cols[1], width):
                group = left, min(cols[1], left + width)
                data = slot[PANEL * (left - cols[0]) : PANEL * (group[1] - cols[0])].reshape(PANEL, -1)
                for r, c in Cutter(matrix, THREADS, reading=True).parts(rows, group):
                    part = data[r[0] - rows[0] : r[1] - rows[0], c[0] - left : c[1] - left]
                    work.append((r, c, part))
            in_threads(pool, THREADS, matrix.read, work)
            yield


def in_threads(
    pool: ThreadPoolExecutor, threads: int, act: Callable[..., object], work: list[tuple[object, ...]]
) -> None:
    """Call `act` with each tuple of arguments, in threads that take one tuple at a time."""
    left = iter(work)

    def take() -> None:
        for given in left:
            act(*given)

    for task in [pool.submit(take) for _ in range(threads)]:
        task.result()


def seconds(ways: Mapping[str, Callable[[], Iterator[None]]], budget: float) -> dict[str, dict[str, float]]:
    """Return the wall time and the processor time of the fastest panel of each way, in seconds.

    The ways take turns, at least three times each, until `budget` seconds have passed.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    began, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - began < budget:
        turns += 1
        for name, way in ways.items():
            read = way()
            while True:
                started, used = time.perf_counter(), time.process_time()
                if next(read, read) is read:
                    break
                times[name].append((time.perf_counter() - started, time.process_time() - used))
    return {
        name: {kind: min(each) for kind, each in zip(("wall", "cpu"), zip(*found, strict=True), strict=True)}
        for name, found in times.items()
    }
