"""Products of HDF5 datasets: from files to zarr, killed and resumed, and of a real h5ad file."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.jobs.journal import JOURNAL, read
from oocgemm.reports import advice
from oocgemm.service.limits import PathError, Root, display, resolve
from oocgemm.timeline import read_log
from tests.support.backends_here import REAL_BACKENDS
from tests.support.command import command, run
from tests.support.unfinished_runs import failing_after

_rng = np.random.default_rng(0)
A, B = (_rng.integers(-4, 5, shape).astype("f8") for shape in ((70, 50), (50, 60)))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("backend", REAL_BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (16, 25)}, {"chunks": (16, 25), "compression": "gzip", "shuffle": True}],
    ids=["contiguous", "raw", "gzip"],
)
def test_a_product_of_datasets_is_that_of_numpy(options: dict[str, Any], backend: str) -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=A, **options)
        file.create_dataset("deep/b", data=B.T.astype(">f8"), **options)
    result = oocgemm.gemm(
        *("x.h5::/a", "x.h5::deep/b", "C.zarr"),
        trans_b="T",
        backend=backend,
        tile="32x25x25",
        timeline="run.jsonl",
    )
    np.testing.assert_array_equal(result.out[:], A @ B)
    assert oocgemm.verify("x.h5::/a", "x.h5::deep/b", "C.zarr", trans_b="T")
    assert read_log("run.jsonl").header["operands"]["A"]["path"] == "x.h5::/a"


def test_commands_take_addresses() -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=A, chunks=(10, 10), **hdf5plugin.Zstd())
        file["b"] = B
    planned = command("plan", "x.h5::/a", "x.h5::/b", "C.zarr", "--backend", "host", "--json")
    assert planned.json()["tile"]
    assert run("x.h5::/a", "x.h5::/b", "C.zarr", "--tile", "20x20x20").code == 0
    np.testing.assert_array_equal(zarr.open_array("C.zarr", mode="r")[:], A @ B)
    assert command("verify", "x.h5::/a", "x.h5::/b", "C.zarr").code == 0
    refused = run("x.h5::/a", "x.h5::/b", "x.h5::/c")
    assert (refused.code, "read-only" in refused.err) == (EXIT_USAGE, True)


def test_tiles_are_aligned_to_the_chunks_of_a_dataset() -> None:
    with h5py.File("x.h5", "w") as file:
        for name in "ab":
            file.create_dataset(name, (3000, 3000), "f4", chunks=(300, 300), compression="gzip")
            file[name][0, 0] = 1
    plan = oocgemm.plan("x.h5::/a", "x.h5::/b", "C.zarr", memory="48MiB", backend="host")
    assert plan.tile.m % 300 == plan.tile.n % 300 == plan.tile.k % 300 == 0
    assert plan.amplification == {"A": 1, "B": 1}


@pytest.mark.filterwarnings("default:A at x.h5:UserWarning")
def test_a_plan_and_a_report_say_that_h5py_reads_a_dataset() -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=A, chunks=(16, 25), compression="lzf")
        file["b"] = B
    note = "Note: A at x.h5::/a is read by h5py, in one thread at a time, since oocgemm does not decode its"
    assert note in command("plan", "x.h5::/a", "x.h5::/b", "--backend", "host").err
    done = run("x.h5::/a", "x.h5::/b", "C.zarr", "--timeline", "run.jsonl")
    assert (done.code, note in done.err) == (0, True)
    timeline = read_log("run.jsonl")
    assert timeline.header["operands"]["A"]["through"] == "h5py"
    assert advice._against("read", timeline).startswith(
        "h5py reads A, one thread at a time: store it without"
    )


@pytest.mark.parametrize("change", ["touch", "dataset", "nothing"])
def test_a_run_resumes_unless_the_file_has_changed(change: str) -> None:
    extent = 12
    a, b = _rng.standard_normal((extent, extent)), _rng.standard_normal((extent, extent))
    with h5py.File("a", "w") as file:  # the address need not have a suffix of HDF5
        file.create_dataset("x", data=a, chunks=(5, 5), compression="gzip")
        file.create_dataset("y", data=a, chunks=(5, 5), compression="gzip")
    with h5py.File("b", "w") as file:
        file["x"] = b
    options = ("--tile", "4x4x4")
    with failing_after(2):
        assert run("a::/x", "b::/x", "c", *options).code == 1
    if change == "touch":
        os.utime("a")
    name = "y" if change == "dataset" else "x"
    done = run(f"a::/{name}", "b::/x", "c", *options, "--resume")
    if change == "nothing":
        assert done.code == 0
        whole = oocgemm.matmul("a::/x", "b::/x", backend="host", tile="4x4x4")
        assert np.array_equal(zarr.open_array("c", mode="r")[:], whole)
    else:
        assert done.code == EXIT_USAGE
        assert ("the content of A has changed" if change == "touch" else "A is at") in done.err


def test_a_killed_run_resumes_to_the_same_bits(here: Path) -> None:
    a, b = _rng.standard_normal((400, 300)), _rng.standard_normal((300, 400))
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=a, chunks=(64, 64), compression="gzip", shuffle=True)
        file.create_dataset("b", data=b, chunks=(64, 64), **hdf5plugin.Bitshuffle())
    command_line = [sys.executable, "-m", "oocgemm", "run", "x.h5::/a", "x.h5::/b", "C.zarr"]
    command_line += ["--backend", "host", "--tile", "40x40x100"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    kills = 0
    while True:
        process = subprocess.Popen(command_line, env=environment, stderr=subprocess.PIPE)
        journal, before = here / "C.zarr/.oocgemm" / JOURNAL, _tiles(here)
        while process.poll() is None and kills < 2:
            if journal.exists() and _tiles(here) >= before + 15:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
            time.sleep(0.02)
        error = process.communicate()[1].decode()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
        command_line += ["--resume"] if "--resume" not in command_line else []
    assert kills
    whole = oocgemm.matmul("x.h5::/a", "x.h5::/b", backend="host", tile="40x40x100")
    assert np.array_equal(zarr.open_array("C.zarr", mode="r")[:], whole)
    np.testing.assert_allclose(whole, a @ b)


def _tiles(here: Path) -> int:
    """Return how many tiles of C the journal has."""
    try:
        record = read(here / "C.zarr/.oocgemm")
    except (OSError, ValueError):
        return 0
    return 0 if record is None else len(record.done)


def test_a_service_confines_addresses_as_other_paths(here: Path) -> None:
    root = here.resolve() / "data"
    (root / "dir").mkdir(parents=True)
    with h5py.File(root / "dir/a.h5", "w") as file:
        file["x"] = A
    (root / "near.h5").symlink_to("dir/a.h5")
    (root / "plain").symlink_to("dir/a.h5")
    (root / "far.h5").symlink_to("../secret.h5")
    Path("secret.h5").write_bytes((root / "dir/a.h5").read_bytes())
    roots = {"data": Root("data", root, True)}
    for name in ("dir/a.h5", "near.h5", "plain"):
        found = resolve(roots, f"data:{name}::/x", write=False)
        assert str(found) == f"{root}/dir/a.h5::/x"
        assert display(roots, found) == "data:dir/a.h5::/x"
        np.testing.assert_array_equal(oocgemm.matmul(str(found), B, backend="host"), A @ B)
    for text, message in (
        ("data:far.h5::/x", "a symbolic link leaves the root"),
        ("data:../secret.h5::/x", "contains '..'"),
        ("data:dir/a.h5::/../x", "contains '..'"),
        ("data:none.h5::/x", "nothing at this path"),
    ):
        with pytest.raises(PathError, match=message):
            resolve(roots, text, write=False)
    with pytest.raises(PathError, match="HDF5 datasets are read-only: give a path that ends in"):
        resolve(roots, "data:dir/a.h5::/c", write=True)


@pytest.mark.slow
def test_workers_read_datasets_by_address() -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=A, chunks=(16, 25))
        file["b"] = B
    done = run("x.h5::/a", "x.h5::/b", "C.zarr", "--workers", "2", "--tile", "32x32x25")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(zarr.open_array("C.zarr", mode="r")[:], A @ B)


@pytest.fixture(scope="module")
def cells() -> Path:
    """An h5ad file of 700 cells and 765 genes, a part of the 68,000 PBMC of 10x Genomics."""
    spec = importlib.util.find_spec("scanpy")
    if spec is None or spec.origin is None:
        pytest.skip("scanpy, which ships the data, is not installed: scripts/setup test data")
    return Path(spec.origin).parent / "datasets" / "10x_pbmc68k_reduced.h5ad"


@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_correlations_of_genes_in_a_real_file(cells: Path, backend: str) -> None:
    with h5py.File(cells) as file:
        x = file["X"][...]
    assert x.shape == (700, 765)
    address = f"{cells}::/X"
    result = oocgemm.gemm(address, address, "C.zarr", trans_a="T", backend=backend, memory="40MiB")
    exact = x.T.astype("f8") @ x.astype("f8")
    bound = 700 * np.finfo("f4").eps * (np.abs(x).T.astype("f8") @ np.abs(x))
    assert (np.abs(result.out[:] - exact) <= bound).all()
    assert oocgemm.verify(address, address, "C.zarr", trans_a="T")


def test_the_sparse_counts_of_a_real_file_are_multiplied(cells: Path) -> None:
    with h5py.File(cells) as file:
        group = file["raw.X"]
        starts, shape = group["indptr"][...], tuple(group.attrs["h5sparse_shape"])
        x = np.zeros(shape, group["data"].dtype)
        x[np.repeat(np.arange(len(x)), np.diff(starts)), group["indices"][...]] = group["data"][...]
    found = oocgemm.gram(f"{cells}::raw.X", axis=1, uplo="full", backend="host").out
    np.testing.assert_allclose(found, x.T @ x, rtol=1e-4, atol=1e-4)
