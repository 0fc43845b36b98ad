"""A matrix all of whose rows are equal. It is never stored."""

from typing import Any

import numpy as np

from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array


class ConstantRows:
    """A read-only matrix of `count` equal rows. Implements `Matrix`."""

    def __init__(self, name: str, row: Array, count: int, resident_bytes: int = 0) -> None:
        """Make the matrix.

        Args:
            name: its name in messages.
            row: one row, a vector.
            count: the number of rows.
            resident_bytes: host memory that the caller needs during the run (`Layout.resident_bytes`).
        """
        self.name, self._row = name, row
        self.shape = count, len(row)
        self.dtype: np.dtype[Any] = row.dtype
        self.layout = Layout(itemsize=row.itemsize, resident_bytes=resident_bytes)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        out[...] = self._row[slice(*cols)]

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        raise AssertionError("equal rows are never written")

    def sync(self) -> None:
        pass

    def set_finished(self, finished: bool) -> None:
        pass

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return {"store": "equal rows", "path": None, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        return set()
