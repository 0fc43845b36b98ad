"""Transposes strips of a Gram matrix on the device, before they are downloaded without host slots.

The part of a strip that lies on the diagonal of C, its *diagonal block*, is computed whole. If C is stored
whole, the upper triangle of this block is replaced by the conjugate transpose of the lower one, so that C is
exactly Hermitian, and the part of a strip left of its diagonal block is also stored in the other triangle. If
only a triangle of a new C is stored, the elements of the block outside of it become 0.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cupy

from oocgemm.backends.base import Pageable
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import Work
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.kernels.spec import C_TYPES, blocks
from oocgemm.planning import GemmProblem, Kind, Operation, Plan
from oocgemm.planning.tiling import Range, length

# Elements along both sides of the squares that a thread block transposes, and the maximum number of blocks.
_SIDE, _MAX_GRID = 32, 1024
# Transposes a piece of a block on the device. Takes the address of the strip, the rows and the columns of the
# piece in the transposed block, the offset of its pinned buffer, and a stream; returns the address of the
# result.
Turn = Callable[[int, Range, Range, int, Any], int]
Copy = Callable[[int, Pageable, Sequence[Any], Turn | None], Callable[[], Work]]


class Turner:
    """The kernels for one product, and the buffers on the device for what they transpose."""

    def __init__(self, plan: Plan, kernels: Kernels, buffers: int, streams: Mapping[str, Any]) -> None:
        """Load the kernels if the plan needs them. This waits for an idle device, so it precedes the run.

        `buffers` is the device address of the buffers. There is one per pinned buffer of the ring. Diagonal
        blocks are completed on one of `streams`, by name.
        """
        problem, self._grid, self._buffers, self._stream = plan.problem, plan.grid, buffers, streams["d2h"]
        self._size, self._upper = problem.itemsizes["C"], problem.cover.upper
        in_memory = plan.setting.routes["C"].streams
        self._completes = in_memory and problem.cover.square and problem.sink.stores_c
        if self._completes:
            options = turn_options(problem)
            self._turn, self._complete = (kernels.plain("turn", x, options) for x in ("turn", "complete"))

    def download(
        self, op: Operation, copy: Copy, strip: int, block: Pageable, waits: Sequence[Any]
    ) -> Callable[[], Work]:
        """Begin a Download with `copy`, the method of the ring, which gets the following arguments.

        Args:
            op: the Download.
            copy: `Ring.download`.
            strip: the device address of the strip.
            block: where the strip is stored.
            waits: events that the Download waits for.
        """
        if not self._completes:
            return copy(strip, block, waits, None)
        if op.turned:
            return copy(strip, block, waits, self._turn_of(op))
        return copy(strip, block, self._completed(op, strip, waits), None)

    def _completed(self, op: Operation, strip: int, waits: Sequence[Any]) -> Sequence[Any]:
        """Complete the diagonal block of a strip, in place. Return the events to wait for instead."""
        launches = self.launches(op, strip)
        if not launches:
            return waits
        for event in waits:
            cuda_calls.wait(self._stream, event)
        for launch in launches:
            cuda_calls.make(launch)
        done = cupy.cuda.Event(block=True, disable_timing=True)
        cuda_calls.record(done, self._stream)
        return [done]

    def launches(self, op: Operation, strip: int) -> list[cuda_calls.Launch]:
        """Prepare the launch that completes the diagonal block of a strip, if it has one.

        It is made on the stream of Downloads. `strip` is the device address of the strip.
        """
        if op.kind is not Kind.DOWNLOAD or not self._completes or not self._grid.is_staircase(op.tile):
            return []
        return [cuda_calls.in_python(partial(self._launch, strip, length(op.m), length(op.n)))]

    def _launch(self, strip: int, extent: int, pitch: int) -> None:
        first = 0 if self._upper else pitch - extent
        with self._stream:
            self._complete(
                (min(_MAX_GRID, blocks(extent, _SIDE) ** 2), 1, 1),
                *(_pointer(strip + first * self._size), *map(ctypes.c_longlong, (pitch, extent))),
            )

    def _turn_of(self, op: Operation) -> Turn:
        """Return the function that transposes pieces of the strip of a Download."""
        pitch = length(self._grid.span(op.tile, op.strip))

        def turn(strip: int, rows: Range, cols: Range, offset: int, stream: Any) -> int:
            source = strip + (cols[0] * pitch + rows[0]) * self._size
            result, extents = self._buffers + offset, (pitch, length(rows), length(cols))
            squares = blocks(extents[1], _SIDE) * blocks(extents[2], _SIDE)
            with stream:
                self._turn(
                    (min(_MAX_GRID, squares), 1, 1),
                    *(_pointer(source), *map(ctypes.c_longlong, extents), _pointer(result)),
                )
            return result

        return turn


def turn_options(problem: GemmProblem) -> tuple[str, ...]:
    """Return the compiler options of the kernels."""
    return (
        f"-DOOC_STORED={C_TYPES[problem.c_dtype]}",
        f"-DOOC_UPPER={int(problem.cover.upper)}",
        f"-DOOC_MIRROR={int(not problem.triangle)}",
    )


_pointer = ctypes.c_void_p
