"""Read-only matrices: the base of all of them, and the views of a matrix that another one is read through."""

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np

from oocgemm.planning import Layout
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.tiling import Range, length
from oocgemm.stores.base import Array, Matrix, ReadOnly, described


class View(ReadOnly):
    """A read-only view of a matrix. Subclasses define `shape`, `layout` and `read`."""

    what = "a view"

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.name = matrix.name
        self.dtype = matrix.dtype

    def fingerprint(self) -> dict[str, object] | None:
        return self._matrix.fingerprint()

    def describe(self) -> dict[str, object]:
        return self._matrix.describe()

    def identities(self) -> set[object]:
        return self._matrix.identities()


def underlying(matrix: Matrix) -> Matrix:
    """Return the matrix that a view reads, or a matrix that is no view."""
    while isinstance(matrix, View):
        matrix = matrix._matrix
    return matrix


class RowsMatrix(View):
    """A read-only view of some successive rows of a matrix. They begin at a border of chunks."""

    def __init__(self, matrix: Matrix, rows: Range) -> None:
        super().__init__(matrix)
        self._top = rows[0]
        self.shape = length(rows), matrix.shape[1]
        self.layout: Layout = matrix.layout.copied()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        self._matrix.read((self._top + rows[0], self._top + rows[1]), cols, out)


class MirroredMatrix(View):
    """A read-only view of a square matrix that mirrors one triangle at the diagonal."""

    def __init__(self, matrix: Matrix, *, upper: bool) -> None:
        """View a matrix of which the lower triangle, or with `upper` the upper one, is stored."""
        super().__init__(matrix)
        self._upper = upper
        self.shape = matrix.shape
        self.layout: Layout = matrix.layout

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        below, above = rows[0] >= cols[1] - 1, rows[1] - 1 <= cols[0]
        if above if self._upper else below:
            self._matrix.read(rows, cols, out)
            return
        turned = np.empty((cols[1] - cols[0], rows[1] - rows[0]), self.dtype)
        self._matrix.read(cols, rows, turned)
        mirrored = turned.T.conj() if self.dtype.kind == "c" else turned.T
        if below if self._upper else above:
            out[...] = mirrored
            return
        self._matrix.read(rows, cols, out)
        place = np.subtract.outer(np.arange(*rows), np.arange(*cols))
        np.copyto(out, mirrored, where=place > 0 if self._upper else place < 0)


class KeptMatrix(View):
    """A view of some rows (`axis` 0) or columns (1) of a matrix, those with the ascending numbers `kept`."""

    def __init__(self, matrix: Matrix, axis: int, kept: Array) -> None:
        super().__init__(matrix)
        self._axis, self._kept = axis, kept
        self.shape = (len(kept), matrix.shape[1]) if axis == 0 else (matrix.shape[0], len(kept))
        self.layout: Layout = matrix.layout.computed(0, kept.nbytes)

    def fingerprint(self) -> dict[str, object] | None:
        found = self._matrix.fingerprint()
        return found and found | {"kept": hashlib.sha256(self._kept.tobytes()).hexdigest()[:16]}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        # Lines of a run are adjacent in the matrix.
        lines = self._kept[slice(*(rows, cols)[self._axis])]
        ends = np.flatnonzero(np.diff(lines, append=-1) != 1) + 1
        for start, stop in pairwise([0, *ends]):
            run = int(lines[start]), int(lines[stop - 1]) + 1
            if self._axis == 0:
                self._matrix.read(run, cols, out[start:stop])
            else:
                self._matrix.read(rows, run, out[:, start:stop])


class ConstantRows(ReadOnly):
    """A matrix of `count` equal rows. It is never stored."""

    what = "a matrix of equal rows"

    def __init__(self, name: str, row: Array, count: int, resident_bytes: int = 0) -> None:
        """Make the matrix.

        Args:
            name: its name in messages.
            row: one row, a vector.
            count: the number of rows.
            resident_bytes: host memory that the caller needs during the run (`Layout.resident_bytes`).
        """
        self.name, self._row = name, row
        self.shape = count, len(row)
        self.dtype: np.dtype[Any] = row.dtype
        self.layout = Layout(itemsize=row.itemsize, resident_bytes=resident_bytes)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        out[...] = self._row[slice(*cols)]

    def describe(self) -> dict[str, object]:
        return described(self, "equal rows")


class SlicedMatrix(View):
    """A view of A or B for the product of stacked slices. Elements outside the matrix are zeros.

    op(A) of that product has, in row q * rows + i and column p, the element in row i and column p of slice q.
    op(B) has the rows of one slice, `Slicing.number`.
    """

    def __init__(self, matrix: Matrix, slicing: Slicing, *, transposed: bool) -> None:
        """View A or B.

        Args:
            matrix: the operand, named "A" or "B".
            slicing: the slices of k.
            transposed: whether op() transposes the operand.
        """
        super().__init__(matrix)
        self._slicing = slicing
        self._k_axis = int((matrix.name == "A") != transposed)
        other = matrix.shape[1 - self._k_axis]
        self._stacks = matrix.name == "A"
        if self._stacks:
            other = slicing.rows * len(slicing.ranges)
        self.shape = (slicing.depth, other) if self._k_axis == 0 else (other, slicing.depth)
        self.layout: Layout = matrix.layout.copied()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        block = rows, cols
        along_k, other = block[self._k_axis], block[1 - self._k_axis]
        if not self._stacks:
            assert self._slicing.number is not None
            self._read_slice(self._slicing.number, along_k, other, out)
            return
        height = self._slicing.rows
        for number in range(other[0] // height, -(-other[1] // height)):
            top = number * height
            start, stop = max(other[0], top), min(other[1], top + height)
            part = slice(start - other[0], stop - other[0])
            target = out[:, part] if self._k_axis == 0 else out[part]
            self._read_slice(number, along_k, (start - top, stop - top), target)

    def _read_slice(self, number: int, along_k: Range, other: Range, out: Array) -> None:
        """Read a block of one slice. `other` is a range along the axis of the matrix that is not k."""
        first, end = self._slicing.ranges[number]
        inside = [
            (min(along_k[0] + first, end), min(along_k[1] + first, end)),
            (other[0], min(other[1], self._matrix.shape[1 - self._k_axis])),
        ]
        if self._k_axis == 1:
            inside.reverse()
        rows, cols = inside
        height, width = max(0, length(rows)), max(0, length(cols))
        out[height:] = 0
        out[:height, width:] = 0
        if height and width:
            self._matrix.read(rows, cols, out[:height, :width])
