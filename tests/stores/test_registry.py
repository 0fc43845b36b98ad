"""Stores of other packages, found by their entry points, are read as operands and written as results."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from oocgemm.stores import open_matrix, opening
from oocgemm.stores.npy import NpyMatrix
from tests.support.command import run

_rng = np.random.default_rng(0)
A, B = (_rng.integers(-3, 4, shape).astype(float) for shape in ((13, 9), (9, 7)))

# A package with several stores. Their files are those of np.save, with another suffix.
PACKAGE = """
import threading
from pathlib import Path

import numpy as np

from oocgemm.planning import Chunked, Writing
from oocgemm.stores import Store


class FakeMatrix:
    def __init__(self, name, path, array):
        self.name, self.path, self.array = name, path, array
        self.shape, self.dtype = array.shape, array.dtype
        self.layout = Chunked((4, 4), partial_reads=False, writing=Writing((4, 4)))

    def read(self, rows, cols, out):
        out[...] = self.array[slice(*rows), slice(*cols)]

    def write(self, rows, cols, data):
        self.array[slice(*rows), slice(*cols)] = data

    def sync(self):
        with open(self.path, "wb") as file:
            np.save(file, self.array)

    def set_finished(self, finished, uplo=None):
        pass

    def fingerprint(self):
        return None

    def describe(self):
        return {"store": "fake", "path": self.path, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self):
        return {self.path}


class ReadOnly(Store):
    kind = "fake"

    def matches(self, operand):
        return isinstance(operand, str) and operand.endswith(".fake")

    def open(self, name, operand, *, writable=False, journal=None):
        with open(operand, "rb") as file:
            return FakeMatrix(name, operand, np.load(file))


class Writable(ReadOnly):
    def exists(self, path):
        return Path(path).exists()

    def new_layout(self, path, problem, chunks, compressor):
        return Chunked(writing=Writing(chunks or (4, 4)))

    def create(self, new, journal=None):
        return FakeMatrix(new.name, new.path, np.zeros(new.shape, new.dtype))


class Greedy(ReadOnly):
    def matches(self, operand):
        return True


class Broken(ReadOnly):
    def __init__(self):
        raise RuntimeError("its library is missing")
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package whose entry point names one class of `PACKAGE`."""
    folder = tmp_path / "site"
    information = folder / "fakestore-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fakestore\nVersion: 1.0\n")
    (folder / "fakestore.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "fakestore", raising=False)
    monkeypatch.chdir(tmp_path)

    def name(store: str) -> None:
        (information / "entry_points.txt").write_text(f"[oocgemm.stores]\nfake = fakestore:{store}\n")
        opening.installed.cache_clear()

    for path, array in (("a.fake", A), ("b.fake", B)):
        with open(path, "wb") as file:
            np.save(file, array)
    yield name
    opening.installed.cache_clear()


def test_a_store_of_another_package_serves_all_operands(install: Install) -> None:
    install("Writable")
    assert run("a.fake", "b.fake", "c.fake", "--chunks", "4x4").code == 0
    with open("c.fake", "rb") as file:
        np.testing.assert_array_equal(np.load(file), A @ B)
    assert run("a.fake", "b.fake", "c.fake").code == 2  # c.fake exists already
    assert run("a.fake", "b.fake", "c.npy").code == 0
    np.testing.assert_array_equal(np.load("c.npy"), A @ B)


def test_a_store_without_create_is_read_only(install: Install) -> None:
    install("ReadOnly")
    done = run("a.fake", "b.fake", "c.fake")
    assert done.code == 2
    assert "C at c.fake: fake is read-only; give a path that ends in .zarr or .npy" in done.err


def test_a_dtype_in_another_store_is_refused_with_a_remedy(install: Install) -> None:
    install("ReadOnly")
    with open("a.fake", "wb") as file:
        np.save(file, A.astype(np.uint64))
    done = run("a.fake", "b.fake", "c.npy")
    assert done.code == 2
    assert "A is of dtype uint64" in done.err
    assert "convert a.fake to float64" in done.err


def test_a_store_that_cannot_be_loaded_is_ignored(install: Install) -> None:
    install("Broken")
    with pytest.warns(UserWarning, match=r"the store fake \(fakestore:Broken\) .* its library is missing"):
        assert opening.installed() == ()


def test_another_package_cannot_take_over_npy_files(install: Install) -> None:
    install("Greedy")
    np.save("a.npy", A)
    assert isinstance(open_matrix("A", "a.npy"), NpyMatrix)
    assert opening.store_of("a.zarr").kind == "fake"
    assert opening.store_of(A).kind == "memory"
