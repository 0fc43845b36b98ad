"""Transforms in every verb that takes operands: the results are those of the transformed matrix."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import oocgemm
from oocgemm import Transform
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.suite import each_value

Array = NDArray[Any]
CHANGES = {
    "given": Transform(center=np.arange(30.0), scale=np.full(30, 2.0)),
    "missing": Transform(missing=-5, center="k", scale="k"),
    "log1p": Transform(log1p=True, cast="float64"),
}


def sample(change: str) -> tuple[Array, Array]:
    """Return a matrix, and in float64 what a transform makes of it."""
    x = np.random.default_rng(4).integers(0, 9, (47, 30)).astype(np.float32)
    if change == "given":
        return x, (x.astype(float) - np.arange(30)) / 2
    if change == "log1p":
        return x, np.log1p(x.astype(float))
    x[np.random.default_rng(5).random(x.shape) < 0.2] = -5
    known = np.where(x == -5, np.nan, x.astype(float))
    mean = np.nanmean(known, axis=0)
    return x, (np.where(np.isnan(known), mean, known) - mean) / np.nanstd(known, axis=0)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_standardized_after_a_transform(engine: Engine, change: str, axis: int) -> None:
    x, wide = sample(change)
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    with running_on(engine) as options:
        given: Any = {"axis": axis, "tile": "20x20x10", "transform": CHANGES[change], **options}
        correlations, covariances = oocgemm.corr(stored, **given), oocgemm.cov(stored, **given)
        best = oocgemm.corr(stored, topk=3, **given)
    right = np.corrcoef(wide)
    np.testing.assert_allclose(correlations.out, right, atol=2e-6)
    np.testing.assert_allclose(covariances.out, np.cov(wide), atol=1e-5)
    np.fill_diagonal(right, -2)
    np.testing.assert_allclose(best.scores, np.sort(right)[:, :-4:-1], atol=2e-6)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES)
def test_transformed_rows_are_compared_and_reduced(engine: Engine, change: str) -> None:
    x, wide = sample(change)
    with running_on(engine) as options:
        given: Any = {"tile": "20x20x10", **options}
        cosines = oocgemm.similarity(x, topk=2, transform=CHANGES[change], **given)
        both: Any = {"transform_a": CHANGES[change], **given}
        sums = oocgemm.reduce(x, to=oocgemm.Reduce("sum"), **both)
        other = Transform(cast=CHANGES[change].cast or "float32")
        to = oocgemm.Reduce("max", axis=0)
        apart = oocgemm.reduce(x, x, to=to, trans_b="T", transform_b=other, **both)
        kernel = oocgemm.kernel_matmul(x, np.ones(47), gamma=0.01, **both)
    norms = np.linalg.norm(wide, axis=1)
    right = wide @ wide.T / np.outer(norms, norms)
    np.fill_diagonal(right, -2)
    np.testing.assert_allclose(cosines.scores, np.sort(right)[:, :-3:-1], atol=2e-6)
    np.testing.assert_allclose(sums, (wide @ wide.T).sum(axis=1), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(apart, (wide @ x.T.astype(float)).max(axis=0), rtol=1e-4, atol=1e-3)
    distances = np.square(wide[:, None] - wide[None]).sum(axis=2)
    np.testing.assert_allclose(kernel, np.exp(-0.01 * distances).sum(axis=1), rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_a_transform_makes_equal_are_dropped(axis: int) -> None:
    x, _ = sample("given")
    x[3] = np.arange(30) + 7  # equal elements, once the centers are subtracted
    stored = x if axis == 0 else np.ascontiguousarray(x.T)
    change = Transform(center=np.arange(30.0))
    with pytest.warns(oocgemm.DataWarning, match="1 of 47"):
        found = oocgemm.corr(stored, axis=axis, transform=change, constant="drop", backend="host")
    kept = np.delete(x.astype(float) - np.arange(30), 3, axis=0)
    np.testing.assert_allclose(found.out, np.corrcoef(kept), atol=1e-6)


def test_what_a_transform_cannot_do_is_refused() -> None:
    x = np.ones((4, 3), np.int8)
    with pytest.raises(InputError, match="corrects a C that is stored"):
        oocgemm.reduce(x, to=oocgemm.Reduce("sum"), transform_a=Transform(center="k", cast="int8"))
    with pytest.raises(InputError, match="there is no B"):
        oocgemm.reduce(x, to=oocgemm.Reduce("sum"), transform_b=Transform(cast="float32"))
