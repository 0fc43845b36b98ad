"""Runs on several real GPUs: equal bits, panels read once, and a GPU that fails in the middle of a run."""

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import ExecutionError, backends
from oocgemm.planning import Kind
from tests.support.backends_here import CUDA, needs_gpu

COUNT = backends.open_backend("cuda").device_count() if CUDA else 0
needs_gpus = [*needs_gpu, pytest.mark.skipif(COUNT < 2, reason="there are no two GPUs")]
SEVERAL = [pytest.param("0,0", marks=needs_gpu), pytest.param("all", marks=needs_gpus)]
N, TILE = 2048, "256x512x256"
UNAVAILABLE = 46  # cudaErrorDevicesUnavailable
RNG = np.random.default_rng(3)


def product(folder: Path, devices: str, c: Any, source: str = "zarr", **options: Any) -> oocgemm.Result:
    """Multiply two arrays of small integers, which are stored in a folder, or in memory."""
    operands: list[Any] = []
    for name in "AB":
        place = folder / f"{name}.npy"
        if not place.exists():
            np.save(place, RNG.integers(-9, 10, (N, N)).astype(float))
            zarr.create_array(folder / name, data=np.load(place), chunks=(256, 256), compressors=None)
        operands.append(folder / name if source == "zarr" else np.load(place))
    given = {"tile": TILE, "device_memory": "400MiB", "host_memory": "2GiB"}
    return oocgemm.gemm(operands[0], operands[1], c, backend="cuda", devices=devices, **(given | options))


@pytest.mark.parametrize("source", ["zarr", "memory"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("devices", SEVERAL)
def test_several_gpus_have_the_bits_of_one_and_read_as_much(
    devices: str, verify: bool, source: str, tmp_path: Path
) -> None:
    one, several = np.empty((N, N)), np.empty((N, N))
    product(tmp_path, "0", one, source)
    result = product(tmp_path, devices, several, source, verify=verify)
    np.testing.assert_array_equal(several, one)
    described = result.log.header["devices"]
    assert len(described) == (2 if devices == "0,0" else COUNT)
    copied = sum(span.bytes for span in result.timeline.spans if span.stream == "peer")
    assert copied > 0 or (verify and source == "zarr"), "panels are copied between the GPUs"


@pytest.mark.parametrize("devices", SEVERAL)
def test_a_gpu_that_fails_is_named_and_the_run_is_resumed_without_it(devices: str, tmp_path: Path) -> None:
    right = np.asarray(product(tmp_path, "0", tmp_path / "right"))
    cupy = importlib.import_module("cupy")
    session = importlib.import_module("oocgemm.backends.cuda.session").CudaSession
    submit, failed = session.submit, 0

    def fail(self: Any, operation: Any, host: Any, after: Any) -> Any:
        nonlocal failed
        if operation.kind is Kind.MULTIPLY and operation.device == 1:
            failed += 1
            if failed > 60:
                raise cupy.cuda.runtime.CUDARuntimeError(UNAVAILABLE)
        return submit(self, operation, host, after)

    with (
        patch.object(session, "submit", fail),
        pytest.raises(ExecutionError, match=r"device [01]: cudaErrorDevicesUnavailable"),
    ):
        product(tmp_path, devices, tmp_path / "C")
    resumed = product(tmp_path, "0", tmp_path / "C", resume=True)
    assert resumed.plan.done, "finished tiles are kept"
    np.testing.assert_array_equal(np.asarray(resumed), right)


@pytest.mark.parametrize("devices", SEVERAL)
def test_several_gpus_select_reduce_and_iterate_with_the_bits_of_one(devices: str) -> None:
    x = RNG.standard_normal((N, 300)).astype("float32")
    given: dict[str, Any] = {"backend": "cuda", "device_memory": "400MiB", "host_memory": "2GiB"}
    for tile, call in (
        ("256x256x128", lambda **how: oocgemm.similarity(x, topk=9, **how).indices),
        ("256x256x128", lambda **how: oocgemm.similarity(x, threshold=0.2, **how).indices),
        ("256x512x128", lambda **how: oocgemm.reduce(x, to=oocgemm.Reduce("sum"), **how)),
        ("256x512x128", lambda **how: oocgemm.kernel_matmul(x, x[:, :2], gamma=0.01, **how)),
    ):
        one, several = (call(tile=tile, devices=which, **given) for which in ("0", devices))
        np.testing.assert_array_equal(several, one)
    two, several = (oocgemm.pca(x, 3, devices=which, tol=0, **given) for which in ("0,0", devices))
    np.testing.assert_array_equal(several.components, two.components)
