"""Matrices whose elements are computed from those in storage when they are read, on the CPU.

`TransformedMatrix` applies a `Transform`, `StandardizedMatrix` standardizes rows or columns, `ImputedMatrix`
replaces missing genotypes by means, and `KnownMatrix` has ones where genotypes are known.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan
from typing import Any, Self

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning.expansion import VECTOR_BYTES
from oocgemm.planning.tiling import Range
from oocgemm.stores.arrays import in_float64, read_block
from oocgemm.stores.base import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.transform import Transform
from oocgemm.stores.view import View

# Elements that are transformed at a time. With fewer, threads mostly wait for the GIL.
SLAB = 1 << 18
# Bytes of the temporary arrays for one slab: float64 elements, and which of them are missing.
SLAB_BYTES = SLAB * 10
# The dtype of standardized elements, by the dtype in storage, if it is not the same.
RESULTS = dict.fromkeys(("float16", "bfloat16", "int8", "int32", "int64"), "float32")


class ElementView(View):
    """A read-only view of a matrix that reads it piece by piece, and computes its elements from each piece.

    Attributes:
        stored: the matrix that is read.
        change: what distinguishes the elements from those of other views of the matrix, as text.
    """

    purpose: str  # of the memory for a piece (`read_block`)
    change = ""

    def __init__(self, matrix: Matrix, *, temporary_bytes: int, mask: bool, resident_bytes: int) -> None:
        """View a matrix.

        Args:
            matrix: what is read.
            temporary_bytes: what computing the elements takes, besides the piece.
            mask: whether it takes a byte per element of the piece.
            resident_bytes: the numbers that the view holds.
        """
        super().__init__(matrix)
        self.stored, self.shape = matrix, matrix.shape
        found, itemsize = matrix.layout, matrix.dtype.itemsize
        self._chunk = (1, SLAB) if found.partial_reads else found.read_chunk
        self._batch = max(1, BATCH_BYTES // itemsize)
        piece = max(self._chunk[0] * self._chunk[1], 2 * self._batch) * (itemsize + mask)
        self.layout = found.computed(piece + temporary_bytes, resident_bytes)

    def _results_in(self, dtype: np.dtype[Any]) -> None:
        """Set the dtype of the elements, which the layout shows, too."""
        self.dtype, self.layout = dtype, replace(self.layout, itemsize=dtype.itemsize)

    def describe(self) -> dict[str, object]:
        return super().describe() | ({"transform": self.change} if self.change else {})

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._batch):
            raw = read_block(self.purpose, self.stored, (r0, r1), (c0, c1))
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            self._compute(raw, (r0, r1), (c0, c1), part)

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        """Compute the elements of a piece, the block `raw` of the matrix at these rows and columns."""
        raise NotImplementedError


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


class TransformedMatrix(ElementView):
    """A read-only view of a matrix, with its elements transformed.

    `Vectors` are known only if the matrix will be read: a plan does not need them.
    """

    purpose = "stored"

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
        # The numbers, and a copy of them while they go to a device.
        resident_bytes = 2 * VECTOR_BYTES * matrix.shape[k_axis]
        super().__init__(matrix, temporary_bytes=SLAB_BYTES, mask=False, resident_bytes=resident_bytes)
        self.transform, self.k_axis, self.vectors, self.lines = transform, k_axis, vectors, lines
        self.code = transform.code(matrix.name, matrix.dtype)
        self.dtype = transform.result(matrix.name, matrix.dtype)
        for given in ("center", "scale", "impute"):
            values = getattr(transform, given)
            if isinstance(values, np.ndarray) and len(values) != matrix.shape[k_axis]:
                raise InputError(
                    f"{given} has {len(values)} elements, and {matrix.name} has {matrix.shape[k_axis]} "
                    f"{lines}: pass one number for each of them"
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

    @property
    def change(self) -> str:  # type: ignore[override]
        found, v = f"{self.transform or 'no change'} to {self.dtype}", self.vectors
        if v is None:
            return found
        given = v.fill, v.center, v.inverse, *(() if v.corrected is None else (v.corrected,))
        return f"{found}, numbers {_digest(*given)}"

    @property
    def is_copy(self) -> bool:
        """Whether the elements that are multiplied are those in storage."""
        return self.transform.corrects and self.code is None

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        first = (cols if self.k_axis else rows)[0]
        vectors = self.vectors
        assert vectors is not None, "the matrix was opened only to plan"
        if self._casts:
            np.copyto(out, raw, casting="unsafe")
            return
        for top, left in pieces((0, raw.shape[0]), (0, raw.shape[1]), (1, SLAB), SLAB):
            start, stop = left if self.k_axis else top
            here = slice(first + start, first + stop)
            fill, shape = vectors.fill[here], (1, -1) if self.k_axis else (-1, 1)
            center, inverse = (x[here].reshape(shape) for x in (vectors.center, vectors.inverse))
            at = slice(*top), slice(*left)
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


class StandardizedMatrix(ElementView):
    """A read-only view of a matrix with ``(x - mean) * inverse`` in place of each element x.

    The mean is that of the element's *line*, its row or its column, in float64. So is the inverse, which is 1
    unless lines are scaled, and 0 for a line of equal elements. They are known only if the matrix will be
    read: a plan does not need them. The result has the dtype of `RESULTS`, or the one that is given. With
    `kept`, the view has only these lines of the matrix, in ascending order.
    """

    purpose = "unstandardized"

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
        lines = matrix.shape[line_axis] if kept is None else len(kept)
        super().__init__(matrix, temporary_bytes=SLAB_BYTES, mask=False, resident_bytes=24 * lines)
        self.line_axis, self.scaled, self.kept = line_axis, scaled, kept
        self._mean, self._inverse = mean, inverse
        self.shape = (lines, matrix.shape[1]) if line_axis == 0 else (matrix.shape[0], lines)
        self._results_in(dtype or np.dtype(RESULTS.get(matrix.dtype.name, matrix.dtype.name)))

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
    def change(self) -> str:  # type: ignore[override]
        what, numbers = "scaled" if self.scaled else "centered", (self._mean, self._inverse, self.kept)
        return f"lines of axis {self.line_axis} {what} to {self.dtype}, numbers {_digest(*numbers)}"

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        if self.kept is None:
            super().read(rows, cols, out)
            return
        # The lines of a run are adjacent in the matrix.
        lines = self.kept[slice(*(rows, cols)[self.line_axis])]
        ends = np.flatnonzero(np.diff(lines, append=-1) != 1) + 1
        for start, stop in pairwise([0, *ends]):
            run = int(lines[start]), int(lines[stop - 1]) + 1
            if self.line_axis == 0:
                super().read(run, cols, out[start:stop])
            else:
                super().read(rows, run, out[:, start:stop])

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        mean, inverse = self._mean, self._inverse
        assert mean is not None, "the matrix was opened only to plan"
        assert inverse is not None
        first = (rows, cols)[self.line_axis][0]
        if self.kept is not None:
            first = int(np.searchsorted(self.kept, first))
        for top, left in pieces((0, raw.shape[0]), (0, raw.shape[1]), (1, SLAB), SLAB):
            start, stop = (top, left)[self.line_axis]
            here, shape = slice(first + start, first + stop), (-1, 1) if self.line_axis == 0 else (1, -1)
            x = in_float64(raw[slice(*top), slice(*left)])
            x -= mean[here].reshape(shape)
            x *= inverse[here].reshape(shape)
            np.copyto(out[slice(*top), slice(*left)], x, casting="unsafe")


class ImputedMatrix(ElementView):
    """A read-only view of a matrix of genotypes, in which missing ones have the mean of their variant."""

    purpose = "genotypes"

    def __init__(self, matrix: Matrix, variant_axis: int, code: float, means: Array) -> None:
        """View a matrix.

        Args:
            matrix: the genotypes.
            variant_axis: 1 if the columns of the matrix are variants, 0 if its rows are.
            code: the code of missing genotypes.
            means: of the known genotypes of each variant.
        """
        numbers = means.astype(np.float32)
        super().__init__(matrix, temporary_bytes=0, mask=True, resident_bytes=numbers.nbytes)
        self._variant_axis, self._code, self._means = variant_axis, code, numbers
        self._results_in(numbers.dtype)

    def fingerprint(self) -> dict[str, object] | None:
        """Return that of the matrix, and that it is imputed: its statistics are others."""
        found = self._matrix.fingerprint()
        return found and found | {"imputed": "means"}

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        np.copyto(out, raw)
        missing = is_missing(raw, self._code)
        assert missing is not None
        at = positions(missing)
        out[at] = self._means[at[self._variant_axis] + (rows, cols)[self._variant_axis][0]]


class KnownMatrix(ElementView):
    """A read-only view of a matrix with 1 where a genotype is known and its variant is used, else 0.

    The product of the view and its transpose has the numbers of variants that both of two individuals have.
    """

    purpose = "genotypes"

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
        numbers = used.astype(dtype)
        super().__init__(matrix, temporary_bytes=0, mask=True, resident_bytes=numbers.nbytes)
        self._variant_axis, self._code, self._used = variant_axis, code, numbers
        self._results_in(np.dtype(dtype))

    @property
    def change(self) -> str:  # type: ignore[override]
        return f"known, missing={self._code}, variants {_digest(self._used)}"

    def _compute(self, raw: Array, rows: Range, cols: Range, out: Array) -> None:
        used = self._used[slice(*cols)] if self._variant_axis else self._used[slice(*rows), None]
        missing = is_missing(raw, self._code)
        if missing is None:
            np.copyto(out, used)
        else:
            np.multiply(used, np.logical_not(missing, out=missing), out=out)


def change_of(matrix: Matrix) -> str:
    """Return what distinguishes the elements of a matrix from those in storage, as text; "" if nothing."""
    return matrix.change if isinstance(matrix, ElementView) else ""


def _digest(*numbers: Array | None) -> str:
    digest = hashlib.sha256()
    for each in numbers:
        digest.update(b"" if each is None else np.ascontiguousarray(each).tobytes())
    return digest.hexdigest()[:16]
