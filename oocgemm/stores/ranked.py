"""The first elements of each row of C, merged from those that several devices have found."""

from threading import Lock

import numpy as np

from oocgemm.planning import InMemory, Layout
from oocgemm.planning.selection import NONE
from oocgemm.planning.tiling import Range
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.base import Array, Matrix, described


class RankedMatrix:
    """Selected elements (`SELECTED`), of which writes keep the first ones of each row.

    Of a row, the largest scores come first, then the smallest indices, and NaN last. This order is total. So
    the result does not depend on the order of writes, or on how elements are grouped.
    """

    def __init__(self, name: str, array: Array) -> None:
        """Keep elements in `array`. None has been found yet."""
        self.name, self.shape, self.dtype = name, array.shape, array.dtype
        self.layout: Layout = InMemory(itemsize=array.dtype.itemsize)
        self._array, self._merging = array, Lock()
        array.view(np.uint8)[...] = NONE

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        raise AssertionError("elements are not complete before `merged`")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Merge elements into those of some rows. Bytes of `NONE` stand for none."""
        with self._merging:
            best = self._array[slice(*rows)]
            every = np.concatenate((best, data), axis=1)
            # NaN is sorted to the end.
            order = np.lexsort((every["index"], -every["score"]))[:, : best.shape[1]]
            best[...] = np.take_along_axis(every, order, axis=1)

    def merged(self) -> Matrix:
        """Return the elements, when all have been written."""
        return ArrayMatrix(self.name, self._array)

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return described(self, "memory")

    def identities(self) -> set[object]:
        return set()
