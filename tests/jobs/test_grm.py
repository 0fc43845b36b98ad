"""Genetic relationship matrices agree with NumPy, in arrays and in GCTA's files."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import DataWarning, InputError
from oocgemm.stores.base import NewArray
from oocgemm.stores.genetics import GrmFiles, GrmMatrix, companions
from tests.support import TOP
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.plink import Array, genotypes, reference, write_bed
from tests.support.suite import each_value, examples
from tests.support.unfinished_runs import failing_after

RNG = np.random.default_rng(12)
# Two variants with one allele and one without any known genotype are left out. One is heterozygous in all.
X = genotypes(RNG, 60, 200)
X[:, [3, 17, 40, 60]] = 0, 2, -1, 1
X[5, 17] = -1
EXCLUDED = 3
METHODS = ["gcta", "vanraden"]


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_relationships_agree_with_numpy(engine: Engine, method: str, tmp_path: Path) -> None:
    path, (expected, excluded) = write_bed(tmp_path / "x.bed", X), reference(X, method)
    assert excluded == EXCLUDED
    by_variant = np.where(X.T == -1, np.nan, X.T.astype(np.float32))
    with running_on(engine) as options:
        given: Any = {"method": method, "tile": "24x24x50", **options}
        for x, more in (
            (path, {}),
            (X, {"cast": "float64"}),
            (by_variant, {"axis": 1, "missing": np.nan}),
            (np.where(X == -1, 9, X).astype(np.int32), {"missing": 9}),
        ):
            found = oocgemm.grm(x, **given, **more)
            assert (found.variants, found.excluded) == (200 - EXCLUDED, EXCLUDED)
            tolerance = 1e-13 if found.out.dtype == np.float64 else 2e-6
            np.testing.assert_allclose(found.out, expected, rtol=0, atol=tolerance)
            np.testing.assert_array_equal(found.out, found.out.T)


AUTOSOMES = [str(number) for number in range(1, 23)]
HUMAN = [*AUTOSOMES, "X", "Y", "XY", "MT", "0"]
NUMBERED = [*AUTOSOMES, "23", "24", "25", "26", "0"]


def name_chromosomes(path: Path, names: Sequence[str]) -> Array:
    """Write a .bim file in which the names take turns. Return the name of each variant."""
    each = np.array([names[i % len(names)] for i in range(X.shape[1])])
    path.with_suffix(".bim").write_text(
        "".join(f"{name}\trs{j} 0 {j + 1} A G\n" for j, name in enumerate(each))
    )
    return each


def used_by(path: Path, method: str, used: Array, **options: Any) -> None:
    """Compare a matrix with that of the given variants."""
    expected, excluded = reference(X[:, used], method)
    given: Any = {"backend": "host", "tile": "24x24x50", "method": method} | options
    found = oocgemm.grm(path, **given)
    numbers = (int(used.sum()) - excluded, excluded, int((~used).sum()))
    assert (found.variants, found.excluded, found.elsewhere) == numbers
    if options.get("pairwise"):
        known = (X[:, used] != -1).astype(int)
        p = np.where(known, X[:, used], 0).sum(0) / np.maximum(1, known.sum(0)) / 2
        known = known[:, (p > 0) & (p < 1)]
        np.testing.assert_array_equal(found.counts, known @ known.T)
        expected = expected * found.variants / found.counts
    np.testing.assert_allclose(found.out, expected, rtol=0, atol=2e-2 if "cast" in options else 3e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prefix", ["", "chr", "CHR"])
@pytest.mark.parametrize("names", [HUMAN, NUMBERED, [name.lower() for name in HUMAN]], ids=str)
def test_autosomes_are_used_by_default(method: str, prefix: str, names: list[str], tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    each = name_chromosomes(path, [prefix + name for name in names])
    used_by(path, method, np.isin(each, [prefix + name for name in AUTOSOMES]))


@each_value
@pytest.mark.parametrize(
    ("chromosomes", "named"),
    [
        ("all", HUMAN),
        ("autosomes", AUTOSOMES),
        ("1-22,X", [*AUTOSOMES, "X"]),
        (["autosomes", "MT"], [*AUTOSOMES, "MT"]),
        ("chrx", ["X"]),
        ("23", ["X"]),
        (range(1, 4), AUTOSOMES[:3]),
        (7, ["7"]),
        ("2-3, 5", ["2", "3", "5"]),
        ("0", ["0"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("numbered", [False, True])
def test_chromosomes_are_chosen_by_their_names(
    chromosomes: Any, named: list[str], numbered: bool, tmp_path: Path
) -> None:
    path, aliases = write_bed(tmp_path / "x.bed", X), dict(zip(HUMAN, NUMBERED, strict=True))
    each = name_chromosomes(path, NUMBERED if numbered else HUMAN)
    used = np.isin(each, [aliases[name] if numbered else name for name in named])
    used_by(path, "vanraden", used, chromosomes=chromosomes)
    text = chromosomes if isinstance(chromosomes, str) else ",".join(map(str, np.atleast_1d(chromosomes)))
    out = str(tmp_path / "g.npy")
    line = "--chromosomes", text, "--method", "vanraden", "--backend", "host"
    done = command("grm", str(path), out, *line)
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load(out), reference(X[:, used], "vanraden")[0], rtol=0, atol=3e-6)
    assert (f"{(~used).sum()} of 200 variants were left out: they are on other" in done.err) == bool(
        (~used).any()
    )


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_variants_elsewhere_count_nowhere(engine: Engine, method: str, tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    used = np.isin(name_chromosomes(path, HUMAN), AUTOSOMES)
    with running_on(engine) as options:
        for more in ({}, {"pairwise": True}, {"cast": "float16"}, {"cast": "float64"}):
            used_by(path, method, used, **options, **more)


def test_chromosomes_of_other_species(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    cow = [str(number) for number in range(1, 31)]
    each = name_chromosomes(path, [*cow, "X"])
    with pytest.warns(DataWarning, match="names chromosome 30, .* such as 1-30, or all"):
        used_by(path, "gcta", np.isin(each, AUTOSOMES))
    used_by(path, "gcta", np.isin(each, cow[:29]), chromosomes="1-29")  # 23 is not X here
    used_by(path, "gcta", each == "X", chromosomes="X")
    each = name_chromosomes(path, ["1", "23", "X"])
    used_by(path, "gcta", each == "23", chromosomes="23")


def test_without_chromosomes_all_variants_are_used(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    name_chromosomes(path, ["0"])
    used_by(path, "gcta", np.ones(200, bool))
    given: Any = {"chromosomes": "all", "backend": "host"}
    np.testing.assert_array_equal(oocgemm.grm(X, **given).out, oocgemm.grm(path, **given).out)


@pytest.mark.parametrize(
    ("names", "chromosomes", "message", "remedy"),
    [
        (
            ["NC_1", "NC_2"],
            None,
            "no variant .* on chromosome autosomes: x.bim names NC_1, NC_2; pass",
            "NC_1",
        ),
        (["1", "2"], "X", "on chromosome X: x.bim names 1, 2; .* or all", "all"),
        (["1", "2"], "1,7-9", "on chromosome 7-9", "1"),
        (["1"], "1,", "pass names, numbers or ranges, such as '1-22,X'", "1-22"),
        (["1"], [], "pass names, numbers or ranges", "autosomes"),
        (["1"], True, "pass names, numbers or ranges", "all"),
        (["1"], 1.0, "pass names, numbers or ranges", 1),
    ],
)
def test_chromosomes_that_are_not_there_are_refused(
    names: list[str], chromosomes: Any, message: str, remedy: Any, tmp_path: Path
) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    name_chromosomes(path, names)
    with pytest.raises(InputError, match=message):
        oocgemm.grm(path, chromosomes=chromosomes, backend="host")
    oocgemm.grm(path, chromosomes=remedy, backend="host")
    with pytest.raises(InputError, match="X is no such file: drop chromosomes"):
        oocgemm.grm(X, chromosomes=remedy if remedy != "all" else "1", backend="host")


def test_a_plan_knows_the_chromosomes(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", X)
    name_chromosomes(path, HUMAN)
    line = "grm", str(path), str(tmp_path / "g.npy"), "--method", "vanraden", "--backend", "host", "--dry-run"
    assert command(*line, "--json").code == 0
    assert "no variant of" in command(*line, "--chromosomes", "40").err


def test_half_precision_gives_float32() -> None:
    with running_on("fake-cuda") as options:
        found = oocgemm.grm(X, cast="float16", uplo="lower", **options)
    assert found.out.dtype == np.float32
    expected = reference(X, "gcta")[0]
    np.testing.assert_allclose(np.tril(found.out), np.tril(expected), atol=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_grm_bin_file_has_the_lower_triangle_by_rows(method: str, tmp_path: Path) -> None:
    path, out = write_bed(tmp_path / "x.bed", X), tmp_path / "new" / "g.grm.bin"
    with pytest.warns(oocgemm.DataWarning, match="new does not exist, and is created"):
        found = oocgemm.grm(path, out, method=method, backend="host", tile="24x24x50", verify=True)
    expected = reference(X, method)[0]
    stored = np.fromfile(out, "<f4")
    np.testing.assert_allclose(stored, expected[np.tril_indices(60)], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(found.out, stored)
    ids = (tmp_path / "new" / "g.grm.id").read_text().splitlines()
    assert (len(ids), ids[:3]) == (60, ["F0\tI0", "F0\tI1", "F1\tI2"])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "new" / "g.grm.N.bin", "<f4"), np.full(1830, 197))
    assert sorted(place.name for place in out.parent.iterdir()) == ["g.grm.N.bin", "g.grm.bin", "g.grm.id"]
    # It is an operand, too: a symmetric matrix.
    again = oocgemm.matmul(out, np.eye(60, dtype=np.float32), backend="host", tile="16x16x16")
    np.testing.assert_array_equal(again[np.tril_indices(60)], stored)
    np.testing.assert_array_equal(again, again.T)


@pytest.mark.filterwarnings("ignore")
def test_pandas_plink_reads_the_files(tmp_path: Path) -> None:
    reader = pytest.importorskip("pandas_plink")
    path, out = write_bed(tmp_path / "x.bed", X), tmp_path / "g.grm.bin"
    oocgemm.grm(path, out, backend="host")
    found, counts = reader.read_grm(*(str(place) for place in (out, *companions(out))))
    np.testing.assert_allclose(found, reference(X, "gcta")[0], rtol=0, atol=2e-6)
    assert found.coords["iid"].values.tolist() == [f"I{i}" for i in range(60)]
    assert (np.asarray(counts) == 200 - EXCLUDED).all()


def test_an_array_without_ids_gets_row_numbers(tmp_path: Path) -> None:
    oocgemm.grm(X[:3], tmp_path / "g.grm.bin", backend="host")
    assert (tmp_path / "g.grm.id").read_text() == "1\t1\n2\t2\n3\t3\n"


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    path, out, right = write_bed(tmp_path / "x.bed", X), tmp_path / "g.grm.bin", tmp_path / "r.grm.bin"
    given: Any = {"backend": "host", "tile": "16x16x50"}
    with failing_after(3), pytest.raises(oocgemm.ExecutionError):
        oocgemm.grm(path, out, **given)
    assert not out.exists()
    assert len(oocgemm.grm(path, out, resume=True, **given).plan.done) == 3
    oocgemm.grm(path, right, **given)
    assert out.read_bytes() == right.read_bytes()
    assert not oocgemm.grm(path, out, resume=True, **given).plan.steps
    with pytest.raises(InputError, match="the transform of A is"):
        oocgemm.grm(path, out, method="vanraden", resume=True, **given)


def test_a_run_may_end_before_any_step() -> None:
    """`test_killed_runs` ends it before each step."""
    with tempfile.TemporaryDirectory() as work:
        line = [sys.executable, "-m", "tests.support.crash_points", "new.grm.bin", work, "29"]
        done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_blocks_of_a_triangle_are_written_and_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    extent = data.draw(st.integers(1, 12))
    symmetric: Array = np.arange(extent * extent, dtype=np.float32).reshape(extent, extent)
    symmetric += symmetric.T
    path = tmp_path_factory.mktemp("grm") / "g.grm.bin"
    matrix = GrmFiles().create(NewArray("C", str(path), (extent, extent), np.dtype("f4"), (1, 1)))
    cuts = sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=3))})
    spans = list(pairwise(cuts))
    for rows in spans:
        for cols in spans:
            matrix.write(rows, cols, symmetric[slice(*rows), slice(*cols)])
    np.testing.assert_array_equal(np.fromfile(path, "<f4"), symmetric[np.tril_indices(extent)])
    found = GrmFiles().open("G", str(path))
    assert isinstance(found, GrmMatrix)
    for rows in spans:
        for cols in spans:
            out = np.empty((rows[1] - rows[0], cols[1] - cols[0]), np.float32)
            found.read(rows, cols, out)
            np.testing.assert_array_equal(out, symmetric[slice(*rows), slice(*cols)])


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"method": "king"}, "method = 'king': choose one of gcta, vanraden"),
        (X, {"cast": "int8"}, "cast = 'int8': choose one of float32"),
        (X, {"missing": -9}, r"column \d+ of X has elements from -1 to 2 .* missing=-1"),
        (X.T, {"missing": -9, "axis": 1}, r"row \d+ of X has elements from -1 to 2"),
        (np.array([[0.5, np.nan], [1, 2]]), {}, r"column 1 .* from nan .* missing=np.nan \(--missing nan\)"),
        (X[:, [3, 17, 40]], {}, "none of the 3 variants of X has two alleles"),
        (X * 1j, {}, "transforms are for real operands"),
        (X, {"axis": 2}, "axis = 2"),
        (X, {"out": "g.grm.bin", "uplo": "full"}, "uplo = 'full': a .grm.bin file has the lower"),
        (X, {"out": "g.grm.bin", "cast": "float64"}, "stores float32, and C has dtype float64: pass another"),
        (X, {"out": "g.grm"}, r"GCTA's files .* pass g.grm.bin, or g.grm.zarr for an array"),
        (X, {"out": "g.grm.bin", "chunks": (2, 2)}, "chunks and compressor are for zarr"),
    ],
)
def test_bad_input_is_refused(
    x: Any, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        oocgemm.grm(x, backend="host", **options)
    assert list(tmp_path.iterdir()) == []


def test_files_of_gcta_are_not_overwritten_and_must_be_whole(tmp_path: Path) -> None:
    x, out = np.eye(6, dtype=np.float32), tmp_path / "g.grm.bin"
    with pytest.raises(InputError, match="stores the lower triangle of a Gram matrix: use grm, or gram with"):
        oocgemm.gemm(x, x, out, backend="host")
    oocgemm.gram(x, out, backend="host")
    np.testing.assert_array_equal(np.fromfile(out, "<f4"), x[np.tril_indices(6)])
    for more in ({}, {"overwrite": True}, {"beta": 1.0}):
        with pytest.raises(InputError, match=r"g.grm.bin, and .grm.bin files are not overwritten: remove"):
            oocgemm.gram(x, out, backend="host", **more)
    out.rename(tmp_path / "h.grm.bin")
    (tmp_path / "g.grm.id").write_text("of another matrix")
    with pytest.raises(InputError, match=r"would be replaced: .*g.grm.id: remove them"):
        oocgemm.grm(X, out, backend="host")
    with (tmp_path / "h.grm.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(InputError, match=r"has 85 bytes, and the triangle of 6 x 6 elements takes 84"):
        oocgemm.matmul(tmp_path / "h.grm.bin", x, backend="host")


@pytest.mark.parametrize("method", ["gcta", "vanraden"])
def test_a_dry_run_shows_the_plan_of_the_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    given = "--method", method, "--cast", "float32", "--device-memory", "1GiB", "--host-memory", "1GiB"
    shown = command("grm", "x.npy", "g.npy", *given, "--dry-run", "--backend", "cuda", "--json").json()
    with fake_cuda(1):
        options: dict[str, Any] = {"device_memory": "1GiB", "host_memory": "1GiB", "backend": "cuda"}
        planned: Any = oocgemm.grm("x.npy", "g.npy", method=method, cast="float32", **options).plan.to_dict()
    for part in ("footprint", "tile", "required"):
        assert shown[part] == planned[part]
    assert shown["problem"]["elements_a"] == planned["problem"]["elements_a"]


def test_the_command_computes_plans_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_bed(Path("x.bed"), X)
    done = command("grm", "x.bed", "g.grm.bin", "--dry-run", "--backend", "host", "--json")
    assert done.json()["problem"]["gram"] == "lower"
    assert not Path("g.grm.bin").exists()
    assert "second product" not in done.err
    done = command("grm", "x.bed", "g.zarr", "--dry-run", "--pairwise", "--backend", "host")
    assert "also read for a second product of the same extents, which counts variants" in done.err
    done = command("grm", "x.bed", "g.grm.bin", "--backend", "host")
    assert (done.code, "C: g.grm.bin" in done.out) == (0, True), done.err
    assert "3 of 200 variants were left out" in done.err
    assert command("grm", "x.bed", "g.zarr", "--method", "vanraden", "--backend", "host", "--quiet").code == 0
    found: Any = zarr.open_array("g.zarr", mode="r")[:]
    np.testing.assert_allclose(found, reference(X, "vanraden")[0], atol=2e-6)
    np.save("nan.npy", np.where(X == -1, np.nan, X.astype(float)))
    line = "nan.npy", "g.npy", "--missing", "nan", "--uplo", "lower", "--backend", "host", "--quiet"
    assert command("grm", *line).code == 0
    np.testing.assert_allclose(np.tril(np.load("g.npy")), np.tril(reference(X, "gcta")[0]), atol=1e-12)
    done = command("grm", "x.bed", "g.zarr", "--backend", "host")
    assert (done.code, "C exists at g.zarr" in done.err) == (2, True)
