"""Times kernels on a CUDA device.

Operands are random. Every kernel runs once before it is timed. Kernels are timed in turns, and the clock rate
of the device is recorded.
"""

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.cuda.multiplier import Multiplier, device_name
from oocgemm.kernels.spec import Call, Kernel, Params
from oocgemm.planning import DTYPES, Op
from oocgemm.planning.emulation import workspace_layout
from oocgemm.values import dataclass

# Maximum number of random numbers that are generated for an operand; a larger one repeats them. Not a power
# of 2: otherwise many rows of 2^i elements would be equal.
_BLOCK = 1_000_003
_MIN_SAMPLES, _SAMPLES = 5, 25  # minimum and maximum number of samples per kernel


@dataclass(frozen=True, slots=True)
class Product:
    """A product to time: C (m x n) = op(A) @ op(B) + beta C. All matrices are contiguous."""

    m: int
    n: int
    k: int
    dtype: str
    op_a: Op = Op.N
    op_b: Op = Op.N
    beta: float = 0.0
    compute: str = "native"

    @property
    def flops(self) -> int:
        return (8 if DTYPES[self.dtype].is_complex else 2) * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of one kernel: median, minimum and maximum of the samples, in seconds.

    `clock` is the lowest clock rate of the multiprocessors during the samples, in MHz; None if the driver
    does not report it.
    """

    seconds: float
    minimum: float
    maximum: float
    samples: int
    clock: int | None


class Stopwatch:
    """Times our kernels and cuBLAS on one device."""

    def __init__(self, device: int = 0) -> None:
        self.name = device_name(device)
        self._device = cupy.cuda.Device(device)
        with self._device:
            self.multiplier = Multiplier(device)
        self.clocks = _Clocks(device)

    def close(self) -> None:
        self.multiplier.close()

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def operands(self, product: Product) -> Iterator[Call]:
        """Yield a `Call` with random operands on the device. Their memory is freed afterwards."""
        swaps_a, swaps_b = product.op_a.swaps, product.op_b.swaps
        lda, ldb = (product.m if swaps_a else product.k), (product.k if swaps_b else product.n)
        kind, shape = (product.dtype, product.op_a, product.op_b), (product.m, product.n, product.k)
        facts = product.compute, self.multiplier.kernels.device
        call = Call(*kind, *shape, 1.0, 0, lda, 0, ldb, product.beta, 0, product.n, *facts)
        m, n, k = shape
        work = workspace_layout(m, n, k).end if product.dtype == "int8" else 0
        dtypes = product.dtype, product.dtype, call.accumulator, "int8"
        addresses: list[int] = []
        with self._device:
            try:
                for count, dtype in zip((m * k, k * n, m * n, work), dtypes, strict=True):
                    addresses.append(_random(count, numpy_dtype(dtype)))
                a, b, c, at = addresses
                yield replace(call, a=a, b=b, c=c, work=at)
            finally:
                runtime.deviceSynchronize()
                for address in addresses:
                    runtime.free(address)

    def seconds(self, kernel: Kernel | None, params: Params, call: Call, times: int = 1) -> float:
        """Run a product `times` times back to back; return the seconds per product."""
        with self._device, cupy.cuda.Stream(non_blocking=True) as stream:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            for _ in range(times):
                self.multiplier.run(kernel, params, call)
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / times

    def compare(
        self, contenders: Sequence[tuple[Kernel | None, Params]], call: Call, seconds: float
    ) -> list[Timing]:
        """Time kernels (None: cuBLAS) in turns, each for about `seconds`, at least `_MIN_SAMPLES` times.

        The order is shuffled in each round, because a GPU at its power limit runs faster after a kernel that
        drew little power. If a product takes less time than its launch on the host (some microseconds), the
        result is the time of the launch.
        """
        times = []
        for contender in contenders:
            self.seconds(*contender, call)  # warm-up: loads the code
            once = max(self.seconds(*contender, call), 1e-6)
            # A sample is the mean time of 1 to 100 runs, which take about 1 ms together.
            times.append((max(1, min(100, int(1e-3 / once))), once))
        rounds = [max(_MIN_SAMPLES, min(_SAMPLES, int(seconds / (n * once)))) for n, once in times]
        samples: list[list[float]] = [[] for _ in contenders]
        clocks: list[list[int]] = [[] for _ in contenders]
        for turn in range(max(rounds, default=0)):
            for i in random.Random(turn).sample(range(len(contenders)), len(contenders)):
                if turn < rounds[i]:
                    samples[i].append(self.seconds(*contenders[i], call, times[i][0]))
                    clocks[i] += self.clocks.now()
        return [
            Timing(median(found), min(found), max(found), len(found), min(clock, default=None))
            for found, clock in zip(samples, clocks, strict=True)
        ]


class _Clocks:
    """Asks NVML for clock rates of a device's multiprocessors, in MHz."""

    def __init__(self, device: int) -> None:
        self._handle = ctypes.c_void_p()
        self._library: Any = None
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            bus = runtime.deviceGetPCIBusId(device).encode()
            if not library.nvmlInit_v2() and not library.nvmlDeviceGetHandleByPciBusId_v2(
                bus, ctypes.byref(self._handle)
            ):
                self._library = library

    def now(self) -> list[int]:
        return self._ask("nvmlDeviceGetClockInfo")

    def max(self) -> int | None:
        """Return the maximum clock rate of the multiprocessors, in MHz; None if NVML does not report it."""
        return next(iter(self._ask("nvmlDeviceGetMaxClockInfo")), None)

    def _ask(self, function: str) -> list[int]:
        value = ctypes.c_uint()
        if self._library is None or getattr(self._library, function)(self._handle, 1, ctypes.byref(value)):
            return []
        return [value.value]


def _random(count: int, dtype: np.dtype[Any]) -> int:
    """Return the address of `count` random elements; integers have a standard deviation of 20."""
    rng = np.random.default_rng(0)
    numbers: np.ndarray[Any, Any] = rng.standard_normal(min(count, _BLOCK))
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal(numbers.size)
    block = (numbers * 20).astype(dtype) if dtype.kind == "i" else numbers.astype(dtype)
    address, filled, size = (
        int(runtime.malloc(max(1, count * dtype.itemsize))),
        block.nbytes,
        count * dtype.itemsize,
    )
    runtime.memcpy(address, block.ctypes.data, filled, runtime.memcpyHostToDevice)
    while filled < size:
        part = min(filled, size - filled)
        runtime.memcpy(address + filled, address, part, runtime.memcpyDeviceToDevice)
        filled += part
    return address
