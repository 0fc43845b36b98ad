"""Finds means, variances and extremes of the lines of a matrix, whose blocks a CUDA device reads once."""

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array, Swept
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.host_memory import keep_ring, take_ring
from oocgemm.backends.cuda.pageable import Ring
from oocgemm.backends.cuda.warm import Warm, take
from oocgemm.errors import OutOfMemoryError
from oocgemm.kernels.launches import (
    MOMENTS,
    ElementNumbers,
    Elements,
    moments_grid,
    moments_options,
    parts_of,
)
from oocgemm.planning.tiling import ceil_div, length, round_up

# Blocks that are on the device at the same time, and those that are being copied to it.
SLOTS, COPYING = 4, 3
# CUDA's limit of thread blocks along y: a tall block of few columns may have more parts.
MAX_PARTS = 65535
_ALIGNMENT = 512
_pointer, _long = ctypes.c_void_p, ctypes.c_longlong


def moments(device: int, given: Swept, axis: int, host: int, budget: int) -> Array | None:
    """Return `MOMENTS` numbers of each column (`axis` 0) or row (1) of a matrix.

    Return None if the pass takes more than `host` bytes of host memory, or `budget` bytes of device memory.
    """
    room = Room(given, axis)
    if room.end > budget or room.parts > MAX_PARTS:
        return None
    with cupy.cuda.Device(device), suppress(OutOfMemoryError), ExitStack() as owned:
        ring = take_ring(device, host // 4)
        if ring is None:
            return None
        owned.callback(keep_ring, device, ring)
        warm = take(device)

        def give_back(kind: Any, error: BaseException | None, trace: Any) -> None:
            warm.keep() if error is None else warm.free()

        owned.push(give_back)
        owned.callback(cupy.cuda.runtime.deviceSynchronize)
        return Sweep(given, axis, room, warm.reserve(room.end, budget), warm, ring).run()
    return None


class Room:
    """The layout of device memory: byte offsets of parts, numbers of steps and slots. The result is at 0."""

    def __init__(self, given: Swept, axis: int) -> None:
        self.lines = given.shape[1 - axis]
        extents = [(length(rows), length(cols)) for rows, cols in given.cuts]
        parts = [parts_of(rows, cols, axis) for rows, cols in extents]
        self.parts = max(parts, default=0)  # of a line of one block
        self.stride = max(
            (count * each[1 - axis] for count, each in zip(parts, extents, strict=True)), default=0
        )
        self.slot = round_up(max((m * n for m, n in extents), default=0) * given.dtype.itemsize, _ALIGNMENT)
        self.parts_at = round_up(8 * MOMENTS * self.lines, _ALIGNMENT)
        self.numbers = self.parts_at + round_up(8 * MOMENTS * self.stride, _ALIGNMENT)
        held = sum(len(numbers) for numbers in given.numbers if numbers is not None)
        self.slots = self.numbers + round_up(8 * held, _ALIGNMENT)
        self.end = self.slots + SLOTS * self.slot


class Sweep:
    """One pass over a matrix."""

    def __init__(self, given: Swept, axis: int, room: Room, address: int, warm: Warm, ring: Ring) -> None:
        self._given, self._axis, self._room, self._address, self._ring = given, axis, room, address, ring
        self._kernels, self._stream = warm.kernels, warm.stream("compute", 0)
        self._options = moments_options(given.dtype.name, given.steps, given.code)
        self._numbers = self._uploaded()

    def run(self) -> Array:
        """Upload each block, launch its kernels, and return `MOMENTS` numbers of each line."""
        size = 8 * MOMENTS * self._room.lines
        cuda_calls.make(cuda_calls.fill(self._address, size, self._stream))
        copying, free = deque[tuple[Any, int, Callable[[], Any]]](), list[Any]([None] * SLOTS)
        try:
            for number, cut in enumerate(self._given.cuts):
                if len(copying) == COPYING:
                    self._take(*copying.popleft(), free)
                slot = number % SLOTS
                waits = list(filter(None, [free[slot]]))
                upload = self._ring.upload(self._at(slot), self._given.block(*cut), waits)
                copying.append((cut, slot, upload))
            while copying:
                self._take(*copying.popleft(), free)
        finally:
            for _, _, upload in copying:  # after a failure, threads still use the ring
                with suppress(Exception):
                    upload()
        pinned = cupy.cuda.alloc_pinned_memory(size)
        cuda_calls.make(cuda_calls.copy(pinned.ptr, self._address, size, self._stream))
        self._stream.synchronize()
        return np.frombuffer(pinned, np.float64, MOMENTS * self._room.lines).reshape(MOMENTS, -1).copy()

    def _at(self, slot: int) -> int:
        return self._address + self._room.slots + slot * self._room.slot

    def _take(self, cut: Any, slot: int, upload: Callable[[], Any], free: list[Any]) -> None:
        """Launch the kernels for an uploaded block. Set `free[slot]` to the event after these kernels."""
        at = self._at(slot)
        cuda_calls.wait(self._stream, upload().end)
        (top, bottom), (left, right) = cut
        rows, cols = bottom - top, right - left
        lines, first, count = (
            (rows, cols)[1 - self._axis],
            (top, left)[1 - self._axis],
            parts_of(rows, cols, self._axis),
        )
        steps = Elements()
        for i, (step, numbers) in enumerate(zip(self._given.steps, self._numbers, strict=True)):
            start = {"rows": top, "cols": left, "": 0}[step.axis]
            steps.steps[i] = ElementNumbers(numbers and numbers + 8 * start, *step.constants)
        parts, stride = _pointer(self._address + self._room.parts_at), _long(self._room.stride)
        code = ctypes.c_double(0 if self._given.code is None else self._given.code)
        with self._stream:
            self._kernel(("moments_columns", "moments_rows")[self._axis])(
                moments_grid(rows, cols, self._axis),
                *(_pointer(at), _long(rows), _long(cols), code, steps, parts, stride),
            )
            self._kernel("moments_merge")(
                (ceil_div(lines, 256), 1, 1),
                *(_long(lines), _long(count), parts, stride, _long(first), _long(self._room.lines)),
                _pointer(self._address),
            )
            free[slot] = cupy.cuda.Event()
            free[slot].record(self._stream)

    def _uploaded(self) -> list[int]:
        """Copy the numbers of the steps to the device. Return their addresses; 0 for a step without any."""
        at, places = self._address + self._room.numbers, list[int]()
        for numbers in self._given.numbers:
            places.append(0 if numbers is None else at)
            if numbers is not None:
                cuda_calls.upload(at, numbers, self._stream)
                at += 8 * len(numbers)
        return places

    def _kernel(self, entry: str) -> Any:
        return self._kernels.plain("moments", entry, self._options)
