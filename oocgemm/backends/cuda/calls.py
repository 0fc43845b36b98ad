"""Calls of the CUDA driver and cuBLAS that keep the GIL.

Such a call takes microseconds. CuPy releases the GIL during it, and then other threads may hold the GIL a
hundred times as long. If this happens between a launch and the events on either side of it, the events tell
when the thread held the GIL, not when the work ran.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import call
from time import perf_counter_ns
from typing import Any

import cupy
from cupy.cuda import driver
from cupy_backends.cuda.libs import cublas

_INT, _SIZE, _AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_UNSIGNED = ctypes.c_uint
# The fields of each end of a `CUDA_MEMCPY2D`: offsets, kind of memory, address and pitch in bytes.
_END = (
    *(("x", _SIZE), ("y", _SIZE), ("kind", _UNSIGNED)),
    *(("host", _AT), ("address", _AT), ("array", _AT), ("pitch", _SIZE)),
)
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_KIND, _BEGIN, _SIZE_OF = 2, 11, 12  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _RANGE_START_ADDR, _RANGE_SIZE
_HOST = 1  # CU_MEMORYTYPE_HOST


class _Launched(threading.local):
    """Host time of this thread's first kernel launch since `record_around` began; 0 if there was none."""

    at = 0


_launched = _Launched()

# A prepared call, and a function that raises for the status that it returns. A call in Python returns None
# and raises itself.
Launch = tuple[Callable[[], int | None], Callable[[int], None]]


def record_around(launches: Sequence[Launch], start: Any, end: Any, stream: Any) -> int:
    """Record an event, launch, record another event.

    All calls are made by one `map` in C, so that the thread keeps the GIL throughout, unless a launch is in
    Python.

    Returns:
        The host time in nanoseconds after the first launch; after its first kernel if that launch is in
        Python.
    """
    record = _cuda("cuEventRecord", _AT, _AT)
    before, after = (partial(record, event.ptr, stream.ptr) for event in (start, end))
    (first, _), *others = launches
    calls: list[Callable[[], Any]] = [before, first, perf_counter_ns, *(each for each, _ in others), after]
    _launched.at = 0
    made: list[Any] = list(map(call, calls))
    issued: int = _launched.at or made[2]
    del made[2]
    checks = driver.check_status, *(check for _, check in launches), driver.check_status
    for status, check in zip(made, checks, strict=True):
        if status:
            check(status)
    return issued


def wait(stream: Any, event: Any) -> None:
    """Make a stream wait for an event."""
    driver.check_status(_cuda("cuStreamWaitEvent", _AT, _AT, _UNSIGNED)(stream.ptr, event.ptr, 0))


def record(event: Any, stream: Any) -> None:
    """Record an event on a stream."""
    driver.check_status(_cuda("cuEventRecord", _AT, _AT)(event.ptr, stream.ptr))


def pinned_bytes(address: int) -> int:
    """Return the bytes from an address to the end of the pinned range that contains it; 0 if it is not
    pinned."""
    kind, begin, size = _UNSIGNED(), _SIZE(), _SIZE()
    ask = _cuda("cuPointerGetAttribute", _AT, _INT, _SIZE)
    for found, attribute in ((kind, _KIND), (begin, _BEGIN), (size, _SIZE_OF)):
        if ask(ctypes.addressof(found), attribute, address):
            return 0
    return begin.value + size.value - address if kind.value == _HOST else 0


def ended(event: Any) -> bool:
    """Return whether all work before an event has ended without an error."""
    return not _cuda("cuEventQuery", _AT)(event.ptr)


def milliseconds(start: Any, end: Any) -> float:
    """Return the milliseconds between two completed events."""
    found = ctypes.c_float()
    driver.check_status(
        _cuda("cuEventElapsedTime", _AT, _AT, _AT)(ctypes.addressof(found), start.ptr, end.ptr)
    )
    return found.value


def copy(to: int, source: int, size: int, stream: Any) -> Launch:
    """Return the launch of a copy of bytes. Host memory must be pinned."""
    made = partial(_cuda("cuMemcpyAsync", _AT, _AT, _SIZE, _AT), to, source, size, stream.ptr)
    return made, driver.check_status


class _Rectangle(ctypes.Structure):
    """`CUDA_MEMCPY2D` with unified addresses: the driver finds out which end is host memory."""

    _fields_ = (
        *((f"{end}_{name}", kind) for end in ("source", "to") for name, kind in _END),
        ("width", _SIZE),
        ("height", _SIZE),
    )


def copy_rows(to: tuple[int, int], source: tuple[int, int], width: int, rows: int, stream: Any) -> Launch:
    """Return the launch of a copy of `rows` rows of `width` bytes; `to` and `source` are (address, pitch in
    bytes)."""
    given = _Rectangle(
        source_kind=_UNIFIED, source_address=source[0], source_pitch=source[1],
        to_kind=_UNIFIED, to_address=to[0], to_pitch=to[1], width=width, height=rows,
    )  # fmt: skip
    made = partial(_cuda("cuMemcpy2DAsync_v2", ctypes.POINTER(_Rectangle), _AT), given, stream.ptr)
    return made, driver.check_status


def zero(address: int, size: int, stream: Any) -> Launch:
    """Return the launch that fills device memory with zeros."""
    made = partial(_cuda("cuMemsetD8Async", _AT, ctypes.c_ubyte, _SIZE, _AT), address, 0, size, stream.ptr)
    return made, driver.check_status


def make(launch: Launch) -> None:
    """Make a launch; raise if it fails."""
    made, check = launch
    if status := made():
        check(status)


def in_python(made: Callable[[], None]) -> Launch:
    """Return the launch of a Python function."""
    return made, driver.check_status


def launch(
    function: int, grid: Sequence[int], block: Sequence[int], shared: int, values: Sequence[Any]
) -> None:
    """Launch a kernel on cupy's current stream with ctypes values as arguments; the driver copies them before
    it returns."""
    pointers = (_AT * len(values))(*(ctypes.addressof(value) for value in values))
    types = _AT, *[_UNSIGNED] * 7, _AT, _AT, _AT
    stream = cupy.cuda.get_current_stream().ptr
    status = _cuda("cuLaunchKernel", *types)(
        function, *grid, *block, shared, stream, ctypes.addressof(pointers), None
    )
    _launched.at = _launched.at or perf_counter_ns()
    driver.check_status(status)


def gemm_ex(handle: int, *arguments: Any, keep_gil: bool = True) -> Launch:
    """Return the launch of cublasGemmEx on cupy's current stream. It holds the GIL if `keep_gil`."""
    library = _cublas(handle, ctypes.PyDLL if keep_gil else ctypes.CDLL)
    cublas.check_status(library.cublasSetStream_v2(handle, cupy.cuda.get_current_stream().ptr))
    return partial(library.cublasGemmEx, handle, *arguments), cublas.check_status


@lru_cache(maxsize=16)
def _cuda(name: str, *types: Any) -> Any:
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = types
    return found


@lru_cache(maxsize=16)
def _cublas(handle: int, loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    library = loader(f"libcublas.so.{cublas.getVersion(handle) // 10000}")  # the one that cupy has loaded
    library.cublasSetStream_v2.argtypes = [_AT, _AT]
    integers: list[Any] = [_INT, _INT]
    matrix = [_AT, *integers]
    library.cublasGemmEx.argtypes = [
        _AT,
        *integers,
        *integers,
        _INT,
        _AT,
        *matrix,
        *matrix,
        _AT,
        *matrix,
        *integers,
    ]
    return library
