"""A matrix whose elements are transformed by `Transform` when it is read, on the CPU."""

import hashlib
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, Self

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning import Layout
from oocgemm.planning.expansion import VECTOR_BYTES
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.scratch import in_float64, read_block
from oocgemm.stores.transform import Transform
from oocgemm.stores.view import View

# Elements that are transformed at a time. With fewer, threads mostly wait for the GIL.
SLAB = 1 << 18
# Bytes of the temporary arrays for one slab: float64 elements, and which of them are missing.
SLAB_BYTES = SLAB * 10


@dataclass(frozen=True, eq=False)
class Vectors:
    """What a transform needs per index along k, in float64.

    A missing element becomes `fill`, any other element ``(f(x) - center) * inverse``. `corrected` is
    subtracted by a correction of C; None if nothing is (`Transform.corrects`).
    """

    fill: Array
    center: Array
    inverse: Array
    corrected: Array | None = None


class TransformedMatrix(View):
    """A read-only view of a matrix, with its elements transformed.

    `Vectors` are known only if the matrix will be read: a plan does not need them.
    """

    def __init__(
        self,
        matrix: Matrix,
        transform: Transform,
        k_axis: int,
        lines: str,
        vectors: Vectors | None = None,
    ) -> None:
        """View a matrix. Raises `InputError` if the transform cannot be applied to it.

        Args:
            matrix: the operand as it is stored.
            transform: what happens to its elements.
            k_axis: the axis of the stored matrix over which the product sums.
            lines: what the indices along this axis are called in messages, "rows" or "columns".
            vectors: the numbers per index along this axis.
        """
        super().__init__(matrix)
        self.stored, self.transform, self.k_axis, self.vectors = matrix, transform, k_axis, vectors
        self.lines = lines
        self.code = transform.code(matrix.name, matrix.dtype)
        self.shape = matrix.shape
        self.dtype: np.dtype[Any] = transform.result(matrix.name, matrix.dtype)
        for given in ("center", "scale", "impute"):
            values = getattr(transform, given)
            if isinstance(values, np.ndarray) and len(values) != matrix.shape[k_axis]:
                raise InputError(
                    f"{given} has {len(values)} elements, and {matrix.name} has {matrix.shape[k_axis]} "
                    f"{lines}: pass one number for each of them"
                )
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * itemsize
        self.layout: Layout = replace(
            found,
            decode_bytes=found.decode_bytes + piece + SLAB_BYTES,
            # The numbers, and a copy of them while they go to a device.
            resident_bytes=found.resident_bytes + 2 * VECTOR_BYTES * matrix.shape[k_axis],
            page_cached=found.page_cached or found.in_memory,
            in_memory=False,
            in_place=False,
            zero_copy_width=0,
        )

    @property
    def _casts(self) -> bool:
        """Whether elements are only cast. float64, by which others go, would give the same numbers."""
        change = self.transform
        changed = change.log1p or change.center is not None or change.scale is not None
        return self.code is None and not changed and self.stored.dtype.name not in ("int32", "int64")

    def with_vectors(self, vectors: Vectors) -> Self:
        """Return the same view with its vectors, which can be read."""
        return type(self)(self.stored, self.transform, self.k_axis, self.lines, vectors)

    def wide(self) -> Self:
        """Return the same view with elements in float64, which are not rounded."""
        transform = replace(self.transform, cast="float64")
        return type(self)(self.stored, transform, self.k_axis, self.lines, self.vectors)

    def describe(self) -> dict[str, object]:
        return super().describe() | {"transform": transform_of(self)}

    @property
    def is_copy(self) -> bool:
        """Whether the elements that are multiplied are those in storage."""
        return self.transform.corrects and self.code is None

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block("stored", self.stored, (r0, r1), (c0, c1))
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            self._expand(raw, (c0 if self.k_axis else r0), part)

    def _expand(self, raw: Array, first: int, out: Array) -> None:
        """Transform a block whose first index along k is `first`."""
        vectors = self.vectors
        assert vectors is not None, "the matrix was opened only to plan"
        if self._casts:
            np.copyto(out, raw, casting="unsafe")
            return
        for rows, cols in pieces((0, raw.shape[0]), (0, raw.shape[1]), (1, SLAB), SLAB):
            start, stop = cols if self.k_axis else rows
            here = slice(first + start, first + stop)
            fill, shape = vectors.fill[here], (1, -1) if self.k_axis else (-1, 1)
            center, inverse = (x[here].reshape(shape) for x in (vectors.center, vectors.inverse))
            at = slice(*rows), slice(*cols)
            x = in_float64(raw[at])
            absent = is_missing(x, self.code)
            with np.errstate(all="ignore"):
                if self.transform.log1p:
                    np.log1p(x, out=x)
                x -= center
                x *= inverse
                if absent is not None:
                    lost = positions(absent)
                    x[lost] = fill[lost[self.k_axis]]
                np.copyto(out[at], x, casting="unsafe")


def is_missing(x: Array, code: float | None) -> Array | None:
    """Return which elements are missing; None if no element can be."""
    if code is None:
        return None
    # NumPy would cast all integers to compare them with a float.
    same = int(code) if x.dtype.kind == "i" else code
    found: Array = np.isnan(x) if isnan(code) else x == same
    return found


def positions(mask: Array) -> tuple[Array, ...]:
    """Return the indices that `np.nonzero` returns, in a tenth of its time if the mask is mostly false."""
    return np.unravel_index(np.flatnonzero(mask), mask.shape)


def transform_of(matrix: Matrix) -> str:
    """Return what distinguishes the transform of a matrix from others, as text; "" if it has none."""
    if not isinstance(matrix, TransformedMatrix):
        return ""
    found = f"{matrix.transform or 'no change'} to {matrix.dtype}"
    if matrix.vectors is None:
        return found
    digest = hashlib.sha256()
    v = matrix.vectors
    for vector in (v.fill, v.center, v.inverse, *(() if v.corrected is None else (v.corrected,))):
        digest.update(np.ascontiguousarray(vector).tobytes())
    return f"{found}, numbers {digest.hexdigest()[:16]}"
