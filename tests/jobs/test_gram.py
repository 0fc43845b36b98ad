"""`oocgemm.gram`: exact on small integers, on both backends, in every triangle, order and dtype."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.base import known_dtypes, numpy_dtype
from oocgemm.backends.host import blas as host_blas
from oocgemm.engine import mirror
from oocgemm.errors import BudgetError, InputError
from oocgemm.planning import Op
from oocgemm.stores import open_matrix
from oocgemm.stores.base import MirroredMatrix
from tests.support import TOP
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import integers
from tests.support.suite import each_value, examples
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need
from tests.support.unfinished_runs import failing_after, stored

TRIANGLES: dict[str, Any] = {"lower": np.tril, "upper": np.triu, "full": np.asarray}


def operand(shape: tuple[int, int], dtype: str, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x: Any = integers(rng, shape, "float64")
    if dtype.startswith("complex"):
        x = x + 1j * integers(rng, shape, "float64")
    return x.astype(numpy_dtype(dtype))


def product(x: Any, axis: int = 0) -> Any:
    wide = x.astype("complex128" if x.dtype.kind == "c" else "float64")
    return wide @ wide.conj().T if axis == 0 else wide.conj().T @ wide


def check(found: Any, x: Any, uplo: str, axis: int = 0) -> None:
    kept = TRIANGLES[uplo]
    np.testing.assert_array_equal(kept(np.asarray(found, "complex128")), kept(product(x, axis)))


@given(
    n=st.integers(0, 90),
    k=st.integers(0, 40),
    uplo=st.sampled_from(list(TRIANGLES)),
    axis=st.integers(0, 1),
    dtype=st.sampled_from([*known_dtypes()]),
    tile=st.sampled_from([None, "16x16x8", "33x33x40", "90x90x7"]),
    columns=st.booleans(),
    verify=st.booleans(),
)
@settings(max_examples=examples(100, quick=12), deadline=None)
def test_a_gram_matrix_is_exact(
    n: int, k: int, uplo: str, axis: int, dtype: str, tile: str | None, columns: bool, verify: bool
) -> None:
    x = operand((n, k) if axis == 0 else (k, n), dtype)
    x = np.asfortranarray(x) if columns else x
    result = oocgemm.gram(x, axis=axis, uplo=uplo, backend="host", memory="64MiB", tile=tile, verify=verify)
    assert result.out.shape == (n, n)
    check(result.out, x, uplo, axis)


@given(
    n=st.integers(1, 70),
    uplo=st.sampled_from(list(TRIANGLES)),
    beta=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from(["float64", "complex64", "int8"]),
    tile=st.sampled_from(["16x16x8", "24x24x16", "70x70x9"]),
    verify=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60, quick=4), deadline=None)
def test_a_gram_matrix_is_exact_in_any_order_of_the_streams_of_a_gpu(
    n: int, uplo: str, beta: int, dtype: str, tile: str, verify: bool, seed: int
) -> None:
    x = operand((n, 30), dtype, seed)
    c_dtype = "int32" if dtype == "int8" else dtype
    old = product(operand((n, 5), dtype, seed + 1)).astype(c_dtype)
    c = old.copy()
    with fake_cuda(seed) as device:
        options: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": tile}
        oocgemm.gram(x, c, uplo=uplo, alpha=2, beta=beta, verify=verify, **options)
        device.check()
    kept = TRIANGLES[uplo]
    np.testing.assert_array_equal(kept(c), kept((2 * product(x) + beta * old).astype(c_dtype)))


@each_value
@pytest.mark.parametrize("uplo", list(TRIANGLES))
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_a_gram_matrix_in_memory_is_exactly_hermitian_or_a_triangle(uplo: str, dtype: str) -> None:
    """A GPU copies parts of strips into C in any order, without host slots."""
    rng = np.random.default_rng(5)
    x: Any = rng.standard_normal((700, 30)) + (1j * rng.standard_normal((700, 30)) if dtype[0] == "c" else 0)
    x = x.astype(dtype)
    with fake_cuda(3) as device:
        options: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": "512x512x30"}
        result = oocgemm.gram(x, uplo=uplo, **options)
        device.check()
    plan, c = result.plan, result.out
    assert plan.slots.streams("C")
    strip = plan.slots.strip
    assert 1 < strip < 512
    np.testing.assert_allclose(c, TRIANGLES[uplo](product(x)), atol=1e-4)
    assert not np.diagonal(c).imag.any()
    if uplo != "full":
        np.testing.assert_array_equal(c, TRIANGLES[uplo](c))
        return
    for first, end in ((0, 512), (512, 700)):
        for top in range(first, end, strip):
            square = c[top : min(top + strip, end), top : min(top + strip, end)]
            np.testing.assert_array_equal(square, square.conj().T)
    np.testing.assert_array_equal(c, c.conj().T)
    assert plan.traffic["d2h"] == plan.required["d2h"] == c.nbytes


def test_a_whole_gram_matrix_in_memory_needs_little_device_memory() -> None:
    x = operand((200, 30), "float64")
    with fake_cuda(0) as device:
        found = oocgemm.gram(x, uplo="full", backend="cuda", kernel="cublas", device_memory="80.6MiB")
        device.check()
    assert found.plan.setting.turns_on_device
    check(found.out, x, "full")


@pytest.mark.parametrize("uplo", list(TRIANGLES))
def test_only_the_triangle_that_is_written_is_read(uplo: str) -> None:
    x = operand((100, 20), "float64")
    c = np.full((100, 100), np.nan)
    inside = TRIANGLES["lower" if uplo == "full" else uplo](np.ones((100, 100))) != 0
    # A strip that crosses the diagonal is read whole.
    tile = "32x32x20"
    strip = oocgemm.plan_gram(x, c, uplo=uplo, backend="host", tile=tile).slots.strip
    near = np.abs(np.subtract.outer(np.arange(100), np.arange(100))) < strip
    c[inside | near] = 1
    oocgemm.gram(x, c, uplo=uplo, beta=2, backend="host", tile=tile)
    kept = TRIANGLES[uplo]
    np.testing.assert_array_equal(kept(np.nan_to_num(c)), kept(product(x) + 2))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_full_gram_matrix_is_exactly_hermitian(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x: Any = rng.standard_normal((150, 70)).astype(dtype)
    if dtype == "complex128":
        x += 1j * rng.standard_normal((150, 70))
    for tile in (None, "64x64x30"):
        c = oocgemm.gram(x, uplo="full", backend="host", tile=tile).out
        np.testing.assert_array_equal(c, c.conj().T)
        assert not np.diagonal(c).imag.any()
        np.testing.assert_allclose(c, product(x), atol=1e-10)


@pytest.mark.parametrize("compressor", [None, "zstd"])
@pytest.mark.parametrize("uplo", list(TRIANGLES))
def test_chunks_of_the_other_triangle_do_not_exist(uplo: str, compressor: str | None, tmp_path: Path) -> None:
    x = operand((64, 20), "float32")
    path = tmp_path / "c.zarr"
    oocgemm.gram(x, path, uplo=uplo, backend="host", chunks=(8, 8), compressor=compressor, tile="16x16x16")
    chunks = {tuple(map(int, found.parts[-2:])) for found in (path / "c").rglob("*") if found.is_file()}
    every = {(i, j) for i in range(8) for j in range(8)}
    if uplo != "full":
        every = {(i, j) for i, j in every if (i >= j if uplo == "lower" else i <= j)}
    assert chunks == every
    c: Any = zarr.open_array(path, mode="r")[:]
    check(c, x, uplo)
    if uplo == "lower":
        assert not c[:8, 8:].any()


@pytest.mark.parametrize("uplo", ["lower", "full"])
def test_half_of_the_work_is_done_and_every_panel_is_read_once(uplo: str) -> None:
    x = operand((640, 64), "float64")
    result = oocgemm.gram(x, uplo=uplo, backend="host", memory="64MiB", verify=True)
    report, whole = result.report.to_dict(), 2 * 640 * 640 * 64
    assert whole / 2 <= report["flops"] == result.plan.flops < 0.6 * whole
    assert result.plan.traffic["read"] == x.nbytes == result.plan.least["read"]
    written = result.plan.traffic["write"] / result.out.nbytes
    assert written == 1 if uplo == "full" else written < 0.6


def test_a_resident_triangle_reads_each_panel_once_where_a_square_would_not_fit() -> None:
    """The triangle of C fits into the device budget, a square C does not."""
    x = np.zeros((1024, 20_000), "float32")
    plan = oocgemm.plan_gram(
        x, backend="host", device_memory="19MiB", host_memory="20MiB", tile="1024x1024x64"
    )
    assert plan.footprint.device["C"] < 0.65 * 4 * 1024 * 1024
    assert plan.traffic["read"] == plan.required["read"]


@pytest.mark.parametrize("blas", [True, False])
@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_triangle_of_a_square_is_computed_by_the_blas(
    blas: bool, beta: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not blas:
        monkeypatch.setattr(host_blas, "_cblas_syrk", lambda: None)
    for trans, upper in ((Op.N, False), (Op.N, True), (Op.T, False), (Op.T, True)):
        x, wide = operand((9, 20), dtype), np.full((9, 12), np.nan, dtype)
        c = wide[:, :9]  # rows that are not contiguous
        kept = np.triu if upper else np.tril
        if beta:
            c[...] = operand((9, 9), dtype, 1)
        wanted = 3 * product(x) + (beta * c if beta else 0)
        host_blas.syrk(trans, 3.0, np.ascontiguousarray(x.T) if trans.swaps else x, beta, c, upper=upper)
        np.testing.assert_array_equal(kept(c), kept(wanted))
        assert np.isnan(wide[:, 9:]).all()


@pytest.mark.parametrize("compute", ["native", "emulated"])
@pytest.mark.parametrize("uplo", ["lower", "upper"])
def test_emulated_gram_matrices_agree(compute: str, uplo: str) -> None:
    x = np.random.default_rng(2).standard_normal((90, 200))
    c = oocgemm.gram(x, uplo=uplo, backend="host", compute=compute, tile="48x48x128").out
    kept = TRIANGLES[uplo]
    np.testing.assert_allclose(kept(c), kept(x @ x.T), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uplo": "left"}, "uplo = 'left': choose one of lower, upper, full"),
        ({"axis": 2}, "axis = 2: pass 0"),
        ({"alpha": 1j}, "alpha = 1j is complex"),
        ({"tile": "16x32x8"}, "not square"),
        ({"out": np.zeros((7, 5))}, r"C exists with shape \(7, 5\)"),
        ({"out": "itself"}, "C is the same array as X"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    x = operand((40, 40), "complex64")
    if isinstance(given.get("out"), str):
        given = given | {"out": x}
    with pytest.raises(InputError, match=message):
        oocgemm.gram(x, backend="host", **given)


def test_an_option_of_gemm_is_unexpected() -> None:
    with pytest.raises(TypeError, match="unexpected option 'trans_a'"):
        oocgemm.gram(np.eye(3), trans_a=True)  # type: ignore[call-overload]


def test_a_plan_of_a_gram_matrix_runs() -> None:
    x = operand((60, 20), "float64")
    plan = oocgemm.plan_gram(x, uplo="upper", backend="host")
    assert str(plan).startswith("C 60 x 60 float64 = op(X) 60 x 20 @ its adjoint, upper")
    check(plan.run().out, x, "upper")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_memory_is_split_so_that_a_verified_gram_matrix_fits(dtype: str) -> None:
    """Checksums take most of the host budget, more than a quarter of the memory."""
    x, mib = np.zeros((240, 3000), dtype), 1 << 20
    with pytest.raises(BudgetError) as refused:
        oocgemm.plan_gram(x, memory="20MiB", verify=True, backend="host")
    least = refused.value.least
    assert least is not None
    for memory in range(least, 6 * least, 7 * mib):
        planned = oocgemm.plan_gram(x, memory=memory, verify=True, backend="host")
        assert planned.footprint.device_total + planned.footprint.host_total <= memory


def test_the_command_computes_verifies_and_reports(tmp_path: Path) -> None:
    x, path, c = operand((60, 30), "float64"), str(tmp_path / "x.npy"), str(tmp_path / "k.zarr")
    np.save(path, x)
    options = ("--backend", "host", "--tile", "24x24x30")
    planned = command("gram", path, "--dry-run", *options, "--json")
    assert (planned.code, planned.json()["problem"]["gram"], planned.json()["tiles"]) == (0, "full", [3, 3])
    assert "@  its adjoint, full" in command("gram", path, "--dry-run", *options).out
    done = command("gram", path, c, *options, "--uplo", "upper", "--verify", "--json")
    assert done.code == 0, done.err
    assert done.json()["report"]["flops"] == done.json()["plan"]["flops"]
    check(zarr.open_array(c, mode="r")[:], x, "upper")
    given = ("verify", path, path, c, "--transpose-b", "--gram")
    assert command(*given, "upper").code == 0
    assert command(*given, "lower").code == 1
    array: Any = zarr.open_array(c, mode="r+")
    array[3, 50] += 1
    wrong = command(*given, "upper")
    assert wrong.code == 1
    assert "C[3:51, 3:51] is wrong" in wrong.err
    missing = command("gram", path)
    assert (missing.code, "pass --dry-run" in missing.err) == (2, True)


@pytest.mark.parametrize(("uplo", "beta"), [("lower", 0), ("upper", 2), ("full", 0), ("full", 2)])
def test_an_unfinished_gram_matrix_is_resumed_with_the_same_bits(
    uplo: str, beta: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(7).standard_normal((24, 24))
    np.save("x.npy", x)
    options = ("--backend", "host", "--tile", "8x8x8", "--uplo", uplo, "--beta", str(beta))
    for name in ("right", "c"):
        if beta:
            zarr.create_array(name, data=x @ x.T, chunks=(4, 4), compressors=None)
    assert command("gram", "x.npy", "right", *options).code == 0
    with failing_after(2):
        failed = command("gram", "x.npy", "c", *options)
    assert "2 of 6 tiles are done" in failed.err
    other = command("run", "x.npy", "x.npy", "c", *options[:4], *options[6:], "--transpose-b", "--resume")
    assert f"gram is no and was {uplo}" in other.err
    other = command("gram", "x.npy", "c", *options[:4], "--uplo", "lower", "--beta", "7", "--resume")
    assert "differs from this one" in other.err
    resumed = command("gram", "x.npy", "c", *options, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json()["plan"]["tiles_done_before"] == 2
    assert stored("c") == stored("right")
    again = command("gram", "x.npy", "c", *options, "--resume", "--json")
    assert (again.code, again.json()["plan"]["steps"]) == (0, 0)
    kept = TRIANGLES[uplo]
    np.testing.assert_allclose(
        kept(zarr.open_array("c", mode="r")[:]), kept((1 + beta) * (x @ x.T)), atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_gram_matrix_killed_at_random_has_the_same_bits(tmp_path: Path) -> None:
    line = [sys.executable, str(TOP / "scripts/bench/torture.py"), "--kills", "50"]
    line += ["--output", str(tmp_path / "torture.json")]
    line += [argument for number in (10, 11, 12, 13) for argument in ("--case", str(number))]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "torture.json").read_text())["host"]
    assert found["kills"] >= 50


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_a_mirrored_matrix_reads_as_the_whole_one(upper: bool, dtype: str) -> None:
    x = operand((12, 5), dtype)
    whole: Any = product(x).astype(dtype)
    half = np.triu(whole) if upper else np.tril(whole)
    matrix = MirroredMatrix(open_matrix("C", half), upper=upper)
    for rows in ((0, 12), (0, 3), (2, 9), (7, 12), (5, 6)):
        for cols in ((0, 12), (0, 4), (3, 8), (6, 12), (5, 6)):
            out = np.empty((rows[1] - rows[0], cols[1] - cols[0]), dtype)
            matrix.read(rows, cols, out)
            np.testing.assert_array_equal(out, whole[slice(*rows), slice(*cols)])


def test_the_product_that_loads_kernels_stays_in_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile on the diagonal has less room than a whole tile. A GPU would report the error much later."""
    loads = []
    with fake_cuda():
        from oocgemm.backends.cuda.multiplier import Loading

        def begin(self: Loading, kind: Any, multiply: Callable[[], None]) -> None:
            multiply()
            loads.append(kind)

        monkeypatch.setattr(Loading, "begin", begin)
        x = operand((1300, 20), "float16")
        check(oocgemm.gram(x, backend="cuda").out, x, "lower")
    assert len(loads) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tile", [None, "70x70x30"])
def test_c_in_memory_is_computed_and_mirrored_in_place(dtype: str, tile: str | None) -> None:
    """C is a part of a wider array, whose other elements stay as they are."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (200, 90)).astype(dtype)
    wide = rng.integers(-4, 5, (200, 210)).astype(dtype)
    old, c = wide.copy(), wide[:, 5:205]
    run = oocgemm.gram(x, c, alpha=3, beta=2, tile=tile, backend="host")
    assert "C" in run.plan.in_place
    lower = np.tril(old[:, 5:205])
    np.testing.assert_array_equal(c, 3 * x @ x.T + 2 * (lower + np.tril(lower, -1).T))
    np.testing.assert_array_equal(np.delete(wide, range(5, 205), 1), np.delete(old, range(5, 205), 1))
    c[...] = np.nan
    oocgemm.gram(x, c, tile=tile, backend="host")
    np.testing.assert_array_equal(c, x @ x.T)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
@pytest.mark.parametrize("n", [1, 33, 200])
def test_compiled_code_mirrors_the_bits_that_numpy_mirrors(
    n: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(n).standard_normal((n, 40))
    x = (8 * x).astype(dtype)
    if dtype != "int8":
        x[n // 2, 3] = np.nan
    c = np.full((n, n + 7), 3, dtype="int32" if dtype == "int8" else dtype)
    oocgemm.gram(x, c[:, 4 : n + 4], backend="host")
    assert (c[:, :4] == 3).all()
    assert (c[:, n + 4 :] == 3).all()
    monkeypatch.setattr(mirror, "compiled", lambda: None)
    right = oocgemm.gram(x, backend="host").out
    np.testing.assert_array_equal(c[:, 4 : n + 4], right)
    np.testing.assert_array_equal(right, np.asarray(right).T)
