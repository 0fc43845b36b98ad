"""Kernels for speed: `--kernel simt` uses ordinary multiply-adds, `--kernel tensor` the tensor cores.

Several `Kernel` objects have the name `tensor`: they use different instructions, and need different
alignments of A and B. `registry.choose` takes the first one in `FAST` that accepts a product. The last one
for each dtype and precision accepts every product, unless its grid would need 2^31 thread blocks or more.

The CUDA sources explain the parameters. On an H200, a kernel's first set of parameters (`variants`) was the
fastest for most shapes, and each other set for some.
"""

from collections.abc import Callable, Mapping

from oocgemm.kernels.spec import Call, Kernel, Launch, Params, TensorMap, blocks
from oocgemm.planning import DTYPES, Op

_FORMATS = {"float32": "tf32", "float16": "f16", "bfloat16": "bf16"}
# A CUDA grid has fewer thread blocks than this along x. Kernels that use TMA need m, n and k below this.
_LIMIT = 2**31


def _format(dtype: str, op_a: Op, op_b: Op) -> Mapping[str, object]:
    return {"OOC_FORMAT": _FORMATS[dtype]}


def _tiled(
    rows: str, cols: str, threads: Callable[[Params], int], shared: Callable[[Call, Params], int]
) -> Callable[[Call, Params], Launch]:
    """Return a function that computes the launch of a kernel from a call and its parameters.

    A thread block computes `params[rows]` x `params[cols]` elements of C. `threads` and `shared` compute its
    threads and its bytes of shared memory.
    """

    def launch(call: Call, params: Params) -> Launch:
        tiles = blocks(call.m, params[rows]) * blocks(call.n, params[cols])
        return Launch((tiles, 1, 1), (threads(params), 1, 1), shared(call, params))

    return launch


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

    For tf32, wgmma needs a second operand that is contiguous along k. If op(B) is contiguous along n, the
    kernel computes C^T, where op(A)^T is the second operand.
    """
    return call.dtype == "float32" and not call.op_b.swaps


def _wgmma_tile(p: Params) -> tuple[int, int]:
    """Return the rows and columns of C that one thread block computes; those of C^T if `_swaps` is True."""
    return 64 * p["M_BLOCKS"] * p["TEAM"], p["MMA_N"]


def _wgmma(call: Call, p: Params) -> Launch:
    x, y = _wgmma_tile(p)
    rows, cols = (call.n, call.m) if _swaps(call) else (call.m, call.n)
    tiles = blocks(rows, x * p["CLUSTER"]) * blocks(cols, y)
    clusters = max(1, min(call.device.processors // p["CLUSTER"], tiles))
    # Bytes: per stage, a part of each operand and two 8-byte barriers; then two barriers; 1024 to align.
    shared = p["STAGES"] * ((x + y) * 128 + 16) + 16 + 1024
    return Launch((clusters * p["CLUSTER"], 1, 1), (384, 1, 1), shared)


def _wgmma_refuses(call: Call, p: Params) -> str | None:
    if call.dtype == "float32" and call.op_a.swaps and not call.op_b.swaps:
        return "wgmma takes no tf32 operands with A transposed and B not transposed"
    if not all(0 < extent < _LIMIT for extent in (call.m, call.n, call.k)):
        return f"TMA takes extents from 1 to {_LIMIT - 1}"
    if _alignment(call) % 16:
        return "TMA requires that each stored row of A and B begins at a multiple of 16 bytes"
    return None


def _wgmma_maps(call: Call, p: Params) -> tuple[TensorMap, TensorMap]:
    x, y = _wgmma_tile(p)
    # All thread blocks of a cluster need the same `y` rows of one operand, and each copies an equal part.
    y //= p["CLUSTER"]
    item = DTYPES[call.dtype].itemsize
    dtype = "tf32" if call.dtype == "float32" else call.dtype  # TMA rounds to tf32 while it copies
    rows_a, rows_b = (y, x) if _swaps(call) else (x, y)

    def described(address: int, ld: int, k_major: bool, extent: int, rows: int) -> TensorMap:
        extents = (call.k, extent) if k_major else (extent, call.k)
        box = 128 // item, rows if k_major else 128 // item
        return TensorMap(dtype, address, extents, (ld * item,), box, 128)

    return (
        described(call.a, call.lda, not call.op_a.swaps, call.m, rows_a),
        described(call.b, call.ldb, call.op_b.swaps, call.n, rows_b),
    )


def _wgmma_params(
    mma_n: int, m_blocks: int, team: int, stages: int, cluster: int, group: int, reduce: int
) -> Params:
    names = "MMA_N", "M_BLOCKS", "TEAM", "STAGES", "CLUSTER", "GROUP", "REDUCE", "PREFETCH"
    return dict(zip(names, (mma_n, m_blocks, team, stages, cluster, group, reduce, 1), strict=True))


# --- tensor_f64_tma.cu: float64 tensor cores, operands copied by TMA ----------------------------------------


def _f64_tma(call: Call, p: Params) -> Launch:
    tiles = blocks(call.m, p["BLOCK_M"] * p["CLUSTER"]) * blocks(call.n, p["BLOCK_N"])
    clusters = max(1, min(call.device.processors // p["CLUSTER"], tiles))
    shared = 2 * p["STAGES"] * ((p["BLOCK_M"] + p["BLOCK_N"]) * 128 + 16) + 16 + 1024
    return Launch((clusters * p["CLUSTER"], 1, 1), (384, 1, 1), shared)


def _f64_tma_refuses(call: Call, p: Params) -> str | None:
    if call.op_a.swaps and not call.op_b.swaps:
        return "with A transposed and B not, it needs more registers than a thread has: use tensor_f64"
    if not all(0 < extent < _LIMIT for extent in (call.m, call.n, call.k)):
        return f"TMA takes extents from 1 to {_LIMIT - 1}"
    if _alignment(call) % 16:
        return "TMA requires that each stored row of A and B begins at a multiple of 16 bytes"
    return None


def _f64_tma_maps(call: Call, p: Params) -> tuple[TensorMap, TensorMap]:
    def described(address: int, ld: int, k_major: bool, extent: int, rows: int) -> TensorMap:
        extents = (call.k, extent) if k_major else (extent, call.k)
        return TensorMap("float64", address, extents, (ld * 8,), (16, rows if k_major else 16), 128)

    return (
        described(call.a, call.lda, not call.op_a.swaps, call.m, p["BLOCK_M"]),
        described(call.b, call.ldb, call.op_b.swaps, call.n, p["BLOCK_N"] // p["CLUSTER"]),
    )


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

    The parameter COPY is the number of bytes that it copies at once, to which A and B must be aligned. So
    `FAST` has several of these kernels, with smaller and smaller COPY.
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
