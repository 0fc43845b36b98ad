"""Runs the epilogue of a product (`GemmProblem.epilogue`) on strips of C on a CUDA device."""

import ctypes
from collections.abc import Sequence
from typing import Any

from oocgemm.backends.base import Numbers
from oocgemm.backends.cuda.copies import upload
from oocgemm.kernels.epilogue import ChainNumbers, chain_grid, chain_options
from oocgemm.planning import Operation, Plan
from oocgemm.planning.expansion import number_offsets
from oocgemm.planning.tiling import length


class Chain:
    """The kernel of a chain of steps, and where their numbers are on the device."""

    def __init__(self, plan: Plan, kernels: Any) -> None:
        """Load the kernel. If C is not stored, it changes elements of the accumulator."""
        problem = plan.problem
        self._problem = problem
        self._offsets, _ = number_offsets(problem.epilogue, problem.m, problem.n)
        self._address = 0
        self.in_place = not problem.sink.stores_c
        result = problem.acc_dtype if self.in_place else problem.c_dtype
        self._kernel = kernels.plain("chain", "chain", chain_options(problem, result))

    def use(self, numbers: Sequence[Numbers], address: int, stream: Any) -> None:
        """Copy the numbers of the steps to the device, to `address`."""
        self._address = address
        for offsets, given in zip(self._offsets, numbers, strict=True):
            for offset, array in zip(offsets, given, strict=True):
                if array is not None:
                    upload(address + offset, array, stream)

    def launch(self, op: Operation, source: int, result: int) -> None:
        """Launch the kernel for the strip of a Finish, from its sums at `source`."""
        problem, chain = self._problem, ChainNumbers()
        for number, (step, offsets) in enumerate(zip(problem.epilogue, self._offsets, strict=True)):
            at = [
                self._address + offset + 8 * span[0] if offset >= 0 else None
                for offset, span in zip(offsets, (op.m, op.n), strict=True)
            ]
            chain.steps[number] = (*at, step.value)
        rows, cols = length(op.m), length(op.n)
        scalars = (1.0, 0.0) if self.in_place else (problem.applied_alpha.real, problem.beta.real)
        self._kernel(
            chain_grid(rows, cols),
            *map(ctypes.c_longlong, (rows, cols)),
            ctypes.c_void_p(source),
            *map(ctypes.c_double, scalars),
            chain,
            ctypes.c_void_p(result),
        )
