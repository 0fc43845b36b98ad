"""The kernel that finds elements above a threshold: as NumPy does, on the CPU and on a GPU."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oocgemm.backends.base import SEGMENTS, SELECTED
from oocgemm.errors import ExecutionError
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import threshold_launch, threshold_options
from oocgemm.planning import GemmProblem
from oocgemm.planning.device_memory import COUNTER_BYTES, SEGMENT_BYTES, found_layout
from oocgemm.planning.sinks import SELECTED as DTYPES
from oocgemm.planning.sinks import AtLeast
from oocgemm.stores.arrays import Rule, SparseMatrix
from tests.kernels.test_topk_kernel import ACCUMULATORS, GPU, scores
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.products import product_of
from tests.support.suite import slow

Array = NDArray[Any]
# Runs the kernel. The arguments are a problem, the elements of a strip, the row and the column of its first
# element, the scales, and the memory of a slot.
Run = Callable[[GemmProblem, Array, tuple[int, int], Array, Array], None]
# Nothing is found, some elements, nearly all: rows then have several segments.
THRESHOLDS = (100.0, 2.0, 0.5, -8.0)
SHAPES = ((5, 700), (3, 40), (9, 1))


def problem(accumulator: str, least: float, *, scaled: bool, absolute: bool) -> GemmProblem:
    dtypes = accumulator, accumulator, accumulator, DTYPES[accumulator]
    how: Any = {"scaled": scaled, "absolute": absolute, "excludes_self": True, "gram": "lower"}
    return product_of(1, 1, 1, *dtypes, sparse=True, threshold=least, **how)


def check(run: Run, accumulator: str) -> None:
    # The diagonal of C crosses the first strip, and lies right of the others.
    rng, at, n = np.random.default_rng(0), (650, 3), 750
    for shape in SHAPES:
        for least in THRESHOLDS:
            for scaled, absolute in ((False, False), (True, True)):
                given = problem(accumulator, least, scaled=scaled, absolute=absolute)
                element = SELECTED[given.c_dtype]
                sums = scores(rng, shape, accumulator)
                scales = rng.choice(np.array([0.125, 0.25, 0.75], element["score"]), n)
                room = found_layout(given, *shape)
                slot = np.zeros(room.end, np.uint8)
                run(given, sums, at, scales, slot)
                found, segments = slot[:COUNTER_BYTES].view(np.uint64)
                listed = slot[room.segments :][: int(segments) * SEGMENT_BYTES].view(SEGMENTS)
                elements = slot[room.elements :][: int(found) * element.itemsize].view(element)
                sparse = SparseMatrix("C", (n, n), element["score"], Rule(least, absolute, True), 1 << 30)
                sparse.put((at[0], at[0] + shape[0]), (at[1], at[1] + shape[1]), listed, elements)
                starts, columns, kept = sparse.csr()
                wide = sums.astype(element["score"])
                if scaled:
                    with np.errstate(invalid="ignore"):
                        wide *= scales[at[0] :][: shape[0], None] * scales[at[1] :][: shape[1]]
                    wide = np.clip(wide, -1, 1)
                wanted, every = np.zeros((n, n), bool), np.zeros((n, n), wide.dtype)
                block = tuple(slice(first, first + extent) for first, extent in zip(at, shape, strict=True))
                wanted[block], every[block] = (np.abs(wide) if absolute else wide) >= least, wide
                wanted = np.tril(wanted, -1)
                every = np.where(wanted, every, every.T)
                rows, expected = np.nonzero(wanted | wanted.T)
                np.testing.assert_array_equal(np.repeat(np.arange(n), np.diff(starts)), rows)
                np.testing.assert_array_equal(columns, expected)
                np.testing.assert_array_equal(kept, every[rows, expected])


def test_every_writer_learns_that_memory_is_full() -> None:
    sparse = SparseMatrix("C", (4, 4), np.dtype(np.float32), Rule(0.0, False, True), 1)
    block = np.ones((2, 2), np.float32)
    for _ in range(2):  # writers run at the same time, and the run reports any of their errors
        with pytest.raises(ExecutionError, match="pass a larger threshold"):
            sparse.write((2, 4), (0, 2), block)


def arguments(
    given: GemmProblem, sums: Array, at: tuple[int, int], pointers: tuple[int, int, int]
) -> tuple[Any, ...]:
    source, scales, slot = pointers
    room = found_layout(given, *sums.shape)
    to = slot, slot + room.segments, slot + room.elements
    assert isinstance(given.sink, AtLeast)
    numbers = *sums.shape, *at, given.sink.excludes_self
    pointer = ctypes.c_void_p
    return (
        *(pointer(source), *map(ctypes.c_longlong, numbers), ctypes.c_double(given.sink.threshold)),
        *(pointer(scales), pointer(scales), *map(pointer, to)),
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("accumulator", ["float32", *slow(("float64",), ("int32",))])
def test_the_kernel_finds_what_numpy_does(accumulator: str) -> None:
    def run(given: GemmProblem, sums: Array, at: tuple[int, int], scales: Array, slot: Array) -> None:
        options = threshold_options(given)
        pointers = sums.ctypes.data, scales.ctypes.data, slot.ctypes.data
        kernel = launcher("threshold", "threshold", options)
        kernel((1, 1, 1), (64, 1, 1), *arguments(given, sums, at, pointers))

    check(run, accumulator)


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernel_compiles_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    cubin = tmp_path / "code.cubin"
    for accumulator in ACCUMULATORS:
        options = threshold_options(problem(accumulator, 1, scaled=True, absolute=True))
        cubin.write_bytes(compiled(Nvrtc(), "threshold", arch, options))
        taken = resources(cubin, "threshold")
        assert (taken.local, taken.stack) == (0, 0), f"{options} for {arch}: {taken}"


def on_gpu(given: GemmProblem, sums: Array, at: tuple[int, int], scales: Array, slot: Array) -> None:
    import cupy

    from oocgemm.backends.cuda.launch import Kernels

    there = [cupy.asarray(x.reshape(-1).view(np.uint8)) for x in (sums, scales, slot)]
    source, factors, to = (x.data.ptr for x in there)
    kernel = Kernels(0).plain("threshold", "threshold", threshold_options(given))
    kernel(threshold_launch(len(sums)), *arguments(given, sums, at, (source, factors, to)))
    cupy.cuda.get_current_stream().synchronize()
    slot[...] = there[2].get()


@pytest.mark.parametrize("accumulator", [pytest.param(name, marks=GPU) for name in ACCUMULATORS])
def test_the_kernel_finds_what_numpy_does_on_a_gpu(accumulator: str) -> None:
    check(on_gpu, accumulator)
