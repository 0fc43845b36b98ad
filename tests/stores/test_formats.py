"""Errors name the format or dtype of an operand that is not supported, and a conversion that works."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import InputError
from oocgemm.cli.process import EXIT_USAGE
from tests.support.command import contents, run
from tests.support.suite import slow

_rng = np.random.default_rng(0)
A, B = _rng.integers(0, 2, (30, 40)), _rng.integers(0, 2, (40, 20)).astype("f4")
PRODUCT = A @ B


def module(name: str) -> Any:
    return pytest.importorskip(name)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder whose name has spaces and quotes, which a shell splits unless it is quoted."""
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def said_of(a: Any, b: Any) -> str:
    """Multiply, and return the text of the error.

    If the operands are paths, the command must print the same text.
    """
    with pytest.raises(InputError) as raised:
        oocgemm.matmul(a, b, backend="host")
    said = str(raised.value)
    if isinstance(a, str) and isinstance(b, str):
        done = run(a, b, "C")
        assert (done.code, done.out, done.err) == (EXIT_USAGE, "", f"Error: {said}\n")
    return said


def obey(said: str, before: str = "convert A by ") -> str:
    """Run the conversion that an error suggests in a shell.

    Return the path that the error says to pass then.
    """
    found = re.search(f"{before}(python -c .*) and pass (.*)", said)
    assert found is not None, said
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(found[1], shell=True, check=True, env=os.environ | {"PATH": path})
    return found[2]


ZARR: dict[str, dict[str, Any]] = {
    "A.zarr": {"chunks": (7, 9), "compressors": None},
    "A": {"chunks": (7, 9), "shards": (14, 18)},
    "A 2.zarr/": {"chunks": (50, 9), "zarr_format": 2},
}


@pytest.mark.parametrize("path", ["A 2.zarr/", "A 2.npy", *slow(("A.zarr",), ("A",), ("A.f.npy",))])
@pytest.mark.parametrize("dtype", ["uint64"])
def test_the_command_that_converts_a_path_works(here: Path, path: str, dtype: str) -> None:
    values = A.astype(dtype)
    if path.endswith(".npy"):
        np.save(path, np.asfortranarray(values) if ".f" in path else values)
    else:
        zarr.create_array(path, shape=A.shape, dtype=dtype, **ZARR[path])[:] = values
    made = obey(said_of(path, B))
    np.testing.assert_array_equal(oocgemm.matmul(made, B, backend="host"), PRODUCT)


# Name of a package -> a function that returns values as an array of that package. The array may read from a
# folder.
OBJECTS: dict[str, Callable[[Any, Path], Any]] = {
    "numpy": lambda values, _: values,
    "zarr in memory": lambda values, _: zarr.create_array(zarr.storage.MemoryStore(), data=values),
    "dask": lambda values, _: module("dask.array").from_array(values, chunks=(10, 10)),
    "xarray": lambda values, _: module("xarray").DataArray(values),
    "tensorstore": lambda values, _: module("tensorstore").array(values),
    "h5py": lambda values, folder: module("h5py").File(folder / "a.h5", "w").create_dataset("a", data=values),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_line_that_converts_an_object_works(tmp_path: Path, kind: str) -> None:
    names = {"A": OBJECTS[kind](A.astype("uint64"), tmp_path), "numpy": np, "dask": module("dask")}
    names["tensorstore"] = sys.modules.get("tensorstore")
    said = said_of(names["A"], B.astype("f8"))
    exec(said.split("convert A by ")[1], names)
    np.testing.assert_array_equal(oocgemm.matmul(names["A"], B.astype("f8"), backend="host"), PRODUCT)


def test_both_operands_are_converted_if_neither_can_be_multiplied() -> None:
    names: dict[str, Any] = {"numpy": np, "A": A.astype("u8"), "B": B.astype("u8")}
    said = said_of(names["A"], names["B"])
    for line in said.split(": ", 1)[1].split("; "):
        exec(re.sub("convert . by ", "", line), names)
    np.testing.assert_array_equal(oocgemm.matmul(names["A"], names["B"], backend="host"), PRODUCT)


@pytest.mark.parametrize("values", [A.astype("U1"), A.astype("M8[s]"), A.astype("S1")], ids=str)
def test_what_is_no_number_is_not_said_to_be_convertible(values: Any) -> None:
    assert said_of(values, B).endswith("its elements are not numbers")


def _make(path: str) -> None:
    values = A.astype("f4")
    match Path(path).suffix.lower():
        case ".npz":
            np.savez(path, some=values, other=values[:2])
        case ".csv":
            np.savetxt(path, values, delimiter=",")
        case ".tsv" | ".txt":
            np.savetxt(path, values, delimiter="\t")
        case ".parquet":
            module("pyarrow")
            module("pandas").DataFrame(values).to_parquet(path)
        case _:
            module("h5py").File(path, "w").create_dataset("a", data=values)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("A 1.npz", "an archive of NumPy arrays"),
        ("A 1.csv", "a text file"),
        ("A.tsv", "a text file"),
        ("A.TXT", "a text file"),
        ("A.parquet", "a Parquet file"),
    ],
)
def test_the_command_that_converts_a_file_works(here: Path, path: str, kind: str) -> None:
    _make(path)
    np.save("B.npy", B)
    said = said_of(path, "B.npy")
    assert said.startswith(f"A: {path} is {kind}, not a zarr array or a .npy file: convert it by ")
    made = np.load(obey(said, "convert it by "))
    np.testing.assert_array_equal(made, A)


@pytest.mark.parametrize("path", ["A.h5", "A.HDF5", "A.nc"])
def test_the_address_of_a_dataset_that_an_error_suggests_works(here: Path, path: str) -> None:
    _make(path)
    found = re.search(r"is an HDF5 file, .* pass one of (\S+) \(", said_of(path, B))
    assert found is not None
    np.testing.assert_array_equal(oocgemm.matmul(found[1], B, backend="host"), PRODUCT)


def test_a_file_of_no_known_format_is_said_to_be_a_file(here: Path) -> None:
    np.save("A.npy", A)
    shutil.move("A.npy", "A")
    assert said_of("A", B) == (
        "A: no zarr array at A: it is a file, but zarr arrays are folders; a .npy file must have that ending"
    )


@pytest.mark.parametrize("ending", [".h5", ".csv", ".npz", ".parquet", ".H5", ".txt"])
@pytest.mark.parametrize("options", ["", "--overwrite"])
def test_a_result_of_another_format_is_refused(here: Path, ending: str, options: str) -> None:
    for name, array in (("A", A.astype("f4")), ("B", B)):
        np.save(f"{name}.npy", array)
    before = contents(here)
    done = run("A.npy", "B.npy", f"out{ending}", *options.split())
    assert done.code == EXIT_USAGE
    assert re.search(r"C at out\.\w+ would be an? .* file|archive", done.err)
    assert "give out.zarr or out.npy" in done.err
    assert contents(here) == before


def test_a_result_that_is_a_file_of_another_format_is_refused(here: Path) -> None:
    for name, array in (("A", A.astype("f4")), ("B", B)):
        np.save(f"{name}.npy", array)
    Path("out.csv").write_text("1,2\n")
    before = contents(here)
    done = run("A.npy", "B.npy", "out.csv", "--overwrite")
    assert done.code == EXIT_USAGE
    assert "out.csv is a text file, not a zarr array or a .npy file: give another path" in done.err
    assert contents(here) == before


def test_a_zarr_array_may_have_any_name(here: Path) -> None:
    zarr.create_array("A.h5", data=A.astype("f4"))
    zarr.create_array("C.csv", data=np.zeros(PRODUCT.shape, "f4"))
    oocgemm.gemm("A.h5", B, "C.csv", overwrite=True, backend="host")
    np.testing.assert_array_equal(zarr.open_array("C.csv")[:], PRODUCT)


@pytest.mark.parametrize(
    ("url", "packages"),
    [("gcs://b/x", "gcsfs"), ("ftp://b.c/x", "fsspec")],
)
def test_a_url_whose_client_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, packages: str
) -> None:
    # Where other tests have imported its modules, those can be imported without the package.
    for name in ["fsspec", *(name for name in sys.modules if name.startswith("fsspec."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for name, operands in (("A", (url, B)), ("B", (A.astype("f4"), url)), ("C", (A.astype("f4"), B, url))):
        with pytest.raises(InputError) as raised:
            oocgemm.gemm(*operands, backend="host")
        kind = url.partition(":")[0]
        assert f"{name} at {url}: {kind}:// needs a package that is not installed" in str(raised.value)
        assert str(raised.value).endswith(f": pip install {packages}")
