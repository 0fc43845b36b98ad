"""If `auto` chooses the host although there are signs of a GPU, a warning gives the reason and the remedy."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.backends import registry
from oocgemm.errors import BackendError, OutOfMemoryError
from tests.support.command import Finished, command

Machine = Callable[..., None]
DEVICE, DRIVER = "/dev/nvidiactl", "/proc/driver/nvidia/version"
ONE = [[1.0]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that makes this machine seem to have certain files of a driver, or no cupy."""

    def pretend(*files: str, cupy: bool = True) -> None:
        exists, find = os.path.exists, importlib.util.find_spec
        known = {*registry.DEVICE_NODES, *registry.DRIVER_FILES}
        monkeypatch.setattr(os.path, "exists", lambda path: path in files if path in known else exists(path))
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: cupy or None if name == "cupy" else find(name)
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return pretend


def broken(error: Exception) -> ModuleType:
    """Return a module of the CUDA backend in which everything raises an error."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise error

    return Broken("oocgemm.backends.cuda.gpu")


def product(*arguments: str) -> Finished:
    """Run a command on two small operands, with warnings shown as a user sees them."""
    for name in "ab":
        np.save(name, np.ones((4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        return command(arguments[0], "a.npy", "b.npy", "c.npy", *arguments[1:])


@pytest.mark.parametrize(
    ("files", "visible", "cupy", "said"),
    [
        ([DRIVER], None, True, "no device is visible: start the container with its GPUs"),
        ([DEVICE], "", True, "CUDA_VISIBLE_DEVICES='' hides the NVIDIA devices: unset it"),
        ([DEVICE, DRIVER], "-1", False, "CUDA_VISIBLE_DEVICES='-1' hides the NVIDIA devices: unset it"),
        ([DEVICE], "0", False, "cupy is not: pip install 'oocgemm[cuda1"),
        ([DEVICE], None, False, "cupy is not: pip install 'oocgemm[cuda1"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_mentioned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    files: list[str],
    visible: str | None,
    cupy: bool,
    said: str,
) -> None:
    machine(*files, cupy=cupy)
    monkeypatch.chdir(tmp_path)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("plan", "run"):
        done = product(name)
        assert (done.code, done.err.count("\n")) == (0, 1)
        assert done.err.startswith("Note: running on the host: ")
        assert said in done.err
    assert product("run", "--overwrite", "--quiet") == Finished(0, "", "")
    assert product("run", "--overwrite", "--backend", "host").err == ""
    with pytest.warns(UserWarning, match="running on the host: "):
        oocgemm.matmul(ONE, ONE)
    with pytest.raises(BackendError, match="the cuda backend cannot run: "):
        oocgemm.matmul(ONE, ONE, backend="cuda")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libcublas.so.13 is missing"), "cupy is installed but cannot be imported: libcublas"),
        (BackendError("no CUDA device answers: cudaErrorInsufficientDriver"), "no CUDA device answers"),
    ],
)
def test_a_gpu_that_fails_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, error: Exception, said: str
) -> None:
    machine(DEVICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "oocgemm.backends.cuda.gpu", broken(error))
    done = product("run")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert done.err.startswith(f"Note: running on the host: {said}")


def test_a_full_gpu_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    machine(DEVICE)
    monkeypatch.setitem(sys.modules, "oocgemm.backends.cuda.gpu", broken(OutOfMemoryError("full")))
    with pytest.raises(OutOfMemoryError, match="full"):
        backends.open_backend("auto")


def test_where_there_is_no_gpu_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    machine(cupy=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [product(name).err for name in ("plan", "run")] == ["", ""]
    assert backends.missing_for_cuda() == "no NVIDIA device is visible"
