"""Transformed elements are clipped to limits, on every backend, before anything that follows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import Transform
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_are_clipped_after_they_are_scaled(engine: Engine, axis: int) -> None:
    x = np.random.default_rng(2).integers(-9, 10, (31, 20)).astype(np.float32)
    change = Transform(center=np.full(20, 1.0), scale=np.full(20, 0.5), clip=(-3, 4), cast="float64")
    wide = np.clip((x - 1.0) * 2, -3, 4)
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    with running_on(engine) as options:
        given: Any = {"axis": axis, "tile": "16x16x8", "transform": change, **options}
        product = oocgemm.gram(stored, **given).out
        coefficients = oocgemm.corr(stored, **given).out
    np.testing.assert_array_equal(product, wide @ wide.T)
    np.testing.assert_allclose(coefficients, np.corrcoef(wide), atol=1e-13)


def test_nan_stays_and_infinities_are_limits() -> None:
    x = np.array([[np.inf, -np.inf, 2.0], [0.0, 1.0, -np.inf]])
    found = oocgemm.gemm(x, np.eye(3), transform_a=Transform(clip=(-1, 5)), backend="host").out
    np.testing.assert_array_equal(found, [[5, -1, 2], [0, 1, -1]])
    x[0, 0] = np.nan
    found = oocgemm.gram(x, transform=Transform(clip=(-1, 5)), backend="host").out
    assert np.isnan(found[0]).all()
    assert found[1, 1] == 2


@pytest.mark.parametrize("limits", [(2, 1), (0,), "ab", (float("nan"), 1)])
def test_limits_that_are_none_are_refused(limits: Any) -> None:
    with pytest.raises(InputError, match="clip = "):
        Transform(clip=limits)


@pytest.mark.parametrize("backend", ["host", "device"])
@pytest.mark.parametrize("method", ["exact", "randomized"])
@pytest.mark.parametrize("devices", [None, "0,0"])
def test_principal_components_are_those_of_clipped_elements(
    backend: str, method: str, devices: Any, tmp_path: Path
) -> None:
    x = np.random.default_rng(4).gamma(1.0, 2.0, (50, 7)) + 100 * np.arange(7)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(8, 7))
    given: Any = {"method": method, "devices": devices, "tol": 1e-10, "iterations": 60, "scores": True}
    z = np.clip((x - x.mean(axis=0)) / x.std(axis=0), -0.5, 1.5)
    far = np.clip(x, 101, 500)
    for change, wide in (
        (Transform(center="k", scale="k", clip=(-0.5, 1.5)), z),
        (Transform(clip=(101, 500)), far),
    ):
        expected = np.linalg.svd(wide - wide.mean(axis=0))[1][:3]
        if backend == "device":
            with fake_cuda():
                found = oocgemm.pca(
                    str(tmp_path / "x.zarr"), 3, transform=change, backend="cuda", kernel="cublas", **given
                )
        else:
            found = oocgemm.pca(str(tmp_path / "x.zarr"), 3, transform=change, backend="host", **given)
        np.testing.assert_allclose(found.singular_values, expected, rtol=1e-6)
        np.testing.assert_allclose(found.mean, wide.mean(axis=0), atol=1e-9)
        assert found.scores is not None
        np.testing.assert_allclose(np.linalg.norm(found.scores, axis=0), expected, rtol=1e-5)


def test_the_command_line_takes_limits(tmp_path: Path) -> None:
    x = np.arange(-6.0, 6).reshape(3, 4)
    np.save(tmp_path / "x.npy", x)
    paths = [str(tmp_path / name) for name in ("x.npy", "c.npy")]
    done = command("gram", *paths, "--transform", "clip=-2:3", "--backend", "host", "--quiet")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(np.load(paths[1]), np.clip(x, -2, 3) @ np.clip(x, -2, 3).T)
    done = command("gram", *paths, "--transform", "clip=3", "--backend", "host", "--quiet", "--overwrite")
    assert (done.code, "clip = ('3',): pass two numbers" in done.err) == (2, True)
