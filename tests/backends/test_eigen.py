"""Eigenvectors that a device finds are used for large matrices, and those of the host if it finds none."""

from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.jobs import pca_gram
from tests.support.backends_here import needs_gpu
from tests.support.fake_cuda import fake_cuda

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 40)) * np.geomspace(9, 1, 40)


def expected(s: Any, width: int) -> tuple[Any, Any]:
    values, vectors = np.linalg.eigh(s)
    return values[::-1], vectors[:, ::-1][:, :width]


def test_the_device_decomposes_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    s, asked = X.T @ X, list[tuple[int, int]]()

    def on_device(s: Any, width: int) -> tuple[Any, Any]:
        asked.append((len(s), width))
        return expected(s, width)

    pca_gram.largest(s, 3, 5, 0, on_device)
    assert not asked
    monkeypatch.setattr(pca_gram, "MIN_ON_DEVICE", 40)
    found = pca_gram.largest(s, 3, 5, 0, on_device)
    assert asked == [(40, 5)]
    np.testing.assert_array_equal(found.values, expected(s, 5)[0])
    host = pca_gram.largest(s, 3, 5, 0, lambda s, width: None)
    np.testing.assert_allclose(host.values, found.values, rtol=1e-12)


def test_the_host_decomposes_what_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pca_gram, "MIN_ON_DEVICE", 1)
    with fake_cuda() as device:  # it has no cuSOLVER
        found = oocgemm.pca(X, 4, method="exact", backend="cuda", kernel="cublas")
        device.check()
    values = np.linalg.svd(X - X.mean(axis=0), compute_uv=False)[:4]
    np.testing.assert_allclose(found.singular_values, values, rtol=1e-10)


@pytest.mark.parametrize("budget", [1 << 30, 1000])
@pytest.mark.parametrize("rows", [pytest.param(rows, marks=needs_gpu) for rows in (40, 700)])
def test_a_gpu_finds_eigenvectors(rows: int, budget: int) -> None:
    x = RNG.standard_normal((rows, rows))
    s = x + x.T
    found = backends.open_backend("cuda").decomposed(s, 9, budget)
    if budget == 1000:
        assert found is None
        return
    assert found is not None
    values, vectors = found
    np.testing.assert_allclose(values, expected(s, 9)[0], atol=1e-10 * rows)
    np.testing.assert_allclose(s @ vectors, vectors * values[:9], atol=1e-10 * rows)
