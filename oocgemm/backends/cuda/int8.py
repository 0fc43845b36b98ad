"""Products of int8 matrices on a CUDA device, in int32 by cuBLAS, however they lie, and what becomes of their sums.

cuBLAS multiplies int8 where both operands lie along k, their rows beginning at multiples of 16 bytes. Others are brought
there first, and so are sums that would not: into the room of a call (planning/integers.py). Everything is launched on cupy's
current stream.
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

_INT8, _INT32, _COMPUTE_32I = 3, 10, 72  # cudaDataType_t, cublasComputeType_t
_ALIGNMENT = 16
_PACKED = 64  # rows, and bytes along k, of a block of int8_pack


def gemm(kernels: "Kernels", handle: int, call: Call) -> None:
    """C int32 = op(A) @ op(B) + beta C, beta being an integer; k > 0. `handle` is of cuBLAS."""
    assert call.alpha == 1, "exact sums are scaled when they are finished"
    call, product = packed(kernels, call), partial(_product, handle)
    if call.c % _ALIGNMENT or call.ldc % _ALIGNMENT or call.beta not in (0, 1):
        by_strips(kernels, call, "int32", product)
    else:
        product(call)


def packed(kernels: "Kernels", call: Call) -> Call:
    """The same product, of operands that lie along k on boundaries of 16 bytes."""
    depth, at = pitch(call.k), workspace_layout(call.m, call.n, call.k)
    if depth == 0:
        return call
    a_lies = not call.op_a.swaps and (call.a | call.lda | call.k) % _ALIGNMENT == 0
    b_lies = call.op_b.swaps and (call.b | call.ldb | call.k) % _ALIGNMENT == 0
    if not a_lies:
        _pack(kernels, call.a, call.lda, (call.m, call.k), not call.op_a.swaps, call.work)
        call = replace(call, op_a=Op.N, a=call.work, lda=depth)
    if not b_lies:
        _pack(kernels, call.b, call.ldb, (call.n, call.k), call.op_b.swaps, call.work + at.b)
        call = replace(call, op_b=Op.T, b=call.work + at.b, ldb=depth)
    return replace(call, k=depth)  # beyond k both are zero


def by_strips(kernels: "Kernels", call: Call, c_dtype: str, product: Callable[[Call], None]) -> None:
    """C = op(A) @ op(B) + beta C of `packed` operands and a C of any alignment, float64 or int32: strip by strip, by
    products in int32 that are added to it."""
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
    """result = alpha source + beta result, element by element; `dtypes` are those of source and result. Where result is
    of integers and one of them is more than it holds, or may not be exact, the int32 at `too_large` becomes 1."""
    alpha, beta = map(ctypes.c_double, scalars)
    finisher(kernels, dtypes)(
        (min(4096, -(-elements // 256)), 1, 1),
        *(_long(elements), _pointer(source), alpha, beta, _pointer(result), _pointer(too_large)),
    )


def finisher(kernels: "Kernels", dtypes: tuple[str, str]) -> Callable[..., None]:
    """The kernel that finishes strips."""
    macros = [f"-DOOC_{x}={C_TYPES[t]}" for x, t in zip(("ACCUMULATED", "STORED"), dtypes, strict=True)]
    most = {"int32": 2**31 - 1, "int64": EXACT_LIMIT}.get(dtypes[1])
    if most is not None:
        macros.append(f"-DOOC_MOST={most}.0")
    return kernels.plain("int8_finish", "int8_finish", tuple(macros))


def _product(handle: int, call: Call) -> None:
    """The same as `gemm`, everything lying as cuBLAS wants it, and beta 0 or 1. Row-major C is column-major C^T =
    op(B)^T op(A)^T."""
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
