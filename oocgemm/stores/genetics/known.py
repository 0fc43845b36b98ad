"""Which genotypes of a matrix are known, as a matrix of zeros and ones."""

import hashlib
from dataclasses import replace

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.scratch import read_block
from oocgemm.stores.transformed import SLAB, is_missing
from oocgemm.stores.view import View


class KnownMatrix(View):
    """A read-only view of a matrix with 1 where a genotype is known and its variant is used, else 0.

    The product of the view and its transpose has the numbers of variants that both of two individuals have.
    """

    def __init__(
        self, matrix: Matrix, variant_axis: int, code: float | None, used: Array, dtype: str
    ) -> None:
        """View a matrix.

        Args:
            matrix: the genotypes.
            variant_axis: 1 if the columns of the matrix are variants, 0 if its rows are.
            code: the code of missing genotypes; None if there are none.
            used: whether each variant is used.
            dtype: of the zeros and ones.
        """
        super().__init__(matrix)
        self._variant_axis, self._code, self._used = variant_axis, code, used.astype(dtype)
        self.shape, self.dtype = matrix.shape, np.dtype(dtype)
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * (itemsize + 1)
        self.layout = replace(
            found,
            decode_bytes=found.decode_bytes + piece,
            resident_bytes=found.resident_bytes + self._used.nbytes,
            page_cached=found.page_cached or found.in_memory,
            in_memory=False,
            in_place=False,
            zero_copy_width=0,
            itemsize=self.dtype.itemsize,
        )

    @property
    def change(self) -> str:
        """What distinguishes the elements from those of other views of the matrix, as text."""
        digest = hashlib.sha256(self._used.tobytes()).hexdigest()[:16]
        return f"known, missing={self._code}, variants {digest}"

    def describe(self) -> dict[str, object]:
        return super().describe() | {"transform": self.change}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block("genotypes", self._matrix, (r0, r1), (c0, c1))
            used = self._used[c0:c1] if self._variant_axis else self._used[r0:r1, None]
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            missing = is_missing(raw, self._code)
            if missing is None:
                np.copyto(part, used)
            else:
                np.multiply(used, np.logical_not(missing, out=missing), out=part)
