"""Filters of .bed files keep the individuals and variants that PLINK keeps, in the order of the files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import DataWarning, InputError
from oocgemm.stores import Genotypes, open_matrix
from tests.support.command import command as run
from tests.support.plink import genotypes as drawn
from tests.support.plink import write_bed

Array = Any
HOST = ("--backend", "host", "--quiet")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))


def write(name: str, seed: int, variants: int, chromosome: int = 1, individuals: int = 23) -> Array:
    """Write a .bed file, whose variants have IDs that begin with its name. Return its genotypes."""
    x = drawn(np.random.default_rng(seed), individuals, variants)
    x[:, 0] = -1  # no genotype is known
    x[:, 1] = 2
    write_bed(Path(f"{name}.bed"), x)
    lines = (f"{chromosome}\t{name}:{j}\t0\t{j + 1}\tA\tG\n" for j in range(variants))
    Path(f"{name}.bim").write_text("".join(lines))
    return x


def frequencies(x: Array) -> Array:
    """Return the frequency of the rarer allele of each variant; -1 if no genotype is known."""
    known = x >= 0
    share = np.where(known, x, 0).sum(axis=0) / (2 * np.maximum(known.sum(axis=0), 1))
    return np.where(known.any(axis=0), np.minimum(share, 1 - share), -1)


def whole(operand: Any) -> Array:
    matrix = open_matrix("X", operand)
    assert isinstance(matrix, Genotypes)
    out = np.zeros(matrix.shape, np.int8)
    matrix.read((0, out.shape[0]), (0, out.shape[1]), out)
    return out


def test_filters_keep_individuals_and_variants() -> None:
    x = write("g", 0, 30)
    people, variants = [3, 20, 4, 17, 9, 2, 11, 0], [28, 3, 5, 4, 0, 1, 17]
    Path("people.txt").write_text("#FID IID\n" + "".join(f"F{i // 2} I{i} other\n" for i in people) + "\n")
    Path("variants.txt").write_text("".join(f"g:{j}\n" for j in variants))
    rows, cols = sorted(people), sorted(variants)
    np.testing.assert_array_equal(whole(oocgemm.genotypes("g.bed", keep="people.txt")), x[rows])
    np.testing.assert_array_equal(whole(oocgemm.genotypes("g.bed", extract="variants.txt")), x[:, cols])
    both = oocgemm.genotypes(Path("g.bed"), keep=[(f"F{i // 2}", f"I{i}") for i in people],
                             extract=[f"g:{j}" for j in variants])  # fmt: skip
    np.testing.assert_array_equal(whole(both), x[rows][:, cols])
    for maf in (0, 0.01, 0.2, 0.3):
        used = frequencies(x) >= (maf or -1)
        np.testing.assert_array_equal(whole(oocgemm.genotypes("g.bed", maf=maf)), x[:, used])
        part = x[rows][:, cols]
        found = oocgemm.genotypes("g.bed", keep="people.txt", extract="variants.txt", maf=maf)
        np.testing.assert_array_equal(whole(found), part[:, frequencies(part) >= (maf or -1)])


def test_files_of_chromosomes_are_filtered_as_one() -> None:
    parts = [write(f"chr{number}", number, 12, number) for number in (1, 2, 10)]
    paths, x = [f"chr{number}.bed" for number in (1, 2, 10)], np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(whole(oocgemm.genotypes(paths)), x)
    even = [f"chr{n}:{j}" for n in (1, 2, 10) for j in range(0, 12, 2)]
    found = oocgemm.genotypes(paths, chromosomes="2-22", maf=0.1, extract=even)
    some = (np.arange(36) >= 12) & (np.arange(36) % 2 == 0)
    np.testing.assert_array_equal(whole(found), x[:, some & (frequencies(x) >= 0.1)])
    again = oocgemm.genotypes(oocgemm.concat(paths, axis=1), chromosomes=[2, 10], maf=0.1)
    with pytest.warns(DataWarning, match="not in X"):  # variants that maf has left out
        twice = oocgemm.genotypes(again, extract=even)
    np.testing.assert_array_equal(whole(twice), whole(found))
    joined = oocgemm.concat([oocgemm.genotypes(path, keep=[("F0", "I0"), ("F3", "I7")]) for path in paths], 1)
    np.testing.assert_array_equal(whole(joined), x[[0, 7]])


def test_every_verb_takes_filtered_genotypes() -> None:
    x = write("g", 1, 40)
    operand, used = oocgemm.genotypes("g.bed", maf=0.1), frequencies(x) >= 0.1
    known = np.where(x >= 0, x, 0)[:, used].sum(axis=0) / (x >= 0)[:, used].sum(axis=0)
    complete = np.where(x[:, used] >= 0, x[:, used], known)
    host: Any = {"backend": "host"}
    np.testing.assert_allclose(oocgemm.corr(operand, axis=1, **host).out, np.corrcoef(complete.T), atol=1e-5)
    values = oocgemm.pca(operand, 2, tol=1e-9, **host).singular_values
    np.testing.assert_allclose(values, np.linalg.svd(complete - known)[1][:2], rtol=1e-5)
    found = oocgemm.grm(operand, "k.grm.bin", **host)
    assert (found.variants, found.excluded) == (used.sum(), 0)
    np.testing.assert_allclose(found.out, oocgemm.grm(x[:, used], **host).out[np.tril_indices(23)], rtol=1e-5)


def test_ids_that_are_not_in_the_files_are_counted() -> None:
    write("g", 2, 9)
    with pytest.warns(DataWarning, match=r"keep: 2 of 3 IDs are not in X \(F0 I9, F99 I0\)"):
        oocgemm.genotypes("g.bed", keep=[("F0", "I0"), ("F0", "I9"), ("F99", "I0")])
    Path("v.txt").write_text("g:1\n" + "".join(f"other:{j}\n" for j in range(5)))
    with pytest.warns(DataWarning, match=r"extract: v.txt: 5 of 6 IDs are not in X \(other:0, .*, \.\.\.\)"):
        oocgemm.genotypes("g.bed", extract="v.txt")


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"keep": [("F0", "I9")]}, r"keep has 1 ID \(F0 I9\), and X has none of them"),
        ({"keep": "one.txt"}, "keep: line 2 of one.txt has no family ID and individual ID"),
        ({"keep": "none.txt"}, "keep: none.txt cannot be read"),
        ({"keep": 3}, "keep = 3: pass the path of a file"),
        ({"extract": "two.txt"}, "extract: line 1 of two.txt has 2 words: write one variant ID per line"),
        ({"maf": 0.6}, "maf = 0.6: pass a frequency from 0 to 0.5"),
        ({"maf": "x"}, "maf = 'x'"),
        ({"extract": ["g:1"], "maf": 0.5}, "maf: no variant has two alleles of a frequency of at least 0.5"),
        ({"chromosomes": 7}, "no variant of g.bed is on chromosome 7"),
        ({"chromosomes": 1, "extract": ["h:1"]}, "X has none of them"),
    ],
)
def test_filters_that_keep_nothing_are_refused(filters: Any, message: str) -> None:
    write("g", 3, 9)
    Path("one.txt").write_text("F0 I0\nI1\n")
    Path("two.txt").write_text("g:1 g:2\n")
    with pytest.raises(InputError, match=message):
        oocgemm.genotypes("g.bed", **filters)


def test_other_operands_are_refused() -> None:
    write("g", 4, 9)
    np.save("x.npy", np.zeros((3, 3), np.int8))
    with pytest.raises(InputError, match="X has no genotypes of"):
        oocgemm.genotypes("x.npy", maf=0.1)
    fam = Path("g.fam").read_text()
    write("h", 5, 9)
    Path("h.fam").write_text(fam.replace("F1 I2", "F1 I9"))
    with pytest.raises(InputError, match=r"individual 2 is F1 I2 in g\.bed, and F1 I9 in h\.bed"):
        oocgemm.genotypes(["g.bed", "h.bed"])


def test_commands_take_filters() -> None:
    parts = [write(f"chr{number}", number, 15, number) for number in (2, 10)]
    x = np.concatenate(parts, axis=1)
    Path("people.txt").write_text("F0 I0\nF5 I10\nF6 I13\nF8 I17\nF1 I3\n")
    Path("variants.txt").write_text("".join(f"chr{n}:{j}\n" for n in (2, 10) for j in range(2, 15)))
    filters = ("--keep", "people.txt", "--extract", "variants.txt", "--maf", "0.05", "--chromosomes", "1-9")
    done = run("corr", "chr*.bed", "c.npy", *filters, *HOST)
    assert done.code == 0, done.err
    expected = oocgemm.corr(
        oocgemm.genotypes(
            "chr2.bed", keep="people.txt", extract=[f"chr2:{j}" for j in range(2, 15)], maf=0.05
        ),
        backend="host",
    )
    np.testing.assert_array_equal(np.load("c.npy"), expected.out)
    done = run("grm", "chr*.bed", "g.npy", "--maf", "0.1", "--chromosomes", "10", *HOST)
    assert done.code == 0, done.err
    used = frequencies(x) >= 0.1
    used[:15] = False
    np.testing.assert_allclose(np.load("g.npy"), oocgemm.grm(x[:, used], backend="host").out, rtol=1e-5)
    np.save("x.npy", x)
    done = run("run", "x.npy", "x.npy", "d.npy", "--a-maf", "0.1", *HOST)
    assert (done.code, "A: x.npy is no .bed file, which maf would filter" in done.err) == (2, True), done.err
    assert not Path("d.npy").exists()
