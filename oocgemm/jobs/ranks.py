"""Ranks of the elements of each row or column of a matrix, in an array of their own.

Equal elements have the mean of their ranks, as in `scipy.stats.rankdata`. The ranks of a row with NaN are
NaN.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.request import Destination, Request
from oocgemm.jobs.transforming import check_known, how_to_replace, memory_of
from oocgemm.planning.units import format_size
from oocgemm.stores import Array, Matrix
from oocgemm.stores.base import failure
from oocgemm.system.text import plain

# Bytes of memory per element of a block: its copies, their order, and ranks in float64.
PER_ELEMENT = 48
# Largest number of elements of a row whose ranks, which are multiples of 1/2, are exact in float32.
MAX_NARROW = 1 << 23
THREADS = 8


@contextmanager
def ranked(
    names: tuple[str, ...], operands: tuple[Any, ...], axis: int, out: Any, options: Any
) -> Iterator[list[Any]]:
    """Yield a matrix for each operand, whose rows are the ranks of its rows, or of its columns for `axis` 1.

    They are float64 for operands of float64, else float32. They are in memory if they take less than a pass
    before a run may, unless options bound the memory, or workers read them. Then they are in temporary files
    beside `out`.
    """
    request = Request.of(
        None, None, Destination.parse(None), **{k: v for k, v in options.items() if k != "transform"}
    )
    memory, decode = memory_of(request), options.get("decode", True)
    opened = list[Matrix]()
    for name, operand in zip(names, operands, strict=True):
        opened.append(stores.open_matrix(name, operand, decode=decode))
        if opened[-1].dtype.kind == "c":
            raise InputError(f"{name} is of dtype {opened[-1].dtype}, and complex numbers have no order")
        if decode:
            check_known(name, operand, None, lambda: memory, how_to_replace())
    bounded = any(options.get(name) is not None for name in ("memory", "host_memory"))
    size = sum(_dtype(x, axis).itemsize * x.shape[0] * x.shape[1] for x in opened)
    if size <= memory and not bounded and not request.where.is_distributed:
        yield [_filled(x, axis, memory, np.empty) for x in opened]
        return
    folder = os.path.dirname(os.path.abspath(out)) if isinstance(out, str | os.PathLike) else ""
    with TemporaryDirectory(prefix="oocgemm-ranks-", dir=folder if os.path.isdir(folder) else None) as place:
        free = shutil.disk_usage(place).free
        if size > free:
            raise InputError(
                f"ranks take {format_size(size)} in a temporary file in {plain(place)}, where "
                f"{format_size(free)} are free: free disk space, or set TMPDIR to another folder"
            )
        paths = [os.path.join(place, f"{name}.npy") for name in names]
        for path, x in zip(paths, opened, strict=True):
            _filled(x, axis, memory, partial(_mapped, path)).flush()
        yield paths


def _mapped(path: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    return open_memmap(path, "w+", dtype, shape)


def _dtype(matrix: Matrix, axis: int) -> np.dtype[Any]:
    narrow = matrix.dtype != np.float64 and matrix.shape[1 - axis] <= MAX_NARROW
    return np.dtype(np.float32 if narrow else np.float64)


def _filled(matrix: Matrix, axis: int, memory: int, make: Callable[[tuple[int, int], Any], Any]) -> Any:
    """Return an array that `make` returns, filled with ranks."""
    lines, depth = matrix.shape[axis], matrix.shape[1 - axis]
    found = make((lines, depth), _dtype(matrix, axis))
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    unit = matrix.layout.read_chunk[axis]
    room = max(1, memory // (threads * PER_ELEMENT * max(1, depth)))
    count = min(room // unit * unit or room, -(-lines // (2 * threads)) + unit - 1) or 1
    count = max(unit if unit <= room else 1, count // unit * unit)

    def fill(start: int) -> None:
        here = start, min(lines, start + count)
        rows, cols = (here, (0, depth)) if axis == 0 else ((0, depth), here)
        block = np.empty((rows[1] - rows[0], cols[1] - cols[0]), matrix.dtype)
        try:
            matrix.read(rows, cols, block)
        except Exception as error:  # a store may raise any exception
            raise ExecutionError(failure("reading", matrix, rows, cols, error)) from error
        found[slice(*here)] = ranks(block if axis == 0 else np.ascontiguousarray(block.T))

    if depth:
        with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-ranks") as pool:
            list(pool.map(fill, range(0, lines, count)))
    return found


def ranks(x: Array) -> Array:
    """Return the ranks of the elements of each row, from 1 on.

    >>> ranks(np.array([[30, 10, 10, 20]]))
    array([[4. , 1.5, 1.5, 3. ]])
    """
    order = np.argsort(x, axis=1)
    ascending = np.take_along_axis(x, order, axis=1)
    first = np.ones(x.shape, bool)
    np.not_equal(ascending[:, 1:], ascending[:, :-1], out=first[:, 1:])
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=x.size)
    found = np.empty(x.shape)
    means = np.repeat(starts % x.shape[1] + (counts + 1) / 2, counts).reshape(x.shape)
    np.put_along_axis(found, order, means, axis=1)
    if x.dtype.kind not in "iub":
        found[np.isnan(ascending[:, -1].astype(np.float64))] = np.nan
    return found
