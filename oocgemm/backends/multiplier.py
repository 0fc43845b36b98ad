"""What multiplies on a CUDA device: cuBLAS or a rung of our ladder, chosen call by call."""

from dataclasses import replace
from functools import partial

from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from oocgemm.backends import cublas as blas
from oocgemm.backends import tuning
from oocgemm.backends.cuda_calls import Launch, in_python
from oocgemm.backends.emulated import Emulated
from oocgemm.backends.kernel import Call, Kernel, Params
from oocgemm.backends.ladder import choose
from oocgemm.backends.launch import Kernels
from oocgemm.errors import InputError


class Multiplier:
    """cuBLAS and our kernels on one device, launched on cupy's current stream. `kernel` is a rung, "cublas" or "auto"."""

    def __init__(self, device: int, kernel: str = "auto") -> None:
        self.kernels = Kernels(device)
        self._kernel = kernel
        self.used: set[str] = set()  # what has multiplied
        self._tuning = tuning.load(device_name(device))
        self._blas = cublas.create()

    def close(self) -> None:
        """Release cuBLAS."""
        if self._blas:
            cublas.destroy(self._blas)
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

    def launch(self, kernel: Kernel | None, params: Params, call: Call) -> Launch:
        """The same by one entry of the ladder, or by cuBLAS if that is None."""
        if kernel is None:
            self.used.add(tuning.CUBLAS)
            return blas.gemm(self._blas, call)
        self.used.add(kernel.label)
        return in_python(partial(self.kernels.multiply, kernel, call, params))

    def run(self, kernel: Kernel | None, params: Params, call: Call) -> None:
        """Do it."""
        made, check = self.launch(kernel, params, call)
        if status := made():
            check(status)


def device_name(device: int) -> str:
    """The name of a GPU."""
    return str(runtime.getDeviceProperties(device)["name"].decode())
