"""Missing genotypes of .bed files are imputed in statistics, and refused in products unless asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.plink import genotypes, write_bed
from tests.support.suite import each_value

Array = NDArray[Any]
RNG = np.random.default_rng(17)
ON_HOST: dict[str, Any] = {"backend": "host"}


@pytest.fixture
def x() -> Array:
    return genotypes(RNG, 37, 23, missing=0.2)


@pytest.fixture
def bed(x: Array, tmp_path: Path) -> Path:
    return write_bed(tmp_path / "x.bed", x)


def imputed(x: Array) -> Array:
    """Return genotypes in which missing ones are the means of their columns."""
    known: Any = np.ma.masked_equal(x, -1).astype(np.float64)
    means = np.asarray(known.mean(axis=0).filled(0))
    return np.where(x == -1, means, x.astype(np.float64))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
def test_correlations_are_those_of_imputed_genotypes(engine: Engine, axis: int, x: Array, bed: Path) -> None:
    filled = imputed(x) if axis == 0 else imputed(x).T
    with running_on(engine) as options:
        given: dict[str, Any] = {"axis": axis, "tile": "16x16x16", **options}
        np.testing.assert_allclose(oocgemm.corr(bed, **given).out, np.corrcoef(filled), atol=1e-5)
        np.testing.assert_allclose(oocgemm.cov(bed, **given).out, np.cov(filled), atol=1e-5)
        best = np.corrcoef(filled)
        np.fill_diagonal(best, -2)
        found = oocgemm.corr(bed, topk=1, **given)
        np.testing.assert_allclose(found.scores[:, 0], best.max(axis=1), atol=1e-5)
        pairs = oocgemm.corr(bed, threshold=0.1, **given)
        assert len(pairs.scores) == (np.abs(best) >= 0.1).sum() - len(best)  # the diagonal is -2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_similarities_are_those_of_imputed_genotypes(
    engine: Engine, metric: str, x: Array, bed: Path
) -> None:
    rows = imputed(x)
    if metric == "cosine":
        rows /= np.linalg.norm(rows, axis=1)[:, None]
    expected = rows @ rows.T
    np.fill_diagonal(expected, -np.inf)
    with running_on(engine) as options:
        found = oocgemm.similarity(bed, topk=3, metric=metric, **options)
    np.testing.assert_allclose(found.scores, -np.sort(-expected, axis=1)[:, :3], rtol=1e-5)


@pytest.mark.parametrize("scale", [None, "k", "hwe"])
@pytest.mark.parametrize("center", [True, False])
def test_components_are_those_of_imputed_genotypes(
    scale: str | None, center: bool, x: Array, bed: Path
) -> None:
    filled, known = imputed(x), np.ma.masked_equal(x, -1).astype(np.float64)
    centered = filled - filled.mean(axis=0) * center
    if scale == "k":
        centered /= np.asarray(known.std(axis=0))
    elif scale == "hwe":
        p = np.asarray(known.mean(axis=0)) / 2
        centered /= np.sqrt(2 * p * (1 - p))
    given: dict[str, Any] = {"iterations": 30, "center": center, "scores": True, **ON_HOST}
    found = oocgemm.pca(bed, 3, transform=None if scale is None else oocgemm.Transform(scale=scale), **given)
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(centered)[1][:3], rtol=1e-4)
    assert found.scores is not None
    np.testing.assert_allclose(np.linalg.norm(found.scores, axis=0), found.singular_values, rtol=1e-3)


def test_the_first_component_is_the_population_and_not_the_batch(tmp_path: Path) -> None:
    """Of two populations, one batch of individuals has many missing genotypes."""
    rng, people = np.random.default_rng(5), 120
    population, batch = np.arange(people) % 2, np.arange(people) >= people // 2
    frequency = np.clip(
        rng.uniform(0.3, 0.7, 900) + np.outer(population - 0.5, rng.normal(0, 0.1, 900)), 0.05, 0.95
    )
    y = rng.binomial(2, frequency).astype(np.int8)
    y[(rng.random(y.shape) < 0.15) & batch[:, None]] = -1
    path = write_bed(tmp_path / "y.bed", y)

    def related(given: oocgemm.PCA) -> tuple[float, float]:
        assert given.scores is not None
        first = given.scores[:, 0]
        to_population, to_batch = (float(abs(np.corrcoef(first, of)[0, 1])) for of in (population, batch))
        return to_population, to_batch

    to_population, to_batch = related(oocgemm.pca(path, 1, scores=True, **ON_HOST))
    assert (to_population > 0.9, to_batch < 0.3) == (True, True)
    to_population, to_batch = related(oocgemm.pca(path, 1, scores=True, decode=False, **ON_HOST))
    assert to_batch > 0.9


PRODUCTS: dict[str, Callable[..., Any]] = {
    "gemm, A": lambda bed, **given: oocgemm.gemm(bed, np.ones((23, 2), np.int8), **given),
    "gemm, B": lambda bed, **given: oocgemm.gemm(np.ones((2, 37), np.int8), bed, **given),
    "matmul": lambda bed, **given: oocgemm.matmul(bed, np.ones((23, 2), np.int8), **given),
    "gram": oocgemm.gram,
    "gram, columns": lambda bed, **given: oocgemm.gram(bed, axis=1, **given),
    "plan, run": lambda bed, **given: oocgemm.plan(bed, bed, trans_b="T", **given).run(),
    "reduce": lambda bed, **given: oocgemm.reduce(bed, to=oocgemm.Reduce("sum"), **given),
    "reduce, topk": lambda bed, **given: oocgemm.reduce(bed, to=oocgemm.TopK(2), **given),
    "verify": lambda bed, backend, **given: oocgemm.verify(
        bed, np.eye(23, dtype=np.int8), np.zeros((37, 23), np.int32), **given
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_refuse_missing_genotypes(name: str, x: Array, bed: Path) -> None:
    call, count = PRODUCTS[name], (x == -1).sum()
    for _ in range(2):  # also with the counts that are cached
        with pytest.raises(
            InputError, match=rf"{bed} has {count} missing genotypes, which would count as -1: "
        ):
            call(bed, **ON_HOST)
    call(bed, decode=False, **ON_HOST)
    if "reduce" not in name:
        other: Any = {"transform": oocgemm.Transform(missing=-9)} if "gram" in name else {}
        with pytest.raises(InputError, match="missing genotypes"):
            call(bed, **other, **ON_HOST)
    write_bed(bed, np.abs(x))
    call(bed, **ON_HOST)


def test_the_remedies_for_missing_genotypes_work(x: Array, bed: Path, tmp_path: Path) -> None:
    weights = RNG.integers(-3, 4, (23, 2)).astype(np.int8)
    with pytest.raises(
        InputError, match=r"pass transform_a=Transform\(missing=-1\) \(--transform-a missing=-1\)"
    ):
        oocgemm.gemm(bed, weights, **ON_HOST)
    change = oocgemm.Transform(missing=-1)
    product = oocgemm.gemm(bed, weights.astype("f4"), transform_a=change, **ON_HOST).out
    np.testing.assert_allclose(product, imputed(x) @ weights, rtol=1e-4, atol=1e-3)
    with pytest.raises(
        InputError, match=r"pass transform=Transform\(missing=-1\) \(--transform missing=-1\)"
    ):
        oocgemm.gram(bed, **ON_HOST)
    product = oocgemm.gram(bed, uplo="full", transform=change, **ON_HOST).out
    np.testing.assert_allclose(product, imputed(x) @ imputed(x).T, rtol=1e-4, atol=1e-3)
    given: Any = {"transform_a": oocgemm.Transform(missing=-1, impute=0)}
    found = oocgemm.gemm(bed, weights, **given, **ON_HOST).out
    np.testing.assert_array_equal(found, np.where(x == -1, 0, x).astype(int) @ weights)


def test_commands_refuse_and_impute_alike(
    x: Array, bed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", weights := np.ones((23, 2), np.int8))
    host = "--backend", "host", "--quiet"
    for arguments, option in (
        (("run", "x.bed", "w.npy", "c.npy"), "--transform-a missing=-1"),
        (("gram", "x.bed", "k.npy"), "--transform missing=-1"),
    ):
        done = command(*arguments, *host)
        assert (done.code, option in done.err, "--no-decode" in done.err) == (2, True, True)
        assert command(*arguments, *host, "--no-decode").code == 0
    np.testing.assert_array_equal(np.load("c.npy"), x.astype(int) @ weights)
    assert command("verify", "x.bed", "w.npy", "c.npy").code == 2
    assert command("verify", "x.bed", "w.npy", "c.npy", "--no-decode").code == 0
    done = command("run", "x.bed", "w.npy", "d.npy", *host, "--transform-a", "missing=-1,impute=0")
    assert (done.code, done.err) == (0, "")
    assert command("corr", "x.bed", "r.npy", *host).code == 0
    np.testing.assert_allclose(np.load("r.npy"), np.corrcoef(imputed(x)), atol=1e-5)
    assert command("pca", "x.bed", "p.zarr", "--components", "2", *host).err == ""
    assert command("similarity", "x.bed", "s.zarr", "--topk", "2", *host).err == ""


def test_without_gaps_genotypes_stay_exact(x: Array, bed: Path) -> None:
    write_bed(bed, whole := np.abs(x))
    found = oocgemm.similarity(bed, topk=2, metric="dot", **ON_HOST)
    exact = whole.astype(int) @ whole.T
    np.fill_diagonal(exact, -1)
    assert found.scores.dtype == np.float64
    np.testing.assert_array_equal(found.scores[:, 0], exact.max(axis=1))
    one, other = (oocgemm.pca(each, 2, **ON_HOST).singular_values for each in (bed, whole))
    np.testing.assert_array_equal(one, other)


def test_statistics_leave_missing_genotypes_out_by_default(x: Array, bed: Path) -> None:
    np.testing.assert_array_equal(oocgemm.stats(bed).missing, (x == -1).sum(axis=0))
    np.testing.assert_array_equal(oocgemm.stats(bed, axis=1).missing, (x == -1).sum(axis=1))
    np.testing.assert_array_equal(oocgemm.stats(bed, decode=False).mean, x.mean(axis=0))


def test_correlations_leave_out_constant_variants_after_imputation(x: Array, bed: Path) -> None:
    x[:, 3], x[:, 5] = -1, np.where(x[:, 5] == -1, -1, 2)
    write_bed(bed, x)
    with pytest.warns(oocgemm.DataWarning, match="2 of 23 columns"):
        found = oocgemm.corr(bed, axis=1, constant="drop", **ON_HOST).out
    kept = np.delete(imputed(x), [3, 5], axis=1)
    np.testing.assert_allclose(found, np.corrcoef(kept.T), atol=1e-5)


def test_nothing_is_written_before_genotypes_are_refused(bed: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for out in ("c.npy", "c.zarr"):
        with pytest.raises(InputError, match="missing genotypes"):
            oocgemm.gram(bed, tmp_path / out, **ON_HOST)
    assert sorted(tmp_path.iterdir()) == before
