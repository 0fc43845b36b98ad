"""The kernels that transpose strips of a Gram matrix, and their diagonal blocks."""

import shutil
from ctypes import c_longlong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.backends.base import known_dtypes, numpy_dtype
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.spec import C_TYPES
from tests.support.backends_here import CUDA
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import each_value

DTYPES = [*(name for name in known_dtypes() if name != "int8"), "int32", "int64"]


def options(dtype: str, *, upper: bool = False, mirror: bool = True) -> tuple[str, ...]:
    return f"-DOOC_STORED={C_TYPES[dtype]}", f"-DOOC_UPPER={int(upper)}", f"-DOOC_MIRROR={int(mirror)}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_the_kernel_transposes_a_part_of_a_strip(dtype: str) -> None:
    run = launcher("turn", "turn", options(dtype))
    rng = np.random.default_rng(0)
    for height, width, pitch in ((1, 1, 1), (32, 32, 40), (5, 100, 101), (70, 33, 64)):
        strip: Any = rng.integers(-9, 9, (height, pitch)).astype("float64")
        strip = (strip * (1 + 2j) if dtype[0] == "c" else strip).astype(numpy_dtype(dtype))
        found = np.zeros((width, height), strip.dtype)
        longs = [c_longlong(extent) for extent in (pitch, width, height)]
        run((3, 1, 1), (256, 1, 1), c_void_p(strip.ctypes.data), *longs, c_void_p(found.ctypes.data))
        np.testing.assert_array_equal(found, strip[:, :width].conj().T)


@each_value
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("mirror", [False, True])
def test_the_kernel_makes_a_square_hermitian_or_a_triangle(dtype: str, upper: bool, mirror: bool) -> None:
    run = launcher("turn", "complete", options(dtype, upper=upper, mirror=mirror))
    rng = np.random.default_rng(0)
    for extent, pitch in ((1, 1), (32, 32), (33, 40), (100, 101)):
        strip: Any = rng.standard_normal((extent, pitch)) + 1j * rng.standard_normal((extent, pitch))
        strip = strip.astype(dtype) if dtype[0] == "c" else strip.real.astype(dtype)
        found = strip.copy()
        run((3, 1, 1), (256, 1, 1), c_void_p(found.ctypes.data), *map(c_longlong, (pitch, extent)))
        kept = np.triu(strip[:, :extent], 1) if upper else np.tril(strip[:, :extent], -1)
        right = kept + mirror * kept.conj().T + np.diag(np.diag(strip).real)
        np.testing.assert_array_equal(found[:, :extent], right)
        np.testing.assert_array_equal(found[:, extent:], strip[:, extent:])


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mirror", [False, True])
def test_the_kernels_compile_without_spills(
    dtype: str, mirror: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    cubin = tmp_path / "code.cubin"
    cubin.write_bytes(compiled(Nvrtc(), "turn", "sm_90a", options(dtype, mirror=mirror)))
    for entry in ("turn", "complete"):
        taken = resources(cubin, entry)
        assert (taken.local, taken.stack) == (0, 0), taken


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device answers")
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("dtype", known_dtypes())
@pytest.mark.parametrize("tile", [None, "384x384x100", "1300x1300x64"])
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
def test_a_gram_matrix_in_memory_is_exact_on_a_gpu(dtype: str, tile: str | None, uplo: str) -> None:
    rng = np.random.default_rng(1)
    x: Any = rng.integers(-2, 3, (1300, 100)).astype("float64")
    x = (x + 1j * rng.integers(-2, 3, x.shape) if dtype[0] == "c" else x).astype(numpy_dtype(dtype))
    found = oocgemm.gram(x, uplo=uplo, backend="cuda", tile=tile)
    assert found.plan.setting.turns_on_device == (uplo == "full")
    assert found.plan.setting.routes["C"].streams
    wide = x.astype("complex128" if dtype[0] == "c" else "float64")
    kept: Any = {"lower": np.tril, "upper": np.triu, "full": np.asarray}[uplo]
    right = (wide @ wide.conj().T).astype(found.out.dtype).astype(wide.dtype)
    np.testing.assert_array_equal(np.asarray(found.out).astype(wide.dtype), kept(right))
    old: Any = np.ones((1300, 1300), found.out.dtype)
    oocgemm.gram(x, old, uplo=uplo, backend="cuda", tile=tile)  # elements beside the triangle stay
    inside = kept(np.ones(right.shape, bool))
    np.testing.assert_array_equal(old.astype(wide.dtype), np.where(inside, right, 1))
