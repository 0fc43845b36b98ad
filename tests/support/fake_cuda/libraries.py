"""Fakes of libcuda and libcublas as ctypes loads them, whose functions act on a fake device."""

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np

from oocgemm.backends.base import numpy_dtype
from tests.support.fake_cuda.device import NOT_READY, Device
from tests.support.fake_cuda.kernels import KERNELS, Operand, gemm
from tests.support.fake_cuda.memory import BASE, Block, StatusError
from tests.support.fake_cuda.objects import Objects

CUBLAS_VERSION = 130000
UNKNOWN = 999  # the status CUDA_ERROR_UNKNOWN
NOT_SUPPORTED = 15  # the status CUBLAS_STATUS_NOT_SUPPORTED

_DTYPES = {2: "float16", 14: "bfloat16", 0: "float32", 1: "float64", 4: "complex64", 5: "complex128"}
_DTYPES |= {3: "int8", 10: "int32"}
# cuBLAS compute type -> the dtypes that C may have.
_COMPUTES = {68: ("float32", "complex64"), 70: ("float64", "complex128"), 72: ("int32",)}
_COMPUTES |= {75: ("float32", "complex64"), 77: ("float32", "complex64")}
_INT8_ALIGNMENT = 16


class Function:
    """A function of a library. It checks arguments by `argtypes`, as ctypes does, and returns a status."""

    restype = ctypes.c_int

    def __init__(self, act: Callable[..., int | None], before: Callable[[], None]) -> None:
        """Make a function that calls `act`. If C code calls it, it calls `before` first."""
        self.argtypes: Any = ()
        self._act, self._before = act, before
        # Passed to C code. All arguments are integers or addresses.
        numbers = [ctypes.c_size_t] * len(signature(act).parameters)
        self._as_parameter_ = ctypes.CFUNCTYPE(ctypes.c_int, *numbers)(self._called_by_c)

    def __call__(self, *arguments: Any) -> int:
        assert len(self.argtypes) == len(arguments), f"{len(arguments)} arguments for {self.argtypes}"
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            kind.from_param(argument)  # raises the same errors as ctypes
        try:
            return self._act(*map(_plain, arguments)) or 0
        except StatusError as error:
            return error.status

    def _called_by_c(self, *arguments: int) -> int:
        self._before()
        try:
            return self._act(*arguments) or 0
        except StatusError as error:
            return error.status
        except Exception:  # a misuse, which `Device.check` raises later
            return UNKNOWN


class Library:
    """A library, whose functions are attributes."""

    def __init__(self, device: Device, objects: Objects) -> None:
        self._device, self._objects = device, objects

    def __getattr__(self, name: str) -> Function:
        act = getattr(type(self), f"_{name}", None)
        if act is None:
            raise AttributeError(f"the fake device has no {name}")
        # All threads get the same object: C code may call it at the address that one of them has passed on.
        new = Function(partial(act, self), self._device.current.called_by_c)
        found: Function = vars(self).setdefault(name, new)
        return found


class Driver(Library):
    """Stands for libcuda.so.1."""

    def _cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._device.enter("cuEventRecord", event, stream)
        self._objects.check_device(self._objects.event(event).device, stream)
        self._objects.event(event).recording = self._device.record(stream)

    def _cuEventQuery(self, event: int) -> int:  # noqa: N802
        self._device.enter("cuEventQuery", event)
        return 0 if self._device.done(self._objects.event(event).recording) else NOT_READY

    def _cuStreamWriteValue32_v2(self, stream: int, to: int, value: int, flags: int) -> None:  # noqa: N802
        fault = self._device.enter("cuStreamWriteValue32", stream, to, value, flags)
        into = self._device.memory.bytes_of(Block(to, 4)).view(np.uint32)
        self._device.write_value(stream, Block(to, 4), partial(into.fill, value), fault)

    def _cuStreamQuery(self, stream: int) -> int:  # noqa: N802
        self._device.enter("cuStreamQuery", stream)
        return 0 if self._device.idle(stream) else NOT_READY

    def _cuCtxGetCurrent(self, to: int) -> None:  # noqa: N802
        ctypes.c_size_t.from_address(to).value = self._device.number + 1

    def _cuCtxSetCurrent(self, context: int) -> None:  # noqa: N802
        self._device.current.use(context - 1)

    def _cuEventElapsedTime(self, to: int, start: int, end: int) -> None:  # noqa: N802
        self._device.enter("cuEventElapsedTime", start, end)
        ctypes.c_float.from_address(to).value = self._objects.elapsed(start, end)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        self._device.enter("cuStreamWaitEvent", stream, event, flags)
        self._device.await_(stream, self._objects.event(event).recording)

    def _cuPointerGetAttributes(self, count: int, asked: int, to: int, address: int) -> None:  # noqa: N802
        self._device.enter("cuPointerGetAttributes", address)
        found = self._device.memory.range_at(address)
        begin, size = (0, 0) if found is None else found[:2]
        kind = 0 if found is None else 2 if address >= BASE else 1
        attributes = (ctypes.c_int * count).from_address(asked)
        for attribute, place in zip(attributes, (ctypes.c_size_t * count).from_address(to), strict=True):
            type_ = ctypes.c_uint if attribute == 2 else ctypes.c_size_t
            type_.from_address(place).value = {2: kind, 11: begin, 12: size}[attribute]

    def _cuMemcpyAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        fault = self._device.enter("cuMemcpyAsync", to, source, size, stream)
        self._copy("cuMemcpyAsync", Block(to, size), Block(source, size), stream, fault)

    def _cuMemcpy2DAsync_v2(self, r: Any, stream: int) -> None:  # noqa: N802
        if isinstance(r, int):
            r = import_module("oocgemm.backends.cuda.calls").Rectangle.from_address(r)
        fault = self._device.enter("cuMemcpy2DAsync_v2", r, stream)
        to, source = (
            Block(getattr(r, f"{end}_address"), r.width, r.height, getattr(r, f"{end}_pitch"))
            for end in ("to", "source")
        )
        self._copy("cuMemcpy2DAsync_v2", to, source, stream, fault)

    def _copy(self, name: str, to: Block, source: Block, stream: int, fault: Any) -> None:
        memory = self._device.memory
        into, given = memory.bytes_of(to), memory.bytes_of(source)
        crosses = (to.address >= BASE) != (source.address >= BASE)
        size = to.width * to.rows if crosses else 0

        def run() -> None:
            into[...] = given

        self._device.work(stream, name, run, [source], [to], link_bytes=size, fault=fault)

    def _cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        fault = self._device.enter("cuMemsetD8Async", address, value, size, stream)
        block = Block(address, size)
        into = self._device.memory.bytes_of(block)
        self._device.work(stream, "memset", lambda: into.fill(value), [], [block], fault=fault)

    def _cuLaunchKernel(self, function: int, *how: Any) -> None:  # noqa: N802
        """Launch a kernel.

        `how` is the grid (3 numbers) and the block (3), bytes of shared memory, the stream, pointers to the
        arguments, and extra options.
        """
        fault = self._device.enter("cuLaunchKernel", function, *how)
        kernel, (stream, pointers) = self._objects.function(function), how[7:9]
        self._objects.check_device(kernel.device, stream)
        count, prepare = KERNELS[kernel.entry]
        given = list((ctypes.c_void_p * count).from_address(pointers))
        macros = {**kernel.macros, "grid x": str(how[0]), "grid y": str(how[1])}
        work = prepare(self._device.memory, macros, [address or 0 for address in given])
        self._device.work(stream, kernel.entry, work.run, work.reads, work.writes, fault=fault)


class Cublas(Library):
    """Stands for libcublas.so."""

    def _cublasSetStream_v2(self, handle: int, stream: int) -> None:  # noqa: N802
        self._device.enter("cublasSetStream_v2", handle, stream)
        self._objects.cublas_streams[handle] = stream

    def _cublasGemmEx(self, handle: int, *arguments: Any) -> int:  # noqa: N802
        return self.gemm_ex(handle, *arguments)

    def gemm_ex(self, handle: int, *arguments: Any) -> int:
        """Multiply column-major matrices. In row-major terms this is C^T = op(B)^T op(A)^T."""
        fault = self._device.enter("cublasGemmEx", handle, *arguments)
        op_a, op_b, m, n, k, alpha_at = arguments[:6]
        a, a_type, lda, b, b_type, ldb = arguments[6:12]
        beta_at, c, c_type, ldc, compute, _ = arguments[12:]
        c_dtype = _DTYPES[c_type]
        # alpha and beta are on the host, in the dtype of the computation.
        alpha, beta = (_scalar(address, c_dtype) for address in (alpha_at, beta_at))
        if a_type != b_type or c_dtype not in _COMPUTES[compute] or min(m, n, k) < 1:
            return NOT_SUPPORTED
        numbers = k, lda, ldb, ldc, a, b, c
        if c_dtype == "int32" and (
            any(x % _INT8_ALIGNMENT for x in numbers) or (op_a, op_b) != (1, 0) or alpha != 1
        ):
            return NOT_SUPPORTED
        dtype = numpy_dtype(_DTYPES[a_type])
        # A column-major X is X^T in row-major terms. The operands are therefore swapped, and each keeps its
        # op.
        left = Operand(b, dtype, *((k, n) if op_b else (n, k)), ldb, op_b)
        right = Operand(a, dtype, *((m, k) if op_a else (k, m)), lda, op_a)
        target = Operand(c, numpy_dtype(c_dtype), n, m, ldc)
        work = gemm(self._device.memory, alpha, left, right, beta, target)
        stream = self._objects.cublas_streams[handle]
        self._objects.check_device(self._objects.cublas_devices[handle], stream)
        self._device.work(stream, "cublasGemmEx", work.run, work.reads, work.writes, fault=fault)
        return 0


def _scalar(address: int, dtype: str) -> Any:
    kind = numpy_dtype(dtype)
    return np.frombuffer(ctypes.string_at(address, kind.itemsize), kind)[0].item()


def _plain(argument: Any) -> Any:
    """Return an argument as C code would see it."""
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return argument
