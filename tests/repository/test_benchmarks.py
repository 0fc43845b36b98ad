"""The benchmark of the host backend runs, checks its products, and adds rounds to its results file."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from oocgemm.backends.host.blas import blas_name
from tests.support import TOP

CASE = ("--size", "512x256x384", "--chunk", "128", "--device-memory", "64MiB", "--host-memory", "64MiB")


def bench(output: Path, *arguments: str) -> str:
    line = [
        sys.executable,
        str(TOP / "scripts/bench/bench_cpu.py"),
        *CASE,
        "--output",
        str(output),
        *arguments,
    ]
    done = subprocess.run(line, cwd=output.parent, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_rounds_of_several_invocations_add_up(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    out = bench(output, "--rounds", "1", "--discard", "1", "--contender", "in-core", "--contender", "oocgemm")
    assert out.count("not counted") == out.count("round 1") == 3  # in-core, oocgemm warm and oocgemm cold
    bench(output, "--rounds", "1", "--discard", "0", "--warm", "--contender", "oocgemm run")
    bench(output, "--rounds", "1", "--discard", "0", "--warm", "--contender", "in-core", "--dtype", "float32")
    cases = json.loads(output.read_text())["cases"]
    assert {key: [sorted(one) for one in case["rounds"]] for key, case in cases.items()} == {
        f"512x256x384 float64 {blas_name()}": [["in-core", "oocgemm", "oocgemm, cold"], ["oocgemm run"]],
        f"512x256x384 float32 {blas_name()}": [["in-core"]],
    }
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]  # operands and products are deleted


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "peer", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("dask", "cubed")), "blosc2"]
)
def test_peers_are_measured_where_they_are_installed(tmp_path: Path, peer: str) -> None:
    out = bench(tmp_path / "results.json", "--rounds", "1", "--discard", "0", "--warm", "--contender", peer)
    assert ("round 1" in out) == (find_spec(peer) is not None)
    assert (f"skipping {peer}: it is not installed" in out) == (find_spec(peer) is None)
