"""Sparse operands give the results of dense ones, and bad ones are refused before anything is written."""

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores import sparse
from oocgemm.stores.kept import kept
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.sparse_files import FORMS, PLACES, in_memory, parts_of, stored, write
from tests.support.suite import each_value, examples

Array = Any
RNG = np.random.default_rng(0)
X = (RNG.integers(1, 5, (90, 24)) * (RNG.random((90, 24)) < 0.15)).astype(np.float32)
X[3:9] = X[-1] = 0  # empty rows
X[:, 7] = 0
B = RNG.integers(-3, 4, (24, 10)).astype(np.float32)
ON_HOST: dict[str, Any] = {"backend": "host"}


@each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_products_equal_those_of_dense_arrays(tmp_path: Path, place: str, form: str) -> None:
    x = stored(tmp_path, place, X, form)
    np.testing.assert_array_equal(oocgemm.gemm(x, B, tile="16x8x8", **ON_HOST).out, X @ B)
    np.testing.assert_array_equal(oocgemm.gemm(B.T, x, trans_b="T", **ON_HOST).out, B.T @ X.T)
    for axis, product in ((0, X @ X.T), (1, X.T @ X)):
        found = oocgemm.gram(x, axis=axis, uplo="full", tile="16x16x8", **ON_HOST).out
        np.testing.assert_array_equal(found, product)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "int32", "int64", "float16", "complex64"])
def test_every_dtype_is_multiplied_as_that_of_a_dense_array(tmp_path: Path, dtype: str) -> None:
    dense = X.astype(dtype)
    found = oocgemm.gram(stored(tmp_path, "h5ad", dense, "csr"), axis=1, uplo="full", **ON_HOST).out
    expected = oocgemm.gram(dense, axis=1, uplo="full", **ON_HOST).out
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("piece", [7, 37, 60])
def test_chunks_of_parts_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A chunk of 50 entries that two pieces share stays in memory, and so do those of the next piece."""
    monkeypatch.setattr(sparse, "PIECE", piece)
    matrix = stores.open_matrix("X", stored(tmp_path, "v3.zarr", X, "csr"))
    read = list[Any]()
    right = ZarrMatrix.read

    def noted(self: Any, rows: Any, cols: Any, out: Any) -> None:
        read.append((self, cols))
        right(self, rows, cols, out)

    monkeypatch.setattr(ZarrMatrix, "read", noted)
    out = np.full(X.shape, 77, X.dtype)
    for rows in ((0, 41), (41, 90)):
        matrix.read(rows, (0, 24), out[slice(*rows)])
    np.testing.assert_array_equal(out, X)
    for part in {each for each, _ in read}:
        cuts = [cols for each, cols in read if each is part]
        assert cuts[0][0] == 0
        assert all(end == start for (_, end), (start, _) in pairwise(cuts))


VERBS: dict[str, Any] = {
    "corr": lambda x: oocgemm.corr(x, axis=1, **ON_HOST).out,
    "cov": lambda x: oocgemm.cov(x, axis=1, **ON_HOST).out,
    "similarity": lambda x: oocgemm.similarity(x, topk=3, **ON_HOST).scores,
    "pca": lambda x: oocgemm.pca(x, 3, **ON_HOST).singular_values,
    "reduce": lambda x: oocgemm.reduce(x, B, to=oocgemm.Reduce("sum"), **ON_HOST),
    "stats": lambda x: oocgemm.stats(x).std,
    "log1p": lambda x: oocgemm.gram(x, axis=1, transform=oocgemm.Transform(log1p=True), **ON_HOST).out,
    "centred": lambda x: (
        oocgemm.gram(x, transform=oocgemm.Transform(log1p=True, center="k", scale="k"), **ON_HOST).out
    ),
}


@each_value
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", FORMS)
def test_verbs_give_the_bits_of_dense_arrays(tmp_path: Path, verb: str, form: str) -> None:
    """Zeros that are not stored count in means, norms and variances like others."""
    kept = X.copy()
    kept[:, 7] = 1.0  # no column is constant 0, which has no correlation
    kept[::2, 7] = 0.0
    rows = kept if verb != "similarity" else kept[kept.any(axis=1)]
    zarr.create_array(tmp_path / "dense.zarr", data=rows)
    dense = VERBS[verb](str(tmp_path / "dense.zarr"))
    for place in ("memory", "h5ad"):
        found = VERBS[verb](stored(tmp_path, place, rows, form))
        np.testing.assert_allclose(found, dense, rtol=1e-6, atol=1e-6)


@st.composite
def matrices(draw: Any) -> tuple[Array, str, dict[str, Array]]:
    """A dense matrix, and parts with the same sum: unsorted, with entries at equal places."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    form = draw(st.sampled_from(FORMS))
    lines, width = shape if form == "csr" else shape[::-1]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    counts = rng.binomial(2 * width, draw(st.sampled_from([0, 0.1, 0.5, 1])), lines)
    counts[rng.random(lines) < draw(st.sampled_from([0, 0.5]))] = 0
    starts = np.append(0, np.cumsum(counts)).astype(draw(st.sampled_from(["i4", "i8", "u4"])))
    indices = rng.integers(0, width, starts[-1]).astype(draw(st.sampled_from(["i4", "i8"])))
    data = rng.integers(-9, 9, starts[-1]).astype(
        draw(st.sampled_from(["f4", "f8", ">f8", "c8", "c16", "i1", "i4", "i8", "f2"]))
    )
    dense = np.zeros((lines, width), data.dtype)
    np.add.at(dense, (np.repeat(np.arange(lines), counts), indices), data)
    return dense if form == "csr" else dense.T, form, {"data": data, "indices": indices, "indptr": starts}


@settings(max_examples=examples(300))
@given(matrices(), st.integers(1, 40), st.booleans(), st.booleans(), st.data())
def test_any_block_of_any_matrix_is_read(
    found: tuple[Array, str, dict[str, Array]], piece: int, python: bool, turned: bool, data: Any
) -> None:
    dense, form, parts = found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "PIECE", piece)
        if python:
            patch.setattr(sparse, "compiled", lambda: None)
        matrix = stores.open_matrix("X", in_memory(dense.shape, form, parts))
        if turned:
            assert isinstance(matrix, sparse.SparseOperand)
            matrix, dense = matrix.transposed(), dense.T
        rows, cols = (
            tuple(sorted(data.draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))))
            for extent in dense.shape
        )
        out = np.full((rows[1] - rows[0], cols[1] - cols[0]), 77, dense.dtype)
        matrix.read(rows, cols, out)
    np.testing.assert_array_equal(out, dense[slice(*rows), slice(*cols)])


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "an index beyond the columns": (
        {"indices": {4: 24}},
        r"row 0 has an entry in column 24, .* has 24 columns",
    ),
    "a negative index": ({"indices": {5: -1}}, r"row \d+ has an entry in column -1"),
    "an indptr that decreases": ({"indptr": {2: 10**6}}, "by its indptr, row 2 has the entries from 1000000"),
    "an indptr that begins late": ({"indptr": {0: 1}}, "row 0 has the entries from 1"),
    "an indptr that ends late": ({"indptr": {-1: 10**6}}, r"has \d+ entries, and by its indptr 1000000"),
}


@each_value
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("place", ["memory", "h5ad", "v3.zarr"])
def test_damage_is_refused_before_anything_is_written(tmp_path: Path, damage: str, place: str) -> None:
    changes, message = DAMAGE[damage]
    dense = X.copy()
    dense[0, :5] = 1  # so that row 0 has the entries 0 to 4
    parts = parts_of(dense, "csr")
    for name, values in changes.items():
        for at, value in values.items():
            parts[name][at] = value
    path = tmp_path / place
    x = in_memory(X.shape, "csr", parts) if place == "memory" else write(path, X.shape, "csr", parts)
    with pytest.raises(InputError, match=message):
        oocgemm.gemm(x, B, str(tmp_path / "c.zarr"), **ON_HOST)
    assert not (tmp_path / "c.zarr").exists()


@pytest.mark.parametrize("group", ["matrix", "GRCh38"])
def test_files_of_cell_ranger_are_cells_by_genes(tmp_path: Path, group: str) -> None:
    genes = X.T.astype(np.int32)
    parts, path = parts_of(genes, "csc", np.int64), tmp_path / "filtered_feature_bc_matrix.h5"
    with h5py.File(path, "w") as file:
        for name, part in parts.items():
            file.create_dataset(f"{group}/{name}", data=part, chunks=(64,), compression="gzip", shuffle=True)
        file[f"{group}/shape"] = np.array(genes.shape, np.int32)
        file[f"{group}/barcodes"] = np.array([b"AAAC-1"] * genes.shape[1])
        file[f"{group}/features/id"] = np.array([b"ENSG1"] * genes.shape[0])
    x = f"{path}::/{group}"
    assert stores.open_matrix("X", x).shape == (90, 24)
    found = oocgemm.gram(x, axis=1, uplo="full", **ON_HOST).out
    np.testing.assert_array_equal(found, genes @ genes.T)
    with h5py.File(path, "r+") as file:
        del file[f"{group}/shape"]
        file[f"{group}/shape"] = np.array([24])
    with pytest.raises(InputError, match="has 1 dimensions"):
        stores.open_matrix("X", x)


def test_parts_of_other_lengths_are_refused(tmp_path: Path) -> None:
    parts = parts_of(X, "csr")
    short = parts | {"data": parts["data"][:-1]}
    with pytest.raises(InputError, match=r"indices, \d+ values: the sparse matrix is damaged"):
        oocgemm.gemm(in_memory(X.shape, "csr", short), B, **ON_HOST)
    with pytest.raises(InputError, match=r"has 91 rows, and an indptr of int32 of shape .*91,.*not of 92"):
        oocgemm.gemm(in_memory((91, 24), "csr", parts), B, **ON_HOST)
    wrong = in_memory(X.shape, "csr", parts | {"indices": parts["indices"].astype(float)})
    with pytest.raises(InputError, match="has indices of float64: indices are integers"):
        oocgemm.gemm(wrong, B, **ON_HOST)
    path = write(tmp_path / "a.h5ad", X.shape, "csr", parts)
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        del file["X"].attrs["encoding-type"]
    with pytest.raises(InputError, match="without the attribute encoding-type = csr_matrix or csc_matrix"):
        oocgemm.gemm(path, B, **ON_HOST)


def test_a_check_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    checked = list[Any]()
    right = sparse.SparseOperand._check

    def check(self: Any, piece: Any, indices: Any) -> None:
        checked.append(piece)
        right(self, piece, indices)

    monkeypatch.setattr(sparse.SparseOperand, "_check", check)
    path = write(tmp_path / "a.h5ad", X.shape, "csr", parts_of(X, "csr"))
    for expected in (1, 1):
        stores.open_matrix("X", path)
        assert len(checked) == expected
    parts = parts_of(X, "csr")
    parts["indices"][-1] = 99
    write(tmp_path / "a.h5ad", X.shape, "csr", parts)
    with pytest.raises(InputError, match="has an entry in column 99"):
        stores.open_matrix("X", path)


def test_a_file_that_changes_after_it_was_opened_is_not_read(tmp_path: Path) -> None:
    parts = parts_of(X, "csr")
    matrix = stores.open_matrix("X", in_memory(X.shape, "csr", parts))
    parts["indices"][-1] = 99
    with pytest.raises(ExecutionError, match="has an entry in column 99, and the matrix has 24 columns"):
        matrix.read((0, 90), (0, 24), np.empty(X.shape, X.dtype))


def test_other_forms_and_types_name_the_remedy(tmp_path: Path) -> None:
    coo = in_memory(X.shape, "coo", parts_of(X, "csr"))
    with pytest.raises(
        InputError, match=r"A is a sparse matrix in the form coo: convert it by A = A.tocsr\(\)"
    ):
        oocgemm.gemm(coo, B, **ON_HOST)
    dense = Formatted(X)  # an array with another attribute of this name
    np.testing.assert_array_equal(oocgemm.gemm(cast(Any, dense), B, **ON_HOST).out, X @ B)
    text = parts_of(X, "csr") | {"data": np.full(np.count_nonzero(X), "a")}
    with pytest.raises(InputError, match="not numbers"):
        oocgemm.gemm(in_memory(X.shape, "csr", text), B, **ON_HOST)
    path = write(tmp_path / "a.h5ad", X.shape, "csr", parts_of(X, "csr"))
    with h5py.File(tmp_path / "a.h5ad") as file:
        group, backed = file["X"], cast(Any, Backed(file["X"]))
        np.testing.assert_array_equal(oocgemm.gemm(group, B, **ON_HOST).out, X @ B)
        np.testing.assert_array_equal(oocgemm.gemm(backed, B, **ON_HOST).out, X @ B)
    with pytest.raises(oocgemm.CombinationError, match="which other processes cannot read"):
        oocgemm.gemm(in_memory(X.shape, "csr", parts_of(X, "csr")), path, trans_b="T", workers=2, c="c.npy")


class Formatted:
    """An array whose attribute `format` is no text."""

    def __init__(self, x: Array) -> None:
        self.x, self.format, self.shape, self.dtype = x, x, x.shape, x.dtype

    def __array__(self, *given: Any, **options: Any) -> Array:
        return self.x

    def __getitem__(self, at: Any) -> Array:
        return self.x[at]


class Backed:
    """A sparse matrix of AnnData in a file: it has the open group."""

    def __init__(self, group: Any) -> None:
        self.group, self.format = group, "csr"
        self.shape, self.dtype = tuple(group.attrs["shape"]), group["data"].dtype


def test_a_changed_file_is_not_resumed(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.zarr", X.shape, "csr", parts_of(X, "csr")), str(tmp_path / "c.zarr")
    kinds: list[str] = []

    def observe(span: Any) -> None:
        kinds.append(span.kind)
        if kinds.count("write") > 1:
            raise KeyboardInterrupt

    options: dict[str, Any] = ON_HOST | {"axis": 1, "uplo": "full", "tile": "8x8x8"}
    with pytest.raises(KeyboardInterrupt):
        oocgemm.gram(path, out=out, progress=lambda plan: observe, **options)
    zarr.open_array(f"{path}/data", mode="r+")[:] = 2
    with pytest.raises(InputError, match="changed"):
        oocgemm.gram(path, out=out, resume=True, **options)


def test_memory_for_pieces_and_starts_is_planned(tmp_path: Path) -> None:
    matrix = stores.open_matrix("X", stored(tmp_path, "gzip.h5ad", X, "csr"))
    entries = np.count_nonzero(X)
    assert matrix.layout.resident_bytes >= 8 * 91
    assert matrix.layout.decode_bytes >= entries * (8 + sparse.PLACING)
    assert matrix.layout.read_chunk == (1, 24)
    assert not matrix.layout.partial_reads


def test_scipy_and_anndata_give_the_same(tmp_path: Path) -> None:
    scipy: Any = pytest.importorskip("scipy.sparse")
    for made in (scipy.csr_array, scipy.csc_matrix):
        np.testing.assert_array_equal(oocgemm.gemm(made(X), B, **ON_HOST).out, X @ B)
    with pytest.raises(InputError, match="in the form coo"):
        oocgemm.gemm(scipy.coo_array(X), B, **ON_HOST)
    pytest.importorskip("anndata")
    anndata: Any = importlib.import_module("anndata")
    data = anndata.AnnData(scipy.csr_matrix(X), layers={"counts": scipy.csc_matrix(X)})
    data.write_h5ad(tmp_path / "a.h5ad")
    data.write_zarr(tmp_path / "a.zarr")
    for address in ("a.h5ad::/X", "a.h5ad::/layers/counts", "a.zarr/X", "a.zarr/layers/counts"):
        np.testing.assert_array_equal(oocgemm.gemm(str(tmp_path / address), B, **ON_HOST).out, X @ B)
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    np.testing.assert_array_equal(oocgemm.gemm(backed.X, B, **ON_HOST).out, X @ B)


@settings(max_examples=examples(200))
@given(matrices(), st.integers(1, 40), st.booleans(), st.data())
def test_any_block_of_kept_lines_is_read(
    found: tuple[Array, str, dict[str, Array]], piece: int, python: bool, data: Any
) -> None:
    dense, form, parts = found
    matrix = stores.open_matrix("X", in_memory(dense.shape, form, parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "PIECE", piece)
        if python:
            patch.setattr(sparse, "compiled", lambda: None)
        for axis in data.draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0), (0, 0)])):
            numbers = st.integers(0, dense.shape[axis] - 1) if dense.shape[axis] else st.nothing()
            chosen = data.draw(st.lists(numbers, min_size=1, max_size=9)) if dense.shape[axis] else []
            chosen = np.array(sorted(set(chosen)) if data.draw(st.booleans()) else chosen, np.int64)
            matrix, dense = kept(matrix, axis, chosen), dense.take(chosen, axis)
        rows, cols = (
            tuple(sorted(data.draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))))
            for extent in dense.shape
        )
        out = np.full((rows[1] - rows[0], cols[1] - cols[0]), 77, dense.dtype)
        matrix.read(rows, cols, out)
    np.testing.assert_array_equal(out, dense[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("place", ["memory", "gzip.h5ad", "raw.zarr"])
def test_parts_of_matrices_are_multiplied(tmp_path: Path, place: str) -> None:
    rows, cols = np.arange(2, 80, 3), np.flatnonzero(np.arange(24) % 5)
    for form in FORMS:
        x, dense = stored(tmp_path, place, X, form), X[rows][:, cols]
        part = oocgemm.keep(x, rows, cols)
        assert isinstance(stores.open_matrix("X", part), sparse.KeptEntries)
        np.testing.assert_array_equal(
            oocgemm.gemm(part, B[cols], tile="16x8x8", **ON_HOST).out, dense @ B[cols]
        )
        found = oocgemm.gram(part, axis=1, uplo="full", tile="16x16x8", **ON_HOST).out
        np.testing.assert_array_equal(found, dense.T @ dense)
