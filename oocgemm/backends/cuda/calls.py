"""Launches and events, called so that the interpreter's lock is kept.

A call of this kind takes microseconds. Were the lock let go meanwhile, as CuPy does, other threads would take it and keep
it for a hundred times as long: between a launch and the events on both sides of it, too, which then say when the lock was
had and not when the work was done.
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
# Of each end of a copy of rows: where it begins, of what kind of memory, and how far one row is from the next.
_END = (
    *(("x", _SIZE), ("y", _SIZE), ("kind", _UNSIGNED)),
    *(("host", _AT), ("address", _AT), ("array", _AT), ("pitch", _SIZE)),
)
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_KIND, _BEGIN, _SIZE_OF = 2, 11, 12  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _RANGE_START_ADDR, _RANGE_SIZE
_HOST = 1  # CU_MEMORYTYPE_HOST


class _Launched(threading.local):
    """Host time of a thread's first kernel since the last `record_around`, 0 before it."""

    at = 0


_launched = _Launched()

# A call that is ready to be made, and what raises for a status that it returns. One in Python returns None.
Launch = tuple[Callable[[], int | None], Callable[[int], None]]


def record_around(launches: Sequence[Launch], start: Any, end: Any, stream: Any) -> int:
    """Record an event, launch, record the other; the host's time in nanoseconds when the first launch had been made, of those
    in Python their first kernel.

    One pass in C, so that the interpreter does not change threads in the middle of it, unless a launch is in Python.
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
    """Have a stream wait for an event."""
    driver.check_status(_cuda("cuStreamWaitEvent", _AT, _AT, _UNSIGNED)(stream.ptr, event.ptr, 0))


def record(event: Any, stream: Any) -> None:
    """Record an event."""
    driver.check_status(_cuda("cuEventRecord", _AT, _AT)(event.ptr, stream.ptr))


def locked_from(address: int) -> int:
    """How many bytes of host memory are locked as one from an address on; 0 of what is not."""
    kind, begin, size = _UNSIGNED(), _SIZE(), _SIZE()
    ask = _cuda("cuPointerGetAttribute", _AT, _INT, _SIZE)
    for found, attribute in ((kind, _KIND), (begin, _BEGIN), (size, _SIZE_OF)):
        if ask(ctypes.addressof(found), attribute, address):
            return 0
    return begin.value + size.value - address if kind.value == _HOST else 0


def ended(event: Any) -> bool:
    """Whether all that was recorded before an event has ended, and well."""
    return not _cuda("cuEventQuery", _AT)(event.ptr)


def milliseconds(start: Any, end: Any) -> float:
    """Between two events that have ended."""
    found = ctypes.c_float()
    driver.check_status(
        _cuda("cuEventElapsedTime", _AT, _AT, _AT)(ctypes.addressof(found), start.ptr, end.ptr)
    )
    return found.value


def copy(to: int, source: int, size: int, stream: Any) -> Launch:
    """To copy bytes, of which the host's are locked."""
    made = partial(_cuda("cuMemcpyAsync", _AT, _AT, _SIZE, _AT), to, source, size, stream.ptr)
    return made, driver.check_status


class _Rectangle(ctypes.Structure):
    """`CUDA_MEMCPY2D`, of addresses that the driver can tell apart: host or device."""

    _fields_ = (
        *((f"{end}_{name}", kind) for end in ("source", "to") for name, kind in _END),
        ("width", _SIZE),
        ("height", _SIZE),
    )


def copy_rows(to: tuple[int, int], source: tuple[int, int], width: int, rows: int, stream: Any) -> Launch:
    """To copy rows of so many bytes; of both ends the address and how far one row is from the next."""
    given = _Rectangle(
        source_kind=_UNIFIED, source_address=source[0], source_pitch=source[1],
        to_kind=_UNIFIED, to_address=to[0], to_pitch=to[1], width=width, height=rows,
    )  # fmt: skip
    made = partial(_cuda("cuMemcpy2DAsync_v2", ctypes.POINTER(_Rectangle), _AT), given, stream.ptr)
    return made, driver.check_status


def zero(address: int, size: int, stream: Any) -> Launch:
    """To fill device memory with zeros."""
    made = partial(_cuda("cuMemsetD8Async", _AT, ctypes.c_ubyte, _SIZE, _AT), address, 0, size, stream.ptr)
    return made, driver.check_status


def make(launch: Launch) -> None:
    """Make one by itself."""
    made, check = launch
    if status := made():
        check(status)


def in_python(made: Callable[[], None]) -> Launch:
    """A launch that raises by itself."""
    return made, driver.check_status


def launch(
    function: int, grid: Sequence[int], block: Sequence[int], shared: int, values: Sequence[Any]
) -> None:
    """Launch on cupy's current stream with ctypes values as arguments; the driver copies them before it returns."""
    pointers = (_AT * len(values))(*(ctypes.addressof(value) for value in values))
    types = _AT, *[_UNSIGNED] * 7, _AT, _AT, _AT
    stream = cupy.cuda.get_current_stream().ptr
    status = _cuda("cuLaunchKernel", *types)(
        function, *grid, *block, shared, stream, ctypes.addressof(pointers), None
    )
    _launched.at = _launched.at or perf_counter_ns()
    driver.check_status(status)


def gemm_ex(handle: int, *arguments: Any, alone: bool = True) -> Launch:
    """cublasGemmEx on cupy's current stream; unless `alone`, other threads may have the interpreter meanwhile."""
    library = _cublas(handle, ctypes.PyDLL if alone else ctypes.CDLL)
    cublas.check_status(library.cublasSetStream_v2(handle, cupy.cuda.get_current_stream().ptr))
    return partial(library.cublasGemmEx, handle, *arguments), cublas.check_status


@lru_cache(maxsize=16)
def _cuda(name: str, *types: Any) -> Any:
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = types
    return found


@lru_cache(maxsize=16)
def _cublas(handle: int, loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    library = loader(f"libcublas.so.{cublas.getVersion(handle) // 10000}")  # that which cupy has loaded
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
