"""A matrix of which only one triangle is stored, read as the Hermitian matrix that it represents."""

import numpy as np

from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Matrix
from oocgemm.stores.view import View


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
