"""The operand that `keep` returns: some rows and columns of a matrix, in any order.

The operand, a `Kept`, only says what is kept. When a verb opens it, it becomes a `KeptMatrix`. A line is a
row or a column. Lines that are adjacent are read as one block. Other lines that are near each other are read
with those between them, so that a chunk is decoded once for all of its lines.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np

from oocgemm.errors import InputError
from oocgemm.planning.tiling import Range, length
from oocgemm.stores.arrays import read_block
from oocgemm.stores.base import BATCH_BYTES, Array, Composite, Matrix, View, is_path
from oocgemm.stores.capabilities import Genotypes, Selectable
from oocgemm.stores.declared import NOTHING, Declared
from oocgemm.values import dataclass

T = TypeVar("T")

LINES = ("rows", "columns")
# Lines are read one by one, without those between them, if fewer than one in MAX_GAPS is kept.
MAX_GAPS = 8


@dataclass(frozen=True, eq=False)
class Kept(Composite):
    """Some rows and columns of a matrix, for any verb. `keep` makes it.

    `rows` and `cols` are flags, one for each line, or numbers of lines; None for all.
    """

    source: Any
    rows: Array | None
    cols: Array | None

    def open(self, name: str) -> Matrix:
        from oocgemm.stores.opening import store_of

        matrix = store_of(self.source).open(name, self.source)
        for axis, given in enumerate((self.rows, self.cols)):
            if given is not None:
                matrix = kept(matrix, axis, numbers(matrix, axis, given))
        return matrix

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, source=change(self.source))


def keep(x: Any, rows: Any = None, cols: Any = None) -> Kept:
    """Return some rows and columns of a matrix as a matrix that every verb takes. Nothing is copied.

    Args:
        x: an operand as for `gemm`.
        rows, cols: the rows and the columns that are kept: an array of bool with one for each of them, or
            their numbers, in the order in which they are used; or the path of a file: a .npy file with such
            an array, or a text with one number per line. None keeps all.

    Returns:
        An operand for the verbs of this package. The matrix is opened by the verb, which raises `InputError`
            for arrays that do not fit. Sums of rows for `Transform.target_sum` are those of all columns.

    Raises:
        InputError: an array or a file has other elements.

    >>> import numpy as np, oocgemm
    >>> x = np.arange(6.0).reshape(3, 2)
    >>> oocgemm.gram(oocgemm.keep(x, rows=[2, 0]), backend="host").out
    array([[41.,  5.],
           [ 5.,  1.]])
    """
    return Kept(x, *(_chosen(*each) for each in (("rows", rows), ("cols", cols))))


def _chosen(option: str, given: Any) -> Array | None:
    """Return flags or numbers of lines. Raises `InputError` for anything else."""
    if given is None:
        return None
    found = _loaded(option, os.fspath(given)) if is_path(given) else np.asarray(given)
    if found.ndim == 1 and not found.size:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "biu":
        raise InputError(
            f"{option} is an array of shape {found.shape} and dtype {found.dtype}: pass a vector of bool, "
            f"one for each of the {option}, or of numbers of {option}"
        )
    kept = np.array(found) if found.dtype.kind == "b" else found.astype(np.int64)
    kept.setflags(write=False)
    return kept


def _loaded(option: str, path: str) -> Array:
    try:
        if path.endswith(".npy"):
            return np.asarray(np.load(path, allow_pickle=False))
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
        return np.array([int(line) for line in lines if line], np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"{option}: {path} is neither a .npy file nor a text with one number per line: {error}"
        ) from error


def numbers(matrix: Matrix, axis: int, given: Array) -> Array:
    """Return the numbers of lines. Raises `InputError` for flags or numbers that do not fit the matrix."""
    extent, lines = matrix.shape[axis], LINES[axis]
    option = ("rows", "cols")[axis]
    if given.dtype.kind == "b":
        if len(given) != extent:
            raise InputError(
                f"{option} has {len(given)} elements, and {matrix.name} has {extent} {lines}: pass one bool "
                "for each of them, or their numbers"
            )
        return np.flatnonzero(given)
    if (wrong := np.flatnonzero((given < 0) | (given >= extent))).size:
        raise InputError(
            f"{option}[{wrong[0]}] = {given[wrong[0]]}, and {matrix.name} has {extent} {lines}: pass numbers "
            f"from 0 to {extent - 1}"
        )
    return given


def kept(matrix: Matrix, axis: int, lines: Array) -> Matrix:
    """Return the rows (`axis` 0) or columns (1) of a matrix that have these numbers."""
    if isinstance(matrix, Selectable):
        return matrix.selected(axis, lines)
    return (KeptGenotypes if isinstance(matrix, Genotypes) else KeptMatrix)(matrix, axis, lines)


class KeptMatrix(View):
    """A read-only view of the rows (`axis` 0) or columns (1) of a matrix whose numbers are in `kept`."""

    def __init__(self, matrix: Matrix, axis: int, kept: Array) -> None:
        super().__init__(matrix)
        self.axis, self.kept = axis, kept
        self.shape = (len(kept), matrix.shape[1]) if axis == 0 else (matrix.shape[0], len(kept))
        chunk, itemsize = matrix.layout.read_chunk, matrix.dtype.itemsize
        self._chunk, self._batch = chunk, max(1, BATCH_BYTES // itemsize)
        self._ascending = bool((np.diff(kept) > 0).all())
        # A view of a view needs scratch memory of its own.
        self._purpose = f"kept {1 + int(getattr(matrix, '_purpose', 'kept 0').partition(' ')[2])}"
        piece = max(chunk[0] * chunk[1], self._batch) * itemsize
        self.layout = matrix.layout.computed(2 * piece, kept.nbytes)  # a block, and its kept lines

    @property
    def declared(self) -> Declared:
        """What the matrix declares about its elements."""
        found: Declared = getattr(self._matrix, "declared", NOTHING)
        return found

    def fingerprint(self) -> dict[str, object] | None:
        found = self._matrix.fingerprint()
        own = hashlib.sha256(self.kept.tobytes()).hexdigest()[:16]
        of_axis = f"{found.get('kept', '')}{own}{' columns' if self.axis else ''}" if found else ""
        return found and found | {"kept": of_axis}

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        lines, across = self.kept[slice(*(rows, cols)[self.axis])], (cols, rows)[self.axis]
        order = None
        if not self._ascending:
            order = np.argsort(lines, kind="stable")
            lines = lines[order]
        for start, stop in self._groups(lines, length(across)):
            low, high = int(lines[start]), int(lines[stop - 1]) + 1
            if order is None and high - low == stop - start:
                self._matrix.read(*self._block((low, high), across), out[self._block(slice(start, stop))])
                continue
            place = slice(start, stop) if order is None else order[start:stop]
            for first, end in self._cuts(high - low, across):
                block = read_block(self._purpose, self._matrix, *self._block((low, high), (first, end)))
                part = slice(first - across[0], end - across[0])
                out[self._block(place, part)] = block.take(lines[start:stop] - low, axis=self.axis)

    def _block(self, along: Any, across: Any = slice(None)) -> tuple[Any, Any]:
        """Return ranges along the axis of the lines, and across the lines, as those of rows and columns."""
        return (along, across) if self.axis == 0 else (across, along)

    def _groups(self, lines: Array, width: int) -> Iterator[Range]:
        """Cut ascending numbers of lines into groups. Each is read as one block."""
        if not len(lines):
            return
        chunk = self._chunk[self.axis]
        span = chunk * max(1, self._batch // (chunk * max(1, width)))
        ends = [0, *(np.flatnonzero(np.diff(lines // span)) + 1).tolist(), len(lines)]
        for start, stop in pairwise(ends):
            extent = int(lines[stop - 1] - lines[start]) + 1
            if extent <= MAX_GAPS * (stop - start) or not self._matrix.layout.partial_reads:
                yield start, stop
                continue
            runs = np.flatnonzero(np.diff(lines[start:stop]) > 1) + 1 + start
            inner = [start, *runs.tolist(), stop]
            yield from pairwise(inner)

    def _cuts(self, extent: int, across: Range) -> Iterator[Range]:
        """Cut a range across the lines, so that blocks of `extent` lines fit into the scratch memory."""
        chunk = self._chunk[1 - self.axis]
        unit = chunk * max(1, self._batch // (chunk * extent))
        start, stop = across
        while start < stop:
            end = min(stop, (start // unit + 1) * unit)
            yield start, end
            start = end


def with_all(matrix: Matrix, axis: int) -> Matrix:
    """Return a matrix with all rows (`axis` 0) or columns (1), if `keep` has kept only some of them."""
    if not isinstance(matrix, KeptMatrix):
        return matrix
    inner = with_all(matrix.viewed, axis)
    if matrix.axis == axis:
        return inner
    return matrix if inner is matrix.viewed else kept(inner, matrix.axis, matrix.kept)


class KeptGenotypes(KeptMatrix):
    """Some individuals or some variants of a matrix of genotypes (`Genotypes`)."""

    _matrix: Genotypes

    @property
    def variant_axis(self) -> int:
        """The axis that numbers the variants."""
        return self._matrix.variant_axis

    def packed(self) -> Matrix | None:
        """Return the stored bytes of the variants; None if some individuals are left out."""
        found = self._matrix.packed() if self.axis == self.variant_axis else None
        return None if found is None else KeptMatrix(found, 0, self.kept)

    def transposed(self) -> "KeptGenotypes":
        """Return the transpose, with a row per variant if this matrix has a column per variant."""
        return KeptGenotypes(self._matrix.transposed(), 1 - self.axis, self.kept)

    def individuals(self) -> Sequence[tuple[str, str]]:
        """Return the family ID and the individual ID of each individual."""
        found = self._matrix.individuals()
        return found if self.axis == self.variant_axis else [found[number] for number in self.kept]

    def chromosomes(self) -> Sequence[str]:
        """Return the name of the chromosome of each variant."""
        return self._of_variants(self._matrix.chromosomes())

    def variant_ids(self) -> Sequence[str]:
        """Return the ID of each variant."""
        return self._of_variants(self._matrix.variant_ids())

    def positions(self) -> Sequence[tuple[float, float]]:
        """Return the positions of each variant, in centimorgans and in base pairs."""
        return self._of_variants(self._matrix.positions())

    def _of_variants(self, found: Sequence[T]) -> Sequence[T]:
        return [found[number] for number in self.kept] if self.axis == self.variant_axis else found
