"""Principal components on several devices: equal bits for any number of them, resumed and failed runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import InputError, Transform
from tests.support.backends_here import needs_gpu, running_on
from tests.support.problems import Array
from tests.support.suite import each_value
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

RNG = np.random.default_rng(5)
ENGINES = ["host", "host-staged", "fake-cuda", pytest.param("cuda", marks=needs_gpu)]
ROWS, COLS = 171, 30
MEMORY: dict[str, Any] = {"device_memory": "256MiB", "host_memory": "256MiB"}
SEVERAL = ("0,0", "0,0,0", [0] * 9)
ARRAYS = ("components", "singular_values", "mean", "residuals", "errors")


def same_bits(found: oocgemm.PCA, right: oocgemm.PCA) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)
    assert found.passes == right.passes


def matrix(dtype: str) -> Array:
    """Return a matrix whose singular values decay."""
    left, right = (np.linalg.qr(RNG.standard_normal((n, COLS)))[0] for n in (ROWS, COLS))
    return np.asarray((left * 100 * 0.6 ** np.arange(COLS)) @ right.T + 3, dtype)


@each_value
@pytest.mark.parametrize("source", ["memory", "npy", "zarr"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["exact", "randomized"])
def test_components_do_not_depend_on_the_number_of_devices(
    engine: str, dtype: str, verify: bool, source: str, method: str, tmp_path: Path
) -> None:
    x: Any = matrix(dtype)
    right = np.linalg.svd(x - x.mean(axis=0, dtype="f8"), compute_uv=False)[:3]
    if source == "npy":
        np.save(tmp_path / "x.npy", x)
        x = tmp_path / "x.npy"
    elif source == "zarr":
        zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(16, 7))
        x = tmp_path / "x.zarr"
    with running_on(engine) as options:
        given: dict[str, Any] = {"verify": verify, "scores": True, "method": method} | MEMORY | options
        found = [oocgemm.pca(x, 3, devices=devices, **given) for devices in SEVERAL]
    for one in found:
        same_bits(one, found[0])
        np.testing.assert_allclose(one.singular_values, right, rtol=1e-4 if dtype == "float32" else 1e-6)
        assert one.scores is not None
        np.testing.assert_allclose(np.linalg.norm(one.scores, axis=0), right, rtol=1e-3)


@pytest.mark.parametrize("method", ["exact", "randomized"])
def test_means_fill_in_missing_elements_of_every_slice(method: str) -> None:
    x = RNG.integers(0, 3, (ROWS, COLS)).astype("i1")
    x[RNG.random(x.shape) < 0.1] = -9
    given: dict[str, Any] = {"transform": Transform(missing=-9, center="k", scale="k"), "backend": "host"}
    given |= {"method": method}
    one, *several = (
        oocgemm.pca(x, 4, iterations=30, devices=devices, **given) for devices in (None, "0,0", "0,0,0")
    )
    for found in several:
        same_bits(found, several[0])
        np.testing.assert_allclose(found.singular_values, one.singular_values, rtol=1e-5)


def test_a_run_is_resumed_on_other_devices_with_the_same_bits(tmp_path: Path) -> None:
    x, out = matrix("float64"), tmp_path / "p.zarr"
    given: dict[str, Any] = {"backend": "host", "iterations": 5, "tol": 0} | MEMORY
    right = oocgemm.pca(x, 3, devices="0,0", **given)
    begun = 0

    def stop(plan: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun > 20:
            raise KeyboardInterrupt
        return lambda span: None

    with pytest.raises(KeyboardInterrupt):
        oocgemm.pca(x, 3, out, devices="0,0", progress=stop, **given)
    assert begun < 5 * 8, "it is stopped in the third pass of eight slices each"
    with pytest.raises(InputError, match=r"other arguments \(devices\)"):
        oocgemm.pca(x, 3, out, resume=True, **given)
    same_bits(oocgemm.pca(x, 3, out, devices="0,0,0", resume=True, **given), right)


def test_a_failure_on_one_device_ends_the_run() -> None:
    x = matrix("float64")
    x[100, 4] = np.nan
    with pytest.raises(InputError, match="column 4 of X"):
        oocgemm.pca(x, 3, backend="host", devices="0,0")


def test_few_chunks_and_few_rows_need_no_second_device(tmp_path: Path) -> None:
    x = matrix("float64")[:3]
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(16, 7))
    for source in (x, tmp_path / "x.zarr"):
        found = oocgemm.pca(source, 1, backend="host", devices=[0] * 9)
        right = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
        np.testing.assert_allclose(found.singular_values, right[:1], rtol=1e-6)


def test_a_dry_run_says_what_each_device_does() -> None:
    x = np.ones((4000, 100), "float32")
    for method in ("exact", "randomized"):
        planned = oocgemm.pca(x, 2, devices="0,0", dry_run=True, backend="host", method=method)
        assert (planned.slices, planned.devices, planned.rows) == (8, 2, 4000)
        assert "8 slices of X, 2 at the same time" in str(planned)
        assert planned.bytes_read == (planned.passes + planned.statistics) * x.nbytes
    with pytest.raises(InputError, match="unknown how many"):
        oocgemm.pca(x, 2, devices="all", dry_run=True, backend="cuda", device_memory="1GiB")
