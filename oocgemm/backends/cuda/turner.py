"""Transposes strips of a whole Gram matrix on the device, for their Download into the other triangle."""

import ctypes
from collections.abc import Callable
from typing import Any

from oocgemm.backends.cuda.launch import Kernels
from oocgemm.kernels.spec import C_TYPES, blocks
from oocgemm.planning import Operation, Plan
from oocgemm.planning.tiling import Range, length

# Elements along both sides of the squares that a thread block transposes, and the maximum number of blocks.
_SIDE, _MAX_GRID = 32, 1024
# Transposes a piece of a block on the device. Takes the address of the strip, the rows and the columns of the
# piece in the transposed block, the offset of its pinned buffer, and a stream; returns the address of the
# result.
Turn = Callable[[int, Range, Range, int, Any], int]


class Turner:
    """The kernel `turn`, and the buffers on the device for its results, one per pinned buffer."""

    def __init__(self, plan: Plan, kernels: Kernels, buffers: int) -> None:
        """Load the kernel if the plan needs it. This waits for an idle device, so it is done before the run.

        `buffers` is the device address of the buffers.
        """
        problem = plan.problem
        self._span, self._buffers, self._size = plan.grid.span, buffers, problem.itemsizes["C"]
        if plan.setting.turns_on_device:
            self._kernel = kernels.plain("turn", "turn", (f"-DOOC_STORED={C_TYPES[problem.c_dtype]}",))

    def of(self, op: Operation) -> Turn | None:
        """Return the function that transposes pieces of the strip of a Download; None for other Downloads."""
        if not op.turned:
            return None
        pitch = length(self._span(op.tile, op.strip))

        def turn(strip: int, rows: Range, cols: Range, offset: int, stream: Any) -> int:
            source = strip + (cols[0] * pitch + rows[0]) * self._size
            result, extents = self._buffers + offset, (pitch, length(rows), length(cols))
            squares = blocks(extents[1], _SIDE) * blocks(extents[2], _SIDE)
            with stream:
                self._kernel(
                    (min(_MAX_GRID, squares), 1, 1),
                    *(_pointer(source), *map(ctypes.c_longlong, extents), _pointer(result)),
                )
            return result

        return turn


_pointer = ctypes.c_void_p
