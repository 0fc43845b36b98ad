"""Commands take several files as one matrix, and arrays of more than two dimensions."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.command import command as run
from tests.support.plink import genotypes, reference, write_bed

Array = Any
X = np.random.default_rng(0).integers(-9, 9, (6, 3, 4)).astype(float)
HOST = ("--backend", "host", "--quiet")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))


def store(path: str, array: Array, names: Any = None) -> None:
    zarr.create_array(path, data=array, dimension_names=names)


def check(done: Any, path: str, expected: Array) -> None:
    assert done.code == 0, done.err
    np.testing.assert_array_equal(np.load(path), expected)


def test_the_remedy_for_an_array_with_three_dimensions_works() -> None:
    store("x.zarr", X, ["time", "lat", "lon"])
    flat = X.reshape(6, 12)
    refused = run("gram", "x.zarr", "c.npy", *HOST)
    assert refused.code == 2
    assert "X has 3 dimensions (time 6, lat 3, lon 4)" in refused.err
    options = re.search(r"\((--rows .*)\)", refused.err)
    assert options is not None
    check(run("gram", "x.zarr", "c.npy", *shlex.split(options[1]), *HOST), "c.npy", flat @ flat.T)
    store("y.zarr", flat.T)
    refused = run("run", "x.zarr", "y.zarr", "d.npy", *HOST)
    options = re.search(r"\((--a-rows .*)\)", refused.err)
    assert options is not None
    check(run("run", "x.zarr", "y.zarr", "d.npy", *shlex.split(options[1]), *HOST), "d.npy", flat @ flat.T)


def test_parts_of_axes_are_used() -> None:
    store("x.zarr", X, ["time", "lat", "lon"])
    part = X[1:5, 2]
    done = run("gram", "x.zarr", "c.npy", "--rows", "lon", "--isel", "time=1:5,lat=-1", *HOST)
    check(done, "c.npy", part.T @ part)
    done = run("gram", "x.zarr", "d.npy", "--rows", "0", "--isel", "1=0,2=:2", *HOST)
    check(done, "d.npy", X[:, 0, :2] @ X[:, 0, :2].T)
    for bad in ("time", "time=", "time=1:2:3", "time=a", "=1"):
        done = run("gram", "x.zarr", "e.npy", "--isel", bad, *HOST)
        assert (done.code, "write AXIS=INDEX or AXIS=START:STOP" in done.err) == (2, True), bad


def test_files_of_a_pattern_are_joined_in_natural_order() -> None:
    flat = X.reshape(6, 12)
    for number, rows in ((2, flat[:2]), (10, flat[2:5]), (11, flat[5:])):
        np.save(f"x{number}.npy", rows)
    order = "X has 3 parts, joined along axis 0: x2.npy, x10.npy, x11.npy"
    done = run("gram", "x*.npy", "c.npy", "--backend", "host", "--dry-run")
    assert done.code == 0, done.err
    assert order in done.err
    check(run("gram", "x*.npy", "c.npy", *HOST), "c.npy", flat @ flat.T)
    Path("list.txt").write_text("# parts\nx11.npy\n\nx2.npy\n")
    turned = np.concatenate([flat[5:], flat[:2]])
    check(run("gram", "@list.txt", "d.npy", *HOST), "d.npy", turned @ turned.T)
    np.save("b.npy", np.ones((12, 2)))
    done = run("run", "x*.npy", "b.npy", "e.npy", *HOST)
    check(done, "e.npy", flat @ np.ones((12, 2)))


def test_other_patterns_and_lists_are_refused() -> None:
    done = run("gram", "y*.npy", "c.npy", *HOST)
    assert (done.code, "no file matches y*.npy" in done.err) == (2, True)
    done = run("gram", "@none.txt", "c.npy", *HOST)
    assert (done.code, "the list none.txt cannot be read" in done.err) == (2, True)
    Path("empty.txt").write_text("\n# nothing\n")
    done = run("gram", "@empty.txt", "c.npy", *HOST)
    assert (done.code, "the list empty.txt has no paths" in done.err) == (2, True)


def test_folded_arrays_are_joined() -> None:
    for number, part in enumerate((X[:2], X[2:])):
        store(f"x{number}.zarr", part)
    columns = np.concatenate([X[:2].reshape(2, 12).T, X[2:].reshape(4, 12).T], axis=1)
    done = run("gram", "x?.zarr", "c.npy", "--cols", "0", "--concat", "1", *HOST)
    check(done, "c.npy", columns @ columns.T)


def test_a_path_with_the_characters_of_a_pattern_is_a_path() -> None:
    np.save("x[1].npy", X[0])
    check(run("gram", "x[1].npy", "c.npy", *HOST), "c.npy", X[0] @ X[0].T)


def test_genotypes_of_all_chromosomes_are_joined(tmp_path: Path) -> None:
    parts = [genotypes(np.random.default_rng(n), 9, 12) for n in range(3)]
    for number, part in zip((1, 2, 10), parts, strict=True):
        write_bed(tmp_path / f"chr{number}.bed", part)
    done = run("grm", "chr*.bed", "c.npy", "--method", "vanraden", "--cast", "float64", *HOST)
    assert done.code == 0, done.err
    expected, _ = reference(np.concatenate(parts, axis=1), "vanraden")
    np.testing.assert_allclose(np.load("c.npy"), expected, rtol=1e-12, atol=1e-12)


def test_files_name_the_rows_and_columns_that_are_kept() -> None:
    flat = X.reshape(6, 12)
    np.save("x.npy", flat)
    np.save("flags.npy", np.arange(12) % 3 > 0)
    Path("rows.txt").write_text("4\n0\n5\n")
    part = flat[[4, 0, 5]][:, np.arange(12) % 3 > 0]
    kept = ("--keep-rows", "rows.txt", "--keep-cols", "flags.npy")
    check(run("gram", "x.npy", "c.npy", *kept, *HOST), "c.npy", part @ part.T)
    np.save("b.npy", np.ones((8, 2)))
    kept = ("--a-keep-rows", "rows.txt", "--a-keep-cols", "flags.npy")
    check(run("run", "x.npy", "b.npy", "d.npy", *kept, *HOST), "d.npy", part @ np.ones((8, 2)))
    done = run("gram", "x.npy", "e.npy", "--keep-rows", "flags.npy", *HOST)
    assert (done.code, "rows has 12 elements, and X has 6 rows" in done.err) == (2, True)
    assert not Path("e.npy").exists()
