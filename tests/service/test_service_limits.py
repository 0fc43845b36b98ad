"""What jobs may occupy on a machine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oocgemm.errors import BackendError, InputError
from oocgemm.service.backfill import Limits
from oocgemm.service.limits import DeviceInfo, Root, find_devices, free_space, limits
from tests.support.backends_here import CUDA, REAL_BACKENDS

GPUS = [DeviceInfo(0, "big", 80 << 30), DeviceInfo(1, "small", 40 << 30)]
HOST = [DeviceInfo(0, "8 cores", 0)]


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.system.resources.memory_limit", lambda: 64 << 30)


def test_limits_default_to_shares_of_the_machine(tmp_path: Path) -> None:
    roots = [Root.parse(f"data={tmp_path}:ro")]
    assert limits(GPUS, roots) == Limits({0: 72 << 30, 1: 36 << 30}, 32 << 30, 0)
    assert limits(HOST, roots, shared=True) == Limits({0: 0}, 32 << 30, 0, True)


def test_limits_can_be_chosen(tmp_path: Path) -> None:
    roots = [Root.parse(f"out={tmp_path}:rw")]
    chosen: dict[str, Any] = {"device_memory": "40GiB", "host_memory": 64 << 30, "disk_quota": "2TiB"}
    assert limits(GPUS, roots, **chosen) == Limits({0: 40 << 30, 1: 40 << 30}, 64 << 30, 2 << 40)
    assert limits(HOST, roots, **chosen).devices == {0: 0}  # it has no memory of its own


def test_limits_above_what_the_machine_has_are_refused() -> None:
    with pytest.raises(InputError, match="--device-memory is 41 GiB, but GPU 1 has 40 GiB: pass a smaller"):
        limits(GPUS, [], device_memory="41GiB")
    with pytest.raises(InputError, match="--host-memory is 65 GiB, but the machine has 64 GiB: pass"):
        limits(GPUS, [], host_memory="65GiB")
    with pytest.raises(InputError, match="cannot read 'much' as a size"):
        limits(GPUS, [], disk_quota="much")


def test_the_free_space_is_that_of_the_fullest_writable_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        def __init__(self, folder: Path) -> None:
            self.free = {"a": 1, "b": 5, "c": 7}[folder.name]

    monkeypatch.setattr("shutil.disk_usage", Usage)
    roots = [Root("data", Path("/a"), False), Root("out", Path("/c"), True), Root("more", Path("/b"), True)]
    assert free_space(roots) == 5
    assert limits(HOST, roots).disk == 5
    monkeypatch.undo()
    assert 0 < free_space([Root("out", tmp_path, True)]) < 1 << 60


@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_a_child_process_finds_the_devices(backend: str) -> None:
    name, devices = find_devices(backend)
    assert name == backend
    assert [each.number for each in devices] == list(range(len(devices)))
    for each in devices:
        assert each.name
        assert each.memory == 0 if backend == "host" else each.memory > 1 << 30


def test_a_server_that_finds_devices_opens_none() -> None:
    script = (
        "import sys\nfrom oocgemm.service.limits import find_devices\nfind_devices()\n"
        "print({'cupy', 'oocgemm.backends.registry'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_devices_that_cannot_be_opened_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="unknown backend 'gpu': choose one of auto, cuda, host"):
        find_devices("gpu")
    if not CUDA:
        with pytest.raises(BackendError, match="the cuda backend cannot run"):
            find_devices("cuda")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match="ended with status 1 and no answer"):
        find_devices()
