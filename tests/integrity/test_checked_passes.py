"""`pca` with `verify`: the products of its passes over X are checked, and a wrong one ends the run."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm import Transform
from oocgemm.errors import ExecutionError
from oocgemm.integrity.freivalds import check_chained
from oocgemm.integrity.passes import Oriented
from oocgemm.planning import Kind
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.problems import Array
from tests.support.suite import each_value
from tests.support.tampering import in_threads, on_device

RNG = np.random.default_rng(4)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
@pytest.mark.parametrize("change", [None, Transform(scale="k"), Transform(missing=-1)])
def test_correct_components_pass(engine: Engine, dtype: str, change: Transform | None) -> None:
    if engine[1] == "tiled":
        pytest.skip("components are computed by cuBLAS")
    x = (5 * RNG.standard_normal((300, 70)) + 9).astype(dtype)
    for given in (x, np.asfortranarray(x)):
        options: dict[str, Any] = {"transform": change, "iterations": 2, "tol": 0, "scores": True}
        with running_on(engine) as backend:
            found, right = (oocgemm.pca(given, 4, verify=v, **options, **backend) for v in (True, False))
        np.testing.assert_allclose(found.components, right.components, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-3, 1.0, float("nan")])
def test_a_wrong_product_ends_the_run(dtype: str, size: float) -> None:
    """One element is changed by so much, relative to the others."""
    x = RNG.standard_normal((500, 60)).astype(dtype)
    changed = 0

    def of(operation: Any) -> bool:
        nonlocal changed
        changed += operation.kind is Kind.MULTIPLY
        return operation.kind is Kind.MULTIPLY and changed == 2

    def change(view: Array) -> None:
        view[7, 2] += size * np.abs(view[:, 2]).max()

    with (
        in_threads(),
        on_device(of, change),
        pytest.raises(ExecutionError, match="row 7 of a product with X"),
    ):
        oocgemm.pca(x, 4, verify=True, iterations=3, method="randomized", backend="host")


@each_value
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(700, 90), (20000, 50), (60, 5000), (1, 3)])
@pytest.mark.parametrize("offset", [0, 1, 100, 1e4])
@pytest.mark.parametrize("positive", [False, True])
def test_rounding_is_not_an_error(dtype: str, shape: tuple[int, int], offset: float, positive: bool) -> None:
    """Nor is it if rows are nearly equal, so that their rounding errors are."""
    rows, cols = shape
    x = RNG.random(shape) if positive else RNG.standard_t(2, shape)
    x = (x + offset).astype(dtype)
    factor, row = np.zeros((cols, 8), dtype), np.zeros(8, dtype)
    factor[:, :7] = RNG.standard_normal((cols, 7))
    factor[:, 0] = 1 / np.sqrt(cols)
    row[:7], row[-1] = -(x.mean(axis=0) @ factor[:, :7]), 1
    product = np.zeros((cols, 8), dtype)
    for top in range(0, rows, 256):
        band = x[top : top + 256]
        product += band.T @ (band @ factor + row)
    matrix = oocgemm.stores.open_matrix("X", x)
    for band_rows in (64, 10**6):
        check_chained(Oriented(matrix), factor, row, product, band=band_rows, threads=2, report=lambda: None)
    # No element is larger than this.
    product[cols // 2, 3] += np.linalg.norm(x[:, cols // 2]) * np.linalg.norm(x) * np.linalg.norm(factor)
    with pytest.raises(ExecutionError, match=f"row {cols // 2} of a product"):
        check_chained(Oriented(matrix), factor, row, product, band=64, threads=2, report=lambda: None)


def test_without_verify_x_is_not_read_again() -> None:
    x = RNG.standard_normal((50, 6))
    with patch("oocgemm.jobs.verify.check_chained", side_effect=AssertionError):
        oocgemm.pca(x, 2, backend="host")
