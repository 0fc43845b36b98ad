"""Call functions of the CUDA driver and of cuBLAS without releasing the GIL, and prepare copies.

CuPy releases the GIL during each call. The call takes microseconds, but afterwards the thread may wait for
the GIL a hundred times as long. That would also falsify the measured time of operations.

Blocks of a matrix are copied between device memory and pinned host memory. In device memory, the rows of
a block follow each other without gaps. A copy must not cross a border between pinned ranges.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from operator import call
from time import perf_counter_ns
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.base import Array
from oocgemm.errors import BackendError
from oocgemm.planning.cost.footprint import PAGE
from oocgemm.planning.units import format_size
from oocgemm.system.resources import allocate

_INT, _SIZE, _AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_UNSIGNED = ctypes.c_uint
# CUDA's struct CUDA_MEMCPY2D describes the source and the target of a copy by the same fields: offset in a
# CUDA array, kind of memory, addresses, and pitch in bytes.
_END = (
    *(("x", _SIZE), ("y", _SIZE), ("kind", _UNSIGNED)),
    *(("host", _AT), ("address", _AT), ("array", _AT), ("pitch", _SIZE)),
)
# CU_MEMORYTYPE_UNIFIED of cuda.h: the driver itself finds out whether an address is in host memory.
_UNIFIED = 4
# What can be asked about an address, from cuda.h: CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
# CU_POINTER_ATTRIBUTE_RANGE_START_ADDR and CU_POINTER_ATTRIBUTE_RANGE_SIZE.
_KIND, _BEGIN, _SIZE_OF = 2, 11, 12
_ASKED = (_INT * 3)(_KIND, _BEGIN, _SIZE_OF)
# CU_MEMORYTYPE_HOST, which the driver returns for an address in pinned host memory.
_HOST = 1


class _Launched(threading.local):
    """Per thread, the host time in ns at which the first `launch` returned after `at` was set to 0."""

    at = 0


_launched = _Launched()

# A deferred call, as two functions. The first one calls the CUDA driver or cuBLAS, and returns its status.
# The second one takes a status other than 0, and raises the error. If the first function is a Python
# function, it raises errors itself and returns None.
Launch = tuple[Callable[[], int | None], Callable[[int], None]]


def record_around(launches: Sequence[Launch], start: Any, end: Any, stream: Any) -> int:
    """Make launches between two events. Return the host time, in nanoseconds, of the first launch."""
    return recording_around(launches, start, end, stream)()


def recording_around(
    launches: Sequence[Launch], start: Any, end: Any, stream: Any, after: Sequence[Any] = ()
) -> Callable[[], int]:
    """Return a function that records the event `start`, makes the launches, and records the event `end`.

    The stream waits for the events in `after` first. The function returns the host time, in nanoseconds, at
    which the first kernel or copy had been launched. Its thread keeps the GIL from the first call to the
    last, unless a launch is a Python function.
    """
    record, wait = _cuda("cuEventRecord", _AT, _AT), _cuda("cuStreamWaitEvent", _AT, _AT, _UNSIGNED)
    (first, check_first), *others = launches
    before = (
        *(partial(wait, stream.ptr, event.ptr, 0) for event in after),
        partial(record, start.ptr, stream.ptr),
    )
    calls: list[Callable[[], Any]] = [*before, first, perf_counter_ns]
    calls += [*(each for each, _ in others), partial(record, end.ptr, stream.ptr)]
    checks = [driver.check_status] * len(before) + [check_first]
    checks += [*(check for _, check in others), driver.check_status]
    issued_at = len(before) + 1

    def enqueue() -> int:
        _launched.at = 0
        made: list[Any] = list(map(call, calls))
        issued: int = made.pop(issued_at)
        if any(made):
            for status, check in zip(made, checks, strict=True):
                if status:
                    check(status)
        return _launched.at or issued

    return enqueue


def wait(stream: Any, event: Any) -> None:
    driver.check_status(_cuda("cuStreamWaitEvent", _AT, _AT, _UNSIGNED)(stream.ptr, event.ptr, 0))


def record(event: Any, stream: Any) -> None:
    driver.check_status(_cuda("cuEventRecord", _AT, _AT)(event.ptr, stream.ptr))


def query(event: Any) -> Callable[[], int]:
    """Return a function that returns 0 when an event has completed."""
    return partial(_cuda("cuEventQuery", _AT), event.ptr)


def address(name: str) -> int:
    """Return the address of a function of the driver."""
    found = ctypes.cast(getattr(ctypes.PyDLL("libcuda.so.1"), name), _AT).value
    assert found is not None
    return found


def context() -> int:
    """Return the handle of the context of the current device."""
    found = _AT()
    driver.check_status(_cuda("cuCtxGetCurrent", _AT)(ctypes.addressof(found)))
    assert found.value is not None
    return found.value


def writes_values(address: int, stream: Any) -> bool:
    """Return whether the device can write a number to pinned memory, in the order of a stream. Writes 0."""
    write = _cuda("cuStreamWriteValue32_v2", _AT, _AT, _UNSIGNED, _UNSIGNED)
    return not write(stream.ptr, address, 0, 0)


def pinned_bytes(address: int) -> int:
    """Return the bytes from an address to the end of its pinned range; 0 if it is not in pinned memory."""
    # One call takes less time than three. For memory that CUDA does not know, it finds zeros.
    found = (_SIZE * 3)()
    at = ctypes.addressof(found)
    places = (_SIZE * 3)(at, at + 8, at + 16)
    ask = _cuda("cuPointerGetAttributes", _UNSIGNED, _AT, _AT, _SIZE)
    if ask(3, ctypes.addressof(_ASKED), ctypes.addressof(places), address):
        return 0
    kind, begin, size = found
    return begin + size - address if kind == _HOST else 0


def ended(event: Any) -> bool:
    """Return whether the work before an event has ended. After an error on the device, it has not."""
    return not _cuda("cuEventQuery", _AT)(event.ptr)


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two completed events, in milliseconds."""
    found = ctypes.c_float()
    driver.check_status(
        _cuda("cuEventElapsedTime", _AT, _AT, _AT)(ctypes.addressof(found), start.ptr, end.ptr)
    )
    return found.value


def copy(to: int, source: int, size: int, stream: Any) -> Launch:
    """Return a deferred copy between addresses in device memory or in pinned host memory."""
    made = partial(_cuda("cuMemcpyAsync", _AT, _AT, _SIZE, _AT), to, source, size, stream.ptr)
    return made, driver.check_status


class Rectangle(ctypes.Structure):
    """CUDA's struct CUDA_MEMCPY2D. With unified addresses, the driver itself finds out which address is host
    memory."""

    _fields_ = (
        *((f"{end}_{name}", kind) for end in ("source", "to") for name, kind in _END),
        ("width", _SIZE),
        ("height", _SIZE),
    )


def copy_rows(to: tuple[int, int], source: tuple[int, int], width: int, rows: int, stream: Any) -> Launch:
    """Return a deferred copy of rows of `width` bytes. `to` and `source` are addresses and pitches."""
    given = Rectangle(
        source_kind=_UNIFIED, source_address=source[0], source_pitch=source[1],
        to_kind=_UNIFIED, to_address=to[0], to_pitch=to[1], width=width, height=rows,
    )  # fmt: skip
    made = partial(_cuda("cuMemcpy2DAsync_v2", ctypes.POINTER(Rectangle), _AT), given, stream.ptr)
    return made, driver.check_status


def fill(address: int, size: int, stream: Any, byte: int = 0) -> Launch:
    made = partial(_cuda("cuMemsetD8Async", _AT, ctypes.c_ubyte, _SIZE, _AT), address, byte, size, stream.ptr)
    return made, driver.check_status


def make(launch: Launch) -> None:
    made, check = launch
    if status := made():
        check(status)


def in_python(made: Callable[[], None]) -> Launch:
    """Return a deferred call of a Python function, which raises an error if it fails."""
    return made, driver.check_status


def launch(
    function: int, grid: Sequence[int], block: Sequence[int], shared: int, values: Sequence[Any]
) -> None:
    """Launch a kernel, by the driver's handle of it, on cupy's current stream.

    `grid` and `block` are numbers along x, y and z, `shared` is bytes of dynamic shared memory, and `values`
    are ctypes values. The driver copies them before this returns.
    """
    pointers = (_AT * len(values))(*(ctypes.addressof(value) for value in values))
    types = _AT, *[_UNSIGNED] * 7, _AT, _AT, _AT
    stream = cupy.cuda.get_current_stream().ptr
    status = _cuda("cuLaunchKernel", *types)(
        function, *grid, *block, shared, stream, ctypes.addressof(pointers), None
    )
    _launched.at = _launched.at or perf_counter_ns()
    driver.check_status(status)


def gemm_ex(handle: int, *arguments: Any, keep_gil: bool = True) -> Launch:
    """Return a deferred call of cublasGemmEx on cupy's current stream, with or without the GIL."""
    library = _cublas(handle, ctypes.PyDLL if keep_gil else ctypes.CDLL)
    cublas.check_status(library.cublasSetStream_v2(handle, cupy.cuda.get_current_stream().ptr))
    return partial(library.cublasGemmEx, handle, *arguments), cublas.check_status


# 0 and 1, from which cuBLAS reads alpha and beta; CUDA_R_8I and CUDA_R_32I of cudaDataType_t; and
# CUBLAS_COMPUTE_32I of cublasComputeType_t.
_SCALARS, _INT8, _INT32, _COMPUTE_32I = np.arange(2, dtype=np.int32), 3, 10, 72


def gemm_int8(
    handle: int,
    extents: tuple[int, int, int],
    a: tuple[int, int],
    b: tuple[int, int],
    c: tuple[int, int],
    beta: int = 0,
) -> None:
    """Compute C = A @ B^T + beta C for int8 A (m x k) and B (n x k), an int32 C, and a beta of 0 or 1.

    A, B and C consist of an address and a leading dimension each. The call is on cupy's current stream.

    cuBLAS takes column-major matrices. A row-major C is C^T = B A^T in column-major order, so A and B swap
    places.
    """
    (m, n, k), zero = extents, _SCALARS.ctypes.data
    cublas.gemmEx(
        *(handle, 1, 0, n, m, k, zero + 4, b[0], _INT8, b[1], a[0], _INT8, a[1]),
        *(zero + 4 * beta, c[0], _INT32, c[1], _COMPUTE_32I, -1),
    )


@lru_cache(maxsize=16)
def _cuda(name: str, *types: Any) -> Any:
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = types
    return found


@lru_cache(maxsize=16)
def _cublas(handle: int, loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    # This opens the version of cuBLAS that cupy has loaded.
    library = loader(f"libcublas.so.{cublas.getVersion(handle) // 10000}")
    library.cublasSetStream_v2.argtypes = [_AT, _AT]
    integers: list[Any] = [_INT, _INT]
    matrix = [_AT, *integers]
    products = [_AT, *integers, *integers, _INT, _AT, *matrix, *matrix, _AT, *matrix, *integers]
    library.cublasGemmEx.argtypes = products
    return library


def array_copy(device: int, array: Array, stream: Any, *, uploading: bool) -> Launch:
    """Prepare the copy of a block that is a view of a pinned array, whose rows are contiguous."""
    height, width = array.shape[0], array.shape[1] * array.itemsize
    pitch = max(width, array.strides[0])
    if pitch == width or height == 1:
        to, source = (device, array.ctypes.data)[:: 1 if uploading else -1]
        return copy(to, source, height * width, stream)
    onto, origin = ((device, width), (array.ctypes.data, pitch))[:: 1 if uploading else -1]
    return copy_rows(onto, origin, width, height, stream)


def slot_copies(
    device: int, host: Sequence[Array], borders: Sequence[int], stream: Any, *, uploading: bool
) -> list[Launch]:
    """Prepare the copies of a block in a host slot: CUDA refuses copies that cross borders of pinned ranges.

    `device` is the block's address in device memory, and `host` are the contiguous arrays in the slot, each
    of some columns of the block. `borders` are the borders of the slot's pinned ranges, with its start and
    end.
    """
    launches: list[Launch] = []
    if len(host) == 1:
        start, size = host[0].ctypes.data, host[0].nbytes
        for begin, end in pairwise(borders):
            part = min(end, start + size) - begin
            if part > 0:
                to, source = (device + begin - start, begin)[:: 1 if uploading else -1]
                launches.append(copy(to, source, part, stream))
        return launches
    row = sum(group.shape[1] * group.itemsize for group in host)
    for group in host:
        for rows in cut(group, borders):
            width = rows.shape[1] * rows.itemsize
            top, left = divmod(rows.ctypes.data - group.ctypes.data, group.strides[0])
            ends = (device + top * row + left, row), (rows.ctypes.data, max(width, rows.strides[0]))
            onto, origin = ends[:: 1 if uploading else -1]
            launches.append(copy_rows(onto, origin, width, len(rows), stream))
        device += group.shape[1] * group.itemsize
    return launches


def upload(address: int, array: Array, stream: Any) -> None:
    """Copy an array to the device; return when it is there."""
    pinned = cupy.cuda.alloc_pinned_memory(max(1, array.nbytes))
    np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape)[...] = array
    make(copy(address, pinned.ptr, array.nbytes, stream))
    stream.synchronize()


def cut(block: Array, borders: Sequence[int]) -> Iterator[Array]:
    """Cut an array in memory order, so that every address in `borders` is on the border between two pieces.

    A piece is some whole rows, or a part of one row.
    """
    (height, width), low = block.shape, block.ctypes.data
    high = low + (height - 1) * block.strides[0] + width * block.itemsize
    places = [divmod(border - low, block.strides[0]) for border in borders if low < border < high]
    columns = [(r, inside // block.itemsize) for r, inside in places]
    row, col = 0, 0
    for r, c in [*((r, c) if c < width else (r + 1, 0) for r, c in columns), (height, 0)]:
        if row < r and col:
            yield block[row : row + 1, col:]
            row, col = row + 1, 0
        if row < r:
            yield block[row:r]
            row = r
        if c > col:
            yield block[row : row + 1, col:c]
            col = c


def pinned_memory(device: Any, size: int, threads: int) -> Array:
    """Allocate memory, fault in its pages by several threads, and pin it. Raises what `pin` raises."""
    memory = allocate(size)
    part = size // threads

    def prefault(number: int) -> None:
        memory[number * part : (number + 1) * part : PAGE] = np.uint8(0)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(prefault, range(threads)))
    pin(device, memory.ctypes.data, size)
    return memory


# Memory that could not be unpinned. It is never freed: CUDA refuses to pin other memory at its addresses.
_still_pinned: list[Array] = []


def pin(device: Any, address: int, size: int, flags: int = 0) -> None:
    """Pin memory for copies from and to a device. Raises `BackendError` if the system refuses."""
    try:
        with device:
            runtime.hostRegister(address, size, flags)
    except runtime.CUDARuntimeError as error:
        raise BackendError(
            f"the system refuses to pin {format_size(size)} of host memory ({error}): "
            "pass a smaller --host-memory (or --memory), or raise ulimit -l"
        ) from error


def unpin(device: Any, memory: Array) -> None:
    """Unpin memory that a device has pinned as a whole. If CUDA fails, as after a failed launch, keep it."""
    try:
        with device:
            runtime.hostUnregister(memory.ctypes.data)
    except Exception:
        _still_pinned.append(memory)
