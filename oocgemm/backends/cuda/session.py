"""Runs the operations of one plan on a CUDA device.

All buffers on the device (slots) are in one allocation, the arena. Each kind of operation has a CUDA stream.
If an operation must wait for another one, its stream waits for an event (`cuStreamWaitEvent`), and no host
thread is blocked. The exceptions are a Prepare that splits panels for emulated products and a Download of the
elements of a sparse C: their threads wait for results of the device.

Opening a session takes as long as copying 10 MB, and preparing the launches of an operation as long as
copying 4 MB. So the session of a run in memory is kept (`RepeatedSession`). If the run was short, and its
arrays are pinned, the session also keeps the launches of each operation. If the operation's block in host
memory has the same address in the next run, and if it waits for the same events, the session makes these
launches again.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import cupy
from cupy.cuda import Device, driver, runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import (
    MAX_ENQUEUED_STEPS,
    Array,
    Compressed,
    ElementNumbers,
    Finishing,
    Found,
    HostBlock,
    Pageable,
    Pinned,
    Stream,
    Token,
    areas,
    device_offsets,
)
from oocgemm.backends.checksums import DeviceChecksums, DeviceStripSums
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.calls import array_copy, slot_copies, upload
from oocgemm.backends.cuda.events import RING, STREAMS, SUMS, CudaToken, Work, own_tokens, spins
from oocgemm.backends.cuda.expander import Expander
from oocgemm.backends.cuda.finisher import FINISHERS, AnyFinisher, Sifter, Turner
from oocgemm.backends.cuda.host_memory import HostMemory
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.multiplier import Loading, Multiplier
from oocgemm.backends.cuda.warm import reuse, take
from oocgemm.errors import OutOfMemoryError
from oocgemm.kernels.spec import Call
from oocgemm.planning import DTYPES, Kind, Op, Operation, Plan, Region, Slot, Tier
from oocgemm.planning.cost.footprint import extents
from oocgemm.planning.device_memory import factor_bytes
from oocgemm.planning.emulation import Offsets, describe_steps, plane_offsets
from oocgemm.planning.problem import Operand, Updated
from oocgemm.planning.sinks import Applied, Sink
from oocgemm.planning.tiling import Shape, length
from oocgemm.planning.units import format_size

# The addresses of the slots on all devices of a run. Its sessions share one such dict.
Places = dict[Slot, int]


def connected(device: int, others: Sequence[tuple[int, Places]]) -> Places:
    """Let a device and others access each other's memory, if the hardware can. Return their common `Places`.

    `others` are the numbers of the devices whose sessions have been opened, with their `Places`. If two
    devices cannot access each other's memory, the driver stages copies between them in host memory.
    """
    for other in {number for number, _ in others} - {device}:
        for reader, owner in ((device, other), (other, device)):
            # An error says that an earlier run has enabled the access, or that the system refuses it.
            with Device(reader), suppress(runtime.CUDARuntimeError):
                if runtime.deviceCanAccessPeer(reader, owner):
                    runtime.deviceEnablePeerAccess(owner)
    return others[0][1] if others else {}


def sums_taken(
    plan: Plan, address: Callable[[Region], int], kernels: Kernels
) -> tuple[DeviceChecksums | None, DeviceStripSums | None]:
    """Load the kernels for the sums that a run needs. Return the checksums, and the sums of strips."""
    device, checksums, strip_sums = SumsDevice(kernels), None, None
    if plan.problem.checked == "device":
        checksums = DeviceChecksums(plan, address, device)
    if plan.problem.checks_sums:
        strip_sums = DeviceStripSums(plan, address, device, cupy.cuda.alloc_pinned_memory)
    return checksums, strip_sums


class SumsDevice:
    """Implements `oocgemm.backends.checksums.ChecksumDevice` on cupy's current stream."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def load(self, entry: str, macros: tuple[str, ...]) -> None:
        self._kernels.plain("check_sums", entry, macros)

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], given: ctypes.Structure
    ) -> None:
        self._kernels.plain("check_sums", entry, macros)(grid, given)

    def zero(self, address: int, size: int) -> None:
        cuda_calls.make(cuda_calls.fill(address, size, cupy.cuda.get_current_stream()))

    def copy(self, to: int, source: int, size: int) -> None:
        cuda_calls.make(cuda_calls.copy(to, source, size, cupy.cuda.get_current_stream()))


# Maximum k of the product that is computed before the run, only to make cuBLAS load its kernels.
LOADED_DEPTH = 64


class CudaSession:
    """Owns the device memory and the streams of one plan, and runs its operations. Implements `Session`."""

    # Prepare is missing here: its thread waits until the device has found out how many moduli are needed.
    asynchronous: Collection[Kind] = (Kind.UPLOAD, Kind.MULTIPLY, Kind.FINISH, Kind.DOWNLOAD)
    repeats = False
    begins_at_once = True

    def __init__(self, device: int, plan: Plan, kernel: str, beside: "Sequence[CudaSession]" = ()) -> None:
        self._device, self._number = cupy.cuda.Device(device), len(beside)
        self._problem, self._arena, self._spins = plan.problem, 0, spins(plan)
        self._scalars = plan.lowered.scalars
        self._places: Places = connected(device, [(x._device.id, x._places) for x in beside])
        self._warm, self._closed, self._loading = take(device), False, Loading()
        self._host: HostMemory = HostMemory(self._device, beside[0]._host if beside else None)
        self.host_arena: Array | None = None
        # The number of steps for each number of moduli. Steps that were not emulated count for 0 moduli.
        self._steps = Counter[int]()
        # Per slot for residues, the number of moduli. The slot contains a panel's residues for each modulus.
        self._moduli = dict[Slot, int]()
        self._finisher: AnyFinisher | None = None
        self._expander: Expander | None = None
        self.checksums: DeviceChecksums | None = None
        self.strip_sums: DeviceStripSums | None = None
        with self._device:
            try:
                self._multiplier = Multiplier(device, kernel, self._warm.kernels)
                if self._problem.planes:
                    self._emulated = self._multiplier.emulated(self._problem.a_dtype)
                if self._problem.prepares and not self._problem.planes:
                    self._expander = Expander(plan, self._multiplier.kernels, self._address)
                    self.asynchronous = (*self.asynchronous, Kind.PREPARE)
                offsets, self._vectors = device_offsets(plan, self._number)
                turned, self._work, decode, _, size = areas(plan, self._vectors)
                self._free_before: int | None = None  # None: the session allocates nothing
                if not self._warm.holds(size, plan.budgets.device):
                    self._free_before = runtime.memGetInfo()[0] + self._warm.size
                self._arena = self._warm.reserve(size, plan.budgets.device)
                self._places |= {slot: self._arena + at for slot, at in offsets.items()}
                priorities = STREAMS | ({SUMS: -1} if self._problem.checked == "device" else {})
                self._streams = {name: self._warm.stream(name, rank) for name, rank in priorities.items()}
                self.checksums, self.strip_sums = sums_taken(plan, self._address, self._multiplier.kernels)
                if self._problem.finishes:
                    self._finisher = FINISHERS[type(self._problem.sink)](
                        plan, self._multiplier.kernels, self._address, self._number
                    )
                self._turner = Turner(plan, self._multiplier.kernels, self._arena + turned, self._streams)
                self.host_arena = self._host.take(plan, self._multiplier.kernels, self._arena + decode)
                self._clock = self._warm.clock
                self._clock.name = f"device {device}" if plan.devices > 1 else ""
                p = self._problem
                if p.depth and not p.planes:
                    kind = device, kernel, p.a_dtype, p.trans_a, p.trans_b, p.compute
                    self._loading.begin(kind, partial(self._load_multiplier, plan))
            except (runtime.CUDARuntimeError, driver.CUDADriverError, cublas.CUBLASError) as error:
                free = runtime.memGetInfo()[0]
                self.close(failed=True)
                raise OutOfMemoryError(
                    f"the device has no room left for the kernels and their workspace ({error}), "
                    f"{format_size(free)} are free: pass a smaller --device-memory"
                ) from error
            except BaseException:
                self.close(failed=True)
                raise

    @contextmanager
    def worker(self, stream: Stream) -> Iterator[None]:
        # All launches go to cupy's current stream.
        with self._device, self._streams[stream.lane]:
            yield

    def _load_multiplier(self, plan: Plan) -> None:
        """Multiply once, in slots that are still unused, so that cuBLAS loads its kernels."""
        (m, n, r), stream = extents(plan.problem, plan.tile), cupy.cuda.Stream(non_blocking=True)
        if plan.problem.cover.square:
            m = min(m, plan.slots.strip)  # a staircase has less room than m x n
        used = ("A", plan.problem.operands[-1], "P" if self._expander else "C", "C")
        slots = [Region(Slot(Tier.DEVICE, x, 0, self._number), 0, 1) for x in used]
        ((a, *_), (b, *_)), c = self._addresses(slots), self._address(slots[-1])
        with self._device, stream:
            call = self._call((m, n, min(r, LOADED_DEPTH)), (m, n), (a, b, c), first=True)
            self._multiplier.load(call)
            stream.synchronize()

    def _wait(self, op: Operation) -> None:
        """Wait until cuBLAS has loaded its kernels and, before a Download, for what Prepares measure."""
        self._loading.wait()
        if op.kind is Kind.DOWNLOAD and self._expander is not None:
            self._expander.check()

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> CudaToken:
        self._wait(operation)
        if isinstance(host, Found):
            assert isinstance(self._finisher, Sifter)
            return self._finisher.copy(operation, host, self._host.ring, after, self._clock)
        if isinstance(host, Pageable):
            return self.begin(operation, host, after)()
        launches = self._launches(operation, host, self._streams[operation.stream])
        with self._host.submitting() if operation.kind in self.asynchronous else nullcontext():
            return self._enqueue(operation, launches, after)

    def keeps(self, operation: Operation) -> bool:
        return False

    def begin(self, op: Operation, block: Pageable, after: Sequence[Token]) -> Callable[[], CudaToken]:
        # The threads of the ring have streams of their own, which wait for the operations in `after`.
        self._wait(op)
        waits = [token.end for token in own_tokens(after, self._clock)]
        uploading, ring = op.kind is Kind.UPLOAD, self._host.ring
        address = self._address((op.writes if uploading else op.reads)[0])
        if isinstance(block, Compressed) and self._host.decoder is not None:
            return self._host.decoder.upload(address, block, waits, self._clock)
        given = address, block, waits
        copy = ring.upload(*given) if uploading else self._turner.download(op, ring.download, *given)
        return partial(self._copied, op, copy)

    def _copied(self, op: Operation, ended: Callable[[], Work]) -> CudaToken:
        """Wait until the ring has read or written a block, and return the handle of the operation."""
        own = ended()
        if self.checksums is not None:
            with self._device, self._host.submitting():  # the caller's current device may be another one
                return self._sum_upload(op, own, self.checksums)
        check = self._finisher.check_of(op) if self._finisher else None
        return CudaToken(RING, own, own.end, self._clock, check)

    def _enqueue(
        self, operation: Operation, launches: list[cuda_calls.Launch], after: Sequence[Token]
    ) -> CudaToken:
        """Enqueue an operation's launches on its stream, which first waits for the operations in `after`."""
        stream, checksums = self._streams[operation.stream], self.checksums
        beside = checksums is not None and operation.kind in (Kind.MULTIPLY, Kind.FINISH)
        for token in own_tokens(after, self._clock):
            if token.stream != operation.stream:
                # A Multiply only reads its panels. So it does not wait until their checksums are computed.
                # But an operation that overwrites an uploaded strip of C waits for the strip's checksums.
                reads_only = beside and token.uploaded != operation.writes[0].slot
                cuda_calls.wait(stream, token.own.end if reads_only else token.end)
                if beside and token.stream != SUMS:
                    cuda_calls.wait(self._streams[SUMS], token.end)
        if checksums is not None:
            return self._submit_with_sums(operation, launches, checksums)
        check = self._finisher.check_of(operation) if self._finisher else None
        own = Work.on(stream, launches, spins=self._spins)
        return CudaToken(operation.stream, own, own.end, self._clock, check)

    def _submit_with_sums(
        self, op: Operation, launches: list[cuda_calls.Launch], checksums: DeviceChecksums
    ) -> CudaToken:
        """Enqueue an operation together with the launches that compute its checksums.

        After an Upload, the stream of checksums computes the checksums of the block. While a Multiply or a
        Finish runs, the same stream updates or copies the expected checksums of C. For a Download, its own
        stream computes the checksums of the strip before it copies.
        """
        stream, beside = self._streams[op.stream], self._streams[SUMS]
        match op.kind:
            case Kind.UPLOAD:
                return self._sum_upload(op, Work.on(stream, launches), checksums)
            case Kind.MULTIPLY | Kind.FINISH:
                take = checksums.with_multiply if op.kind is Kind.MULTIPLY else checksums.with_finish
                sums, own = self._sums(beside, take, op), Work.on(stream, launches)
                cuda_calls.wait(stream, sums.end)
                end = cupy.cuda.Event(block=True)
                cuda_calls.record(end, stream)
            case Kind.DOWNLOAD:
                sums, own = self._sums(stream, checksums.before_download, op), Work.on(stream, launches)
                end = own.end
            case _:
                own = Work.on(stream, launches)
                return CudaToken(op.stream, own, own.end, self._clock)
        noting = partial(self._note_sums, checksums, sums)
        return CudaToken(op.stream, own, end, self._clock, noting=noting)

    def _sum_upload(self, op: Operation, own: Work, checksums: DeviceChecksums) -> CudaToken:
        """Enqueue the checksums of an uploaded block, behind the launches `own` of its Upload."""
        cuda_calls.wait(self._streams[SUMS], own.end)
        sums = self._sums(self._streams[SUMS], checksums.after_upload, op)
        noting = partial(self._note_sums, checksums, sums)
        return CudaToken(SUMS, own, sums.end, self._clock, noting=noting, uploaded=op.writes[0].slot)

    def _note_sums(self, checksums: DeviceChecksums, sums: Work) -> None:
        checksums.busy.append(sums.interval(self._clock))

    @staticmethod
    def _sums(stream: Any, take: Callable[[Operation], None], op: Operation) -> Work:
        with stream:
            return Work.on(stream, [cuda_calls.in_python(partial(take, op))])

    def view(self, operation: Operation, region: Region) -> Array:
        raise AssertionError(f"{operation}: device memory is not host memory here")

    def use_in_place(self, arrays: Mapping[str, Array]) -> None:
        assert not arrays  # a GPU multiplies in its own memory only

    def use_numbers(self, elements: ElementNumbers, finishing: Finishing) -> None:
        address, measurer = self._arena + self._vectors, None
        with self._device:
            if self._expander is not None:
                address = self._expander.use(elements, address, self._streams["prepare"])
                measurer = self._expander.measurer
            if self._finisher is not None:
                self._finisher.use(finishing, address, self._streams["compute"], measurer)

    def use_factor(self, factor: Array) -> None:
        raise AssertionError("subclasses run such products")

    def kernels_used(self) -> list[str]:
        return [*sorted(self._multiplier.used), *describe_steps(self._steps)]

    def device_bytes(self) -> int:
        self._loading.wait()
        if self._free_before is None:
            return self._warm.size
        with self._device:
            return int(self._free_before - runtime.memGetInfo()[0])

    def close(self, failed: bool = False) -> None:
        self._loading.wait()
        with self._device:
            try:
                runtime.deviceSynchronize()
            except Exception:
                failed = True
            # After a failed launch, every CUDA call raises. Release the rest all the same.
            with suppress(Exception):  # the attribute is missing if __init__ failed early
                self._multiplier.close()
            with suppress(Exception):
                self._host.close(keep=not failed)
            if not self._closed:
                self._closed = True
                self._warm.free() if failed else self._warm.keep()

    def pin(self, host: Sequence[Array]) -> None:
        self._host.pin_slot(host[0].ctypes.data, sum(group.nbytes for group in host))

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: Any
    ) -> list[cuda_calls.Launch]:
        """Prepare the launches of an operation, which `submit` makes under a lock: preparing needs none."""
        match op.kind:
            case Kind.UPLOAD | Kind.DOWNLOAD:
                return self._copies(op, host, stream)
            case Kind.PREPARE if self._expander is not None:
                return self._expander.launches(op)
            case Kind.PREPARE:
                return [cuda_calls.in_python(partial(self._prepare, op))]
            case Kind.MULTIPLY:
                return self._multiply(op)
            case Kind.FINISH if self._finisher is not None:
                finish = cuda_calls.in_python(partial(self._finisher.finish, op))
                if self.strip_sums is None:
                    return [finish]
                return [cuda_calls.in_python(partial(self.strip_sums.before_finish, op)), finish]
        raise AssertionError(f"{op} does not run on a device")

    def _copies(self, op: Operation, host: Sequence[Array] | Pinned, stream: Any) -> list[cuda_calls.Launch]:
        """Prepare the copies of an Upload or a Download. Pin the block's host slot if necessary."""
        uploading = op.kind is Kind.UPLOAD
        device = self._address((op.writes if uploading else op.reads)[0])
        if op.peer:
            return [cuda_calls.copy(device, self._address(op.reads[0]), op.bytes, stream)]
        if isinstance(host, Pinned):
            copy = array_copy(device, host.array, stream, uploading=uploading)
            return [*self._turner.launches(op, device), copy]
        start, size = host[0].ctypes.data, sum(group.nbytes for group in host)
        pinned = self._host.pin_slot(start, size)
        if (packer := self._host.packer) is not None and not uploading:
            return [cuda_calls.in_python(partial(packer.launch, op, device, start, stream))]
        copies = slot_copies(device, host, pinned, stream, uploading=uploading)
        return copies if uploading else copies + self._checksums(op, host, stream)

    def _checksums(self, op: Operation, host: Sequence[Array], stream: Any) -> list[cuda_calls.Launch]:
        """Prepare the copy of a strip's checksums, if there are any, to the host slot, behind the strip."""
        if self.checksums is None:
            return []
        to, size = self.checksums.host_address(host[0].ctypes.data), self.checksums.room.end
        self._host.pin_slot(to, size)
        return [cuda_calls.copy(to, self.checksums.device_address(op), size, stream)]

    def _address(self, region: Region) -> int:
        """Return the device address of the first element of a region."""
        of = {"C": "acc", "D": "C"}.get(region.slot.operand, region.slot.operand)
        return self._places[region.slot] + region.start * self._problem.itemsizes.get(of, 0)

    def _addresses(self, reads: Sequence[Region]) -> tuple[list[int], list[int]]:
        """Return the addresses of the maps of op(A) and op(B) that a Multiply with these regions reads."""
        a, b = map(self._address, reads[:2])
        if self._expander is None:
            return [a], [b]
        return self._expander.panels(a, b, self._address(reads[2]))

    def _plane_offsets(self, op: Operation) -> Offsets:
        m, n = map(length, op.whole)
        return plane_offsets(self._problem.planes, m, n, op.k[1] - op.k[0])

    def _prepare(self, op: Operation) -> None:
        problem, planes = self._problem, op.writes[0].slot
        shape = op.m[1] - op.m[0], op.n[1] - op.n[0], op.k[1] - op.k[0]
        a, b = (self._address(region) for region in op.reads)
        given = problem.trans_a, problem.trans_b, self._places[planes], self._plane_offsets(op)
        number = self._emulated.prepare(a, b, shape, *given)
        self._moduli[planes] = number
        self._steps[number] += 1

    def _multiply(self, op: Operation) -> list[cuda_calls.Launch]:
        """Prepare the products of a Multiply, one per term."""
        problem = self._problem
        m, n, k = (stop - start for start, stop in (op.m, op.n, op.k))
        (top, bottom), (left, right) = op.whole
        maps_a, maps_b = (
            self._addresses(op.reads) if k else ([0] * len(problem.terms.a), [0] * len(problem.terms.b))
        )
        # The panel of op(A) has all rows of the tile. Skip the rows above `op.m`.
        below = (op.m[0] - top) * (1 if problem.trans_a.swaps else k) * DTYPES[problem.a_dtype].itemsize
        # The panel of op(B) has all columns of the tile. Start at the first column of this product, `op.n`.
        beside = (op.n[0] - left) * (k if problem.trans_b.swaps else 1) * DTYPES[problem.b_dtype].itemsize
        c = self._address(op.writes[0])
        number = self._moduli[op.reads[2].slot] if problem.planes and k else 0
        if number:
            planes, shape = self._places[op.reads[2].slot], (bottom - top, right - left, k)
            rows, cols = (op.m[0] - top, op.m[1] - top), (op.n[0] - left, op.n[1] - left)
            alpha, beta = self._scalars[0 if op.first else 1]
            given = self._plane_offsets(op), self._arena + self._work
            arguments = planes, *given, rows, shape, number, alpha.real, beta.real, c, n, cols
            return [cuda_calls.in_python(partial(self._emulated.multiply, *arguments))]
        launches = list[cuda_calls.Launch]()
        for term, (i, j) in enumerate(problem.terms.pairs):
            at = (
                maps_a[i] + below * bool(k),
                maps_b[j] + beside * bool(k),
                c + term * n * problem.acc_itemsize,
            )
            call = self._call((m, n, k), (bottom - top, right - left), at, first=op.first)
            if problem.exact and problem.acc_dtype == "float64":
                launches.append(cuda_calls.in_python(partial(self._multiplier.accumulate, call)))
            else:
                launches.append(self._multiplier.choose(call))
        return launches

    def _call(
        self, extents: tuple[int, int, int], whole: Shape, at: tuple[int, int, int], *, first: bool
    ) -> Call:
        """Return the arguments of a product of two panels that is computed without emulation.

        `extents` are (m, n, k). `whole` are the rows of the whole panel of op(A), and the columns of the
        whole panel of op(B). `at` are the device addresses of both panels and C. `first` is for the first
        product of a tile.
        """
        problem, (m, n, k), (a, b, c) = self._problem, extents, at
        lda = whole[0] if problem.trans_a.swaps else k
        ldb = k if problem.trans_b.swaps else whole[1]
        # A step for which emulation would not be accurate enough is multiplied in the dtype of the operands.
        compute = "native" if problem.compute == "emulated" else problem.compute
        alpha, beta = self._scalars[0 if first else 1]
        kind = problem.a_dtype, problem.trans_a, problem.trans_b
        how = compute, self._multiplier.kernels.device, self._arena + self._work
        return Call(*kind, m, n, k, alpha, a, lda, b, ldb, beta, c, n * problem.terms.count, *how)


class FactorSession(CudaSession):
    """A session with a matrix on the device, Q or V, besides panels and tiles."""

    def use_factor(self, factor: Array) -> None:
        # The factor is behind the numbers of the transform, just before the workspace. Rows of Q are as long
        # as those of C, so that they are aligned alike.
        self._factor = self._arena + self._work - factor_bytes(self._problem)
        with self._device:
            upload(self._factor, factor, self._streams["compute"])


class AppliedSession(FactorSession):
    """A session whose Finish changes a strip of C in its accumulator, and multiplies the strip by V."""

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: object
    ) -> list[cuda_calls.Launch]:
        launches = super()._launches(op, host, stream)
        if op.kind is Kind.FINISH:
            launches.append(self._multiplier.choose(self._product(op)))
        return launches

    def _product(self, op: Operation) -> Call:
        """Return the product of the strip and rows of V, which is added to the kept elements of its rows."""
        problem, count = self._problem, self._problem.sink.per_row
        itemsize, pitch = problem.acc_itemsize, length(op.n) * problem.terms.count
        strip, kept = self._address(op.reads[0]), self._address(op.writes[0])
        factor = self._factor + op.n[0] * count * itemsize
        kind, extents = (problem.acc_dtype, Op.N, Op.N), (length(op.m), count, length(op.n))
        how = "native", self._multiplier.kernels.device, self._arena + self._work
        beta = 0.0 if op.first else 1.0
        return Call(*kind, *extents, 1.0, strip, pitch, factor, count, beta, kept, count, *how)


class ChainedSession(FactorSession):
    """A session whose Multiply first adds the product of its panel's adjoint and Q to the panel of B.

    Both products are on the stream of the Multiply, so that the first one ends before the second one begins.
    """

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: Any
    ) -> list[cuda_calls.Launch]:
        launches = super()._launches(op, host, stream)
        if op.kind is Kind.MULTIPLY:
            launches.insert(0, self._multiplier.choose(self._first_product(op)))
        return launches

    def _first_product(self, op: Operation) -> Call:
        problem, depth, ((a,), (b,)) = self._problem, length(op.k), self._addresses(op.reads)
        adjoint, lda = (Op.N, problem.m) if problem.trans_a.swaps else (Op.T, depth)
        kind, extents = (problem.a_dtype, adjoint, Op.N), (depth, problem.b.changed_columns, problem.m)
        how = problem.compute, self._multiplier.kernels.device, self._arena + self._work
        n = problem.n
        return Call(*kind, *extents, 1.0, a, lda, self._factor, n, 1.0, b, n, *how)


# The class of the session of a product, by the kind of B or by the kind of the sink. All others have a
# `CudaSession`.
SESSIONS: dict[type[Operand | Sink], type[CudaSession]] = {Updated: ChainedSession, Applied: AppliedSession}


# Maximum number of operations whose launches are kept, which take about 3 KB each.
MAX_MADE = 8192


def is_repeatable(plan: Plan) -> bool:
    """Return whether all that a run does on the device follows from the plan and the operands' addresses."""
    p, layouts = plan.problem, plan.layouts
    depends = p.prepares or p.b.shares or p.is_corrected or p.epilogue or p.b.changed_columns or p.checked
    depends = depends or not p.sink.stores_c
    in_memory = layouts.operands_in_memory and layouts.c.in_memory and all(map(plan.slots.streams, "ABC"))
    return plan.devices == 1 and in_memory and not depends


class Made(NamedTuple):
    """The launches of an operation.

    Attributes:
        operation: the operation. A reference to it keeps its id from being used again.
        at: where the block in host memory is; None for an operation without one.
        waits: the events for which the operation's stream waits first.
        again: makes the launches, and returns the host time of the first one (`calls.recording_around`).
        token: the handle of the operation that made them.
    """

    operation: Operation
    at: object
    waits: list[Any]
    again: Callable[[], int]
    token: CudaToken


class RepeatedSession(CudaSession):
    """A session of a plan that `is_repeatable`."""

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._run_by = plan, kernel
        self.repeats = spins(plan) and plan.steps <= MAX_ENQUEUED_STEPS
        self._made = dict[int, Made]()  # by the id of the operation
        super().__init__(device, plan, kernel)

    def keeps(self, operation: Operation) -> bool:
        return id(operation) in self._made

    def runs(self, plan: Plan, kernel: str) -> bool:
        return self._run_by[0] is plan and self._run_by[1] == kernel and self._multiplier.is_current

    def reopen(self) -> None:
        """Begin another run of the plan. The session was closed. This run allocates no device memory."""
        self._closed, self._free_before = False, None
        self._host = HostMemory(self._device)
        self._host.take(self._run_by[0], self._multiplier.kernels, 0)

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> CudaToken:
        if not self.repeats or isinstance(host, Pageable):
            return super().submit(operation, host, after)
        self._wait(operation)
        at = _place(host.array) if isinstance(host, Pinned) else None
        waits = [x.end for x in own_tokens(after, self._clock) if x.stream != operation.stream]
        made = self._made.get(id(operation))
        if made is not None and (made.at, made.waits) == (at, waits):
            token = made.token
            own = Work(token.own.start, made.again(), token.end)
            return CudaToken(token.stream, own, token.end, self._clock, token.check)
        assert not isinstance(host, Found)  # a repeatable plan stores C
        launches = self._launches(operation, host, stream := self._streams[operation.stream])
        with self._host.submitting():
            token = self._enqueue(operation, launches, after)
        if made is not None or len(self._made) < MAX_MADE:
            again = cuda_calls.recording_around(launches, token.own.start, token.end, stream, waits)
            self._made[id(operation)] = Made(operation, at, waits, again, token)
        return token

    def close(self, failed: bool = False) -> None:
        if not (failed or self._closed):
            try:
                self._loading.wait()
                with self._device:
                    runtime.deviceSynchronize()
                    self._host.close(keep=True)
                    self._closed = True
                    self._warm.keep(self)
            except Exception:
                failed = True
            else:
                return
        super().close(failed)

    def drop(self) -> None:
        with suppress(Exception):  # after a failed launch, every CUDA call raises
            self._multiplier.close()


def _place(x: Array) -> object:
    return x.ctypes.data, x.strides


def reopened(device: int, plan: Plan, kernel: str) -> RepeatedSession | None:
    """Open again the idle session of the last run of a plan. Return None if there is none."""
    session = reuse(device, plan, kernel)
    if session is None:
        return None
    assert isinstance(session, RepeatedSession)
    session.reopen()
    return session
