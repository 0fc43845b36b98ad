"""Selects the largest elements of the rows of C on a CUDA device (`GemmProblem.topk`)."""

import ctypes
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import SELECTED, Array
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.kernels.selection import topk_launch, topk_options
from oocgemm.planning import Operation, Plan, Region
from oocgemm.planning.tiling import length


class Selector:
    """The kernel of the Finish operations of one product whose elements are selected."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        """Load the kernel. `address` returns the device address of a region."""
        self._problem, self._address, self._scales = plan.problem, address, 0
        self._kernel = kernels.plain("topk", "topk", topk_options(plan.problem))

    def use_scales(self, scales: Array | None, address: int, stream: Any) -> None:
        """Copy what rows and columns of C are multiplied by to the device, unless it is None."""
        if scales is None:
            return
        dtype = SELECTED[self._problem.c_dtype]["score"]
        pinned = cupy.cuda.alloc_pinned_memory(scales.size * dtype.itemsize)
        np.frombuffer(pinned, dtype, scales.size)[...] = scales
        cuda_calls.make(cuda_calls.copy(address, pinned.ptr, scales.size * dtype.itemsize, stream))
        stream.synchronize()
        self._scales = address

    def finish(self, op: Operation) -> None:
        """Launch the kernel for the strip of a Finish."""
        problem, rows = self._problem, length(op.m)
        numbers = rows, length(op.n), op.m[0], op.n[0], problem.topk, problem.excludes_self, op.first
        self._kernel(
            topk_launch(problem, rows),
            ctypes.c_void_p(self._address(op.reads[0])),
            *map(ctypes.c_longlong, numbers),
            *map(ctypes.c_void_p, (self._scales, self._address(op.writes[0]))),
        )

    def check_of(self, op: Operation) -> None:
        """Return the check of an operation when it has ended: there is none."""
