"""Means, variances and extremes of lines that a device finds in one pass."""

import ctypes
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm import Transform
from oocgemm.backends.base import Pageable, Swept
from oocgemm.jobs import stats as statistics
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import (
    MOMENTS,
    ElementNumbers,
    Elements,
    moments_grid,
    moments_options,
    parts_of,
)
from oocgemm.planning.elements import ElementStep
from tests.support.backends_here import CUDA
from tests.support.fake_cuda import fake_cuda
from tests.support.native import launchers
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import examples

Array = NDArray[Any]
Launch = Callable[..., None]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(60, method="thread"),
]
ENTRIES = "moments_columns", "moments_rows", "moments_merge"


def forbidden(*given: object, **options: object) -> None:
    raise AssertionError("X is read on the host for its statistics")


def found_by(launch: Launch, x: Array, axis: int, code: float | None) -> Array:
    """Return the moments that the kernels find in two blocks of X. Each element is halved first."""
    steps = (ElementStep("scale", "rows"),)
    lines, half = x.shape[1 - axis], x.shape[axis] // 2
    found = np.zeros((MOMENTS, lines))
    for span in ((0, half), (half, x.shape[axis])):
        block = np.ascontiguousarray(x[slice(*span)] if axis == 0 else x[:, slice(*span)])
        count = parts_of(block.shape[0], block.shape[1], axis)
        parts, numbers = np.full((MOMENTS, count * lines + 3), np.nan), np.full(len(block), 0.5)
        options = moments_options(x.dtype.name, steps, code)
        grid = moments_grid(block.shape[0], block.shape[1], axis)
        launch(ENTRIES[axis], options, grid, block, code or 0.0, numbers, parts)
        longs = lines, count, parts, parts.shape[1], 0, lines
        launch("moments_merge", options, (-(-lines // 256), 1, 1), *longs, found)
    return found


def check(launch: Launch) -> None:
    """Compare the kernels with NumPy."""
    rng = np.random.default_rng(3)
    for axis, dtype, code in (
        (0, "float32", None),
        (1, "float32", None),
        (0, "int8", 3.0),
        (1, "float64", np.nan),
    ):
        for shape in ((301, 270), (9, 5000), (2, 3)):
            x = (rng.standard_normal(shape) * 4 + (0 if dtype == "int8" else 1e4)).astype(dtype)
            if code is not None:
                x[rng.random(shape) < 0.3] = code
                x[:, 1] = x[1] = 5
            else:
                x[:, 1] = x[1] = 7
            wide = x.astype(float) / 2
            wide[np.isnan(x) | (x == code)] = np.nan
            count, mean, squares, low, high = found_by(launch, x, axis, code)
            some = count > 0
            np.testing.assert_array_equal(count, (~np.isnan(wide)).sum(axis))
            known = wide[:, some] if axis == 0 else wide[some]
            np.testing.assert_allclose(mean[some], np.nanmean(known, axis), rtol=1e-14, atol=1e-14)
            np.testing.assert_allclose(
                squares[some], (np.nanvar(known, axis) * count[some]), rtol=1e-9, atol=1e-9
            )
            np.testing.assert_array_equal(low[some], np.nanmin(known, axis))
            np.testing.assert_array_equal(high[some], np.nanmax(known, axis))
            assert low[1] == high[1]
            assert squares[1] == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_kernels_find_what_numpy_does() -> None:
    def at(array: Array) -> int:
        return int(array.ctypes.data)

    def launch(entry: str, options: tuple[str, ...], grid: tuple[int, int, int], *values: Any) -> None:
        launchers("moments", ENTRIES, options)[entry](
            grid, (256, 1, 1), *arguments(values, lambda v: v.ctypes.data)
        )

    check(launch)


def arguments(values: tuple[Any, ...], address: Callable[[Array], int]) -> list[Any]:
    """Return the arguments of a kernel. A block stands for its address and shape, numbers for a step."""
    found = list[Any]()
    for value in values:
        if isinstance(value, float):
            found.append(ctypes.c_double(value))
        elif isinstance(value, int):
            found.append(ctypes.c_longlong(value))
        elif isinstance(value, np.ndarray) and value.ndim == 1:
            elements = Elements()
            elements.steps[0] = ElementNumbers(address(value))
            found.append(elements)
        else:
            found.append(ctypes.c_void_p(address(value)))
            if len(found) == 1:
                found += map(ctypes.c_longlong, value.shape)
            elif isinstance(found[0], ctypes.c_void_p):
                found.append(ctypes.c_longlong(value.shape[1]))
    return found


@pytest.mark.parametrize("run", [pytest.param(None, marks=GPU)])
def test_the_kernels_find_what_numpy_does_on_a_gpu(run: None) -> None:
    import cupy

    from oocgemm.backends.cuda.launch import Kernels

    kernels = Kernels(0)

    def launch(entry: str, options: tuple[str, ...], grid: tuple[int, int, int], *values: Any) -> None:
        copies = {id(v): cupy.asarray(v.view(np.uint8)) for v in values if isinstance(v, np.ndarray)}
        kernels.plain("moments", entry, options)(grid, *arguments(values, lambda v: copies[id(v)].data.ptr))
        cupy.cuda.get_current_stream().synchronize()
        for value in values:
            if isinstance(value, np.ndarray):
                value.view(np.uint8)[...] = copies[id(value)].get()

    check(launch)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_kernels_compile_without_spills(dtype: str, tmp_path: Path) -> None:
    steps = (
        ElementStep("impute", "cols", constants=(-1.0,)),
        ElementStep("center", "cols"),
        ElementStep("scale", "cols"),
    )
    cubin = tmp_path / "code.cubin"
    for chain, code in ((steps, None), ((), float("nan"))):
        cubin.write_bytes(compiled(Nvrtc(), "moments", "sm_90a", moments_options(dtype, chain, code)))
        for entry in ENTRIES:
            taken = resources(cubin, entry)
            # The slow path of a division is a function that needs 8 bytes of stack.
            assert (taken.local, taken.stack) in ((0, 0), (0, 8)), f"{entry} {dtype}: {taken}"


@given(
    shape=st.tuples(st.integers(2, 60), st.integers(2, 60)),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(["float32", "float64", "int8", "int32"]),
    block=st.sampled_from([100, 1000, 1 << 20]),
    stored=st.sampled_from(["memory", "chunks"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=10), deadline=None)
def test_covariances_take_their_means_from_a_device(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int],
    axis: int,
    dtype: str,
    block: int,
    stored: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * 8 + 100).astype(dtype)
    source: Any = x
    if stored == "chunks":
        source = str(tmp_path_factory.mktemp("x") / "x.zarr")
        zarr.create_array(source, data=x, chunks=(7, 9))
    wide = x.astype(float) if axis == 0 else x.T.astype(float)
    with (
        fake_cuda(seed) as device,
        patch.multiple(statistics, MIN_SWEPT=1, SWEPT_BLOCK=block, _computed=forbidden, _save=forbidden_save),
    ):
        found = oocgemm.cov(source, axis=axis, backend="cuda", kernel="cublas", tile="40x40x10")
        device.check()
    assert found.plan.problem.a.stored == dtype
    np.testing.assert_allclose(found.out, np.cov(wide), rtol=0, atol=1e-3 if dtype != "float64" else 1e-9)


def forbidden_save(*given: object) -> None:
    """Keep nothing in the cache."""


@pytest.mark.parametrize("axis", [0, 1])
def test_a_transform_that_is_measured_on_a_device_is_that_of_the_host(axis: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.gamma(2.0, size=(70, 90)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    change = Transform(missing=float("nan"), log1p=True, center="k", scale="k", cast="float64")
    right = oocgemm.gram(x, axis=axis, transform=change, backend="host").out
    with fake_cuda(0), patch.multiple(statistics, MIN_SWEPT=1, SWEPT_BLOCK=3000, _computed=forbidden):
        found = oocgemm.gram(x, axis=axis, transform=change, backend="cuda", kernel="cublas")
    np.testing.assert_allclose(found.out, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("short", ["MAX_PARTS", "budget"])
def test_the_host_finds_what_does_not_fit_on_a_device(short: str) -> None:
    """A tall block has more parts than a grid may have, or the slots are larger than the budget."""
    x = np.random.default_rng(6).standard_normal((400, 30)).astype(np.float32)
    right = oocgemm.cov(x, axis=1, backend="host").out
    with fake_cuda(0), patch.multiple(statistics, MIN_SWEPT=1, SWEPT_BLOCK=3000):
        from oocgemm.backends.cuda import expander as sweep

        slots = dict.fromkeys(("MIN_SLOTS", "MAX_SLOTS"), 1 << 40)
        limit: dict[str, Any] = {"MAX_PARTS": 0} if short == "MAX_PARTS" else slots
        with patch.multiple(sweep, take_ring=forbidden, **limit):
            found = oocgemm.cov(x, axis=1, backend="cuda", kernel="cublas")
    np.testing.assert_allclose(found.out, right, rtol=1e-5, atol=1e-5)


def test_a_pass_that_fails_ends_its_copies_and_then_gives_back_the_ring() -> None:
    cuts = tuple(((start, start + 10), (0, 30)) for start in range(0, 80, 10))
    events = list[str]()

    def block(rows: tuple[int, int], cols: tuple[int, int]) -> Pageable:
        def move(*part: Any) -> None:
            time.sleep(rows[0] / 100)  # the first block fails first
            events.append(f"row {rows[0]}")
            raise OSError(f"row {rows[0]} cannot be read")

        return Pageable((10, 30), np.dtype(np.float32), move)

    given = Swept((80, 30), np.dtype(np.float32), cuts, block, (), (), None)
    with fake_cuda(0):
        from oocgemm.backends.cuda import expander as sweep
        from oocgemm.backends.cuda.host_memory import keep_ring

        def kept(device: int, ring: Any) -> None:
            events.append("ring")
            keep_ring(device, ring)

        failing = pytest.raises(OSError, match="row 0 cannot be read")
        with patch.multiple(sweep, keep_ring=kept, MAX_SLOTS=4), failing:
            sweep.moments(0, given, 0, 1 << 30, 1 << 30)
    assert events[0] == "row 0"
    assert events[-1] == "ring"
    assert len(events) == 4  # the ring, and the blocks that were being copied
