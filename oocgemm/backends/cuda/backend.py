"""The CUDA backend: cupy's streams and events, one arena, cuBLAS or our own kernels.

Copies go between the arena and pinned host slots on streams of their own. Waits between operations become
waits of streams on events; no thread waits for the device on the way from one step to the next.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import Array, InPlace, Locks, Token, device_offsets, step_scalars
from oocgemm.backends.checksums import Summing
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda import int8, pcie
from oocgemm.backends.cuda.borders import cut
from oocgemm.backends.cuda.events import Clock, CudaToken, Work
from oocgemm.backends.cuda.host_memory import HostMemory
from oocgemm.backends.cuda.launch import SumsDevice, describe_device
from oocgemm.backends.cuda.multiplier import Multiplier, device_name
from oocgemm.backends.integers import too_large
from oocgemm.errors import BackendError, OutOfMemoryError
from oocgemm.kernels import tuning
from oocgemm.kernels.registry import check_plan
from oocgemm.kernels.spec import Call
from oocgemm.planning import GemmProblem, Kind, Operation, Plan, Region, Slot, Tier
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.emulation import Offsets, describe_steps, plane_offsets
from oocgemm.planning.schedule.slots import slot_of
from oocgemm.planning.units import format_size
from oocgemm.system.threads import start

# What of these goes first where the device has room for one only: short work that the next multiplication waits for goes before the
# blocks of this one that are still to begin.
STREAMS = {"h2d": 0, "h2d-c": 0, "prepare": -1, "compute": 0, "d2h": 0}
LOADED_DEPTH = 64  # of the product that is there to have cuBLAS load its kernels
SUMS = "sums"  # beside uploads: the next copy goes on while what has come is summed
_NATIVE = {"emulated": "native"}  # what multiplies where residues will not do
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_SHARES_PAGE_TABLES = 100  # cudaDevAttrPageableMemoryAccessUsesHostPageTables
# Kinds of products that this process has had cuBLAS load kernels for.
_loaded: set[tuple[object, ...]] = set()


class CudaSession:
    """An arena on one device, its streams, and what runs on them."""

    # Prepare is not among them: it waits for what it finds.
    asynchronous: Collection[Kind] = (Kind.UPLOAD, Kind.MULTIPLY, Kind.FINISH, Kind.DOWNLOAD)

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._device = cupy.cuda.Device(device)
        self._problem = plan.problem
        self._tile_rows = plan.grid.rows
        self._arena = 0
        self._host = HostMemory(self._device)
        self.locks: Locks | None = self._host.locks
        self._steps: Counter[int] = Counter()  # by number of moduli, 0 for native ones
        self._moduli: dict[Slot, int] = {}  # that the planes in each slot are of
        self._loading: threading.Thread | None = None
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
                if self._problem.exact:  # a flag for each slot of finished strips
                    self._flags = cupy.cuda.alloc_pinned_memory(max(1, plan.slots.finish) * 4)
                    np.frombuffer(self._flags, np.int32)[:] = 0
                priorities = STREAMS | ({SUMS: -1} if self._problem.checked == "device" else {})
                self._streams = {
                    name: cupy.cuda.Stream(non_blocking=True, priority=priority)
                    for name, priority in priorities.items()
                }
                if self._problem.checked == "device":
                    self.summing = Summing(plan, self._address, SumsDevice(self._multiplier.kernels))
                if self._problem.finishes:
                    self._load_finisher()
                self._clock = Clock(self._device)
                self._begin_loading(plan, device, kernel)
            except (runtime.CUDARuntimeError, driver.CUDADriverError, cublas.CUBLASError) as error:
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
        # Products and kernels are launched on cupy's current stream.
        with self._device, self._streams[stream]:
            yield

    def _begin_loading(self, plan: Plan, device: int, kernel: str) -> None:
        """Have cuBLAS load its kernels while the first panels are read, unless it has them: it takes as long, and the first launch
        would keep the interpreter meanwhile."""
        p = self._problem
        kind = device, kernel, p.a_dtype, p.trans_a, p.trans_b, p.compute
        if p.depth and not p.planes and kind not in _loaded:
            loading = threading.Thread(target=self._load_multiplier, args=(plan,), name="oocgemm-load")
            start(loading)
            self._loading = loading
            _loaded.add(kind)

    def _load_multiplier(self, plan: Plan) -> None:
        """Multiply once, in slots that nothing is in yet. What fails is left to the operation that will fail of it."""
        (m, n, r), stream = extents(plan.problem, plan.tile), cupy.cuda.Stream(non_blocking=True)
        a, b, c = (self._arena + self._offsets[slot_of(Tier.DEVICE, x, 0)] for x in "ABC")
        with suppress(Exception), self._device, stream:
            self._multiplier.load(self._call((m, n, min(r, LOADED_DEPTH)), m, (a, b, c), first=True))
            stream.synchronize()

    def _await_loading(self) -> None:
        """Wait for that, since it uses the slots."""
        loading = self._loading
        if loading is not None:
            loading.join()
            self._loading = None

    def submit(self, operation: Operation, host: Sequence[Array], after: Sequence[Token]) -> CudaToken:
        self._await_loading()
        launches = self._launches(operation, host, self._streams[operation.stream])
        waits = operation.kind not in self.asynchronous
        with nullcontext() if waits else self._host.ordering():
            return self._order(operation, launches, after)

    def _order(
        self, operation: Operation, launches: list[cuda_calls.Launch], after: Sequence[Token]
    ) -> CudaToken:
        """Launch an operation once those in `after` are done."""
        stream, summing = self._streams[operation.stream], self.summing
        beside = summing is not None and operation.kind in (Kind.MULTIPLY, Kind.FINISH)
        for token in after:
            if not isinstance(token, CudaToken):
                token.synchronize()
            elif token.stream != operation.stream:
                cuda_calls.wait(stream, token.own.end if beside else token.end)
                if beside and token.stream != SUMS:
                    cuda_calls.wait(self._streams[SUMS], token.end)
        if summing is not None:
            return self._submit_with_sums(operation, launches, summing)
        check = partial(self._check, operation) if self._problem.exact else None
        own = Work.on(stream, launches)
        return CudaToken(operation.stream, own, own.end, self._clock, check)

    def _submit_with_sums(
        self, op: Operation, launches: list[cuda_calls.Launch], summing: Summing
    ) -> CudaToken:
        """What goes to the host is summed before it leaves, what has come after that. What is done with the checksums of what is
        multiplied or finished is done beside, and waits for what that waits for."""
        name, stream, beside = op.stream, self._streams[op.stream], self._streams[SUMS]
        match op.kind:
            case Kind.UPLOAD:
                own = Work.on(stream, launches)
                cuda_calls.wait(beside, own.end)
                sums = self._sums(beside, summing.uploaded, op)
                name, end = SUMS, sums.end
            case Kind.MULTIPLY | Kind.FINISH:
                take = summing.multiplied if op.kind is Kind.MULTIPLY else summing.finished
                sums, own = self._sums(beside, take, op), Work.on(stream, launches)
                cuda_calls.wait(stream, sums.end)
                end = cupy.cuda.Event(block=True)
                cuda_calls.record(end, stream)
            case Kind.DOWNLOAD:
                sums, own = self._sums(stream, summing.leaving, op), Work.on(stream, launches)
                end = own.end
            case _:
                own = Work.on(stream, launches)
                return CudaToken(name, own, own.end, self._clock)
        return CudaToken(
            name, own, end, self._clock, noting=lambda: summing.busy.append(sums.interval(self._clock))
        )

    @staticmethod
    def _sums(stream: Any, take: Callable[[Operation], None], op: Operation) -> Work:
        """What is done with checksums, on a stream."""
        with stream:
            return Work.on(stream, [cuda_calls.in_python(partial(take, op))])

    def view(self, operation: Operation, region: Region) -> Array:
        raise AssertionError(f"{operation}: device memory is not host memory here")

    def multiplied_by(self) -> list[str]:
        return [*sorted(self._multiplier.used), *describe_steps(self._steps)]

    def device_bytes(self) -> int:
        self._await_loading()
        with self._device:
            return int(self._free_before - runtime.memGetInfo()[0])

    def close(self) -> None:
        self._await_loading()
        releases = (
            (runtime.deviceSynchronize, ()),
            (lambda: self._multiplier.close(), ()),  # noqa: PLW0108  it may not have come to be
            (self._host.close, ()),
            *(((runtime.free, (self._arena,)),) if self._arena else ()),
        )
        self._arena = 0
        with self._device:
            for release, arguments in releases:
                with suppress(Exception):  # after a failed launch every call fails: release all the same
                    release(*arguments)

    def page_lock(self, host: Sequence[Array]) -> None:
        self._host.lock_slot(host[0].ctypes.data, sum(group.nbytes for group in host))

    def _launches(self, op: Operation, host: Sequence[Array], stream: Any) -> list[cuda_calls.Launch]:
        """What launches an operation, all done that can be done before."""
        match op.kind:
            case Kind.UPLOAD:
                return self._copies(op, host, stream)
            case Kind.DOWNLOAD:
                return self._copies(op, host, stream) + self._checksums(op, host, stream)
            case Kind.PREPARE:
                return [cuda_calls.in_python(partial(self._prepare, op))]
            case Kind.MULTIPLY:
                return [self._multiply(op)]
            case Kind.FINISH:
                return [cuda_calls.in_python(partial(self._finish, op))]
        raise AssertionError(f"{op} is not for a device")

    def _copies(self, op: Operation, host: Sequence[Array], stream: Any) -> list[cuda_calls.Launch]:
        """Of a block to or from the device, where it lies row by row; no copy crosses from one locked range into another."""
        uploading = op.kind is Kind.UPLOAD
        device = self._address((op.writes if uploading else op.reads)[0])
        start, size = host[0].ctypes.data, sum(group.nbytes for group in host)
        borders = host.borders if isinstance(host, InPlace) else self._host.lock_slot(start, size)
        launches: list[cuda_calls.Launch] = []
        if len(host) == 1 and not isinstance(host, InPlace):
            for begin, end in pairwise(borders):
                part = min(end, start + size) - begin
                if part > 0:
                    to, source = (device + begin - start, begin)[:: 1 if uploading else -1]
                    launches.append(cuda_calls.copy(to, source, part, stream))
            return launches
        row = sum(group.shape[1] * group.itemsize for group in host)
        for group in host:
            for rows in cut(group, borders):
                width = rows.shape[1] * rows.itemsize
                top, left = divmod(rows.ctypes.data - group.ctypes.data, group.strides[0])
                ends = (device + top * row + left, row), (rows.ctypes.data, max(width, rows.strides[0]))
                onto, origin = ends[:: 1 if uploading else -1]
                launches.append(cuda_calls.copy_rows(onto, origin, width, len(rows), stream))
            device += group.shape[1] * group.itemsize
        return launches

    def _checksums(self, op: Operation, host: Sequence[Array], stream: Any) -> list[cuda_calls.Launch]:
        """To bring the checksums of a strip to the host, behind it, if there are any."""
        if self.summing is None:
            return []
        to, size = self.summing.beside(host[0].ctypes.data), self.summing.room.end
        self._host.lock_slot(to, size)
        return [cuda_calls.copy(to, self.summing.strip_at(op), size, stream)]

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

    def _multiply(self, op: Operation) -> cuda_calls.Launch:
        problem = self._problem
        m, n, k = (span[1] - span[0] for span in (op.m, op.n, op.k))
        top, bottom = self._tile_rows(op.tile[0])
        # A strip begins at a row of its panel of op(A).
        skipped = (op.m[0] - top) * (1 if problem.trans_a.swaps else k) * problem.itemsizes["A"]
        a = self._address(op.reads[0]) + skipped if k else 0
        b = self._address(op.reads[1]) if k else 0
        c = self._address(op.writes[0])
        number = self._moduli[op.reads[2].slot] if problem.planes and k else 0
        if number:
            planes, shape = self._arena + self._offsets[op.reads[2].slot], (bottom - top, n, k)
            rows = op.m[0] - top, op.m[1] - top
            alpha, beta = step_scalars(problem, op.first)
            work = self._arena + self._work
            offsets = self._plane_offsets(op)
            arguments = planes, offsets, work, rows, shape, number, alpha.real, beta.real, c, n
            return cuda_calls.in_python(partial(self._emulated.multiply, *arguments))
        call = self._call((m, n, k), bottom - top, (a, b, c), first=op.first)
        if problem.exact and problem.acc_dtype == "float64":
            return cuda_calls.in_python(partial(self._multiplier.accumulate, call))
        return self._multiplier.choose(call)

    def _call(
        self, extents: tuple[int, int, int], height: int, at: tuple[int, int, int], *, first: bool
    ) -> Call:
        """A native product of panels and a tile at these addresses; that of op(A) has `height` rows."""
        problem, (m, n, k), (a, b, c) = self._problem, extents, at
        lda = height if problem.trans_a.swaps else k
        ldb = k if problem.trans_b.swaps else n
        compute = _NATIVE.get(problem.compute, problem.compute)
        alpha, beta = step_scalars(problem, first)
        kind = problem.a_dtype, problem.trans_a, problem.trans_b
        how = compute, self._multiplier.kernels.device, self._arena + self._work
        return Call(*kind, m, n, k, alpha, a, lda, b, ldb, beta, c, n, *how)

    def _check(self, op: Operation) -> None:
        """Raises `ExecutionError` if the strip that an operation has finished, or brought to the host, is not what C can
        hold."""
        region = op.writes[0] if op.kind is Kind.FINISH else op.reads[0] if op.kind is Kind.DOWNLOAD else None
        finished = region is not None and region.slot.operand == "D"
        if region is not None and finished and np.frombuffer(self._flags, np.int32)[region.slot.index]:
            raise too_large(self._problem.c_dtype)

    def _load_finisher(self) -> None:
        """To load a kernel while others run waits for all that was launched, and all that is to be launched for that."""
        problem, kernels = self._problem, self._multiplier.kernels
        dtypes = problem.acc_dtype, problem.c_dtype
        if problem.exact:
            int8.finisher(kernels, dtypes)
        else:
            kernels.finisher(dtypes)

    def _finish(self, op: Operation) -> None:
        problem = self._problem
        elements = (op.m[1] - op.m[0]) * (op.n[1] - op.n[0])
        dtypes, scalars = (problem.acc_dtype, problem.c_dtype), (problem.applied_alpha, problem.beta)
        source, result = self._address(op.reads[0]), self._address(op.writes[0])
        kernels = self._multiplier.kernels
        if problem.exact:
            flag, real = (
                self._flags.ptr + 4 * op.writes[0].slot.index,
                (problem.applied_alpha.real, problem.beta.real),
            )
            int8.finish(kernels, dtypes, real, elements, source, result, flag)
        else:
            kernels.finish(dtypes, scalars, elements, source, result)


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

    def holds(self, address: int, size: int) -> bool:
        with cupy.cuda.Device(self._device):
            return cuda_calls.locked_from(address) >= size

    def multiprocessors(self) -> int:
        return int(self._properties["multiProcessorCount"])

    def link_limit(self) -> float | None:
        if runtime.deviceGetAttribute(_SHARES_PAGE_TABLES, self._device):
            return None  # NVLink-C2C, of which the system says nothing
        return pcie.link_limit(runtime.deviceGetPCIBusId(self._device))

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
