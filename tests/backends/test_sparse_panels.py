"""Products of sparse matrices whose panels the (fake) GPU makes dense."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import stores
from oocgemm.planning import Kind
from oocgemm.planning.cost import coding
from oocgemm.stores import sparse
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import integers
from tests.support.sparse_files import FORMS, PLACES, in_memory, parts_of, stored
from tests.support.suite import each_value, examples

rng = np.random.default_rng(0)
SHAPE = (230, 310)
X = (rng.integers(1, 5, SHAPE) * (rng.random(SHAPE) < 0.1)).astype(np.float32)
X[20:50] = X[-1] = 0
B = integers(rng, (SHAPE[1], 70), "float32")
ON_GPU: dict[str, Any] = {"backend": "cuda", "kernel": "cublas"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the GPU make small matrices dense, in small batches."""
    sizes = {
        "DECODED_BATCH": 64 << 10,
        "MIN_DECODED_BATCH": 32 << 10,
        "START_SECONDS": 0,
        "STORED_RATE": 1e12,
        "LANE_RATE": 1e12,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(coding, name, value)
    coding.decoding_shape.cache_clear()
    yield
    coding.decoding_shape.cache_clear()


def on_gpu(call: Any, seed: int = 0, devices: int = 1) -> Any:
    with fake_cuda(seed, devices=devices) as device:
        found = call()
        device.check()
    return found


def is_placed(plan: Any, operand: str = "A") -> bool:
    """Return whether the GPU makes an operand dense, so that the host reads no block into a slot."""
    return (Kind.READ, operand) not in {(op.kind, op.operand) for op in plan.schedule()}


@each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_exact(tmp_path: Path, place: str, form: str) -> None:
    x = stored(tmp_path, place, X, form)
    for seed in range(examples(3, quick=1)):
        found = on_gpu(lambda: oocgemm.gemm(x, B, tile="70x40x90", **ON_GPU), seed)
        np.testing.assert_array_equal(found.out, X @ B)
        assert is_placed(found.plan)
    assert found.plan.decoded == "A (csr)"
    found = on_gpu(lambda: oocgemm.gemm(B.T, x, trans_b="T", tile="40x70x90", **ON_GPU))
    np.testing.assert_array_equal(found.out, B.T @ X.T)
    assert is_placed(found.plan, "B")


@each_value
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("place", ["memory", "v3.zarr"])
def test_joined_matrices_are_placed(tmp_path: Path, place: str, axis: int) -> None:
    """Also where a batch has lines of two parts, which have as many entries, or others."""
    other = X[::-1].copy()
    other[0, :3] = 2
    for parts in ((X, X), (X, other, X)):
        operands = []
        for number, part in enumerate(parts):
            folder = tmp_path / f"{len(parts)}-{number}"
            folder.mkdir()
            operands.append(stored(folder, place, part, "csr"))
        x, dense = oocgemm.concat(operands, axis=axis), np.concatenate(parts, axis)
        b = B if axis == 0 else np.concatenate([B] * len(parts))
        for tile in ("70x40x90", "460x70x310"):
            found = on_gpu(lambda x=x, b=b, tile=tile: oocgemm.gemm(x, b, tile=tile, **ON_GPU))
            np.testing.assert_array_equal(found.out, dense @ b)
            assert found.plan.decoded == "A (csr)"


@each_value
@pytest.mark.parametrize("place", ["memory", "v3.zarr", "raw.zarr"])
def test_parts_of_matrices_are_placed(tmp_path: Path, place: str) -> None:
    x, rows, cols = (
        stored(tmp_path, place, X, "csr"),
        np.arange(3, 220, 2),
        np.flatnonzero(np.arange(310) % 3),
    )
    for kept_rows, kept_cols in ((rows, None), (None, cols), (rows[::-1], cols)):
        part, dense, b = oocgemm.keep(x, kept_rows, kept_cols), X, B
        dense = dense if kept_rows is None else dense[kept_rows]
        dense, b = (dense, B) if kept_cols is None else (dense[:, kept_cols], B[kept_cols])
        found = on_gpu(lambda part=part, b=b: oocgemm.gemm(part, b, tile="70x40x90", **ON_GPU))
        np.testing.assert_array_equal(found.out, dense @ b)
        assert found.plan.decoded == "A (csr)"


def test_several_devices_place_their_lines(tmp_path: Path) -> None:
    x, options = stored(tmp_path, "raw.zarr", X, "csr"), ON_GPU | {"devices": (0, 1)}
    found = on_gpu(lambda: oocgemm.gemm(x, B, tile="70x40x90", **options), devices=2)
    np.testing.assert_array_equal(found.out, X @ B)
    assert found.plan.decoded == "A (csr)"
    found = on_gpu(lambda: oocgemm.gram(x, axis=1, uplo="full", tile="96x96x64", **options), devices=2)
    np.testing.assert_array_equal(found.out, X.T @ X)
    assert found.plan.decoded == "A (csr)"


@pytest.mark.parametrize("axis", [0, 1])
def test_gram_matrices_transforms_and_components(tmp_path: Path, axis: int) -> None:
    x = stored(tmp_path, "h5ad", X, "csr")
    change = oocgemm.Transform(log1p=True, center="k")
    found = on_gpu(lambda: oocgemm.gram(x, axis=axis, transform=change, uplo="full", **ON_GPU))
    assert is_placed(found.plan)
    logs = np.log1p(X.astype(float))
    logs -= logs.mean(axis=axis, keepdims=True)
    np.testing.assert_allclose(found.out, logs @ logs.T if axis == 0 else logs.T @ logs, atol=1e-4)
    values = on_gpu(lambda: oocgemm.pca(x, 3, tol=1e-9, iterations=300, **ON_GPU)).singular_values
    expected = np.linalg.svd(X - X.mean(axis=0, dtype=float), compute_uv=False)[:3]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64"])
def test_other_dtypes_and_indices(dtype: str) -> None:
    dense = X.astype(dtype)
    x: Any = in_memory(SHAPE, "csr", parts_of(dense, "csr", np.int64))
    if dtype == "int8":  # an entry takes more than half of the bytes of dense elements at 10%
        dense[:, 9:] = 0
        x = in_memory(SHAPE, "csr", parts_of(dense, "csr", np.int64))
    found = on_gpu(lambda: oocgemm.gemm(x, B.astype(dtype), **ON_GPU))
    np.testing.assert_array_equal(found.out, dense @ B.astype(dtype))
    assert found.plan.decoded == "A (csr64)"


def test_the_host_makes_lines_dense_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = X.copy()
    dense[100:140] = 5  # these lines have ten times as many entries as planned
    shapes = list[Any]()
    right = sparse.SparseOperand.fetch

    def fetch(self: Any, rows: Any, cols: Any, out: Any) -> Any:
        found = right(self, rows, cols, out[:1024])
        shapes.append((rows[1] - rows[0], found[0].size))
        return found

    monkeypatch.setattr(sparse.SparseOperand, "fetch", fetch)
    x: Any = in_memory(SHAPE, "csr", parts_of(dense, "csr"))
    found = on_gpu(lambda: oocgemm.gemm(x, B, **ON_GPU))
    np.testing.assert_array_equal(found.out, dense @ B)
    assert is_placed(found.plan)
    assert (1, -1) in shapes  # on the host
    assert any(count > 1 and size > 0 for count, size in shapes)


@pytest.mark.parametrize("why", ["verify", "duplicates", "dense", "unsorted"])
def test_the_host_makes_dense_what_the_gpu_should_not(why: str) -> None:
    dense, parts = X.copy(), parts_of(X, "csr")
    if why == "dense":
        dense = np.ones_like(X)
        parts = parts_of(dense, "csr")
    elif why == "duplicates":
        parts["indices"][1] = parts["indices"][0]
        dense[0] = 0
        end = parts["indptr"][1]
        np.add.at(dense[0], parts["indices"][:end], parts["data"][:end])
    elif why == "unsorted":
        for part in ("indices", "data"):
            parts[part][:2] = parts[part][1::-1]
    x: Any = in_memory(SHAPE, "csr", parts)
    found = on_gpu(lambda: oocgemm.gemm(x, B, verify=why == "verify", **ON_GPU))
    np.testing.assert_array_equal(found.out, dense @ B)
    assert not found.plan.decoded


@pytest.mark.parametrize("first", [3, 0])
def test_ascending_indices_are_recognized(first: int) -> None:
    """Also across pieces, and where a line ends."""
    for width in (1, 3, 1 << 17):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "PIECE", width)
            parts = parts_of(X, "csr")
            matrix = stores.open_matrix("X", in_memory(SHAPE, "csr", parts))
            assert isinstance(matrix, sparse.SparseOperand)
            assert matrix.coding() is not None
            at = int(parts["indptr"][first])
            parts["indices"][at : at + 2] = parts["indices"][at : at + 2][::-1].copy()
            matrix = stores.open_matrix("X", in_memory(SHAPE, "csr", parts))
            assert isinstance(matrix, sparse.SparseOperand)
            assert matrix.coding() is None
