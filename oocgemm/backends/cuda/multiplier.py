"""Chooses cuBLAS or one of our own kernels for each product, and launches it.

int8 matrices are multiplied by cuBLAS, with sums in int32. cuBLAS requires that int8 operands are contiguous
along k and aligned to 16 bytes. Other operands are first copied into a workspace (planning/emulation.py). If
C is not aligned, cuBLAS writes its sums to the workspace, and a kernel adds them to C.

float64 and float32 products may be emulated by exact int8 products (`Emulated`, planning/emulation.py).

All launches go to cupy's current stream. The caller provides all device memory.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.calls import Launch, in_python, make
from oocgemm.backends.cuda.launch import Kernels, encoded, properties
from oocgemm.errors import InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.ladder import choose
from oocgemm.kernels.launches import (
    combine_options,
    multiply_launch,
    multiply_options,
    planes_map,
    split_options,
)
from oocgemm.kernels.spec import C_TYPES, Call, Kernel, Params
from oocgemm.planning import Op
from oocgemm.planning.emulation import (
    LEVELS,
    MODULI_COUNTS,
    STRIP_ROWS,
    UNITS,
    VERDICT_BYTES,
    Offsets,
    PanelFacts,
    pitch,
    residues,
    suffices,
    workspace_layout,
)
from oocgemm.planning.tiling import round_up
from oocgemm.system.threads import start

# Number of rows that one thread block of the kernels ozaki_facts and ozaki_split processes.
_ROWS = 16

_pointer, _long = ctypes.c_void_p, ctypes.c_longlong


class Emulated:
    """Splits panels of one dtype into residues, and multiplies them. `handle` is a cuBLAS handle."""

    def __init__(self, kernels: Kernels, handle: int, dtype: str) -> None:
        self._kernels = kernels
        self._handle = handle
        self._dtype = dtype
        self._verdict = cupy.cuda.alloc_pinned_memory(VERDICT_BYTES)

    def prepare(
        self,
        a: int,
        b: int,
        shape: tuple[int, int, int],
        trans_a: Op,
        trans_b: Op,
        slot: int,
        offsets: Offsets,
    ) -> int:
        """Split the panels of a step, stored at `a` and `b`, into residues. Return the number of moduli.

        `shape` is (m, n, k): op(A) is m x k, op(B) is k x n. The number of moduli is the
        smallest with which the product is as accurate as a product computed in the panels' dtype; 0 if no
        number is large enough. For each number that is tried, the calling thread waits until the device has
        measured the accuracy.
        """
        m, n, k = shape
        ld, facts = round_up(k, 16), slot + offsets.facts
        sides = (
            (a, m, not trans_a.swaps, facts, slot + offsets.a, slot + offsets.a_exponents),
            (b, n, trans_b.swaps, facts + 16 * m, slot + offsets.b, slot + offsets.b_exponents),
        )
        whole = ctypes.c_int
        for raw, extent, k_major, fact, _, _ in sides:
            function = self._split("ozaki_facts", k_major, MODULI_COUNTS[self._dtype][0])
            grid = -(-extent // _ROWS), 1, 1
            function(grid, _pointer(raw), whole(extent), whole(k), _pointer(fact))
        for number in MODULI_COUNTS[self._dtype]:
            verdict, stream = slot + offsets.verdict, cupy.cuda.get_current_stream()
            runtime.memsetAsync(verdict, 0, VERDICT_BYTES, stream.ptr)
            for side, (raw, extent, k_major, fact, planes, exponents) in enumerate(sides):
                grid = -(-extent // _ROWS), 1, 1
                self._split("ozaki_split", k_major, number)(
                    *(grid, _pointer(raw), whole(extent), whole(k), whole(ld)),
                    *(_pointer(fact), _pointer(planes), _pointer(exponents)),
                    _pointer(verdict + side * VERDICT_BYTES // 2),
                )
            runtime.memcpyAsync(
                self._verdict.ptr, verdict, VERDICT_BYTES, runtime.memcpyDeviceToHost, stream.ptr
            )
            stream.synchronize()
            words = np.frombuffer(self._verdict, np.uint32, VERDICT_BYTES // 4).reshape(2, -1)
            left, right = (_panel_facts(side, k) for side in words)
            if suffices(left, right, k, UNITS[self._dtype]):
                return number
            if not (left.finite and right.finite):
                break
        return 0

    def multiply(
        self,
        slot: int,
        offsets: Offsets,
        work: int,
        rows: tuple[int, int],
        shape: tuple[int, int, int],
        number: int,
        alpha: float,
        beta: float,
        c: int,
        ldc: int,
        cols: tuple[int, int] | None = None,
    ) -> None:
        """Compute C = alpha op(A) @ op(B) + beta C for a block of C, from residues that `prepare` computed.

        `rows` and `cols` are the ranges of the block in an m x n C, of `shape` (m, n, k); `c` is the address
        of the block's first element, and `ldc` the leading dimension in elements. beta = 0 never reads C. The
        workspace at the address `work` has `oocgemm.planning.emulation.work_bytes` bytes.
        """
        m, n, k = shape
        start, stop = cols or (0, n)
        width = stop - start
        ld, pitch = round_up(k, 16), round_up(width, 16)
        combine = self._combine(number)
        for top in range(*rows, STRIP_ROWS):
            count = min(STRIP_ROWS, rows[1] - top)
            plane = count * pitch
            left, right = slot + offsets.a + top * ld, slot + offsets.b + start * ld
            if self._kernels.device.capability == (9, 0):
                self._residues(left, right, work, (m, n, ld), (count, width), number)
            else:
                for place, modulus in enumerate(residues(number).moduli):
                    a, b, sums = left + place * m * ld, right + place * n * ld, work + number * plane
                    extents = count, width, ld
                    cuda_calls.gemm_int8(self._handle, extents, (a, ld), (b, ld), (sums, pitch))
                    self._reduce(sums, work + place * plane, plane, modulus)
            itemsize = 8 if self._dtype == "float64" else 4
            combine(
                (-(-width // 1024), count, 1),
                *(_pointer(work), ctypes.c_longlong(pitch), ctypes.c_longlong(plane), ctypes.c_int(width)),
                _pointer(slot + offsets.a_exponents + 4 * top),
                _pointer(slot + offsets.b_exponents + 4 * start),
                *(ctypes.c_double(alpha), ctypes.c_double(beta)),
                *(_pointer(c + (top - rows[0]) * ldc * itemsize), ctypes.c_longlong(ldc)),
            )

    def _residues(
        self,
        left: int,
        right: int,
        work: int,
        shape: tuple[int, int, int],
        block: tuple[int, int],
        number: int,
    ) -> None:
        """Compute a block of C modulo each modulus. Needs compute capability 9.0.

        `block` is the number of rows and columns of the block. `left` and `right` are the addresses of the
        first row of op(A) and the first column of op(B). `shape` is (m, n, ld): the residues of a row or
        column occupy `ld` bytes per modulus.
        """
        (m, n, ld), (rows, width) = shape, block
        pitch, maps = round_up(width, 16), ((left, rows, m), (right, width, n))
        self._kernels.plain("ozaki_multiply", "ozaki_multiply", multiply_options(number))(
            multiply_launch(self._kernels.device, rows, pitch, number),
            *(encoded(planes_map(at, ld, extent, number, ld * of)) for at, extent, of in maps),
            *(_pointer(work), ctypes.c_int(rows), ctypes.c_int(pitch), ctypes.c_int(ld)),
        )

    def _reduce(self, sums: int, planes: int, elements: int, modulus: int) -> None:
        high = (2**16 + modulus // 2) % modulus - modulus // 2
        function = self._kernels.plain("ozaki_reduce", "ozaki_reduce", ())
        function(
            (min(4096, -(-elements // 1024)), 1, 1),
            *(_pointer(sums), _pointer(planes), ctypes.c_longlong(elements // 4)),
            *(ctypes.c_int(modulus), ctypes.c_int(-(-(2**38) // modulus)), ctypes.c_int(high)),
        )

    def _split(self, entry: str, k_major: bool, number: int) -> Any:
        return self._kernels.plain("ozaki_split", entry, split_options(self._dtype, k_major, number))

    def _combine(self, number: int) -> Any:
        return self._kernels.plain("ozaki_combine", "ozaki_combine", combine_options(self._dtype, number))


def _panel_facts(words: Any, depth: int) -> PanelFacts:
    """Convert the struct `verdict` of kernels/emulation/ozaki_split.cu, as 32-bit words. `depth` is k."""
    not_finite, inexact, nonzero = map(bool, words[:3])
    if not nonzero:
        return PanelFacts(not not_finite, True, 0.0, 0.0, 0.0, (0,) * len(LEVELS))
    grain, most, least = map(float, np.array([words[3], words[4], ~words[5]], np.uint32).view(np.float32))
    return PanelFacts(
        not not_finite, not inexact, grain, most, least, tuple(depth - int(x) for x in words[6:10])
    )


# The kinds of products for which cuBLAS has loaded its kernels in this process. A kind consists of device,
# kernel name, dtype, op() of A, op() of B, and precision.
_loaded: set[tuple[object, ...]] = set()


class Loading:
    """A product that is computed once before the run. Its result is not used."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, kind: tuple[object, ...], multiply: Callable[[], None]) -> None:
        """Call `multiply` in a thread, unless it was called for an earlier run of this kind.

        Errors of `multiply` are ignored: the first product of the run fails in the same way.
        """

        def load() -> None:
            with suppress(Exception):
                multiply()

        if kind not in _loaded:
            thread = threading.Thread(target=load, name="oocgemm-load")
            start(thread)
            self._thread = thread
            _loaded.add(kind)

    def wait(self) -> None:
        """Wait until `multiply` has ended. `multiply` writes to slots, so all operations must wait for it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


# cudaDataType of each dtype.
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
# Values of cublasComputeType_t: first by dtype of the accumulator, then by reduced precision
# (CUBLAS_COMPUTE_32F_FAST_TF32 and CUBLAS_COMPUTE_32F_FAST_16BF).
_COMPUTE_TYPES = {"float32": 68, "float64": 70, "complex64": 68, "complex128": 70}
_REDUCED_COMPUTE_TYPES = {"tf32": 77, "bf16": 75}
_MAX = 2**31 - 1
_OPS = {Op.N: 0, Op.T: 1, Op.C: 2}


def cublas_gemm(handle: int, call: Call, *, keep_gil: bool = True) -> cuda_calls.Launch:
    """Return a deferred call that computes C = alpha op(A) @ op(B) + beta C by cuBLAS, for k > 0.

    The call is on cupy's current stream.

    cuBLAS takes column-major matrices. A row-major C is C^T = op(B)^T op(A)^T in column-major order. So A and
    B swap places, and their transposition flags stay the same.
    """
    accumulator = call.accumulator
    if max(call.m, call.n, call.k, call.lda, call.ldb, call.ldc) > _MAX:
        raise OverflowError(f"cuBLAS takes extents up to {_MAX}: pass a smaller --tile ({call})")
    return cuda_calls.gemm_ex(
        *(handle, _OPS[call.op_b], _OPS[call.op_a], call.n, call.m, call.k),
        _scalar(call.alpha, accumulator),
        *(call.b, _TYPES[call.dtype], call.ldb),
        *(call.a, _TYPES[call.dtype], call.lda),
        _scalar(call.beta, accumulator),
        *(call.c, _TYPES[accumulator], call.ldc),
        *(_REDUCED_COMPUTE_TYPES.get(call.compute, _COMPUTE_TYPES[accumulator]), -1),
        keep_gil=keep_gil,
    )


@lru_cache(64)  # cached, because making a pointer takes longer than the rest of the call
def _scalar(value: complex, dtype: str) -> ctypes.c_void_p:
    """Return a pointer to a scalar. The pointer object keeps the array with the scalar alive."""
    return np.array(value, numpy_dtype(dtype)).ctypes.data_as(ctypes.c_void_p)


# cuBLAS requires that addresses and leading dimensions of int8 operands are multiples of this many bytes.
_ALIGNMENT = 16
# A thread block of the kernel int8_pack copies this many rows, and this many bytes of each along k.
_PACKED = 64


def int8_gemm(kernels: Kernels, handle: int, call: Call) -> None:
    """Compute C (int32) = op(A) @ op(B) + beta C for an integer beta; k > 0. `handle` is a cuBLAS handle."""
    assert call.alpha == 1, "Finish scales exact sums"
    call, product = packed(kernels, call), partial(_product, handle)
    if call.c % _ALIGNMENT or call.ldc % _ALIGNMENT or call.beta not in (0, 1):
        by_strips(kernels, call, "int32", product)
    else:
        product(call)


def packed(kernels: Kernels, call: Call) -> Call:
    """Copy into the workspace each operand whose layout cuBLAS would refuse. Return the call with the copies.

    In the returned call, k is rounded up to a multiple of 16, and the copies are padded with zeros. A call
    with k = 0 is returned unchanged.
    """
    depth, at = pitch(call.k), workspace_layout(call.m, call.n, call.k)
    if depth == 0:
        return call
    a_accepted = not call.op_a.swaps and (call.a | call.lda | call.k) % _ALIGNMENT == 0
    b_accepted = call.op_b.swaps and (call.b | call.ldb | call.k) % _ALIGNMENT == 0
    if not a_accepted:
        _pack(kernels, call.a, call.lda, (call.m, call.k), not call.op_a.swaps, call.work)
        call = replace(call, op_a=Op.N, a=call.work, lda=depth)
    if not b_accepted:
        _pack(kernels, call.b, call.ldb, (call.n, call.k), call.op_b.swaps, call.work + at.b)
        call = replace(call, op_b=Op.T, b=call.work + at.b, ldb=depth)
    return replace(call, k=depth)  # the copies contain zeros beyond the original k


def by_strips(kernels: Kernels, call: Call, c_dtype: str, product: Callable[[Call], None]) -> None:
    """Compute C (float64 or int32) = op(A) @ op(B) + beta C, some rows at a time. C may have any alignment.

    `call` is what `packed` returned. `product` is called for the int32 product of at most `STRIP_ROWS` rows,
    which the kernel int8_add adds to beta C.
    """
    sums, across = call.work + workspace_layout(call.m, call.n, call.k).sums, pitch(call.n)
    add = kernels.plain("int8_add", "int8_add", (f"-DOOC_ACCUMULATED={C_TYPES[c_dtype]}",))
    row = call.ldc * np.dtype(c_dtype).itemsize
    for top in range(0, call.m, STRIP_ROWS):
        rows = min(STRIP_ROWS, call.m - top)
        product(replace(call, m=rows, a=call.a + top * call.lda, beta=0, c=sums, ldc=across))
        add(
            (-(-call.n // 1024), rows, 1),
            *(_pointer(sums), _long(across), _long(call.n), ctypes.c_double(complex(call.beta).real)),
            *(_pointer(call.c + top * row), _long(call.ldc)),
        )


def _product(handle: int, call: Call) -> None:
    """Compute the same as `int8_gemm`, for operands that cuBLAS accepts; beta is 0 or 1."""
    extents, beta = (call.m, call.n, call.k), int(call.beta == 1)
    cuda_calls.gemm_int8(handle, extents, (call.a, call.lda), (call.b, call.ldb), (call.c, call.ldc), beta)


def _pack(kernels: Kernels, x: int, ld: int, shape: tuple[int, int], k_major: bool, to: int) -> None:
    rows, k = shape
    function = kernels.plain("int8_pack", "int8_pack", (f"-DOOC_K_MAJOR={int(k_major)}",))
    function(
        (-(-pitch(k) // _PACKED), -(-rows // _PACKED), 1),
        *(_pointer(x), _long(ld), _long(rows), _long(k), _pointer(to), _long(pitch(k))),
    )


# Device -> cuBLAS handles that no run uses. They are kept because creating one takes 5 ms. Concurrent runs do
# not share a handle.
_idle: dict[int, list[int]] = {}
# Device -> the thread of `preload`. It may still use a handle that is in `_idle`.
_preloads: dict[int, threading.Thread] = {}
# The extent of the product that `preload` computes.
_PRELOADED = 64


def preload(device: int) -> None:
    """Make cuBLAS load what all its products need, which takes 0.1 s, by a small product in a thread.

    Call it once per device, before its first run, so that the caller can import modules and plan meanwhile.
    Errors are ignored: the first run fails in the same way.
    """
    handles = _idle.setdefault(device, [])

    def load() -> None:
        n, size = _PRELOADED, 4 * _PRELOADED**2
        with suppress(Exception), cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            handle = cublas.create()
            handles.append(handle)
            a = runtime.malloc(3 * size)
            try:
                call = Call("float32", Op.N, Op.N, n, n, n, 1, a, n, a + size, n, 0, a + 2 * size, n)
                make(cublas_gemm(handle, call, keep_gil=False))
                stream.synchronize()
            finally:
                runtime.free(a)

    thread = threading.Thread(target=load, name="oocgemm-preload")
    with suppress(RuntimeError):  # no thread can be started: the first run loads everything
        thread.start()
        _preloads[device] = thread


class Multiplier:
    """Multiplies on one device, with cuBLAS or our own kernels. Launches go to cupy's current stream.

    `kernel` is the name of one of our kernels, or "cublas", or "auto". "auto" means the kernel that was the
    fastest in measurements of similar products. `kernels` are our own kernels, if some are loaded already.
    """

    def __init__(self, device: int, kernel: str = "auto", kernels: Kernels | None = None) -> None:
        self.kernels = kernels or Kernels(device)
        self._kernel = kernel
        self.used: set[str] = set()  # names of the kernels that have multiplied
        self._tuning = tuning.load(device_name(device))
        self._preload = _preloads.get(device)
        self._idle = _idle.setdefault(device, [])
        try:
            self._handle = self._idle.pop()
        except IndexError:
            self._handle = cublas.create()

    @property
    def _blas(self) -> int:
        """The cuBLAS handle. The first use waits until `preload` has ended."""
        if self._preload is not None:
            self._preload.join()
            self._preload = None
        return self._handle

    def close(self) -> None:
        """Keep the cuBLAS handle for a later run. Call it when no work that uses the handle is in flight."""
        if self._blas:
            self._idle.append(self._blas)
        self._handle = 0

    @property
    def is_current(self) -> bool:
        """Whether the measured rates of kernels are the same as when this object was created."""
        return self._tuning == tuning.load(self._tuning.device)

    def emulated(self, dtype: str) -> Emulated:
        return Emulated(self.kernels, self._blas, dtype)

    def choose(self, call: Call) -> Launch:
        """Return a deferred call that computes C = alpha op(A) @ op(B) + beta C by the best kernel.

        Raises `InputError` if the user asked for one of our kernels by name, and it cannot compute the
        product.
        """
        name, params = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if call.k == 0:
            # cuBLAS may refuse k = 0, so our kernel "tiled" computes C = beta C. It only offers native
            # precision, which makes no difference here: no elements are multiplied.
            name, params, call = "tiled", None, replace(call, compute="native")
        if name != tuning.CUBLAS:
            try:
                return self.launch(*choose(name, call, params), call)
            except InputError:
                if self._kernel != "auto":
                    raise
        return self.launch(None, {}, call)

    def load(self, call: Call) -> None:
        """Make cuBLAS load the kernels for the product `call`, by computing the product, without the GIL.

        Does nothing if one of our own kernels is chosen for the product, or if the operands are int8. Loading
        takes tens of milliseconds.
        """
        name, _ = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if name == tuning.CUBLAS and call.dtype != "int8":
            make(cublas_gemm(self._blas, call, keep_gil=False))

    def accumulate(self, call: Call) -> None:
        """Compute C = op(A) @ op(B) + beta C for int8 operands and a C in float64, by sums in int32."""
        given = packed(self.kernels, call)
        by_strips(self.kernels, given, "float64", lambda part: make(self.choose(part)))

    def launch(self, kernel: Kernel | None, params: Params, call: Call) -> Launch:
        """Return a deferred call that computes the product `call` with `kernel` (None: with cuBLAS)."""
        if kernel is not None:
            self.used.add(kernel.label)
            return in_python(partial(self.kernels.multiply, kernel, call, params))
        self.used.add(tuning.CUBLAS)
        if call.dtype == "int8":
            return in_python(partial(int8_gemm, self.kernels, self._blas, call))
        return cublas_gemm(self._blas, call)

    def run(self, kernel: Kernel | None, params: Params, call: Call) -> None:
        """Compute the product `call` with `kernel`, or with cuBLAS if `kernel` is None."""
        make(self.launch(kernel, params, call))


@cache
def device_name(device: int) -> str:
    return str(properties(device)["name"].decode())


def release() -> None:
    """Destroy the cuBLAS handles that no run uses."""
    for thread in list(_preloads.values()):
        thread.join()
    for device, handles in list(_idle.items()):  # a run in another thread may add one
        with cupy.cuda.Device(device):
            while handles:
                with suppress(Exception):  # after a failed launch, every CUDA call raises
                    cublas.destroy(handles.pop())
