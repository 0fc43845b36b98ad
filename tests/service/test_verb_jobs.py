"""Jobs of every verb through a real server: by the client, the command line, and hostile requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import InputError
from oocgemm.cli.submit import COMMANDS
from oocgemm.jobs.support import VERBS
from oocgemm.service import confinement
from oocgemm.service.job_arguments import arguments
from oocgemm.service.job_spec import with_paths
from tests.faults.test_service_kills import arrays_at
from tests.support.command import command
from tests.support.plink import write_bed
from tests.support.real_server import RealServer, running_server

SECRET = 1234567.0
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server").resolve(), "--share-device") as found:
        np.save(found.data / "G.npy", RNG.integers(0, 3, (40, 60)).astype(np.float64))
        np.save(found.data / "T.npy", RNG.standard_normal((64, 8)))
        np.save(found.data / "v.npy", RNG.standard_normal(64))
        secret = found.folder / "secret"
        secret.mkdir()
        np.save(secret / "A.npy", np.full((64, 64), SECRET))
        np.save(secret / "v.npy", np.full(64, SECRET))
        for name in ("A", "v"):
            (found.data / f"link-{name}.npy").symlink_to(secret / f"{name}.npy")
        yield found


# The operands and options of a job of each verb. Its result has this suffix.
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "gemm": ({"a": "data:A.npy", "b": "data:B.npy"}, "npy"),
    "gram": ({"x": oocgemm.as_matrix("data:A.npy", [0], isel={1: slice(0, 20)}), "uplo": "lower"}, "zarr"),
    "corr": ({"x": "data:A.npy", "y": oocgemm.concat(["data:A.npy", "data:B.npy"]), "topk": 3}, "zarr"),
    "cov": ({"x": oocgemm.keep("data:A.npy", rows=[1, 5, 3])}, "npy"),
    "similarity": ({"e": "data:A.npy", "threshold": 0.1}, "zarr"),
    "neighbors": ({"x": "data:A.npy", "topk": 2}, "zarr"),
    "distances": ({"x": "data:A.npy", "y": "data:B.npy"}, "zarr"),
    "grm": ({"x": "data:G.npy", "missing": None, "cast": "float32"}, "grm.bin"),
    "king": ({"x": "data:G.npy"}, "zarr"),
    "ibs": ({"x": "data:G.npy", "threshold": 0.5}, "zarr"),
    "pca": ({"x": "data:A.npy", "k": 2, "transform": oocgemm.Transform(scale="k")}, "zarr"),
    "svd": ({"x": "data:T.npy", "k": 2}, "zarr"),
    "lstsq": ({"x": "data:T.npy", "y": "data:v.npy"}, "zarr"),
    "ridge": ({"x": "data:T.npy", "y": "data:v.npy", "alpha": [0.5, 1.0]}, "zarr"),
    "kernel_matmul": ({"x": "data:A.npy", "v": "data:v.npy", "gamma": 0.01}, "npy"),
    "reduce": (
        {"a": "data:A.npy", "to": oocgemm.MatVec(np.arange(64.0)), "epilogue": [oocgemm.Scale(value=2)]},
        "npy",
    ),
    "ld": ({"x": "data:G.npy", "window": 3}, "zarr"),
    "ld_scores": ({"x": "data:G.npy", "window": 3}, "npy"),
}


@pytest.mark.parametrize("verb", JOBS)
def test_a_job_of_a_verb_computes_what_the_verb_does(server: RealServer, verb: str, tmp_path: Path) -> None:
    given, suffix = JOBS[verb]
    name = "c" if verb == "gemm" else "out"
    submit = getattr(server.client(), verb)
    planned = submit(**given, **{name: f"out:{verb}.{suffix}"}, dry_run=True)
    job = submit(**given, **{name: f"out:{verb}.{suffix}"}).wait()
    assert job.state == "succeeded", job.error
    assert planned["plan"] == job.info["plan"]
    assert job.info["progress"]["done"] == job.info["progress"]["total"] > 0
    assert (job.info["verb"], job.info[name]) == (verb, f"out:{verb}.{suffix}")
    # The JSON of the job, with its budgets, is the call.
    spec = {
        each: job.info[each] for each in ("verb", "options", *VERBS[verb].parameters) if job.info.get(each)
    }
    spec = with_paths(
        spec | {name: f"out:{verb}.{suffix}"}, lambda _, path, write: path.replace("data:", f"{server.data}/")
    )
    options = arguments(spec)
    options.pop(name, None)
    found = getattr(oocgemm, verb)(**options, backend="host")
    if suffix == "grm.bin":
        elements = np.fromfile(server.out / f"{verb}.{suffix}", np.float32)
        np.testing.assert_array_equal(elements, np.asarray(found)[np.tril_indices(40)])
        assert (server.out / f"{verb}.grm.N.bin").exists()
        return
    stored = arrays_at(server.out / f"{verb}.{suffix}")
    if hasattr(found, "save"):
        found.save(tmp_path / f"found.{suffix}")
        expected = arrays_at(tmp_path / f"found.{suffix}")
    else:
        expected = {"": np.asarray(found)}
    assert stored.keys() == expected.keys()
    for each, array in expected.items():
        np.testing.assert_array_equal(stored[each], array)


def test_every_verb_has_a_job() -> None:
    assert {*JOBS} == {*VERBS}


def test_a_verb_is_submitted_from_the_shell(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOCGEMM_SERVICE", str(server.socket))
    done = command(
        "submit", "pca", str(server.data / "A.npy"), "out:shell.zarr", "--components", "3", "--wait"
    )
    assert (done.code, done.err) == (0, ""), done.err
    assert arrays_at(server.out / "shell.zarr")["components"].shape == (3, 64)
    done = command(
        "submit", "gram", "data:A.npy", "out:shell-k.zarr", "--rows", "0", "--transform", "center=k", "--json"
    )
    assert (done.json()["x"], done.json()["verb"]) == (
        {"as_matrix": {"x": "data:A.npy", "rows": [0]}},
        "gram",
    )
    done = command("submit", "similarity", "data:A.npy", "out:shell-s.zarr", "--topk", "2", "--dry-run")
    assert "predicted" in done.out
    assert command("submit", "gram", "data:A.npy").code == 2
    done = command("queue", "--all")
    assert "pca(A.npy, 3)" in done.out
    assert {*COMMANDS.values()} == {*VERBS} - {"gemm", "kernel_matmul", "reduce"} - {
        verb for verb, facts in VERBS.items() if "numbers" in facts.parameters.values()
    }


def test_the_client_names_what_it_cannot_send(server: RealServer) -> None:
    client = server.client()
    with pytest.raises(InputError, match="e is a ndarray, and a job takes paths"):
        client.similarity(np.eye(2), out="out:x.zarr", topk=1)
    with pytest.raises(InputError, match="out"):
        client.similarity("data:A.npy", topk=1)
    with pytest.raises(AttributeError, match="no attribute 'garm'"):
        _ = client.garm
    client.similarity("data:A.npy", out="out:twice.zarr", topk=1).wait()
    with pytest.raises(InputError, match="something exists at out:twice"):
        client.similarity("data:A.npy", out="out:twice.zarr", topk=1)
    with pytest.raises(InputError, match=r"saved as a \.npy file"):
        client.ld_scores("data:G.npy", out="out:scores.zarr", window=1)


PLACES: dict[str, Any] = {
    "operand": {"verb": "gram", "x": "{}"},
    "second operand": {"verb": "corr", "x": "data:A.npy", "y": "{}"},
    "part": {"verb": "gram", "x": {"concat": {"parts": ["data:A.npy", "{}"]}}},
    "part of a part": {"verb": "gram", "x": {"concat": {"parts": [{"as_matrix": {"x": "{}"}}]}}},
    "kept": {"verb": "gram", "x": {"keep": {"x": "{}", "rows": [0]}}},
    "mask": {"verb": "gram", "x": {"keep": {"x": "data:A.npy", "rows": {"load": "{}"}}}},
    "vector": {"verb": "kernel_matmul", "x": "data:A.npy", "v": "{}", "options": {"gamma": 1}},
    "factor": {"verb": "reduce", "a": "data:A.npy", "to": {"MatVec": {"v": {"load": "{}"}}}},
    "center": {
        "verb": "gram", "x": "data:A.npy",
        "options": {"transform": {"Transform": {"center": {"load": "{}"}}}},
    },
    "step": {
        "verb": "gram", "x": "data:A.npy",
        "options": {"epilogue": [{"Scale": {"rows": {"load": "{}"}}}]},
    },
    "matrix of a step": {"verb": "gram", "x": "data:A.npy", "options": {"epilogue": [{"Add": {"d": "{}"}}]}},
}  # fmt: skip
ATTACKS = [
    *(
        "data:../secret/A.npy",
        "data:link-A.npy",
        "data:link-v.npy",
        "{base}/secret/A.npy",
        "/etc/passwd",
        "@/etc/passwd",
    ),
    *(
        "data:root{base}/secret/v.npy",
        "secret:A.npy",
        "file:///etc/passwd",
        "https://evil.example/A.zarr",
        "s3://b/A",
    ),
    *(
        "data:/proc/self/environ",
        "data:../secret/*.npy",
        "data:absent.h5::/../../secret",
        "link-A.npy",
        "data:",
    ),
]


@pytest.mark.parametrize("place", PLACES)
def test_no_path_of_a_job_leads_out_of_the_roots(server: RealServer, place: str) -> None:
    for attack in ATTACKS:
        path = attack.format(base=server.folder)
        body = json.loads(
            json.dumps(PLACES[place] | {"out": "out:attack.npy", "held": True}).replace("{}", path)
        )
        reply = server.ask("POST", "/v1/jobs", body)
        assert reply.problem(422) in ("path-refused", "invalid-request"), (path, reply.body)
        if str(server.folder) not in path:
            assert str(server.folder) not in reply.body.decode(), (path, reply.body)
        assert str(int(SECRET)) not in reply.body.decode()
        assert "root:x" not in reply.body.decode()


@pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("beside", ["bim", "fam"])
def test_files_beside_genotypes_lead_nowhere(server: RealServer, beside: str) -> None:
    write_bed(server.data / f"{beside}.bed", RNG.integers(0, 3, (8, 12)).astype(np.int8))
    path = server.data / f"{beside}.{beside}"
    path.unlink()
    path.symlink_to("/etc/passwd")
    reply = server.ask("POST", "/v1/jobs", {"verb": "grm", "x": f"data:{beside}.bed", "out": "out:grm.zarr"})
    assert reply.problem(422) == "path-refused"
    assert "root:x" not in reply.body.decode()


def test_hostile_values_are_refused(server: RealServer) -> None:
    x: Any
    deep: Any = "data:A.npy"
    for _ in range(200):
        deep = {"concat": {"parts": [deep]}}
    for x in (
        deep,
        {"release": {}},
        {"eval": {"x": "1"}},
        {"load": "data:v.npy"},
        {"concat": {"parts": []}},
        {"as_matrix": {"x": "data:A.npy", "rows": [{"load": "data:v.npy"}]}},
        {},
        {"a": 1, "b": 2},
    ):
        reply = server.ask("POST", "/v1/jobs", {"verb": "gram", "x": x, "out": "out:hostile.zarr"})
        assert reply.problem(422) == "invalid-request", (x, reply.body)
    for verb in ("eval", "", "plan", "__init__", 1, None, {"gram": 1}):
        reply = server.ask("POST", "/v1/jobs", {"verb": verb, "x": "data:A.npy", "out": "out:hostile.zarr"})
        assert reply.problem(422) == "invalid-request"
