"""The CUDA backend: cupy's streams and events, one arena, cuBLAS or our own kernels. The only user of cupy.

Copies go between the arena and pinned host slots on streams of their own. Waits between operations become
waits of streams on events; no thread waits for the device on the way from one step to the next.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc, runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import Array, Token, device_offsets, step_scalars
from oocgemm.backends.sources import kernel_folder, kernel_source
from oocgemm.errors import BackendError, OutOfMemoryError
from oocgemm.plan import Kind, Op, Operation, Plan, Region
from oocgemm.plan.cost import HOST_ALIGNMENT
from oocgemm.plan.tiling import round_up
from oocgemm.units import format_size

STREAMS = ("h2d", "h2d-c", "compute", "d2h")
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
REANCHOR_NS = 2_000_000_000  # float32 milliseconds stay finer than a microsecond for this long

# cublasGemmEx: cudaDataType of each dtype, and cublasComputeType of each accumulator.
_CUDA_TYPES = {"float16": 2, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
_COMPUTE_TYPES = {"float32": 68, "float64": 70, "complex64": 68, "complex128": 70}
_CUBLAS_OPS = {Op.N: 0, Op.T: 1, Op.C: 2}
_C_TYPES = {
    "float16": "half_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex_t<float>",
    "complex128": "complex_t<double>",
}


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
    """An operation on a stream, between two events."""

    __slots__ = ("_clock", "_start", "end", "stream")

    def __init__(self, clock: _Clock, stream: str, start: Any, end: Any) -> None:
        self._clock = clock
        self._start = start
        self.stream = stream
        self.end = end

    def synchronize(self) -> None:
        self.end.synchronize()

    def interval(self) -> tuple[int, int]:
        return self._clock.between(self._start, self.end)


class CudaSession:
    """An arena on one device, its streams, and what runs on them."""

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._device = cupy.cuda.Device(device)
        self._problem = plan.problem
        self._tile_rows = plan.grid.rows
        self._kernel = kernel
        self._arena = self._blas = 0
        self._pinned: dict[int, list[int]] = {}
        self._pinning = threading.Lock()
        with self._device:
            self._free_before = runtime.memGetInfo()[0]
            try:
                self._offsets, size = device_offsets(plan)
                self._arena = _allocate(size)
                self._blas = cublas.create()
                self._streams = {name: cupy.cuda.Stream(non_blocking=True) for name in STREAMS}
                self._clock = _Clock(self._device)
                self._module = _Module(device, plan)
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
            case Kind.UPLOAD | Kind.DOWNLOAD:
                self._copy(operation, host, stream)
            case Kind.MULTIPLY:
                self._multiply(operation)
            case Kind.FINISH:
                self._finish(operation)
            case _:
                raise AssertionError(f"{operation} is not for a device")
        end.record(stream)
        return CudaToken(self._clock, name, start, end)

    def view(self, operation: Operation, region: Region) -> Array:
        raise AssertionError(f"{operation}: device memory is not host memory here")

    def device_bytes(self) -> int:
        with self._device:
            return int(self._free_before - runtime.memGetInfo()[0])

    def close(self) -> None:
        releases = (
            (runtime.deviceSynchronize, ()),
            *(((cublas.destroy, (self._blas,)),) if self._blas else ()),
            *((runtime.hostUnregister, (at,)) for borders in self._pinned.values() for at in borders[:-1]),
            *(((runtime.free, (self._arena,)),) if self._arena else ()),
        )
        self._arena = self._blas = 0
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
        scalars = step_scalars(self._problem, op.first)
        if k == 0 or self._kernel == "tiled":
            self._module.tiled(m, n, k, scalars, a, lda, b, c)
        else:
            self._cublas(m, n, k, scalars, a, lda, b, c)

    def _cublas(
        self, m: int, n: int, k: int, scalars: tuple[complex, complex], a: int, lda: int, b: int, c: int
    ) -> None:
        """Row-major C is column-major C^T = op(B)^T op(A)^T: operands swap places, their flags stay."""
        problem = self._problem
        alpha, beta = (np.array(value, problem.acc_dtype) for value in scalars)
        cublas.gemmEx(
            *(self._blas, _CUBLAS_OPS[problem.trans_b], _CUBLAS_OPS[problem.trans_a], n, m, k),
            alpha.ctypes.data,
            *(b, _CUDA_TYPES[problem.b_dtype], k if problem.trans_b.swaps else n),
            *(a, _CUDA_TYPES[problem.a_dtype], lda),
            beta.ctypes.data,
            *(c, _CUDA_TYPES[problem.acc_dtype], n),
            *(_COMPUTE_TYPES[problem.acc_dtype], -1),
        )

    def _finish(self, op: Operation) -> None:
        elements = (op.m[1] - op.m[0]) * (op.n[1] - op.n[0])
        self._module.finish(elements, self._address(op.reads[0]), self._address(op.writes[0]))


class _Module:
    """Our kernels for one problem's dtypes, compiled when first called."""

    def __init__(self, device: int, plan: Plan) -> None:
        self._problem = plan.problem
        properties = runtime.getDeviceProperties(device)
        self._arch = f"sm_{properties['major']}{properties['minor']}"
        self._functions: dict[str, Any] = {}
        self.tile = 16

    def tiled(
        self, m: int, n: int, k: int, scalars: tuple[complex, complex], a: int, lda: int, b: int, c: int
    ) -> None:
        problem = self._problem
        a_strides = (1, lda) if problem.trans_a.swaps else (lda, 1)
        b_strides = (1, k) if problem.trans_b.swaps else (n, 1)
        (ar, ai), (br, bi) = ((complex(s).real, complex(s).imag) for s in scalars)
        grid = -(-n // self.tile), min(65535, -(-m // self.tile)), 1
        self._launch(
            "tiled",
            grid,
            (self.tile, self.tile, 1),
            *(np.int64(m), np.int64(n), np.int64(k), np.float64(ar), np.float64(ai)),
            *(np.int64(a), np.int64(a_strides[0]), np.int64(a_strides[1]), np.int32(problem.trans_a is Op.C)),
            *(np.int64(b), np.int64(b_strides[0]), np.int64(b_strides[1]), np.int32(problem.trans_b is Op.C)),
            *(np.float64(br), np.float64(bi), np.int64(c), np.int64(n)),
        )

    def finish(self, elements: int, accumulator: int, result: int) -> None:
        alpha, beta = complex(self._problem.alpha), complex(self._problem.beta)
        grid = min(4096, -(-elements // 256)), 1, 1
        self._launch(
            "finish",
            grid,
            (256, 1, 1),
            *(np.int64(elements), np.float64(alpha.real), np.float64(alpha.imag), np.int64(accumulator)),
            *(np.float64(beta.real), np.float64(beta.imag), np.int64(result)),
        )

    def _launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *args: Any) -> None:
        if name not in self._functions:
            stored = self._problem.c_dtype if name == "finish" else self._problem.a_dtype
            defines = {"OOC_STORED": stored, "OOC_ACCUMULATED": self._problem.acc_dtype}
            options = [f"-D{macro}={_C_TYPES[dtype]}" for macro, dtype in defines.items()]
            module = cupy.cuda.function.Module()
            module.load(compile_kernel(name, self._arch, options))
            self._functions[name] = module.get_function(name)
        self._functions[name](grid, block, args)


def compile_kernel(name: str, arch: str, options: Sequence[str]) -> bytes:
    """Machine code of one of our kernels. Raises `BackendError` with the compiler's log."""
    program = nvrtc.createProgram(kernel_source(name), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(
            program, (f"-arch={arch}", "-std=c++17", f"-I{kernel_folder()}", "-default-device", *options)
        )
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise BackendError(f"kernel {name} does not compile for {arch}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


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
