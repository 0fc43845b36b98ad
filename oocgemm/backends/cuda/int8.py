"""Multiplies int8 matrices of any layout on a CUDA device, by cuBLAS with sums in int32; converts the sums.

cuBLAS requires that int8 operands are contiguous along k and aligned to 16 bytes. Other operands are first
copied into a workspace (planning/integers.py). If C is not aligned, cuBLAS writes its sums to the workspace,
and a kernel adds them to C. All launches go to cupy's current stream.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from cupy_backends.cuda.libs import cublas

from oocgemm.kernels.spec import C_TYPES, Call
from oocgemm.planning import Op
from oocgemm.planning.emulation import STRIP_ROWS, pitch
from oocgemm.planning.integers import EXACT_LIMIT, workspace_layout

if TYPE_CHECKING:
    from oocgemm.backends.cuda.launch import Kernels

# CUDA_R_8I and CUDA_R_32I of cudaDataType_t, and CUBLAS_COMPUTE_32I of cublasComputeType_t.
_INT8, _INT32, _COMPUTE_32I = 3, 10, 72
# cuBLAS requires that addresses and leading dimensions of int8 operands are multiples of this many bytes.
_ALIGNMENT = 16
# A thread block of the kernel int8_pack copies this many rows, and this many bytes of each along k.
_PACKED = 64


def gemm(kernels: "Kernels", handle: int, call: Call) -> None:
    """Compute C (int32) = op(A) @ op(B) + beta C for an integer beta; k > 0. `handle` is a cuBLAS handle."""
    assert call.alpha == 1, "Finish scales exact sums"
    call, product = packed(kernels, call), partial(_product, handle)
    if call.c % _ALIGNMENT or call.ldc % _ALIGNMENT or call.beta not in (0, 1):
        by_strips(kernels, call, "int32", product)
    else:
        product(call)


def packed(kernels: "Kernels", call: Call) -> Call:
    """Copy into the workspace each operand whose layout cuBLAS would refuse.

    The copy has a layout that cuBLAS accepts.

    Returns:
        `call` with the addresses of the copies, and with k rounded up to a multiple of 16. The copies are
        padded with zeros to this k. If k = 0, `call` is returned unchanged.
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


def by_strips(kernels: "Kernels", call: Call, c_dtype: str, product: Callable[[Call], None]) -> None:
    """Compute C = op(A) @ op(B) + beta C, some rows at a time. C may have any alignment.

    Args:
        kernels: compiles and launches the kernel int8_add, which adds int32 products to beta C.
        call: the product, as `packed` returned it.
        c_dtype: dtype of C, float64 or int32.
        product: called once per `STRIP_ROWS` rows of C. Computes the int32 product that its argument, a
            `Call`, describes.
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


def finish(
    kernels: "Kernels",
    dtypes: tuple[str, str],
    scalars: tuple[float, float],
    elements: int,
    source: int,
    result: int,
    too_large: int,
) -> None:
    """Compute result = alpha source + beta result, element by element, on the device.

    Args:
        kernels: compiles and launches the kernel.
        dtypes: of source and result.
        scalars: alpha and beta.
        elements: the number of elements.
        source, result: device addresses.
        too_large: address of an int32, used if the result has an integer dtype. It becomes 1 if an element is
            outside the range of that dtype, or so large (2^53) that float64 may have rounded it.
    """
    alpha, beta = map(ctypes.c_double, scalars)
    finisher(kernels, dtypes)(
        (min(4096, -(-elements // 256)), 1, 1),
        *(_long(elements), _pointer(source), alpha, beta, _pointer(result), _pointer(too_large)),
    )


def finisher(kernels: "Kernels", dtypes: tuple[str, str]) -> Callable[..., None]:
    """Return a function that launches the kernel int8_finish for these dtypes of source and result.

    The kernel computes result = alpha source + beta result, and casts it to the dtype of result.
    """
    macros = [f"-DOOC_{x}={C_TYPES[t]}" for x, t in zip(("ACCUMULATED", "STORED"), dtypes, strict=True)]
    maximum = {"int32": 2**31 - 1, "int64": EXACT_LIMIT}.get(dtypes[1])
    if maximum is not None:
        macros.append(f"-DOOC_MAX={maximum}.0")
    return kernels.plain("int8_finish", "int8_finish", tuple(macros))


def _product(handle: int, call: Call) -> None:
    """Compute the same as `gemm`, for operands that cuBLAS accepts; beta is 0 or 1.

    cuBLAS takes column-major matrices. A row-major C is C^T = op(B)^T op(A)^T in column-major order, so A and
    B swap places.
    """
    alpha, beta = (np.array(value, np.int32) for value in (1, int(call.beta == 1)))
    cublas.gemmEx(
        *(handle, 1, 0, call.n, call.m, call.k, alpha.ctypes.data),
        *(call.b, _INT8, call.ldb, call.a, _INT8, call.lda),
        *(beta.ctypes.data, call.c, _INT32, call.ldc, _COMPUTE_32I, -1),
    )


def _pack(kernels: "Kernels", x: int, ld: int, shape: tuple[int, int], k_major: bool, to: int) -> None:
    rows, k = shape
    function = kernels.plain("int8_pack", "int8_pack", (f"-DOOC_K_MAJOR={int(k_major)}",))
    function(
        (-(-pitch(k) // _PACKED), -(-rows // _PACKED), 1),
        *(_pointer(x), _long(ld), _long(rows), _long(k), _pointer(to), _long(pitch(k))),
    )


_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
