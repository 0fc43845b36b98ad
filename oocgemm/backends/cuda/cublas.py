"""Converts a product to a call of cublasGemmEx."""

from ctypes import c_void_p
from functools import lru_cache

import numpy as np

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.kernels.spec import Call
from oocgemm.planning import Op

# cudaDataType of each dtype.
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
# Values of cublasComputeType_t: first by dtype of the accumulator, then by reduced precision
# (CUBLAS_COMPUTE_32F_FAST_TF32 and CUBLAS_COMPUTE_32F_FAST_16BF).
_COMPUTE_TYPES = {"float32": 68, "float64": 70, "complex64": 68, "complex128": 70}
_REDUCED_COMPUTE_TYPES = {"tf32": 77, "bf16": 75}
_MAX = 2**31 - 1
_OPS = {Op.N: 0, Op.T: 1, Op.C: 2}


def gemm(handle: int, call: Call, *, keep_gil: bool = True) -> cuda_calls.Launch:
    """Return a deferred call of cuBLAS that computes C = alpha op(A) @ op(B) + beta C; k > 0.

    The call uses the stream that is cupy's current stream now. If `keep_gil` is false, the thread releases
    the GIL during the call.

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
def _scalar(value: complex, dtype: str) -> c_void_p:
    """Return a pointer to a scalar. The pointer object keeps the array with the scalar alive."""
    return np.array(value, numpy_dtype(dtype)).ctypes.data_as(c_void_p)
