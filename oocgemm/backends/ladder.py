"""The ladder of GEMM kernels as data: what each of them multiplies, how it is compiled, and how it is launched.

Adding a kernel is one file in `kernels/` and one `Kernel` here. Nothing here touches a device or imports cupy, so that
plans, tests and tuners can enumerate kernels without one.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from oocgemm.backends.model import Access, conflicts, stores, tiles_sectors, warps_sectors
from oocgemm.errors import InputError
from oocgemm.plan import DTYPES, Op, Plan

Params = Mapping[str, int]

# C++ types of the dtypes, see kernels/scalar.cuh.
C_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex_t<float>",
    "complex128": "complex_t<double>",
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
    that it is accumulated in. `compute` is "native", or the reduced precision that the caller allows.
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

    @property
    def accumulator(self) -> str:
        """The dtype of C."""
        return DTYPES[self.dtype].accumulator


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
        return self.refuses(call, params)


def options(kernel: Kernel, dtype: str, op_a: Op, op_b: Op, params: Params) -> tuple[str, ...]:
    """What the compiler is told of a variant."""
    macros = {
        "OOC_STORED": C_TYPES[dtype],
        "OOC_ACCUMULATED": C_TYPES[DTYPES[dtype].accumulator],
        "OOC_OP_A": OP_CODES[op_a],
        "OOC_OP_B": OP_CODES[op_b],
        **kernel.macros(dtype, op_a, op_b),
        **params,
    }
    return tuple(f"-D{macro}={value}" for macro, value in macros.items())


def names() -> tuple[str, ...]:
    """The rungs, from the bottom."""
    return tuple(dict.fromkeys(kernel.name for kernel in LADDER))


def choose(name: str, call: Call, wanted: Params | None = None) -> tuple[Kernel, Params]:
    """The entry of a rung for a call, and its parameters: the entry that has the parameters wanted if it can do the call,
    else the first that can, with its default ones. Raises `InputError` with the reasons if none can."""
    entries = [kernel for kernel in LADDER if kernel.name == name]
    candidates = [(kernel, wanted) for kernel in entries if wanted is not None and wanted in kernel.variants]
    reasons: list[str] = []
    for kernel, params in (*candidates, *((kernel, kernel.variants[0]) for kernel in entries)):
        refusal = kernel.refusal(call, params)
        if refusal is None:
            return kernel, params
        reasons.append(refusal)
    raise InputError(f"kernel {name} cannot do this product: {'; or '.join(dict.fromkeys(reasons))}")


def check_plan(name: str, plan: Plan, device: Device = H200) -> None:
    """Raise `InputError` if a rung cannot do the steps of a plan: those of whole tiles and panels, and of the last ones.
    What is no rung, such as cuBLAS, can do any. The device is an H200 where none is known."""
    if name not in names():
        return
    problem, tile = plan.problem, plan.tile
    extents = ((problem.m, tile.w), (problem.n, tile.h), (problem.depth, tile.r))
    sizes = [{min(extent, nominal), extent % nominal or nominal} for extent, nominal in extents]
    for m, n, k in product(*sizes):
        lda, ldb = (m if problem.trans_a.swaps else k), (k if problem.trans_b.swaps else n)
        shape = problem.a_dtype, problem.trans_a, problem.trans_b, m, n, k
        if k:
            choose(name, Call(*shape, 1.0, 0, lda, 0, ldb, 1.0, 0, n, problem.compute, device))


def _blocks(extent: int, tile: int) -> int:
    return -(-extent // tile)


def _by_tiles(rows: str, cols: str, threads: Callable[[Params], int]) -> Callable[[Call, Params], Launch]:
    """A block a tile of C, counted along one dimension; rows and columns of a tile are named parameters."""

    def launch(call: Call, params: Params) -> Launch:
        tiles = _blocks(call.m, params[rows]) * _blocks(call.n, params[cols])
        return Launch((tiles, 1, 1), (threads(params), 1, 1))

    return launch


def _tile_model(
    rows: str, cols: str, depth: str, reads: Callable[[Params], tuple[Callable[[int], int], ...]]
) -> Callable[[Call, Params], Access]:
    """Of a kernel that copies parts of A (rows x depth) and B (depth x cols) to shared memory, stored as they lie; `reads`
    are its accesses to it, writes along the columns of a transposed part are added."""

    def model(call: Call, params: Params) -> Access:
        stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
        r, c, d = params[rows], params[cols], params[depth]
        loaded = tiles_sectors(call.m, call.n, call.k, stored, r, c)
        old, new = stores(call.m, call.n, accumulated, reads=call.beta != 0)
        writes: list[Callable[[int], int]] = []
        if call.op_a.swaps:
            writes.append(lambda lane: lane % r * (d + 1) + lane // r)
        if call.op_b.swaps:
            writes.append(lambda lane: lane % d * (c + 1) + lane // d)
        return Access(loaded + old, new, conflicts(accumulated, *reads(params), *writes))

    return model


def _naive_model(call: Call, params: Params) -> Access:
    stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
    loaded = warps_sectors(call.m, call.n, call.k, stored, params["BLOCK_X"])
    old, new = stores(call.m, call.n, accumulated, reads=call.beta != 0)
    return Access(loaded + old, new)


def _liang_opt_model(call: Call, params: Params) -> Access:
    """A is shared by the block, B is read by each thread for itself, once for W rows."""
    return _tile_model("W", "H", "R", lambda p: (lambda lane: 0,))(replace(call, op_b=Op.N), params)


def _single_block_model(call: Call, params: Params) -> Access:
    stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
    loaded = tiles_sectors(call.m, call.n, call.k, stored, max(1, call.m), max(1, call.n))
    old, new = stores(call.m, call.n, accumulated, reads=call.beta != 0)
    n, k = max(1, call.n), call.k
    return Access(
        loaded + old, new, conflicts(accumulated, lambda lane: lane // n * k, lambda lane: lane % n)
    )


def _naive(call: Call, params: Params) -> Launch:
    x, y = params["BLOCK_X"], params["BLOCK_Y"]
    return Launch((_blocks(call.n, x), _blocks(call.m, y), 1), (x, y, 1))


def _naive_refuses(call: Call, params: Params) -> str | None:
    most = 65535 * params["BLOCK_Y"]
    return f"its grid has at most {most} rows and C has {call.m}: use naive_grid" if call.m > most else None


def _cover(call: Call, params: Params) -> Iterator[Call]:
    """Products of submatrices that cover C."""
    stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
    for i in range(0, call.m, params["COVER_M"]):
        for j in range(0, call.n, params["COVER_N"]):
            yield replace(
                call,
                m=min(params["COVER_M"], call.m - i),
                n=min(params["COVER_N"], call.n - j),
                a=call.a + i * (1 if call.op_a.swaps else call.lda) * stored,
                b=call.b + j * (call.ldb if call.op_b.swaps else 1) * stored,
                c=call.c + (i * call.ldc + j) * accumulated,
            )


def _single_block_bytes(call: Call) -> int:
    return (call.m + call.n) * call.k * DTYPES[call.accumulator].itemsize


def _single_block(call: Call, params: Params) -> Launch:
    return Launch((1, 1, 1), (params["THREADS"], 1, 1), _single_block_bytes(call))


def _single_block_refuses(call: Call, params: Params) -> str | None:
    needed, most = _single_block_bytes(call), call.device.shared_bytes
    if needed <= most:
        return None
    return (
        f"it holds op(A) {call.m} x {call.k} and op(B) {call.k} x {call.n}, {needed} bytes, in one block's shared "
        f"memory, which is {most}: pass a --tile such as 64x64x64"
    )


_ALL = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")

LADDER: tuple[Kernel, ...] = (
    Kernel(
        name="naive",
        source="naive",
        dtypes=_ALL,
        variants=tuple({"BLOCK_X": x, "BLOCK_Y": y} for x, y in ((32, 8), (8, 8), (16, 16), (32, 32))),
        launch=_naive,
        refuses=_naive_refuses,
        model=_naive_model,
    ),
    Kernel(
        name="naive_grid",
        source="naive_grid",
        dtypes=_ALL,
        variants=({"COVER_M": 32768, "COVER_N": 32768, "BLOCK_X": 32, "BLOCK_Y": 8},),
        launch=_naive,
        parts=_cover,
        model=_naive_model,
    ),
    Kernel(
        name="single_block",
        source="single_block",
        dtypes=_ALL,
        variants=({"THREADS": 1024}, {"THREADS": 256}),
        launch=_single_block,
        refuses=_single_block_refuses,
        model=_single_block_model,
    ),
    Kernel(
        name="tiled",
        source="tiled",
        dtypes=_ALL,
        variants=({"TILE": 16}, {"TILE": 8}, {"TILE": 32}),
        launch=_by_tiles("TILE", "TILE", lambda p: p["TILE"] ** 2),
        model=_tile_model(
            "TILE",
            "TILE",
            "TILE",
            lambda p: (lambda lane: lane // p["TILE"] * p["TILE"], lambda lane: lane % p["TILE"]),
        ),
    ),
    Kernel(
        name="register",
        source="register",
        entry="register_kernel",
        dtypes=_ALL,
        variants=tuple({"TILE": 32, "RESULTS": results} for results in (8, 1, 2, 4, 16, 32)),
        launch=_by_tiles("TILE", "TILE", lambda p: p["TILE"] ** 2 // p["RESULTS"]),
        model=_tile_model("TILE", "TILE", "TILE", lambda p: (lambda lane: lane,)),
    ),
    Kernel(
        name="liang_normal",
        source="liang_normal",
        dtypes=_ALL,
        variants=({"W": 32, "H": 64, "R": 16, "THREADS": 512},),
        launch=_by_tiles("W", "H", lambda p: p["THREADS"]),
        model=_tile_model("W", "H", "R", lambda p: (lambda lane: lane,)),
    ),
    Kernel(
        name="liang_opt",
        source="liang_opt",
        dtypes=_ALL,
        variants=({"W": 16, "H": 64, "R": 16},),
        launch=_by_tiles("W", "H", lambda p: p["H"]),
        model=_liang_opt_model,
    ),
    # simt, tensor: entries are added here.
)
