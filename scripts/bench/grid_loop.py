"""The loops that oocgemm is compared with: what an expert writes by hand for one product, and no more.

`stream_product` is double-buffered, on a GPU. `slice_product` reads slices of stored arrays, on the CPU.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

THREADS = 12  # copy between pageable and pinned memory
UP, DOWN = 1, 2  # cudaMemcpyKind
# cudaDataType of A, B and C, and cublasComputeType_t, by dtype of A.
TYPES = {
    "int8": (3, 10, 72),
    "float16": (2, 2, 68),
    "bfloat16": (14, 14, 68),
    "float32": (0, 0, 68),
    "float64": (1, 1, 70),
    "complex64": (4, 4, 68),
    "complex128": (5, 5, 70),
}
SCALARS = {72: np.int32, 68: np.float32, 70: np.float64}


class Slot:
    """A block on the device with its staging buffer, and the events after its last copy and its last use."""

    def __init__(self, size: int, dtype: Any, in_place: bool) -> None:
        import cupy

        self._device = cupy.empty(size, dtype)
        self._host = None
        if not in_place:
            pinned = cupy.cuda.alloc_pinned_memory(self._device.nbytes)
            self._host = np.frombuffer(pinned, self._device.dtype, size)
        self.key: Any = None  # the block of the operand that it holds
        self.copied, self.used = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.drained: Any = None  # the future of the copy from the staging buffer to C

    def block(self, shape: tuple[int, int]) -> Any:
        return self._device[: math.prod(shape)].reshape(shape)

    def upload(self, x: Any, rows: slice, cols: slice, copy: Any, stream: Any) -> None:
        block = self.block((rows.stop - rows.start, cols.stop - cols.start))
        source = x[rows, cols] if self._host is None else self._host[: block.size].reshape(block.shape)
        if self._host is not None:
            self.copied.synchronize()  # the staging buffer is free
            copy(source, x[rows, cols])
        stream.wait_event(self.used)
        copy_async(block, source, UP, stream)
        self.copied.record(stream)

    def download(
        self, c: Any, rows: slice, cols: slice, copy: Any, stream: Any, writer: ThreadPoolExecutor
    ) -> None:
        block = self.block((rows.stop - rows.start, cols.stop - cols.start))
        to = c[rows, cols] if self._host is None else self._host[: block.size].reshape(block.shape)
        self.wait()
        stream.wait_event(self.used)
        copy_async(to, block, DOWN, stream)
        self.copied.record(stream)

        def drain() -> None:
            self.copied.synchronize()
            if isinstance(c, np.ndarray):
                copy(c[rows, cols], to)
            else:
                c[rows, cols] = to

        if self._host is not None:
            self.drained = writer.submit(drain)

    def wait(self) -> None:
        """Wait until the staging buffer is copied to C."""
        if self.drained is not None:
            self.drained.result()


def stream_product(a: Any, b: Any, c: Any, tile: tuple[int, int, int], multiply: Any, in_place: bool) -> None:
    """Compute c = a @ b on the GPU in blocks of `tile` (m, n, k), two of each operand in flight.

    Args:
        a, b, c: NumPy arrays or memory maps, copied by several threads, or zarr arrays, read and written by
            slices. If `in_place`, pinned arrays, copied by the GPU alone.
        multiply: multiplies device arrays (`Multiply`).
    """
    import cupy

    (m, k), n, (tm, tn, tk) = a.shape, b.shape[1], tile
    up, work, down = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    slots: dict[str, list[Slot]] = {"a": [], "b": [], "c": []}  # the one used last is the last

    def turn(name: str, size: int, dtype: Any) -> Slot:
        ring = slots[name]
        ring.append(Slot(size, dtype, in_place) if len(ring) < 2 else ring.pop(0))
        return ring[-1]

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as writer:

        def copy(to: Any, x: Any) -> None:
            copy_rows(pool, to, x) if isinstance(x, np.ndarray) else np.copyto(to, x)

        def fetch(name: str, x: Any, rows: slice, cols: slice, size: int) -> Slot:
            if slots[name] and slots[name][-1].key == (rows, cols):
                return slots[name][-1]  # this block stays on the device
            slot = turn(name, size, x.dtype)
            slot.key = rows, cols
            slot.upload(x, rows, cols, copy, up)
            work.wait_event(slot.copied)
            return slot

        for i, j in ((i, j) for i in range(0, m, tm) for j in range(0, n, tn)):
            rows, cols = slice(i, min(i + tm, m)), slice(j, min(j + tn, n))
            extents = rows.stop - i, cols.stop - j
            out = turn("c", tm * tn, c.dtype)
            work.wait_event(out.copied)
            for p in range(0, k, tk):
                depth = slice(p, min(p + tk, k))
                left, right = fetch("a", a, rows, depth, tm * tk), fetch("b", b, depth, cols, tk * tn)
                x, y = left.block((extents[0], depth.stop - p)), right.block((depth.stop - p, extents[1]))
                with work:
                    multiply(x, y, out.block(extents), p > 0)
                left.used.record(work)
                right.used.record(work)
            out.used.record(work)
            out.download(c, rows, cols, copy, down, writer)
        for slot in slots["c"]:
            slot.wait()
        down.synchronize()


def copy_rows(pool: ThreadPoolExecutor, to: Any, x: Any) -> None:
    """Copy an array by bands of rows, on all threads of a pool."""
    step = max(1, -(-to.shape[0] // (4 * THREADS)))
    list(pool.map(lambda i: np.copyto(to[i : i + step], x[i : i + step]), range(0, to.shape[0], step)))


def copy_async(to: Any, x: Any, kind: int, stream: Any) -> None:
    """Copy rows between pinned memory and the device."""
    from cupy.cuda import runtime

    places = [(y.data.ptr if hasattr(y.data, "ptr") else y.ctypes.data, y.strides[0]) for y in (to, x)]
    width, rows = to.shape[1] * to.itemsize, to.shape[0]
    if rows == 1 or all(pitch == width for _, pitch in places):
        runtime.memcpyAsync(places[0][0], places[1][0], width * rows, kind, stream.ptr)
    else:
        runtime.memcpy2DAsync(*places[0], *places[1], width, rows, kind, stream.ptr)


class Multiply:
    """C = A @ B, or C += A @ B, for row-major device arrays by cublasGemmEx on the current stream."""

    def __init__(self, dtype: str) -> None:
        from cupy_backends.cuda.libs import cublas

        self._cublas, self._handle = cublas, cublas.create()
        self._type, self._out, self._compute = TYPES[dtype]
        scalar: Any = {4: np.complex64, 5: np.complex128}.get(self._type, SCALARS[self._compute])
        self._one, self._zero = np.ones(1, scalar), np.zeros(1, scalar)

    def __call__(self, a: Any, b: Any, c: Any, add: bool, b_transposed: bool = False) -> None:
        """Multiply. int8 needs B contiguous along k: it is transposed first unless it is already."""
        import cupy

        (m, n), k = c.shape, a.shape[1]
        if self._type == 3 and not b_transposed:
            b, b_transposed = cupy.ascontiguousarray(b.T), True
        beta = self._one if add else self._zero
        self._cublas.gemmEx(
            *(self._handle, int(b_transposed), 0, n, m, k, self._one.ctypes.data),
            *(b.data.ptr, self._type, k if b_transposed else n),
            *(a.data.ptr, self._type, k),
            *(beta.ctypes.data, c.data.ptr, self._out, n, self._compute, -1),
        )


@cache
def multiplier(dtype: str) -> Multiply:
    """Return the `Multiply` of a dtype: creating a cuBLAS handle takes milliseconds."""
    return Multiply(dtype)


def slice_product(a: Any, b: Any, c: Any, budget: int, align: int) -> None:
    """Compute c = a @ b on the CPU from slices of stored arrays, as large as the budget allows, one at a
    time."""
    (m, k), n, item = a.shape, b.shape[1], a.dtype.itemsize
    side = max(align, math.isqrt(budget // (4 * item)) // align * align)
    tm, tn = min(m, side), min(n, side)
    tk = min(k, max(align, (budget // item - 2 * tm * tn) // (tm + tn) // align * align))
    for i in range(0, m, tm):
        for j in range(0, n, tn):
            total = 0
            for p in range(0, k, tk):
                total = total + a[i : i + tm, p : p + tk] @ b[p : p + tk, j : j + tn]
            c[i : i + tm, j : j + tn] = total
