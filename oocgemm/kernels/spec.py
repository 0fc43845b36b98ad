"""Describe a CUDA kernel, a product that it computes, its launch, and its accesses to memory.

This module needs no GPU and does not import cupy. A sector, 32 bytes, is the unit of access to device memory.
A sector is counted each time that a warp requests it, even if a cache serves the request.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from oocgemm.planning import DTYPES, Op
from oocgemm.planning.tiling import ceil_div
from oocgemm.values import dataclass

# Threads per warp, banks of shared memory, bytes per bank word, and bytes per sector of device memory.
WARP, BANKS, WORD, SECTOR = 32, 32, 4, 32


@dataclass(frozen=True, slots=True)
class Access:
    """The predicted memory accesses of one launch of a kernel.

    Attributes:
        load_sectors, store_sectors: sectors of 32 bytes that warps load from and store to device memory.
        bank_conflicts: cycles that bank conflicts add to one access of a warp to shared memory, for the
            kernel's worst access pattern.
    """

    load_sectors: int
    store_sectors: int
    bank_conflicts: int = 0


def tiles_sectors(m: int, n: int, k: int, itemsize: int, rows: int, cols: int) -> int:
    """Return the number of sectors of A and B that a kernel loads if blocks compute `rows` x `cols` of C.

    Each thread block loads its rows of op(A) and its columns of op(B) once, with coalesced accesses.
    """
    return (m * k * ceil_div(n, cols) + k * n * ceil_div(m, rows)) * itemsize // SECTOR


def warps_sectors(m: int, n: int, k: int, itemsize: int, cols: int) -> int:
    """Return the number of sectors of A and B that a kernel loads if each thread computes one element of C.

    A warp computes 32 / cols rows and `cols` columns of C (32 if `cols` is larger). For each index along k,
    it loads one element of op(A) per row, each from another sector, and `cols` contiguous elements of op(B).
    """
    cols = min(cols, WARP)
    rows = WARP // cols
    warps = ceil_div(m, rows) * ceil_div(n, cols)
    return warps * k * (rows + ceil_div(cols * itemsize, SECTOR))


def conflicts(itemsize: int, *patterns: Callable[[int], int]) -> int:
    """Return the cycles that bank conflicts add to the worst of several accesses of a warp to shared memory.

    A pattern maps each thread of the warp, 0 to 31, to the index of the element that it accesses.

    >>> [conflicts(4, lambda thread: stride * thread) for stride in (0, 1, 32, 33)]
    [0, 0, 31, 0]
    >>> conflicts(8, lambda thread: thread), conflicts(8, lambda thread: thread // 16 * 16)
    (0, 0)
    """
    # Only threads that are served at the same time can conflict: a warp for elements of up to 4 bytes, half a
    # warp for 8 bytes, and a quarter for 16 bytes.
    together = WARP * WORD // max(WORD, itemsize)
    worst = 0
    for pattern in patterns:
        extra = 0
        for first in range(0, WARP, together):
            addresses = (pattern(lane) * itemsize for lane in range(first, first + together))
            words = {address + part for address in addresses for part in range(0, itemsize, WORD)}
            banks = Counter(word // WORD % BANKS for word in words)
            extra += max(banks.values()) - ceil_div(len(words), BANKS)
        worst = max(worst, extra)
    return worst


Params = Mapping[str, int]

# The C++ type for each dtype, as kernels/common/scalar.cuh defines it.
C_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex_t<float>",
    "complex128": "complex_t<double>",
    "int8": "signed char",
    "bool": "unsigned char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
}
# Values of the macros OOC_OP_A and OOC_OP_B: not transposed, transposed, conjugate transposed.
OP_CODES = {Op.N: 0, Op.T: 1, Op.C: 2}


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that decide which kernels it can run, and with which launch.

    Attributes:
        capability: compute capability (major, minor).
        processors: number of streaming multiprocessors.
        shared_bytes: maximum bytes of shared memory per thread block.
    """

    capability: tuple[int, int]
    processors: int
    shared_bytes: int


H200 = Device((9, 0), 132, 227 << 10)


@dataclass(frozen=True, slots=True)
class Call:
    """One product on a device: C (m x n) = alpha op(A) @ op(B) + beta C, row-major.

    `a`, `b` and `c` are device addresses. The leading dimensions `lda`, `ldb` and `ldc` are in elements. A
    and B have `dtype`, C has the dtype that kernels accumulate in. `compute` is "native", or the reduced
    precision that the caller allows. `work` is the address of a workspace for packed int8 operands;
    planning/emulation.py has its layout.
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
        return summed_in(self.dtype)


def summed_in(dtype: str) -> str:
    return "int32" if dtype == "int8" else DTYPES[dtype].accumulator


class Arguments(ctypes.Structure):
    """The kernel argument: the C struct `gemm_arguments` of kernels/common/gemm.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("m", "n", "k")),
        *((name, ctypes.c_double) for name in ("alpha_re", "alpha_im", "beta_re", "beta_im")),
        *(field for x in "abc" for field in ((x, ctypes.c_void_p), (f"ld{x}", ctypes.c_longlong))),
    )


def arguments(call: Call) -> Arguments:
    alpha, beta = complex(call.alpha), complex(call.beta)
    return Arguments(
        *(call.m, call.n, call.k, alpha.real, alpha.imag, beta.real, beta.imag),
        *(call.a, call.lda, call.b, call.ldb, call.c, call.ldc),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """The configuration of a kernel launch.

    Attributes:
        grid: numbers of thread blocks along x, y and z.
        block: numbers of threads per thread block along x, y and z.
        shared: dynamic shared memory per thread block, in bytes.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A description of a matrix in device memory for TMA, the copy engine of sm_90.

    The fields are arguments of cuTensorMapEncodeTiled.

    Attributes:
        dtype: dtype of the elements; "tf32" rounds float32 to tf32 during the copy.
        address: device address.
        extents: elements along each dimension, innermost first.
        pitches: bytes between neighbours along each dimension except the innermost; multiples of 16.
        box: elements along each dimension that one copy moves.
        swizzle: span in bytes of the swizzle in shared memory: 0, 32, 64 or 128.
    """

    dtype: str
    address: int
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel of oocgemm, for some dtypes, precisions and GPUs.

    Several kernels can have the same name. The first one that accepts a call runs it.

    Args:
        name: the name for `--kernel NAME`.
        source: the name of the CUDA source, `SOURCE.cu`.
        dtypes: dtypes of A and B that it multiplies.
        variants: sets of parameters (macros of the source); the first set is the default.
        launch: returns the launch for a call.
        entry: the name of the CUDA function; by default that of the source.
        compute: the precisions that it computes in: "native", or reduced ones such as "tf32".
        archs: GPU architectures that can run it, for which the tests compile it. "sm_90a" stands for this
            architecture only, but "sm_80" for this and all newer ones.
        refuses: returns why the kernel cannot run a call (for example, TMA needs another alignment), or None.
        parts: splits a call into calls that are launched one after the other; by default, one.
        macros: returns further macros of the source for a dtype, op(A) and op(B).
        maps: returns the tensor maps of A and B, which the kernel takes before `Arguments`; None for a kernel
            without TMA.
        instruction: a machine instruction that the compiled kernel must contain; a test checks this.
        model: predicts the memory accesses of a call; None if there is no prediction.
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
        return self.name if self.name == self.source else f"{self.name} ({self.source})"

    def target(self, device: Device) -> str | None:
        """Return the architecture to compile for, such as "sm_90a"; None if `device` cannot run it."""
        major, minor = device.capability
        own = f"sm_{major}{minor}"
        if f"{own}a" in self.archs:
            return f"{own}a"
        floors = [int(arch[3:]) for arch in self.archs if arch[3:].isdecimal()]
        return own if floors and 10 * major + minor >= min(floors) else None

    def refusal(self, call: Call, params: Params) -> str | None:
        """Return why this kernel cannot run a call with these parameters; None if it can."""
        if call.dtype not in self.dtypes:
            return f"it multiplies {', '.join(self.dtypes)}, not {call.dtype}"
        if call.compute not in self.compute:
            return f"it computes in {', '.join(self.compute)} precision, not {call.compute}"
        if self.target(call.device) is None:
            major, minor = call.device.capability
            return (
                f"it needs {' or '.join(self.archs)}, but the device has compute capability {major}.{minor}"
            )
        refused = self.refuses(call, params)
        if refused is not None:
            return refused
        needed, limit = self.launch(call, params).shared, call.device.shared_bytes
        if needed > limit:
            return f"a block needs {needed} bytes of shared memory, but the device has {limit} per block"
        return None


def options(kernel: Kernel, dtype: str, op_a: Op, op_b: Op, params: Params) -> tuple[str, ...]:
    macros = {
        "OOC_STORED": C_TYPES[dtype],
        "OOC_ACCUMULATED": C_TYPES[summed_in(dtype)],
        "OOC_OP_A": OP_CODES[op_a],
        "OOC_OP_B": OP_CODES[op_b],
        **kernel.macros(dtype, op_a, op_b),
        **params,
    }
    return tuple(f"-D{macro}={value}" for macro, value in macros.items())
