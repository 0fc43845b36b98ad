"""Transforms panels on a CUDA device just before they are multiplied (`oocgemm.Transform`)."""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import PanelTransform, stored_shape
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.measurer import Measurer
from oocgemm.kernels.transforms import WIDTH, expand_grid, expand_options
from oocgemm.planning import Operation, Plan, Region
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.expansion import expanded_bytes, vector_bytes


class Expander:
    """The transforms of one run's panels. A slot of the operand "P" contains the results for one step."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        """`address` returns the device address of a region."""
        problem = plan.problem
        self._problem, self._kernels, self._address = problem, kernels, address
        self._b_offset = expanded_bytes(problem, *extents(problem, plan.tile))[0]
        # For the roles of op(A) and op(B) whose panels are transformed: dtypes before and after, and whether
        # columns of the stored panel are the indices that have numbers of their own.
        kinds = {
            "A": (problem.a.stored, problem.a_dtype, problem.trans_a.swaps == problem.b.transforms_rows),
            "B": (problem.b.stored, problem.b_dtype, problem.trans_b.swaps),
        }
        self._kinds = {role: kind for role, kind in kinds.items() if kind[0]}
        self._transforms: dict[str, PanelTransform] = {}
        self._vectors: dict[str, int] = {}
        self.measurer = Measurer(plan, kernels, address) if problem.measured else None

    def use(self, transforms: Mapping[str, PanelTransform], address: int, stream: Any) -> int:
        """Copy the numbers of the transforms to the device, from `address` on, and load the kernels.

        Returns the address behind the numbers.
        """
        for operand, size in vector_bytes(self._problem).items():
            given = transforms[operand]
            pinned = cupy.cuda.alloc_pinned_memory(size)
            numbers = np.frombuffer(pinned, np.float64, 3 * self._problem.vector_length).reshape(3, -1)
            for row, vector in zip(numbers, given.vectors, strict=True):
                row[...] = vector
            cuda_calls.make(cuda_calls.copy(address, pinned.ptr, size, stream))
            stream.synchronize()
            # A panel of a Gram matrix has both roles.
            for role in "AB" if self._problem.b.shares else operand:
                self._transforms[role], self._vectors[role] = given, address
            address += size
        for role in self._kinds:
            for width in (1, WIDTH):
                self._kernel(role, width)
        if self.measurer is not None:
            address = self.measurer.use(transforms["A"], address, self._vectors.get("A", 0), stream)
        return address

    def panels(self, a: int, b: int, slot: int) -> tuple[int, int]:
        """Return the addresses from which the panels of op(A) and op(B) of a step are multiplied.

        Args:
            a, b: the addresses of the panels as they are stored.
            slot: the address of the slot with the expanded panels.
        """
        # In a tile on the diagonal of a Gram matrix, one panel has both roles.
        behind = 0 if self._problem.b.shares and a == b else self._b_offset
        return slot if "A" in self._kinds else a, slot + behind if "B" in self._kinds else b

    def check(self) -> None:
        """Raise an error if the transform is not defined for what has been measured. See `Measurer.check`."""
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
            if role in self._kinds
        ]
        return expand if self.measurer is None else self.measurer.launches(op) + expand

    def _launch(self, panel: Operation, source: int, result: int) -> None:
        """Transform a panel. Of the operation `panel`, its operand and its ranges matter."""
        role, (rows, cols) = panel.operand, stored_shape(panel, self._problem)
        width, code = 1 if cols % WIDTH else WIDTH, self._transforms[role].code
        first = panel.m[0] if self._problem.b.transforms_rows else panel.k[0]
        vectors = (self._vectors[role] + 8 * (self._problem.vector_length * i + first) for i in range(3))
        self._kernel(role, width)(
            expand_grid(rows, cols, width),
            *(_pointer(source), _long(rows), _long(cols), ctypes.c_double(0 if code is None else code)),
            *(*map(_pointer, vectors), _pointer(result)),
        )

    def _kernel(self, role: str, width: int) -> Any:
        given = self._transforms[role]
        options = expand_options(*self._kinds[role], given.code, given.log1p, width)
        return self._kernels.plain("expand", "expand", options)


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
