"""Transforms on load: exact on small integers, on both backends, and errors that name the remedy."""

from dataclasses import replace as replaced
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
import zarr.codecs
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import Transform
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import InputError
from oocgemm.jobs.transforming import readable, transformed
from oocgemm.machine import info
from oocgemm.planning import Kind, MachineModel, Op, default_model
from oocgemm.stores import open_matrix
from tests.support.backends_here import running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.suite import examples
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need
from tests.support.transforms import CODE, cases, genotypes, standardised
from tests.support.unfinished_runs import failing_after

TRIANGLES: dict[str, Any] = {"lower": np.tril, "upper": np.triu, "full": np.asarray}


@given(data=st.data(), m=st.integers(0, 40), k=st.integers(0, 30), seed=st.integers(0, 99))
@settings(max_examples=examples(150, quick=13), deadline=None)
def test_a_product_of_transformed_operands_is_exact(data: st.DataObject, m: int, k: int, seed: int) -> None:
    """On the host, and on a GPU in any order of its streams, with and without checksums."""
    trans_a, trans_b = (data.draw(st.sampled_from([Op.N, Op.T]), x) for x in "AB")
    a, change_a, wide_a = data.draw(cases(m, k, columns=trans_a.swaps))
    n = data.draw(st.integers(0, 40))
    b, change_b, wide_b = data.draw(cases(n, k, columns=not trans_b.swaps))
    both: Any = {"transform_a": change_a, "transform_b": change_b}
    if data.draw(st.booleans(), "only A"):
        dtype = change_a.result("A", a.dtype)
        b, both = wide_b.astype(dtype), {"transform_a": change_a}
        wide_b = np.asarray(b, np.float64)
    elif change_a.result("A", a.dtype) != change_b.result("B", b.dtype):
        both = {name: replaced(change, cast="float64") for name, change in both.items()}
    if data.draw(st.booleans(), "by columns"):
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    options: Any = {
        "trans_a": trans_a,
        "trans_b": trans_b,
        "tile": data.draw(st.sampled_from([None, "16x16x8", "33x20x30"])),
        "verify": data.draw(st.booleans(), "verify"),
    }
    expected = (wide_a.T if trans_a.swaps else wide_a) @ (wide_b if not trans_b.swaps else wide_b.T)
    if data.draw(st.booleans(), "on the host"):
        found = oocgemm.gemm(a, b, backend="host", **options, **both)
    else:
        with fake_cuda(seed) as device:
            found = oocgemm.gemm(a, b, backend="cuda", kernel="cublas", **options, **both)
            device.check()
        assert bool(found.plan.problem.expanded_itemsize) == (not options["verify"] and 0 not in (m, n, k))
    np.testing.assert_array_equal(np.asarray(found.out, np.float64), expected)
    verified = oocgemm.verify(a, b, found.out, trans_a=trans_a, trans_b=trans_b, **both)
    assert verified, verified.message


@given(
    data=st.data(),
    n=st.integers(0, 60),
    k=st.integers(0, 40),
    uplo=st.sampled_from(list(TRIANGLES)),
    axis=st.integers(0, 1),
    tile=st.sampled_from([None, "16x16x8", "33x33x40"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=12), deadline=None)
def test_a_gram_matrix_of_a_transformed_operand_is_exact(
    data: st.DataObject, n: int, k: int, uplo: str, axis: int, tile: str | None, seed: int
) -> None:
    x, change, wide = data.draw(cases(n, k, columns=axis == 1))
    verify = data.draw(st.booleans(), "verify")
    options: Any = {"axis": axis, "uplo": uplo, "tile": tile, "verify": verify, "transform": change}
    if data.draw(st.booleans(), "on the host"):
        found = oocgemm.gram(x, backend="host", **options)
    else:
        with fake_cuda(seed) as device:
            found = oocgemm.gram(x, backend="cuda", kernel="cublas", **options)
            device.check()
        assert bool(found.plan.problem.expanded_itemsize) == (not verify and 0 not in (n, k))
    expected, kept = (wide @ wide.T if axis == 0 else wide.T @ wide), TRIANGLES[uplo]
    np.testing.assert_array_equal(kept(np.asarray(found.out, np.float64)), kept(expected))


def test_int8_without_means_stays_int8_and_exact() -> None:
    x = genotypes(np.random.default_rng(0), 60, 50)
    change = Transform(missing=-1, impute=0)
    kept = np.where(x == -1, 0, x).astype(np.int64)
    results = [oocgemm.gram(x, uplo="full", transform=change, backend="host")]
    with fake_cuda(1):
        results.append(oocgemm.gram(x, uplo="full", transform=change, backend="cuda", tile="16x16x16"))
        assert any("prepare" in str(span.lane) for span in results[-1].timeline.spans)
    for found in results:
        assert found.out.dtype == np.int32
        np.testing.assert_array_equal(found.out, kept @ kept.T)


@pytest.mark.parametrize("backend", ["host", "fake-cuda"])
def test_missing_elements_are_imputed_by_an_array(backend: str) -> None:
    x = genotypes(np.random.default_rng(4), 40, 50)
    fill = np.arange(50) % 5 / 2
    wide = np.where(x == -1, fill, x) - 1
    change = Transform(missing=-1, impute=fill, center=np.ones(50))
    assert not change.needs_stats
    with running_on(backend) as options:
        found = oocgemm.gram(x, uplo="full", transform=change, tile="16x16x16", **options)
    np.testing.assert_array_equal(found.out, wide @ wide.T)


@pytest.mark.parametrize("scale", ["k", "hwe", None])
def test_genotypes_are_centred_scaled_and_imputed(scale: str | None, tmp_path: Path) -> None:
    x = genotypes(np.random.default_rng(2), 80, 300)
    path = str(tmp_path / "x.zarr")
    zarr.create_array(path, data=x, chunks=(32, 64))
    z = standardised(x, scale)
    change = Transform(missing=-1, center="k", scale=scale)
    for source in (x, path):
        found = oocgemm.gram(source, uplo="full", transform=change, backend="host", memory="64MiB")
        assert found.out.dtype == np.float32
        np.testing.assert_allclose(found.out, z @ z.T, atol=1e-3)
        assert oocgemm.verify(source, source, found.out, trans_b="T", transform_a=change, transform_b=change)
        found.out[3, 5] += 1
        assert not oocgemm.verify(
            source, source, found.out, trans_b="T", transform_a=change, transform_b=change
        )
    with fake_cuda(0):
        narrow = Transform(missing=-1, center="k", scale=scale, cast="float16")
        found = oocgemm.gram(path, uplo="full", transform=narrow, backend="cuda", tile="32x32x64")
    assert (found.out.dtype, found.plan.problem.a_dtype) == (np.float32, "float16")
    np.testing.assert_allclose(found.out, z @ z.T, atol=0.5)


def test_log1p_comes_before_means_and_scales() -> None:
    x = np.random.default_rng(3).poisson(1.5, (50, 40)).astype(np.int32)
    logs = np.log1p(x)
    z = (logs - logs.mean(0)) / logs.std(0)
    change = Transform(log1p=True, center="k", scale="k")
    found = oocgemm.gram(x, axis=1, uplo="full", transform=Transform(log1p=True), backend="host")
    assert found.out.dtype == np.float64
    np.testing.assert_allclose(found.out, logs.T @ logs, atol=1e-10)
    with fake_cuda(0):
        on_device = oocgemm.gram(x, uplo="full", transform=change, backend="cuda")
    np.testing.assert_allclose(on_device.out, z @ z.T, atol=1e-10)
    np.testing.assert_allclose(oocgemm.matmul(x, np.eye(40), transform_a=change, backend="host"), z)


def test_int8_crosses_the_link_as_it_is_stored_and_fits_where_float32_does_not() -> None:
    x = np.zeros((512, 4096), np.int8)
    change = Transform(center=np.ones(4096), cast="float16")
    given: Any = {"backend": "cuda", "device_memory": "256MiB", "transform": change}
    plan = oocgemm.plan_gram(x, **given)
    assert plan.traffic["h2d"] == plan.least["h2d"] == x.nbytes
    on_host = oocgemm.plan_gram(x, verify=True, **given)
    assert on_host.traffic["h2d"] == 2 * x.nbytes
    for found in (plan, on_host):
        assert found.footprint.device_total <= found.budgets.device
    assert plan.footprint.device["transform"] >= 8 * 4096
    assert plan.footprint.device["prepared"] > 0


@pytest.mark.parametrize("memory", ["81MiB", "84MiB", "96MiB"])
def test_a_device_budget_is_kept(memory: str) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-3, 4, (700, 900)).astype(np.int8), rng.integers(-3, 4, (900, 400)).astype(np.int8)
    change = Transform(center=np.full(900, 1.0), cast="float16")
    with fake_cuda(2) as device:
        found = oocgemm.gemm(
            *(a, b),
            transform_a=change,
            transform_b=change,
            backend="cuda",
            device_memory=memory,
            kernel="cublas",
        )
        device.check()
    assert found.plan.footprint.device_total <= found.plan.budgets.device
    wide = [x.astype(np.float64) - 1 for x in (a, b)]
    np.testing.assert_array_equal(found.out, wide[0] @ wide[1])
    assert {span.lane for span in found.timeline.spans} >= {"prepare"}


def test_the_last_steps_of_a_tile_run_strip_by_strip() -> None:
    """Several transformed panels are then on the device at the same time."""
    x = np.broadcast_to(np.int8(1), (20_000, 100_000))
    given: Any = {"backend": "cuda", "device_memory": "70GiB", "tile": "20000x20000x2048"}
    plan = oocgemm.plan_gram(x, transform=Transform(center=np.ones(100_000), cast="float16"), **given)
    assert plan.slots.planes == plan.slots.drain + 1 > 2
    prepared = [operation for operation in plan.schedule() if operation.kind is Kind.PREPARE]
    assert len(prepared) == plan.steps == 49
    assert plan.footprint.device_total <= plan.budgets.device


@given(m=st.integers(40, 150), n=st.integers(40, 150), k=st.integers(60, 200), seed=st.integers(0, 9999))
@settings(max_examples=examples(60, quick=6), deadline=None)
def test_several_transformed_panels_are_used_in_any_order(m: int, n: int, k: int, seed: int) -> None:
    """The link is modelled as slow, so that many steps run strip by strip while a tile is downloaded."""

    def slow(backend: str, *known: object) -> MachineModel:
        return replaced(default_model(backend, 2), d2h=1e6)

    rng = np.random.default_rng(seed)
    a, b = rng.integers(-2, 3, (m, k)).astype(np.int8), rng.integers(-2, 3, (k, n)).astype(np.int8)
    one, other = (Transform(center=rng.integers(-2, 3, k), cast="float16") for _ in "AB")
    wide = a - one.center, b - other.center[:, None]
    given: Any = {"backend": "cuda", "kernel": "cublas", "device_memory": "200MiB"}
    with fake_cuda(seed) as device, patch.object(info, "default_model", slow):
        tile = f"{max(16, m // 2)}x{max(16, n // 2)}x16"
        found = oocgemm.gemm(a, b, transform_a=one, transform_b=other, tile=tile, **given)
        tile = f"{max(16, m // 2)}x{max(16, m // 2)}x16"
        gram = oocgemm.gram(a, uplo="full", transform=one, tile=tile, **given)
        device.check()
    assert gram.plan.slots.planes > 2
    np.testing.assert_array_equal(found.out, wide[0] @ wide[1])
    np.testing.assert_array_equal(gram.out, wide[0] @ wide[0].T)


@pytest.mark.parametrize(
    "change", [Transform(missing=-1, center="k", scale="k"), Transform(center="k", cast="int8")]
)
def test_plans_run_and_several_devices_compute(change: Transform) -> None:
    x = genotypes(np.random.default_rng(10), 60, 80)
    x = np.where(x == -1, 0, x).astype(np.int8) if change.corrects else x
    z = x - x.mean(0) if change.corrects else standardised(x)
    assert oocgemm.plan_gram(x, transform=change, backend="host").traffic["read"] == 4 * x.size * (
        not change.corrects
    )
    with fake_cuda(1) as device:
        planned = oocgemm.plan_gram(
            x, transform=change, backend="cuda", device_memory="200MiB", tile="32x32x32"
        )
        np.testing.assert_allclose(np.tril(planned.run().out), np.tril(z @ z.T), atol=1e-3)
        device.check()
    for backend in ("host", "cuda"):
        with fake_cuda(2) as device:
            both: Any = {"transform_a": change, "transform_b": change, "tile": "16x16x16"}
            found = oocgemm.gemm(x, x, trans_b="T", devices="0,0", backend=backend, **both)
            device.check()
        np.testing.assert_allclose(found.out, z @ z.T, atol=1e-3)


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_an_unfinished_run_is_resumed_only_with_the_same_transform(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = genotypes(np.random.default_rng(5), 48, 64)
    zarr.create_array("x", data=x, chunks=(16, 16))
    change = Transform(missing=-1, center="k", scale="k")
    options: Any = {"backend": backend, "tile": "16x16x16", "transform": change}

    def run(**more: Any) -> Any:
        with fake_cuda(1):
            return oocgemm.gram("x", "c", **options | more)

    with fake_cuda(1):
        right = oocgemm.gram("x", "right", **options).out[:]
    with failing_after(2), pytest.raises(oocgemm.ExecutionError):
        run()
    with pytest.raises(
        InputError, match="the transform of A is none and was missing=-1, center=k, scale=k to"
    ):
        run(resume=True, transform=None, out_dtype="float32")
    with pytest.raises(InputError, match=r"scale=hwe to float32.* and was .*scale=k to float32"):
        run(resume=True, transform=Transform(missing=-1, center="k", scale="hwe"))
    resumed = run(resume=True)
    assert len(resumed.plan.done) == 2
    np.testing.assert_array_equal(resumed.out[:], right)
    if backend == "cuda":
        with failing_after(2), pytest.raises(oocgemm.ExecutionError):
            run(overwrite=True)
        with pytest.raises(InputError, match="stored_a is  and was int8"):
            run(resume=True, verify=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"missing": "x"}, "missing = 'x' is not a real number"),
        ({"missing": 1j}, "is not a real number"),
        ({"impute": "median"}, "impute = 'median': pass 'mean', a finite number, 'raise' or an"),
        ({"impute": np.array([np.nan])}, r"impute\[0\] = nan: pass finite numbers"),
        ({"impute": float("nan")}, "impute = nan: pass"),
        ({"center": "columns"}, "center = 'columns': pass 'k', or an array"),
        ({"center": [[1.0]]}, "center has 2 dimensions"),
        ({"center": [1.0, np.inf]}, r"center\[1\] = inf: pass finite numbers"),
        ({"scale": [1.0, 0.0]}, r"scale\[1\] = 0.0: .* pass 1 where"),
        ({"scale": [1j]}, "scale = "),
        ({"scale": "hwe", "log1p": True}, "log1p changes them: drop one"),
        ({"cast": "int32"}, "cast = 'int32': choose one of float16"),
        ({"cast": "complex64"}, "cast = 'complex64'"),
        ({"cast": "f8,nothing"}, "cast = 'f8,nothing'"),
    ],
)
def test_a_transform_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Transform(**given)


INT8 = np.array([[0, 1, 2], [1, -1, 0]], np.int8)


@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        (INT8, {"missing": 300}, "cannot be an element of X, which has dtype int8: .* from -128 to 127"),
        (INT8, {"missing": float("nan")}, "missing = nan cannot be"),
        (INT8, {"missing": 0.5}, "missing = 0.5 cannot be"),
        (INT8.astype("float16"), {"missing": 1e6}, "too large for float16"),
        (INT8, {"center": [1.0, 2.0]}, "center has 2 elements, and X has 3 columns: pass one number"),
        (INT8, {"scale": np.ones(4)}, "scale has 4 elements, and X has 3 columns"),
        (INT8, {"missing": -1, "impute": np.ones(2)}, "impute has 2 elements, and X has 3 columns"),
        (INT8, {"missing": -1, "impute": np.ones(3), "cast": "int8"}, "with impute=0 or 'raise'"),
        (INT8, {"cast": "int8", "log1p": True}, "cast = 'int8' needs an int8 X without log1p"),
        (INT8.astype("int32"), {"cast": "int8"}, "X has dtype int32: choose another cast"),
        (INT8.astype("complex64"), {"center": "k"}, "X has dtype complex64, and transforms are for real"),
        (INT8, {"missing": -1, "impute": "raise"}, r"X has 1 missing elements \(code -1\), .* column 1 of X"),
        (INT8[:1], {"scale": "k"}, r"the scale of column 0 of X is 0, .* \(one of 3 such columns\)"),
        (np.full((3, 3), 2, np.int8), {"scale": "hwe"}, "the scale of column 0 of X is 0"),
        (np.full((3, 3), 5, np.int8), {"scale": "hwe"}, "column 0 of X has the mean 5: .* pass scale='k'"),
        (np.full((7, 3), 0.1), {"scale": "k"}, "the scale of column 0 of X is 0"),
        (INT8[1:], {"missing": -1, "center": "k"}, "column 1 of X has only missing elements"),
        (
            np.array([[1.0, np.nan]]),
            {"center": "k"},
            "column 1 of X has elements that are Inf or NaN, .* missing=",
        ),
        (np.array([[1.0, -1.0]]), {"center": "k", "log1p": True}, "Inf or NaN, after log1p"),
    ],
)
def test_an_operand_that_cannot_be_transformed_is_refused(
    x: Any, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "c.zarr"
    with pytest.raises(InputError, match=message):
        oocgemm.gram(x, out, transform=Transform(**given), backend="host")
    assert not out.exists()


def test_another_object_is_no_transform() -> None:
    with pytest.raises(InputError, match=r"the transform of X is 'mean': pass an oocgemm.Transform"):
        oocgemm.gram(INT8, transform="mean", backend="host")  # type: ignore[call-overload]


def test_rows_are_named_where_k_is_along_rows() -> None:
    with pytest.raises(InputError, match="center has 2 elements, and X has 3 rows"):
        oocgemm.gram(INT8.T, axis=1, transform=Transform(center=[1.0, 2.0]), backend="host")
    b = np.zeros((3, 2), np.float32)
    with pytest.raises(InputError, match="the scale of row 0 of B is 0"):
        oocgemm.gemm(b.T, b, transform_b=Transform(scale="k"), backend="host")


def test_the_default_dtypes_are_those_of_the_documentation() -> None:
    expected = {"int8": "float32", "int32": "float64", "int64": "float64"}
    for stored in (*known_dtypes(), "int32", "int64"):
        if not stored.startswith("complex"):
            x = open_matrix("X", np.zeros((1, 1), stored if stored != "bfloat16" else "float32"))
            assert Transform(center="k").result("X", x.dtype) == expected.get(x.dtype.name, x.dtype.name)
    assert Transform(missing=-1, impute=0).result("X", np.dtype("int8")) == "int8"


@pytest.mark.parametrize("compressor", [None, "zstd"])
@pytest.mark.parametrize("k_axis", [0, 1])
def test_any_block_reads_as_the_transformed_whole(
    compressor: str | None, k_axis: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(6)
    x = rng.integers(-3, 4, (300, 170)).astype(np.int8)
    zarr.create_array(
        tmp_path / "x", data=x, chunks=(64, 50), compressors=zarr.codecs.ZstdCodec() if compressor else None
    )
    np.save(tmp_path / "x.npy", x)
    center = rng.integers(-2, 3, x.shape[k_axis]).astype(float)
    change = Transform(missing=CODE, impute=0, center=center, cast="float32")
    blocks = ((0, 300), (0, 170)), ((63, 130), (49, 51)), ((299, 300), (1, 170)), ((5, 5), (0, 9))
    whole = np.where(x == CODE, 0, x) - (center if k_axis else center[:, None])
    for source in (x, str(tmp_path / "x"), str(tmp_path / "x.npy")):
        op = Op.N if k_axis else Op.T
        matrix = readable(transformed(open_matrix("X", source), change, op, left=True), 1 << 30)
        for rows, cols in blocks:
            out = np.empty((rows[1] - rows[0], cols[1] - cols[0]), np.float32)
            matrix.read(rows, cols, out)
            np.testing.assert_array_equal(out, whole[slice(*rows), slice(*cols)])
