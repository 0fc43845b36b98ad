"""What multiplies on a CUDA device: cuBLAS or a rung of our ladder, chosen call by call."""

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

# cuBLAS by device, for the next run: to create one takes 5 ms, and it is what no two runs at a time may use.
_idle: dict[int, list[int]] = {}


class Multiplier:
    """cuBLAS and our kernels on one device, launched on cupy's current stream. `kernel` is a rung, "cublas" or "auto"."""

    def __init__(self, device: int, kernel: str = "auto") -> None:
        self.kernels = Kernels(device)
        self._kernel = kernel
        self.used: set[str] = set()  # what has multiplied
        self._tuning = tuning.load(device_name(device))
        self._idle = _idle.setdefault(device, [])
        try:
            self._blas = self._idle.pop()
        except IndexError:
            self._blas = cublas.create()

    def close(self) -> None:
        """Leave cuBLAS to others. The device must be at nothing any more."""
        if self._blas:
            self._idle.append(self._blas)
        self._blas = 0

    def emulated(self, dtype: str) -> Emulated:
        """What multiplies by residues, with the same kernels and the same cuBLAS."""
        return Emulated(self.kernels, self._blas, dtype)

    def choose(self, call: Call) -> Launch:
        """To do C = alpha op(A) @ op(B) + beta C."""
        name, params = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if call.k == 0:
            # C = beta C, which cuBLAS may not take; nothing is multiplied, in whatever precision.
            name, params, call = "tiled", None, replace(call, compute="native")
        if name != tuning.CUBLAS:
            try:
                return self.launch(*choose(name, call, params), call)
            except InputError:
                if self._kernel != "auto":
                    raise
        return self.launch(None, {}, call)

    def load(self, call: Call) -> None:
        """Do a call, for cuBLAS to load the kernels that do such ones, if it is what does them. The first takes tens of
        milliseconds, in which other threads may have the interpreter."""
        name, _ = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if name == tuning.CUBLAS and call.dtype != "int8":
            make(blas.gemm(self._blas, call, alone=False))

    def accumulate(self, call: Call) -> None:
        """C float64 = op(A) @ op(B) + beta C of int8 operands; k at most `integers.MAX_INT32_DEPTH`."""
        packed = int8.packed(self.kernels, call)
        int8.by_strips(self.kernels, packed, "float64", lambda part: make(self.choose(part)))

    def launch(self, kernel: Kernel | None, params: Params, call: Call) -> Launch:
        """The same by one entry of the ladder, or by cuBLAS if that is None."""
        if kernel is not None:
            self.used.add(kernel.label)
            return in_python(partial(self.kernels.multiply, kernel, call, params))
        self.used.add(tuning.CUBLAS)
        if call.dtype == "int8":
            return in_python(partial(int8.gemm, self.kernels, self._blas, call))
        return blas.gemm(self._blas, call)

    def run(self, kernel: Kernel | None, params: Params, call: Call) -> None:
        """Do it."""
        make(self.launch(kernel, params, call))


@cache
def device_name(device: int) -> str:
    """The name of a GPU."""
    return str(runtime.getDeviceProperties(device)["name"].decode())
