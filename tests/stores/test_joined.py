"""Several matrices that are joined equal NumPy's concatenation, and are read by their own stores."""

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
from oocgemm.stores import Coded, Genotypes, Matrix, open_matrix
from tests.support.plink import genotypes, reference, write_bed

Array = Any
ZSTD: Any = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


def block(matrix: Matrix, rows: tuple[int, int], cols: tuple[int, int]) -> Array:
    out = np.full((rows[1] - rows[0], cols[1] - cols[0] + 3), 99, matrix.dtype)
    matrix.read(rows, cols, out[:, :-3])
    assert (out[:, -3:] == 99).all()
    return out[:, :-3]


def whole(matrix: Matrix) -> Array:
    return block(matrix, (0, matrix.shape[0]), (0, matrix.shape[1]))


@st.composite
def parts_of(draw: st.DrawFn) -> tuple[int, list[Array], list[str]]:
    """Return an axis, parts that fit, and the store of each."""
    axis, other = draw(st.integers(0, 1)), draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = [(size, other) if axis == 0 else (other, size) for size in sizes]
    stores = draw(
        st.lists(st.sampled_from(["zarr", "npy", "h5", "memory"]), min_size=len(sizes), max_size=len(sizes))
    )
    return axis, [random.integers(-9, 9, shape).astype(np.float32) for shape in shapes], stores


def stored(folder: Path, number: int, part: Array, store: str) -> Any:
    path = folder / f"{number}.{store}"
    match store:
        case "zarr":
            zarr.create_array(path, data=part, chunks=(4, 4))
        case "npy":
            np.save(path, part)
        case "h5":
            with h5py.File(path, "w") as file:
                file["x"] = part
            return f"{path}::x"
        case _:
            return part
    return str(path)


@given(parts_of(), st.data())
@settings(max_examples=50)
def test_joined_matrices_equal_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, given: Any, data: st.DataObject
) -> None:
    axis, parts, stores = given
    folder = tmp_path_factory.mktemp("parts")
    operands = [stored(folder, number, *each) for number, each in enumerate(zip(parts, stores, strict=True))]
    matrix, expected = open_matrix("A", oocgemm.concat(operands, axis)), np.concatenate(parts, axis)
    np.testing.assert_array_equal(whole(matrix), expected)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in expected.shape]
    (top, bottom), (left, right) = ends
    found = block(matrix, (top, bottom), (left, right))
    np.testing.assert_array_equal(found, expected[top:bottom, left:right])


def test_what_is_joined_is_folded_and_multiplied(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (10, 3, 4)).astype(float)
    for number, part in enumerate((x[:4], x[4:])):
        zarr.create_array(tmp_path / f"{number}.zarr", data=part, chunks=(2, 3, 4))
    operands = [oocgemm.as_matrix(str(tmp_path / f"{number}.zarr"), rows=[0]) for number in range(2)]
    flat = x.reshape(10, 12)
    both = oocgemm.concat(operands)
    assert (both.shape, both.dtype) == ((10, 12), x.dtype)
    np.testing.assert_array_equal(oocgemm.gram(both, backend="host").out, flat @ flat.T)
    np.testing.assert_array_equal(oocgemm.matmul(both, flat.T, backend="host"), flat @ flat.T)


@pytest.mark.parametrize(("rows", "coded"), [((4, 4, 6), True), ((4, 3, 6), False)])
def test_chunks_of_aligned_parts_are_fetched_like_those_of_one_array(
    tmp_path: Path, rows: tuple[int, ...], coded: bool
) -> None:
    x = np.random.default_rng(0).integers(0, 3, (sum(rows), 10)).astype(np.float64)
    zarr.create_array(tmp_path / "whole.zarr", data=x, chunks=(4, 4), compressors=ZSTD)
    starts = np.cumsum([0, *rows])
    paths = [str(tmp_path / f"{number}.zarr") for number in range(len(rows))]
    for path, start, count in zip(paths, starts[:-1], rows, strict=True):
        part = x[start : start + count]
        zarr.create_array(path, data=part, chunks=(4, 4), compressors=ZSTD)
    joined = open_matrix("A", oocgemm.concat(paths))
    alone = open_matrix("A", str(tmp_path / "whole.zarr"))
    assert isinstance(joined, Coded) == coded
    if not coded:
        return
    assert isinstance(joined, Coded)
    assert isinstance(alone, Coded)
    assert joined.layout == alone.layout
    assert joined.coding() is not None
    for block_of in (((0, 14), (0, 10)), ((4, 12), (4, 10)), ((8, 14), (0, 4))):
        frames = [np.zeros(1 << 14, np.uint8) for _ in range(2)]
        found, expected = (
            each.fetch(*block_of, out) for each, out in zip((joined, alone), frames, strict=True)
        )
        contents = [
            sorted((f.rows, f.cols, f.corner, f.checksum, out[f.start :][: f.size].tobytes()) for f in each)
            for each, out in zip((found, expected), frames, strict=True)
        ]
        assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("parts", "axis", "message"),
    [
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            0,
            "X: part 0, X, has 3 columns, and part 1, X, has 4: .* join them along axis 1 .--concat 1.",
        ),
        ([np.zeros((2, 3)), np.zeros((3, 3))], 1, "has 2 rows, and part 1, X, has 3"),
        (
            [np.zeros((2, 3)), np.zeros((2, 3), np.float32)],
            0,
            "has dtype float64, and part 1, X, has float32",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[Array], axis: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.gram(oocgemm.concat(parts, axis))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for name, columns in (("a", 3), ("b", 4)):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, columns)))
    with pytest.raises(InputError, match=r"part 0, .*a\.npy, has 3 columns, and part 1, .*b\.npy, has 4"):
        oocgemm.gram(oocgemm.concat([str(tmp_path / f"{name}.npy") for name in "ab"]))


def test_other_arguments_are_refused_at_once() -> None:
    for parts, axis in (([], 0), ("a.zarr", 0), ([np.zeros((2, 2))], 2)):
        with pytest.raises(InputError, match="pass"):
            oocgemm.concat(parts, axis)


def test_parts_with_different_codes_are_refused_unless_taken_as_stored(
    tmp_path: Path,
) -> None:
    x = np.arange(4.0).reshape(2, 2)
    for number in range(2):
        array = zarr.create_array(tmp_path / f"{number}.zarr", data=x)
        array.attrs["missing_value"] = float(-number)
    both = oocgemm.concat([str(tmp_path / f"{number}.zarr") for number in range(2)])
    with pytest.raises(InputError, match=r"declares .* about its elements"):
        oocgemm.gram(both)
    found = oocgemm.gram(both, decode=False, backend="host").out
    np.testing.assert_array_equal(found, np.vstack([x, x]) @ np.vstack([x, x]).T)


def test_c_may_not_be_a_part() -> None:
    x, y = np.ones((4, 4)), np.ones((4, 4))
    with pytest.raises(InputError, match="is the same array as A or overlaps it"):
        oocgemm.gemm(oocgemm.concat([y, x], 1), np.ones((8, 4)), x, overwrite=True)


def test_genotypes_are_joined_along_variants(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [genotypes(rng, 20, variants) for variants in (30, 7, 12)]
    paths = [str(write_bed(tmp_path / f"chr{number}.bed", part)) for number, part in enumerate(parts, 1)]
    joined, x = oocgemm.concat(paths, axis=1), np.concatenate(parts, axis=1)
    matrix = open_matrix("X", joined)
    assert isinstance(matrix, Genotypes)
    np.testing.assert_array_equal(whole(matrix), x)
    packed = matrix.packed()
    assert packed is not None
    np.testing.assert_array_equal(
        whole(packed),
        np.concatenate([whole(open_matrix("X", p).packed()) for p in paths]),  # type: ignore[attr-defined]
    )
    expected, left_out = reference(x, "gcta")
    found = oocgemm.grm(joined, str(tmp_path / "joined.grm.bin"), backend="host")
    assert found.excluded == left_out
    np.testing.assert_allclose(oocgemm.grm(joined, backend="host").out, expected, rtol=1e-4, atol=1e-4)
    ids = (tmp_path / "joined.grm.id").read_text().splitlines()
    assert ids[:2] == ["F0\tI0", "F0\tI1"]
    scores = oocgemm.ld_scores(joined, window=5, constant="drop", backend="host").scores
    whole_path = str(write_bed(tmp_path / "whole.bed", x))
    np.testing.assert_array_equal(
        scores, oocgemm.ld_scores(whole_path, window=5, constant="drop", backend="host").scores
    )
    with pytest.raises(InputError, match=r"chr1\.bed, .*chr3\.bed has \d+ missing genotypes"):
        oocgemm.gram(joined)
    with pytest.raises(InputError, match="--concat 1"):
        oocgemm.gram(oocgemm.concat(paths))


def test_chromosomes_are_found_in_all_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [genotypes(rng, 8, 9) for _ in range(2)]
    paths = [write_bed(tmp_path / f"{number}.bed", part) for number, part in enumerate(parts)]
    text = paths[1].with_suffix(".bim").read_text()
    paths[1].with_suffix(".bim").write_text("".join(f"2{line[1:]}\n" for line in text.splitlines()))
    found = oocgemm.grm(oocgemm.concat(list(map(str, paths)), 1), chromosomes=2, backend="host")
    expected = oocgemm.grm(str(paths[1]), chromosomes=2, backend="host")
    assert found.elsewhere == 9
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-5, atol=1e-6)


def test_files_with_other_individuals_are_refused(tmp_path: Path) -> None:
    x = genotypes(np.random.default_rng(0), 8, 5)
    paths = [write_bed(tmp_path / f"{number}.bed", x) for number in range(2)]
    fam = paths[1].with_suffix(".fam")
    fam.write_text(fam.read_text().replace("F1 I2", "F1 I9"))
    with pytest.raises(InputError, match=r"individual 2 is F1 I2 in .*0\.bed, and F1 I9 in .*1\.bed"):
        oocgemm.grm(oocgemm.concat(list(map(str, paths)), axis=1))
