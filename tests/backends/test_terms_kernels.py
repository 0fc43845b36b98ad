"""The kernels combine the sums of several terms, and make the maps of panels, as NumPy does."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oocgemm.backends.base import SEGMENTS, SELECTED, numpy_dtype
from oocgemm.backends.host.finish import expand, reduce_rows, run_chain
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import (
    ChainNumbers,
    ElementNumbers,
    Elements,
    chain_grid,
    chain_options,
    expand_grid,
    expand_options,
    reduce_grid,
    reduce_options,
    threshold_options,
)
from oocgemm.planning import GemmProblem
from oocgemm.planning.device_memory import found_layout
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.sinks import COMBINING, AtLeast, Reduced, Sink, Step, Stored
from oocgemm.planning.sinks import SELECTED as SELECTED_DTYPES
from oocgemm.planning.terms import Terms
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.products import product_of
from tests.support.suite import each_value, slow

Array = NDArray[Any]
NATIVE = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
POINTER, LONG, REAL = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_double


def problem(kind: str, accumulated: str, sink: type[Sink] = Stored) -> GemmProblem:
    """Return a product whose sums a step combines; further steps scale rows and add to columns."""
    count = len(COMBINING[kind])
    steps = Step(kind, value=0.5), Step("scale", rows=True, value=2.0), Step("rank_one", cols=True)
    plain = product_of(9, 9, 9, "int8", "int8", accumulated, "float64", epilogue=steps)
    dtype = "float64" if accumulated != "int32" else "float32"
    made: Sink = Stored(dtype, steps)
    if sink is AtLeast:
        selected = SELECTED_DTYPES[replace(plain, terms=Terms(pairs=((0, 0),) * count)).combined_dtype]
        made = AtLeast(selected, steps, threshold=-1.0)
    if sink is Reduced:
        made = Reduced("float64", steps)
    return replace(plain, terms=Terms(pairs=((0, 0),) * count), sink=made)


def sums_of(count: int, accumulated: str, shape: tuple[int, int]) -> Array:
    """Draw the sums of terms of a strip; the first ones are counts, some of which are 0."""
    rng = np.random.default_rng(3)
    sums = rng.integers(-20, 20, (shape[0], count, shape[1]))
    sums[:, 0] = rng.integers(0, 30, shape)
    sums[:, 4:] = np.abs(sums[:, 4:]) * 30
    return sums.astype(numpy_dtype(accumulated))


def combined(given: GemmProblem, sums: Array) -> tuple[ChainNumbers, list[Any], Array]:
    """Return the argument of the kernel, the arrays that it points to, and what NumPy makes of sums."""
    rng = np.random.default_rng(4)
    rows, cols = rng.random(len(sums)), rng.random(sums.shape[2])
    numbers: list[Any] = [(None, None), (rows, None), (None, cols)]
    right = np.empty((len(sums), sums.shape[2]), numpy_dtype(given.combined_dtype))
    right = right if given.sink.per_row or given.sink.bounded else right.astype(given.c_dtype)
    run_chain(given.epilogue, numbers, sums, (1.0, 0.0), right, reads=False)
    chain = ChainNumbers()
    for number, (step, pair) in enumerate(zip(given.epilogue, numbers, strict=True)):
        chain.steps[number] = (*(None if x is None else x.ctypes.data for x in pair), step.value)
    return chain, numbers, right


def run_kernel(given: GemmProblem, sums: Array, chain: ChainNumbers, result: Array) -> None:
    shape = len(sums), sums.shape[2]
    options = chain_options(given, result.dtype.name)
    launcher("chain", "chain", options)(
        chain_grid(*shape),
        (256, 1, 1),
        *map(LONG, shape),
        POINTER(sums.ctypes.data),
        *map(REAL, (1.0, 0.0)),
        chain,
        POINTER(result.ctypes.data),
    )


@NATIVE
@each_value
@pytest.mark.parametrize("kind", COMBINING)
@pytest.mark.parametrize("accumulated", ["int32", "float64"])
def test_the_kernel_combines_sums_as_numpy_does(kind: str, accumulated: str) -> None:
    given = problem(kind, accumulated)
    for shape in ((1, 1), (7, 530), (130, 7)):
        sums = sums_of(given.terms.count, accumulated, shape)
        chain, numbers, right = combined(given, sums)
        found = np.zeros(shape, right.dtype)
        run_kernel(given, sums, chain, found)
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)
        assert numbers


@NATIVE
@each_value
@pytest.mark.parametrize("kind", COMBINING)
@pytest.mark.parametrize("accumulated", ["int32", "float64"])
def test_elements_that_are_not_stored_are_found_where_the_kernel_leaves_them(
    kind: str, accumulated: str
) -> None:
    shape = 37, 45
    given = problem(kind, accumulated, AtLeast)
    sums = sums_of(given.terms.count, accumulated, shape)
    chain, _, right = combined(given, sums)
    run_kernel(given, sums, chain, sums.view(right.dtype))
    np.testing.assert_allclose(sums.view(right.dtype)[:, 0], right, rtol=1e-6, atol=1e-6)
    # The kernels that follow read these rows, which are not contiguous.
    room, element = found_layout(given, *shape), SELECTED[given.c_dtype]
    slot = np.zeros(room.end, np.uint8)
    at = slot.ctypes.data
    launcher("threshold", "threshold", threshold_options(given))(
        (1, 1, 1),
        (64, 1, 1),
        *(POINTER(sums.ctypes.data), *map(LONG, (*shape, 0, 0, 0)), REAL(-1.0), POINTER(0), POINTER(0)),
        *map(POINTER, (at, at + room.segments, at + room.elements)),
    )
    count, segments = map(int, slot[:16].view(np.uint64))
    elements = slot[room.elements :][: count * element.itemsize].view(element)
    kept = np.full(shape, np.nan)
    for row, size, first in slot[room.segments :][: segments * SEGMENTS.itemsize].view(SEGMENTS).tolist():
        part = elements[first : first + size]
        kept[row, part["index"].astype(int)] = part["score"]
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(kept, np.where(right >= -1, right, np.nan), rtol=1e-6, atol=1e-6)
    reduced = problem(kind, accumulated, Reduced)
    found, expected = np.zeros(shape[0]), np.zeros(shape[0])
    reduce_rows("sum", right, expected, begins=True)
    launcher("reduce", "reduce", reduce_options(reduced))(
        reduce_grid(shape[0]),
        (256, 1, 1),
        *(POINTER(sums.ctypes.data), *map(LONG, (*shape, 1)), POINTER(found.ctypes.data)),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


MAPS = {
    "known": (ElementStep("known", constants=(-1.0,)),),
    "known, NaN": (ElementStep("known", constants=(np.nan,)),),
    "zeros and squares": (ElementStep("or_zero", constants=(-1.0,)), ElementStep("square")),
    "zeros, NaN": (ElementStep("or_zero", constants=(np.nan,)),),
    "equal": (ElementStep("equal", constants=(2.0,)),),
    "shifted": (ElementStep("shift", constants=(-1.0,)), ElementStep("or_zero", constants=(-2.0,))),
}


@NATIVE
@each_value
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("stored", "result"), [("int8", "int8"), ("float32", "float64")])
def test_the_kernel_makes_maps_as_numpy_does(name: str, stored: str, result: str) -> None:
    steps, rng = MAPS[name], np.random.default_rng(5)
    for shape, width in (((3, 8), 4), ((130, 5), 1)):
        x = rng.integers(-1, 3, shape).astype(stored)
        if "NaN" in name and stored == "float32":
            x[x == -1] = np.nan
        right, found = (np.zeros(shape, result) for _ in range(2))
        expand(steps, x, right)
        given = Elements()
        for i, step in enumerate(steps):
            given.steps[i] = ElementNumbers(0, *step.constants)
        launcher("expand", "expand", expand_options(stored, result, steps, width))(
            expand_grid(*shape, width),
            (256, 1, 1),
            *(POINTER(x.ctypes.data), *map(LONG, shape), given, POINTER(found.ctypes.data)),
        )
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernels_compile_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    sources = [
        ("chain", chain_options(problem(kind, accumulated, sink), result))
        for kind in COMBINING
        for accumulated, sink, result in (("int32", AtLeast, "float32"), ("float64", Stored, "float32"))
    ]
    sources += [("expand", expand_options("int8", "int8", steps, 4)) for steps in MAPS.values()]
    for name, options in sources:
        cubin = tmp_path / "code.cubin"
        cubin.write_bytes(compiled(Nvrtc(), name, arch, options))
        assert resources(cubin, name).local == 0, f"{options} for {arch}"
