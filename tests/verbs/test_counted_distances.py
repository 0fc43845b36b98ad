"""Jaccard and Hamming distances are the fractions that SciPy returns, in every bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.suite import each_value, examples

Array = Any
# Letters of DNA, genotypes, and codes of both signs.
ALPHABETS: dict[str, Any] = {
    "bool": [False, True],
    "dna": np.frombuffer(b"ACGT", np.uint8),
    "two": np.array([7, 200], np.uint8),
    "one": np.array([3], np.int8),
    "signed": np.array([-128, -1, 0, 5, 127], np.int8),
    "sixteen": np.arange(16, dtype=np.uint8) * 17,
}


def defined(x: Array, y: Array, metric: str) -> Array:
    """Return the distances of rows as SciPy defines them."""
    differ = (x[:, None] != y).sum(axis=2)
    if metric == "hamming":
        return differ / x.shape[1]
    either = (x[:, None].astype(bool) | y.astype(bool)).sum(axis=2)
    return np.where(either == 0, 0, differ / np.maximum(either, 1))


def nearest(expected: Array, topk: int) -> Array:
    return np.argsort(expected, axis=1, kind="stable")[:, :topk]


def check(x: Array, y: Array | None, expected: Array, topk: int, **how: Any) -> None:
    """Compare all distances, the nearest rows, and those within a radius, in every bit."""
    stored = oocgemm.distances(x, y=y, **how).out
    assert stored.dtype == np.float64
    np.testing.assert_array_equal(stored, expected)
    found = oocgemm.neighbors(x, y=y, topk=topk, exclude_self=False, **how)
    order = nearest(expected, topk)
    np.testing.assert_array_equal(found.indices, order)
    np.testing.assert_array_equal(found.distances, np.take_along_axis(expected, order, 1))
    radius = float(np.median(expected))
    near = oocgemm.neighbors(x, y=y, radius=radius, exclude_self=False, **how)
    assert near.indptr is not None
    np.testing.assert_array_equal(np.diff(near.indptr), (expected <= radius).sum(axis=1))
    for row, (start, stop) in enumerate(zip(near.indptr, near.indptr[1:], strict=False)):
        order = nearest(expected[[row]], stop - start)[0]
        np.testing.assert_array_equal(near.indices[start:stop], order)
        np.testing.assert_array_equal(near.distances[start:stop], expected[row, order])


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("letters", ALPHABETS)
def test_results_agree_with_numpy(engine: Engine, letters: str) -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.choice(ALPHABETS[letters], (rows, 21)) for rows in (34, 27))
    x[3], y[4] = x[0], x[0]
    for metric in ("hamming", "jaccard")[: 2 if letters == "bool" else 1]:
        with running_on(engine) as options:
            how: Any = {"metric": metric, "tile": "16x16x8", "verify": True, **options}
            check(x, None, defined(x, x, metric), 5, **how)
            check(x, y, defined(x, y, metric), 5, **how)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("bits", [1, 8, 29])
def test_packed_bits_are_those_of_numpy(engine: Engine, bitorder: Any, bits: int) -> None:
    x = np.random.default_rng(bits).random((30, bits)) < 0.4
    packed = np.packbits(x, axis=1, bitorder=bitorder)
    with running_on(engine) as options:
        for metric in ("hamming", "jaccard"):
            how: Any = {"metric": metric, "bits": bits, "bitorder": bitorder, **options}
            check(packed, None, defined(x, x, metric), 4, **how)
            check(packed[:11], packed, defined(x[:11], x, metric), 4, **how)


@given(
    letters=st.sampled_from([*ALPHABETS]),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 30)),
    chunks=st.sampled_from([None, (3, 4), (7, 30)]),
    columns=st.booleans(),
    tile=st.sampled_from([None, "3x3x4", "16x16x7"]),
    packs=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(80, quick=15), deadline=None)
def test_distances_do_not_depend_on_tiles_and_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    letters: str,
    shape: tuple[int, int, int],
    chunks: tuple[int, int] | None,
    columns: bool,
    tile: str | None,
    packs: bool,
    seed: int,
) -> None:
    m, n, depth = shape
    rng = np.random.default_rng(seed)
    x, y = (rng.choice(ALPHABETS[letters], (rows, depth)) for rows in (m, n))
    how: Any = {"metric": "hamming", "tile": tile, "backend": "host"}
    expected = defined(x, y, "hamming")
    if packs and letters == "bool":
        x, y, how = np.packbits(x, axis=1), np.packbits(y, axis=1), {**how, "bits": depth}
    if columns:
        x = np.asfortranarray(x)
    given: Any = x
    if chunks is not None:
        given = tmp_path_factory.mktemp("x") / "x.zarr"
        zarr.create_array(given, data=x, chunks=tuple(map(min, chunks, x.shape)))
    check(given, y, expected, min(3, n), **how)


@pytest.mark.parametrize("options", [{"devices": "0,0"}, {"workers": 2, "memory": "400MiB"}])
def test_other_executors_find_the_same(options: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.choice(ALPHABETS["dna"], (rows, 19)) for rows in (40, 33))
    for name, array in (("x", x), ("y", y)):
        zarr.create_array(tmp_path / f"{name}.zarr", data=array, chunks=(8, 8))
    how: Any = {"metric": "hamming", "y": tmp_path / "y.zarr", "tile": "8x8x8", "backend": "host", **options}
    expected = defined(x, y, "hamming")
    found = oocgemm.neighbors(tmp_path / "x.zarr", topk=5, **how)
    np.testing.assert_array_equal(found.indices, nearest(expected, 5))
    stored = oocgemm.distances(tmp_path / "x.zarr", tmp_path / "d.zarr", **how)
    np.testing.assert_array_equal(stored.out[:], expected)
    again = oocgemm.distances(tmp_path / "x.zarr", tmp_path / "d.zarr", **how, resume=True)
    np.testing.assert_array_equal(again.out[:], expected)


def test_a_result_of_other_codes_is_not_resumed(tmp_path: Path) -> None:
    x = np.random.default_rng(3).choice(ALPHABETS["dna"], (40, 19))
    np.save(tmp_path / "x.npy", x)
    how: Any = {"backend": "host", "tile": "8x8x8", "bits": 150, "metric": "jaccard"}
    oocgemm.distances(tmp_path / "x.npy", tmp_path / "d.zarr", **how)
    with pytest.raises(InputError, match=r"the run at C, .*, differs from this one"):
        oocgemm.distances(tmp_path / "x.npy", tmp_path / "d.zarr", **how, bitorder="little", resume=True)


BYTES = np.random.default_rng(0).integers(0, 256, (9, 40), np.uint8)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (BYTES, {"metric": "hamming"}, "X has .* different elements, and Hamming .* at most 16 codes"),
        (BYTES, {"metric": "jaccard"}, r"X has the element \d+, and Jaccard distances are those of 0 and 1"),
        (BYTES.astype(float), {"metric": "jaccard"}, "X has dtype float64, and the distance 'jaccard'"),
        (BYTES.astype("i4"), {"metric": "hamming"}, "X has dtype int32, and the distance 'hamming'"),
        (BYTES, {"metric": "jaccard", "bits": 321}, "bits = 321, but rows of X have 40 bytes.* 313 to 320"),
        (BYTES, {"metric": "jaccard", "bits": 312}, "bits = 312, but rows of X have 40 bytes.* 313 to 320"),
        (BYTES > 9, {"metric": "jaccard", "bits": 40}, "X has dtype bool, and packed bits are uint8"),
        (BYTES, {"bits": 320}, "bits = 320, but the distance 'euclidean' is that of numbers"),
        (BYTES, {"metric": "jaccard", "bits": 320, "bitorder": "middle"}, "bitorder = 'middle'"),
        (BYTES > 9, {"metric": "hamming", "transform": oocgemm.Transform()}, "drop transform"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    x: Array, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.distances(x, tmp_path / "d.zarr", backend="host", **options)
    with pytest.raises(InputError, match=message):
        oocgemm.neighbors(x, topk=2, backend="host", **options)
    assert not [*tmp_path.iterdir()]


def test_the_commands_have_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(5).random((20, 29)) < 0.4
    np.save("x.npy", np.packbits(x, axis=1, bitorder="little"))
    more = ("--metric", "jaccard", "--bits", "29", "--bitorder", "little", "--backend", "host", "--quiet")
    for words in (("distances", "x.npy", "d.npy"), ("neighbors", "x.npy", "near.zarr", "--topk", "3")):
        done = command(*words, *more)
        assert done.code == 0, done.err
    expected = defined(x, x, "jaccard")
    np.testing.assert_array_equal(np.load("d.npy"), expected)
    np.fill_diagonal(expected, np.inf)
    near: Any = zarr.open_group("near.zarr", mode="r")
    np.testing.assert_array_equal(near["distances"][:], np.sort(expected)[:, :3])
