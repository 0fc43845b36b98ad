"""Sparse operands in compressed form, CSR or CSC. Their blocks become dense when they are read.

A *line* is a row of a CSR matrix, or a column of a CSC matrix. The *entries* of a matrix are its stored
elements, line by line: entry number p has the value ``data[p]``, and ``indices[p]`` is its place in its line.
Line i has the entries ``starts[i]`` to ``starts[i + 1] - 1``. (`starts` is called indptr in scipy.) Entries
of a line may have any order. Entries at the same place are added up, as in scipy.

`starts` stays in host memory during a run. Indices and data are matrices of one row, in memory or in files:
they are read with the code for dense arrays, piece by piece.
"""

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from weakref import ref

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Chunked, Coding, Layout, Op
from oocgemm.planning.cost.coding import DECODED
from oocgemm.planning.tiling import Range
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.base import (
    Array,
    DtypeError,
    Matrix,
    ReadOnly,
    Store,
    checked,
    described,
    is_path,
    not_writable,
    package,
)
from oocgemm.stores.capabilities import Piece, in_memory
from oocgemm.stores.codecs import NO_ROOM, Fetched, entries_at
from oocgemm.stores.files import scratch
from oocgemm.stores.formats import PARTS, is_sparse
from oocgemm.stores.kept import MAX_GAPS, KeptMatrix
from oocgemm.system import cache
from oocgemm.system.installed import compiled

FORMATS = ("csr", "csc")
# Formats of scipy.sparse that are converted by `tocsr`.
_OTHERS = ("bsr", "coo", "dia", "dok", "lil")
# Entries that a thread reads at a time, and bytes per entry of the temporary arrays that place them.
PIECE, PLACING = 128 << 10, 40
# The numbers of dtypes in compiled code (`adders` of `kernels/host/sparse.c`).
_KINDS = {name: i for i, name in enumerate(("i1", "i2", "i4", "i8", "f4", "f8", "c8", "c16"))}
_KINDS |= {f"u{size}": _KINDS[f"i{size}"] for size in (1, 2, 4, 8)}
# The remedy for parts that do not fit together.
AGAIN = "the sparse matrix is damaged or truncated: store it again"
# Version of the remembered checks, and the content of the file for ascending indices.
VERSION, ASCENDING = 2, b"ascending"
# A GPU makes lines dense if their entries take at most this share of the dense bytes.
MAX_SHARE = 0.5
# Lines whose entries are counted, to estimate how many entries are kept.
SAMPLED = 256


class _Entries(ctypes.Structure):
    """`ooc_entries` of `kernels/host/host.h`."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("lines", "first", "last")),
        *((name, ctypes.c_void_p) for name in ("indices", "values")),
        *((name, ctypes.c_int64) for name in ("left", "right", "width")),
        *((name, ctypes.c_int) for name in ("index_bytes", "kind")),
    )


class SparseOperand(ReadOnly):
    """A read-only matrix in CSR or CSC form."""

    what = "a sparse matrix"

    def __init__(
        self,
        name: str,
        form: str,
        shape: tuple[int, ...],
        starts: Array,
        indices: Matrix,
        data: Matrix,
        *,
        path: str | None = None,
    ) -> None:
        """Wrap the parts of a matrix of `form` "csr" or "csc". `path` is None for a matrix in memory.

        Raises `InputError` unless all entries are in the matrix. Entries of files that have not changed since
        they were checked are not checked again.
        """
        self.name, self.kind = name, form
        self.shape, self.dtype = checked(name, shape, data.dtype)
        self._path, self._indices, self._data = path, indices, data
        self._by_rows = form == "csr"
        lines, self._width = self.shape if self._by_rows else self.shape[::-1]
        self._check_starts(starts, lines)
        self._starts: Array = starts.astype(np.int64)
        parts = indices.layout, data.layout
        piece = PLACING * min(PIECE, max(1, int(self._starts[-1])))
        chunk = (1, max(1, self.shape[1])) if self._by_rows else (max(1, self.shape[0]), 1)
        self.layout: Layout = Chunked(
            read_chunk=chunk,
            partial_reads=False,
            page_cached=all(part.page_cached or part.in_memory for part in parts),
            itemsize=self.dtype.itemsize,
            contiguous=int(self._by_rows),
            decode_bytes=piece
            + sum(map(_piece_bytes, (indices, data)))
            + max(part.decode_bytes + part.scratch_bytes for part in parts),
            resident_bytes=self._starts.nbytes + sum(part.resident_bytes for part in parts),
        )
        self._ascending = self._check_indices()

    @property
    def _place(self) -> str:
        return self.name if self._path is None else f"{self.name}: {self._path}"

    @property
    def _axes(self) -> tuple[str, str]:
        return ("row", "column") if self._by_rows else ("column", "row")

    def _check_starts(self, starts: Array, lines: int) -> None:
        line, entries = self._axes[0], min(self._indices.shape[1], self._data.shape[1])
        if self._indices.shape != self._data.shape:
            raise InputError(
                f"{self._place} has {self._indices.shape[1]} indices, {self._data.shape[1]} values: {AGAIN}"
            )
        if starts.dtype.kind not in "iu" or starts.shape != (lines + 1,):
            raise InputError(
                f"{self._place} has {lines} {line}s, and an indptr of {starts.dtype} of shape "
                f"{starts.shape}, not of {lines + 1} integers: {AGAIN}"
            )
        steps = np.diff(starts.astype(np.int64))
        if starts[0] != 0 or (steps < 0).any():
            at = 0 if starts[0] != 0 else int((steps < 0).argmax())
            raise InputError(
                f"{self._place}: by its indptr, {line} {at} has the entries from {starts[at]} to before "
                f"{starts[at + 1]}, but an indptr begins at 0 and never decreases: {AGAIN}"
            )
        if starts[-1] > entries:
            raise InputError(f"{self._place} has {entries} entries, and by its indptr {starts[-1]}: {AGAIN}")
        if self._indices.dtype.kind not in "iu":
            raise InputError(f"{self._place} has indices of {self._indices.dtype}: indices are integers")

    def _check_indices(self) -> bool:
        """Return whether each line has ascending indices. Remember that of files.

        Raises `InputError` for an index outside of the matrix.
        """
        known = self.fingerprint()
        place = None
        if known is not None and known.get("content"):
            key = json.dumps([VERSION, known], sort_keys=True, default=str)
            with suppress(InputError, OSError):  # there may be no home directory, or no such file yet
                place = cache.folder() / "sparse" / hashlib.sha256(key.encode()).hexdigest()[:32]
                return place.read_bytes() == ASCENDING
        ascending, before = True, -1
        for piece in _pieces((0, int(self._starts[-1]))):
            try:
                indices = self._part(self._indices, piece, "indices")
                self._check(piece, indices)
            except ExecutionError as error:
                raise InputError(f"{self._place}: {error}") from error
            if ascending:
                up = np.empty(len(indices), bool)
                up[0], up[1:] = indices[0] > before, indices[1:] > indices[:-1]
                first, after = np.searchsorted(self._starts, piece)
                up[self._starts[first:after] - piece[0]] = True
                ascending, before = bool(up.all()), int(indices[-1])
        if place is not None:
            with suppress(OSError):  # later runs check again
                cache.write_whole(place, ASCENDING if ascending else b"")
        return ascending

    def _check(self, piece: Range, indices: Array) -> None:
        """Raise `ExecutionError` for an index outside of the matrix, of the entries in `piece`."""
        # As numbers without a sign, negative indices are too large.
        if len(indices) and not int(indices.view(indices.dtype.str.replace("i", "u")).max()) < self._width:
            at = int(((indices < 0) | (indices >= self._width)).argmax())
            line, other = self._axes
            number = int(np.searchsorted(self._starts, piece[0] + at, "right")) - 1
            raise ExecutionError(
                f"{line} {number} has an entry in {other} {indices[at]}, and the matrix has {self._width} "
                f"{other}s: {AGAIN}"
            )

    def _part(self, part: Matrix, piece: Range, use: str) -> Array:
        """Return some entries of `part`: the indices or the data.

        Chunks that are decoded as a whole are kept until the thread's next call for others.
        """
        whole = in_memory(part)
        if whole is not None:
            return whole[0, slice(*piece)]
        kept: tuple[Any, Range, Array] | None = getattr(_of_thread, use, None)
        if kept is None or kept[0]() is not part or not kept[1][0] <= piece[0] <= piece[1] <= kept[1][1]:
            chunk = 1 if part.layout.partial_reads else part.layout.read_chunk[1]
            around = piece[0] // chunk * chunk, min(-(-piece[1] // chunk) * chunk, part.shape[1])
            setattr(_of_thread, use, None)
            size = (around[1] - around[0]) * part.dtype.itemsize
            out, has = scratch(size, use)[:size].view(part.dtype), around[0]
            if kept is not None and kept[0]() is part and kept[1][0] <= has < kept[1][1]:
                has = kept[1][1]  # the last chunks that were read are the first ones of this piece
                out[: has - around[0]] = kept[2][around[0] - kept[1][0] :]
            part.read((0, 1), (has, around[1]), out[None, has - around[0] :])
            kept = ref(part), around, out
            if chunk > 1:
                setattr(_of_thread, use, kept)
        return kept[2][piece[0] - kept[1][0] : piece[1] - kept[1][0]]

    def transposed(self) -> Self:
        """Return the transpose, in the other form. It has the same parts."""
        found = copy(self)
        found.kind, found.shape = FORMATS[self._by_rows], self.shape[::-1]
        found._by_rows = not self._by_rows
        found.layout = self.layout.oriented(Op.T)
        return found

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        lines, places = (rows, cols) if self._by_rows else (cols, rows)
        target = out if self._by_rows else out.T
        for group, piece in self._pieces(lines):
            indices = self._part(self._indices, piece, "indices")
            values = self._part(self._data, piece, "data")
            block = target[group[0] - lines[0] : group[1] - lines[0]]
            starts, span = self._starts[group[0] : group[1] + 1], (places, self._width)
            if not _make_dense(starts, piece, indices, values, span, block):
                self._check(piece, indices)
                _add(starts, piece, indices, values, span, block)

    def _pieces(self, lines: Range) -> Iterator[tuple[Range, Range]]:
        """Yield lines and their entries, at most `PIECE` of them. A line with more is yielded repeatedly."""
        line, end = lines
        while line < end:
            start = int(self._starts[line])
            after = min(end, int(np.searchsorted(self._starts, start + PIECE, "right")) - 1)
            if after > line:
                yield (line, after), (start, int(self._starts[after]))
                line = after
            else:
                for piece in _pieces((start, int(self._starts[line + 1]))):
                    yield (line, line + 1), piece
                line += 1

    def chosen(self, lines: Array) -> tuple[Array, Array, Array]:
        """Return the starts, the indices and the values of lines with these numbers."""
        steps = np.diff(lines)
        if (steps > 0).all() and (steps != 1).any() and lines[-1] - lines[0] < MAX_GAPS * len(lines):
            found = self.chosen(np.arange(lines[0], lines[-1] + 1))
            flags = np.zeros(len(found[0]) - 1, bool)
            flags[lines - lines[0]] = True
            counts = np.diff(found[0])
            stay = np.repeat(flags, counts)
            return np.append(0, np.cumsum(counts[flags])), found[1][stay], found[2][stay]
        first, ends = self._starts[lines], self._starts[lines + 1]
        starts = np.append(0, np.cumsum(ends - first))
        indices, values = (np.empty(int(starts[-1]), part.dtype) for part in (self._indices, self._data))
        at = 0
        runs = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(lines)] if len(lines) else []
        for start, stop in pairwise(runs):
            for piece in _pieces((int(first[start]), int(ends[stop - 1]))):
                end = at + piece[1] - piece[0]
                indices[at:end] = self._part(self._indices, piece, "indices")
                self._check(piece, indices[at:end])
                values[at:end] = self._part(self._data, piece, "data")
                at = end
        return starts, indices, values

    @property
    def by_rows(self) -> bool:
        """Whether lines are rows."""
        return self._by_rows

    @property
    def line_starts(self) -> Array:
        """The number of the first entry of each line, and the end of the last one. Not to be changed."""
        return self._starts

    def selected(self, axis: int, lines: Array) -> Matrix:
        """Return some rows (`axis` 0) or columns (1)."""
        return _selected(self, axis, lines)

    def entries(self, count: int) -> Iterator[Piece] | None:
        """Yield all entries, `count` at a time; None if entries of a line may have the same place."""
        return self._listed(count) if self._ascending else None

    def _listed(self, count: int) -> Iterator[Piece]:
        for piece in _pieces((0, int(self._starts[-1])), count):
            first = int(np.searchsorted(self._starts, piece[0], "right")) - 1
            lines, places = (first, int(np.searchsorted(self._starts, piece[1]))), (0, self._width)
            ranges = (lines, places) if self._by_rows else (places, lines)
            yield Piece(*ranges, partial(self._entries, lines, piece))

    def _entries(self, lines: Range, piece: Range) -> tuple[Array, Array, Array]:
        indices = self._part(self._indices, piece, "indices")
        self._check(piece, indices)
        counts = np.diff(np.clip(self._starts[lines[0] : lines[1] + 1], *piece))
        line = np.repeat(np.arange(*lines), counts)
        places = (line, indices) if self._by_rows else (indices, line)
        return *places, self._part(self._data, piece, "data")

    def coding(self) -> Coding | None:
        """Return how a device makes lines dense; None if entries of a line may have the same place."""
        return self.coding_of(self.shape, int(self._starts[-1]))

    def coding_of(self, shape: tuple[int, int], entries: float) -> Coding | None:
        """Return how a device makes some of the lines dense, or parts of them, that have so many entries."""
        dense, size = shape[0] * shape[1] * self.dtype.itemsize, self._indices.dtype.itemsize
        share = (entries * (size + self.dtype.itemsize) + 8 * shape[0]) / max(1, dense)
        name = next((name for name, found in DECODED.items() if found.index_bytes == size), "")
        if not (self._ascending and self._by_rows and name) or share > MAX_SHARE:
            return None
        # The dense bytes of the lines in a chunk of indices or values. Some arrays have no chunks.
        chunks = [
            1 if part.layout.partial_reads else part.layout.read_chunk[1]
            for part in (self._indices, self._data)
        ]
        lines = max(1, max(chunks) * self.shape[0] // max(1, int(self._starts[-1])))
        return Coding(name, min(lines, shape[0]) * shape[1] * self.dtype.itemsize, share)

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        """Read the starts, the indices and the values of lines into `out`, as `entries_at` places them."""
        entries = first, last = int(self._starts[rows[0]]), int(self._starts[rows[1]])
        sizes = self._indices.dtype.itemsize, self.dtype.itemsize
        *at, size = entries_at(rows[1] - rows[0], last - first, *sizes)
        if size > len(out):
            return [Fetched(rows, cols, (0, cols[0]), 0, NO_ROOM)]
        starts = out[: 8 * (rows[1] - rows[0] + 1)].view(np.int64)
        np.subtract(self._starts[rows[0] : rows[1] + 1], first, out=starts)
        indices, values = (
            out[start : start + (last - first) * part.dtype.itemsize].view(part.dtype)
            for start, part in zip(at, (self._indices, self._data), strict=True)
        )
        for part, use, to in ((self._indices, "indices", indices), (self._data, "data", values)):
            if in_memory(part) is None and part.layout.partial_reads and last > first:
                part.read((0, 1), entries, to[None])
                continue
            for piece in _pieces(entries):
                to[piece[0] - first : piece[1] - first] = self._part(part, piece, use)
        self._check(entries, indices)
        return [Fetched(rows, cols, (0, cols[0]), 0, size)]

    def codec(self) -> str:
        return ""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        raise ExecutionError(f"{self.name} is {self.what}, which is read-only")

    def fingerprint(self) -> dict[str, object] | None:
        found = [] if self._path is None else [part.fingerprint() for part in (self._indices, self._data)]
        if not found or any(one is None for one in found):
            return None
        facts = {
            "form": self.kind,
            "shape": self.shape,
            "starts": hashlib.sha256(self._starts.tobytes()).hexdigest(),
        }
        metadata = json.dumps([facts, *(one and one["metadata"] for one in found)], default=str)
        digests = {
            key: hashlib.sha256("".join(str(one and one[key]) for one in found).encode()).hexdigest()[:32]
            for key in ("content", "changes")
        }
        return {"path": self._path, "metadata": hashlib.sha256(metadata.encode()).hexdigest()[:32], **digests}

    def describe(self) -> dict[str, object]:
        parts = self._indices.describe(), self._data.describe()
        direct = all(part.get("direct", self._path is None) for part in parts)
        facts = {"entries": int(self._starts[-1]), "indices": str(self._indices.dtype), "direct": direct}
        return described(self, self.kind, self._path) | facts

    def identities(self) -> set[object]:
        return self._indices.identities() | self._data.identities()


class KeptEntries(KeptMatrix):
    """Some lines of a sparse matrix, or the same places of all lines. Only their entries are made dense."""

    what = "a part of a sparse matrix"
    _matrix: "SparseOperand | KeptEntries"
    by_rows: bool
    line_starts: Array

    def __init__(self, matrix: "SparseOperand | KeptEntries", axis: int, kept: Array) -> None:
        super().__init__(matrix, axis, kept)
        self.by_rows = matrix.by_rows
        self._of_lines = (axis == 0) == matrix.by_rows
        counts = np.diff(matrix.line_starts)
        self.line_starts = matrix.line_starts
        if self._of_lines:
            self.line_starts = np.append(0, np.cumsum(counts[kept]))
        # What was number i along the axis is number `_numbers[i]` now, or left out if that is -1.
        self._numbers = np.full(matrix.shape[axis], -1, np.int64)
        self._numbers[kept] = np.arange(len(kept))
        longest = max(PIECE, int(counts.max(initial=0)))
        held = kept.nbytes + self._numbers.nbytes + self.line_starts.nbytes * self._of_lines
        chunk = (1, max(1, self.shape[1])) if self.by_rows else (max(1, self.shape[0]), 1)
        self.layout = matrix.layout.computed(PLACING * longest, held).changed(read_chunk=chunk)
        self._sampled: dict[int, int] = {}  # how many entries the first lines have

    def chosen(self, lines: Array) -> tuple[Array, Array, Array]:
        """Return the starts, the indices and the values of lines with these numbers."""
        if self._of_lines:
            return self._matrix.chosen(self.kept[lines])
        starts, indices, values = self._matrix.chosen(lines)
        places = self._numbers[indices]
        stay = places >= 0
        before = np.append(0, np.cumsum(stay))  # how many entries stay before each entry
        return before[starts], places[stay].astype(indices.dtype), values[stay]

    def selected(self, axis: int, lines: Array) -> Matrix:
        """Return some rows (`axis` 0) or columns (1)."""
        return _selected(self, axis, lines)

    def transposed(self) -> "KeptEntries":
        """Return the transpose, in the other form."""
        return KeptEntries(self._matrix.transposed(), 1 - self.axis, self.kept)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        lines, places = (rows, cols) if self.by_rows else (cols, rows)
        target, span = out if self.by_rows else out.T, (places, self.shape[self.by_rows])
        for group, starts, indices, values in self._kept_lines(lines):
            block, piece = target[group[0] - lines[0] : group[1] - lines[0]], (0, len(indices))
            if not _make_dense(starts, piece, indices, values, span, block):
                _add(starts, piece, indices, values, span, block)

    def _kept_lines(self, lines: Range) -> Iterator[tuple[Range, Array, Array, Array]]:
        """Yield lines, and which of their entries are kept: lines of `PIECE` entries, or one with more."""
        line, before = lines[0], self.line_starts
        while line < lines[1]:
            most = int(np.searchsorted(before, before[line] + PIECE, "right")) - 1
            end = min(lines[1], max(line + 1, most))
            yield (line, end), *self.chosen(np.arange(line, end))
            line = end

    def entries(self, count: int) -> Iterator[Piece] | None:
        """Yield the entries that are kept; None if they cannot be listed in the order of the matrix."""
        found = self._matrix.entries(count) if self._ascending else None
        return None if found is None else map(self._kept_of, found)

    def _kept_of(self, piece: Piece) -> Piece:
        def read() -> tuple[Array, Array, Array]:
            *places, values = piece.read()
            numbers = self._numbers[places[self.axis]]
            stay = numbers >= 0
            places = [place[stay] for place in places]
            places[self.axis] = numbers[stay]
            return places[0], places[1], values[stay]

        first, end = (int(at) for at in np.searchsorted(self.kept, (piece.rows, piece.cols)[self.axis]))
        if self.axis == 0:
            return Piece((first, end), piece.cols, read)
        return Piece(piece.rows, (first, end), read)

    def coding(self) -> Coding | None:
        """Return how a device makes lines dense; None if entries of a line may have the same place."""
        lines = min(len(self.line_starts) - 1, SAMPLED)
        if lines not in self._sampled:
            self._sampled[lines] = len(self.chosen(np.arange(lines))[1])
        return self.coding_of(self.shape, self._sampled[lines] * self.shape[0] / max(1, lines))

    def coding_of(self, shape: tuple[int, int], entries: float) -> Coding | None:
        """Return how a device makes lines dense that have so many entries, as `SparseOperand.coding_of`."""
        return self._matrix.coding_of(shape, entries)

    def fetch(self, rows: Range, cols: Range, out: Array) -> list[Fetched]:
        """Read the starts, the indices and the values of lines into `out`, as `entries_at` places them."""
        found = [group[1:] for group in self._kept_lines(rows)]
        indices, values = (np.concatenate([each[part] for each in found]) for part in (1, 2))
        counts = np.concatenate([np.diff(each[0]) for each in found])
        *at, size = entries_at(len(counts), len(indices), indices.itemsize, values.itemsize)
        if size > len(out):
            return [Fetched(rows, cols, (0, cols[0]), 0, NO_ROOM)]
        for start, part in zip((0, *at), (np.append(0, np.cumsum(counts)), indices, values), strict=True):
            out[start : start + part.nbytes].view(part.dtype)[:] = part
        return [Fetched(rows, cols, (0, cols[0]), 0, size)]

    def codec(self) -> str:
        return ""

    def write_frame(self, number: tuple[int, int], frame: Array, size: int) -> None:
        raise ExecutionError(f"{self.name} is {self.what}, which is read-only")


def _selected(matrix: "SparseOperand | KeptEntries", axis: int, lines: Array) -> Matrix:
    """Return some rows or columns. Places of a line can be repeated or reordered only in dense blocks."""
    of_lines = (axis == 0) == matrix.by_rows
    fits = of_lines or (np.diff(lines) > 0).all()
    return (KeptEntries if fits else KeptMatrix)(matrix, axis, lines)


def _make_dense(
    starts: Array, piece: Range, indices: Array, values: Array, span: tuple[Range, int], out: Array
) -> bool:
    """Write the dense elements of some lines with compiled code. Return whether it can, and has.

    The lines have these `starts`. `indices` and `values` are those of the entries in `piece`. `span` are the
    places in `out`, and how many places a line has. It cannot if an index is outside of its line.
    """
    library, kind = compiled(), _KINDS.get(values.dtype.str[1:])
    plain = all(x.strides == (x.itemsize,) and x.dtype.isnative for x in (indices, values))
    if library is None or kind is None or not plain or indices.dtype.str[1:] not in ("i4", "i8"):
        return False
    if out.strides[1] != out.itemsize or out.dtype != values.dtype:
        return False
    parts = indices.ctypes.data, values.ctypes.data
    entries = _Entries(
        starts.ctypes.data, len(starts) - 1, *piece, *parts, *span[0], span[1], indices.itemsize, kind
    )
    place = ctypes.c_void_p(out.ctypes.data), ctypes.c_ssize_t(out.strides[0])
    return not library.ooc_make_dense(ctypes.byref(entries), *place)


def _add(
    starts: Array, piece: Range, indices: Array, values: Array, span: tuple[Range, int], out: Array
) -> None:
    """Add entries to `out`, the dense block of some lines. The arguments are those of `_make_dense`."""
    places, width = span
    if piece[0] == starts[0]:  # else the line was begun by an earlier call
        out[...] = 0
    counts = np.diff(np.clip(starts, *piece))
    line = np.repeat(np.arange(len(counts)), counts)
    if places != (0, width):
        kept = (indices >= places[0]) & (indices < places[1])
        line, indices, values = line[kept], indices[kept] - places[0], values[kept]
    with np.errstate(all="ignore"):
        np.add.at(out, (line, indices), values)


# What the thread has read last of indices and data (`SparseOperand._part`).
_of_thread = threading.local()


def _piece_bytes(part: Matrix) -> int:
    """Return the memory that a thread needs for a piece of the indices or the data."""
    chunk, entries = 1 if part.layout.partial_reads else part.layout.read_chunk[1], part.shape[1]
    return min(-(-PIECE // chunk) * chunk + 2 * chunk, 2 * max(1, entries)) * part.dtype.itemsize


def _pieces(entries: Range, count: int | None = None) -> Iterator[Range]:
    count = count or PIECE
    for start in range(entries[0], entries[1], count):
        yield start, min(start + count, entries[1])


def of_group(name: str, path: str, group: Any, part: Callable[[str], Matrix]) -> SparseOperand:
    """Return the sparse matrix in a group of HDF5 or zarr, as AnnData or Cell Ranger store it.

    `part` returns the array "data", "indices" or "indptr" of the group as a matrix of one row. Raises
    `InputError`.
    """
    form, shape = _declared(group)
    place = f"{name}: {path}"
    if form not in FORMATS:
        raise InputError(
            f"{place} is a sparse matrix without the attribute encoding-type = csr_matrix or csc_matrix: "
            "write it with anndata"
        )
    for member in PARTS:
        if len(group[member].shape) != 1:
            raise InputError(f"{place}/{member} has the shape {group[member].shape}, and not one dimension")
    try:
        extents = tuple(int(extent) for extent in np.asarray(shape).tolist())
    except (TypeError, ValueError):
        raise InputError(f"{place} has the attribute shape = {shape!r}, not two integers") from None
    try:
        starts = part("indptr")
        found = np.empty(starts.shape, starts.dtype)
        starts.read((0, 1), (0, starts.shape[1]), found)
        return SparseOperand(name, form, extents, found[0], part("indices"), part("data"), path=path)
    except DtypeError as error:
        raise InputError(f"{place}: {error}: convert it, with anndata or scipy.sparse") from error
    except ExecutionError as error:
        raise InputError(f"{place} cannot be read: {error}") from error


def _declared(group: Any) -> tuple[str, Any]:
    """Return the form and the shape that a group declares.

    Cell Ranger stores features x barcodes in CSC form. As in scanpy, the operand is barcodes x features.
    """
    attributes: Mapping[str, Any] = group.attrs
    kind, form = attributes.get("encoding-type"), attributes.get("h5sparse_format")
    if kind is None and form is None and "barcodes" in group and "shape" in group:
        return "csr", np.asarray(group["shape"])[::-1]
    shape = attributes.get("shape", attributes.get("h5sparse_shape"))
    return str(form) if kind is None else str(kind).removesuffix("_matrix"), shape


class SparseArrays(Store):
    """Open sparse matrices of scipy, others with the same attributes, and those that AnnData has opened."""

    kind = "a sparse matrix"

    def matches(self, operand: Any) -> bool:
        return not is_path(operand) and (_is_backed(operand) or _form(operand) != "")

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        if _is_backed(operand):
            return _of_group(name, getattr(operand, "group", operand))
        form, where = _form(operand), package(operand)
        if form not in FORMATS:
            raise InputError(
                f"{name} is a sparse matrix in the form {form}: convert it by {name} = {name}.tocsr()"
            )
        if where in ("cupy", "cupyx"):
            raise InputError(
                f"{name} is in the memory of a GPU: copy it to the host by {name} = {name}.get()"
            )
        shape = tuple(int(extent) for extent in operand.shape)
        checked(name, shape, np.dtype(operand.dtype))
        parts = (np.atleast_1d(np.asarray(getattr(operand, part)))[None] for part in ("indices", "data"))
        indices, data = (ArrayMatrix(name, part) for part in parts)
        return SparseOperand(name, form, shape, np.asarray(operand.indptr), indices, data)

    def location(self, operand: Any) -> tuple[str, str | None]:
        return _form(operand) or "csr", None


def _form(operand: Any) -> str:
    """Return the form of a sparse matrix in memory, such as "csr" or "coo"; "" for other objects."""
    form = getattr(operand, "format", None)
    known = isinstance(form, str) and form in FORMATS + _OTHERS
    return str(form) if known and (hasattr(operand, "indptr") or hasattr(operand, "tocsr")) else ""


def _is_backed(operand: Any) -> bool:
    """Return whether an object is, or has, an open group of HDF5 or zarr that contains a sparse matrix."""
    with suppress(Exception):  # a closed file raises exceptions of many types
        group = getattr(operand, "group", operand)
        return package(group) in ("h5py", "zarr") and hasattr(group, "keys") and is_sparse(group)
    return False


def _of_group(name: str, group: Any) -> Matrix:
    if package(group) == "h5py":
        from oocgemm.stores.hdf5_opening import open_dataset

        return open_dataset(name, group.file.filename, group.name)
    from oocgemm.stores.zarr_through import wrap_zarr

    return wrap_zarr(name, group)
