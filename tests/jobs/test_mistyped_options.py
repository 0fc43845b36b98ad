"""Options that a backend cannot follow, or that hardly anyone means, are named, and their remedies work."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import DataWarning
from oocgemm.errors import InputError
from oocgemm.jobs import request
from tests.support.command import command
from tests.support.suite import slow
from tests.support.unfinished_runs import failing_after

X = np.random.default_rng(2).integers(-3, 4, (300, 20)).astype("float64")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    return tmp_path


@pytest.mark.parametrize("backend", ["host", "auto"])
@pytest.mark.parametrize(
    "words",
    [
        ("run", "x.npy", "x.npy", "c.npy", "--transpose-b"),
        ("gram", "x.npy", "c.npy"),
        ("corr", "x.npy", "c.npy"),
        ("cov", "x.npy", "c.npy"),
        ("pca", "x.npy", "c.zarr", "--components", "2"),
        ("similarity", "x.npy", "c.zarr", "--topk", "2"),
    ],
    ids=lambda words: str(words[0]),
)
def test_a_device_that_the_cpu_lacks_is_refused(words: tuple[str, ...], backend: str, here: Path) -> None:
    refused = command(*words, "--backend", backend, "--device", "3")
    assert refused.code == 2, refused.err
    assert "there is no device 3: the host backend has one, number 0; drop device (--device)" in refused.err
    assert not list(here.glob("c.*"))
    assert command(*words, "--backend", backend).code == 0


@pytest.mark.parametrize("given", [{"device": 1}, {"devices": [1]}, {"devices": "2"}], ids=str)
def test_the_library_refuses_it_too(given: Any) -> None:
    with pytest.raises(InputError, match=r"there is no device \d: the host backend has one, number 0"):
        oocgemm.gemm(X, X, trans_b="T", backend="host", **given)
    if "devices" in given:
        with pytest.raises(InputError, match=r"there is no device \d"):
            oocgemm.plan(X, X, trans_b="T", backend="host", **given)


@pytest.mark.parametrize(("n", "chunks"), [(110, (7, 7)), *slow((330, (7, 7)), (330, (1, 40)))])
def test_very_many_files_are_warned_of(
    n: int, chunks: tuple[int, int], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = -(-n // chunks[0]) * -(-n // chunks[1])
    if files < request.MANY_FILES:
        monkeypatch.setattr(request, "MANY_FILES", files)
    wide = np.ones((n, 2))
    extents = "x".join(map(str, chunks))
    with pytest.warns(DataWarning, match=f"chunks of {chunks[0]} x {chunks[1]} make {files} files") as caught:
        oocgemm.gram(wide, "c.zarr", chunks=chunks, backend="host")
    better = re.search(r"such as (\d+)x(\d+)", str(caught[0].message))
    assert better is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oocgemm.gram(wide, "d.zarr", chunks=(int(better[1]), int(better[2])), backend="host")
        oocgemm.gram(wide, "e.zarr", backend="host")
    np.save("wide.npy", wide)
    done = command("gram", "wide.npy", "f.zarr", "--chunks", extents, "--backend", "host", "--quiet")
    lines = [line for line in done.err.splitlines() if f"make {files} files" in line]
    assert (done.code, len(lines)) == (0, 1)


@pytest.mark.parametrize("c", ["resluts/c.npy", "resluts/c.zarr", "deep/er/c.zarr"])
def test_a_folder_that_is_created_is_named(c: str, here: Path) -> None:
    top = here / c.split("/", maxsplit=1)[0]
    with pytest.warns(DataWarning, match=f"the folder {re.escape(str(top))} does not exist, and is created"):
        oocgemm.gram(X, c, backend="host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oocgemm.gram(X, c, backend="host", overwrite=True)
    done = command("gram", "x.npy", f"other/{c}", "--backend", "host", "--quiet")
    assert done.code == 0
    assert len([line for line in done.err.splitlines() if "does not exist, and is created" in line]) == 1


@pytest.mark.parametrize("words", [("similarity", "--topk", "2"), ("corr",)], ids=str)
def test_so_it_is_for_other_results(words: tuple[str, ...], here: Path) -> None:
    done = command(words[0], "x.npy", "resluts/c.zarr", *words[1:], "--backend", "host", "--quiet")
    assert done.code == 0, done.err
    assert f"the folder {here / 'resluts'} does not exist, and is created" in done.err


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float64", "float32"), ("float64", "float16"), ("float32", "float64"), ("float32", "float16")],
)
def test_another_dtype_of_c_is_reached_by_a_cast(dtype: str, wanted: str, here: Path) -> None:
    x = X.astype(dtype)
    with pytest.raises(InputError, match=rf"epilogue=\[oocgemm.Cast\('{wanted}'\)\]"):
        oocgemm.gemm(x, x, trans_b="T", out_dtype=wanted, backend="host")
    found = oocgemm.gemm(x, x, trans_b="T", epilogue=[oocgemm.Cast(wanted)], backend="host").out
    assert found.dtype == wanted
    np.testing.assert_array_equal(found, (X @ X.T).astype(wanted))
    np.save("x.npy", x)
    words = ("run", "x.npy", "x.npy", "c.npy", "--transpose-b", "--backend", "host")
    refused = command(*words, "--out-dtype", wanted)
    options = re.search(r"\((--transform-a \S+ --transform-b \S+)\)", refused.err)
    assert options is not None, refused.err
    assert command(*words, *options[1].split(), "--out-dtype", "float32").code == 0 or wanted == "float64"


def test_a_complex_c_is_not_advised_to_be_cast() -> None:
    with pytest.raises(InputError, match=r"choose one of complex64$"):
        oocgemm.gemm(X.astype("c8"), X.astype("c8"), trans_b="T", out_dtype="float32", backend="host")


@pytest.mark.parametrize("c", ["c.zarr", "c.npy", "folder", "there/c"])
def test_resume_of_a_result_names_the_option(c: str, here: Path) -> None:
    (here / "there").mkdir()
    words = ("run", "x.npy", "x.npy", c, "--transpose-b", "--backend", "host", "--tile", "64x64x20")
    with failing_after(2):
        assert command(*words).code == 1
    refused = command("resume", c)
    assert refused.code == 2
    assert "repeat its command with --resume" in refused.err
    assert f"oocgemm run A B {c} --resume" in refused.err
    assert command(*words, "--resume").code == 0
    gone = command("resume", "missing/c.zarr")
    assert (gone.code, "--resume" in gone.err) == (2, True)


@pytest.mark.parametrize("chunks", [(73, 79), (64, 48), (7, 290)])
def test_the_tile_that_odd_chunks_of_a_gram_matrix_need_is_named(chunks: tuple[int, int], here: Path) -> None:
    zarr.create_array("c.zarr", shape=(300, 300), chunks=chunks, dtype="f8")
    given: dict[str, Any] = {"backend": "host", "overwrite": True}
    with pytest.raises(InputError, match=f"which has {chunks[0]} x {chunks[1]} elements") as refused:
        oocgemm.gram(X, "c.zarr", tile="50x50x20", **given)
    sizes = re.findall(r"(?:multiple of|at least) (\d+)", str(refused.value))
    assert sizes
    for size in map(int, sizes):
        assert size <= 300
        found = oocgemm.gram(X, "c.zarr", tile=f"{size}x{size}x20", **given).out
        np.testing.assert_array_equal(found[:], X @ X.T)


@pytest.mark.parametrize("rows", [0, 1])
def test_rows_that_cannot_be_compared_are_counted(rows: int) -> None:
    with pytest.raises(InputError, match=f"E has {rows} rows?, and none to compare it with: pass more rows"):
        oocgemm.similarity(X[:rows], topk=1, backend="host")
    assert oocgemm.similarity(X[:2], topk=1, backend="host").indices.shape == (2, 1)


def test_a_product_without_columns_has_no_largest_element() -> None:
    with pytest.raises(InputError, match="C has no columns, so that no element is the largest"):
        oocgemm.reduce(X, np.empty((20, 0)), to=oocgemm.TopK(1), backend="host")
