"""Casts sums to C's dtype, and applies alpha and beta, where the accumulator is wider than C."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import Finishing
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda import int8
from oocgemm.backends.cuda.chain import Chain
from oocgemm.backends.cuda.measurer import Measurer
from oocgemm.backends.integers import too_large
from oocgemm.planning import Kind, Operation, Plan, Region
from oocgemm.planning.expansion import correction_bytes
from oocgemm.planning.tiling import length


class Finisher:
    """The kernel of the Finish operations of one product. Each slot for strips of C has a number.

    If C has an integer dtype, the kernel sets a flag in pinned memory per slot if an element does not fit.
    """

    def __init__(self, plan: Plan, kernels: Any, address: Callable[[Region], int]) -> None:
        """Load the kernel. This waits for an idle device, so it is done before the run.

        `address` returns the device address of a region.
        """
        problem, slots = plan.problem, plan.slots.finish
        self._problem, self._kernels, self._address = problem, kernels, address
        self._dtypes = problem.acc_dtype, problem.c_dtype
        self._correction: tuple[int, int] | None = None
        self._measurer: Measurer | None = None
        self._chain = Chain(plan, kernels) if problem.epilogue else None
        if self._chain is not None:
            return
        if problem.exact:
            self._flags = cupy.cuda.alloc_pinned_memory(max(1, slots) * 4)
            np.frombuffer(self._flags, np.int32)[:] = 0
            int8.finisher(kernels, self._dtypes)
        else:
            kernels.finisher(self._dtypes)

    def finish(self, op: Operation) -> None:
        """Launch the kernels for the strip of a Finish."""
        alpha, beta = self._problem.applied_alpha, self._problem.beta
        elements = length(op.m) * length(op.n)
        source, result = self._address(op.reads[0]), self._address(op.writes[0])
        if self._chain is not None:
            self._chain.launch(op, source, result)
            return
        if self._problem.exact:
            flag, real = self._flags.ptr + 4 * op.writes[0].slot.index, (alpha.real, beta.real)
            int8.finish(self._kernels, self._dtypes, real, elements, source, result, flag)
        else:
            self._kernels.finish(self._dtypes, (alpha, beta), elements, source, result)
        if self._correction is not None:
            if self._measurer is not None:
                self._measurer.correct(*self._correction)
            rows, cols = (at + 8 * span[0] for at, span in zip(self._correction, (op.m, op.n), strict=True))
            self._kernels.plain("rank_one", "rank_one", ())(
                (min(4096, -(-elements // 256)), 1, 1),
                *map(ctypes.c_longlong, (elements, length(op.n))),
                *map(ctypes.c_void_p, (rows, cols, result)),
            )

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        """Copy the numbers of the epilogue, or what is subtracted from C, to the device, at `address`.

        `measurer` computes what is subtracted on the device, if the problem is measured.
        """
        if self._chain is not None:
            self._chain.use(finishing.numbers, address, stream)
        sizes = correction_bytes(self._problem)
        if measurer is not None and self._problem.centered:
            self._measurer, self._correction = measurer, (address, address + sizes[0])
            self._kernels.plain("rank_one", "rank_one", ())
        if finishing.correction is None:
            return
        rows, cols = finishing.correction
        pinned = cupy.cuda.alloc_pinned_memory(sum(sizes))
        for vector, offset in ((rows, 0), (cols, sizes[0])):
            np.frombuffer(pinned, np.float64, len(vector), offset)[...] = vector
        cuda_calls.make(cuda_calls.copy(address, pinned.ptr, sum(sizes), stream))
        stream.synchronize()
        self._correction = address, address + sizes[0]
        self._kernels.plain("rank_one", "rank_one", ())

    def check_of(self, op: Operation) -> Callable[[], None] | None:
        """Return a check of the strip of a Finish or of its Download, when it has ended; None without one."""
        region = op.writes[0] if op.kind is Kind.FINISH else op.reads[0] if op.kind is Kind.DOWNLOAD else None
        if self._chain is not None or not self._problem.exact or region is None or region.slot.operand != "D":
            return None
        return partial(self._check, region.slot.index)

    def _check(self, slot: int) -> None:
        """Raise `ExecutionError` if the strip in a slot has an element outside C's integer dtype."""
        if np.frombuffer(self._flags, np.int32)[slot]:
            raise too_large(self._problem.c_dtype)
