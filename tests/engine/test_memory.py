"""The memory that a run uses stays within its budgets. It is measured, not only planned."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

import oocgemm
from oocgemm.planning.units import parse_size
from tests.support.backends_here import needs_gpu
from tests.support.sparse_files import parts_of, write
from tests.support.suite import slow

MIB = 1 << 20
# A program that runs a product and prints two peaks: the anonymous memory of the process, and the device
# memory that it uses beside the CUDA context. Code in `setup` may create the operands before.
CODE = """
import json, sys, threading
import numpy, zarr, oocgemm, oocgemm.stores.zarr_matrix, oocgemm.backends.host.backend
arguments = json.loads(sys.argv[1])
exec(arguments.pop("setup", ""))
if arguments.get("backend") == "cuda":
    import cupy
    cupy.cuda.runtime.free(0)  # makes the context
    def free():
        return cupy.cuda.runtime.memGetInfo()[0]
else:
    def free():
        return 0
def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
numpy.ones((64, 64)) @ numpy.ones((64, 64))
before = free()
least, peak, done = before, held(), threading.Event()
def sample():
    global least, peak
    while not done.wait(0.002):
        least, peak = min(least, free()), max(peak, held())
thread = threading.Thread(target=sample, daemon=True)
thread.start()
if "a" in arguments:
    oocgemm.gemm(**arguments)
done.set()
thread.join()
print(max(peak, held()), before - least)
"""


def peaks(arguments: dict[str, Any]) -> tuple[int, int]:
    """Run CODE. Return the peaks of host memory, for the whole process, and of device memory."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(arguments)], check=True, capture_output=True, text=True
    )
    host, device = map(int, done.stdout.split())
    return host, device


@cache
def idle() -> int:
    """Return the peak of a process that loads the libraries and calls BLAS, but multiplies nothing else."""
    return peaks({})[0]


@cache
def idle_on_device(folder: Path, dtype: str, kernel: str) -> int:
    """Return the peak of a process that multiplies two tiny matrices on the device.

    It is the memory of the libraries of CUDA and of what they load.
    """
    np.save(folder / f"{dtype}.npy", np.ones((64, 64), dtype))
    arguments = dict.fromkeys("ab", str(folder / f"{dtype}.npy")) | {"c": str(folder / f"{dtype}-{kernel}")}
    arguments |= {"backend": "cuda", "kernel": kernel, "device_memory": "100MiB", "host_memory": "8MiB"}
    return peaks(arguments | {"overwrite": True})[0]


@pytest.fixture(scope="module")
def operands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an empty folder for the operands that `stored` creates."""
    return tmp_path_factory.mktemp("operands")


# How an operand is stored. Its elements are of type float32, unless its name says another type.
STORES: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zstd": {},
    "small": {"chunks": (64, 64)},
    "crc32c": {"compressors": Crc32cCodec()},
    "blosc": {"chunks": (300, 500), "compressors": BloscCodec(cname="lz4")},
    "shards": {"chunks": (200, 200), "shards": (800, 800)},
    "fortran": {"zarr_format": 2, "order": "F"},
    "complex": {},
    "half": {"compressors": None},
}


def stored(operands: Path, name: str) -> str:
    """Create an operand unless it exists, and return its path."""
    if name == "csr":
        return sparse(operands)
    if not (operands / name).exists():
        data = np.random.default_rng(0).standard_normal((2400, 2400)).astype("float32")
        match name:
            case "complex":
                data = data[:1600, :1600].astype("complex128")
            case "half":
                data = data.astype("float16")
        zarr.create_array(operands / name, data=data, **({"chunks": (400, 400)} | STORES[name]))
    return str(operands / name)


def sparse(operands: Path) -> str:
    """Create a sparse matrix unless it exists: 23 MB as dense elements, 4.6 MB as entries."""
    path = operands / "csr.zarr"
    if not path.exists():
        x = np.random.default_rng(0).random((2400, 2400), np.float32)
        x[x > 0.1] = 0
        write(path, x.shape, "csr", parts_of(x, "csr"), 100_000)
    return f"{path}/X"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("operand", "device", "host", "options", "why"),
    [
        ("raw", "24MiB", "26MiB", {}, "raw chunks are mapped, not read"),
        ("csr", "24MiB", "40MiB", {}, "entries become dense, panel by panel"),
        ("zstd", "32MiB", "96MiB", {"compressor": "zstd"}, "encoding takes scratch"),
        *slow(
            ("raw", "40MiB", "40MiB", {"trans_a": "T", "beta": 0}, "transposed on the fly"),
            ("zstd", "24MiB", "32MiB", {}, "decoding takes scratch"),
            ("small", "24MiB", "32MiB", {}, "many chunks a panel"),
            ("half", "32MiB", "24MiB", {}, "panels are cast to float32"),
            ("raw", "18MiB", "26MiB", {}, "little more than the least"),
            ("raw", "24MiB", "26MiB", {"tile": "400x1200x100"}, "a wide tile, in parts of chunks"),
            (
                "zstd",
                "32MiB",
                "48MiB",
                {"tile": "1200x400x200", "trans_b": "T"},
                "a tall tile, transposed panels",
            ),
            ("zstd", "24MiB", "32MiB", {"tile": "500x700x300"}, "a tile that no chunk divides"),
            ("crc32c", "24MiB", "24MiB", {}, "checksums are taken of what is mapped"),
            ("shards", "24MiB", "48MiB", {}, "chunks within shards"),
            (
                "blosc",
                "32MiB",
                "80MiB",
                {"compressor": "blosc-lz4", "trans_a": "C"},
                "both decoded and encoded",
            ),
            ("fortran", "24MiB", "32MiB", {}, "chunks that lie by columns"),
            ("complex", "48MiB", "32MiB", {"tile": "800x800x400"}, "elements of 16 bytes"),
            ("raw", "96MiB", "96MiB", {}, "all of it fits"),
        ),
    ],
)
def test_the_host_backend_stays_within_its_budgets(
    operands: Path, tmp_path: Path, operand: str, device: str, host: str, options: dict[str, Any], why: str
) -> None:
    place = stored(operands, operand)
    arguments = {"a": place, "b": place, "c": str(tmp_path / "C"), "backend": "host"}
    used = peaks(arguments | {"device_memory": device, "host_memory": host} | options)[0] - idle()
    assert used <= parse_size(device) + parse_size(host)


# Code that creates a dask array and an HDF5 dataset of 256 MiB each.
LAZY = {
    "dask": """
import dask.array
lazy = dask.array.ones((8192, 4096), chunks=(1024, 1024)) + 1
lazy[:2, :2].compute()
""",
    "h5py": """
import h5py, os, tempfile
file = h5py.File(tempfile.TemporaryFile(), "w")
lazy = file.create_dataset("a", (8192, 4096), "f8", chunks=(1024, 1024), compression="gzip", fillvalue=2)
lazy[:2, :2] = 2
""",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_operand_stays_within_the_budgets(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    idle = peaks({"setup": LAZY[package]})[0]
    setup = LAZY[package] + "arguments['a'] = lazy\narguments['b'] = numpy.ones((4096, 64))\n"
    arguments = {"setup": setup, "c": str(tmp_path / "C.npy"), "backend": "host"}
    used = peaks(arguments | {"device_memory": "48MiB", "host_memory": "48MiB"})[0] - idle
    assert used <= 96 * MIB
    assert (np.load(tmp_path / "C.npy") == 8192).all()


@pytest.mark.slow
@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize(
    ("operand", "device", "host", "options"),
    [
        pytest.param(*case, marks=needs_gpu)
        for case in (
            ("raw", "104MiB", "48MiB", {}),
            ("raw", "88MiB", "48MiB", {"tile": "400x800x200", "kernel": "tiled"}),
            ("zstd", "128MiB", "96MiB", {"compressor": "zstd", "trans_a": "T"}),
            ("shards", "104MiB", "96MiB", {"tile": "1200x400x200", "trans_b": "T"}),
            ("half", "96MiB", "48MiB", {}),
            ("complex", "128MiB", "64MiB", {"tile": "800x800x200"}),
            ("raw", "256MiB", "256MiB", {}),
        )
    ],
)
def test_the_cuda_backend_stays_within_its_budgets(
    operands: Path,
    tmp_path: Path,
    operand: str,
    device: str,
    host: str,
    options: dict[str, Any],
    verify: bool,
) -> None:
    place = stored(operands, operand)
    arguments = {"a": place, "b": place, "c": str(tmp_path / "C"), "backend": "cuda", "verify": verify}
    arguments |= {"device_memory": device, "host_memory": host} | options
    # The first run compiles kernels, which takes memory. Only the second run is measured.
    peaks(arguments | {"c": str(tmp_path / "first")})
    on_host, on_device = peaks(arguments)
    assert 0 < on_device <= parse_size(device)
    idle = idle_on_device(operands, zarr.open_array(place).dtype.name, options.get("kernel", "auto"))
    print(f"device {on_device / MIB:.1f} MiB, host {(on_host - idle) / MIB:.1f} MiB")
    assert on_host - idle <= parse_size(host)


@pytest.mark.parametrize("kernel", [pytest.param(k, marks=needs_gpu) for k in ("cublas", "tiled")])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_device_holds_no_more_than_its_budget(kernel: str, dtype: str) -> None:
    a = np.ones((3000, 3000), dtype)
    result = oocgemm.gemm(a, a, backend="cuda", kernel=kernel, device_memory="100MiB", host_memory="1GiB")
    assert 0 < result.timeline.header["held"]["device"] <= 100 * MIB
    assert (np.asarray(result.out) == 3000).all()
