"""`oocgemm.stats`: NumPy's numbers in one pass, in any order of threads, cached by the files' fingerprint."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs import stats as module
from oocgemm.jobs import streaming
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.transform import Transform
from tests.support.command import command
from tests.support.suite import examples


def names(found: oocgemm.Stats) -> dict[str, Any]:
    return {name: getattr(found, name) for name in ("count", "missing", "mean", "variance", "min", "max")}


@given(
    rows=st.integers(0, 70),
    cols=st.integers(0, 70),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(["int8", "int64", "float16", "float64"]),
    code=st.sampled_from([None, -3, float("nan")]),
    log1p=st.booleans(),
    piece=st.sampled_from([16, 200, 1 << 20]),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(200, quick=20), deadline=None)
def test_statistics_are_those_of_numpy(
    rows: int, cols: int, axis: int, dtype: str, code: Any, log1p: bool, piece: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values: Any = rng.integers(0, 100, (rows, cols)).astype(np.float64)
    lost = np.zeros((rows, cols), bool)
    if code is not None and (code == -3 or dtype.startswith("float")):
        lost = rng.random((rows, cols)) < 0.3
    elif code is not None:
        code = None
    x = np.where(lost, 0 if code is None else code, values).astype(dtype)
    small: Any = {"SLAB": 24, "INT8_SLAB": 24, "INT8_DEPTH": 8}
    with patch.multiple(streaming, BATCH_BYTES=piece, COLUMNS=8), patch.multiple(streaming, **small):
        found = oocgemm.stats(x, axis, missing=code, log1p=log1p)
    wide = np.log1p(values) if log1p else values
    kept = np.ma.masked_array(wide, lost)
    assert_array_equal(found.missing, lost.sum(axis))
    assert_array_equal(found.count, (~lost).sum(axis))
    if x.shape[axis]:
        mean, variance = kept.mean(axis).filled(np.nan), kept.var(axis).filled(np.nan)
        assert_allclose(found.mean, mean, rtol=1e-13)
        assert_allclose(found.variance, variance, rtol=1e-11, atol=1e-11)
        assert_array_equal(found.min, kept.min(axis).filled(np.nan))
        assert_array_equal(found.max, kept.max(axis).filled(np.nan))
        if not log1p:  # sums of integers are exact
            assert_array_equal(found.mean, mean)
    else:
        assert np.isnan(found.mean).all()


def test_large_means_do_not_cancel_in_variances() -> None:
    x = 1e9 + np.random.default_rng(0).standard_normal((3000, 5))
    with patch.multiple(streaming, BATCH_BYTES=1000), patch.multiple(streaming, SLAB=64):
        found = oocgemm.stats(x)
    assert_allclose(found.std, x.std(0), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_threads_and_memory_do_not_change_a_bit(axis: int, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((500, 700))
    zarr.create_array(tmp_path / "x", data=x, chunks=(60, 70))
    np.save(tmp_path / "x.npy", x)
    for source in (x, str(tmp_path / "x"), str(tmp_path / "x.npy")):
        found = []
        for threads, memory in ((1, "1MiB"), (2, "1GiB"), (13, "1GiB")):
            limits: dict[str, Any] = {"MAX_THREADS": threads, "THREADS_PER_CORE": 9, "BATCH_BYTES": 9000}
            with patch.object(module, "_load", lambda *place: None), patch.multiple(streaming, **limits):
                found.append(names(oocgemm.stats(source, axis, host_memory=memory)))
        for other in found[1:]:
            for name, value in other.items():
                assert value.tobytes() == found[0][name].tobytes(), name


@pytest.mark.parametrize("kind", ["x.zarr", "x.npy"])
def test_files_are_read_again_only_if_they_have_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    path, x = str(tmp_path / kind), np.arange(12.0).reshape(3, 4)

    def write(values: Any) -> None:
        if kind.endswith("npy"):
            np.save(path, values)
        else:
            zarr.create_array(path, data=values, overwrite=True)

    passes: list[object] = []
    right = module._computed

    def counted(*given: Any, extremes: bool) -> oocgemm.Stats:
        passes.append(given)
        return right(*given, extremes=extremes)

    monkeypatch.setattr(module, "_computed", counted)
    write(x)
    chosen: list[dict[str, Any]] = [{}, {"axis": 1}, {"missing": 3}, {"log1p": True}, {"log1p": True}]
    for count, options in enumerate(chosen, 1):
        found = oocgemm.stats(path, **options)
        assert len(passes) == min(count, 4)
    assert len(list((tmp_path / "cache" / "stats").glob("*.npz"))) == 3
    assert_array_equal(found.mean, np.log1p(x).mean(0))
    write(x + 1)
    assert_array_equal(oocgemm.stats(path, log1p=True).mean, np.log1p(x + 1).mean(0))
    assert len(passes) == 5
    for damaged in (tmp_path / "cache" / "stats").glob("*.npz"):
        damaged.write_bytes(b"no zip file")
    assert_array_equal(oocgemm.stats(path, log1p=True).mean, np.log1p(x + 1).mean(0))
    assert len(passes) == 6


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_without_extremes_variances_are_0_where_all_elements_are_equal(axis: int, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x: Any = rng.integers(1, 1000, (40, 1)) / np.float64(1 if dtype == "int64" else 7) + np.zeros((40, 300))
    x = x.astype(dtype)
    other = x[:20].copy()
    other[:, 123] = np.nextafter(other[:, 123], 2000) if dtype != "int64" else other[:, 123] + 1
    x[:20] = other
    x[:2] = rng.standard_normal((2, 300)) * 100
    matrix = ArrayMatrix("X", np.ascontiguousarray(x if axis == 1 else x.T))
    with patch.multiple(streaming, BATCH_BYTES=1000), patch.multiple(streaming, SLAB=96, ROWS_SLAB=700):
        found = module.stats_of(matrix, axis, Transform(), 1 << 20, extremes=False)
        whole = module.stats_of(matrix, axis, Transform(), 1 << 20)
    assert_array_equal(found.variance == 0, np.arange(40) >= 20)
    assert_array_equal(whole.variance == 0, np.arange(40) >= 20)
    assert_allclose(found.mean, whole.mean, rtol=1e-15)
    assert_allclose(found.variance[:2], whole.variance[:2], rtol=1e-13)


def test_arrays_in_memory_are_not_cached() -> None:
    x = np.ones((2, 2))
    assert_array_equal(oocgemm.stats(x).mean, [1, 1])
    x[...] = 2
    assert_array_equal(oocgemm.stats(x).mean, [2, 2])


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "file"))
    np.save(tmp_path / "x.npy", np.eye(2))
    assert_array_equal(oocgemm.stats(str(tmp_path / "x.npy")).mean, [0.5, 0.5])


def test_wrong_arguments_are_refused() -> None:
    x, wrong = np.ones((2, 2), np.int8), dict[str, Any]
    for options, message in (
        (wrong(axis=2), "axis = 2: pass 0"),
        (wrong(axis=True), "axis = True"),
        (wrong(missing=300), "cannot be an element of X"),
    ):
        with pytest.raises(InputError, match=message):
            oocgemm.stats(x, **options)
    with pytest.raises(InputError, match="X has dtype complex128"):
        oocgemm.stats(np.ones((2, 2), complex))


def test_a_failed_read_names_the_block_and_ends_the_threads() -> None:
    def read(self: ArrayMatrix, rows: Any, cols: Any, out: Any) -> None:
        if rows[0]:
            raise OSError(5, os.strerror(5))
        out[...] = 0

    message = r"reading X\[\d+:\d+, 0:8\]: OSError: .*Input/output error"
    with (
        patch.object(ArrayMatrix, "read", read),
        patch.object(streaming, "BATCH_BYTES", 64),
        pytest.raises(ExecutionError, match=message),
    ):
        oocgemm.stats(np.ones((50, 16))[:, ::2])  # rows that are not contiguous are copied by `read`


def test_elements_that_are_declared_as_missing_are_left_out(tmp_path: Path) -> None:
    x = np.random.default_rng(3).integers(0, 9, (12, 5)).astype("i2")
    for codes in ((8,), (8, 7)):
        names = dict(zip(("_FillValue", "missing_value"), codes, strict=False))
        for packed in ({}, {"scale_factor": 0.5, "add_offset": 1.0}):
            path = tmp_path / f"{len(codes)}{len(packed)}.zarr"
            zarr.create_array(path, data=x, chunks=(5, 3), attributes={**names, **packed})
            wide = np.where(np.isin(x, codes), np.nan, x / 2 + 1 if packed else x)
            found = oocgemm.stats(path)
            np.testing.assert_array_equal(found.missing, np.isnan(wide).sum(0))
            np.testing.assert_allclose(found.mean, np.nanmean(wide, 0))
            np.testing.assert_allclose(found.variance, np.nanvar(wide, 0))
            np.testing.assert_array_equal(found.max, np.nanmax(wide, 0))
    np.testing.assert_array_equal(oocgemm.stats(path, decode=False).mean, x.mean(0))


def test_the_command_stores_statistics(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((6, 9))
    x[2, 3] = -1
    np.save(tmp_path / "x.npy", x)
    words = "stats", str(tmp_path / "x.npy"), str(tmp_path / "s.npz"), "--axis", "1", "--missing", "-1"
    done = command(*words)
    assert done.code == 0, done.err
    assert "6 rows, 1 missing elements" in done.out
    expected = oocgemm.stats(x, 1, missing=-1)
    with np.load(tmp_path / "s.npz") as found:
        for name in ("count", "missing", "mean", "variance", "min", "max"):
            np.testing.assert_array_equal(found[name], getattr(expected, name))
    assert command(*words).code == 2
    assert command(*words[:2], str(tmp_path / "s.zarr")).code == 2
    again = command(*words[:2], str(tmp_path / "t.npz"), "--json")
    assert json.loads(again.out) == {"out": str(tmp_path / "t.npz"), "extent": 9, "missing": 0}
