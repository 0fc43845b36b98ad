"""Kernels of the ladder and the calls that they take, as data. Neither touches a device nor imports cupy."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from oocgemm.kernels.access import Access
from oocgemm.planning import DTYPES, Op

Params = Mapping[str, int]

# C++ types of the dtypes, see kernels/common/scalar.cuh.
C_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex_t<float>",
    "complex128": "complex_t<double>",
    "int8": "signed char",
    "int32": "int",
    "int64": "long long",
}
OP_CODES = {Op.N: 0, Op.T: 1, Op.C: 2}


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that kernels depend on: compute capability, number of multiprocessors, and
    the maximum bytes of shared memory per block."""

    capability: tuple[int, int]
    processors: int
    shared_bytes: int


H200 = Device((9, 0), 132, 227 << 10)


@dataclass(frozen=True, slots=True)
class Call:
    """One product on a device: C (m x n) = alpha op(A) @ op(B) + beta C, row-major.

    `a`, `b` and `c` are device addresses; leading dimensions are in elements. A and B have `dtype`, C has the
    dtype that kernels accumulate in. `compute` is "native", or the reduced precision that the caller allows.
    `work` is the address of the workspace that int8 operands are packed into (its layout:
    planning/integers.py).
    """

    dtype: str
    op_a: Op
    op_b: Op
    m: int
    n: int
    k: int
    alpha: complex
    a: int
    lda: int
    b: int
    ldb: int
    beta: complex
    c: int
    ldc: int
    compute: str = "native"
    device: Device = H200
    work: int = 0

    @property
    def accumulator(self) -> str:
        """The dtype of C."""
        return summed_in(self.dtype)


def summed_in(dtype: str) -> str:
    """Return the dtype in which kernels accumulate products of a dtype."""
    return "int32" if dtype == "int8" else DTYPES[dtype].accumulator


class Arguments(ctypes.Structure):
    """The C struct `gemm_arguments` of kernels/common/gemm.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("m", "n", "k")),
        *((name, ctypes.c_double) for name in ("alpha_re", "alpha_im", "beta_re", "beta_im")),
        *(field for x in "abc" for field in ((x, ctypes.c_void_p), (f"ld{x}", ctypes.c_longlong))),
    )


def arguments(call: Call) -> Arguments:
    """Return a call as the struct that kernels take."""
    alpha, beta = complex(call.alpha), complex(call.beta)
    return Arguments(
        *(call.m, call.n, call.k, alpha.real, alpha.imag, beta.real, beta.imag),
        *(call.a, call.lda, call.b, call.ldb, call.c, call.ldc),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch: blocks in the grid, threads per block, and bytes of dynamic shared memory per block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A stored matrix as TMA (the copy engine of sm_90) sees it: the arguments of cuTensorMapEncodeTiled.

    `extents` and `box` are in elements, innermost dimension first. `pitches` are the bytes between neighbours
    along each dimension except the innermost, multiples of 16. `swizzle` is the span of the swizzle in bytes:
    0, 32, 64 or 128.
    """

    dtype: str
    address: int
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Kernel:
    """An entry of the ladder. A rung may have several entries; the first one that accepts a call runs it.

    Args:
        name: the rung, as in `--kernel NAME`.
        source: the file's stem, `SOURCE.cu`.
        dtypes: stored dtypes that it multiplies.
        variants: sets of parameters, which are macros of the source; the first is the default.
        launch: returns the launch of a call.
        entry: the function's name if it is not the file's stem.
        compute: the precisions that it computes in: "native" or reduced ones.
        archs: the targets that the tests compile it for. It runs on these and on later ones; an "a" target
            runs only on that architecture.
        refuses: returns why it cannot run a call, such as an alignment that TMA needs or a size that is too
            large, or None.
        parts: splits a call into the calls that are launched, one after the other.
        macros: further macros of the source, from the stored dtype and op() of A and B.
        maps: returns the tensor maps of A and B, which precede the arguments.
        instruction: an instruction that its machine code must contain.
        model: the counted cost of its accesses, if they have been counted.
    """

    name: str
    source: str
    dtypes: tuple[str, ...]
    variants: tuple[Params, ...]
    launch: Callable[[Call, Params], Launch]
    entry: str = ""
    compute: tuple[str, ...] = ("native",)
    archs: tuple[str, ...] = ("sm_80", "sm_90a", "sm_100")
    refuses: Callable[[Call, Params], str | None] = lambda call, params: None
    parts: Callable[[Call, Params], Iterator[Call]] = lambda call, params: iter((call,))
    macros: Callable[[str, Op, Op], Mapping[str, object]] = lambda dtype, op_a, op_b: {}
    maps: Callable[[Call, Params], tuple[TensorMap, TensorMap]] | None = None
    instruction: str | None = None
    model: Callable[[Call, Params], Access] | None = None

    @property
    def label(self) -> str:
        """The rung, and the source where they differ."""
        return self.name if self.name == self.source else f"{self.name} ({self.source})"

    def target(self, device: Device) -> str | None:
        """Return the architecture to compile for on a device; None if the kernel does not run there."""
        major, minor = device.capability
        own = f"sm_{major}{minor}"
        if f"{own}a" in self.archs:
            return f"{own}a"
        floors = [int(arch[3:]) for arch in self.archs if arch[3:].isdecimal()]
        return own if floors and 10 * major + minor >= min(floors) else None

    def refusal(self, call: Call, params: Params) -> str | None:
        """Return why this entry cannot run a call; None if it can."""
        if call.dtype not in self.dtypes:
            return f"it multiplies {', '.join(self.dtypes)}, not {call.dtype}"
        if call.compute not in self.compute:
            return f"it computes in {', '.join(self.compute)} precision, not {call.compute}"
        if self.target(call.device) is None:
            major, minor = call.device.capability
            return (
                f"it needs {' or '.join(self.archs)}, and the device is of compute capability {major}.{minor}"
            )
        refused = self.refuses(call, params)
        if refused is not None:
            return refused
        needed, limit = self.launch(call, params).shared, call.device.shared_bytes
        if needed > limit:
            return f"a block takes {needed} bytes of shared memory, and the device has {limit} per block"
        return None


def options(kernel: Kernel, dtype: str, op_a: Op, op_b: Op, params: Params) -> tuple[str, ...]:
    """Return the compiler options of a variant."""
    macros = {
        "OOC_STORED": C_TYPES[dtype],
        "OOC_ACCUMULATED": C_TYPES[summed_in(dtype)],
        "OOC_OP_A": OP_CODES[op_a],
        "OOC_OP_B": OP_CODES[op_b],
        **kernel.macros(dtype, op_a, op_b),
        **params,
    }
    return tuple(f"-D{macro}={value}" for macro, value in macros.items())


def blocks(extent: int, tile: int) -> int:
    """Return the number of tiles that cover an extent."""
    return -(-extent // tile)
