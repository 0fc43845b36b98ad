"""The kernel that composes lines of sparse matrices: all types, on the CPU; it compiles for GPUs."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest

from oocgemm.kernels.compile import compiled
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import slow

DTYPES = {"int8": 1, "int16": 2, "float32": 4, "float64": 8, "complex128": 16}
INDICES = {"int": np.int32, "long long": np.int64}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("dtype", ["float32", *slow(*((name,) for name in DTYPES))])
def test_the_kernel_composes_parts_of_lines(dtype: str, index: str) -> None:
    rng = np.random.default_rng(1)
    run = launcher("scatter", "scatter", (f"-DOOC_ITEM={DTYPES[dtype]}", f"-DOOC_INDEX={index}"))
    dense = (rng.integers(1, 100, (9, 700)) * (rng.random((9, 700)) < 0.6)).astype(dtype)
    dense[4] = 0
    line, places = np.nonzero(dense)
    starts = np.append(0, np.cumsum(np.bincount(line, minlength=len(dense)))).astype(np.int64)
    indices, values = places.astype(INDICES[index]), dense[line, places]
    for left, width in ((0, 700), (0, 1), (123, 500), (699, 1)):
        panel = np.full((len(dense), width + 3), 77, dtype)
        out = panel[:, 2:-1]
        stored = (ctypes.c_void_p(x.ctypes.data) for x in (starts, indices, values))
        places_of = ctypes.c_longlong(left), ctypes.c_longlong(width), ctypes.c_longlong(width + 3)
        run((len(dense), 1, 1), (256, 1, 1), *stored, *places_of, ctypes.c_void_p(out.ctypes.data))
        np.testing.assert_array_equal(out, dense[:, left : left + width])
        assert (panel[:, [0, 1, -1]] == 77).all()


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernel_compiles_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    for item in DTYPES.values():
        cubin = tmp_path / f"{item}.cubin"
        options = f"-DOOC_ITEM={item}", "-DOOC_INDEX=long long"
        cubin.write_bytes(compiled(Nvrtc(), "scatter", arch, options))
        used = resources(cubin, "scatter")
        assert used.local == 0
        assert used.registers <= 48
