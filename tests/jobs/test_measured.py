"""Means and scales that the device finds in panels of all rows, so that X is read once."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm import Transform
from oocgemm.errors import InputError
from oocgemm.jobs import transforming as transforms
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import WIDTH, measure_options, products_grid, sums_grid
from oocgemm.planning.elements import ElementStep, missing_code
from oocgemm.planning.problem import Operand
from tests.support.backends_here import CUDA
from tests.support.fake_cuda import fake_cuda
from tests.support.native import launchers
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import examples
from tests.support.transforms import genotypes, standardised

Array = NDArray[Any]
TRIANGLES: dict[str, Any] = {"lower": np.tril, "upper": np.triu, "full": np.asarray}
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(60, method="thread"),
]


def forbidden(*given: object) -> None:
    raise AssertionError("X is read for its statistics before the product")


@pytest.fixture(autouse=True)
def _one_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))


@given(
    n=st.integers(3, 60),
    k=st.integers(1, 50),
    depth=st.sampled_from([8, 24, 64]),
    uplo=st.sampled_from(list(TRIANGLES)),
    axis=st.integers(0, 1),
    scale=st.sampled_from([None, "k", "hwe", "given"]),
    center=st.sampled_from([None, "k", "given"]),
    impute=st.sampled_from(["mean", 0, "given"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=12), deadline=None)
def test_genotypes_are_measured_on_the_device(
    n: int, k: int, depth: int, uplo: str, axis: int, scale: Any, center: Any, impute: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = genotypes(rng, n, k)
    known = np.where(x == -1, np.nan, x.astype(np.float64))
    mean, share = np.nanmean(known, axis=0), np.nanmean(known, axis=0) / 2
    scales = {None: np.ones(k), "k": np.nanstd(known, axis=0), "hwe": np.sqrt(2 * share * (1 - share))}
    scales["given"], centers = rng.choice([0.5, 2], k), {None: np.zeros(k), "k": mean, "given": rng.random(k)}
    fills = {"mean": mean, 0: np.zeros(k), "given": rng.choice([0.5, 1.5], k)}
    filled = np.where(x == -1, fills[impute], known)
    z = (filled - centers[center]) / scales[scale]
    change = Transform(
        missing=-1,
        impute=fills[impute] if impute == "given" else impute,
        center=centers[center] if center == "given" else center,
        scale=scales[scale] if scale == "given" else scale,
        cast="float64",
    )
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    with fake_cuda(seed) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "stats_of", forbidden)
        options: Any = {"backend": "cuda", "kernel": "cublas", "tile": f"{n}x{n}x{depth}"}
        found = oocgemm.gram(stored, axis=axis, uplo=uplo, transform=change, **options)
        device.check()
    kept = TRIANGLES[uplo]
    assert found.plan.problem.finds_numbers == change.needs_stats
    np.testing.assert_allclose(kept(found.out), kept(z @ z.T), atol=1e-9 * k)


@given(
    power=st.integers(0, 6),
    k=st.integers(1, 50),
    depth=st.sampled_from([8, 24, 64]),
    axis=st.integers(0, 1),
    alpha=st.sampled_from([1, -2]),
    beta=st.sampled_from([0, 3]),
    missing=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=12), deadline=None)
def test_centered_integers_are_exact_in_one_pass(
    power: int, k: int, depth: int, axis: int, alpha: int, beta: int, missing: bool, seed: int
) -> None:
    rng, n = np.random.default_rng(seed), 2**power  # so that the means are exact
    x = rng.integers(-3, 4, (n, k)).astype(np.int8)
    change = Transform(center="k", cast="int8")
    z = x - x.mean(axis=0)
    if missing:
        x[0] = 5  # so that no column has only missing elements
        known = np.where(x == -3, 0.0, x)
        z = known - known.sum(axis=0) / (x != -3).sum(axis=0)
        change = Transform(missing=-3, impute=0, center="k", cast="int8")
    old = rng.integers(-9, 9, (n, n)).astype(np.float64)
    c, stored = old.copy(), x if axis == 0 else np.ascontiguousarray(x.T)
    with fake_cuda(seed) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "stats_of", forbidden)
        options: Any = {"backend": "cuda", "kernel": "cublas", "tile": f"{n}x{n}x{depth}", "beta": beta}
        found = oocgemm.gram(stored, c, axis=axis, transform=change, alpha=alpha, **options)
        device.check()
    assert found.plan.problem.finds_numbers
    right = np.tril(alpha * (z @ z.T) + beta * old)
    np.testing.assert_allclose(np.tril(c), right, atol=1e-9 * k if missing else 0)


def test_x_is_uploaded_once_and_measured_only_if_its_triangle_fits() -> None:
    x = genotypes(np.random.default_rng(0), 400, 300)
    change = Transform(missing=-1, center="k", scale="k", cast="float16")
    options: Any = {"transform": change, "backend": "cuda", "kernel": "cublas"}
    with fake_cuda(0):
        fitting = oocgemm.gram(x, device_memory="90MiB", **options)
        small = oocgemm.gram(x, device_memory="80.4MiB", **options)
        tiled = oocgemm.gram(x, tile="128x128x64", **options)
        verified = oocgemm.gram(x, verify=True, **options)
    assert [found.plan.problem.finds_numbers for found in (fitting, small, tiled, verified)] == [
        True,
        *[False] * 3,
    ]
    assert fitting.plan.traffic["h2d"] == x.nbytes
    for found in (small, tiled):
        np.testing.assert_allclose(np.tril(found.out), np.tril(fitting.out), atol=1)


@pytest.mark.parametrize(
    ("change", "column", "message"),
    [
        (Transform(missing=-1, center="k"), -1, "column 7 of X has only missing elements"),
        (Transform(missing=-1, scale="k"), 2, "the scale of column 7 of X is 0"),
        (Transform(missing=-1, scale="hwe"), 3, "column 7 of X has the mean 3"),
        (Transform(missing=3, impute="raise", center="k"), 3, "X has 20 missing elements"),
        (Transform(missing=-1, impute=0, center="k", cast="int8"), -1, "column 7 of X has only missing"),
    ],
)
def test_a_transform_that_is_not_defined_is_refused_before_c_is_written(
    change: Transform, column: int, message: str, tmp_path: Path
) -> None:
    x = genotypes(np.random.default_rng(1), 20, 30, missing=0)
    x[:, 7] = column
    c = np.full((20, 20), 5.0, np.float64 if change.corrects else np.float32)
    with fake_cuda(2):
        for target in (c, str(tmp_path / "c.zarr")):
            with pytest.raises(InputError, match=message):
                oocgemm.gram(x, target, transform=change, backend="cuda", kernel="cublas")
    assert (c == 5).all()
    assert not (tmp_path / "c.zarr").exists()


def test_a_measured_run_is_resumed_as_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = genotypes(np.random.default_rng(3), 64, 80)
    zarr.create_array("x", data=x, chunks=(16, 16))
    change = Transform(missing=-1, center="k", scale="k")
    options: Any = {"transform": change, "backend": "cuda", "kernel": "cublas"}
    with fake_cuda(4):
        right = oocgemm.gram("x", "right", **options).out[:]
        with monkeypatch.context() as patch:
            patch.setattr("oocgemm.engine.staging.Transfers.write", forbidden)
            with pytest.raises(oocgemm.ExecutionError):
                oocgemm.gram("x", "c", **options)
        found = oocgemm.gram("x", "c", resume=True, **options)
        again = oocgemm.gram("x", "right", resume=True, device_memory="1GiB", **options)
    assert found.plan.problem.finds_numbers
    assert again.plan.problem.finds_numbers
    np.testing.assert_array_equal(found.out[:], right)


def in_panels(change: Transform) -> tuple[ElementStep, ...]:
    """Return the steps of a transform of int8 whose numbers are found in panels."""
    steps = change.steps(None if change.missing is None else float(change.missing), "cols")
    return Operand("int8", elements=steps).with_numbers_in_panels().elements


def measured(
    run: Callable[..., None], x: Array, steps: tuple[ElementStep, ...], *, by_column: bool
) -> tuple[Array, Array, Array, int]:
    """Return the numbers, the weights, the products and the flag that the kernels find for X.

    `run` launches a kernel: it gets its name, options, grid and arguments, arrays among them.
    """
    (n, k), stored = x.shape, np.ascontiguousarray(x if by_column else x.T)
    rows, cols = stored.shape
    sums, wrong = np.zeros((3, k), np.int64), np.zeros(1, np.int32)
    numbers = np.concatenate((np.zeros((2, k)), np.ones((1, k))))
    weights, products, square = np.zeros(k), np.zeros(n), np.zeros(1)
    width, code = 1 if cols % WIDTH else WIDTH, missing_code(steps)
    options = measure_options(by_column, steps, width)
    longs = [ctypes.c_longlong(extent) for extent in (rows, cols)]
    panel = stored, *longs, ctypes.c_int(int(code or 0))
    run(
        "sums", options, sums_grid(rows, cols, width, by_column=by_column), *panel, ctypes.c_longlong(k), sums
    )
    counts = [ctypes.c_longlong(value) for value in (0, k, k, n)]
    run("numbers", options, (-(-k // 256), 1, 1), *counts, sums, *numbers, weights, wrong)
    run("products", options, products_grid(rows, cols, width, by_column=by_column), *panel, weights, products)
    run("square", options, (1, 1, 1), ctypes.c_longlong(k), weights, square)
    if any(step.is_deferred for step in steps):
        np.testing.assert_allclose(square, weights @ weights)
    return numbers, weights, products, int(wrong[0])


def check(run: Callable[..., None]) -> None:
    """Compare the kernels with NumPy."""
    rng = np.random.default_rng(5)
    for by_column, (n, k) in ((True, (1100, 260)), (True, (37, 5)), (False, (300, 9)), (False, (33, 70))):
        x = genotypes(rng, n, k)
        known = np.where(x == -1, np.nan, x.astype(np.float64))
        mean, std = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
        everything = in_panels(Transform(missing=-1, center="k", scale="k"))
        (fill, center, inverse), _, _, wrong = measured(run, x, everything, by_column=by_column)
        np.testing.assert_allclose(fill, np.where((x == -1).any(axis=0), mean, 0), atol=1e-14)
        np.testing.assert_allclose(center, mean, rtol=1e-14)
        np.testing.assert_allclose(inverse, 1 / std, rtol=1e-12)
        assert not wrong
        only = in_panels(Transform(center="k", cast="int8"))
        _, weights, products, wrong = measured(run, x, only, by_column=by_column)
        np.testing.assert_array_equal(weights, x.sum(axis=0))
        np.testing.assert_array_equal(products, x.astype(np.int64) @ x.sum(axis=0))
        assert not wrong
        *_, wrong = measured(run, x * 0 + 1, everything, by_column=by_column)
        assert wrong


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_kernels_measure_what_numpy_does() -> None:
    entries = tuple(f"measure_{entry}" for entry in ("sums", "numbers", "products", "square"))

    def run(entry: str, options: tuple[str, ...], grid: tuple[int, int, int], *values: Any) -> None:
        pointers = [ctypes.c_void_p(v.ctypes.data) if isinstance(v, np.ndarray) else v for v in values]
        launchers("measure", entries, options)[f"measure_{entry}"](grid, (256, 1, 1), *pointers)

    check(run)


@pytest.mark.parametrize("by_column", [False, True])
def test_the_kernels_compile_without_spills(
    by_column: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = tmp_path / "code.cubin"
    changes = (
        Transform(missing=-1, center="k", scale="hwe"),
        Transform(missing=-1, impute=0, center="k", cast="int8"),
    )
    for width, change in zip((1, WIDTH), changes, strict=True):
        options = measure_options(by_column, in_panels(change), width)
        cubin.write_bytes(compiled(Nvrtc(), "measure", "sm_90a", options))
        for entry in ("sums", "numbers", "products", "square", "center"):
            taken = resources(cubin, f"measure_{entry}")
            assert (taken.local, taken.stack) == (0, 0), f"{entry} {options}: {taken}"


@pytest.mark.parametrize("run", [pytest.param(None, marks=GPU)])
def test_the_kernels_measure_what_numpy_does_on_a_gpu(run: None) -> None:
    import cupy

    from oocgemm.backends.cuda.launch import Kernels

    kernels = Kernels(0)

    def on_gpu(entry: str, options: tuple[str, ...], grid: tuple[int, int, int], *values: Any) -> None:
        copies = [cupy.asarray(v.view(np.uint8)) if isinstance(v, np.ndarray) else v for v in values]
        pointers = [ctypes.c_void_p(v.data.ptr) if isinstance(v, cupy.ndarray) else v for v in copies]
        kernels.plain("measure", f"measure_{entry}", options)(grid, *pointers)
        cupy.cuda.get_current_stream().synchronize()
        for array, copy in zip(values, copies, strict=True):
            if isinstance(array, np.ndarray):
                array.view(np.uint8)[...] = copy.get()

    check(on_gpu)


@pytest.mark.parametrize("axis", [pytest.param(axis, marks=GPU) for axis in (0, 1)])
@pytest.mark.parametrize("scale", ["k", "hwe", None])
def test_genotypes_on_a_gpu_give_the_matrix_of_float64(axis: int, scale: str | None) -> None:
    x = genotypes(np.random.default_rng(2), 1000, 3001)
    z = standardised(x, scale)
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    options: Any = {"axis": axis, "uplo": "full", "backend": "cuda"}
    for cast, tolerance in (("float64", 1e-11), ("float32", 1e-5), ("float16", 3e-3)):
        change = Transform(missing=-1, center="k", scale=scale, cast=cast)
        found = oocgemm.gram(stored, transform=change, **options)
        assert found.plan.problem.finds_numbers
        np.testing.assert_allclose(found.out, z @ z.T, atol=tolerance * 3000)
    whole = np.where(x == -1, 1, x)
    known = whole if axis == 0 else np.ascontiguousarray(whole.T)
    found = oocgemm.gram(known, transform=Transform(center="k", cast="int8"), **options)
    assert found.plan.problem.finds_numbers
    z = whole - whole.mean(axis=0)
    np.testing.assert_allclose(found.out, z @ z.T, atol=1e-8)
