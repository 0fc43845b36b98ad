"""Device memory, separate from host memory, and the ranges of host memory that are pinned."""

import threading
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# First address of device memory. No process maps memory there, so host code that uses such an address
# crashes.
BASE = 1 << 56
ALIGNMENT = 256
POISON = 0xFF  # fills new memory: NaN in every floating-point dtype, -1 in every integer dtype
INVALID_VALUE, OUT_OF_MEMORY, ALREADY_PINNED, NOT_PINNED = 1, 2, 712, 713
INVALID_HANDLE = 400  # for example, an event of one device that is recorded on a stream of another


class MisuseError(AssertionError):
    """A use of the device that would give wrong results or undefined behaviour on a GPU."""


class StatusError(Exception):
    """A call to which CUDA returns an error number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class Block(NamedTuple):
    """Rows of `width` bytes, whose starts are `pitch` bytes apart. A contiguous range is one row."""

    address: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def end(self) -> int:
        return self.address + (self.rows - 1) * self.pitch + self.width if self.rows else self.address


@dataclass
class _Range:
    begin: int
    data: Array  # bytes
    device: int | None = 0  # the device that may access the memory; None if all may
    owned: bool = False  # set if the memory stays pinned until its owner is garbage collected

    @property
    def end(self) -> int:
        return self.begin + self.data.size


class Memory:
    """Allocations on the device, and pinned ranges of the host.

    Device memory has virtual addresses, and host memory its real ones.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._device: dict[int, _Range] = {}
        self._pinned: dict[int, _Range] = {}
        self._lock = threading.RLock()
        self._begins: list[int] = []  # first addresses of all ranges, in order
        self._next = BASE

    @property
    def allocated(self) -> int:
        return sum(each.data.size for each in self._device.values())

    def free_bytes(self, device: int = 0) -> int:
        return self.capacity - sum(x.data.size for x in self._device.values() if x.device == device)

    def device_of(self, block: Block) -> int | None:
        """Return the number of the only device that may access a block, or None if all may."""
        found = self._last_begin(block.address)
        return None if found is None else found.device

    @property
    def pinned(self) -> dict[int, int]:
        """Return the ranges that still must be unpinned, as first address -> bytes."""
        return {begin: each.data.size for begin, each in self._pinned.items() if not each.owned}

    def allocate(self, size: int, device: int = 0) -> int:
        """Allocate memory of a device, filled with NaN, and return its address."""
        if size > self.free_bytes(device):
            raise StatusError(OUT_OF_MEMORY)
        with self._lock:
            address = self._next
            self._device[address] = _Range(address, np.full(size, POISON, np.uint8), device)
            insort(self._begins, address)
            # A gap after each allocation makes accesses beyond its end fail.
            self._next += (size // ALIGNMENT + 2) * ALIGNMENT
            return address

    def free(self, address: int) -> None:
        if not address:
            return
        with self._lock:
            if self._device.pop(address, None) is None:
                raise StatusError(INVALID_VALUE)
            self._begins.remove(address)

    def pin(self, address: int, size: int, device: int | None = 0, *, owned: bool = False) -> None:
        """Pin host memory for one device, or for all if `device` is None."""
        with self._lock:
            before = self._last_begin(address + size - 1)
            if before is not None and address < before.end:
                raise StatusError(ALREADY_PINNED)
            insort(self._begins, address)
            self._pinned[address] = _Range(address, _host_bytes(address, size), device, owned)

    def unpin(self, address: int) -> None:
        with self._lock:
            if self._pinned.pop(address, None) is None:
                raise StatusError(NOT_PINNED)
            self._begins.remove(address)

    def range_at(self, address: int) -> tuple[int, int] | None:
        """Return (address, bytes) of the allocation or the pinned range that contains an address."""
        found = self._last_begin(address)
        return (found.begin, found.data.size) if found is not None and address < found.end else None

    def bytes_of(self, block: Block) -> Array:
        """Return a view of a block of device or pinned memory, of shape (rows, width).

        Raises:
            MisuseError: the block is not within one allocation or one pinned range.
        """
        if block.rows > 1 and block.pitch < block.width:
            raise MisuseError(f"rows overlap: {block}")
        found = self._last_begin(block.address)
        if found is not None and block.end <= found.end:
            start = block.address - found.begin
            part = found.data[start : start + block.end - block.address]
            return np.lib.stride_tricks.as_strided(
                part, (block.rows, block.width), (block.pitch or block.width, 1)
            )
        what = "one device allocation" if block.address >= BASE else "one range of pinned host memory"
        raise MisuseError(f"{block} is not within {what}")

    def _last_begin(self, address: int) -> _Range | None:
        """Return the last range that begins at or before an address, or None."""
        with self._lock:
            place = bisect_right(self._begins, address)
            begin = self._begins[place - 1] if place else None
            return None if begin is None else self._device.get(begin) or self._pinned[begin]

    def real_address(self, address: int) -> int:
        """Return the address in this process at which a byte of device memory is stored."""
        return int(self.bytes_of(Block(address, 1)).ctypes.data)

    def matrix(self, address: int, dtype: Any, rows: int, cols: int, ld: int) -> Array:
        """Return a view of a row-major matrix. `ld`, its leading dimension, is in elements."""
        block = block_of(address, dtype, rows, cols, ld)
        if not rows or not cols:
            return np.zeros((rows, cols), dtype)
        return self.bytes_of(block).view(dtype)


def block_of(address: int, dtype: Any, rows: int, cols: int, ld: int) -> Block:
    """Return the block of memory that a row-major matrix takes."""
    size = np.dtype(dtype).itemsize
    return Block(address, cols * size, rows, ld * size)


def _host_bytes(address: int, size: int) -> Array:
    # The view does not keep the memory alive, as the driver does not. A test therefore notices pinned memory
    # that is freed before it is unpinned.
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    class Exposed:
        __array_interface__ = interface

    return np.asarray(Exposed())
