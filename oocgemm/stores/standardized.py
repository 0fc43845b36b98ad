"""A matrix whose rows or columns are standardized when it is read, on the CPU."""

import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.genetics.known import KnownMatrix
from oocgemm.stores.scratch import in_float64, read_block
from oocgemm.stores.transformed import SLAB, SLAB_BYTES, transform_of
from oocgemm.stores.view import View

# The dtype of the elements, by the dtype in storage, if it is not the same.
RESULTS = dict.fromkeys(("float16", "bfloat16", "int8", "int32", "int64"), "float32")


class StandardizedMatrix(View):
    """A read-only view of a matrix with ``(x - mean) * inverse`` in place of each element x.

    The mean is that of the element's *line*, its row or its column, in float64. So is the inverse, which is 1
    unless lines are scaled, and 0 for a line of equal elements. They are known only if the matrix will be
    read: a plan does not need them. The result has the dtype of `RESULTS`, or the one that is given. With
    `kept`, the view has only these lines of the matrix, in ascending order.
    """

    def __init__(
        self,
        matrix: Matrix,
        line_axis: int,
        *,
        scaled: bool,
        mean: Array | None = None,
        inverse: Array | None = None,
        dtype: np.dtype[Any] | None = None,
        kept: Array | None = None,
    ) -> None:
        """View a matrix whose lines are its rows (`line_axis` 0) or its columns (1)."""
        super().__init__(matrix)
        self.stored, self.line_axis, self.scaled, self.kept = matrix, line_axis, scaled, kept
        self._mean, self._inverse = mean, inverse
        lines = matrix.shape[line_axis] if kept is None else len(kept)
        self.shape = (lines, matrix.shape[1]) if line_axis == 0 else (matrix.shape[0], lines)
        self.dtype = dtype or np.dtype(RESULTS.get(matrix.dtype.name, matrix.dtype.name))
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * itemsize
        self.layout = replace(
            found,
            decode_bytes=found.decode_bytes + piece + SLAB_BYTES,
            resident_bytes=found.resident_bytes + 24 * lines,
            page_cached=found.page_cached or found.in_memory,
            in_memory=False,
            in_place=False,
            zero_copy_width=0,
            itemsize=self.dtype.itemsize,
        )

    def with_numbers(self, mean: Array, inverse: Array) -> Self:
        """Return the same view with its numbers per line, which can be read."""
        given: Any = {"scaled": self.scaled, "dtype": self.dtype, "kept": self.kept}
        return type(self)(self.stored, self.line_axis, mean=mean, inverse=inverse, **given)

    def wide(self) -> Self:
        """Return the same view with elements that are not rounded to float32."""
        given: Any = {"scaled": self.scaled, "dtype": np.dtype(np.float64), "kept": self.kept}
        return type(self)(self.stored, self.line_axis, mean=self._mean, inverse=self._inverse, **given)

    @property
    def factors(self) -> Array:
        """What correlations of each line are multiplied by: 1, or NaN for a line of equal elements."""
        assert self._inverse is not None, "the matrix was opened only to plan"
        return np.where(self._inverse == 0, np.nan, 1.0)

    @property
    def change(self) -> str:
        """What distinguishes the elements from those of other views of the matrix, as text."""
        digest = hashlib.sha256()
        for numbers in (self._mean, self._inverse, self.kept):
            digest.update(b"" if numbers is None else np.ascontiguousarray(numbers).tobytes())
        what = "scaled" if self.scaled else "centered"
        return f"lines of axis {self.line_axis} {what} to {self.dtype}, numbers {digest.hexdigest()[:16]}"

    def describe(self) -> dict[str, object]:
        return super().describe() | {"transform": self.change}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        if self.kept is None:
            self._read(rows, cols, out, 0)
            return
        # The lines of a run are adjacent in the matrix.
        lines = self.kept[slice(*(rows, cols)[self.line_axis])]
        ends = np.flatnonzero(np.diff(lines, append=-1) != 1) + 1
        for start, stop in pairwise([0, *ends]):
            run, first = (int(lines[start]), int(lines[stop - 1]) + 1), (rows, cols)[self.line_axis][0]
            ahead = run[0] - first - start
            if self.line_axis == 0:
                self._read(run, cols, out[start:stop], ahead)
            else:
                self._read(rows, run, out[:, start:stop], ahead)

    def _read(self, rows: Range, cols: Range, out: Array, ahead: int) -> None:
        """Read a block of the matrix. The index of its lines in the matrix is larger by `ahead`."""
        mean, inverse = self._mean, self._inverse
        assert mean is not None, "the matrix was opened only to plan"
        assert inverse is not None
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block("unstandardized", self.stored, (r0, r1), (c0, c1))
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            first = (r0, c0)[self.line_axis] - ahead
            for top, left in pieces((0, raw.shape[0]), (0, raw.shape[1]), (1, SLAB), SLAB):
                start, stop = (top, left)[self.line_axis]
                here, shape = slice(first + start, first + stop), (-1, 1) if self.line_axis == 0 else (1, -1)
                x = in_float64(raw[slice(*top), slice(*left)])
                x -= mean[here].reshape(shape)
                x *= inverse[here].reshape(shape)
                np.copyto(part[slice(*top), slice(*left)], x, casting="unsafe")


def change_of(matrix: Matrix) -> str:
    """Return what distinguishes the elements of a matrix from those in storage, as text; "" if nothing."""
    return matrix.change if isinstance(matrix, StandardizedMatrix | KnownMatrix) else transform_of(matrix)
