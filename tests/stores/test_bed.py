"""Genotypes in .bed files are read exactly, and files that cannot be read are refused."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError, NotFoundError
from oocgemm.jobs import stats as counting
from oocgemm.jobs import streaming
from oocgemm.service.limits import PathError, Root, resolve
from oocgemm.stores import genetics
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.plink import bed_bytes, genotypes, write_bed
from tests.support.suite import each_value, examples

RNG = np.random.default_rng(11)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_every_block_of_a_file_is_that_of_the_matrix(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    people, variants = data.draw(st.integers(1, 45)), data.draw(st.integers(1, 20))
    x = genotypes(np.random.default_rng(people * variants), people, variants, missing=0.3)
    path = write_bed(tmp_path_factory.mktemp("bed") / "x.bed", x)
    slab = data.draw(st.sampled_from([1, 3, 8, 1 << 17]))  # bytes that are decoded at a time
    matrix: Any = genetics.open_bed("X", path)
    if data.draw(st.booleans()):
        matrix, x = matrix.transposed(), x.T
    rows, cols = (
        tuple(sorted((data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent)))))
        for extent in x.shape
    )
    wide = np.full((rows[1] - rows[0], cols[1] - cols[0] + 3), 9, np.int8)
    with patch.object(genetics, "_SLAB", slab):
        matrix.read(rows, cols, wide[:, 2:-1])
    np.testing.assert_array_equal(wide[:, 2:-1], x[slice(*rows), slice(*cols)])
    assert (wide[:, [0, 1, -1]] == 9).all(), "only the block is written"
    assert matrix.transposed().transposed().fingerprint() == matrix.fingerprint()
    assert matrix.transposed().fingerprint() != matrix.fingerprint()


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
def test_products_of_genotypes_are_exact(engine: Engine, axis: int, tmp_path: Path) -> None:
    x = genotypes(RNG, 50, 70)
    path = write_bed(tmp_path / "x.bed", x)
    kept = np.where(x == -1, 0, x).astype(np.int64)
    wide = kept if axis == 0 else kept.T
    with running_on(engine) as options:
        given: Any = {"tile": "16x16x24", **options}
        change = oocgemm.Transform(missing=-1, impute=0)
        found = oocgemm.gram(path, axis=axis, uplo="full", transform=change, **given)
        np.testing.assert_array_equal(found.out, wide @ wide.T)
        weights = RNG.integers(-3, 4, (70, 5)).astype(np.int8)
        scores = oocgemm.gemm(path, weights, transform_a=change, **given)
        np.testing.assert_array_equal(scores.out, kept @ weights)
        raw = oocgemm.gemm(path, path, trans_a="T", decode=False, **given)
        np.testing.assert_array_equal(raw.out, x.T.astype(np.int64) @ x)


@settings(max_examples=examples(60), deadline=None)
@given(
    people=st.integers(1, 600), variants=st.integers(1, 30), seed=st.integers(0, 99), slab=st.integers(1, 90)
)
def test_counted_genotypes_give_the_statistics_of_elements(
    people: int, variants: int, seed: int, slab: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    x = genotypes(rng, people, variants, missing=rng.choice([0, 0.3, 1]))
    x[:, rng.random(variants) < 0.2] = rng.integers(-1, 3)
    path = write_bed(tmp_path_factory.mktemp("bed") / "x.bed", x)
    content = bytearray(path.read_bytes())
    if people % 4:  # bits that stand for no individual
        line = (people + 3) // 4
        for last in range(2 + line, len(content), line):
            content[last] |= 0xFF << 2 * (people % 4) & 0xFF
        path.write_bytes(content)
    matrix = genetics.open_bed("X", path)
    with patch.object(counting, "_SLAB", slab), patch.object(streaming, "BATCH_BYTES", 16):
        counts = counting.genotype_counts(matrix.packed(), matrix.shape[1 - matrix.variant_axis], 1 << 20)
        found = oocgemm.stats(path, missing=-1)
    np.testing.assert_array_equal(counts, np.stack([(x == value).sum(0) for value in (0, 1, 2, -1)], 1))
    expected = oocgemm.stats(x, missing=-1)
    for name in ("count", "missing", "min", "max"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("mean", "variance"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-13, atol=1e-15)


def test_statistics_are_per_variant(tmp_path: Path) -> None:
    x = genotypes(RNG, 90, 40)
    path = write_bed(tmp_path / "x.bed", x)
    known = np.ma.masked_equal(x, -1)
    for axis in (0, 1):
        found = oocgemm.stats(path, axis, missing=-1)
        np.testing.assert_array_equal(found.missing, (x == -1).sum(axis))
        np.testing.assert_allclose(found.mean, known.mean(axis))
        np.testing.assert_allclose(found.variance, known.var(axis), atol=1e-12)


def test_commands_take_bed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = genotypes(RNG, 30, 40, missing=0)
    write_bed(Path("x.bed"), x)
    np.save("w.npy", weights := RNG.integers(-3, 4, (40, 5)).astype(np.int8))
    assert command("run", "x.bed", "w.npy", "c.npy", "--backend", "host", "--quiet").code == 0
    np.testing.assert_array_equal(np.load("c.npy"), x.astype(int) @ weights)
    assert command("verify", "x.bed", "w.npy", "c.npy").code == 0
    assert "30 x 40" in command("plan", "x.bed", "w.npy", "--backend", "host").out
    assert command("gram", "x.bed", "k.zarr", "--backend", "host", "--quiet").code == 0
    np.save("real.npy", weights.astype(np.float32))
    assert command("run", "x.bed", "real.npy", "d.npy", "--backend", "host", "--quiet").code == 0
    np.testing.assert_array_equal(np.load("d.npy"), x.astype(int) @ weights)
    done = command("run", "x.bed", "w.npy", "new.bed", "--backend", "host")
    assert (done.code, "a PLINK .bed file is read-only" in done.err) == (2, True)


GOOD = genotypes(np.random.default_rng(0), 9, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bed_bytes(GOOD)[:-1], r"x.bed has 17 bytes, and 5 variants \(x.bim\) of 9 .* \(x.fam\) take 18"),
        (bed_bytes(GOOD) + b"\0", "has 19 bytes"),
        (b"\x6c\x1b\x00" + bytes(15), "individual by individual.* plink --bfile .*x --make-bed"),
        (b"\x6c\x1b\x07" + bytes(15), "byte 3 of .*x.bed is 07 and must be 01"),
        (b"\x6c\x1b", "byte 3 of .*x.bed is missing"),
        (b"chr1\t10\t20\n", "is not a PLINK 1 .bed file.*it begins with 63 68"),
        (b"", "it begins with nothing"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_bed(tmp_path / "x.bed", GOOD)
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        oocgemm.plan_gram(path, backend="host")


def test_the_files_beside_it_must_be_there_and_fit(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", GOOD)
    lines = (tmp_path / "x.fam").read_bytes()
    (tmp_path / "x.fam").write_bytes(lines.rstrip(b"\n"))  # the last line need not end
    assert oocgemm.plan_gram(path, backend="host").problem.m == 9
    (tmp_path / "x.fam").write_bytes(lines + lines)
    with pytest.raises(InputError, match=r"of 18 individuals \(x.fam\) take 28"):
        oocgemm.plan_gram(path, backend="host")
    for name, what in (("x.fam", "individual"), ("x.bim", "variant"), ("x.bed", "")):
        (tmp_path / name).unlink()
        message = f"there is no .*{name}, which has a line per {what}" if what else "there is nothing at"
        with pytest.raises(NotFoundError, match=message):
            oocgemm.plan_gram(path, backend="host")
        write_bed(path, GOOD)


def test_a_file_that_is_truncated_later_is_an_error(tmp_path: Path) -> None:
    path = write_bed(tmp_path / "x.bed", GOOD)
    matrix = genetics.open_bed("X", path)
    os.truncate(path, 10)
    with pytest.raises(EOFError, match="truncated from 18 bytes to 10"):
        matrix.read((0, 9), (0, 1), np.empty((9, 1), np.int8))


def test_links_beside_a_file_must_stay_in_the_root(tmp_path: Path) -> None:
    roots = {"data": Root.parse(f"data={tmp_path}:ro")}
    path = write_bed(tmp_path / "x.bed", GOOD)
    assert resolve(roots, "data:x.bed", write=False) == path
    (tmp_path / "x.bim").rename(tmp_path / "other.bim")
    (tmp_path / "x.bim").symlink_to("other.bim")
    assert resolve(roots, "data:x.bed", write=False) == path
    (tmp_path / "x.bim").unlink()
    (tmp_path / "x.bim").symlink_to("/etc/passwd")
    with pytest.raises(PathError, match=r"data:x.bed: x.bim beside it cannot be used"):
        resolve(roots, "data:x.bed", write=False)
    (tmp_path / "x.bim").unlink()
    os.mkfifo(tmp_path / "x.bim")
    with pytest.raises(PathError, match="neither a file nor a folder"):
        resolve(roots, "data:x.bed", write=False)


@pytest.mark.parametrize("name", ["toydata.5chrom", "some_missing", "plink_sim_10s_100v_10pmiss", "small"])
def test_files_of_other_programs_are_read_as_bed_reader_reads_them(name: str) -> None:
    reader = pytest.importorskip("bed_reader")
    path = Path(reader.__file__).parent / "tests" / "data" / f"{name}.bed"
    expected = reader.open_bed(path, count_A1=True, num_threads=1).read(dtype="int8")
    matrix = genetics.open_bed("X", path)
    found = np.empty(matrix.shape, np.int8)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), found)
    np.testing.assert_array_equal(found, np.where(expected == -127, -1, expected))
