"""Confined jobs read and write nothing outside the roots of the service."""

import os
import time
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from oocgemm.errors import InputError
from oocgemm.service import confinement, dispatcher
from oocgemm.service.backfill import Limits
from oocgemm.service.dispatcher import Dispatcher
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import Planner, planned
from oocgemm.service.job_store import JobStore
from oocgemm.service.limits import Root, allowed_folders
from oocgemm.service.protocol import State
from tests.support import TOP
from tests.support.backends_here import REAL_BACKENDS
from tests.support.confined import swapping
from tests.support.services import LIMITS, product_job, run_all, start_job

needs_landlock = pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")

EXTENT, CHUNK = 64, 16


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Root `data` with A and B, root `out`, and `secret`, which is no root, with another A."""
    (tmp_path / "out").mkdir()
    rng = np.random.default_rng(5)
    for folder, name in (("data", "A"), ("data", "B"), ("secret", "A")):
        values = rng.integers(-4, 5, (EXTENT, EXTENT)).astype(np.float64)
        store_zarr(tmp_path / folder / f"{name}.zarr", values)
    return tmp_path


def store_zarr(path: Path, values: Any) -> None:
    # Without compression, each file is a chunk.
    array = zarr.create_array(path, shape=values.shape, chunks=(CHUNK, CHUNK), dtype="f8", compressors=None)
    array[:] = values


def load(path: Path) -> Any:
    return np.asarray(zarr.open_array(path, mode="r")[:])


def right_product(base: Path) -> Any:
    return load(base / "data/A.zarr") @ load(base / "data/B.zarr")


def roots_of(base: Path) -> list[Root]:
    return [Root.parse(f"data={base}/data:ro"), Root.parse(f"out={base}/out:rw")]


def run_job(base: Path, backend: str, name: str, c: str = "out/C.zarr", **options: Any) -> dict[str, Any]:
    """Run a confined job that stores A B in an array; return its result."""
    limits = Limits({0: 0 if backend == "host" else 1 << 30}, 4 << 30, 1 << 40)
    options = {"tile": "16x16x16"} | options
    spec = {"a": str(base / "data/A.zarr"), "b": str(base / "data/B.zarr"), "c": str(base / c)}
    found = planned(checked(spec | {"options": options}), limits, backend)
    return run_planned(base, name, found.spec)


def run_planned(base: Path, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    folder = base / "state" / name
    process = start_job(folder, 1, spec, allowed_folders(roots_of(base)))
    while not process.ended:
        time.sleep(0.005)
    result = dispatcher.result_of(folder, 1)
    assert result is not None, (folder / "log").read_text()
    assert process.code is None or result["exit_code"] == process.code
    process.close()
    return result


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_a_confined_job_computes_its_product(arrays: Path, backend: str) -> None:
    right = right_product(arrays)
    assert run_job(arrays, backend, "new")["exit_code"] == 0
    np.testing.assert_array_equal(load(arrays / "out/C.zarr"), right)
    # With beta, finished tiles are moved between folders.
    assert run_job(arrays, backend, "beta", beta=1)["exit_code"] == 0
    np.testing.assert_array_equal(load(arrays / "out/C.zarr"), 2 * right)
    assert run_job(arrays, backend, "file", "out/C.npy", verify=True)["exit_code"] == 0
    np.testing.assert_array_equal(np.load(arrays / "out/C.npy"), right)


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_a_chunk_that_links_out_of_the_root_is_not_read(arrays: Path, backend: str) -> None:
    old = np.ones((EXTENT, EXTENT))
    store_zarr(arrays / "out/C.zarr", old)
    chunk = arrays / "data/A.zarr/c/0/0"
    chunk.unlink()
    chunk.symlink_to(arrays / "secret/A.zarr/c/0/0")
    result = run_job(arrays, backend, "linked", beta=1, tile="64x64x16")
    assert result["exit_code"] == 1
    assert "PermissionError" in result["error"]
    assert str(chunk) in result["error"]
    np.testing.assert_array_equal(load(arrays / "out/C.zarr"), old)
    chunk.unlink()  # without it, the chunk is the fill value, and the job is resumed
    assert run_job(arrays, backend, "linked", beta=1, tile="64x64x16")["exit_code"] == 0
    np.testing.assert_array_equal(load(arrays / "out/C.zarr"), old + right_product(arrays))


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
def test_a_chunk_of_c_that_links_out_of_the_root_is_not_written(arrays: Path) -> None:
    store_zarr(arrays / "out/C.zarr", np.ones((EXTENT, EXTENT)))
    chunk, outside = arrays / "out/C.zarr/c/0/0", arrays / "secret/A.zarr/c/0/0"
    before = outside.read_bytes()
    chunk.unlink()
    chunk.symlink_to(outside)
    result = run_job(arrays, "host", "linked", beta=1)
    assert (result["exit_code"], "PermissionError" in result["error"]) == (1, True)
    assert outside.read_bytes() == before


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("c", ["data/C.zarr", "secret/C.npy", "C.zarr"])
def test_c_is_not_created_where_a_job_may_not_write(arrays: Path, c: str) -> None:
    result = run_job(arrays, "host", "job", c)
    assert result["exit_code"] in (1, 2)
    assert "ermission" in result["error"]
    assert not (arrays / c).exists()


@needs_landlock
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_a_job_whose_chunks_are_exchanged_computes_no_secret(arrays: Path, count: int) -> None:
    """Jobs end with the right product, or with an error. Finished tiles are right in both cases."""
    right = right_product(arrays)
    limits = Limits({0: 0}, 4 << 30, 1 << 40)
    spec = {
        "a": str(arrays / "data/A.zarr"),
        "b": str(arrays / "data/B.zarr"),
        "c": str(arrays / "out/C.zarr"),
    }
    found = planned(checked(spec | {"options": {"tile": "16x16x16"}}), limits, "host")
    away = arrays / "data/away"
    away.symlink_to(arrays / "secret/A.zarr/c")
    with swapping(arrays / "data/A.zarr/c", away):
        for number in range(count):
            c = str(arrays / f"out/C{number}.zarr")
            result = run_planned(arrays, str(number), found.spec | {"c": c})
            stored = load(Path(c)) if os.path.exists(f"{c}/zarr.json") else np.zeros_like(right)
            assert ((stored == right) | (stored == 0)).all()
            if result["exit_code"]:
                assert "PermissionError" in result["error"]
            else:
                np.testing.assert_array_equal(stored, right)


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
def test_a_dispatcher_confines_its_jobs(arrays: Path) -> None:
    store = JobStore(arrays / "db")
    dispatcher = Dispatcher(store, arrays, lambda: LIMITS, confine=allowed_folders(roots_of(arrays)))
    for name in "AB":
        np.save(arrays / f"data/{name}.npy", load(arrays / f"data/{name}.zarr"))
    try:
        inside = product_job(arrays / "data", "../out/C.npy")
        outside = product_job(arrays / "data", "../secret/C.npy")
        store.submit([inside, outside])
        jobs = {Path(job.c_path).parent.name: job for job in run_all(dispatcher, store)}
    finally:
        dispatcher.close()
        store.close()
    assert jobs["out"].state is State.SUCCEEDED
    assert (jobs["secret"].state, jobs["secret"].exit_code, jobs["secret"].attempt) == (State.FAILED, 2, 1)
    np.testing.assert_array_equal(np.load(arrays / "out/C.npy"), right_product(arrays))


def test_a_job_that_cannot_be_confined_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "state/job"
    process = start_job(folder, 1, {"options": {}}, {"read": [str(tmp_path / "absent")], "write": []})
    while not process.ended:
        time.sleep(0.005)
    process.close()
    result = dispatcher.result_of(folder, 1)
    assert result is not None
    assert result["exit_code"] == 2
    assert "cannot be" in result["error"]


def test_a_job_with_a_defect_ends_with_status_1(tmp_path: Path) -> None:
    """It is not mistaken for one that was stopped, and started again without end."""
    folder = tmp_path / "state/job"
    process = start_job(folder, 1, {"options": {"backend": "host"}})
    while not process.ended:
        time.sleep(0.005)
    process.close()
    result = dispatcher.result_of(folder, 1)
    assert result is not None
    assert (result["exit_code"], result["error"]) == (1, "KeyError: 'c'")
    assert "Traceback" in (folder / "log").read_text()


SECRET = "an-api-token-of-the-server"
# Chunks that lead out of the root, by what they link to.
LINKS = {
    "environment": "/proc/self/environ",
    "environment of a thread": "/proc/thread-self/environ",
    "environment, found by number": "/proc/self/task/../environ",
    "maps": "/proc/self/maps",
    "users": "/etc/passwd",
    "hosts": "/etc/hosts",
    "checkout": str(TOP / "pyproject.toml"),
    "library": next(iter(glob("/usr/lib/os-release") + glob("/lib/x86_64-linux-gnu/libc.so.6"))),
    "other root": "{base}/out/file",
    "nothing": "{base}/absent",
}


def store_bytes(path: Path, codec: str) -> Path:
    """Store an array of one chunk of bytes; return the path of the chunk."""
    from numcodecs import Delta

    options: dict[str, Any] = {"filters": [Delta(dtype="i1")], "zarr_format": 2} if codec == "delta" else {}
    array = zarr.create_array(path, shape=(8, 8), chunks=(8, 8), dtype="i1", compressors=None, **options)
    array[:] = np.ones((8, 8), np.int8)
    return path / ("0.0" if codec == "delta" else "c/0/0")


@needs_landlock
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("links", [("environment",), pytest.param(tuple(LINKS), marks=pytest.mark.slow)])
def test_no_link_of_a_chunk_copies_a_file_into_a_result(
    tmp_path: Path, codec: str, links: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    for folder in ("data", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out/file").write_bytes(b"1" * 64)
    limits = Limits({0: 0}, 4 << 30, 1 << 40)
    for number, name in enumerate(links):
        path = tmp_path / f"data/A{number}.zarr"
        chunk = store_bytes(path, codec)
        spec = {"a": str(path), "b": str(path), "c": str(tmp_path / f"out/C{number}.zarr")}
        found = planned(checked(spec), limits, "host")
        chunk.unlink()
        chunk.symlink_to(LINKS[name].format(base=tmp_path))
        result = run_planned(tmp_path, str(number), found.spec)
        assert result["exit_code"] == 1, name
        assert "ermission denied" in result["error"] or "Errno 13" in result["error"], (name, result)
        assert SECRET not in (tmp_path / f"state/{number}/log").read_text()


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", ["SECRET_TOKEN", "AWS_SECRET_ACCESS_KEY", "OOCGEMM_TOKEN", "GITHUB_TOKEN"])
def test_workers_and_planners_get_only_the_listed_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TZ", "Antarctica/Troll")
    (tmp_path / "workers").mkdir()
    process = dispatcher.spawn(tmp_path / "workers", tmp_path / "log")
    planner = Planner(None)
    with pytest.raises(InputError):  # it has started then
        planner.plan({"a": "/absent"}, LIMITS, "host")
    try:
        for pid in (process.pid, planner.pid):
            found = Path(f"/proc/{pid}/environ").read_text()
            assert SECRET not in found
            assert "TZ=Antarctica/Troll" in found
    finally:
        planner.close()
        process.dismiss()
        process.close()
