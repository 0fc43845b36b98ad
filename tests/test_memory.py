"""What a run really holds stays within its budgets: measured, not only planned."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.units import parse_size
from tests.backends_here import needs_gpu

MIB = 1 << 20
# Samples the process's anonymous memory all along a run, and prints its peak.
CODE = """
import json, sys, threading
import numpy, zarr, oocgemm, oocgemm.stores.zarr_store, oocgemm.backends.host
def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
arguments = json.loads(sys.argv[1])
numpy.ones((64, 64)) @ numpy.ones((64, 64))
peak, done = held(), threading.Event()
def sample():
    global peak
    while not done.wait(0.002):
        peak = max(peak, held())
thread = threading.Thread(target=sample, daemon=True)
thread.start()
if arguments:
    oocgemm.gemm(**arguments)
done.set()
thread.join()
print(max(peak, held()))
"""


def peak(arguments: dict[str, Any]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(arguments)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.fixture(scope="module")
def operands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operands")
    data = np.random.default_rng(0).standard_normal((2400, 2400)).astype("float32")
    zarr.create_array(folder / "raw", data=data, chunks=(400, 400), compressors=None)
    zarr.create_array(folder / "zstd", data=data, chunks=(400, 400))
    zarr.create_array(folder / "small", data=data, chunks=(64, 64))
    zarr.create_array(folder / "half", data=data.astype("float16"), chunks=(400, 400), compressors=None)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("operand", "device", "host", "options", "why"),
    [
        ("raw", "24MiB", "24MiB", {}, "raw chunks are mapped, not read"),
        ("raw", "40MiB", "40MiB", {"trans_a": "T", "beta": 0}, "transposed on the fly"),
        ("zstd", "24MiB", "32MiB", {}, "decoding takes scratch"),
        ("small", "24MiB", "32MiB", {}, "many chunks a panel"),
        ("zstd", "32MiB", "96MiB", {"compressor": "zstd"}, "encoding takes scratch"),
        ("half", "32MiB", "24MiB", {}, "panels are cast to float32"),
    ],
)
def test_the_host_backend_stays_within_its_budgets(
    operands: Path, tmp_path: Path, operand: str, device: str, host: str, options: dict[str, Any], why: str
) -> None:
    place = str(operands / operand)
    arguments = {"a": place, "b": place, "c": str(tmp_path / "C"), "backend": "host"}
    used = peak(arguments | {"device_memory": device, "host_memory": host} | options) - peak({})
    assert used <= parse_size(device) + parse_size(host)


@pytest.mark.parametrize("kernel", [pytest.param(k, marks=needs_gpu) for k in ("cublas", "tiled")])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_device_holds_no_more_than_its_budget(kernel: str, dtype: str) -> None:
    a = np.ones((3000, 3000), dtype)
    result = oocgemm.matmul(a, a, backend="cuda", kernel=kernel, device_memory="100MiB", host_memory="1GiB")
    assert 0 < result.timeline.header["held"]["device"] <= 100 * MIB
    assert (np.asarray(result.out) == 3000).all()
