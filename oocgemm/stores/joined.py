"""The operand that `concat` returns: several matrices, joined along their rows or columns.

The operand, a `Joined`, only names its parts, which are opened by the verb. A block is cut at the borders of
parts, and each part reads its piece, so that blocks inside one part are read as from this part alone. If the
parts are compressed alike, and their borders are borders of chunks, a GPU decodes the chunks. Genotypes that
are joined along variants stay packed.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

from oocgemm.errors import InputError
from oocgemm.planning import Chunked, Coding, Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, Composite, Matrix, ReadOnly
from oocgemm.stores.capabilities import Coded, Genotypes, Listed, Piece
from oocgemm.stores.codecs import CHECKSUM_BYTES, NO_ROOM, Fetched
from oocgemm.stores.declared import AS_STORED, NOTHING, Declared, place_of
from oocgemm.values import dataclass

LINES = ("rows", "columns")


@dataclass(frozen=True, eq=False)
class Joined(Composite):
    """Several matrices as one, for any verb. `concat` makes it."""

    parts: tuple[Any, ...]
    axis: int

    def open(self, name: str) -> Matrix:
        from oocgemm.stores.opening import store_of

        return joined(name, [store_of(part).open(name, part) for part in self.parts], self.axis)

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, parts=tuple(map(change, self.parts)))


def concat(parts: Sequence[Any], axis: int = 0) -> Joined:
    """Return several matrices as one that every verb takes. Nothing is copied.

    Args:
        parts: operands as for `gemm`, in their order, of one dtype: such as the .bed files of all
            chromosomes, or what `as_matrix` returns.
        axis: 0 if the rows of one part follow those of another, 1 if its columns do. Genotypes of .bed files
            are joined along their variants, by 1. Their individuals must agree.

    Returns:
        An operand for the verbs of this package. The parts are opened by the verb, which raises `InputError`
            for parts that do not fit.

    >>> import oocgemm
    >>> both = oocgemm.concat([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> oocgemm.matmul(both, [[1.0], [1.0]], backend="host")
    array([[3.],
           [7.]])
    """
    if isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 to join rows, or 1 to join columns")
    if isinstance(parts, str | bytes) or not len(parts):
        raise InputError("concat takes a sequence of one or more matrices: pass a list of operands")
    return Joined(tuple(parts), axis)


def joined(name: str, parts: Sequence[Matrix], axis: int) -> Matrix:
    """Return parts as one matrix. Raises `InputError` if their dtypes, shapes or individuals do not fit."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for number, part in enumerate(parts[1:], 1):
        pair = f"{name}: part 0, {_place(first)}, has", f"and part {number}, {_place(part)}, has"
        if part.dtype != first.dtype:
            raise InputError(f"{pair[0]} dtype {first.dtype}, {pair[1]} {part.dtype}: convert one of them")
        if part.shape[1 - axis] != first.shape[1 - axis]:
            raise InputError(
                f"{pair[0]} {first.shape[1 - axis]} {LINES[1 - axis]}, {pair[1]} {part.shape[1 - axis]}: "
                f"pass parts with as many {LINES[1 - axis]}, or join them along axis {1 - axis} (--concat "
                f"{1 - axis})"
            )
    genotypes = [part for part in parts if isinstance(part, Genotypes)]
    if genotypes:
        _check_genotypes(name, genotypes, axis)
    if len(genotypes) == len(parts):
        return JoinedGenotypes(name, genotypes, axis)
    return (CodedJoin if _alike(parts, axis) else JoinedMatrix)(name, parts, axis)


def _place(matrix: Matrix) -> str:
    return place_of(matrix).removeprefix(f"{matrix.name}: ")


def _check_genotypes(name: str, parts: Sequence[Genotypes], axis: int) -> None:
    """Raise `InputError` unless .bed files are joined along variants, and have the same individuals."""
    if axis != parts[0].variant_axis:
        raise InputError(
            f"{name}: .bed files would be joined along their individuals: pass axis=1 (--concat 1) to join "
            "them along their variants"
        )
    known = parts[0].individuals()
    for part in parts[1:]:
        found = part.individuals()
        if found is known:
            continue
        for at, (one, other) in enumerate(zip(known, found, strict=True)):
            if one != other:
                raise InputError(
                    f"{name}: individual {at} is {' '.join(one)} in {_place(parts[0])}, and "
                    f"{' '.join(other)} in {_place(part)}: write files with the same individuals in the same "
                    "order, such as by plink2 --keep"
                )


def _alike(parts: Sequence[Matrix], axis: int) -> bool:
    """Return whether the chunks of all parts are chunks of the joined matrix, and can be fetched."""
    chunk = parts[0].layout.read_chunk
    memory = {"decode_bytes": 0, "scratch_bytes": 0, "resident_bytes": 0}  # `_layout` joins these numbers
    fits = len({part.layout.changed(**memory) for part in parts}) == 1
    even = all(part.shape[axis] % chunk[axis] == 0 for part in parts[:-1])
    return fits and even and all(isinstance(part, Coded) for part in parts)


class JoinedMatrix(ReadOnly):
    """Several matrices, the rows or columns of one after those of another."""

    what = "a concatenation"

    def __init__(self, name: str, parts: Sequence[Matrix], axis: int) -> None:
        self.name, self.parts, self._axis = name, parts, axis
        self._starts = [0, *accumulate(part.shape[axis] for part in parts)]
        other = parts[0].shape[1 - axis]
        self.shape = (self._starts[-1], other) if axis == 0 else (other, self._starts[-1])
        self.dtype = parts[0].dtype
        self.layout: Layout = _layout([part.layout for part in parts])

    @property
    def declared(self) -> Declared:
        """What parts declare about their elements. Raises `InputError` if they declare different things."""
        found = [getattr(part, "declared", NOTHING) for part in self.parts]
        other = next((at for at, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            raise InputError(
                f"{self.name}: {_place(self.parts[0])} declares {found[0]} about its elements, and "
                f"{_place(self.parts[other])} {found[other]}: store them alike; or {AS_STORED}"
            )
        return found[0]

    def pieces(self, rows: Range, cols: Range) -> Iterator[tuple[int, Range, Range, tuple[slice, slice]]]:
        """Cut a block at the borders of parts. Yield each part's number, and its block in it and in `out`."""
        start, stop = (rows, cols)[self._axis]
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            inside, place = (start - first, end - first), slice(start - (rows, cols)[self._axis][0], None)
            place = slice(place.start, place.start + end - start)
            if self._axis == 0:
                yield number, inside, cols, (place, slice(None))
            else:
                yield number, rows, inside, (slice(None), place)
            start = end

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for number, r, c, place in self.pieces(rows, cols):
            self.parts[number].read(r, c, out[place])

    def entries(self, count: int) -> Iterator[Piece] | None:
        """Yield the entries of all parts (`Listed`); None if those of a part cannot be listed."""
        found = [part.entries(count) if isinstance(part, Listed) else None for part in self.parts]
        known = [pieces for pieces in found if pieces is not None]
        if len(known) < len(found):
            return None
        moved = zip(known, self._starts, strict=False)
        return (_moved(piece, self._axis, start) for pieces, start in moved for piece in pieces)

    def fingerprint(self) -> dict[str, object] | None:
        found = [part.fingerprint() for part in self.parts]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        own = [{name: x for name, x in each.items() if name not in _LISTED} for each in known]
        listed: dict[str, object] = {name: [each.get(name, "") for each in known] for name in _LISTED}
        return listed | {"metadata": [self._axis, own]}

    def describe(self) -> dict[str, object]:
        facts = self.parts[0].describe()
        return facts | {"shape": list(self.shape), "parts": [part.describe()["path"] for part in self.parts]}

    def identities(self) -> set[object]:
        return set[object]().union(*(part.identities() for part in self.parts))


# The frames of a part begin at multiples of this number of bytes in a buffer, because entries of sparse
# matrices contain numbers of 8 bytes.
ALIGNMENT = 64
# The values of a fingerprint that are compared one by one. The others describe a part.
_LISTED = ("path", "content", "changes")


def _layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of joined matrices. Each takes as much memory as the part that takes most."""
    each = [layout.computed(0, 0) for layout in layouts]
    most: dict[str, Any] = {
        name: max(getattr(x, name) for x in each) for name in ("decode_bytes", "scratch_bytes")
    }
    most["resident_bytes"] = sum(x.resident_bytes for x in each)
    chunk = max(x.read_chunk[0] for x in each), max(x.read_chunk[1] for x in each)
    all_of: dict[str, Any] = {
        name: all(getattr(x, name) for x in each) for name in ("partial_reads", "page_cached")
    }
    remote = next((x for x in each if x.requests), None)
    if remote is not None:
        request_bytes = max(x.request_bytes for x in each)
        return remote.changed(read_chunk=chunk, request_bytes=request_bytes, **most, **all_of)
    if len({type(x) for x in each}) == 1:
        line = min(getattr(x, "line", 0) for x in each)
        return each[0].changed(read_chunk=chunk, line=line, **most, **all_of)
    return Chunked(itemsize=each[0].itemsize, read_chunk=chunk, **most, **all_of)


def _moved(piece: Piece, axis: int, by: int) -> Piece:
    """Return entries in other rows (`axis` 0) or columns (1)."""

    def read() -> tuple[Array, Array, Array]:
        rows, cols, values = piece.read()
        return (rows + by, cols, values) if axis == 0 else (rows, cols + by, values)

    rows, cols = piece.rows, piece.cols
    if axis == 0:
        return Piece((rows[0] + by, rows[1] + by), cols, read)
    return Piece(rows, (cols[0] + by, cols[1] + by), read)


class CodedJoin(JoinedMatrix):
    """Joined matrices whose compressed chunks are chunks of the whole (`Coded`)."""

    def _coded(self, number: int) -> Coded:
        part = self.parts[number]
        assert isinstance(part, Coded)
        return part

    def coding(self) -> Coding | None:
        """Return how the chunks are compressed; None if they are compressed in several ways."""
        found = [self._coded(number).coding() for number in range(len(self.parts))]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or len({each.codec for each in known}) > 1:
            return None
        stream, share = (
            max(getattr(each, name) for each in known) for name in ("stream_bytes", "stored_share")
        )
        return Coding(known[0].codec, stream, share)

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        every, end = list[Fetched](), 0
        for number, r, c, _ in self.pieces(rows, cols):
            found = self._coded(number).fetch(r, c, out[end:])
            top, left = (0, self._starts[number])[:: 1 if self._axis else -1]
            moved = [each._replace(start=each.start + end if each.size > 0 else 0) for each in found]
            every += [each.counted_from(-top, -left) for each in moved]
            sizes = [
                each.start + each.size + CHECKSUM_BYTES * each.checksum for each in moved if each.size > 0
            ]
            end = -(-max([end, *sizes]) // ALIGNMENT) * ALIGNMENT
            if any(each.size == NO_ROOM for each in found):
                end = out.size
        return every

    def codec(self) -> str:
        """Return "": the matrix is not written."""
        return ""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        raise AssertionError("a concatenation is not written")


class JoinedGenotypes(JoinedMatrix):
    """The genotypes of several .bed files with the same individuals, joined along variants (`Genotypes`)."""

    parts: Sequence[Genotypes]

    @property
    def variant_axis(self) -> int:
        """The axis that numbers the variants."""
        return self._axis

    def packed(self) -> Matrix | None:
        """Return the stored bytes, with four genotypes each, as a matrix with a row per variant."""
        found = [part.packed() for part in self.parts]
        known = [each for each in found if each is not None]
        return JoinedMatrix(self.name, known, 0) if len(known) == len(found) else None

    def transposed(self) -> "JoinedGenotypes":
        return JoinedGenotypes(self.name, [part.transposed() for part in self.parts], 1 - self._axis)

    def individuals(self) -> Sequence[tuple[str, str]]:
        """Return the family ID and the individual ID of each individual."""
        return self.parts[0].individuals()

    def chromosomes(self) -> Sequence[str]:
        """Return the name of the chromosome of each variant."""
        return [name for part in self.parts for name in part.chromosomes()]

    def variant_ids(self) -> Sequence[str]:
        """Return the ID of each variant."""
        return [name for part in self.parts for name in part.variant_ids()]

    def positions(self) -> Sequence[tuple[float, float]]:
        """Return the positions of each variant, in centimorgans and in base pairs."""
        return [at for part in self.parts for at in part.positions()]
