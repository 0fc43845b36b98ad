"""`king` and `ibs` count the genotypes that both of two individuals have, as plink does."""

from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import CombinationError, InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.plink import genotypes, write_bed
from tests.support.suite import each_value
from tests.support.unfinished_runs import failing_after

Array = NDArray[Any]
TILE = "16x16x20"


def counts(x: Array) -> dict[str, Array]:
    """Count genotypes of each pair of individuals as `plink2 --make-king-table` does. -1 is missing."""
    a, b = x[:, None].astype(int), x[None].astype(int)
    both = (a >= 0) & (b >= 0)
    het, other = (a == 1) & both, (b == 1) & both
    return {
        "ibs0": ((abs(a - b) == 2) & both).sum(2),
        "ibs1": ((abs(a - b) == 1) & both).sum(2),
        "ibs2": ((a == b) & both).sum(2),
        "hethet": (het & other).sum(2),
        "het1hom2": (het & ~other).sum(2),
        "het2hom1": (other & ~het).sum(2),
    }


def kinship(x: Array) -> Array:
    """Compute `ComputeKinship` of plink2 for each pair."""
    n = counts(x)
    smaller = n["hethet"] + np.minimum(n["het1hom2"], n["het2hom1"])
    with np.errstate(all="ignore"):
        return np.asarray(0.5 - (4 * n["ibs0"] + n["het1hom2"] + n["het2hom1"]) / (4 * smaller))


def similarity(x: Array) -> Array:
    """Compute DST of `plink --genome` for each pair."""
    n = counts(x)
    with np.errstate(all="ignore"):
        return np.asarray((n["ibs2"] + 0.5 * n["ibs1"]) / (n["ibs0"] + n["ibs1"] + n["ibs2"]))


def sample(missing: float, people: int = 37, variants: int = 90) -> Array:
    """Return genotypes of individuals, of whom two are equal, and one has no heterozygous genotype."""
    x = genotypes(np.random.default_rng(3), people, variants, missing)
    x[5] = x[4]
    x[6] = np.where(x[6] == 1, 2, x[6])
    return x


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("missing", [0, 0.2])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32", "bed"])
def test_results_are_those_of_plink(engine: Engine, missing: float, dtype: str, tmp_path: Path) -> None:
    x = sample(missing)
    given: Any = write_bed(tmp_path / "x.bed", x) if dtype == "bed" else x
    code: Any = -1
    if dtype == "uint8":
        given, code = np.where(x < 0, 9, x).astype(np.uint8), 9
    if dtype == "float32":
        given = np.where(x < 0, nan, x).astype(np.float32)
    for tile in (None, TILE):
        with running_on(engine) as options:
            how: Any = {"missing": code, "tile": tile, **options}
            related = oocgemm.king(given, **how)
            alike = oocgemm.ibs(given, **how).out
            counted = {name: oocgemm.ibs(given, measure=name, **how).out for name in ("ibs0", "ibs1", "ibs2")}
        assert related.plan.problem.terms.count == (4 if missing else 1)
        np.testing.assert_array_equal(related.out, kinship(x).astype(np.float32))
        np.testing.assert_array_equal(alike, similarity(x).astype(np.float32))
        for name, found in counted.items():
            np.testing.assert_array_equal(found, counts(x)[name])
    assert related.out[4, 5] == 0.5
    assert np.isneginf(related.out[6, :4]).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("missing", [0, 0.2])
def test_pairs_above_a_threshold(engine: Engine, missing: float) -> None:
    x = sample(missing)
    for verb, exact, least in ((oocgemm.king, kinship(x), -0.2), (oocgemm.ibs, similarity(x), 0.6)):
        right = exact.astype(np.float32)
        np.fill_diagonal(right, -np.inf)
        with running_on(engine) as options:
            found = verb(x, threshold=least, tile=TILE, **options)
        rows, columns = np.nonzero(right >= least)
        assert rows.size
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.indices, columns)
        np.testing.assert_array_equal(found.scores, right[rows, columns])


def test_variants_as_rows_and_triangles() -> None:
    x = sample(0.1)
    found = oocgemm.king(x.T.copy(), axis=1, uplo="lower", backend="host", tile=TILE)
    assert found.uplo == "lower"
    np.testing.assert_array_equal(found.out, np.tril(kinship(x)).astype(np.float32))


def test_only_chosen_chromosomes_of_a_bed_file_are_used(tmp_path: Path) -> None:
    x = sample(0.1)
    path = write_bed(tmp_path / "x.bed", x)
    lines = [f"{'X' if j % 3 else 5}\trs{j}\t0\t{j}\tA\tG\n" for j in range(x.shape[1])]
    path.with_suffix(".bim").write_text("".join(lines))
    on_x = np.arange(x.shape[1]) % 3 > 0
    for chosen, used in ((None, ~on_x), ("X", on_x), ("all", on_x | True)):
        found = oocgemm.king(path, chromosomes=chosen, backend="host").out
        np.testing.assert_array_equal(found, kinship(x[:, used]).astype(np.float32))
        found = oocgemm.ibs(path, chromosomes=chosen, backend="host").out
        np.testing.assert_array_equal(found, similarity(x[:, used]).astype(np.float32))


def test_a_device_counts_what_the_host_counts() -> None:
    x = sample(0.2, 300, 5000)
    for given in (x, np.maximum(x, 0)):
        with fake_cuda():
            found = oocgemm.king(given, backend="cuda", kernel="cublas").out
        np.testing.assert_array_equal(found, oocgemm.king(given, backend="host").out)


@pytest.mark.parametrize("missing", [0, 0.2])
def test_several_devices_and_workers_give_equal_bits(missing: float, tmp_path: Path) -> None:
    x = sample(missing)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(16, 90))
    for verb in (oocgemm.king, oocgemm.ibs):
        how: Any = {"backend": "host", "tile": TILE}
        one = verb(x, **how).out
        np.testing.assert_array_equal(verb(x, devices=[0, 0], **how).out, one)
        found = verb(
            tmp_path / "x.zarr", tmp_path / f"{verb.__name__}.zarr", workers=2, memory="400MiB", **how
        )
        np.testing.assert_array_equal(found.out[:], one)


@pytest.mark.parametrize("missing", [0, 0.2])
def test_an_interrupted_run_is_resumed(missing: float, tmp_path: Path) -> None:
    x = sample(missing)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(16, 90))
    call: Any = partial(oocgemm.king, tmp_path / "x.zarr", tmp_path / "c.zarr", backend="host", tile=TILE)
    with failing_after(3), pytest.raises(oocgemm.ExecutionError):
        call()
    with pytest.raises(InputError, match="epilogue"):
        oocgemm.ibs(tmp_path / "x.zarr", tmp_path / "c.zarr", backend="host", tile=TILE, resume=True)
    found = call(resume=True)
    assert found.plan.done
    np.testing.assert_array_equal(found.out[:], kinship(x).astype(np.float32))


@pytest.mark.parametrize(
    ("message", "change", "options"),
    [
        ("row 2 of X has an element that is none of the genotypes", 3, {}),
        ("row 2 of X has an element that is none of the genotypes", -9, {}),
        ("row 2 of X has an element that is none of the genotypes", 0.5, {}),
        ("measure = 'ibs3': choose one of", 0, {"measure": "ibs3"}),
        ("kept in memory, all pairs of it", 0, {"threshold": 0.5, "uplo": "lower"}),
        ("chromosomes are named in the .bim file", 0, {"chromosomes": "3"}),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    message: str, change: float, options: Any, tmp_path: Path
) -> None:
    x = sample(0).astype(float if change == 0.5 else np.int8)
    x[2, 7] = change
    call: Any = oocgemm.ibs
    out = {} if "threshold" in options else {"out": tmp_path / "c.zarr"}
    with pytest.raises(InputError, match=message):
        call(x, backend="host", **out, **options)
    assert not (tmp_path / "c.zarr").exists()


def test_wrong_genotypes_are_found_on_a_device() -> None:
    x = sample(0, 300, 5000)
    x[250, 17] = 3
    with fake_cuda(), pytest.raises(InputError, match="row 250 of X has the element 3"):
        oocgemm.king(x, backend="cuda", kernel="cublas")


def test_verify_is_a_hole() -> None:
    with pytest.raises(CombinationError, match="verify checks one product"):
        oocgemm.king(sample(0), verify=True, backend="host")


def test_plans_read_nothing(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", sample(0.1))
    unknown, complete = (
        oocgemm.king(path, dry_run=True, backend="host", missing=code) for code in (-1, None)
    )
    assert unknown.problem.flops == 4 * complete.problem.flops
    assert oocgemm.ibs(path, dry_run=True, backend="host").problem.terms.count == 3


def test_commands_store_matrices_and_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = sample(0.1)
    write_bed(tmp_path / "x.bed", x)
    assert command("king", "x.bed", "k.zarr", "--backend", "host").code == 0
    np.testing.assert_array_equal(zarr.open_array("k.zarr")[:], kinship(x).astype(np.float32))
    assert command("ibs", "x.bed", "i.npy", "--measure", "ibs0", "--backend", "host").code == 0
    np.testing.assert_array_equal(np.load("i.npy"), counts(x)["ibs0"])
    assert command("king", "x.bed", "p.zarr", "--threshold", "0.4", "--backend", "host").code == 0
    group: Any = zarr.open_group("p.zarr")
    np.testing.assert_array_equal(group["indices"][:], [5, 4])
