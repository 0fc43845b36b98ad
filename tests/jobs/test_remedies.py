"""The remedies that errors name are followed, and work: converted dtypes, and numbers of one's own."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import InputError
from tests.support.command import command
from tests.support.sparse_files import parts_of, write
from tests.support.suite import slow

Array = NDArray[Any]
ON_HOST: dict[str, Any] = {"backend": "host"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shell(line: str) -> None:
    """Run a command of an error message, with the Python of the tests."""
    subprocess.run(line.replace("python -c", f"{sys.executable} -c"), shell=True, check=True)


def stored(how: str, name: str, values: Array) -> Any:
    """Store values, and return what is passed for them."""
    if how == "npy":
        np.save(f"{name}.npy", values)
        return f"{name}.npy"
    if how == "zarr":
        zarr.create_array(f"{name}.zarr", data=values, chunks=(4, 4))
        return f"{name}.zarr"
    if how == "hdf5":
        with h5py.File(f"{name}.h5", "w") as file:
            file["x"] = values
        return f"{name}.h5::x"
    return values


def obeyed(said: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Convert A and B as an error says, and return what it says to pass."""
    found = []
    for name, operand in (("A", a), ("B", b)):
        made = operand
        if by := re.search(rf"convert {name} by (python -c .*?) and pass ([^;]*)", said):
            shell(by[1])
            made = by[2].strip()
        elif by := re.search(rf"convert {name} by {name} = ([^;]*)", said):
            made = eval(by[1], {"numpy": np, name: operand})
        found.append(made)
    return found[0], found[1]


DTYPES = [
    *(("uint64", "float64", "float64"), ("float32", "uint64", "float64"), ("uint64", "bool", "float64")),
    *slow(("uint64", "uint64", "float64"), ("uint64", "complex64", "complex128")),
]


@pytest.mark.parametrize("how", ["memory", *slow(("zarr",), ("npy",), ("hdf5",))])
@pytest.mark.parametrize(("one", "other", "common"), DTYPES)
def test_one_conversion_of_each_operand_is_enough(one: str, other: str, common: str, how: str) -> None:
    x, y = np.random.default_rng(0).integers(0, 2, (2, 6, 6))
    x, y = x.astype(one), y.astype(other)
    a, b = stored(how, "a", x), stored(how, "b", y)
    with pytest.raises(InputError, match=f"A is of dtype {one} and B of {other}") as raised:
        oocgemm.matmul(a, b, **ON_HOST)
    found = oocgemm.matmul(*obeyed(str(raised.value), a, b), **ON_HOST)
    assert found.dtype == common
    np.testing.assert_array_equal(found, x.astype(common) @ y.astype(common))


PAIRS: dict[str, Callable[[Array, Array], Any]] = {
    "reduce": lambda x, y: oocgemm.reduce(x, y, trans_b="T", to=oocgemm.Reduce("sum"), **ON_HOST),
    "kernel_matmul": lambda x, y: oocgemm.kernel_matmul(x, np.ones(4), y, gamma=1.0, **ON_HOST),
    "verify": lambda x, y: oocgemm.verify(x, y, np.full((4, 4), 3.0), trans_b="T"),
}


@pytest.mark.parametrize("verb", PAIRS)
def test_other_functions_of_two_operands_name_one_dtype_too(verb: str) -> None:
    x, y = np.ones((4, 3), np.uint64), np.ones((4, 3))
    said = r"of dtype uint64 and .* of float64.*: convert [AX] by .*float64"
    with pytest.raises(InputError, match=said):
        PAIRS[verb](x, y)
    PAIRS[verb](x.astype(np.float64), y)


def gapped(seed: int = 3) -> Array:
    """Return genotypes with missing ones (-1), of which column 4 has no known one, and column 6 only ones."""
    x = np.random.default_rng(seed).integers(0, 3, (20, 9)).astype(np.int8)
    x[np.random.default_rng(seed + 1).random(x.shape) < 0.2] = -1
    x[:, 4], x[:, 6] = -1, 1
    return x


def standardized(x: Array, *, scaled: bool) -> Array:
    """Return centered genotypes, with gaps and columns without variation as zeros."""
    known: Any = np.ma.masked_equal(x, -1).astype(np.float64)
    z = known - known.mean(axis=0)
    if scaled:
        deviation = np.asarray(known.std(axis=0).filled(1))
        z = z / np.where(deviation > 0, deviation, 1)
    return np.asarray(z.filled(0))


CHANGES = [
    "missing=-1,center=k",
    "missing=-1",
    "missing=-1,center=k,scale=k",
    "missing=-1,center=k,scale=hwe",
]


def transform_of(change: str) -> oocgemm.Transform:
    given = dict(part.split("=") for part in change.split(","))
    return oocgemm.Transform(**{**given, "missing": int(given["missing"])})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("axis", [0, *slow((1,))])
def test_columns_without_a_mean_get_numbers_in_the_library(change: str, axis: int) -> None:
    x = gapped() if axis == 0 else gapped().T.copy()
    with pytest.raises(InputError, match="has only missing elements") as raised:
        oocgemm.gram(x, axis=axis, transform=transform_of(change), **ON_HOST)
    said = re.search(r"or pass (.*) after (.*)", str(raised.value))
    assert said is not None
    names: dict[str, Any] = {"numpy": np, "oocgemm": oocgemm, "X": x}
    exec(said[2], names)
    own = eval(f"dict({said[1]})", names)
    found = oocgemm.gram(
        x, axis=axis, uplo="full", transform=oocgemm.Transform(missing=-1, **own), **ON_HOST
    ).out
    _check(np.asarray(found), change)


@pytest.mark.parametrize("change", [CHANGES[2], *slow((CHANGES[0],), (CHANGES[3],))])
def test_columns_without_a_mean_get_numbers_on_the_command_line(change: str) -> None:
    np.save("x.npy", gapped())
    host = "--backend", "host", "--quiet"
    done = command("gram", "x.npy", "k.npy", "--transform", change, *host)
    assert (done.code, "has only missing elements" in done.err) == (2, True)
    said = re.search(r"or run (python -c .*?) and pass (\S*) in the transform", done.err)
    assert said is not None
    shell(said[1])
    assert (
        command(
            "gram", "x.npy", "k.npy", "--uplo", "full", "--transform", f"missing=-1,{said[2]}", *host
        ).code
        == 0
    )
    _check(np.load("k.npy"), change)


def _check(found: Array, change: str) -> None:
    x = gapped()
    if "center" not in change:
        z = _imputed(x)
    elif "hwe" in change:
        known: Any = np.ma.masked_equal(x, -1).astype(float)
        p = np.asarray(known.mean(axis=0).filled(0)) / 2
        deviation = np.sqrt(2 * p * (1 - p))
        z = standardized(x, scaled=False) / np.where(deviation > 0, deviation, 1)
    else:
        z = standardized(x, scaled="scale" in change)
    np.testing.assert_allclose(found, z @ z.T, rtol=1e-4, atol=1e-4)


def _imputed(x: Array) -> Array:
    known: Any = np.ma.masked_equal(x, -1).astype(float)
    return np.where(x == -1, np.asarray(known.mean(axis=0).filled(0)), x)


@pytest.mark.parametrize("scale", ["k", "hwe"])
def test_constant_columns_get_a_scale_of_their_own(scale: str) -> None:
    x = np.delete(gapped(), 4, axis=1)
    x[:, 3] = 2  # whose standard deviation is 0 by both rules
    zarr.create_array("x.zarr", data=x)
    for operand in (x, "x.zarr"):
        given: dict[str, Any] = {"missing": -1, "center": "k"}
        with pytest.raises(InputError, match=r"the scale of column \d of X is 0") as raised:
            oocgemm.gram(operand, transform=oocgemm.Transform(scale=scale, **given), **ON_HOST)
        assert "impute" not in str(raised.value)
        if isinstance(operand, str):
            said = re.search(r"or run (python -c .*?) and pass scale=scale.npy in", str(raised.value))
            assert said is not None
            shell(said[1])
            numbers = np.load("scale.npy")
        else:
            names: dict[str, Any] = {"numpy": np, "oocgemm": oocgemm, "X": x}
            exec(str(raised.value).partition(" after ")[2], names)
            numbers = names["scale"]
        found = oocgemm.gram(
            operand, uplo="full", transform=oocgemm.Transform(scale=numbers, **given), **ON_HOST
        ).out
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("verb", ["cov", "corr", "similarity", "pca", "gram"])
def test_arrays_with_three_dimensions_are_folded(verb: str) -> None:
    x = np.random.default_rng(1).random((6, 3, 4))
    zarr.create_array("x.zarr", data=x)
    further: tuple[Any, ...] = (2,) if verb == "pca" else ()
    given: dict[str, Any] = {"topk": 2, **ON_HOST} if verb == "similarity" else ON_HOST
    call = getattr(oocgemm, verb)
    for operand in (x, "x.zarr", zarr.open_array("x.zarr")):
        with pytest.raises(InputError, match=r"[EX] has 3 dimensions .*: fold them") as raised:
            call(operand, *further, **given)
        assert "multiply" not in str(raised.value)
        code = str(raised.value).partition("such as ")[2].partition(" (--rows 0 --cols 1,2)")[0]
        view = eval(code, dict.fromkeys("EX", operand) | {"oocgemm": oocgemm})
        call(view, *further, **given)


def test_a_group_names_its_sparse_matrices() -> None:
    write(Path("a.zarr"), (5, 4), "csr", parts_of(np.eye(5, 4), "csr"))
    root = zarr.open_group("a.zarr")
    root.create_group("obs").create_array("n", data=np.arange(5))
    root.create_group("layers").create_array("dense", data=np.eye(5, 4))
    with pytest.raises(InputError, match=r"give an array in it: X \(a sparse matrix\), layers/dense"):
        oocgemm.gram("a.zarr", **ON_HOST)


class _Block:
    """A sparse block: NumPy makes an array of one object of it."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def toarray(self) -> Array:
        return self.x


class _Sparse:
    """An object whose slices are sparse."""

    def __init__(self, x: Array) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __getitem__(self, at: Any) -> _Block:
        return _Block(self.x[at])


def test_objects_with_sparse_slices_name_a_conversion_that_works() -> None:
    x = np.random.default_rng(6).random((5, 4))
    source: Any = _Sparse(x)
    with pytest.raises(InputError, match=r"_Sparse is sparse, .* convert it with \[:\]\.toarray\(\)$"):
        oocgemm.gram(source, **ON_HOST)
    found = oocgemm.gram(source[:].toarray(), uplo="full", **ON_HOST).out
    np.testing.assert_allclose(found, x @ x.T)
