"""Finds the means and scales of a transform in the panels of a Gram matrix, before they are transformed."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Array, PanelNumbers, stored_shape
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.kernels.spec import blocks
from oocgemm.kernels.transforms import WIDTH, measure_options, products_grid, sums_grid
from oocgemm.planning import Operation, Plan, Region
from oocgemm.planning.elements import missing_code
from oocgemm.planning.expansion import SUM_BYTES, measure_room
from oocgemm.planning.tiling import length


class Measurer:
    """What is measured in one run. All launches but those of `correct` are on one stream, step by step."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        """`address` returns the device address of a region."""
        self._problem, self._kernels, self._address = plan.problem, kernels, address
        self._by_column = not plan.problem.trans_a.swaps
        self._code = missing_code(plan.problem.a.elements)
        self._wrong = cupy.cuda.alloc_pinned_memory(4)
        self._checking, self._checked, self._corrected = threading.Lock(), False, False

    def use(self, given: PanelNumbers, at: int, numbers: Sequence[int], stream: Any) -> int:
        """Clear what is measured, at the address `at`, and load the kernels. Return the address behind it.

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
        """Prepare the launches that measure the panel of a Prepare."""
        return [cuda_calls.in_python(partial(self._measure, op, self._address(op.reads[0])))]

    def _measure(self, op: Operation, panel: int) -> None:
        problem, first, columns = self._problem, op.k[0], length(op.k)
        rows, cols = stored_shape(op._replace(operand="A", n=(0, 0)), problem)
        width, code = 1 if cols % WIDTH else WIDTH, ctypes.c_int(int(self._code or 0))
        given = _pointer(panel), _long(rows), _long(cols), code
        grid = sums_grid(rows, cols, width, by_column=self._by_column)
        self._kernel("sums", width)(grid, *given, _long(problem.depth), _pointer(self._at + 8 * first))
        places = map(_pointer, (self._at, *self._numbers, self._weights, self._wrong.ptr))
        counts = map(_long, (first, columns, problem.depth, problem.m))
        self._kernel("numbers", 1)((blocks(columns, 256), 1, 1), *counts, *places)
        if problem.is_corrected:
            grid = products_grid(rows, cols, width, by_column=self._by_column)
            places = map(_pointer, (self._weights + 8 * first, self._products))
            self._kernel("products", width)(grid, *given, *places)

    def correct(self, rows: int, cols: int) -> None:
        """Compute what is subtracted from rows and columns of C, unless that has been done.

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
            *((blocks(problem.m, 256), 1, 1), _long(problem.m)),
            *map(ctypes.c_double, (problem.applied_alpha.real, divisor)),
            *map(_pointer, (self._products, self._square, rows, cols)),
        )

    def check(self) -> None:
        """Wait for all Prepares. Raise the error of `PanelNumbers.check` if the steps are not defined.

        Call it after they have been submitted, and before C is written.
        """
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


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
