"""Selects elements of C on a CUDA device (`oocgemm.planning.sinks`)."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from oocgemm.backends.base import (
    SEGMENTS,
    SELECTED,
    Array,
    Finishing,
    Found,
    Pageable,
    Token,
)
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.chain import Chain
from oocgemm.backends.cuda.copies import upload
from oocgemm.backends.cuda.events import RING, Clock, CudaToken, Work
from oocgemm.backends.cuda.finisher import Finisher
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.measurer import Measurer
from oocgemm.backends.cuda.ring import Ring
from oocgemm.kernels.epilogue import reduce_grid, reduce_options
from oocgemm.kernels.selection import (
    columns_launch,
    threshold_launch,
    threshold_options,
    topk_launch,
    topk_options,
)
from oocgemm.planning import Operation, Plan, Region, Tier
from oocgemm.planning.expansion import scale_bytes
from oocgemm.planning.schedule.operation import slot_of
from oocgemm.planning.schedule.operations import mirrored_columns
from oocgemm.planning.selection import COUNTER_BYTES, NONE, found_layout
from oocgemm.planning.sinks import Applied, AtLeast, Largest, Reduced, Sink, Stored
from oocgemm.planning.tiling import length


class Scaled:
    """What the kernels have in common: an epilogue before them, and rows and columns of C that are scaled."""

    def __init__(self, plan: Plan, kernels: Kernels, address: Callable[[Region], int]) -> None:
        """Load the kernel. `address` returns the device address of a region."""
        self._problem, self._address, self._scales = plan.problem, address, 0
        self._kernel = self._load(kernels)
        self._chain = Chain(plan, kernels) if plan.problem.epilogue else None

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        raise NotImplementedError

    def _changed(self, op: Operation) -> int:
        """Apply the epilogue to the strip of a Finish in its accumulator. Return the strip's address."""
        strip = self._address(op.reads[0])
        if self._chain is not None:
            self._chain.launch(op, strip, strip)
        return strip

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        """Copy what rows and columns of C are multiplied by, and the numbers of the epilogue, to the device.

        They are copied to `address`, one after the other.
        """
        if self._chain is not None:
            self._chain.use(finishing.numbers, address + scale_bytes(self._problem), stream)
        if finishing.scales is not None:
            dtype = SELECTED[self._problem.c_dtype]["score"]
            upload(address, finishing.scales.astype(dtype), stream)
            self._scales = address

    def check_of(self, op: Operation) -> None:
        """Return the check of an operation when it has ended: there is none."""


class Selector(Scaled):
    """The kernels of the Finish operations of one product of which the largest elements are kept."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        options = topk_options(self._problem)
        self._of_columns = kernels.plain("topk", "topk_columns", options)
        return kernels.plain("topk", "topk", options)

    def use(self, finishing: Finishing, address: int, stream: Any, measurer: Measurer | None = None) -> None:
        super().use(finishing, address, stream, measurer)
        size = self._problem.m * self._problem.sink.per_row * self._problem.itemsizes["C"]
        kept = self._address(Region(slot_of(Tier.DEVICE, "D", 0), 0, 0))
        cuda_calls.make(cuda_calls.fill(kept, size, stream, NONE))
        stream.synchronize()

    def finish(self, op: Operation) -> None:
        """Launch the kernels for the strip of a Finish."""
        problem, rows, elements = self._problem, length(op.m), self._changed(op)
        sink = problem.sink
        assert isinstance(sink, Largest)
        columns = length(mirrored_columns(op.m, op.n)) if problem.b.shares else 0
        strip = rows, length(op.n), op.m[0], op.n[0]
        launches = [(self._kernel, topk_launch(problem, rows), (sink.topk, int(sink.excludes_self)))]
        if columns:
            launches.append((self._of_columns, columns_launch(problem, columns), (columns, sink.topk)))
        for (kernel, how, more), kept in zip(launches, op.writes, strict=True):
            kernel(
                how,
                ctypes.c_void_p(elements),
                *map(ctypes.c_longlong, (*strip, *more)),
                *map(ctypes.c_void_p, (self._scales, self._address(kept))),
            )


class Sifter(Scaled):
    """The kernel of the Finish operations of one product of which elements above a threshold are kept."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return kernels.plain("threshold", "threshold", threshold_options(self._problem))

    def finish(self, op: Operation) -> None:
        """Launch the kernel for the strip of a Finish."""
        problem, rows, to = self._problem, length(op.m), self._address(op.writes[0])
        sink, room = problem.sink, found_layout(problem, rows, length(op.n))
        assert isinstance(sink, AtLeast)
        numbers = rows, length(op.n), op.m[0], op.n[0], sink.excludes_self
        cuda_calls.make(cuda_calls.fill(to, COUNTER_BYTES, cupy.cuda.get_current_stream()))
        self._kernel(
            threshold_launch(rows),
            ctypes.c_void_p(self._changed(op)),
            *map(ctypes.c_longlong, numbers),
            ctypes.c_double(sink.threshold),
            *map(ctypes.c_void_p, (self._scales, to, to + room.segments, to + room.elements)),
        )

    def copy(
        self, op: Operation, found: Found, ring: Ring, after: Sequence[Token], clock: Clock
    ) -> CudaToken:
        """Copy the elements of the strip of a Download, and pass them to `found`; return when it has them.

        Waits for the operations in `after`: how much is copied is known when they have ended.
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
    """Copy an array from the device; return when it has been copied."""

    def move(rows: tuple[int, int], cols: tuple[int, int], part: Array) -> None:
        array[slice(*cols)] = part[0]

    work = ring.download(address, Pageable((1, array.size), array.dtype, move, memory=array[None]), ())()
    assert work.finish is not None
    work.finish()
    return work


class Reducer(Scaled):
    """The kernel of the Finish operations of one product of which rows are reduced."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return kernels.plain("reduce", "reduce", reduce_options(self._problem))

    def finish(self, op: Operation) -> None:
        """Launch the kernel for the strip of a Finish."""
        rows = length(op.m)
        self._kernel(
            reduce_grid(rows),
            ctypes.c_void_p(self._changed(op)),
            *map(ctypes.c_longlong, (rows, length(op.n), op.first)),
            ctypes.c_void_p(self._address(op.writes[0])),
        )


class Applier(Scaled):
    """Applies the epilogue before `AppliedSession` multiplies the strip by V."""

    def _load(self, kernels: Kernels) -> Callable[..., None]:
        return lambda *_: None

    def finish(self, op: Operation) -> None:
        """Change the strip of a Finish in its accumulator."""
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
