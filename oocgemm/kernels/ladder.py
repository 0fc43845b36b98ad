"""The ladder: oocgemm's own GEMM kernels, simplest first, and the choice of one for a product.

This module needs no GPU and does not import cupy, so that plans and tests can list the kernels on any
machine. To add a kernel, add its CUDA source to `kernels/plain` or `kernels/fast`, and one `Kernel` to
`PLAIN` or `FAST`.

The kernels of `PLAIN` are for study, from one thread per element to register tiling. Each shows one idea.
They run for every dtype on every device.

The kernels of `FAST` are for speed: `--kernel simt` uses ordinary multiply-adds, `--kernel tensor` the tensor
cores. Several have the name `tensor`: they use different instructions, and need different alignments of A and
B. `choose` takes the first one that accepts a product. The last one for each dtype and precision accepts
every product, unless its grid would need 2^31 thread blocks or more. The CUDA sources explain the parameters.
On an H200, a kernel's first set of parameters (`variants`) was the fastest for most shapes, and each other
set for some.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from oocgemm.errors import InputError
from oocgemm.kernels import RUNGS
from oocgemm.kernels.spec import (
    H200,
    SECTOR,
    Access,
    Call,
    Device,
    Kernel,
    Launch,
    Params,
    TensorMap,
    conflicts,
    tiles_sectors,
    warps_sectors,
)
from oocgemm.planning import DTYPES, Op, Plan
from oocgemm.planning.tiling import ceil_div


def _tiled(
    rows: str,
    cols: str,
    threads: Callable[[Params], int],
    shared: Callable[[Call, Params], int] = lambda call, params: 0,
) -> Callable[[Call, Params], Launch]:
    """Return the `launch` of a kernel whose blocks compute `params[rows]` x `params[cols]` elements of C.

    `threads` and `shared` compute the threads of a block, and its bytes of shared memory.
    """

    def launch(call: Call, params: Params) -> Launch:
        tiles = ceil_div(call.m, params[rows]) * ceil_div(call.n, params[cols])
        return Launch((tiles, 1, 1), (threads(params), 1, 1), shared(call, params))

    return launch


def _accesses(call: Call, loaded: int, conflicting: int = 0) -> Access:
    """Return the memory accesses of a kernel that loads `loaded` sectors of A and B, and stores all of C."""
    sectors = call.m * ceil_div(call.n * DTYPES[call.accumulator].itemsize, SECTOR)
    return Access(loaded + (sectors if call.beta != 0 else 0), sectors, conflicting)


def _tile_model(
    rows: str, cols: str, depth: str, reads: Callable[[Params], tuple[Callable[[int], int], ...]]
) -> Callable[[Call, Params], Access]:
    """Return a function that predicts the memory accesses of a kernel that tiles A and B in shared memory.

    `rows`, `cols` and `depth` are names of parameters. Each thread block copies rows x depth elements of
    op(A) and depth x cols elements of op(B) at a time. `reads` takes the parameters, and returns the patterns
    in which a warp reads shared memory (see `conflicts`).
    """

    def model(call: Call, params: Params) -> Access:
        stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
        r, c, d = params[rows], params[cols], params[depth]
        writes: list[Callable[[int], int]] = []
        if call.op_a.swaps:
            writes.append(lambda lane: lane % r * (d + 1) + lane // r)
        if call.op_b.swaps:
            writes.append(lambda lane: lane % d * (c + 1) + lane // d)
        loaded = tiles_sectors(call.m, call.n, call.k, stored, r, c)
        return _accesses(call, loaded, conflicts(accumulated, *reads(params), *writes))

    return model


def _naive_model(call: Call, params: Params) -> Access:
    itemsize = DTYPES[call.dtype].itemsize
    return _accesses(call, warps_sectors(call.m, call.n, call.k, itemsize, params["BLOCK_X"]))


def _liang_opt_model(call: Call, params: Params) -> Access:
    """Predict the memory accesses of liang_opt.

    Only A is copied to shared memory, where all threads of a warp read the same element at a time. Each
    thread reads its column of B from device memory.
    """
    return _tile_model("W", "H", "R", lambda p: (lambda lane: 0,))(replace(call, op_b=Op.N), params)


def _single_block_model(call: Call, params: Params) -> Access:
    stored, accumulated = (DTYPES[name].itemsize for name in (call.dtype, call.accumulator))
    n, k = max(1, call.n), call.k
    loaded = tiles_sectors(call.m, call.n, k, stored, max(1, call.m), n)
    return _accesses(call, loaded, conflicts(accumulated, lambda lane: lane // n * k, lambda lane: lane % n))


def _naive(call: Call, params: Params) -> Launch:
    x, y = params["BLOCK_X"], params["BLOCK_Y"]
    return Launch((ceil_div(call.n, x), ceil_div(call.m, y), 1), (x, y, 1))


def _naive_refuses(call: Call, params: Params) -> str | None:
    limit = 65535 * params["BLOCK_Y"]
    if call.m <= limit:
        return None
    return f"its grid covers at most {limit} rows, but C has {call.m}: use naive_grid"


def _cover(call: Call, params: Params) -> Iterator[Call]:
    """Yield the products for blocks of COVER_M x COVER_N elements of C, each of which one grid can cover."""
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
    needed, limit = _single_block_bytes(call), call.device.shared_bytes
    if needed <= limit:
        return None
    return (
        f"it stores op(A) {call.m} x {call.k} and op(B) {call.k} x {call.n}, {needed} bytes, in the shared "
        f"memory of one block, {limit} bytes: pass a smaller --tile, such as 64x64x64"
    )


_ALL = ("float32", "float64", "float16", "bfloat16", "int8", "complex64", "complex128")

PLAIN: tuple[Kernel, ...] = (
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
        launch=_tiled("TILE", "TILE", lambda p: p["TILE"] ** 2),
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
        launch=_tiled("TILE", "TILE", lambda p: p["TILE"] ** 2 // p["RESULTS"]),
        model=_tile_model("TILE", "TILE", "TILE", lambda p: (lambda lane: lane,)),
    ),
    Kernel(
        name="liang_normal",
        source="liang_normal",
        dtypes=_ALL,
        variants=({"W": 32, "H": 64, "R": 16, "THREADS": 512},),
        launch=_tiled("W", "H", lambda p: p["THREADS"]),
        model=_tile_model("W", "H", "R", lambda p: (lambda lane: lane,)),
    ),
    Kernel(
        name="liang_opt",
        source="liang_opt",
        dtypes=_ALL,
        variants=({"W": 16, "H": 64, "R": 16},),
        launch=_tiled("W", "H", lambda p: p["H"]),
        model=_liang_opt_model,
    ),
)


_FORMATS = {"float32": "tf32", "float16": "f16", "bfloat16": "bf16"}
# A CUDA grid has fewer thread blocks than this along x. Kernels that use TMA need m, n and k below this.
_LIMIT = 2**31


def _format(dtype: str, op_a: Op, op_b: Op) -> Mapping[str, object]:
    return {"OOC_FORMAT": _FORMATS[dtype]}


def _too_many(launch: Callable[[Call, Params], Launch]) -> Callable[[Call, Params], str | None]:
    def refuses(call: Call, params: Params) -> str | None:
        tiles = launch(call, params).grid[0]
        return f"its grid has at most {_LIMIT - 1} blocks, but C needs {tiles}" if tiles >= _LIMIT else None

    return refuses


# --- simt.cu: ordinary multiply-adds ------------------------------------------------------------------------


def _simt_bytes(call: Call, p: Params) -> int:
    return p["STAGES"] * p["BLOCK_K"] * ((p["BLOCK_M"] + p["BLOCK_N"]) * DTYPES[call.dtype].itemsize + 32)


_simt = _tiled(
    "BLOCK_M",
    "BLOCK_N",
    lambda p: p["BLOCK_M"] // p["THREAD_M"] * (p["BLOCK_N"] // p["THREAD_N"]),
    _simt_bytes,
)


def _simt_params(block: tuple[int, int, int], thread: tuple[int, int], stages: int, resident: int) -> Params:
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "THREAD_M", "THREAD_N", "LANES_M", "STAGES", "GROUP", "RESIDENT"
    return dict(zip(names, (*block, *thread, 8, stages, 16, resident), strict=True))


# --- tensor_f64.cu: float64 tensor cores --------------------------------------------------------------------

_f64 = _tiled(
    "BLOCK_M",
    "BLOCK_N",
    lambda p: 32 * p["BLOCK_M"] * p["BLOCK_N"] // (p["WARP_X"] * p["WARP_Y"]),
    lambda call, p: p["STAGES"] * p["BLOCK_K"] * (p["BLOCK_M"] + p["BLOCK_N"]) * 8,
)


def _f64_params(block: tuple[int, int], mma_k: int, stages: int, resident: int) -> Params:
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "WARP_X", "WARP_Y", "MMA_K", "STAGES", "GROUP", "RESIDENT"
    return dict(zip(names, (*block, 16, 64, 32, mma_k, stages, 16, resident), strict=True))


# --- tensor_wgmma.cu: tensor cores by wgmma, the instruction of sm_90 ---------------------------------------


def _swaps(call: Call) -> bool:
    """Return whether tensor_wgmma computes C^T = op(B)^T op(A)^T instead of C.

    For tf32, wgmma needs a second operand that is contiguous along k: op(A)^T, if op(B) is contiguous along
    n.
    """
    return call.dtype == "float32" and not call.op_b.swaps


def _wgmma_tile(p: Params) -> tuple[int, int]:
    """Return the rows and columns of C that one thread block computes; those of C^T if `_swaps` is True."""
    return 64 * p["M_BLOCKS"] * p["TEAM"], p["MMA_N"]


def _wgmma(call: Call, p: Params) -> Launch:
    x, y = _wgmma_tile(p)
    rows, cols = (call.n, call.m) if _swaps(call) else (call.m, call.n)
    tiles = ceil_div(rows, x * p["CLUSTER"]) * ceil_div(cols, y)
    clusters = max(1, min(call.device.processors // p["CLUSTER"], tiles))
    # Bytes: per stage, a part of each operand and two 8-byte barriers; then two barriers; 1024 to align.
    shared = p["STAGES"] * ((x + y) * 128 + 16) + 16 + 1024
    return Launch((clusters * p["CLUSTER"], 1, 1), (384, 1, 1), shared)


def _tma_refuses(call: Call) -> str | None:
    if not all(0 < extent < _LIMIT for extent in (call.m, call.n, call.k)):
        return f"TMA takes extents from 1 to {_LIMIT - 1}"
    if _alignment(call) % 16:
        return "TMA requires that each stored row of A and B begins at a multiple of 16 bytes"
    return None


def _maps(call: Call, dtype: str, rows_a: int, rows_b: int) -> tuple[TensorMap, TensorMap]:
    """Describe A and B for copies of `rows_a` rows of op(A), or `rows_b` columns of op(B), of 128 bytes each.

    Elements that are not contiguous along k are copied in squares of 128 bytes instead.
    """
    item = DTYPES[call.dtype].itemsize

    def described(address: int, ld: int, k_major: bool, extent: int, rows: int) -> TensorMap:
        extents = (call.k, extent) if k_major else (extent, call.k)
        box = 128 // item, rows if k_major else 128 // item
        return TensorMap(dtype, address, extents, (ld * item,), box, 128)

    return (
        described(call.a, call.lda, not call.op_a.swaps, call.m, rows_a),
        described(call.b, call.ldb, call.op_b.swaps, call.n, rows_b),
    )


def _wgmma_refuses(call: Call, p: Params) -> str | None:
    if call.dtype == "float32" and call.op_a.swaps and not call.op_b.swaps:
        return "wgmma takes no tf32 operands with A transposed and B not transposed"
    return _tma_refuses(call)


def _wgmma_maps(call: Call, p: Params) -> tuple[TensorMap, TensorMap]:
    x, y = _wgmma_tile(p)
    # All thread blocks of a cluster need the same `y` rows of one operand, and each copies an equal part.
    y //= p["CLUSTER"]
    dtype = "tf32" if call.dtype == "float32" else call.dtype  # TMA rounds to tf32 while it copies
    rows_a, rows_b = (y, x) if _swaps(call) else (x, y)
    return _maps(call, dtype, rows_a, rows_b)


def _wgmma_params(
    mma_n: int, m_blocks: int, team: int, stages: int, cluster: int, group: int, reduce: int
) -> Params:
    names = "MMA_N", "M_BLOCKS", "TEAM", "STAGES", "CLUSTER", "GROUP", "REDUCE", "PREFETCH"
    return dict(zip(names, (mma_n, m_blocks, team, stages, cluster, group, reduce, 1), strict=True))


# --- tensor_f64_tma.cu: float64 tensor cores, operands copied by TMA ----------------------------------------


def _f64_tma(call: Call, p: Params) -> Launch:
    tiles = ceil_div(call.m, p["BLOCK_M"] * p["CLUSTER"]) * ceil_div(call.n, p["BLOCK_N"])
    clusters = max(1, min(call.device.processors // p["CLUSTER"], tiles))
    shared = 2 * p["STAGES"] * ((p["BLOCK_M"] + p["BLOCK_N"]) * 128 + 16) + 16 + 1024
    return Launch((clusters * p["CLUSTER"], 1, 1), (384, 1, 1), shared)


def _f64_tma_refuses(call: Call, p: Params) -> str | None:
    if call.op_a.swaps and not call.op_b.swaps:
        return "with A transposed and B not, it needs more registers than a thread has: use tensor_f64"
    return _tma_refuses(call)


def _f64_tma_maps(call: Call, p: Params) -> tuple[TensorMap, TensorMap]:
    return _maps(call, "float64", p["BLOCK_M"], p["BLOCK_N"] // p["CLUSTER"])


def _f64_tma_params(cluster: int, group: int) -> Params:
    names = "BLOCK_M", "BLOCK_N", "WARP_X", "WARP_Y", "STAGES", "CLUSTER", "GROUP"
    return dict(zip(names, (64, 128, 64, 32, 4, cluster, group), strict=True))


# --- tensor_mma.cu: tensor cores by mma.sync ----------------------------------------------------------------

_mma = _tiled(
    "TILE_M",
    "TILE_N",
    lambda p: 32 * p["WARPS"],
    lambda call, p: p["STAGES"] * (p["TILE_M"] + p["TILE_N"]) * 128,
)


def _alignment(call: Call) -> int:
    """Return the bitwise or of the addresses of A and B and of their row pitches in bytes.

    A power of two divides the result if and only if it divides all of them.
    """
    item = DTYPES[call.dtype].itemsize
    return call.a | call.b | call.lda * item | call.ldb * item


def _mma_refuses(call: Call, p: Params) -> str | None:
    if _alignment(call) % p["COPY"]:
        return f"it copies {p['COPY']} bytes at once, but not all rows of A and B begin at a multiple of that"
    return _too_many(_mma)(call, p)


def _mma_params(tile_n: int, warps: int, copy: int, resident: int) -> Params:
    names = "TILE_M", "TILE_N", "WARPS", "WARPS_M", "STAGES", "COPY", "GROUP", "RESIDENT"
    return dict(zip(names, (128, tile_n, warps, 2, 3, copy, 8, resident), strict=True))


def _mma_entry(dtypes: tuple[str, ...], compute: str, *variants: Params) -> Kernel:
    """Return a `Kernel` with the source tensor_mma.cu.

    The kernel copies COPY bytes at once, a parameter to which A and B must be aligned. So `FAST` has several
    of these kernels, with smaller and smaller COPY.
    """
    return Kernel(
        name="tensor",
        source="tensor_mma",
        dtypes=dtypes,
        compute=(compute,),
        variants=variants,
        launch=_mma,
        refuses=_mma_refuses,
        macros=_format,
        instruction="HMMA",
    )


_SHORT = ("float16", "bfloat16")

FAST: tuple[Kernel, ...] = (
    Kernel(
        name="simt",
        source="simt",
        dtypes=("float32",),
        variants=(
            _simt_params((128, 256, 8), (8, 16), 5, 1),
            # Two thread blocks run on a multiprocessor at a time: one computes while the other starts or
            # ends.
            _simt_params((128, 128, 8), (8, 16), 5, 2),
        ),
        launch=_simt,
        refuses=_too_many(_simt),
        instruction="FFMA",
    ),
    Kernel(
        name="simt",
        source="simt",
        dtypes=("float64",),
        variants=(_simt_params((64, 64, 8), (4, 8), 4, 1),),
        launch=_simt,
        refuses=_too_many(_simt),
        instruction="DFMA",
    ),
    Kernel(
        name="tensor",
        source="tensor_f64_tma",
        dtypes=("float64",),
        archs=("sm_90a",),
        variants=(_f64_tma_params(2, 8),),
        launch=_f64_tma,
        refuses=_f64_tma_refuses,
        maps=_f64_tma_maps,
        instruction="DMMA",
    ),
    Kernel(
        name="tensor",
        source="tensor_f64",
        dtypes=("float64",),
        archs=("sm_90a",),
        variants=(
            _f64_params((64, 128), 8, 4, 2),
            # These larger tiles read A and B less often. They are the fastest if k is at least about 16384.
            _f64_params((128, 128), 16, 4, 1),
        ),
        launch=_f64,
        refuses=_too_many(_f64),
        instruction="DMMA",
    ),
    Kernel(
        name="tensor",
        source="tensor_f64",
        dtypes=("float64",),
        # The larger float64 instructions (MMA_K of 8 or 16) are used on sm_90a only. sm_80 lacks them.
        archs=("sm_80", "sm_100"),
        variants=(_f64_params((64, 128), 4, 3, 2), _f64_params((128, 128), 4, 4, 1)),
        launch=_f64,
        refuses=_too_many(_f64),
        instruction="DMMA",
    ),
    Kernel(
        name="tensor",
        source="tensor_wgmma",
        dtypes=_SHORT,
        archs=("sm_90a",),
        variants=(
            _wgmma_params(256, 1, 2, 4, 2, 8, 1024),
            # The fastest parameters if k is small: each of two warpgroups computes its own block of C, and
            # can write this block while the other warpgroup multiplies.
            _wgmma_params(128, 2, 1, 7, 2, 8, 1),
            _wgmma_params(256, 1, 1, 5, 2, 8, 1024),
        ),
        launch=_wgmma,
        refuses=_wgmma_refuses,
        macros=_format,
        maps=_wgmma_maps,
        instruction="HGMMA",
    ),
    Kernel(
        name="tensor",
        source="tensor_wgmma",
        dtypes=("float32",),
        compute=("tf32",),
        archs=("sm_90a",),
        variants=(_wgmma_params(256, 1, 2, 4, 1, 4, 1),),
        launch=_wgmma,
        refuses=_wgmma_refuses,
        macros=_format,
        maps=_wgmma_maps,
        instruction="HGMMA",
    ),
    _mma_entry(_SHORT, "native", _mma_params(64, 4, 16, 2), _mma_params(128, 8, 16, 1)),
    _mma_entry(_SHORT, "native", _mma_params(128, 8, 4, 1)),
    _mma_entry(_SHORT, "native", _mma_params(128, 8, 2, 1)),
    _mma_entry(("float32",), "tf32", _mma_params(64, 4, 16, 2), _mma_params(128, 8, 16, 1)),
    _mma_entry(("float32",), "tf32", _mma_params(128, 8, 4, 1)),
)


LADDER: tuple[Kernel, ...] = (*PLAIN, *FAST)


assert tuple(dict.fromkeys(kernel.name for kernel in LADDER)) == RUNGS, "a kernel's name is not in RUNGS"


def choose(name: str, call: Call, wanted: Params | None = None) -> tuple[Kernel, Params]:
    """Return a kernel named `name` that can run a call, and the parameters to run it with.

    If several kernels have this name, those that accept the parameters `wanted` are tried with these first.
    Then all are tried with their default parameters. Raises `InputError` if no kernel can run the call.
    """
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
    """Raise `InputError` if the kernel `name` cannot run all steps of a plan, also those at the edges of C.

    If `name` is not a kernel of the ladder, nothing is checked.
    """
    problem, tile = plan.problem, plan.tile
    if name not in RUNGS:
        return
    extents = ((problem.m, tile.m), (problem.n, tile.n), (problem.depth, tile.k))
    sizes = [{min(extent, nominal), extent % nominal or nominal} for extent, nominal in extents]
    for m, n, k in product(*sizes):
        lda, ldb = (m if problem.trans_a.swaps else k), (k if problem.trans_b.swaps else n)
        shape = problem.a_dtype, problem.trans_a, problem.trans_b, m, n, k
        if k:
            choose(name, Call(*shape, 1.0, 0, lda, 0, ldb, 1.0, 0, n, problem.compute, device))
