"""Genotypes whose missing ones are replaced by the means of their variants, as a matrix of float32."""

from dataclasses import replace

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.scratch import read_block
from oocgemm.stores.transformed import SLAB, is_missing, positions
from oocgemm.stores.view import View


class ImputedMatrix(View):
    """A read-only view of a matrix of genotypes, in which missing ones have the mean of their variant."""

    def __init__(self, matrix: Matrix, variant_axis: int, code: float, means: Array) -> None:
        """View a matrix.

        Args:
            matrix: the genotypes.
            variant_axis: 1 if the columns of the matrix are variants, 0 if its rows are.
            code: the code of missing genotypes.
            means: of the known genotypes of each variant.
        """
        super().__init__(matrix)
        self._variant_axis, self._code, self._means = variant_axis, code, means.astype(np.float32)
        self.shape, self.dtype = matrix.shape, self._means.dtype
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * (itemsize + 1)
        self.layout = replace(
            found,
            decode_bytes=found.decode_bytes + piece,
            resident_bytes=found.resident_bytes + self._means.nbytes,
            itemsize=self.dtype.itemsize,
        )

    def fingerprint(self) -> dict[str, object] | None:
        """Return that of the matrix, and that it is imputed: its statistics are others."""
        found = self._matrix.fingerprint()
        return found and found | {"imputed": "means"}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block("genotypes", self._matrix, (r0, r1), (c0, c1))
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            np.copyto(part, raw)
            missing = is_missing(raw, self._code)
            assert missing is not None
            at = positions(missing)
            part[at] = self._means[at[self._variant_axis] + (r0, c0)[self._variant_axis]]
