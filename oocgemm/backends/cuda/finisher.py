"""Casts sums to C's dtype, and applies alpha and beta, where the accumulator is wider than C."""

from typing import Any

import cupy
import numpy as np

from oocgemm.backends.cuda import int8
from oocgemm.backends.integers import too_large
from oocgemm.planning import GemmProblem


class Finisher:
    """The kernel of the Finish operations of one product. Each slot for strips of C has a number.

    If C has an integer dtype, the kernel sets a flag in pinned memory per slot if an element does not fit.
    """

    def __init__(self, problem: GemmProblem, kernels: Any, slots: int) -> None:
        """Load the kernel. This waits for an idle device, so it is done before the run."""
        self._problem, self._kernels = problem, kernels
        self._dtypes = problem.acc_dtype, problem.c_dtype
        if problem.exact:
            self._flags = cupy.cuda.alloc_pinned_memory(max(1, slots) * 4)
            np.frombuffer(self._flags, np.int32)[:] = 0
            int8.finisher(kernels, self._dtypes)
        else:
            kernels.finisher(self._dtypes)

    def finish(self, elements: int, source: int, result: int, slot: int) -> None:
        """Launch the kernel for a strip: its number of elements, and the addresses of its sums and of C."""
        alpha, beta = self._problem.applied_alpha, self._problem.beta
        if self._problem.exact:
            flag, real = self._flags.ptr + 4 * slot, (alpha.real, beta.real)
            int8.finish(self._kernels, self._dtypes, real, elements, source, result, flag)
        else:
            self._kernels.finish(self._dtypes, (alpha, beta), elements, source, result)

    def check(self, slot: int) -> None:
        """Raise `ExecutionError` if the strip in a slot has an element outside C's integer dtype."""
        if self._problem.exact and np.frombuffer(self._flags, np.int32)[slot]:
            raise too_large(self._problem.c_dtype)
