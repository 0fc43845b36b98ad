"""Launches and events, called so that the interpreter's lock is kept.

A call of this kind takes microseconds. Were the lock let go meanwhile, as CuPy does, other threads would take it and keep
it for a hundred times as long: between a launch and the events on both sides of it, too, which then say when the lock was
had and not when the work was done.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy
from cupy.cuda import driver
from cupy_backends.cuda.libs import cublas

_INT, _SIZE, _AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_UNSIGNED = ctypes.c_uint


def record(event: Any, stream: Any) -> None:
    """Record an event."""
    driver.check_status(_cuda("cuEventRecord", _AT, _AT)(event.ptr, stream.ptr))


def wait(stream: Any, event: Any) -> None:
    """Have a stream wait for an event."""
    driver.check_status(_cuda("cuStreamWaitEvent", _AT, _AT, _UNSIGNED)(stream.ptr, event.ptr, 0))


def copy(to: int, source: int, size: int, stream: Any) -> None:
    """Copy bytes, of which the host's are locked."""
    driver.check_status(_cuda("cuMemcpyAsync", _AT, _AT, _SIZE, _AT)(to, source, size, stream.ptr))


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
    driver.check_status(status)


def gemm_ex(handle: int, *arguments: int) -> None:
    """cublasGemmEx on cupy's current stream."""
    library = _cublas(handle)
    cublas.check_status(library.cublasSetStream_v2(handle, cupy.cuda.get_current_stream().ptr))
    cublas.check_status(library.cublasGemmEx(handle, *arguments))


@lru_cache(maxsize=16)
def _cuda(name: str, *types: Any) -> Any:
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = types
    return found


@lru_cache(maxsize=16)
def _cublas(handle: int) -> ctypes.PyDLL:
    library = ctypes.PyDLL(f"libcublas.so.{cublas.getVersion(handle) // 10000}")  # that which cupy has loaded
    library.cublasSetStream_v2.argtypes = [_AT, _AT]
    matrix = [_AT, _INT, _INT]
    library.cublasGemmEx.argtypes = [_AT, *[_INT] * 5, _AT, *matrix, *matrix, _AT, *matrix, _INT, _INT]
    return library
