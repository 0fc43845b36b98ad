"""Matrices whose blocks are read as boxes (n-d blocks) of an array.

This is the general case of `oocgemm.stores.folding`: the chunks of the array are no rectangles of the matrix.
A read copies each chunk's part of a block, chunk by chunk, and no chunk is read twice for a block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from math import prod
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Chunked, Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, ReadOnly, checked, described, transient
from oocgemm.stores.declared import NOTHING, Declared
from oocgemm.stores.folding import Box, Fold, band, boxes

# A box of an array of another package takes this many times its size in host memory, for as many copies: the
# stored elements, the decoded elements, the array that the package returns, and parts that are joined.
COPIES = 4


class BoxMatrix(ReadOnly):
    """A read-only matrix that is folded from an array."""

    what = "a view of an array"

    def __init__(
        self,
        name: str,
        fold: Fold,
        array: Any,
        *,
        chunk: Sequence[int] | None = None,
        declared: Declared = NOTHING,
        store: str = "memory",
        path: str | None = None,
        fingerprint: Callable[[], dict[str, object]] | None = None,
        identities: Callable[[], set[object]] = set,
        turn: AbstractContextManager[Any] | None = None,
        load: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Fold an array, which is read by slices.

        Args:
            name: the name of the matrix in messages.
            fold: the axes of the rows and columns.
            array: an object with a shape, a dtype and slicing.
            chunk: the shape of its chunks, which are read whole; None for an array in memory.
            declared: what it declares about its elements.
            store, path: the store and the path, for the log and for messages.
            fingerprint, identities: as those of `Matrix`.
            turn: entered while the array is read.
            load: converts what slicing returns to an ndarray.
        """
        self.name, self.declared, self.kind = name, declared, store
        dtype = np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype))
        self.shape, self.dtype = checked(name, fold.shape, dtype, declared)
        self._fold, self.array, self._path = fold, array, path
        self._fingerprint, self._identities = fingerprint, identities
        self._turn: AbstractContextManager[Any] = nullcontext() if turn is None else turn
        self._load = load
        itemsize = self.dtype.itemsize
        self._cell = (
            tuple(array.shape) if chunk is None else grown(chunk, array.shape, BATCH_BYTES // itemsize)
        )
        if chunk is None:
            self.layout: Layout = Chunked(page_cached=True, itemsize=itemsize)
        else:
            self.layout = Chunked(
                read_chunk=(band(fold.rows, self._cell), band(fold.cols, self._cell)),
                partial_reads=False,
                itemsize=itemsize,
                decode_bytes=COPIES * prod(self._cell) * itemsize,
            )

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read a block. Raises `ExecutionError` for a box that cannot be read."""
        wanted: dict[tuple[int, ...], list[tuple[Box, Array]]] = {}
        for box, target in self._boxes(rows, cols, out):
            for number, part in _cut(box, self._cell):
                inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))
                wanted.setdefault(number, []).append((part, target[inside]))
        for parts in wanted.values():
            (box, target), *more = parts
            if not more:
                self._copy(box, target)
                continue
            # A chunk of which a block has several boxes is read once.
            every = [part for part, _ in parts]
            hull = tuple(
                (min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*every, strict=True)
            )
            found = np.empty([b - a for a, b in hull], self.dtype)
            self._copy(hull, found)
            for box, target in parts:
                target[...] = found[
                    tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, hull, strict=True))
                ]

    def _boxes(self, rows: Range, cols: Range, out: Array) -> Iterator[tuple[Box, Array]]:
        """Yield the boxes of a block, and for each a view of `out` with the axes of the array."""
        fold = self._fold
        back = np.argsort(fold.order)
        fixed = tuple((axis.start, axis.start + 1) for axis in fold.fixed)
        for (top, down), (left, across) in product(boxes(fold.rows, rows), boxes(fold.cols, cols)):
            found = *down, *across, *fixed
            part = out[
                top - rows[0] : top - rows[0] + prod(b - a for a, b in down),
                left - cols[0] : left - cols[0] + prod(b - a for a, b in across),
            ]
            target = part.reshape([b - a for a, b in found]).transpose(back)
            yield tuple(found[at] for at in back), target

    def _copy(self, box: Box, out: Array) -> None:
        try:
            with self._turn:
                found = self._load(self.array[tuple(slice(a, b) for a, b in box)])
        except (ExecutionError, MemoryError):
            raise
        except Exception as error:  # arrays of other packages raise exceptions of many types
            if transient(error):
                raise
            where = ", ".join(f"{a}:{b}" for a, b in box)
            raise ExecutionError(
                f"[{where}] of {self._path or self.name} cannot be read, it may be damaged: {error}"
            ) from error
        if np.ma.is_masked(found):
            raise ExecutionError("elements are masked: replace them, with .filled(value)")
        if found.shape != out.shape or found.dtype.newbyteorder("=") != self.dtype:
            raise ExecutionError(
                f"{self.kind} returned a block of shape {found.shape} and dtype {found.dtype}, where "
                f"{out.shape} and {self.dtype} were expected"
            )
        np.copyto(out, found, casting="equiv")

    def fingerprint(self) -> dict[str, object] | None:
        found = None if self._fingerprint is None else self._fingerprint()
        return found and found | {"folded": self._fold.stated}

    def describe(self) -> dict[str, object]:
        return described(self, self.kind, self._path)

    def identities(self) -> set[object]:
        return self._identities()


def grown(chunk: Sequence[int], shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """Return the shape of a box of whole chunks: one chunk, or several small ones with about `elements`.

    >>> grown((1, 2, 3), (9, 4, 9), 36), grown((8, 8), (9, 9), 10)
    ((1, 4, 9), (8, 8))
    """
    found = [max(1, min(size, extent)) for size, extent in zip(chunk, shape, strict=True)]
    for at in reversed(range(len(found))):
        count = max(1, elements // prod(found))
        found[at] = min(found[at] * count, max(1, -(-shape[at] // found[at])) * found[at])
    return tuple(found)


def _cut(box: Box, cell: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Cut a box along the borders of cells. Yield each part with the number of its cell."""
    along = [
        [(at, (max(a, at * size), min(b, (at + 1) * size))) for at in range(a // size, -(-b // size))]
        for (a, b), size in zip(box, cell, strict=True)
    ]
    for part in product(*along):
        yield tuple(at for at, _ in part), tuple(span for _, span in part)
