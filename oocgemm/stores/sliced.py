"""Operands of the product that computes the partial products of slices of k (`Slicing`), as views."""

from dataclasses import replace

from oocgemm.planning import Layout
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.tiling import Range, length
from oocgemm.stores.base import Array, Matrix
from oocgemm.stores.view import View


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
        self.layout: Layout = replace(matrix.layout, zero_copy_width=0, in_place=False)

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
