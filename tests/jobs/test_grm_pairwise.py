"""`grm` divides each element by the number of variants that both individuals have, as GCTA does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.plink import Array, genotypes, write_bed
from tests.support.suite import each_value
from tests.support.unfinished_runs import failing_after

RNG = np.random.default_rng(30)
X = genotypes(RNG, 60, 200)
# Variants with one allele and without any known genotype, and an individual without any.
X[:, [3, 17, 40, 60]] = 0, 2, -1, 1
X[5, 17], X[8, 20:] = -1, -1
LOWER = np.tril_indices(60)


def reference(x: Array, method: str = "gcta") -> tuple[Array, Array]:
    """Return the relationships and the numbers of variants, by a loop over pairs as GCTA's."""
    known = x != -1
    p = np.where(known, x, 0).sum(0) / np.maximum(1, known.sum(0)) / 2
    used = (p > 0) & (p < 1)
    variance = (2 * p * (1 - p))[used]
    z, weight = (x - 2 * p)[:, used], variance.mean()
    if method == "gcta":
        z, weight = z / np.sqrt(variance), 1
    known = known[:, used]
    sums, counts = np.zeros((2, len(x), len(x)))
    for j in range(len(x)):
        for k in range(len(x)):
            both = known[j] & known[k]
            counts[j, k], sums[j, k] = both.sum(), z[j, both] @ z[k, both]
    return sums / np.maximum(1, counts) / weight, counts


MATRIX, COUNTS = reference(X)


@pytest.mark.parametrize("engine", ENGINES)
def test_relationships_are_those_of_a_loop_over_pairs(engine: Engine, tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    with running_on(engine) as options:
        given: Any = {"pairwise": True, "tile": "24x24x50", **options}
        for x, more in (
            (path, {}),
            (X, {"cast": "float64", "uplo": "lower"}),
            (X, {"cast": "float16"}),
            (np.where(X.T == -1, np.nan, X.T.astype(np.float32)), {"axis": 1, "missing": np.nan}),
        ):
            found = oocgemm.grm(x, **given, **more)
            cast: Any = more.get("cast", "float32")
            tolerance = {"float64": 1e-13, "float16": 2e-2}.get(cast, 2e-6)
            np.testing.assert_allclose(found.out[LOWER], MATRIX[LOWER], rtol=0, atol=tolerance)
            np.testing.assert_array_equal(found.counts[LOWER], COUNTS[LOWER])
            if more.get("uplo") is None:
                np.testing.assert_array_equal(found.out, found.out.T)


@pytest.mark.parametrize("name", ["g.grm.bin", "g.zarr", "g.npy"])
def test_the_counts_are_stored_beside_the_matrix(tmp_path: Path, name: str) -> None:
    path, out = write_bed(tmp_path / "x.bed", X), tmp_path / name
    done = command("grm", str(path), str(out), "--pairwise", "--backend", "host", "--tile", "24x24x50")
    assert done.code == 0, done.err
    if name == "g.grm.bin":
        matrix = np.fromfile(out, "<f4")
        np.testing.assert_array_equal(np.fromfile(tmp_path / "g.grm.N.bin", "<f4"), COUNTS[LOWER])
        assert len((tmp_path / "g.grm.id").read_text().splitlines()) == 60
    elif name == "g.npy":
        matrix = np.load(out)[LOWER]
        np.testing.assert_array_equal(np.load(tmp_path / "g.counts.npy"), COUNTS)
    else:
        matrix = np.asarray(zarr.open_array(out)[:])[LOWER]
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "g.counts.zarr")[:], COUNTS)
    np.testing.assert_allclose(matrix, MATRIX[LOWER], rtol=0, atol=2e-6)


@each_value
@pytest.mark.parametrize("name", ["g.grm.bin", "g.zarr"])
@pytest.mark.parametrize("tiles", [0, 2, 7, 9])
def test_either_product_is_resumed(tmp_path: Path, name: str, tiles: int) -> None:
    """Of the 6 tiles of each product, or 9 of the counts, some are done when a run fails."""
    path, out = write_bed(tmp_path / "x.bed", X), str(tmp_path / name)
    given: Any = {"pairwise": True, "tile": "24x24x50", "backend": "host"}
    with failing_after(tiles), pytest.raises(oocgemm.ExecutionError):
        oocgemm.grm(path, out, **given)
    found = oocgemm.grm(path, out, resume=True, **given)
    matrix = np.asarray(found.out) if name == "g.grm.bin" else np.asarray(found.out[:])[LOWER]
    np.testing.assert_allclose(matrix, MATRIX[LOWER], rtol=0, atol=2e-6)


def test_without_missing_genotypes_there_is_one_number() -> None:
    x = np.where(X == -1, 1, X)
    found = oocgemm.grm(x, pairwise=True, backend="host")
    np.testing.assert_array_equal(found.out, oocgemm.grm(x, backend="host").out)
    assert found.counts is None


@each_value
@pytest.mark.parametrize("method", ["gcta", "vanraden"])
@pytest.mark.parametrize("name", ["", "g.grm.bin", "g.npy", "g.zarr"])
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
def test_a_pair_without_a_common_variant_is_0(name: str, method: str, dtype: str, tmp_path: Path) -> None:
    x = np.array([[0, 1, -1, -1], [-1, -1, 2, 1], [2, 2, 0, 0], [-1, -1, -1, -1]]).astype(dtype)
    expected, counts = reference(x, method)
    cast: Any = "float32" if name.endswith("bin") else "float64"
    out = str(tmp_path / name) if name else None
    found = oocgemm.grm(x, out, method=method, pairwise=True, cast=cast, verify=True, backend="host")
    matrix, numbers = np.asarray(found.out[:]), np.asarray(found.counts[:])
    lower = np.tril_indices(4) if name.endswith("bin") else slice(None)
    np.testing.assert_array_equal(numbers, counts[lower])
    np.testing.assert_allclose(matrix, expected[lower], rtol=1e-6 if cast == "float32" else 1e-13)
    assert (matrix[numbers == 0] == 0).all()
    assert (numbers == 0).sum() > 3


@pytest.mark.parametrize("engine", ENGINES)
def test_vanraden_is_divided_as_gcta_divides(engine: Engine, tmp_path: Path) -> None:
    """GCTA divides by the number of common variants, times the mean of 2 p (1 - p) over all variants."""
    path, (expected, counts) = write_bed(tmp_path / "x.bed", X), reference(X, "vanraden")
    with running_on(engine) as options:
        given: Any = {"method": "vanraden", "pairwise": True, "tile": "24x24x50", **options}
        for x, more in ((path, {}), (X, {"cast": "float64"}), (X.astype(np.float32), {"missing": -1.0})):
            found = oocgemm.grm(x, **given, **more)
            tolerance = 1e-13 if found.out.dtype == np.float64 else 2e-6
            np.testing.assert_allclose(found.out[LOWER], expected[LOWER], rtol=0, atol=tolerance)
            np.testing.assert_array_equal(found.counts[LOWER], counts[LOWER])


def test_the_command_takes_both_options(tmp_path: Path) -> None:
    path, out = write_bed(tmp_path / "x.bed", X), tmp_path / "g.grm.bin"
    line = "--method", "vanraden", "--pairwise", "--backend", "host", "--tile", "24x24x50"
    done = command("grm", str(path), str(out), *line)
    assert done.code == 0, done.err
    expected, counts = reference(X, "vanraden")
    np.testing.assert_allclose(np.fromfile(out, "<f4"), expected[LOWER], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "g.grm.N.bin", "<f4"), counts[LOWER])
