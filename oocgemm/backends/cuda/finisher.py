"""Finishes strips of C on a CUDA device, when their products have been added up.

`FINISHERS` has the class that launches the kernels of the Finish operations, by the sink of the product
(`oocgemm.planning.sinks`). The kernels apply alpha and beta and cast to C's dtype, or select elements of C,
or reduce its rows. A `ChainKernel` runs the epilogue before that. The `Turner` transposes strips of a Gram
matrix before they are downloaded without host slots.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import (
    SEGMENTS,
    SELECTED,
    Array,
    Finishing,
    Found,
    Numbers,
    Pageable,
    Token,
    too_large,
)
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.calls import upload
from oocgemm.backends.cuda.events import RING, Clock, CudaToken, Work
from oocgemm.backends.cuda.expander import Measurer
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.pageable import Ring, Turn
from oocgemm.kernels.launches import (
    ChainNumbers,
    chain_grid,
    chain_options,
    columns_launch,
    finish_options,
    reduce_grid,
    reduce_options,
    threshold_launch,
    threshold_options,
    topk_launch,
    topk_options,
)
from oocgemm.kernels.spec import C_TYPES
from oocgemm.planning import Kind, Operation, Plan, Region, Tier
from oocgemm.planning.device_memory import (
    COUNTER_BYTES,
    NONE,
    correction_bytes,
    found_layout,
    number_offsets,
    scale_bytes,
)
from oocgemm.planning.schedule.operation import slot_of
from oocgemm.planning.schedule.operations import mirrored_columns
from oocgemm.planning.sinks import Applied, AtLeast, Largest, Reduced, Sink, Stored
from oocgemm.planning.tiling import Range, ceil_div, length

_pointer, _long, _real = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_double


class ChainKernel:
    """The kernel of a chain of steps, and where their numbers are on the device."""

    def __init__(self, plan: Plan, kernels: Any) -> None:
        """Load the kernel. If C is not stored, it changes elements of the accumulator."""
        problem = plan.problem
        self._problem = problem
        self._offsets, _ = number_offsets(problem.epilogue, problem.m, problem.n)
        self._address = 0
        self.in_place = not problem.sink.stores_c
        result = problem.combined_dtype if self.in_place else problem.c_dtype
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
            *map(_long, (rows, cols)),
            _pointer(source),
            *map(_real, scalars),
            chain,
            _pointer(result),
        )


class Finisher:
    """The kernel of the Finish operations of one product.

    If C has an integer dtype, there is a flag in pinned memory per slot for strips of C. The kernel sets the
    flag if an element of the strip does not fit.
    """

    def __init__(self, plan: Plan, kernels: Any, address: Callable[[Region], int], device: int) -> None:
        """Load the kernel. Loading waits until the device is idle, so it is done before the run."""
        problem, slots = plan.problem, plan.slots.finish
        self._problem, self._kernels, self._address = problem, kernels, address
        self._correction: tuple[int, int] | None = None
        self._measurer: Measurer | None = None
        self._chain = ChainKernel(plan, kernels) if problem.epilogue else None
        if self._chain is not None:
            return
        # Sums in float64 are rounded once, in double precision. A C of integers has a flag per slot.
        self._by_double = problem.exact or problem.acc_dtype == "float64"
        if self._by_double:
            self._flags = cupy.cuda.alloc_pinned_memory(max(1, slots) * 4)
            np.frombuffer(self._flags, np.int32)[:] = 0
        name = "int8_finish" if self._by_double else "finish"
        self._kernel = kernels.plain(name, name, finish_options(problem.acc_dtype, problem.c_dtype))

    def finish(self, op: Operation) -> None:
        alpha, beta = map(complex, (self._problem.applied_alpha, self._problem.beta))
        elements = length(op.m) * length(op.n)
        grid = min(4096, ceil_div(elements, 256)), 1, 1
        source, result = self._address(op.reads[0]), self._address(op.writes[0])
        if self._chain is not None:
            self._chain.launch(op, source, result)
            return
        if self._by_double:
            scalars = map(_real, (alpha.real, beta.real))
            flag = self._flags.ptr + 4 * op.writes[0].slot.index
            at = _pointer(source), *scalars, *map(_pointer, (result, flag))
            self._kernel(grid, _long(elements), *at)
        else:
            scaled = map(_real, (alpha.real, alpha.imag))
            added = map(_real, (beta.real, beta.imag))
            self._kernel(grid, _long(elements), *scaled, _pointer(source), *added, _pointer(result))
        if self._correction is not None:
            if self._measurer is not None:
                self._measurer.correct(*self._correction)
            rows, cols = (at + 8 * span[0] for at, span in zip(self._correction, (op.m, op.n), strict=True))
            self._kernels.plain("rank_one", "rank_one", ())(
                grid,
                *map(_long, (elements, length(op.n))),
                *map(_pointer, (rows, cols, result)),
            )

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        """Copy the numbers of the epilogue, or the correction of C, to the device address `address`.

        If a `measurer` finds the means on the device, it computes the correction there.
        """
        if self._chain is not None:
            self._chain.use(finishing.numbers, address, stream)
        sizes = correction_bytes(self._problem)
        if measurer is not None and any(sizes):
            self._measurer, self._correction = measurer, (address, address + sizes[0])
            self._kernels.plain("rank_one", "rank_one", ())
        if finishing.correction is None:
            return
        self._correction = address, address + sizes[0]
        for at, vector in zip(self._correction, finishing.correction, strict=True):
            upload(at, vector, stream)
        self._kernels.plain("rank_one", "rank_one", ())

    def check_of(self, op: Operation) -> Callable[[], None] | None:
        """Return a function that checks a strip after its Finish or Download; None if there is no check."""
        region = op.writes[0] if op.kind is Kind.FINISH else op.reads[0] if op.kind is Kind.DOWNLOAD else None
        if self._chain is not None or not self._by_double or region is None or region.slot.operand != "D":
            return None
        return partial(self._check, region.slot.index)

    def _check(self, slot: int) -> None:
        if np.frombuffer(self._flags, np.int32)[slot]:
            raise too_large(self._problem.c_dtype)


class Scaled:
    """The base of the classes below: an epilogue before the kernel, and factors of rows and columns of C."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int], device: int) -> None:
        self._problem, self._address, self._factors = plan.problem, address, (0, 0)
        self._device = device
        self._kernel = self._load(kernels)
        runs = plan.problem.epilogue and not plan.problem.sink.ranks_distances
        self._chain = ChainKernel(plan, kernels) if runs else None

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        raise NotImplementedError

    def _changed(self, op: Operation) -> int:
        """Apply the epilogue to the strip of a Finish in its accumulator. Return the strip's address."""
        strip = self._address(op.reads[0])
        if self._chain is not None:
            self._chain.launch(op, strip, strip)
        return strip

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        """Copy the factors of rows and columns of C, then the epilogue's numbers, to `address`."""
        problem, numbers = self._problem, address + scale_bytes(self._problem)
        if self._chain is not None:
            self._chain.use(finishing.numbers, numbers, stream)
        if (factors := finishing.factors(problem.sink)) is None:
            return
        self._factors = address, address
        if factors.nearness:
            (offsets,), _ = number_offsets(problem.epilogue, problem.m, problem.n)
            self._factors = numbers + offsets[0], numbers + offsets[1]
        dtype = SELECTED[problem.c_dtype]["score"]
        for at, array in zip(self._factors, (factors.rows, factors.cols), strict=True):
            upload(at, array.astype(dtype), stream)

    def check_of(self, op: Operation) -> None: ...


class Selector(Scaled):
    """The kernel of the Finish operations of a product whose largest elements per row are kept."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        options = topk_options(self._problem)
        self._of_columns = kernels.plain("topk", "topk_columns", options)
        return kernels.plain("topk", "topk", options)

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        super().use(finishing, address, stream, measurer)
        size = self._problem.m * self._problem.sink.per_row * self._problem.itemsizes["C"]
        kept = self._address(Region(slot_of(Tier.DEVICE, "D", 0, self._device), 0, 0))
        cuda_calls.make(cuda_calls.fill(kept, size, stream, NONE))
        stream.synchronize()

    def finish(self, op: Operation) -> None:
        problem, rows, elements = self._problem, length(op.m), self._changed(op)
        sink = problem.sink
        assert isinstance(sink, Largest)
        columns = length(mirrored_columns(op.m, op.n)) if problem.cover.halves else 0
        strip = rows, length(op.n), op.m[0], op.n[0]
        launches = [(self._kernel, topk_launch(problem, rows), (sink.topk, int(sink.excludes_self)))]
        if columns:
            launches.append((self._of_columns, columns_launch(problem, columns), (columns, sink.topk)))
        for (kernel, how, more), kept in zip(launches, op.writes, strict=True):
            kernel(
                how,
                _pointer(elements),
                *map(_long, (*strip, *more)),
                *map(_pointer, (*self._factors, self._address(kept))),
            )


class Sifter(Scaled):
    """The kernel of the Finish operations of a product whose elements at or above a threshold are kept."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return kernels.plain("threshold", "threshold", threshold_options(self._problem))

    def finish(self, op: Operation) -> None:
        problem, rows, to = self._problem, length(op.m), self._address(op.writes[0])
        sink, room = problem.sink, found_layout(problem, rows, length(op.n))
        assert isinstance(sink, AtLeast)
        numbers = rows, length(op.n), op.m[0], op.n[0], sink.excludes_self
        cuda_calls.make(cuda_calls.fill(to, COUNTER_BYTES, cupy.cuda.get_current_stream()))
        self._kernel(
            threshold_launch(rows),
            _pointer(self._changed(op)),
            *map(_long, numbers),
            _real(sink.threshold),
            *map(_pointer, (*self._factors, to, to + room.segments, to + room.elements)),
        )

    def copy(
        self, op: Operation, found: Found, ring: Ring, after: Sequence[Token], clock: Clock
    ) -> CudaToken:
        """Copy the selected elements of a Download's strip, pass them to `found`, and return the handle.

        First waits for the operations in `after`: the number of elements is known only when they have ended.
        """
        for token in after:
            token.synchronize()
        address = self._address(op.reads[0])
        room = found_layout(self._problem, length(op.m), length(op.n))
        counters = np.zeros(2, np.uint64)
        work = _copied(ring, address, counters)
        elements = np.empty(int(counters[0]), SELECTED[self._problem.c_dtype])
        segments = np.empty(int(counters[1]), SEGMENTS)
        for offset, array in ((room.segments, segments), (room.elements, elements)):
            if array.size:
                work = _copied(ring, address + offset, array)
        found.put(segments, elements)
        size = counters.nbytes + segments.nbytes + elements.nbytes
        return CudaToken(RING, work, work.end, clock, bytes=size)


def _copied(ring: Ring, address: int, array: Array) -> Work:
    """Copy from a device address to an array. Wait until that is done, and return the finished work."""

    def move(rows: tuple[int, int], cols: tuple[int, int], part: Array) -> None:
        array[slice(*cols)] = part[0]

    work = ring.download(address, Pageable((1, array.size), array.dtype, move, memory=array[None]), ())()
    assert work.finish is not None
    work.finish()
    return work


class Reducer(Scaled):
    """The kernel of the Finish operations of a product whose rows are reduced."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return kernels.plain("reduce", "reduce", reduce_options(self._problem))

    def finish(self, op: Operation) -> None:
        rows = length(op.m)
        self._kernel(
            reduce_grid(rows),
            _pointer(self._changed(op)),
            *map(_long, (rows, length(op.n), op.first)),
            _pointer(self._address(op.writes[0])),
        )


class Applier(Scaled):
    """Applies the epilogue before `AppliedSession` multiplies the strip by V."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return lambda *_: None

    def finish(self, op: Operation) -> None:
        self._changed(op)


AnyFinisher = Finisher | Selector | Sifter | Reducer | Applier


# The class for the Finish operations of a product, by its sink.
FINISHERS: dict[type[Sink], type[AnyFinisher]] = {
    Stored: Finisher,
    Largest: Selector,
    AtLeast: Sifter,
    Reduced: Reducer,
    Applied: Applier,
}


# Elements along both sides of the squares that a thread block transposes, and the maximum number of blocks.
_SIDE, _MAX_GRID = 32, 1024
Copy = Callable[[int, Pageable, Sequence[Any], Turn | None], Callable[[], Work]]


class Turner:
    """The kernels that transpose strips of one product, and device buffers for transposed pieces."""

    def __init__(self, plan: Plan, kernels: Kernels, buffers: int, streams: Mapping[str, Any]) -> None:
        """Load the kernels if the plan needs them. Loading waits for an idle device, so it precedes the run.

        `buffers` is the device address of one buffer per pinned buffer of the ring.
        """
        problem, self._grid, self._buffers, self._stream = plan.problem, plan.grid, buffers, streams["d2h"]
        self._size, self._upper = problem.itemsizes["C"], problem.cover.upper
        in_memory = plan.setting.routes["C"].streams
        self._completes = in_memory and problem.cover.halves and problem.sink.stores_c
        if self._completes:
            options = (
                f"-DOOC_STORED={C_TYPES[problem.c_dtype]}",
                f"-DOOC_UPPER={int(problem.cover.upper)}",
                f"-DOOC_MIRROR={int(not problem.triangle)}",
            )
            self._turn, self._complete = (kernels.plain("turn", x, options) for x in ("turn", "complete"))

    def download(
        self, op: Operation, copy: Copy, strip: int, block: Pageable, waits: Sequence[Any]
    ) -> Callable[[], Work]:
        """Begin a Download of the strip at a device address by `copy`, the method of the ring."""
        if not self._completes:
            return copy(strip, block, waits, None)
        if op.turned:
            return copy(strip, block, waits, self._turn_of(op))
        return copy(strip, block, self._completed(op, strip, waits), None)

    def _completed(self, op: Operation, strip: int, waits: Sequence[Any]) -> Sequence[Any]:
        """Complete the diagonal block of a strip, in place. Return the events that its copy must wait for."""
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
        """Prepare the launch that completes the diagonal block of a strip, if it has one."""
        if op.kind is not Kind.DOWNLOAD or not self._completes or not self._grid.is_staircase(op.tile):
            return []
        return [cuda_calls.in_python(partial(self._launch, strip, length(op.m), length(op.n)))]

    def _launch(self, strip: int, extent: int, pitch: int) -> None:
        first = 0 if self._upper else pitch - extent
        with self._stream:
            self._complete(
                (min(_MAX_GRID, ceil_div(extent, _SIDE) ** 2), 1, 1),
                *(_pointer(strip + first * self._size), *map(_long, (pitch, extent))),
            )

    def _turn_of(self, op: Operation) -> Turn:
        """Return the function that transposes pieces of the strip of a Download."""
        pitch = length(self._grid.span(op.tile, op.strip))

        def turn(strip: int, rows: Range, cols: Range, offset: int, stream: Any) -> int:
            source = strip + (cols[0] * pitch + rows[0]) * self._size
            result, extents = self._buffers + offset, (pitch, length(rows), length(cols))
            squares = ceil_div(extents[1], _SIDE) * ceil_div(extents[2], _SIDE)
            with stream:
                self._turn(
                    (min(_MAX_GRID, squares), 1, 1),
                    *(_pointer(source), *map(_long, extents), _pointer(result)),
                )
            return result

        return turn
