"""The CUDA backend: cupy's streams and events, one arena, cuBLAS or our own kernels.

Copies go between the arena and pinned host slots on streams of their own. Waits between operations become
waits of streams on events; no thread waits for the device on the way from one step to the next.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import cupy
from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends import tuning
from oocgemm.backends.base import Array, Token, device_offsets, step_scalars
from oocgemm.backends.kernel import Call
from oocgemm.backends.ladder import check_plan
from oocgemm.backends.launch import SumsDevice, describe_device
from oocgemm.backends.multiplier import Multiplier, device_name
from oocgemm.backends.summing import Summing
from oocgemm.errors import BackendError, OutOfMemoryError
from oocgemm.plan import GemmProblem, Kind, Operation, Plan, Region, Slot
from oocgemm.plan.cost import HOST_ALIGNMENT
from oocgemm.plan.emulation import Offsets, described, plane_offsets
from oocgemm.plan.tiling import round_up
from oocgemm.units import format_size

STREAMS = ("h2d", "h2d-c", "prepare", "compute", "d2h")
SUMS = "sums"  # beside uploads: the next copy goes on while what has come is summed
_NATIVE = {"emulated": "native"}  # what multiplies where residues will not do
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
REANCHOR_NS = 2_000_000_000  # float32 milliseconds stay finer than a microsecond for this long


class _Clock:
    """Brings times of the device to the host's clock, by events whose host time is known."""

    def __init__(self, device: Any) -> None:
        self._device = device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._anchor()

    def between(self, start: Any, end: Any) -> tuple[int, int]:
        """Host times of two recorded events that are done, in nanoseconds. One thread at a time."""
        if perf_counter_ns() - self._time > REANCHOR_NS:
            with self._device:
                self._anchor()
        first, last = (int(cupy.cuda.get_elapsed_time(self._event, e) * 1e6) for e in (start, end))
        return self._time + first, self._time + last

    def _anchor(self) -> None:
        best = None
        for _ in range(5):  # the shortest round trip bounds the error best
            event = cupy.cuda.Event()
            before = perf_counter_ns()
            event.record(self._stream)
            event.synchronize()
            after = perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None
        _, self._event, self._time = best


class CudaToken:
    """An operation that ends with an event on a stream. It is at its own work between two `events`; `summing` are those
    between which it takes checksums, if it does, and `note` is told."""

    __slots__ = ("_clock", "_events", "_note", "_summing", "end", "stream")

    def __init__(
        self,
        clock: _Clock,
        stream: str,
        end: Any,
        events: tuple[Any, Any],
        summing: tuple[Any, Any] | None = None,
        note: list[tuple[int, int]] | None = None,
    ) -> None:
        self._clock = clock
        self._events = events
        self._summing = summing
        self._note = note
        self.stream = stream
        self.end = end

    def synchronize(self) -> None:
        self.end.synchronize()

    def interval(self) -> tuple[int, int]:
        if self._summing is not None and self._note is not None:
            self._note.append(self._clock.between(*self._summing))
        return self._clock.between(*self._events)


class CudaSession:
    """An arena on one device, its streams, and what runs on them."""

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._device = cupy.cuda.Device(device)
        self._problem = plan.problem
        self._tile_rows = plan.grid.rows
        self._arena = 0
        self._pinned: dict[int, list[int]] = {}
        self._steps: Counter[int] = Counter()  # by number of moduli, 0 for native ones
        self._moduli: dict[Slot, int] = {}  # that the planes in each slot are of
        self._pinning = threading.Lock()
        self.summing: Summing | None = None
        with self._device:
            self._free_before = runtime.memGetInfo()[0]
            try:
                self._multiplier = Multiplier(device, kernel)
                if self._problem.planes:
                    self._emulated = self._multiplier.emulated(self._problem.a_dtype)
                self._offsets, size = device_offsets(plan)
                self._work = size
                self._arena = _allocate(size + plan.footprint.device["work"])
                self._streams = {name: cupy.cuda.Stream(non_blocking=True) for name in STREAMS}
                if self._problem.checked:
                    # Before the blocks of a multiplication that are still to begin.
                    self._streams[SUMS] = cupy.cuda.Stream(non_blocking=True, priority=-1)
                    self.summing = Summing(plan, self._address, SumsDevice(self._multiplier.kernels))
                self._clock = _Clock(self._device)
            except (runtime.CUDARuntimeError, cublas.CUBLASError) as error:
                free = runtime.memGetInfo()[0]
                self.close()
                raise OutOfMemoryError(
                    f"the device refuses what the kernels take beside the buffers ({error}), {format_size(free)} are "
                    "free: pass a smaller --device-memory"
                ) from error
            except BaseException:
                self.close()
                raise

    @contextmanager
    def worker(self, stream: str) -> Iterator[None]:
        # cupy's cuBLAS wrappers launch on the *current* stream, whatever stream their handle was given.
        with self._device, self._streams[stream]:
            yield

    def submit(self, operation: Operation, host: Sequence[Array], after: Sequence[Token]) -> CudaToken:
        name = operation.stream
        stream = self._streams[name]
        for token in after:
            if not isinstance(token, CudaToken):
                token.synchronize()
            elif token.stream != name:
                stream.wait_event(token.end)
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        start.record(stream)
        match operation.kind:
            case Kind.UPLOAD:
                self._copy(operation, host, stream)
            case Kind.DOWNLOAD if self.summing is not None:
                return self._download_with_sums(operation, host, stream, start, end, self.summing)
            case Kind.DOWNLOAD:
                self._copy(operation, host, stream)
            case Kind.PREPARE:
                self._prepare(operation)
            case Kind.MULTIPLY:
                self._multiply(operation)
            case Kind.FINISH:
                self._finish(operation)
            case _:
                raise AssertionError(f"{operation} is not for a device")
        end.record(stream)
        events = start, end
        if self.summing is None or operation.kind is Kind.PREPARE:
            return CudaToken(self._clock, name, end, events)
        return self._with_sums(operation, name, events, self.summing)

    def _with_sums(self, op: Operation, name: str, events: tuple[Any, Any], summing: Summing) -> CudaToken:
        """Go on with the checksums of an operation whose own work has been issued."""
        done, stream = cupy.cuda.Event(block=True), self._streams[name]
        if op.kind is Kind.UPLOAD:
            name, stream = SUMS, self._streams[SUMS]
            stream.wait_event(events[1])
        with stream:
            match op.kind:
                case Kind.UPLOAD:
                    summing.uploaded(op)
                case Kind.MULTIPLY:
                    summing.multiplied(op)
                case Kind.FINISH:
                    summing.finished(op)
            done.record(stream)
        return CudaToken(self._clock, name, done, events, (events[1], done), summing.busy)

    def _download_with_sums(
        self, op: Operation, host: Sequence[Array], stream: Any, start: Any, end: Any, summing: Summing
    ) -> CudaToken:
        """Sum a strip, then bring it to the host, and its checksums after it."""
        summed = cupy.cuda.Event(block=True)
        source = summing.leaving(op)
        summed.record(stream)
        self._copy(op, host, stream)
        to = summing.beside(host[0].ctypes.data)
        self._pin(to, summing.room.end, whole=False)
        runtime.memcpyAsync(to, source, summing.room.end, runtime.memcpyDeviceToHost, stream.ptr)
        end.record(stream)
        return CudaToken(self._clock, "d2h", end, (summed, end), (start, summed), summing.busy)

    def view(self, operation: Operation, region: Region) -> Array:
        raise AssertionError(f"{operation}: device memory is not host memory here")

    def multiplied_by(self) -> list[str]:
        return [*sorted(self._multiplier.used), *described(self._steps)]

    def device_bytes(self) -> int:
        with self._device:
            return int(self._free_before - runtime.memGetInfo()[0])

    def close(self) -> None:
        releases = (
            (runtime.deviceSynchronize, ()),
            (lambda: self._multiplier.close(), ()),  # noqa: PLW0108  it may not have come to be
            *((runtime.hostUnregister, (at,)) for borders in self._pinned.values() for at in borders[:-1]),
            *(((runtime.free, (self._arena,)),) if self._arena else ()),
        )
        self._arena = 0
        self._pinned = {}
        with self._device:
            for release, arguments in releases:
                with suppress(Exception):  # after a failed launch every call fails: release all the same
                    release(*arguments)

    def _pin(self, address: int, size: int, whole: bool) -> list[int]:
        """Lock the pages of a host slot as far as it is used, and say where one locked range ends and another begins;
        if `whole`, there is but one.

        An Upload finds them touched, by all the threads that have read the panel: locking touched pages is cheap,
        and of pages untouched ten times as dear.
        """
        with self._pinning:
            borders = self._pinned.setdefault(address, [address])
            end = round_up(address + size, HOST_ALIGNMENT)
            if end > borders[-1]:
                if (
                    whole
                ):  # what was locked before is in use no more, or the slot could not have been filled again
                    for start in borders[:-1]:
                        runtime.hostUnregister(start)
                    del borders[1:]
                try:
                    runtime.hostRegister(borders[-1], end - borders[-1], 0)
                except runtime.CUDARuntimeError as error:
                    raise BackendError(
                        f"the system refuses to lock {format_size(end - borders[-1])} of host memory ({error}): "
                        "pass a smaller --host-memory, or raise ulimit -l"
                    ) from error
                borders.append(end)
            return borders

    def _copy(self, op: Operation, host: Sequence[Array], stream: Any) -> None:
        uploading = op.kind is Kind.UPLOAD
        device = self._address((op.writes if uploading else op.reads)[0])
        start, size = host[0].ctypes.data, sum(group.nbytes for group in host)
        kind = runtime.memcpyHostToDevice if uploading else runtime.memcpyDeviceToHost
        borders = self._pin(start, size, whole=len(host) > 1)
        if len(host) > 1:
            row = sum(group.strides[0] for group in host)
            for group in host:
                place, width = group.ctypes.data, group.strides[0]
                runtime.memcpy2DAsync(device, row, place, width, width, len(group), kind, stream.ptr)
                device += width
            return
        for begin, end in pairwise(borders):  # a copy must not cross a border
            part = min(end, start + size) - begin
            if part > 0:
                ends = (device + begin - start, begin) if uploading else (begin, device + begin - start)
                runtime.memcpyAsync(*ends, part, kind, stream.ptr)

    def _address(self, region: Region) -> int:
        """Where a region begins."""
        held = {"C": "acc", "D": "C"}.get(region.slot.operand, region.slot.operand)
        return self._arena + self._offsets[region.slot] + region.start * self._problem.itemsizes[held]

    def _plane_offsets(self, op: Operation) -> Offsets:
        top, bottom = self._tile_rows(op.tile[0])
        return plane_offsets(self._problem.planes, bottom - top, op.n[1] - op.n[0], op.k[1] - op.k[0])

    def _prepare(self, op: Operation) -> None:
        problem, planes = self._problem, op.writes[0].slot
        shape = op.m[1] - op.m[0], op.n[1] - op.n[0], op.k[1] - op.k[0]
        a, b = (self._address(region) for region in op.reads)
        address = self._arena + self._offsets[planes]
        number = self._emulated.prepare(
            a, b, shape, problem.trans_a, problem.trans_b, address, self._plane_offsets(op)
        )
        self._moduli[planes] = number
        self._steps[number] += 1

    def _multiply(self, op: Operation) -> None:
        m, n, k = (span[1] - span[0] for span in (op.m, op.n, op.k))
        top, bottom = self._tile_rows(op.tile[0])
        swaps = self._problem.trans_a.swaps
        lda = bottom - top if swaps else k
        # A strip begins at a row of its panel of op(A).
        skipped = (op.m[0] - top) * (1 if swaps else k) * self._problem.itemsizes["A"]
        a = self._address(op.reads[0]) + skipped if k else 0
        b = self._address(op.reads[1]) if k else 0
        c = self._address(op.writes[0])
        problem = self._problem
        alpha, beta = step_scalars(problem, op.first)
        number = self._moduli[op.reads[2].slot] if problem.planes and k else 0
        if number:
            planes, shape = self._arena + self._offsets[op.reads[2].slot], (bottom - top, n, k)
            rows, scalars = (op.m[0] - top, op.m[1] - top), (alpha.real, beta.real)
            work = self._arena + self._work
            offsets = self._plane_offsets(op)
            self._emulated.multiply(planes, offsets, work, rows, shape, number, *scalars, c, n)
            return
        kind = problem.a_dtype, problem.trans_a, problem.trans_b
        ldb, how = (
            k if problem.trans_b.swaps else n,
            (_NATIVE.get(problem.compute, problem.compute), self._multiplier.kernels.device),
        )
        self._multiplier.multiply(Call(*kind, m, n, k, alpha, a, lda, b, ldb, beta, c, n, *how))

    def _finish(self, op: Operation) -> None:
        problem = self._problem
        elements = (op.m[1] - op.m[0]) * (op.n[1] - op.n[0])
        dtypes, scalars = (problem.acc_dtype, problem.c_dtype), (problem.alpha, problem.beta)
        source, result = self._address(op.reads[0]), self._address(op.writes[0])
        self._multiplier.kernels.finish(dtypes, scalars, elements, source, result)


def wake(device: int) -> None:
    """Begin to create the context, which takes a fifth of a second, beside whatever the caller does next."""

    def create() -> None:
        with (
            suppress(runtime.CUDARuntimeError),
            cupy.cuda.Device(device),
        ):  # whoever opens the backend is told
            runtime.free(0)

    threading.Thread(target=create, name="oocgemm-wake", daemon=True).start()


class CudaBackend:
    """One NVIDIA device."""

    name = "cuda"

    def __init__(self, device: int = 0) -> None:
        try:
            count = runtime.getDeviceCount()
            if not 0 <= device < count:
                raise BackendError(f"there is no CUDA device {device}: there are {count}, counted from 0")
            self._device = device
            self._properties = runtime.getDeviceProperties(device)
            with cupy.cuda.Device(device):
                runtime.free(0)  # creates the context, which no budget covers
        except runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise OutOfMemoryError(
                    f"other processes hold so much of CUDA device {device}'s memory that it cannot even be opened: "
                    "wait for them, or pass another --device"
                ) from error
            raise BackendError(f"no CUDA device answers: {error}") from error

    def free_memory(self) -> int:
        with cupy.cuda.Device(self._device):
            return int(runtime.memGetInfo()[0])

    def describe(self) -> dict[str, str]:
        return {
            "device": self._properties["name"].decode(),
            "memory": format_size(self._properties["totalGlobalMem"]),
            "cupy": cupy.__version__,
            "cuda": str(runtime.runtimeGetVersion()),
            "driver": str(runtime.driverGetVersion()),
        }

    def check(self, plan: Plan, kernel: str) -> None:
        check_plan(kernel, plan, describe_device(self._device))

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        known = tuning.load(device_name(self._device))
        return known.describe(kernel, problem.a_dtype, problem.compute)

    def open(self, plan: Plan, kernel: str) -> CudaSession:
        return CudaSession(self._device, plan, kernel)


def _allocate(size: int) -> int:
    try:
        return int(runtime.malloc(max(size, 1)))
    except runtime.CUDARuntimeError as error:
        free = runtime.memGetInfo()[0]
        raise OutOfMemoryError(
            f"the device refuses {format_size(size)}, {format_size(free)} are free: pass a smaller --device-memory"
        ) from error
