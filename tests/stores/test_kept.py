"""Rows and columns that are kept of a matrix are those of NumPy's indexing, for every verb and store."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from oocgemm.stores import Genotypes, kept, open_matrix
from tests.support.plink import genotypes, write_bed

Array = Any


def whole(operand: Any) -> Array:
    matrix = open_matrix("X", operand)
    out = np.full((matrix.shape[0], matrix.shape[1] + 3), 99, matrix.dtype)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), out[:, :-3])
    assert (out[:, -3:] == 99).all()
    return out[:, :-3]


def stored(folder: Path, x: Array, store: str) -> Any:
    path = folder / f"x.{store}"
    match store:
        case "zarr":
            zarr.create_array(path, data=x, chunks=(4, 3))
        case "npy":
            np.save(path, x)
        case "h5":
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=x, chunks=tuple(map(min, x.shape, (3, 4))), compression="gzip")
            return f"{path}::x"
        case _:
            return x
    return str(path)


def lines(extent: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(0, extent - 1), max_size=2 * extent).map(lambda x: np.array(x, int))
    flags = st.lists(st.booleans(), min_size=extent, max_size=extent).map(lambda x: np.array(x, bool))
    return st.one_of(st.none(), flags, numbers)


@given(st.data(), st.sampled_from(["zarr", "npy", "h5", "memory"]), st.sampled_from([1, 24, 1 << 20]))
@settings(max_examples=80)
def test_kept_lines_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, store: str, batch: int
) -> None:
    shape = data.draw(st.tuples(st.integers(1, 23), st.integers(1, 14)))
    x = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    rows, cols = (data.draw(lines(extent)) for extent in shape)
    chosen = [slice(None) if each is None else each for each in (rows, cols)]
    expected = x[chosen[0]][:, chosen[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "BATCH_BYTES", batch)
        operand = oocgemm.keep(stored(tmp_path_factory.mktemp("kept"), x, store), rows, cols)
        assert operand.shape == expected.shape
        np.testing.assert_array_equal(whole(operand), expected)
        if expected.size:
            ends = [sorted(data.draw(st.tuples(*2 * (st.integers(0, n),)))) for n in expected.shape]
            (top, bottom), (left, right) = ends
            out = np.zeros((bottom - top, right - left), np.float32)
            open_matrix("X", operand).read((top, bottom), (left, right), out)
            np.testing.assert_array_equal(out, expected[top:bottom, left:right])


def test_every_verb_takes_them(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 3, (12, 9)).astype(np.float64)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(5, 4))
    rows, cols = np.arange(12) % 3 > 0, [7, 1, 2, 5]
    operand, part = oocgemm.keep(str(tmp_path / "x.zarr"), rows, cols), x[rows][:, cols]
    host: Any = {"backend": "host"}
    np.testing.assert_array_equal(oocgemm.gram(operand, **host).out, part @ part.T)
    np.testing.assert_array_equal(oocgemm.matmul(operand, part.T, **host), part @ part.T)
    np.testing.assert_allclose(oocgemm.corr(operand, axis=1, **host).out, np.corrcoef(part.T), atol=1e-12)
    np.testing.assert_allclose(oocgemm.cov(operand, **host).out, np.cov(part), atol=1e-12)
    found = oocgemm.pca(operand, 2, **host).singular_values
    np.testing.assert_allclose(found, np.linalg.svd(part - part.mean(axis=0))[1][:2], rtol=1e-6)
    np.testing.assert_array_equal(oocgemm.stats(operand).mean, part.mean(axis=0))
    whole_rows = oocgemm.keep(oocgemm.concat([x, x]), np.arange(5, 20))
    both = np.concatenate([x, x])[5:20]
    np.testing.assert_array_equal(oocgemm.gram(whole_rows, **host).out, both @ both.T)


def test_statistics_of_other_lines_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 6))
    np.save(tmp_path / "x.npy", x)
    turned = [3, 1, 0, 2, 5, 4]
    for rows, cols in ((None, None), (turned, None), (None, turned), (turned, turned), ([0, 1], None)):
        part = x[slice(None) if rows is None else rows][:, slice(None) if cols is None else cols]
        found = oocgemm.stats(oocgemm.keep(str(tmp_path / "x.npy"), rows, cols)).mean
        np.testing.assert_allclose(found, part.mean(axis=0), rtol=1e-12)


def test_sums_of_rows_are_those_of_all_columns() -> None:
    x = np.random.default_rng(0).integers(1, 9, (7, 10)).astype(np.float64)
    cols = [4, 0, 9]
    change = oocgemm.Transform(target_sum=100.0, log1p=True)
    expected = np.log1p(x * (100 / x.sum(axis=1, keepdims=True)))
    for rows in (None, [5, 2, 3]):
        kept_rows = expected[slice(None) if rows is None else rows][:, cols]
        found = oocgemm.gram(oocgemm.keep(x, rows, cols), transform=change, backend="host").out
        np.testing.assert_allclose(found, kept_rows @ kept_rows.T, rtol=1e-12)
        turned = oocgemm.gram(oocgemm.keep(x, rows, cols), axis=1, transform=change, backend="host").out
        np.testing.assert_allclose(turned, kept_rows.T @ kept_rows, rtol=1e-12)


def test_packed_numbers_are_unpacked_and_summed_over_all_columns(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(1, 90, (7, 10)).astype(np.int16)
    array = zarr.create_array(tmp_path / "x.zarr", data=x)
    array.attrs.update({"scale_factor": 0.5, "add_offset": 1.0})
    cols, path = [4, 0, 9], str(tmp_path / "x.zarr")
    unpacked = x * 0.5 + 1
    found = oocgemm.gram(oocgemm.keep(path, cols=cols), backend="host").out
    np.testing.assert_allclose(found, unpacked[:, cols] @ unpacked[:, cols].T, rtol=1e-6)
    change = oocgemm.Transform(target_sum=100.0)
    expected = (unpacked * (100 / unpacked.sum(axis=1, keepdims=True)))[:, cols]
    found = oocgemm.gram(oocgemm.keep(path, cols=cols), transform=change, backend="host").out
    np.testing.assert_allclose(found, expected @ expected.T, rtol=1e-5)


def test_genotypes_stay_genotypes(tmp_path: Path) -> None:
    x = genotypes(np.random.default_rng(0), 21, 40)
    path = str(write_bed(tmp_path / "x.bed", x))
    for rows, cols in (
        ([3, 20, 4, 5, 9], None),
        (None, np.arange(40) % 3 > 0),
        ([1, 2, 8, 9], [5, 4, 30, 7]),
    ):
        operand = oocgemm.keep(path, rows, cols)
        matrix = open_matrix("X", operand)
        part = x[slice(None) if rows is None else rows][:, slice(None) if cols is None else cols]
        assert isinstance(matrix, Genotypes)
        np.testing.assert_array_equal(whole(operand), part)
        found, missing = oocgemm.stats(operand), part == -1
        np.testing.assert_array_equal(found.missing, missing.sum(axis=0))
        np.testing.assert_allclose(found.mean, oocgemm.stats(part, missing=-1).mean)
        filled = np.where(missing, np.nan_to_num(found.mean), part).astype(np.float32)
        np.testing.assert_allclose(
            oocgemm.similarity(operand, topk=1, backend="host").scores,
            oocgemm.similarity(filled, topk=1, backend="host").scores,
            rtol=1e-5,
        )
    with pytest.raises(InputError, match="missing genotypes"):
        oocgemm.gram(oocgemm.keep(path, np.arange(20)))


def test_ids_of_individuals_follow_the_order(tmp_path: Path) -> None:
    x = genotypes(np.random.default_rng(0), 12, 30)
    path = str(write_bed(tmp_path / "x.bed", x))
    found = oocgemm.grm(oocgemm.keep(path, [7, 2, 9]), str(tmp_path / "k.grm.bin"), backend="host")
    assert (tmp_path / "k.grm.id").read_text() == "F3\tI7\nF1\tI2\nF4\tI9\n"
    alone = oocgemm.grm(x[[7, 2, 9]], backend="host")
    np.testing.assert_allclose(np.asarray(found.out), alone.out[np.tril_indices(3)], rtol=1e-5)


def test_files_of_lines(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (6, 5)).astype(float)
    np.save(tmp_path / "flags.npy", np.array([1, 0, 1, 1, 0, 0], bool))
    (tmp_path / "numbers.txt").write_text("# kept\n4\n\n0  # the first one\n")
    found = whole(oocgemm.keep(x, tmp_path / "flags.npy", str(tmp_path / "numbers.txt")))
    np.testing.assert_array_equal(found, x[[0, 2, 3]][:, [4, 0]])
    (tmp_path / "bad.txt").write_text("4\nx\n")
    for path in ("bad.txt", "none.txt", "none.npy"):
        with pytest.raises(
            InputError, match=f"rows: .*{path} is neither a .npy file nor a text with one num"
        ):
            oocgemm.keep(x, tmp_path / path)


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        ([True] * 4, None, "rows has 4 elements, and X has 6 rows: pass one bool for each"),
        (None, [True] * 6, "cols has 6 elements, and X has 5 columns"),
        ([0, 6], None, r"rows\[1\] = 6, and X has 6 rows: pass numbers from 0 to 5"),
        (None, [2, -1], r"cols\[1\] = -1, and X has 5 columns"),
    ],
)
def test_lines_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, rows: Any, cols: Any, message: str
) -> None:
    operand, out = oocgemm.keep(np.ones((6, 5)), rows, cols), tmp_path / "c.zarr"
    for verb in (oocgemm.gram, oocgemm.corr, oocgemm.cov, oocgemm.distances):
        with pytest.raises(InputError, match=message):
            verb(operand, str(out))
    assert not list(tmp_path.iterdir())


def test_other_arguments_are_refused_at_once() -> None:
    for bad in (np.ones((2, 2), bool), [0.5], ["a"], 3):
        with pytest.raises(InputError, match="pass a vector of bool"):
            oocgemm.keep(np.ones((2, 2)), rows=bad)
