"""What a kernel of the ladder is, as data, and the calls that it takes. Nothing here touches a device or imports cupy."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from oocgemm.kernels.access import Access
from oocgemm.planning import DTYPES, Op

Params = Mapping[str, int]

# C++ types of the dtypes, see kernels/scalar.cuh.
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
    """What kernels ask of a device: its compute capability, how many multiprocessors it has, and the bytes of shared
    memory that one block may have."""

    capability: tuple[int, int]
    processors: int
    shared_bytes: int


H200 = Device((9, 0), 132, 227 << 10)


@dataclass(frozen=True, slots=True)
class Call:
    """One product on a device: C (m x n) = alpha op(A) @ op(B) + beta C, row-major.

    `a`, `b` and `c` are device addresses; leading dimensions are in elements. A and B are of `dtype`, C is of the dtype
    that kernels sum in. `compute` is "native", or the reduced precision that the caller allows; `work` is room for what is
    not in place as cuBLAS wants it, which int8 operands need (planning/integers.py).
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
    """What kernels sum products of a dtype in."""
    return "int32" if dtype == "int8" else DTYPES[dtype].accumulator


class Arguments(ctypes.Structure):
    """`gemm_arguments` of kernels/gemm.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("m", "n", "k")),
        *((name, ctypes.c_double) for name in ("alpha_re", "alpha_im", "beta_re", "beta_im")),
        *(field for x in "abc" for field in ((x, ctypes.c_void_p), (f"ld{x}", ctypes.c_longlong))),
    )


def arguments(call: Call) -> Arguments:
    """A call as kernels take it."""
    alpha, beta = complex(call.alpha), complex(call.beta)
    return Arguments(
        *(call.m, call.n, call.k, alpha.real, alpha.imag, beta.real, beta.imag),
        *(call.a, call.lda, call.b, call.ldb, call.c, call.ldc),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is started: blocks, threads of a block, and bytes of dynamic shared memory a block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What the copy engine of sm_90 is told of a stored matrix: the arguments of cuTensorMapEncodeTiled.

    `extents` and `box` are in elements, the innermost dimension first; `pitches` the bytes between neighbours along
    each dimension but the innermost, multiples of 16; `swizzle` the bytes that are permuted, 0, 32, 64 or 128.
    """

    dtype: str
    address: int
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Kernel:
    """An entry of the ladder. A rung may have several, of which the first that fits a call is taken.

    Args:
        name: the rung, as in `--kernel NAME`.
        source: the file's stem, `kernels/SOURCE.cu`.
        dtypes: stored dtypes it multiplies.
        variants: its parameters, as macros of the source; the first is the default.
        launch: how a call is launched.
        entry: the function's name where it is not the file's.
        compute: what it computes in: "native" or a reduced precision.
        archs: targets it is compiled for in the tests: it runs on these and, an "a" target apart, on later ones.
        refuses: why it cannot do a call, or None: the alignment that a copy engine asks for, a size that is too large.
        parts: the calls that a call is made of, where it is launched more than once.
        macros: what the source is told beside its parameters, by stored dtype and op() of A and B.
        maps: the tensor maps that come before the arguments, for A and for B.
        instruction: what its machine code must contain.
        model: what its accesses cost on paper, where they have been counted.
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
        """The rung, and its source where it has several."""
        return self.name if self.name == self.source else f"{self.name} ({self.source})"

    def target(self, device: Device) -> str | None:
        """The architecture to compile for to run on a device; None if it does not run there."""
        major, minor = device.capability
        own = f"sm_{major}{minor}"
        if f"{own}a" in self.archs:
            return f"{own}a"
        floors = [int(arch[3:]) for arch in self.archs if arch[3:].isdecimal()]
        return own if floors and 10 * major + minor >= min(floors) else None

    def refusal(self, call: Call, params: Params) -> str | None:
        """Why this entry cannot do a call; None if it can."""
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
        needed, most = self.launch(call, params).shared, call.device.shared_bytes
        if needed > most:
            return f"a block takes {needed} bytes of shared memory, and the device has {most} for one"
        return None


def options(kernel: Kernel, dtype: str, op_a: Op, op_b: Op, params: Params) -> tuple[str, ...]:
    """What the compiler is told of a variant."""
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
    """How many tiles cover an extent."""
    return -(-extent // tile)
