"""Does the steps of elements of panels on a CUDA device, just before the panels are multiplied."""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import PanelNumbers, stored_shape
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.measurer import Measurer
from oocgemm.kernels.transforms import WIDTH, ElementNumbers, Elements, expand_grid, expand_options
from oocgemm.planning import Operation, Plan, Region
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.expansion import expanded_bytes, step_offsets


class Expander:
    """The expanded panels of one run. A slot of the operand "P" contains the results for one step."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        """`address` returns the device address of a region."""
        problem = plan.problem
        self._problem, self._kernels, self._address = problem, kernels, address
        self._b_offset = expanded_bytes(problem, *extents(problem, plan.tile))[0]
        # The operands in the roles of op(A) and op(B) whose panels are expanded.
        self._operands = {role: x for role, x in (("A", problem.a), ("B", problem.b)) if x.stored}
        self._numbers: dict[str, list[int]] = {}  # by role, the address of the numbers of each step, or 0
        self.measurer = Measurer(plan, kernels, address) if problem.finds_numbers else None

    def use(self, elements: Mapping[str, PanelNumbers], address: int, stream: Any) -> int:
        """Copy the numbers of the steps to the device, from `address` on, and load the kernels.

        Returns the address behind the numbers.
        """
        for operand in self._problem.operands:
            offsets, size = step_offsets(self._problem, operand)
            places = [address + at if at >= 0 else 0 for at in offsets]
            if size:
                pinned = cupy.cuda.alloc_pinned_memory(size)
                for at, numbers in zip(offsets, elements[operand].of_steps, strict=False):
                    if numbers is not None and at >= 0:
                        np.frombuffer(pinned, np.float64, len(numbers), at)[...] = numbers
                cuda_calls.make(cuda_calls.copy(address, pinned.ptr, size, stream))
                stream.synchronize()
            # A panel of a Gram matrix has both roles.
            for role in "AB" if self._problem.b.shares else operand:
                self._numbers[role] = places
            address += size
        for role in self._operands:
            for width in (1, WIDTH):
                self._kernel(role, width)
        if self.measurer is not None:
            address = self.measurer.use(elements["A"], address, self._numbers["A"], stream)
        return address

    def panels(self, a: int, b: int, slot: int) -> tuple[int, int]:
        """Return the addresses from which the panels of op(A) and op(B) of a step are multiplied.

        Args:
            a, b: the addresses of the panels as they are stored.
            slot: the address of the slot with the expanded panels.
        """
        # In a tile on the diagonal of a Gram matrix, one panel has both roles.
        behind = 0 if self._problem.b.shares and a == b else self._b_offset
        return slot if "A" in self._operands else a, slot + behind if "B" in self._operands else b

    def check(self) -> None:
        """Raise an error if the steps are not defined for what has been measured. See `Measurer.check`."""
        if self.measurer is not None:
            self.measurer.check()

    def launches(self, op: Operation) -> list[cuda_calls.Launch]:
        """Prepare the launches of a Prepare, which measure and transform its panels."""
        a, b = (self._address(region) for region in op.reads)
        to_a, to_b = self.panels(a, b, self._address(op.writes[0]))
        panels = {"A": (op._replace(operand="A", n=(0, 0)), a, to_a)}
        if to_a != to_b:
            panels["B"] = op._replace(operand="B", m=(0, 0)), b, to_b
        expand = [
            cuda_calls.in_python(partial(self._launch, *panel))
            for role, panel in panels.items()
            if role in self._operands
        ]
        return expand if self.measurer is None else self.measurer.launches(op) + expand

    def _launch(self, panel: Operation, source: int, result: int) -> None:
        """Transform a panel. Of the operation `panel`, its operand and its ranges matter."""
        role, (rows, cols) = panel.operand, stored_shape(panel, self._problem)
        width, operand = 1 if cols % WIDTH else WIDTH, self._operands[panel.operand]
        ranges = panel.block[::-1] if operand.op.swaps else panel.block
        first = {"rows": ranges[0][0], "cols": ranges[1][0], "": 0}
        steps = Elements()
        for i, (step, at) in enumerate(zip(operand.prepared, self._numbers[role], strict=True)):
            steps.steps[i] = ElementNumbers(at and at + 8 * first[step.axis], *step.constants)
        self._kernel(role, width)(
            expand_grid(rows, cols, width),
            *(_pointer(source), _long(rows), _long(cols), steps, _pointer(result)),
        )

    def _kernel(self, role: str, width: int) -> Any:
        operand = self._operands[role]
        options = expand_options(operand.stored, operand.dtype, operand.prepared, width)
        return self._kernels.plain("expand", "expand", options)


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
