"""Compiles, loads and launches our own CUDA kernels, and encodes tensor maps for their TMA copies."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import cupy
from cupy.cuda import driver, nvrtc, runtime

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.errors import BackendError
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.spec import Call, Device, Kernel, Launch, Params, TensorMap, arguments, options

_MAP_BYTES = 128
# Values of the enumerations that cuTensorMapEncodeTiled takes, from cuda.h.
_MAP_TYPES = {"int8": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "tf32": 11}
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
# CU_TENSOR_MAP_L2_PROMOTION_L2_256B: TMA copies fetch 256 bytes at a time into the L2 cache.
_MAP_L2_PROMOTION = 3


class _Nvrtc:
    """The NVRTC library that cupy has loaded. Implements `kernels.compile.Compiler`."""

    def version(self) -> str:
        return ".".join(map(str, nvrtc.getVersion()))

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        program = nvrtc.createProgram(source, name, (), ())
        try:
            nvrtc.compileProgram(program, tuple(options))
            return bytes(nvrtc.getCUBIN(program)), ""
        except nvrtc.NVRTCError as error:
            return None, f"{error}\n{nvrtc.getProgramLog(program)}"
        finally:
            nvrtc.destroyProgram(program)


class Kernels:
    """Launches our own kernels on one device. A kernel is compiled and loaded at its first use.

    Launches go to cupy's current stream.
    """

    def __init__(self, device: int) -> None:
        self.device = describe_device(device)
        self._max_threads = properties(device)["maxThreadsPerMultiProcessor"]
        self._functions: dict[tuple[object, ...], Any] = {}

    def multiply(self, kernel: Kernel, call: Call, params: Params) -> None:
        """Compute the product `call` with `kernel`, which must be able to compute it."""
        for part in kernel.parts(call, params):
            function, launch = self.function(kernel, call, params), kernel.launch(part, params)
            maps = [encoded(described) for described in kernel.maps(part, params)] if kernel.maps else []
            cuda_calls.launch(
                function.ptr, launch.grid, launch.block, launch.shared, (*maps, arguments(part))
            )

    def function(self, kernel: Kernel, call: Call, params: Params) -> Any:
        """Return the loaded function of a kernel, compiled for the dtype, op(A) and op(B) of `call`."""
        key = kernel.source, call.dtype, call.op_a, call.op_b, *params.values()
        if key not in self._functions:
            arch = kernel.target(self.device)
            assert arch is not None, "a kernel is called that refuses the device"
            macros = options(kernel, call.dtype, call.op_a, call.op_b, params)
            function = self._load(kernel.source, kernel.entry or kernel.source, arch, macros)
            self._functions[key] = function
        return self._functions[key]

    def plain(self, source: str, entry: str, macros: tuple[str, ...]) -> Callable[..., None]:
        """Compile and load a kernel that is not a GEMM kernel; return a function that launches it.

        The first argument of the returned function is a `Launch`, or the grid if thread blocks have 256
        threads. The arguments of the kernel follow.
        """
        key = source, entry, macros
        if key not in self._functions:
            major, minor = self.device.capability
            own = "a" if (major, minor) == (9, 0) else ""
            function = self._load(source, entry, f"sm_{major}{minor}{own}", macros)

            def start(how: tuple[int, int, int] | Launch, *values: Any) -> None:
                launch = how if isinstance(how, Launch) else Launch(how, (256, 1, 1))
                cuda_calls.launch(function.ptr, launch.grid, launch.block, launch.shared, values)

            self._functions[key] = start
        found: Callable[..., None] = self._functions[key]
        return found

    def occupancy(self, kernel: Kernel, call: Call, params: Params) -> float:
        """Return the occupancy: resident threads per multiprocessor, as a fraction of the maximum."""
        launch = kernel.launch(call, params)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        function = self.function(kernel, call, params)
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, launch.shared)
        return float(blocks * threads / self._max_threads)

    def registers(self, kernel: Kernel, call: Call, params: Params) -> int:
        """Return how many registers per thread the compiled kernel uses."""
        function = self.function(kernel, call, params)
        return int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr))

    def _load(self, source: str, entry: str, arch: str, macros: Sequence[str]) -> Any:
        """Compile and load a function, and let it use the maximum shared memory per block."""
        module = cupy.cuda.function.Module()
        module.load(compiled(_Nvrtc(), source, arch, macros))
        function = module.get_function(entry)
        # CUDA grants a thread block more than 48 KiB of shared memory only if the kernel has requested it.
        static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        driver.funcSetAttribute(
            function.ptr,
            driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            self.device.shared_bytes - static,
        )
        return function


@cache
def properties(device: int) -> Mapping[str, Any]:
    """Return CUDA's properties of a device. To query them takes a millisecond, so they are queried once."""
    found: Mapping[str, Any] = runtime.getDeviceProperties(device)
    return found


def describe_device(device: int) -> Device:
    """Return the properties of a device on which the choice of kernels and their parameters depends."""
    found = properties(device)
    capability = found["major"], found["minor"]
    return Device(capability, found["multiProcessorCount"], found["sharedMemPerBlockOptin"])


@lru_cache(maxsize=256)
def encoded(described: TensorMap) -> Any:
    """Encode a tensor map in 128 bytes, aligned to 64 bytes as the driver requires."""
    room = ctypes.create_string_buffer(_MAP_BYTES + 64)
    aligned = -ctypes.addressof(room) % 64
    rank = len(described.extents)
    longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + aligned),
        *(_MAP_TYPES[described.dtype], rank, ctypes.c_void_p(described.address)),
        *(longs(*described.extents), longs(*described.pitches), words(*described.box), words(*[1] * rank)),
        *(0, _MAP_SWIZZLES[described.swizzle], _MAP_L2_PROMOTION, 0),
    )
    if status:
        raise BackendError(
            f"the CUDA driver rejects a tensor map (error {status}): {described}; pass --kernel cublas"
        )
    return (ctypes.c_char * _MAP_BYTES).from_buffer(room, aligned)


@lru_cache(maxsize=1)
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
