"""What users of a service must not see, and what must not stay valid."""

import json
import os
import signal
import sqlite3
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.cli import serve
from oocgemm.errors import InputError
from oocgemm.service import job_worker
from oocgemm.service.client import Job
from oocgemm.service.http.security import LOGIN_SECONDS, LoginCode, Tokens
from oocgemm.service.http.service import DATABASE
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import planned
from oocgemm.service.job_store import VERSION, JobStore
from oocgemm.service.limits import Root, display_all
from oocgemm.service.protocol import State
from tests.support.real_server import JOB, RealServer, running_server
from tests.support.services import LIMITS, plain_job, store_operands


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "state").mkdir(mode=0o755)
    with running_server(folder) as found:
        yield found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/jobs/{}/events"])
def test_a_stream_ends_with_its_token(server: RealServer, how: str, path: str) -> None:
    held = server.submit(f"{how}{len(path)}.npy", held=True)["id"]
    token = server.token(name=how, expires=time.time() + 3 if how == "expired" else None)
    with closing(server.connect(tcp=True)) as connection:
        connection.request("GET", path.format(held), headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        assert reply.status == 200
        if how == "revoked":
            with closing(Tokens(server.state / DATABASE)) as tokens:
                tokens.revoke(token.split("_")[1])
        reply.read()  # until the stream ends


@pytest.mark.timeout(60)
def test_a_long_poll_ends_with_its_token(server: RealServer) -> None:
    held = server.submit("poll.npy", held=True)
    token = server.token(name="poll", expires=time.time() + 2)
    reply = server.ask(
        "GET", f"/v1/jobs/{held['id']}?wait=5", headers={"If-None-Match": f'"{held["version"]}"'},
        tcp=True, token=token,
    )  # fmt: skip
    assert reply.status in (304, 401)
    assert server.ask("GET", "/v1/queue", tcp=True, token=token).status == 401


def test_nobody_else_reads_the_database(server: RealServer) -> None:
    server.submit("private.npy", held=True)
    for place in server.state.rglob("*"):
        if place.is_file():
            assert not stat.S_IMODE(place.stat().st_mode) & 0o077, place


def test_a_database_that_others_could_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(JobStore(path)):
        pass
    path.chmod(0o644)
    with closing(JobStore(path)) as store:
        store.submit([plain_job()])
        assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_a_login_code_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[str]()
    login = LoginCode(lambda: now[0])
    login.changed = told.append
    first = login.code
    now[0] = LOGIN_SECONDS
    assert not login.use(first)
    assert told == [login.code] != [first]
    assert login.use(told[0])
    assert not login.use(told[0])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600])
def test_a_log_that_others_read_has_no_login_code(tmp_path: Path, mode: int) -> None:
    log, place = tmp_path / "log", tmp_path / "login-url"
    log.touch(mode)
    log.chmod(mode)
    with open(log, "w") as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        shown = serve._login("http://here", place, "secret")
    assert ("secret" in shown) is (mode == 0o600)
    if mode != 0o600:
        assert place.read_text() == "http://here/login?code=secret\n"
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert str(place) in shown


@pytest.mark.timeout(120)
def test_no_absolute_path_reaches_users(server: RealServer) -> None:
    done = server.until(server.submit("paths.npy")["id"], "succeeded")
    (server.data / "bad.npy").write_bytes(b"no array")
    np.save(server.data / "wide.npy", np.ones((3, 7)))
    (server.data / "text.csv").write_text("1,2")
    texts = [
        server.ask("GET", f"/v1/jobs/{done['id']}{each}").body
        for each in ("", "/log", "/timeline", "/report")
    ]
    texts.append(server.ask("GET", "/v1/jobs").body)
    for a in ("data:bad.npy", "data:wide.npy", "data:text.csv", "data:absent.zarr", "data:A.npz"):
        texts.append(server.ask("POST", "/v1/jobs?dry_run=1", JOB | {"a": a, "c": "out:new.npy"}).body)
    for text in texts:
        assert str(server.folder).encode() not in text, text[:300]
    assert b"data:A.npy" in texts[2]


def test_paths_are_shown_as_users_write_them() -> None:
    roots = {name: Root(name, Path(place), False) for name, place in (("a", "/srv/a"), ("b", "/srv/a/b"))}
    text = "/srv/a/X.zarr and '/srv/a/b/Y' file:///srv/a/Z, /srv/ab/c /mnt/srv/a/x /srv/a: full"
    assert display_all(roots, text) == "a:X.zarr and 'b:Y' file://a:Z, /srv/ab/c /mnt/srv/a/x a:: full"


@pytest.mark.timeout(60)
def test_a_damaged_database_is_not_ready(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        for number in range(30):
            server.submit(f"{number}.npy", held=True, name="x" * 200)
        assert server.ask("GET", "/readyz").status == 200
        path = server.state / DATABASE
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(size // 3)
            file.write(os.urandom(size // 3))
        time.sleep(1)
        reply = server.ask("GET", "/readyz")
        assert reply.status == 503
        assert "database" in reply.json()["problems"][0]


@pytest.mark.parametrize("options", [{}, {"alpha": 3}, {"trans_a": "T"}])
def test_a_job_does_not_pass_for_one_that_computes_an_existing_c(tmp_path: Path, options: Any) -> None:
    store_operands(tmp_path)
    spec = {"a": str(tmp_path / "A.npy"), "b": str(tmp_path / "B.npy"), "c": str(tmp_path / "C.zarr")}
    oocgemm.gemm(*spec.values(), backend="host")
    with pytest.raises(InputError, match=r"C exists at .*C.zarr: pass --overwrite"):
        planned(checked(spec | {"options": options}), LIMITS, "host")
    # The remedy works.
    planned(checked(spec | {"options": options | {"overwrite": True}}), LIMITS, "host")
    planned(checked(spec | {"options": options | {"beta": 1}}), LIMITS, "host")


@pytest.mark.parametrize("options", [{"alpha": 3}, {"trans_a": "T"}, {"tile": "8x8x8"}])
def test_an_error_of_a_job_advises_options_that_it_takes(tmp_path: Path, options: Any) -> None:
    store_operands(tmp_path)
    spec = {"a": str(tmp_path / "A.npy"), "b": str(tmp_path / "B.npy"), "c": str(tmp_path / "C.zarr")}
    oocgemm.gemm(*spec.values(), backend="host")
    for name in job_worker.FILES:
        (tmp_path / name).touch()
    order = {"attempt": 1, "spec": spec | {"options": options | {"backend": "host"}}, "device": 0}
    found = job_worker._compute(tmp_path, order)
    assert found["exit_code"] == 2
    assert "--overwrite" in found["error"]
    assert "--resume" not in found["error"]


@pytest.mark.filterwarnings("default")
def test_a_job_keeps_its_warnings_about_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "3 rows of A \x1b[2J are\nconstant"

    def compute(folder: Path, order: Any) -> dict[str, Any]:
        warnings.warn(evil, oocgemm.DataWarning, stacklevel=1)
        warnings.warn(evil, oocgemm.DataWarning, stacklevel=1)
        warnings.warn("not about data", UserWarning, stacklevel=1)
        return {"exit_code": 0, "error": None}

    monkeypatch.setattr(job_worker, "_compute", compute)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in job_worker.FILES:
        (tmp_path / name).touch()
    assert job_worker._attempt(tmp_path, {"attempt": 1}, lambda: None) == (0, True)
    expected = ["3 rows of A [2J are constant"]
    assert json.loads((tmp_path / job_worker.RESULT).read_text())["warnings"] == expected
    assert Job(None, {"warnings": expected}).warnings == expected  # type: ignore[arg-type]
    with closing(JobStore(tmp_path / "db")) as store:
        (job,) = store.submit([plain_job()])
        assert job.warnings == []
        job = store.move(job, State.STARTING, attempt=1)
        job = store.move(job, State.FAILED, warnings=expected)
        assert store.get(job.id).warnings == expected


def test_a_database_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path / "db")) as store:
        store.submit([plain_job()])
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        db.executescript(f"ALTER TABLE jobs DROP COLUMN warnings; PRAGMA user_version = {VERSION - 1};")
    with closing(JobStore(tmp_path / "db")) as store:
        assert [job.warnings for job in store.jobs()] == [[]]


@pytest.mark.timeout(60)
def test_the_api_has_the_warnings_of_a_job(server: RealServer) -> None:
    done = server.until(server.submit("warned.npy")["id"], "succeeded")
    assert done["warnings"] == []
    assert server.client().job(done["id"]).warnings == []
