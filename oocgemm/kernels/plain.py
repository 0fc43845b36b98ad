"""Kernels for study, from one thread per element to register tiling. Each shows one idea.

They run for every dtype on every device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from oocgemm.kernels.access import Access, conflicts, stores, tiles_sectors, warps_sectors
from oocgemm.kernels.spec import Call, Kernel, Launch, Params, blocks
from oocgemm.planning import DTYPES, Op


def _by_tiles(rows: str, cols: str, threads: Callable[[Params], int]) -> Callable[[Call, Params], Launch]:
    """Return a function that computes the launch of a kernel from a call and its parameters.

    A thread block computes `params[rows]` x `params[cols]` elements of C. `threads` computes its threads.
    """

    def launch(call: Call, params: Params) -> Launch:
        tiles = blocks(call.m, params[rows]) * blocks(call.n, params[cols])
        return Launch((tiles, 1, 1), (threads(params), 1, 1))

    return launch


def _tile_model(
    rows: str, cols: str, depth: str, reads: Callable[[Params], tuple[Callable[[int], int], ...]]
) -> Callable[[Call, Params], Access]:
    """Return a function that predicts the memory accesses of a kernel that tiles A and B in shared memory.

    Each thread block copies rows x depth elements of op(A) and depth x cols elements of op(B) at a time.

    Args:
        rows, cols, depth: the names of the kernel's parameters that have these extents.
        reads: returns, for the kernel's parameters, the patterns in which a warp reads shared memory (see
            `conflicts`).
    """

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
    """Predict the memory accesses of liang_opt.

    Only A is copied to shared memory, where all threads of a warp read the same element at a time. Each
    thread reads its column of B from device memory.
    """
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
    return Launch((blocks(call.n, x), blocks(call.m, y), 1), (x, y, 1))


def _naive_refuses(call: Call, params: Params) -> str | None:
    limit = 65535 * params["BLOCK_Y"]
    if call.m <= limit:
        return None
    return f"its grid covers at most {limit} rows, but C has {call.m}: use naive_grid"


def _cover(call: Call, params: Params) -> Iterator[Call]:
    """Split a product into products for COVER_M x COVER_N elements of C, so that one grid can cover each."""
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
)
