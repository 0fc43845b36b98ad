"""Arrays to pin, and a pinner that records what it is asked to pin."""

import threading
import time
from collections.abc import Sequence
from importlib import import_module

import numpy as np
import pytest

from oocgemm.backends.base import Array, Pinner
from oocgemm.backends.cuda.borders import cut
from oocgemm.engine import pinning
from oocgemm.stores import arrays
from oocgemm.stores.files import PAGE
from oocgemm.system.memory import allocate

KIB = 1 << 10
PLANS = import_module("oocgemm.planning.plan")


def held(rows: int, cols: int) -> Array:
    """Return an array that begins at the start of a page, and whose pages are resident."""
    array = allocate(rows * cols * 8).view(np.float64).reshape(rows, cols)
    array[...] = np.arange(rows * cols).reshape(rows, cols) % 8
    return array


def on_its_own_pages(array: Array) -> Array:
    copied = allocate(array.nbytes).view(array.dtype)[: array.size].reshape(array.shape)
    copied[...] = array
    return copied


class FakePinner:
    """Records what is pinned and unpinned, and fails after `allows` calls."""

    def __init__(self, allows: int | None = None, slow: float = 0.0) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.owned: list[tuple[int, int]] = []  # ranges of arrays that the caller of the library has pinned
        self.allows, self.slow = allows, slow
        self.allowed = threading.Event()
        self.allowed.set()
        self.pinner = Pinner(self.pin, self.unpin)

    def pin(self, address: int, size: int) -> None:
        self.allowed.wait()
        time.sleep(self.slow)
        if self.allows is not None and len(self.calls) >= self.allows:
            raise OSError("refused")
        for begin, length in self.ranges.items():
            assert address + size <= begin or begin + length <= address, "pinned twice"
        self.ranges[address] = size
        self.calls.append((address, size))

    def unpin(self, address: int) -> None:
        del self.ranges[address]

    def own(self, *arrays: Array) -> None:
        """Treat arrays as already pinned by the caller of the library."""
        self.owned += map(np.lib.array_utils.byte_bounds, arrays)

    def is_pinned(self, address: int, size: int) -> bool:
        return any(low <= address and address + size <= high for low, high in self.owned)

    def covers(self, block: Array, borders: Sequence[int]) -> bool:
        """Return whether each piece of a block is within one pinned range."""
        return all(
            any(begin <= low and high <= begin + size for begin, size in self.ranges.items())
            for low, high in map(np.lib.array_utils.byte_bounds, cut(block, borders))
        )


def pin_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin arrays of any size, in parts of four pages."""
    monkeypatch.setattr(pinning, "PART", 4 * PAGE)
    monkeypatch.setattr(pinning, "SINGLE_PARTS", 3)
    monkeypatch.setattr(arrays, "MIN_PINNED", 1)
    monkeypatch.setattr(arrays, "MIN_ROW_BYTES", 64)
