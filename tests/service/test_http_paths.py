"""Attacks by paths through the HTTP server: nothing outside the roots is read or written."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oocgemm.service import confinement
from tests.service.test_service_confined_jobs import load, store_zarr
from tests.support.confined import swapping
from tests.support.real_server import RealServer, running_server
from tests.support.suite import slow

needs_landlock = pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")

SECRET = 1234567.0
OPTIONS = {"tile": "16x16x16"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server; beside its roots, the folder `secret` with arrays, and links that lead there."""
    folder = tmp_path_factory.mktemp("server").resolve()
    with running_server(folder, "--share-device") as found:
        secret = folder / "secret"
        secret.mkdir()
        np.save(secret / "A.npy", np.full((64, 64), SECRET))
        store_zarr(secret / "A.zarr", np.full((64, 64), SECRET))
        for root in (found.data, found.out):
            (root / "file.npy").symlink_to(secret / "A.npy")
            (root / "array.zarr").symlink_to(secret / "A.zarr")
            (root / "folder").symlink_to(secret)
            (root / "relative").symlink_to("../secret")
            (root / "root").symlink_to("/")
            (root / "proc").symlink_to("/proc/self/root")
            (root / "sub").mkdir()
            (root / "sub/up.npy").symlink_to("../../secret/A.npy")
        yield found


PATHS = [
    *("../secret/A.npy", "sub/../../secret/A.npy", "./../secret/A.npy", "sub/..", "..", "../", ".", ""),
    *("/etc/passwd", "//etc/passwd", "{base}/secret/A.npy", "root{base}/secret/A.npy", "root/etc/passwd"),
    *("%2e%2e/secret/A.npy", "..%2fsecret%2fA.npy", "%252e%252e%252fsecret", "..%c0%afsecret/A.npy"),
    *("..\\secret\\A.npy", "\uff0e\uff0e/secret/A.npy", "..;/secret/A.npy", "..\u2215secret/A.npy"),
    *("A.npy\0.zarr", "\0", "../secret/A.npy\0", "file.npy", "array.zarr", "folder/A.npy", "folder/A.zarr"),
    *("relative/A.npy", "sub/up.npy", "proc{base}/secret/A.npy", "proc/proc/self/environ"),
    *("~/x", "$HOME/x", "A.npy:stream", "file:///etc/passwd", "a" * 300, "a/" * 2000 + "b"),
]


@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_paths_that_lead_out_of_a_root_are_refused(server: RealServer, which: str) -> None:
    secret = server.folder / "secret"
    before = {path: path.stat().st_mtime_ns for path in secret.rglob("*")}
    root = "out" if which == "c" else "data"
    job = {"a": "data:A.npy", "b": "data:B.npy", "c": "out:C.npy", "held": True}
    for text in PATHS:
        path = text.format(base=server.folder)
        for prefix in (f"{root}:", "", "nowhere:", f"{root}:sub/../", "state:", f"{root.upper()}:"):
            body = job | {which: prefix + path}
            reply = server.ask("POST", "/v1/jobs?dry_run=1", body)
            if reply.status == 200:  # a name like any other, for a C that does not exist
                assert (which, prefix) == ("c", f"{root}:"), path
                assert ".." not in path.split("/")
                continue
            assert reply.problem(422) in ("path-refused", "invalid-request"), (prefix, path)
            # Neither what is there nor where the roots lie is told.
            if str(server.folder) not in path:
                assert str(server.folder) not in reply.body.decode(), (path, reply.body)
            assert str(SECRET) not in reply.body.decode()
    assert {path: path.stat().st_mtime_ns for path in secret.rglob("*")} == before


@pytest.mark.parametrize("url", ["s3://bucket/A.zarr", "https://evil.example/A.zarr", "file:///etc/passwd"])
def test_arrays_of_other_machines_are_refused(server: RealServer, url: str) -> None:
    for which in "abc":
        body = {"a": "data:A.npy", "b": "data:B.npy", "c": "out:C.npy"} | {which: url}
        assert server.ask("POST", "/v1/jobs", body).problem(422) == "path-refused"


def test_ids_of_jobs_are_no_paths(server: RealServer) -> None:
    for number in (
        "..",
        "%2e%2e",
        "..%2f..",
        "../../secret",
        "%00",
        ".",
        "a%2fb",
        "%2fetc%2fpasswd",
        "x" * 5000,
    ):
        for rest in ("", "/log", "/report", "/timeline", "/tiles"):
            reply = server.ask("GET", f"/v1/jobs/{number}{rest}")
            assert reply.status in (200, 307, 404), number
            # The server does not normalise paths, so "/v1/jobs/." is not the list of jobs.
            assert reply.status == 404 or b"root:" not in reply.body
    for name in ("..%2fviews.py", "%2e%2e/views.py", "../http/views.py", "%2fetc%2fpasswd", "index.html%00"):
        assert server.ask("GET", f"/static/{name}").problem(404) == "not-found"


def test_metadata_that_links_out_of_the_root_is_not_read(server: RealServer) -> None:
    """The server reads it when it plans, and it is not confined as jobs are."""
    for name, target in (
        ("linked", server.folder / "secret/A.zarr/zarr.json"),
        ("up", "../../secret/A.zarr"),
    ):
        (server.data / f"{name}.zarr").mkdir()
        link = server.data / f"{name}.zarr/zarr.json"
        link.symlink_to(target)
        body = {"a": f"data:{name}.zarr", "b": "data:B.npy", "c": "out:C.npy"}
        reply = server.ask("POST", "/v1/jobs", body)
        assert reply.problem(422) == "path-refused"
        assert "a symbolic link leaves the root" in reply.json()["detail"]
    os.mkfifo(server.data / "pipe.zarr")
    (server.data / "piped.zarr").mkdir()
    os.mkfifo(server.data / "piped.zarr/zarr.json")  # whoever opens it would wait for ever
    for name in ("pipe", "piped"):
        body = {"a": f"data:{name}.zarr", "b": "data:B.npy", "c": "out:C.npy"}
        assert server.ask("POST", "/v1/jobs", body).problem(422) == "path-refused"


@needs_landlock
def test_a_chunk_that_links_out_of_the_root_is_neither_read_nor_written(server: RealServer) -> None:
    for folder, name in ((server.data, "linked"), (server.out, "C")):
        store_zarr(folder / f"{name}-chunk.zarr", np.ones((64, 64)))
        chunk = folder / f"{name}-chunk.zarr/c/1/1"
        chunk.unlink()
        chunk.symlink_to(server.folder / "secret/A.zarr/c/1/1")
    before = (server.folder / "secret/A.zarr/c/1/1").read_bytes()
    reading = {"a": "data:linked-chunk.zarr", "b": "data:B.npy", "c": "out:read.npy"}
    writing = {"a": "data:A.npy", "b": "data:B.npy", "c": "out:C-chunk.zarr"}
    for job, options in ((reading, OPTIONS), (writing, OPTIONS | {"beta": 1})):
        reply = server.ask("POST", "/v1/jobs", job | {"options": options, "max_attempts": 1})
        ended = server.until(reply.json()["id"], "succeeded", "failed")
        assert (ended["state"], ended["exit_code"]) == ("failed", 1)
        assert "PermissionError" in ended["error"]
    assert (server.folder / "secret/A.zarr/c/1/1").read_bytes() == before
    read = server.out / "read.npy"
    assert not read.exists() or SECRET not in np.load(read)


@needs_landlock
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tries", [200, *slow((10_000,))])
def test_a_path_that_is_exchanged_all_the_time_never_leads_out(server: RealServer, tries: int) -> None:
    """Submissions are checked and planned while a folder and a link out of the root change places.

    Each answer is that the path is refused, or the plan for the array of the root, whose shape differs from
    that of the secret one.
    """
    inside, link = server.data / f"swapped{tries}", server.data / f"away{tries}"
    inside.mkdir()
    np.save(inside / "A.npy", np.ones((32, 64)))
    link.symlink_to(server.folder / "secret")
    body = {"a": f"data:swapped{tries}/A.npy", "b": "data:B.npy", "c": "out:S.npy"}
    counts = {"refused": 0, "inside": 0, "escaped": 0}
    connection = server.connect()
    sent = json.dumps(body)
    with swapping(inside, link):
        begun = time.monotonic()
        for _ in range(tries):
            connection.request("POST", "/v1/jobs?dry_run=1", sent, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            found = json.loads(reply.read())
            if reply.status != 200:
                assert reply.status == 422
                counts["refused"] += 1
            else:
                counts["inside" if found["plan"]["m"] == 32 else "escaped"] += 1
    connection.close()
    print(counts, f"{time.monotonic() - begun:.0f} s")
    assert counts["refused"]
    assert counts["inside"]
    assert counts["escaped"] == 0


@needs_landlock
@pytest.mark.timeout(900)
@pytest.mark.parametrize("jobs", [1, *slow((20,))])
def test_jobs_whose_chunks_are_exchanged_compute_no_secret(server: RealServer, jobs: int) -> None:
    name = f"chunks{jobs}"
    store_zarr(server.data / f"{name}.zarr", np.load(server.data / "A.npy"))
    away = server.data / f"{name}-away"
    away.symlink_to(server.folder / "secret/A.zarr/c")
    batch = [
        {"a": f"data:{name}.zarr", "b": "data:B.npy", "c": f"out:{name}-{number}.zarr", "options": OPTIONS}
        | {"max_attempts": 1}
        for number in range(jobs)
    ]
    submitted = server.ask("POST", "/v1/batches", {"jobs": batch}).json()["jobs"]
    with swapping(server.data / f"{name}.zarr/c", away):
        ended = [server.until(job["id"], "succeeded", "failed") for job in submitted]
    right = np.load(server.data / "A.npy") @ np.load(server.data / "B.npy")
    for number, job in enumerate(ended):
        path = Path(server.out / f"{name}-{number}.zarr")
        stored = load(path) if (path / "zarr.json").exists() else np.zeros_like(right)
        assert ((stored == right) | (stored == 0)).all()
        assert job["state"] == "failed" or (stored == right).all()
        assert job["state"] == "succeeded" or "PermissionError" in job["error"]
