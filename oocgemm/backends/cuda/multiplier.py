"""Chooses cuBLAS or one of our own kernels for each product, and launches it."""

from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import cupy
from cupy_backends.cuda.libs import cublas

from oocgemm.backends.cuda import cublas as blas
from oocgemm.backends.cuda import int8
from oocgemm.backends.cuda.calls import Launch, in_python, make
from oocgemm.backends.cuda.emulated import Emulated
from oocgemm.backends.cuda.launch import Kernels, properties
from oocgemm.errors import InputError
from oocgemm.kernels import tuning
from oocgemm.kernels.registry import choose
from oocgemm.kernels.spec import Call, Kernel, Params

# Device -> cuBLAS handles that no run uses. They are kept because creating one takes 5 ms. Concurrent runs do
# not share a handle.
_idle: dict[int, list[int]] = {}


class Multiplier:
    """Multiplies on one device, with cuBLAS or our own kernels. Launches go to cupy's current stream.

    `kernel` is the name of one of our kernels, or "cublas", or "auto". "auto" means the kernel that was the
    fastest in measurements of similar products. `kernels` are our own kernels, if some are loaded already.
    """

    def __init__(self, device: int, kernel: str = "auto", kernels: Kernels | None = None) -> None:
        self.kernels = kernels or Kernels(device)
        self._kernel = kernel
        self.used: set[str] = set()  # names of the kernels that have multiplied
        self._tuning = tuning.load(device_name(device))
        self._idle = _idle.setdefault(device, [])
        try:
            self._blas = self._idle.pop()
        except IndexError:
            self._blas = cublas.create()

    def close(self) -> None:
        """Keep the cuBLAS handle for a later run. Call it when no work that uses the handle is in flight."""
        if self._blas:
            self._idle.append(self._blas)
        self._blas = 0

    @property
    def is_current(self) -> bool:
        """Whether the measured rates of kernels are the same as when this object was created."""
        return self._tuning == tuning.load(self._tuning.device)

    def emulated(self, dtype: str) -> Emulated:
        """Return an object that computes products of the dtype `dtype` from int8 products.

        The object uses the kernels and the cuBLAS handle of this `Multiplier`.
        """
        return Emulated(self.kernels, self._blas, dtype)

    def choose(self, call: Call) -> Launch:
        """Choose a kernel for C = alpha op(A) @ op(B) + beta C; return a deferred call that computes it.

        Raises:
            InputError: the user asked for one of our kernels by name, and it cannot compute the product.
        """
        name, params = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if call.k == 0:
            # cuBLAS may refuse k = 0, so our kernel "tiled" computes C = beta C. It only offers native
            # precision, which makes no difference here: no elements are multiplied.
            name, params, call = "tiled", None, replace(call, compute="native")
        if name != tuning.CUBLAS:
            try:
                return self.launch(*choose(name, call, params), call)
            except InputError:
                if self._kernel != "auto":
                    raise
        return self.launch(None, {}, call)

    def load(self, call: Call) -> None:
        """Make cuBLAS load the kernels for the product `call`, by computing the product.

        Does nothing if one of our own kernels is chosen for the product, or if the operands are int8. Loading
        takes tens of milliseconds. The GIL is released meanwhile.
        """
        name, _ = self._tuning.choice(self._kernel, call.dtype, call.compute, (call.m, call.n, call.k))
        if name == tuning.CUBLAS and call.dtype != "int8":
            make(blas.gemm(self._blas, call, keep_gil=False))

    def accumulate(self, call: Call) -> None:
        """Compute C = op(A) @ op(B) + beta C for int8 operands and a C in float64.

        The products are summed in int32 and then added to C. k must be at most `integers.MAX_DEPTH`, so that
        no sum overflows.
        """
        packed = int8.packed(self.kernels, call)
        int8.by_strips(self.kernels, packed, "float64", lambda part: make(self.choose(part)))

    def launch(self, kernel: Kernel | None, params: Params, call: Call) -> Launch:
        """Return a deferred call that computes the product `call` with `kernel` (None: with cuBLAS)."""
        if kernel is not None:
            self.used.add(kernel.label)
            return in_python(partial(self.kernels.multiply, kernel, call, params))
        self.used.add(tuning.CUBLAS)
        if call.dtype == "int8":
            return in_python(partial(int8.gemm, self.kernels, self._blas, call))
        return blas.gemm(self._blas, call)

    def run(self, kernel: Kernel | None, params: Params, call: Call) -> None:
        """Compute the product `call` with `kernel`, or with cuBLAS if `kernel` is None."""
        make(self.launch(kernel, params, call))


@cache
def device_name(device: int) -> str:
    """Return the name of a GPU."""
    return str(properties(device)["name"].decode())


def release() -> None:
    """Destroy the cuBLAS handles that no run uses."""
    for device, handles in list(_idle.items()):  # a run in another thread may add one
        with cupy.cuda.Device(device):
            while handles:
                with suppress(Exception):  # after a failed launch, every CUDA call raises
                    cublas.destroy(handles.pop())
