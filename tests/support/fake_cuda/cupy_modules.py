"""Fakes of the modules of cupy that the CUDA backend imports."""

import ctypes
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.support.fake_cuda.device import Device
from tests.support.fake_cuda.kernels import KERNELS
from tests.support.fake_cuda.libraries import CUBLAS_VERSION, Cublas
from tests.support.fake_cuda.memory import Block, StatusError
from tests.support.fake_cuda.objects import Event, Function, Objects

PROPERTIES = {
    "name": b"a fake GPU",
    "major": 8,
    "minor": 0,
    "multiProcessorCount": 4,
    "sharedMemPerBlockOptin": 166912,
    "maxThreadsPerMultiProcessor": 2048,
}


class CupyError(RuntimeError):
    """The exception that the fake cupy raises for an error number of CUDA."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class CudaRuntimeError(CupyError):
    """Stands for `cupy.cuda.runtime.CUDARuntimeError`."""


class DriverError(CupyError):
    """Stands for `cupy.cuda.driver.CUDADriverError`."""


class CublasError(CupyError):
    """Stands for `cupy.cuda.cublas.CUBLASError`."""


class NvrtcError(RuntimeError):
    """Stands for `cupy.cuda.nvrtc.NVRTCError`."""


@contextmanager
def raising(error: type[CupyError]) -> Iterator[None]:
    """Convert the fake device's errors in the block to one of cupy's exceptions."""
    try:
        yield
    except StatusError as refused:
        raise error(refused.status) from None


def check_status(error: type[CupyError], status: int) -> None:
    if status:
        raise error(status)


class Runtime:
    """Stands for the module `cupy.cuda.runtime`."""

    CUDARuntimeError = CudaRuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N815

    def __init__(self, device: Device) -> None:
        self._device = device

    def _enter(self, name: str, *arguments: object) -> None:
        with raising(CudaRuntimeError):
            self._device.enter(name, *arguments)

    def getDeviceCount(self) -> int:  # noqa: N802
        self._enter("getDeviceCount")
        return self._device.devices

    def getDeviceProperties(self, number: int) -> dict[str, Any]:  # noqa: N802
        return PROPERTIES | {"totalGlobalMem": self._device.memory.capacity}

    def deviceGetAttribute(self, attribute: int, number: int) -> int:  # noqa: N802
        return 0

    def deviceCanAccessPeer(self, number: int, owner: int) -> int:  # noqa: N802
        return 1

    def deviceEnablePeerAccess(self, owner: int) -> None:  # noqa: N802
        self._enter("deviceEnablePeerAccess", owner)
        known = len(self._device.peers)
        self._device.peers.add((self._device.number, owner))
        check_status(CudaRuntimeError, 704 if len(self._device.peers) == known else 0)

    def deviceGetPCIBusId(self, number: int) -> str:  # noqa: N802
        return "FFFF:FF:00.0"

    def runtimeGetVersion(self) -> int:  # noqa: N802
        return 13000

    def driverGetVersion(self) -> int:  # noqa: N802
        return 13000

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        # This works even after a failure, as on a GPU. The backend's error messages contain these numbers.
        self._device.calls.append(("memGetInfo", ()))
        return self._device.memory.free_bytes(self._device.number), self._device.memory.capacity

    def malloc(self, size: int) -> int:
        self._enter("malloc", size)
        with raising(CudaRuntimeError), self._device.lock:
            return self._device.memory.allocate(size, self._device.number)

    def free(self, address: int) -> None:
        self._enter("free", address)
        with raising(CudaRuntimeError):
            self._device.finish_all()
            with self._device.lock:
                self._device.memory.free(address)

    def deviceSynchronize(self) -> None:  # noqa: N802
        self._enter("deviceSynchronize")
        with raising(CudaRuntimeError):
            self._device.finish_all()

    def hostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        self._enter("hostRegister", address, size, flags)
        with raising(CudaRuntimeError), self._device.lock:
            portable = flags & 1
            self._device.memory.pin(address, size, None if portable else self._device.number)

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        self._enter("hostUnregister", address)
        with raising(CudaRuntimeError), self._device.lock:
            size = self._device.memory.pinned.get(address, 0)
            if self._device.in_flight(address, address + size):
                raise self._device.misuse(f"memory at {address:#x} is unpinned while a copy is in flight")
            self._device.memory.unpin(address)

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self._enter("memcpyAsync", to, source, size, kind, stream)
        blocks = Block(to, size), Block(source, size)
        into, given = map(self._device.memory.bytes_of, blocks)

        def run() -> None:
            into[...] = given

        self._device.work(stream, "memcpyAsync", run, blocks[1:], blocks[:1])

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        self._enter("memsetAsync", address, value, size, stream)
        block = Block(address, size)
        into = self._device.memory.bytes_of(block)
        self._device.work(stream, "memsetAsync", lambda: into.fill(value), [], [block])


class _Thread(threading.local):
    """The streams that a thread has entered with `with`, the innermost last."""

    def __init__(self, default: "Stream") -> None:
        self.streams = [default]


class Stream:
    """Stands for `cupy.cuda.Stream`. A pointer of None creates a stream."""

    def __init__(self, objects: Objects, ptr: int | None = None) -> None:
        self._objects = objects
        self._is_default = ptr is not None
        self.ptr = objects.device.new_handle() if ptr is None else ptr
        self.thread: _Thread | None = None
        if ptr is None:
            objects.device.new_queue(self.ptr)

    def __enter__(self) -> "Stream":
        assert self.thread is not None
        self.thread.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.thread is not None
        self.thread.streams.pop()

    def synchronize(self) -> None:
        with raising(CudaRuntimeError):
            self._objects.synchronize("Stream.synchronize", self._objects.device.record(self.ptr))

    def __del__(self) -> None:
        if not self._is_default:
            self._objects.device.retire(self.ptr)


class CudaDevice:
    """Stands for `cupy.cuda.Device`, used as a context manager."""

    def __init__(self, device: Device, number: int = 0) -> None:
        assert 0 <= number < device.devices, f"there are {device.devices} fake devices"
        self.id = number
        self._current = device.current

    def __enter__(self) -> "CudaDevice":
        self._current.devices.append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        self._current.devices.pop()


class Module:
    """Stands for `cupy.cuda.function.Module`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._options: tuple[str, ...] = ()
        self._number = 0

    def load(self, code: bytes) -> None:
        with raising(DriverError):
            self._objects.device.enter("Module.load")
        self._options, self._number = pickle.loads(code), self._objects.device.number

    def get_function(self, entry: str) -> Function:
        if entry not in KERNELS:
            raise NotImplementedError(f"the fake device cannot run kernel {entry}")
        macros = dict(
            option[2:].split("=", 1) for option in self._options if option.startswith("-D") and "=" in option
        )
        function = Function(self._objects.device.new_handle(), entry, macros, self._number)
        self._objects.functions[function.ptr] = function
        return function


class _Pinned(ctypes.Array[ctypes.c_ubyte]):
    """Host memory with its address as `ptr`."""

    _type_, _length_ = ctypes.c_ubyte, 0
    ptr = 0


def pinned_memory(objects: Objects, size: int) -> Any:
    """Stands for `cupy.cuda.alloc_pinned_memory`. The memory is pinned until it is garbage collected."""
    memory = type("Pinned", (_Pinned,), {"_length_": size})()
    memory.ptr = ctypes.addressof(memory)
    with raising(CudaRuntimeError), objects.device.lock:
        objects.device.enter("alloc_pinned_memory", size)
        objects.device.memory.pin(memory.ptr, size, objects.device.number, owned=True)
    weakref.finalize(memory, objects.device.memory.unpin, memory.ptr).atexit = False
    return memory


def modules(device: Device, objects: Objects, library: Cublas) -> dict[str, ModuleType]:
    """Return the fake modules by their names."""

    def gemm_ex(handle: int, *arguments: int) -> None:
        objects.cublas_streams[handle] = thread.streams[-1].ptr
        with raising(CublasError):
            check_status(CublasError, library.gemm_ex(handle, *arguments))

    def event(*_: object, **__: object) -> Event:
        with raising(CudaRuntimeError):
            device.enter("Event")
        return _RaisingEvent(objects)

    def stream(*_: object, **__: object) -> Stream:
        with raising(CudaRuntimeError):
            device.enter("Stream")
        made = Stream(objects)
        made.thread = thread
        return made

    def create() -> int:
        with raising(CublasError):
            device.enter("cublas.create")
        handle = device.new_handle()
        objects.cublas_devices[handle] = device.number
        return handle

    def elapsed(start: Event, end: Event) -> float:
        with raising(CudaRuntimeError):
            return objects.elapsed(start.ptr, end.ptr)

    thread = _Thread(Stream(objects, 0))
    runtime = Runtime(device)
    driver = _module(
        "cupy.cuda.driver",
        check_status=partial(check_status, DriverError),
        CUDADriverError=DriverError,
        funcGetAttribute=lambda attribute, function: 0,
        funcSetAttribute=lambda function, attribute, value: None,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
    )
    nvrtc = _module(
        "cupy.cuda.nvrtc",
        NVRTCError=NvrtcError,
        getVersion=lambda: ("fake", 1),
        createProgram=lambda source, name, headers, names: {},
        compileProgram=lambda program, options: program.update(options=options),
        getCUBIN=lambda program: pickle.dumps(program["options"]),
        getProgramLog=lambda program: "",
        destroyProgram=lambda program: None,
    )
    cuda = _module(
        "cupy.cuda",
        runtime=runtime,
        driver=driver,
        nvrtc=nvrtc,
        function=_module("cupy.cuda.function", Module=partial(Module, objects)),
        Device=partial(CudaDevice, device),
        Stream=stream,
        Event=event,
        get_current_stream=lambda: thread.streams[-1],
        get_elapsed_time=elapsed,
        alloc_pinned_memory=partial(pinned_memory, objects),
    )
    cublas = _module(
        "cupy_backends.cuda.libs.cublas",
        CUBLASError=CublasError,
        create=create,
        destroy=lambda handle: device.calls.append(("cublas.destroy", (handle,))),
        gemmEx=gemm_ex,
        getVersion=lambda handle: CUBLAS_VERSION,
        check_status=partial(check_status, CublasError),
    )
    libs = _module("cupy_backends.cuda.libs", cublas=cublas)
    found = [
        *(_module("cupy", cuda=cuda, __version__="0.fake"), cuda),
        *(_module("cupy_backends"), _module("cupy_backends.cuda", libs=libs), libs),
    ]
    return {module.__name__: module for module in found}


class _RaisingEvent(Event):
    """Stands for `cupy.cuda.Event`, whose methods raise cupy's exceptions."""

    def synchronize(self) -> None:
        with raising(CudaRuntimeError):
            super().synchronize()


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    return module
