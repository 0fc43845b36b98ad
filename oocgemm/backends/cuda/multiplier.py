"""Chooses cuBLAS or one of our own kernels for each product, and launches it.

int8 matrices are multiplied by cuBLAS, with sums in int32. cuBLAS requires that int8 operands are contiguous
along k and aligned to 16 bytes. Other operands are first copied into a workspace (planning/emulation.py). If
C is not aligned, cuBLAS writes its sums to the workspace, and a kernel adds them to C.

All launches go to cupy's current stream.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.calls import Launch, in_python, make
from oocgemm.backends.cuda.emulated import Emulated
from oocgemm.backends.cuda.launch import Kernels, properties
from oocgemm.errors import InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.ladder import choose
from oocgemm.kernels.spec import C_TYPES, Call, Kernel, Params
from oocgemm.planning import Op
from oocgemm.planning.emulation import STRIP_ROWS, pitch, workspace_layout
from oocgemm.system.threads import start

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


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong


# Device -> cuBLAS handles that no run uses. They are kept because creating one takes 5 ms. Concurrent runs do
# not share a handle.
_idle: dict[int, list[int]] = {}


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
        self._idle = _idle.setdefault(device, [])
        try:
            self._blas = self._idle.pop()
        except IndexError:
            self._blas = cublas.create()

    def close(self) -> None:
        """Keep the cuBLAS handle for a later run. Call it when no work that uses the handle is in flight."""
        if self._blas:
            self._idle.append(self._blas)
        self._blas = 0

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
    for device, handles in list(_idle.items()):  # a run in another thread may add one
        with cupy.cuda.Device(device):
            while handles:
                with suppress(Exception):  # after a failed launch, every CUDA call raises
                    cublas.destroy(handles.pop())
