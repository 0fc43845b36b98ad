"""What messages advise can be done, in every verb that they are about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from tests.support.command import command

ON_HOST: dict[str, Any] = {"backend": "host"}
X = np.random.default_rng(0).standard_normal((12, 6))


def coded(path: Path) -> str:
    x = X.copy()
    x[7, 4] = 99
    zarr.create_array(path, data=x, attributes={"_FillValue": 99.0})
    return str(path)


@pytest.mark.parametrize("verb", ["gram", "corr", "similarity", "reduce"])
def test_missing_elements_are_replaced_as_the_message_says(verb: str, tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {"similarity": {"topk": 2}, "reduce": {"to": oocgemm.Reduce("sum")}}
    call, options = getattr(oocgemm, verb), given.get(verb, {}) | ON_HOST
    path = coded(tmp_path / "x.zarr")
    with pytest.raises(ExecutionError) as raised:
        call(path, **options)
    said = str(raised.value)
    assert "pass impute='mean' (--impute mean), in gemm and gram a Transform(missing=99.0)" in said
    copy: Any = zarr.open_array(path)
    call(np.where(copy[:] == 99, 0, copy[:]), **options)
    call(path, decode=False, **options)
    if verb == "gram":
        call(path, transform=oocgemm.Transform(missing=99.0), **options)
    elif verb != "reduce":
        call(path, impute="mean", **options)


def test_components_of_nan_are_found_as_the_message_says(tmp_path: Path) -> None:
    x = X.copy()
    x[7, 3] = np.nan
    with pytest.raises(InputError, match="column 3 of X") as raised:
        oocgemm.pca(x, 2, **ON_HOST)
    assert "pass missing=float('nan')" in str(raised.value)
    oocgemm.pca(x, 2, missing=float("nan"), **ON_HOST)
    np.save(tmp_path / "x.npy", x)
    options = "--components", "2", "--backend", "host"
    done = command("pca", tmp_path / "x.npy", tmp_path / "p.zarr", *options)
    assert (done.code, "--missing nan" in done.err) == (2, True)
    change = ("--missing", "nan")
    assert command("pca", tmp_path / "x.npy", tmp_path / "p.zarr", *options, *change).code == 0
    x[7, 3] = np.inf
    with pytest.raises(InputError, match="column 3 of X") as raised:
        oocgemm.pca(x, 2, **ON_HOST)
    assert "missing" not in str(raised.value)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_has_no_components(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="and so no components: pass a larger X"):
        oocgemm.pca(np.zeros(shape), 1, **ON_HOST)


def test_no_more_directions_are_kept_than_there_are() -> None:
    found = oocgemm.pca(X, 2, oversampling=10**9, **ON_HOST)
    exact = np.linalg.svd(X - X.mean(0), compute_uv=False)
    np.testing.assert_allclose(found.singular_values, exact[:2], rtol=1e-9)
    with pytest.raises(InputError, match="at most 6 components: pass a k from 1 to 6"):
        oocgemm.pca(X, 10**30, **ON_HOST)


def test_a_result_that_exists_is_replaced_as_the_message_says(tmp_path: Path) -> None:
    c = tmp_path / "c.npy"
    oocgemm.gram(X, c, **ON_HOST)
    with pytest.raises(InputError, match=r"C exists at .*: pass overwrite=True \(--overwrite\) to replace"):
        oocgemm.gram(X, c, **ON_HOST)
    oocgemm.gram(X, c, overwrite=True, **ON_HOST)


@pytest.mark.parametrize("which", [("--topk", "2"), ("--threshold", "0.5")])
@pytest.mark.parametrize("verb", ["corr", "similarity"])
def test_selections_have_no_triangle(verb: str, which: tuple[str, str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    for number, more in enumerate(((), ("--json",))):
        out = tmp_path / f"{number}.zarr"
        done = command(verb, tmp_path / "x.npy", out, *which, "--backend", "host", *more)
        assert done.code == 0, done.err
        assert "triangle" not in done.out
        assert "uplo" not in done.json() if more else f"C: {out}\n" in done.out
    if verb == "corr":
        done = command(verb, tmp_path / "x.npy", tmp_path / "c.npy", "--backend", "host")
        assert f"C: {tmp_path / 'c.npy'}  (both triangles)" in done.out
