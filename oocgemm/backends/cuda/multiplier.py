"""Chooses and launches cuBLAS or a rung of our ladder for each call."""

from dataclasses import replace
from functools import cache, partial

from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.cuda import cublas as blas
from oocgemm.backends.cuda import int8
from oocgemm.backends.cuda.calls import Launch, in_python, make
from oocgemm.backends.cuda.emulated import Emulated
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.errors import InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.registry import choose
from oocgemm.kernels.spec import Call, Kernel, Params

# Idle cuBLAS handles by device. Creating one takes 5 ms. Concurrent runs do not share a handle.
_idle: dict[int, list[int]] = {}


class Multiplier:
    """cuBLAS and our kernels on one device, launched on cupy's current stream.

    `kernel` is a rung, "cublas", or "auto": the fastest one that was measured for the class of the call.
    """

    def __init__(self, device: int, kernel: str = "auto") -> None:
        self.kernels = Kernels(device)
        self._kernel = kernel
        self.used: set[str] = set()  # names of the kernels that have multiplied
        self._tuning = tuning.load(device_name(device))
        self._idle = _idle.setdefault(device, [])
        try:
            self._blas = self._idle.pop()
        except IndexError:
            self._blas = cublas.create()

    def close(self) -> None:
        """Return the cuBLAS handle to the idle ones. No work that uses it may be in flight."""
        if self._blas:
            self._idle.append(self._blas)
        self._blas = 0

    def emulated(self, dtype: str) -> Emulated:
        """Return an emulated multiplier with the same kernels and the same cuBLAS handle."""
        return Emulated(self.kernels, self._blas, dtype)

    def choose(self, call: Call) -> Launch:
        """Return the launch of C = alpha op(A) @ op(B) + beta C.

        Raises:
            InputError: the rung that was asked for cannot run the call.
        """
        name, params = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if call.k == 0:
            # C = beta C: cuBLAS may refuse k = 0, and precision does not matter since nothing is multiplied.
            name, params, call = "tiled", None, replace(call, compute="native")
        if name != tuning.CUBLAS:
            try:
                return self.launch(*choose(name, call, params), call)
            except InputError:
                if self._kernel != "auto":
                    raise
        return self.launch(None, {}, call)

    def load(self, call: Call) -> None:
        """Run a call once so that cuBLAS loads its kernels, if cuBLAS would run it. That takes tens of
        milliseconds, without the GIL."""
        name, _ = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if name == tuning.CUBLAS and call.dtype != "int8":
            make(blas.gemm(self._blas, call, keep_gil=False))

    def accumulate(self, call: Call) -> None:
        """Compute C (float64) = op(A) @ op(B) + beta C for int8 operands; k is at most
        `integers.MAX_DEPTH`."""
        packed = int8.packed(self.kernels, call)
        int8.by_strips(self.kernels, packed, "float64", lambda part: make(self.choose(part)))

    def launch(self, kernel: Kernel | None, params: Params, call: Call) -> Launch:
        """Return the launch of a call by one entry of the ladder, or by cuBLAS if `kernel` is None."""
        if kernel is not None:
            self.used.add(kernel.label)
            return in_python(partial(self.kernels.multiply, kernel, call, params))
        self.used.add(tuning.CUBLAS)
        if call.dtype == "int8":
            return in_python(partial(int8.gemm, self.kernels, self._blas, call))
        return blas.gemm(self._blas, call)

    def run(self, kernel: Kernel | None, params: Params, call: Call) -> None:
        """Launch a call by one entry of the ladder, or by cuBLAS if `kernel` is None."""
        make(self.launch(kernel, params, call))


@cache
def device_name(device: int) -> str:
    """Return the name of a GPU."""
    return str(runtime.getDeviceProperties(device)["name"].decode())
