"""Transforms the elements of panels on a CUDA device before products, and finds means and variances.

An `Expander` transforms the panels of a step (`planning.elements`). For a Gram matrix of one tile, a
`Measurer` first finds the means and scales of the transform in the panel. `moments` finds them in blocks of a
matrix that are read once.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array, PanelNumbers, Swept
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.host_memory import keep_ring, take_ring
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.pageable import Ring
from oocgemm.backends.cuda.warm import Warm, take
from oocgemm.errors import OutOfMemoryError
from oocgemm.kernels.launches import (
    MOMENTS,
    WIDTH,
    ElementNumbers,
    Elements,
    expand_grid,
    expand_options,
    measure_options,
    moments_grid,
    moments_options,
    parts_of,
    products_grid,
    sums_grid,
)
from oocgemm.planning import Op, Operation, Plan, Region
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.device_memory import SUM_BYTES, map_offsets, measure_room, step_offsets
from oocgemm.planning.elements import ElementStep, missing_code
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import ceil_div, length, round_up

_pointer, _long = ctypes.c_void_p, ctypes.c_longlong


class Measurer:
    """Finds the means and scales of a transform in the panels of one run.

    All launches, except those of `correct`, are on one stream.
    """

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        self._problem, self._kernels, self._address = plan.problem, kernels, address
        self._by_column = not plan.problem.trans_a.swaps
        self._code = missing_code(plan.problem.a.elements)
        self._wrong = cupy.cuda.alloc_pinned_memory(4)
        self._checking, self._checked, self._corrected = threading.Lock(), False, False

    def use(self, given: PanelNumbers, at: int, numbers: Sequence[int], stream: Any) -> int:
        """Clear the results at the address `at`, and load the kernels. Return the address behind the results.

        `numbers` are the addresses of the numbers of the steps that the device does to panels.
        """
        room = measure_room(self._problem)
        self._given, self._at, self._stream = given, at, stream
        places = dict(zip((step.kind for step in self._problem.a.prepared), numbers, strict=True))
        self._numbers = [places.get(kind, 0) for kind in ("impute", "center", "scale")]
        self._weights, self._products, self._square = at + room.weights, at + room.products, at + room.square
        np.frombuffer(self._wrong, np.int32)[:] = 0
        cuda_calls.make(cuda_calls.fill(at, room.end, stream))
        stream.synchronize()
        for entry in ("sums", "numbers", "products", "square", "center"):
            for width in (1, WIDTH) if entry in ("sums", "products") else (1,):
                self._kernel(entry, width)
        return at + room.end

    def launches(self, op: Operation) -> list[cuda_calls.Launch]:
        """Prepare the launches that find the means and scales of the transform in the panel of a Prepare.

        If the product is corrected, they find what `correct` needs instead: the weights and the products.
        """
        return [cuda_calls.in_python(partial(self._measure, op, self._address(op.reads[0])))]

    def _measure(self, op: Operation, panel: int) -> None:
        problem, first, columns = self._problem, op.k[0], length(op.k)
        rows, cols = map(length, stored_panel(op, "A", problem.trans_a))
        width, code = 1 if cols % WIDTH else WIDTH, ctypes.c_int(int(self._code or 0))
        given = _pointer(panel), _long(rows), _long(cols), code
        grid = sums_grid(rows, cols, width, by_column=self._by_column)
        self._kernel("sums", width)(grid, *given, _long(problem.depth), _pointer(self._at + 8 * first))
        places = map(_pointer, (self._at, *self._numbers, self._weights, self._wrong.ptr))
        counts = map(_long, (first, columns, problem.depth, problem.m))
        self._kernel("numbers", 1)((ceil_div(columns, 256), 1, 1), *counts, *places)
        if problem.is_corrected:
            grid = products_grid(rows, cols, width, by_column=self._by_column)
            places = map(_pointer, (self._weights + 8 * first, self._products))
            self._kernel("products", width)(grid, *given, *places)

    def correct(self, rows: int, cols: int) -> None:
        """Compute the correction of the rows and columns of C, unless that has been done.

        The launches are on the current stream, which has waited for all Prepares.
        """
        if self._corrected:
            return
        self._corrected = True
        problem = self._problem
        divisor = problem.m if self._code is None else 1
        self._kernel("square", 1)(
            (1, 1, 1), _long(problem.depth), *map(_pointer, (self._weights, self._square))
        )
        self._kernel("center", 1)(
            *((ceil_div(problem.m, 256), 1, 1), _long(problem.m)),
            *map(ctypes.c_double, (problem.applied_alpha.real, divisor)),
            *map(_pointer, (self._products, self._square, rows, cols)),
        )

    def check(self) -> None:
        """Wait for all Prepares. Raise the error of `PanelNumbers.check` if the steps are not defined."""
        with self._checking:
            if self._checked:
                return
            self._stream.synchronize()
            if np.frombuffer(self._wrong, np.int32)[0]:
                assert self._given.check is not None
                self._given.check(*self._sums())
                raise AssertionError("the device finds no transform, and the host finds one")
            self._checked = True

    def _sums(self) -> Array:
        size = SUM_BYTES * self._problem.depth
        pinned = cupy.cuda.alloc_pinned_memory(size)
        cuda_calls.make(cuda_calls.copy(pinned.ptr, self._at, size, self._stream))
        self._stream.synchronize()
        return np.frombuffer(pinned, np.int64, 3 * self._problem.depth).reshape(3, -1)

    def _kernel(self, entry: str, width: int) -> Any:
        options = measure_options(self._by_column, self._problem.a.elements, width)
        return self._kernels.plain("measure", f"measure_{entry}", options)


def stored_panel(op: Operation, role: str, operation: Op) -> Block:
    """Return the rows and columns of the stored operand that are in a panel of a Prepare.

    `role` is "A" for the panel of op(A), and "B" for that of op(B).
    """
    block = (op.m, op.k) if role == "A" else (op.k, op.n)
    return block[::-1] if operation.swaps else block


class Expander:
    """The expanded panels of one run. A slot of the operand "P" contains the results for one step."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        problem = plan.problem
        self._problem, self._kernels, self._address = problem, kernels, address
        self._offsets, _ = map_offsets(problem, *extents(problem, plan.tile))
        self._operands = {"A": problem.a, "B": problem.b}
        # By role, the steps of each map, of which those of the operand come first.
        self._chains = {
            role: [(*x.prepared, *steps) for steps in problem.terms.of(role)]
            for role, x in self._operands.items()
        }
        self._numbers: dict[str, list[int]] = {}  # by role, the address of the numbers of each step, or 0
        self.measurer = Measurer(plan, kernels, address) if problem.finds_numbers else None

    def use(self, elements: Mapping[str, PanelNumbers], address: int, stream: Any) -> int:
        """Copy the numbers of the steps to the device, from `address` on, and load the kernels.

        Returns the address behind the numbers.
        """
        for operand in self._problem.operands:
            offsets, size = step_offsets(self._problem, operand)
            places = [address + at if at >= 0 else 0 for at in offsets]
            given = elements[operand].of_steps if size else ()
            for at, numbers in zip(places, given, strict=False):
                if numbers is not None and at:
                    cuda_calls.upload(at, numbers, stream)
            # A panel of a Gram matrix has both roles.
            for role in "AB" if self._problem.b.shares else operand:
                self._numbers[role] = places
            address += size
        for role, offsets in self._offsets.items():
            for steps, at in zip(self._chains[role], offsets, strict=True):
                for width in (1, WIDTH) if at >= 0 else ():
                    self._kernel(role, steps, width)
        if self.measurer is not None:
            address = self.measurer.use(elements["A"], address, self._numbers["A"], stream)
        return address

    def panels(self, a: int, b: int, slot: int) -> tuple[list[int], list[int]]:
        """Return the addresses of the maps to multiply as op(A), and those as op(B).

        `a` and `b` are the addresses of the stored panels, `slot` that of the slot with the expanded panels.
        """
        left, right = (
            [panel if at < 0 else slot + at for at in self._offsets[role]]
            for role, panel in (("A", a), ("B", b))
        )
        if self._problem.b.shares and a == b:
            # In a tile on the diagonal of a Gram matrix, one panel has both roles.
            known = dict(zip(self._chains["A"], left, strict=True))
            right = [known.get(*each) for each in zip(self._chains["B"], right, strict=True)]
        return left, right

    def check(self) -> None:
        if self.measurer is not None:
            self.measurer.check()

    def launches(self, op: Operation) -> list[cuda_calls.Launch]:
        """Prepare the launches of a Prepare: those of the `Measurer`, if there is one, and the transforms."""
        a, b = (self._address(region) for region in op.reads)
        to_a, to_b = self.panels(a, b, self._address(op.writes[0]))
        made, expand = {a, b}, list[cuda_calls.Launch]()
        for role, source, results in (("A", a, to_a), ("B", b, to_b)):
            for steps, result in zip(self._chains[role], results, strict=True):
                if result not in made:
                    made.add(result)
                    launch = partial(self._launch, role, steps, op, source, result)
                    expand.append(cuda_calls.in_python(launch))
        return expand if self.measurer is None else self.measurer.launches(op) + expand

    def _launch(
        self, role: str, chain: tuple[ElementStep, ...], op: Operation, source: int, result: int
    ) -> None:
        """Transform one panel of a Prepare: that of op(A) if `role` is "A", that of op(B) if it is "B"."""
        operand = self._operands[role]
        ranges = stored_panel(op, role, operand.op)
        rows, cols = map(length, ranges)
        width = 1 if cols % WIDTH else WIDTH
        first = {"rows": ranges[0][0], "cols": ranges[1][0], "": 0}
        steps, numbers = Elements(), self._numbers.get(role, [])
        for i, step in enumerate(chain):
            at = numbers[i] if i < len(numbers) else 0
            steps.steps[i] = ElementNumbers(at and at + 8 * first[step.axis], *step.constants)
        self._kernel(role, chain, width)(
            expand_grid(rows, cols, width),
            *(_pointer(source), _long(rows), _long(cols), steps, _pointer(result)),
        )

    def _kernel(self, role: str, steps: tuple[ElementStep, ...], width: int) -> Any:
        operand = self._operands[role]
        options = expand_options(operand.slot_dtype, operand.dtype, steps, width)
        return self._kernels.plain("expand", "expand", options)


# Numbers of blocks that are on the device at the same time: at least, and at most. All but one of them may be
# copied at the same time. The threads of the ring need about 100 MiB for the full rate of the link.
MIN_SLOTS, MAX_SLOTS = 4, 10
# CUDA's limit of thread blocks along y: a tall block of few columns may have more parts.
MAX_PARTS = 65535
_ALIGNMENT = 512


def moments(device: int, given: Swept, axis: int, host: int, budget: int) -> Array | None:
    """Return `MOMENTS` numbers of each column (`axis` 0) or row (1) of a matrix.

    Return None if the pass takes more than `host` bytes of host memory, or `budget` bytes of device memory.
    """
    room = Room(given, axis, budget)
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
    """The layout of device memory: byte offsets of parts, numbers of steps and slots. The result is at 0.

    There are as many slots as fit into the budget.
    """

    def __init__(self, given: Swept, axis: int, budget: int) -> None:
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
        self.count = min(MAX_SLOTS, max(MIN_SLOTS, (budget - self.slots) // max(1, self.slot)))
        self.end = self.slots + self.count * self.slot


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
        count = self._room.count
        copying, free = deque[tuple[Any, int, Callable[[], Any]]](), list[Any]([None] * count)
        try:
            for number, cut in enumerate(self._given.cuts):
                if len(copying) == count - 1:
                    self._take(*copying.popleft(), free)
                slot = number % count
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
