"""Results in wider dtypes and products of reduced precision are computed only on request and if supported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import InputError
from oocgemm.kernels.tuning import Measured, Tuning
from oocgemm.planning import Op
from tests.support.backends_here import BACKENDS, REAL_BACKENDS, needs_gpu, running_on
from tests.support.command import command, contents
from tests.support.gemm_cases import ROUNDOFF, assert_close, random_case
from tests.support.problems import integers, reference


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_operands_give_a_float32_c_where_asked(dtype: str, beta: int, backend: str) -> None:
    rng = np.random.default_rng(1)
    a, b = integers(rng, (40, 900), dtype), integers(rng, (70, 900), dtype, most=60)
    c = integers(rng, (40, 70), "float32", most=2000) if beta else np.full((40, 70), np.nan, np.float32)
    old = c.copy()
    with running_on(backend) as options:
        options |= {"trans_b": "T"}
        tile = "32x32x100"
        oocgemm.gemm(a, b, c, out_dtype="float32", alpha=0.5, beta=beta, tile=tile, **options)
        made = oocgemm.gemm(a, b, out_dtype=np.float32, **options).out
        narrow = oocgemm.gemm(a, b, c.astype(a.dtype), tile=tile, **options).out
    expected = reference(0.5, Op.N, a, Op.T, b, beta, old).real
    np.testing.assert_array_equal(c, expected)
    assert (expected != expected.astype(a.dtype)).any()  # the dtype of A and B cannot represent the result
    assert made.dtype == np.float32
    np.testing.assert_array_equal(
        narrow, reference(1, Op.N, a, Op.T, b, 0, None).real.astype(np.float32).astype(a.dtype)
    )
    assert narrow.dtype == a.dtype


@pytest.mark.parametrize(
    ("dtype", "options", "said"),
    [
        (
            "float32",
            {"out_dtype": "float16"},
            "C cannot have dtype float16 with float32 operands",
        ),
        ("float16", {"out_dtype": "float64"}, "choose one of float16, float32"),
        ("float64", {"out_dtype": "number"}, "C cannot have dtype number"),
        ("float64", {"out_dtype": "f8,nothing"}, "C cannot have dtype f8,nothing"),
        ("float64", {"out_dtype": ",("}, r"C cannot have dtype ,\("),
        (
            "float64",
            {"compute": "tf32"},
            "float64 operands cannot be computed in 'tf32': choose one of native",
        ),
        ("float32", {"compute": "fp8"}, "cannot be computed in 'fp8': choose one of native, tf32, bf16"),
        ("float32", {"compute": "tf32"}, "the host backend computes in native precision, not tf32"),
    ],
)
def test_unsupported_dtypes_and_precisions_are_refused(
    dtype: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    x = np.ones((4, 4), dtype)
    for act in (oocgemm.gemm, oocgemm.plan):
        with pytest.raises(InputError, match=said):
            act(x, x, tmp_path / "C.zarr", backend="host", **options)
    assert contents(tmp_path) == {}


def test_the_command_takes_out_dtype_and_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", np.full((30, 30), 50, np.float16))
    done = command(
        "run", "A.npy", "A.npy", "C.zarr", "--backend", "host", "--out-dtype", "float32", "--quiet"
    )
    assert (done.code, done.err) == (0, "")
    written = zarr.open_array("C.zarr")
    assert written.dtype == np.float32
    np.testing.assert_array_equal(written[:], np.full((30, 30), 75000))  # float16 cannot represent 75000
    np.save("A.npy", np.ones((30, 30), np.float32))
    planned = command(
        "plan", "A.npy", "A.npy", "--backend", "cuda", "--device-memory", "1GiB", "--compute", "tf32"
    )
    assert planned.code == 0
    assert "float32 by tf32" in planned.out
    refused = command("run", "A.npy", "A.npy", "D.zarr", "--backend", "host", "--compute", "bf16")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert not Path("D.zarr").exists()


@pytest.mark.parametrize("compute", [pytest.param(name, marks=needs_gpu) for name in ROUNDOFF])
def test_reduced_precision_keeps_its_bound_and_is_never_chosen(compute: str) -> None:
    case = random_case(np.random.default_rng(2), "float32", (Op.N, Op.N), (300, 260, 515))
    results = {}
    for name in ("native", compute):
        out = case.c.copy()
        oocgemm.gemm(case.a, case.b, out, alpha=case.alpha, beta=case.beta, backend="cuda", compute=name)
        assert_close(out, case, name)
        results[name] = out
    exact = case.alpha * (case.a.astype(float) @ case.b.astype(float)) + case.beta * case.c
    errors = {name: float(np.abs(out - exact).max()) for name, out in results.items()}
    assert errors[compute] > 10 * errors["native"]


def test_products_of_bfloat16_are_checked_and_verified() -> None:
    case = random_case(np.random.default_rng(3), "bfloat16", (Op.N, Op.N), (60, 50, 70))
    for out_dtype in (None, "float32"):
        result = oocgemm.gemm(case.a, case.b, out_dtype=out_dtype, backend="host", verify=True)
        assert result.timeline.header["checks"]["recomputed"] == []
        assert result.timeline.header["backend"]["multiplied by"] == ["blas"]
        assert oocgemm.verify(case.a, case.b, result.out).ok
        result.out[3, 4] += 100
        assert not oocgemm.verify(case.a, case.b, result.out).ok


def test_an_identity_says_what_was_tuned() -> None:
    small, large = {"TILE": 16}, {"TILE": 32}
    tuned = {
        "square": {"cublas": Measured(2.0), "tiled": Measured(1.0, small)},
        "update": {"tiled": Measured(3.0, large)},
    }
    tuning = Tuning("GPU", "", {"float32": tuned})
    assert tuning.describe("auto", "float64", "native") == "cublas"
    assert (
        tuning.describe("auto", "float32", "native") == "cublas for square and thin, tiled TILE=32 for update"
    )
    assert tuning.describe("naive", "float32", "native") == "naive"
    said = tuning.describe("tiled", "float32", "native")
    assert said == "tiled TILE=16 for square, tiled TILE=32 for update, tiled for thin"


@pytest.mark.parametrize("backend", REAL_BACKENDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [("N", "N"), ("T", "T"), ("C", "N")])
def test_products_of_residues_are_exact_where_native_ones_are(
    dtype: str, trans_a: str, trans_b: str, backend: str
) -> None:
    """Products have several tiles and steps. One panel must be multiplied natively."""
    rng = np.random.default_rng(2)
    shapes = [
        shape if op == "N" else shape[::-1] for shape, op in (((70, 333), trans_a), ((333, 50), trans_b))
    ]
    a, b = (integers(rng, shape, dtype) for shape in shapes)
    c = integers(rng, (70, 50), dtype)
    old = c.copy()
    options: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "beta": 2}
    options |= {"backend": backend, "tile": "32x32x100", "device_memory": "192MiB"}
    done = oocgemm.gemm(a, b, c, compute="emulated", **options)
    np.testing.assert_array_equal(c, reference(0.5, Op(trans_a), a, Op(trans_b), b, 2, old).real)
    # There are 3 x 2 tiles of 4 steps. Products of integers need only the smallest number of moduli.
    fewest = {"float64": 14, "float32": 7}[dtype]
    assert done.timeline.header["backend"]["multiplied by"][-1] == f"24 steps by {fewest} moduli"


@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_what_residues_would_not_do_for_is_multiplied_natively(backend: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((64, 300)), rng.standard_normal((300, 40))
    a[5, 120] = np.nan
    a[40, 7] = np.inf
    options: dict[str, Any] = {"backend": backend, "tile": "32x40x100", "device_memory": "192MiB"}
    found = oocgemm.gemm(a, b, compute="emulated", **options)
    native = oocgemm.gemm(a, b, **options).out
    assert found.timeline.header["backend"]["multiplied by"][-1] == "2 steps natively"
    np.testing.assert_array_equal(np.isnan(found.out), np.isnan(native))
    np.testing.assert_array_equal(np.isinf(found.out), np.isinf(native))
    whole = np.isfinite(native)
    assert whole.sum() > 2000
    sizes = np.nan_to_num(np.abs(a), posinf=0) @ np.abs(b)
    off = np.abs(found.out[whole] - native[whole])
    assert (off <= 600 * 2.0**-53 * sizes[whole]).all()
