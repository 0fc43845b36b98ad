"""Computes products of float64 or float32 matrices from exact int8 products, on a CUDA device.

planning/emulation.py describes the method. All launches go to cupy's current stream. The caller provides all
device memory and passes addresses as integers.
"""

import ctypes
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels, encoded
from oocgemm.kernels.launches import (
    combine_options,
    multiply_launch,
    multiply_options,
    planes_map,
    split_options,
)
from oocgemm.planning import Op
from oocgemm.planning.emulation import (
    LEVELS,
    MODULI_COUNTS,
    STRIP_ROWS,
    UNITS,
    VERDICT_BYTES,
    Offsets,
    PanelFacts,
    residues,
    suffices,
)
from oocgemm.planning.tiling import round_up

# Number of rows that one thread block of the kernels ozaki_facts and ozaki_split processes.
_ROWS = 16

_pointer = ctypes.c_void_p


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
        """Compute `block`, rows and columns of C, modulo each modulus. Needs compute capability 9.0.

        `left` and `right` are the addresses of the first row of op(A) and the first column of op(B). `shape`
        is (m, n, ld): the residues of a row or column occupy `ld` bytes per modulus.
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
