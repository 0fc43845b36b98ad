"""The kernel of transforms: the same numbers as NumPy, on the CPU, and on a GPU where there is one."""

import ctypes
import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import oocgemm
from oocgemm import Transform
from oocgemm.backends.base import known_dtypes, numpy_dtype
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import ElementNumbers, Elements, expand_options
from oocgemm.planning.elements import ElementStep
from oocgemm.stores.transformed import apply
from tests.support.backends_here import CUDA
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import slow, thinned
from tests.support.transforms import genotypes, standardised

Array = NDArray[Any]
Run = Callable[..., None]
Steps = tuple[ElementStep, ...]
Numbers = Sequence[Array | None]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(60, method="thread"),
]
# No element is missing, those that are 3, or NaN.
CODES = (None, 3.0, float("nan"))
# Shapes whose rows are multiples of four, or not, and that need one thread block, or several.
SHAPES = (3, 8), (130, 5), (70, 260), (1, 513)


def argument(steps: Steps, addresses: list[int]) -> Elements:
    """Return the argument of the kernel for the steps, whose numbers are at the addresses."""
    found = Elements()
    for i, (step, at) in enumerate(zip(steps, addresses, strict=True)):
        found.steps[i] = ElementNumbers(at, *step.constants)
    return found


def panel(rng: np.random.Generator, shape: tuple[int, int], stored: str) -> Array:
    """Draw a panel of numbers of all kinds that the dtype has; some are 3, the code of missing elements."""
    if numpy_dtype(stored).kind in "iu":
        least = -128 if numpy_dtype(stored).kind == "i" else 0
        x = rng.integers(least, least + 256, shape)
    else:
        x = rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 5, shape)
        x[rng.random(shape) < 0.1] = np.nan
    x[rng.random(shape) < 0.1] = 3
    return x.astype(numpy_dtype(stored))


def chain(k_axis: int, missing: int, *, log1p: bool) -> tuple[ElementStep, ...]:
    """Return the steps that transform and then standardize elements, with numbers along both axes."""
    along, across = (("rows", "cols"), ("cols", "rows"))[k_axis]
    steps = [ElementStep("log1p")] if log1p else []
    if missing:
        steps.append(ElementStep("impute", along, constants=(CODES[missing] or 0.0,)))
    return (
        *steps,
        *(ElementStep(kind, along) for kind in ("center", "scale")),
        *(ElementStep(kind, across) for kind in ("center", "scale")),
        ElementStep("clip", constants=(-2.0, 3.0)),
    )


def check(run: Run, stored: str, result: str, k_axis: int, missing: int, log1p: bool) -> None:
    """Compare the kernel with NumPy. `run` gets options, width, panel, steps, numbers, an array to fill."""
    rng = np.random.default_rng(1)
    for shape, width in product(SHAPES, (1, 4)):
        if shape[1] % width:
            continue
        x, steps = panel(rng, shape, stored), chain(k_axis, missing, log1p=log1p)
        if result == "int8":  # it is only used to replace missing elements
            steps = tuple(step for step in steps if step.kind == "impute")
        extents = {"rows": shape[0], "cols": shape[1]}
        numbers = [rng.standard_normal(extents[step.axis]) if step.axis else None for step in steps]
        if result == "int8":
            numbers = [np.zeros(extents[step.axis]) for step in steps]
        found = np.full(shape, 1, numpy_dtype(result))
        run(expand_options(stored, result, steps, width), width, x, steps, numbers, found)
        with np.errstate(all="ignore"):
            expected = apply(steps, numbers, x.astype(np.float64)).astype(numpy_dtype(result))
        if log1p:
            # The last bits of logarithms differ.
            close = {"float64": 1e-14, "float32": 1e-6}.get(result, 1e-2)
            np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=close, atol=close)
        else:
            np.testing.assert_array_equal(found, expected)


KINDS = [
    ("int8", "float32", 1, 1, False),
    ("int8", "int8", 0, 1, False),
    ("float64", "float64", 0, 2, True),
    *(("float32", "bfloat16", 1, 2, False) for _ in range("bfloat16" in known_dtypes())),
    ("int64", "float64", 0, 0, False),
]
# g++ cannot compile the instructions that convert to and from float16.
GPU_KINDS = [
    *KINDS,
    ("int8", "float16", 1, 1, False),
    ("int8", "float16", 0, 1, False),
    ("float16", "float16", 1, 2, False),
    ("float64", "float16", 0, 2, True),
    ("int32", "float32", 1, 0, True),
    ("int16", "float32", 1, 1, False),
    ("uint8", "float64", 0, 0, False),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("kind", thinned(KINDS, (KINDS[0], KINDS[2])))
def test_the_kernel_computes_what_numpy_does(kind: tuple[str, str, int, int, bool]) -> None:
    def run(
        options: tuple[str, ...], width: int, x: Array, steps: Steps, numbers: Numbers, out: Array
    ) -> None:
        grid = (-(-x.shape[1] // (64 * width)), 2, 1)
        longs = [ctypes.c_longlong(extent) for extent in x.shape]
        elements = argument(steps, [0 if v is None else v.ctypes.data for v in numbers])
        values = ctypes.c_void_p(x.ctypes.data), *longs, elements
        launcher("expand", "expand", options)(grid, (256, 1, 1), *values, ctypes.c_void_p(out.ctypes.data))

    check(run, *kind)


# Steps that decode elements come first. What they make of a missing element is imputed.
DECODING = (
    ElementStep("absent", constants=(3.0,)),
    ElementStep("unsigned", constants=(256.0,)),
    ElementStep("unpack", constants=(0.01, 273.15)),
    ElementStep("log1p"),
    ElementStep("impute", "cols", constants=(float("nan"),)),
    ElementStep("center", "rows"),
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("stored", "result"), [("int8", "float64"), ("int16", "float32"), ("float32", "float64")]
)
def test_the_kernel_decodes_before_it_imputes(stored: str, result: str) -> None:
    rng = np.random.default_rng(7)
    x = panel(rng, (9, 12), stored)
    fills, centers = rng.standard_normal(12), rng.standard_normal(9)
    numbers = [None, None, None, None, fills, centers]
    found = np.full(x.shape, 1, result)
    elements = argument(DECODING, [0 if v is None else v.ctypes.data for v in numbers])
    values = ctypes.c_void_p(x.ctypes.data), ctypes.c_longlong(9), ctypes.c_longlong(12), elements
    kernel = launcher("expand", "expand", expand_options(stored, result, DECODING, 4))
    kernel((1, 2, 1), (256, 1, 1), *values, ctypes.c_void_p(found.ctypes.data))
    with np.errstate(all="ignore"):
        expected = apply(DECODING, numbers, x.astype(np.float64)).astype(result)
    lost = (x == 3) | np.isnan(x)
    along = np.broadcast_to(fills - centers[:, None], x.shape)
    np.testing.assert_allclose(expected[lost], along[lost], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-6 if result == "float32" else 1e-14)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("stored", ["bool", "uint8", "int16", "uint16", "uint32"])
def test_the_kernel_converts(stored: str) -> None:
    x = (np.arange(96).reshape(8, 12) * 2654435761 % 2**32).astype(np.uint32).astype(stored)
    for result in ("float32", "float64", "complex64"):
        found = np.full(x.shape, 1, result)
        values = ctypes.c_void_p(x.ctypes.data), ctypes.c_longlong(8), ctypes.c_longlong(12), Elements()
        kernel = launcher("expand", "expand", expand_options(stored, result, (), 4))
        kernel((1, 2, 1), (256, 1, 1), *values, ctypes.c_void_p(found.ctypes.data))
        np.testing.assert_array_equal(found, x.astype(result))


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernel_compiles_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    cubin = tmp_path / "code.cubin"
    for (stored, result, k_axis, missing, log1p), width in zip(
        GPU_KINDS, (4, 1) * len(GPU_KINDS), strict=False
    ):
        options = expand_options(stored, result, chain(k_axis, missing, log1p=log1p), width)
        cubin.write_bytes(compiled(Nvrtc(), "expand", arch, options))
        taken = resources(cubin, "expand")
        # A chain of six steps may spill one number.
        assert taken.local == 0, f"{options} for {arch}: {taken}"
        assert taken.stack <= 8, f"{options} for {arch}: {taken}"


def on_gpu(
    options: tuple[str, ...], width: int, x: Array, steps: Steps, numbers: Numbers, out: Array
) -> None:
    import cupy

    from oocgemm.backends.cuda.launch import Kernels

    given, result = (cupy.asarray(v.view(np.uint8)) for v in (x, out))
    vectors = [None if v is None else cupy.asarray(v) for v in numbers]
    elements = argument(steps, [0 if v is None else v.data.ptr for v in vectors])
    Kernels(0).plain("expand", "expand", options)(
        (-(-x.shape[1] // (64 * width)), 2, 1),
        *(ctypes.c_void_p(given.data.ptr), *(ctypes.c_longlong(extent) for extent in x.shape)),
        *(elements, ctypes.c_void_p(result.data.ptr)),
    )
    cupy.cuda.get_current_stream().synchronize()
    out.view(np.uint8)[...] = result.get()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=GPU) for kind in GPU_KINDS])
def test_the_kernel_computes_what_numpy_does_on_a_gpu(kind: tuple[str, str, int, int, bool]) -> None:
    check(on_gpu, *kind)


@pytest.mark.parametrize("axis", [pytest.param(axis, marks=GPU) for axis in (0, 1)])
@pytest.mark.parametrize("tile", [None, "96x96x64"])
@pytest.mark.parametrize("scale", ["k", None])
def test_genotypes_on_a_gpu_give_the_matrix_of_float64(
    axis: int, tile: str | None, scale: str | None
) -> None:
    x = genotypes(np.random.default_rng(2), 300, 1000)
    z = standardised(x, scale)
    given: Any = {"axis": axis, "uplo": "full", "backend": "cuda", "tile": tile}
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    for cast, tolerance in (("float64", 1e-11), ("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 3e-2)):
        change = Transform(missing=-1, center="k", scale=scale, cast=cast)
        found = oocgemm.gram(stored, transform=change, **given)
        assert found.plan.problem.expanded_itemsize
        np.testing.assert_allclose(found.out, z @ z.T, atol=tolerance * 1000)
        trans = {"trans_b": "T"} if axis == 0 else {"trans_a": "T"}
        again = oocgemm.verify(stored, stored, found.out, transform_a=change, transform_b=change, **trans)  # type: ignore[arg-type]
        assert again, again.message


@pytest.mark.parametrize("devices", [pytest.param(None, marks=GPU), pytest.param("0,0", marks=GPU)])
@pytest.mark.parametrize("verify", [False, True])
def test_products_on_a_gpu_are_exact(devices: str | None, verify: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (500, 700)).astype(np.int8), rng.integers(-3, 4, (700, 300)).astype(np.int8)
    one = Transform(missing=-3, impute=0, center=rng.integers(-2, 3, 700), cast="float16")
    other = Transform(missing=3, impute=0, scale=rng.choice([0.5, 2.0], 700), cast="float16")
    found = oocgemm.gemm(
        *(a, b),
        transform_a=one,
        transform_b=other,
        backend="cuda",
        devices=devices,
        verify=verify,
        tile="200x200x96",
    )
    wide = np.where(a == -3, 0, a) - one.center, np.where(b == 3, 0, b) / other.scale[:, None]
    np.testing.assert_array_equal(found.out, wide[0] @ wide[1])
    counted = oocgemm.gram(a, uplo="full", transform=Transform(missing=-3, impute=0), backend="cuda").out
    kept = np.where(a == -3, 0, a).astype(np.int64)
    np.testing.assert_array_equal(counted, kept @ kept.T)
