"""Which triangle of a Gram matrix is stored: both, or one that is recorded, with nothing beside it."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from oocgemm.jobs.verify import verify
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import integers
from tests.support.suite import each_value
from tests.support.unfinished_runs import failing_after, stored

N = 50
TRIANGLES: dict[str, Any] = {"lower": np.tril, "upper": np.triu}
# More than one tile, so that some blocks of C are on its diagonal and others are not.
TILE: dict[str, Any] = {"tile": "24x24x7"}


def operand(dtype: str = "float64", seed: int = 0) -> Any:
    return integers(np.random.default_rng(seed), (N, 20), dtype)


def product(x: Any) -> Any:
    wide = x.astype("complex128" if x.dtype.kind == "c" else "float64")
    return wide @ wide.conj().T


def existing(dtype: str) -> Any:
    """Return a C whose triangles differ, and which has no 0."""
    return (1 + np.arange(N * N).reshape(N, N) % 7).astype(numpy_dtype(dtype))


def combined(uplo: str, inside: Any, outside: Any) -> Any:
    """Return a matrix with the elements of `inside` in a triangle, and those of `outside` beside it."""
    where = TRIANGLES[uplo](np.ones((N, N), bool))
    return np.where(where, inside, outside)


def new_memory(folder: Path, dtype: str) -> Any:
    return None


def new_npy(folder: Path, dtype: str) -> Any:
    return folder / "c.npy"


def new_zarr(folder: Path, dtype: str) -> Any:
    return folder / "c.zarr"


def by_rows(folder: Path, dtype: str) -> Any:
    return existing(dtype)


def by_columns(folder: Path, dtype: str) -> Any:
    return np.asfortranarray(existing(dtype))


def part_of_an_array(folder: Path, dtype: str) -> Any:
    c = np.zeros((2 * N, N + 9), numpy_dtype(dtype))[::2, 4:-5]
    c[...] = existing(dtype)
    return c


def mapped(folder: Path, dtype: str) -> Any:
    np.save(folder / "c.npy", existing(dtype))
    return np.load(folder / "c.npy", mmap_mode="r+")


def npy(folder: Path, dtype: str) -> Any:
    np.save(folder / "c.npy", existing(dtype))
    return folder / "c.npy"


def of_zarr(**options: Any) -> Callable[[Path, str], Any]:
    def create(folder: Path, dtype: str) -> Any:
        zarr.create_array(folder / "c.zarr", data=existing(dtype), **options)
        return folder / "c.zarr"

    return create


NEW = [new_memory, new_npy, new_zarr]
OLD = {
    "rows": by_rows,
    "columns": by_columns,
    "part": part_of_an_array,
    "mapped": mapped,
    "npy": npy,
    "raw": of_zarr(chunks=(12, 12), compressors=None),
    "oblong": of_zarr(chunks=(6, 12), compressors=None),
    "zstd": of_zarr(chunks=(8, 8)),
    "v2": of_zarr(chunks=(12, 6), zarr_format=2),
    "sharded": of_zarr(chunks=(4, 4), shards=(12, 12)),
}


def content(result: Any) -> Any:
    return np.asarray(result)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [1, 4, 200])
def test_all_of_c_is_stored_by_default(axis: int, n: int, tmp_path: Path) -> None:
    x: Any = integers(np.random.default_rng(1), (n, 12), "float64")
    right, given = x @ x.T, x if axis == 0 else np.ascontiguousarray(x.T)
    np.save(tmp_path / "x.npy", given)
    options: dict[str, Any] = {"axis": axis, "backend": "host", "tile": "64x64x12"}
    result = oocgemm.gram(given, **options)
    np.testing.assert_array_equal(result.out, right)
    assert result.uplo == "full"
    assert oocgemm.plan_gram(given, **options).run().uplo == "full"
    for c in (tmp_path / "c.npy", tmp_path / "c.zarr"):
        done = command("gram", tmp_path / "x.npy", c, "--axis", str(axis), "--backend", "host")
        assert (done.code, "(both triangles)" in done.out) == (0, True), done.err
        np.testing.assert_array_equal(np.asarray(oocgemm.stores.open_matrix("C", str(c)).array), right)  # type: ignore[attr-defined]


@each_value
@pytest.mark.parametrize("uplo", list(TRIANGLES))
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8", "float16"])
@pytest.mark.parametrize("place", NEW)
def test_beside_the_triangle_of_a_new_array_are_zeros(
    place: Callable[[Path, str], Any], dtype: str, uplo: str, tmp_path: Path
) -> None:
    x = operand(dtype)
    result = oocgemm.gram(x, place(tmp_path, dtype), uplo=uplo, backend="host", **TILE)
    assert result.uplo == uplo
    np.testing.assert_array_equal(content(result), combined(uplo, product(x), 0))


@each_value
@pytest.mark.parametrize("uplo", list(TRIANGLES))
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("place", list(OLD))
def test_beside_the_triangle_of_an_existing_array_nothing_changes(
    place: str, beta: int, uplo: str, tmp_path: Path
) -> None:
    dtype = "complex64" if place in ("rows", "zstd", "npy") else "float64"
    x, old = operand(dtype), existing(dtype)
    c = OLD[place](tmp_path, dtype)
    options: dict[str, Any] = {} if beta or not isinstance(c, Path) else {"overwrite": True}
    options |= {"tile": "24x24x7", "backend": "host", "beta": beta}
    result = oocgemm.gram(x, c, uplo=uplo, **options)
    np.testing.assert_array_equal(content(result), combined(uplo, product(x) + beta * old, old))


@each_value
@pytest.mark.parametrize("uplo", list(TRIANGLES))
@pytest.mark.parametrize("dtype", ["float32", "complex64", "int8"])
@pytest.mark.parametrize("tile", ["24x24x7", "50x50x7"])
def test_a_gpu_stores_nothing_beside_the_triangle(tile: str, dtype: str, uplo: str) -> None:
    x = operand(dtype)
    c_dtype = "int32" if dtype == "int8" else dtype
    options: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": tile, "uplo": uplo}
    with fake_cuda(3) as device:
        result = oocgemm.gram(x, **options)
        c = existing(c_dtype)
        oocgemm.gram(x, c, **options)
        updated = existing(c_dtype)
        oocgemm.gram(x, updated, beta=2, **options)
        device.check()
    assert result.plan.slots.streams("C")  # straight from the device
    np.testing.assert_array_equal(result.out, combined(uplo, product(x), 0))
    old = existing(c_dtype)
    np.testing.assert_array_equal(c, combined(uplo, product(x), old))
    np.testing.assert_array_equal(updated, combined(uplo, product(x) + 2 * old, old))


@pytest.mark.parametrize("uplo", list(TRIANGLES))
def test_memory_for_old_elements_is_in_the_budget(uplo: str, tmp_path: Path) -> None:
    x, c = operand(), of_zarr(chunks=(8, 8))(tmp_path, "float64")
    old, new = (oocgemm.plan_gram(x, y, uplo=uplo, backend="host").footprint for y in (c, None))
    assert old.host["scratch"] > new.host["scratch"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_attribute_records_the_triangle_until_c_is_replaced(zarr_format: Any, tmp_path: Path) -> None:
    x, c = operand(), tmp_path / "c.zarr"
    zarr.create_array(c, data=np.ones((N, N)), zarr_format=zarr_format)

    def recorded() -> Any:
        return zarr.open_array(c, mode="r").attrs.get("oocgemm")

    given: dict[str, Any] = {"backend": "host", "overwrite": True}
    for uplo in ("lower", "upper", "full"):
        assert oocgemm.gram(x, c, uplo=uplo, **given).uplo == uplo
        assert recorded() == {"uplo": uplo}
    assert oocgemm.gemm(x, x, c, trans_b="T", **given).uplo == "full"
    assert recorded() is None


@each_value
@pytest.mark.parametrize("c", ["c", "c.npy"])
@pytest.mark.parametrize("uplo", list(TRIANGLES))
def test_a_run_is_resumed_with_its_own_triangle(
    uplo: str, c: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = operand()
    np.save("x.npy", x)
    options = ("--backend", "host", "--tile", "8x8x8")
    for library in (False, True):
        with failing_after(5):
            failed = command("gram", "x.npy", c, *options, "--uplo", uplo, "--overwrite")
        assert "tiles are done" in failed.err
        other = command("gram", "x.npy", c, *options, "--uplo", "full", "--resume")
        assert f"uplo is full and was {uplo}" in other.err
        if library:
            result = oocgemm.gram("x.npy", c, backend="host", tile="8x8x8", resume=True)
            assert result.uplo == uplo
        else:
            done = command("gram", "x.npy", c, *options, "--resume")
            assert (done.code, f"(only the {uplo} triangle" in done.out) == (0, True), done.err
        right = combined(uplo, product(x), 0)
        assert stored(c) == right.tobytes()
        again = command("gram", "x.npy", c, *options, "--resume", "--json")
        assert (again.code, again.json()["uplo"], again.json()["plan"]["steps"]) == (0, uplo, 0)


@pytest.mark.parametrize("c", ["c", "c.npy"])
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
def test_verify_knows_which_triangle_is_stored(
    uplo: str, c: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = operand("float32")
    np.save("x.npy", x)
    assert command("gram", "x.npy", c, "--backend", "host", "--uplo", uplo).code == 0
    found = verify("x.npy", "x.npy", c, trans_b="T")
    assert (found.ok, found.uplo) == (True, uplo)
    done = command("verify", "x.npy", "x.npy", c, "--transpose-b")
    assert (done.code, f"The {uplo} triangle of C is correct" in done.out) == (0, uplo != "full")
    matrix: Any = np.load(c, mmap_mode="r+") if c == "c.npy" else zarr.open_array(c, mode="r+")
    matrix[(30, 10) if uplo == "lower" else (10, 30)] += 1
    wrong = command("verify", "x.npy", "x.npy", c, "--transpose-b")
    assert (wrong.code, "is wrong" in wrong.err) == (1, True)


@pytest.mark.parametrize("uplo", list(TRIANGLES))
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_verify_names_the_triangle_of_a_c_without_a_record(
    dtype: str, uplo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = operand(dtype)
    c = combined(uplo, product(x), 0).astype(dtype)
    given: dict[str, Any] = {"trans_b": "C"}
    found = verify(x, x, c, **given)
    assert (found.ok, found.half) == (False, uplo)
    assert f"gram={uplo!r}" in found.message
    assert verify(x, x, c, gram=uplo, **given).ok
    np.save("x.npy", x)
    np.save("c.npy", c)
    wrong = command("verify", "x.npy", "x.npy", "c.npy", "--adjoint-b")
    assert (wrong.code, f"with --gram {uplo}" in wrong.err, "--overwrite" in wrong.err) == (1, True, False)
    assert command("verify", "x.npy", "x.npy", "c.npy", "--adjoint-b", "--gram", uplo).code == 0
    c[30, 30] += 1  # in both triangles
    assert not verify(x, x, c, **given).half


@pytest.mark.parametrize("stores", [("upper", "lower"), ("upper", "full"), ("lower", "upper"), ("lower", "")])
def test_the_half_of_c_that_is_not_stored_is_not_added(stores: tuple[str, str], tmp_path: Path) -> None:
    x, c, (uplo, asked) = operand(), tmp_path / "c.zarr", stores
    oocgemm.gram(x, c, uplo=uplo, backend="host")
    of_gram = partial(oocgemm.gram, x, c, uplo=asked)
    call = partial(of_gram if asked else partial(oocgemm.gemm, x, x, c, trans_b="T"), beta=1, backend="host")
    with pytest.raises(InputError, match=f"stores only the {uplo} triangle .*uplo = '{uplo}'"):
        call()
    result = oocgemm.gram(x, c, uplo=uplo, beta=1, backend="host")
    np.testing.assert_array_equal(content(result), combined(uplo, 2 * product(x), 0))


def test_a_stored_lower_triangle_is_completed(tmp_path: Path) -> None:
    x, c = operand(), tmp_path / "c.zarr"
    oocgemm.gram(x, c, uplo="lower", backend="host")
    np.testing.assert_array_equal(content(oocgemm.gram(x, c, beta=1, backend="host")), 2 * product(x))


def test_a_gcta_file_and_what_is_built_on_gram_keep_their_triangles(tmp_path: Path) -> None:
    genotypes = np.random.default_rng(3).integers(0, 3, (9, 40)).astype("int8")
    lower = oocgemm.grm(genotypes, tmp_path / "x.grm.bin", backend="host")
    whole = oocgemm.grm(genotypes, backend="host")
    half = oocgemm.grm(genotypes, uplo="upper", backend="host")
    assert (lower.uplo, whole.uplo, half.uplo) == ("lower", "full", "upper")
    np.testing.assert_array_equal(whole.out, whole.out.T)
    np.testing.assert_array_equal(half.out, np.triu(whole.out))
    np.testing.assert_array_equal(lower.out, whole.out[np.tril_indices(9)])


@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
def test_a_stored_triangle_that_is_multiplied_is_warned_of(tmp_path: Path, uplo: str) -> None:
    x = np.arange(12.0).reshape(4, 3)
    oocgemm.gram(x, tmp_path / "c.zarr", uplo=uplo, backend="host")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        oocgemm.matmul(tmp_path / "c.zarr", np.eye(4), backend="host")
    said = [str(one.message) for one in caught if issubclass(one.category, oocgemm.DataWarning)]
    assert len(said) == (uplo != "full")
    assert all(f"only its {uplo} triangle" in text for text in said)
