"""The kernel that selects the largest elements of rows: as a sort does, on the CPU and on a GPU."""

import ctypes
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oocgemm.backends.base import SELECTED, Factors, numpy_dtype
from oocgemm.backends.host.selection import select
from oocgemm.kernels import launches
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import MAX_NEAR, columns_launch, topk_launch, topk_options
from oocgemm.kernels.spec import Launch
from oocgemm.planning import GemmProblem
from oocgemm.planning.device_memory import NONE
from oocgemm.planning.sinks import SELECTED as DTYPES
from oocgemm.planning.sinks import Largest, Step
from tests.support.backends_here import CUDA
from tests.support.native import launchers
from tests.support.nvrtc import Nvrtc, resources
from tests.support.products import product_of
from tests.support.suite import slow

Array = NDArray[Any]
# Runs a kernel. The arguments are a problem, the elements of a tile, the row and the column of its first
# element, the scales, and the selected elements.
Run = Callable[[GemmProblem, Array, tuple[int, int], Array, Array], None]
# How scores are computed: as they are, as cosines, as distances times -1.
RULES = ("", "cosine", "nearness")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(60, method="thread"),
]
ACCUMULATORS = ("float32", "float64", "int32")


def problem(accumulator: str, topk: int, *, rule: str = "", excludes_self: bool = True) -> GemmProblem:
    dtypes = accumulator, accumulator, accumulator, DTYPES[accumulator]
    how: Any = {"scaled": rule == "cosine", "excludes_self": excludes_self}
    if rule == "nearness":
        how["epilogue"] = (Step("distance", True, True, -1.0),)
    return product_of(1, 1, 1, *dtypes, topk=topk, **how)


def scored(wide: Array, u: Array, v: Array, rule: str) -> Array:
    """Return the scores of elements whose rows and columns have the factors u and v."""
    with np.errstate(invalid="ignore"):
        if rule == "cosine":
            return np.asarray(np.clip(wide * (u[:, None] * v), -1, 1))
        return np.asarray(np.minimum(2 * wide - (u[:, None] + v), 0)) if rule else wide


def excludes_self_of(given: GemmProblem) -> bool:
    assert isinstance(given.sink, Largest)
    return given.sink.excludes_self


def scores(rng: np.random.Generator, shape: tuple[int, int], accumulator: str) -> Array:
    """Draw elements with many ties. Floating-point ones include NaN, Inf, 0 and -0."""
    found = rng.integers(-9, 10, shape).astype(accumulator)
    if accumulator != "int32":
        special = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.5], accumulator), shape)
        found = np.where(rng.random(shape) < 0.2, special, found)
    return found


def ranked(rows: Array, own: Array | None, count: int) -> Array:
    """Return the selected elements of rows of scores, by a sort."""
    rows = rows + 0.0  # makes -0 equal to 0
    columns = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    left_out = np.zeros(rows.shape, bool) if own is None else columns == own[:, None]
    order = np.lexsort((columns, -rows, left_out))[:, :count]  # NaN comes last
    found = np.empty(order.shape, [("score", rows.dtype), ("index", np.int64)])
    found["score"], found["index"] = np.take_along_axis(rows, order, 1), order
    return found


def none(rows: int, given: GemmProblem) -> Array:
    """Return the selected elements of rows that have not been searched."""
    kept = np.empty((rows, given.sink.per_row), SELECTED[given.c_dtype])
    kept.view(np.uint8)[...] = NONE
    return kept


def check(run: Run, accumulator: str, topk: int, shape: tuple[int, int], cuts: list[int]) -> None:
    """Compare what `run` selects of rows with a sort. The columns are cut into tiles, visited backwards."""
    rng, top = np.random.default_rng(topk), 3
    score = SELECTED[DTYPES[accumulator]]["score"]
    for rule in RULES:
        for excludes_self in (False, True):
            given = problem(accumulator, topk, rule=rule, excludes_self=excludes_self)
            sums = scores(rng, shape, accumulator)
            scales = rng.choice(np.array([0.125, 0.25, 0.75], score), max(top + shape[0], shape[1]))
            kept = none(shape[0], given)
            bounds = [0, *cuts, shape[1]]
            for left, right in reversed(list(pairwise(bounds))):
                tile = np.ascontiguousarray(sums[:, left:right])
                run(given, tile, (top, left), scales, kept)
            wide, own = sums.astype(score), top + np.arange(shape[0])
            wide = scored(wide, scales[own], scales[: shape[1]], rule)
            expected = ranked(wide, own if excludes_self else None, topk)
            np.testing.assert_array_equal(kept["index"], expected["index"])
            np.testing.assert_array_equal(kept["score"], expected["score"])


def check_columns(
    run: Run, accumulator: str, topk: int, shape: tuple[int, int], cuts: list[int], columns: int
) -> None:
    """Compare what `run` selects of columns with a sort. The rows are cut into tiles, visited backwards."""
    rng, left = np.random.default_rng(topk), 3
    score = SELECTED[DTYPES[accumulator]]["score"]
    for rule in RULES:
        given = problem(accumulator, topk, rule=rule)
        sums = scores(rng, shape, accumulator)
        scales = rng.choice(np.array([0.125, 0.25, 0.75], score), max(left + shape[1], shape[0]))
        kept = none(columns, given)
        for top, bottom in reversed(list(pairwise([0, *cuts, shape[0]]))):
            run(given, sums[top:bottom], (top, left), scales, kept)
        wide = sums.astype(score)[:, :columns]
        wide = scored(wide, scales[: shape[0]], scales[left : left + columns], rule)
        expected = ranked(wide.T, None, topk)
        np.testing.assert_array_equal(kept["index"], expected["index"])
        np.testing.assert_array_equal(kept["score"], expected["score"])


def arguments(
    given: GemmProblem, tile: Array, at: tuple[int, int], pointers: tuple[int, int, int]
) -> tuple[Any, ...]:
    numbers = *tile.shape, *at, given.sink.per_row, excludes_self_of(given)
    source, scales, kept = map(ctypes.c_void_p, pointers)
    return source, *map(ctypes.c_longlong, numbers), scales, scales, kept


def of_columns(
    given: GemmProblem, tile: Array, at: tuple[int, int], columns: int, pointers: tuple[int, int, int]
) -> tuple[Any, ...]:
    numbers = *tile.shape, *at, columns, given.sink.per_row
    source, scales, kept = map(ctypes.c_void_p, pointers)
    return source, *map(ctypes.c_longlong, numbers), scales, scales, kept


def on_host(given: GemmProblem, tile: Array, at: tuple[int, int], scales: Array, kept: Array) -> None:
    nearness = given.sink.ranks_distances
    factors = Factors(scales, scales, nearness) if given.sink.scaled or nearness else None
    select(kept, tile, factors, at, excludes_self_of(given))


# The columns that are searched of strips of a shape, for several numbers of warps per block.
COLUMN_CASES = [(5, (600, 3), [300], 3, 2), (39, (40, 5), [8], 4, 2), (70, (90, 2), [20], 2, 1)]
# Many elements of a row, more than a warp reads at once; tiles that are narrower than `topk`; all of a row.
CASES = [(5, (6, 700), [300, 310]), (70, (3, 300), [20, 90]), (39, (5, 40), [8])]


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("case", [*CASES, (100, (60, 5000), [50])])
def test_numpy_selects_as_a_sort_does(accumulator: str, case: tuple[int, tuple[int, int], list[int]]) -> None:
    check(on_host, accumulator, *case)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("accumulator", ["float32", "int32", *slow(("float64",))])
@pytest.mark.parametrize("far", [False, True])
def test_the_kernel_selects_as_a_sort_does(
    accumulator: str, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if far:  # no element is in a buffer, which has as few elements as it may have
        monkeypatch.setattr(launches, "MAX_NEAR", 0)
        monkeypatch.setattr(launches, "FAR_ROOM", 64)

    def kernel(given: GemmProblem, entry: str) -> Callable[..., None]:
        options = *topk_options.__wrapped__(given), "-DDYNAMIC_SHARED=65536"
        return launchers("topk", ("topk", "topk_columns"), options)[entry]

    def run(given: GemmProblem, tile: Array, at: tuple[int, int], scales: Array, kept: Array) -> None:
        pointers = tile.ctypes.data, scales.ctypes.data, kept.ctypes.data
        kernel(given, "topk")((1, 1, 1), (64, 1, 1), *arguments(given, tile, at, pointers))

    for case in CASES:
        check(run, accumulator, *case)
    for topk, shape, cuts, columns, warps in COLUMN_CASES:

        def search(given: GemmProblem, tile: Array, at: tuple[int, int], scales: Array, kept: Array) -> None:
            pointers = tile.ctypes.data, scales.ctypes.data, kept.ctypes.data
            given_to = of_columns(given, tile, at, len(kept), pointers)
            kernel(given, "topk_columns")((1, 1, 1), (32 * warps, 1, 1), *given_to)  # noqa: B023

        check_columns(search, accumulator, topk, shape, cuts, columns)


@pytest.mark.parametrize(
    ("arch", "accumulators"),
    [
        ("sm_90a", ACCUMULATORS[-1:]),
        *slow(*((arch, ACCUMULATORS) for arch in ("sm_75", "sm_90a", "sm_100"))),
    ],
)
def test_the_kernel_compiles_without_spills(
    arch: str, accumulators: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    cubin = tmp_path / "code.cubin"
    for number, accumulator in enumerate(accumulators):
        for rule, topk in (("", 50), ("cosine", 50), ("nearness", 5000))[number % 2 :]:
            options = topk_options(problem(accumulator, topk, rule=rule))
            cubin.write_bytes(compiled(Nvrtc(), "topk", arch, options))
            for entry in ("topk", "topk_columns"):
                taken = resources(cubin, entry)
                assert (taken.local, taken.stack) == (0, 0), f"{entry} {options} for {arch}: {taken}"


def test_a_block_has_shared_memory_for_the_largest_selection() -> None:
    for accumulator in ACCUMULATORS:
        for topk in (1, 64, 65, MAX_NEAR):
            launch = topk_launch(problem(accumulator, topk), 1000)
            size = 16 if DTYPES[accumulator] == "void128" else 8
            assert (topk + 64) * size * launch.block[0] // 32 <= launch.shared <= 64 << 10
            launch = columns_launch(problem(accumulator, topk), 1000)
            warps = launch.block[0] // 32
            turned = (256 + 32 // warps) * size // 2 if warps > 1 else 0
            assert warps * ((topk + 64) * size + turned) <= launch.shared <= 64 << 10


def on_gpu(given: GemmProblem, tile: Array, at: tuple[int, int], scales: Array, kept: Array) -> None:
    launched(given, "topk", topk_launch(given, len(tile)), arguments, (tile, at), scales, kept)


def columns_on_gpu(given: GemmProblem, tile: Array, at: tuple[int, int], scales: Array, kept: Array) -> None:
    how = columns_launch(given, len(kept))
    launched(given, "topk_columns", how, of_columns, (tile, at, len(kept)), scales, kept)


def launched(
    given: GemmProblem,
    entry: str,
    how: Launch,
    values: Callable[..., tuple[Any, ...]],
    of: tuple[Any, ...],
    scales: Array,
    kept: Array,
) -> None:
    """Launch a kernel with `values` of the problem, `of`, and the addresses of copies of the arrays."""
    import cupy

    from oocgemm.backends.cuda.launch import Kernels

    there = [cupy.asarray(x.reshape(-1).view(np.uint8)) for x in (of[0], scales, kept)]
    pointers = tuple(x.data.ptr for x in there)
    Kernels(0).plain("topk", entry, topk_options(given))(how, *values(given, *of, pointers))
    cupy.cuda.get_current_stream().synchronize()
    kept.reshape(-1).view(np.uint8)[...] = there[2].get()


@pytest.mark.parametrize("accumulator", [pytest.param(name, marks=GPU) for name in ACCUMULATORS])
@pytest.mark.parametrize(
    "case",
    [*CASES, (50, (300, 9000), [4000]), (MAX_NEAR, (9, 6000), [50, 3000]), (5000, (40, 20000), [70, 9000])],
)
def test_the_kernel_selects_as_a_sort_does_on_a_gpu(
    accumulator: str, case: tuple[int, tuple[int, int], list[int]]
) -> None:
    assert numpy_dtype(accumulator).itemsize in (4, 8)
    check(on_gpu, accumulator, *case)


@pytest.mark.parametrize("accumulator", [pytest.param(name, marks=GPU) for name in ACCUMULATORS])
def test_the_kernel_selects_of_columns_as_a_sort_does_on_a_gpu(accumulator: str) -> None:
    cases = [*(case[:4] for case in COLUMN_CASES), (50, (9000, 300), [4000], 290)]
    for topk, shape, cuts, columns in [
        *cases,
        (MAX_NEAR, (6000, 9), [50, 3000], 9),
        (5000, (20000, 40), [70, 9000], 37),
    ]:
        check_columns(columns_on_gpu, accumulator, topk, shape, cuts, columns)
