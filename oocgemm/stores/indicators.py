"""Operands of 0 and 1 that stand for stored bytes: for packed bits, or for codes of categories.

A table has `width` elements for each of the 256 bytes. A row of the matrix has the elements of the bytes of a
stored row, one after the other. For packed bits, these are eight bits per byte. For codes, they are
indicators: one per code, which is 1 if the byte is this code. Then the inner product of two rows counts the
columns in which their codes agree.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from oocgemm.stores.arrays import read_block
from oocgemm.stores.base import Array, Composite, Matrix, pieces
from oocgemm.stores.transformed import ElementView
from oocgemm.values import dataclass

# Elements that are looked up at a time, and the bytes of temporary arrays for each: the element, its byte,
# and the index into which `numpy.take` converts the byte.
SLAB, SLAB_BYTES = 1 << 18, 10


@dataclass(frozen=True, eq=False)
class Indicators(Composite):
    """A matrix of 0 and 1 that stands for a matrix of bytes.

    `table` is 256 x `width`, of int8. If `columns` is given, further elements of rows are left out.
    """

    source: Any
    table: Array
    columns: int | None = None
    decode: bool = True

    def open(self, name: str) -> Matrix:
        from oocgemm.stores.opening import open_matrix

        return IndicatorMatrix(open_matrix(name, self.source, decode=self.decode), self.table, self.columns)

    def mapped(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, source=change(self.source))


def table_of_bits(bitorder: str) -> Array:
    """Return the bits of each byte, in the order of `numpy.unpackbits`."""
    places = np.arange(8)[:: -1 if bitorder == "big" else 1]
    return np.asarray(np.arange(256)[:, None] >> places & 1, np.int8)


def table_of_codes(codes: Sequence[int]) -> Array:
    """Return the indicators of bytes that are codes. Two codes take one indicator, that of the second."""
    wanted = np.asarray(codes[1:] if len(codes) == 2 else codes, np.int64)
    return np.equal.outer(np.arange(256), wanted % 256).astype(np.int8)


class IndicatorMatrix(ElementView):
    """A read-only view of a matrix of bytes with the elements of a table (`Indicators`)."""

    purpose = "codes"

    def __init__(self, matrix: Matrix, table: Array, columns: int | None = None) -> None:
        super().__init__(matrix, temporary_bytes=SLAB_BYTES * SLAB, mask=False, resident_bytes=0)
        self._width = table.shape[1]
        # One item per byte: `numpy.take` copies items much faster than rows.
        self._items = np.ascontiguousarray(table).view(f"V{self._width}").ravel()
        whole = matrix.shape[1] * self._width
        self.shape = matrix.shape[0], whole if columns is None else columns
        self._results_in(np.dtype(np.int8))
        digest = hashlib.sha256(table.tobytes()).hexdigest()[:16]
        self.change = f"{self.shape[1]} indicators of bytes by table {digest}"
        chunks = {
            name: (chunk[0], chunk[1] * self._width)
            for name in ("read_chunk", "request_chunk")
            if (chunk := getattr(matrix.layout, name)) != (1, 1)
        }
        line = self._width * getattr(matrix.layout, "line", 1)
        self.layout = self.layout.changed(line=line, **chunks)

    def read(self, rows: tuple[int, int], cols: tuple[int, int], out: Array) -> None:
        width, each = self._width, max(1, SLAB // self._width)
        inside = cols[0] // width, -(-cols[1] // width)
        for (r0, r1), (c0, c1) in pieces(rows, inside, self._chunk, self._batch):
            raw = read_block(self.purpose, self.stored, (r0, r1), (c0, c1))
            for (top, bottom), (start, stop) in pieces((0, r1 - r0), (c0, c1), (1, each), each):
                block = np.ascontiguousarray(raw[top:bottom, start - c0 : stop - c0]).view(np.uint8)
                found = self._items.take(block).view(np.int8).reshape(len(block), -1)
                left, right = max(cols[0], start * width), min(cols[1], stop * width)
                target = out[r0 - rows[0] + top :][: len(block), left - cols[0] : right - cols[0]]
                target[...] = found[:, left - start * width : right - start * width]
