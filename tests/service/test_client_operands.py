"""Local paths become paths beneath a root, and options become plain data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm import Client, InputError
from oocgemm.service import transport
from oocgemm.service.client import operand, plain_options
from tests.support.stub_service import Stub, stub_service


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(transport, "FIRST_DELAY", 0.002)
    with stub_service(tmp_path) as found:
        yield found


@pytest.fixture
def client(stub: Stub) -> Client:
    return Client(str(stub.socket))


def test_local_paths_become_paths_beneath_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    monkeypatch.chdir(tmp_path / "in")
    roots = [
        {"name": "all", "folder": str(tmp_path), "writable": False},
        {"name": "in", "folder": str(tmp_path / "link"), "writable": False},
        {"name": "out", "folder": str(tmp_path / "in" / "out"), "writable": True},
    ]
    assert operand("a", "A.zarr", roots) == "in:A.zarr"
    assert operand("a", str(tmp_path / "link" / "A.npy"), roots) == "in:A.npy"
    assert operand("a", "../A.npy", roots) == "all:A.npy"
    assert operand("c", "out/new/C.zarr", roots, write=True) == "out:new/C.zarr"
    assert operand("b", "./x:y", roots) == "in:x:y"
    assert operand("b", "data:y", roots) == "data:y"
    with pytest.raises(InputError, match=r"a, /etc/A, .* all \(.*\), in \(.*\), out \(.*--root"):
        operand("a", "/etc/A", roots)
    with pytest.raises(InputError, match="its folders are none"):
        operand("a", "A", [])


def test_a_writable_root_is_preferred_for_c(tmp_path: Path) -> None:
    roots = [
        {"name": "r", "folder": str(tmp_path), "writable": False},
        {"name": "w", "folder": str(tmp_path), "writable": True},
    ]
    assert operand("c", str(tmp_path / "C"), roots, write=True) == "w:C"


def test_a_server_at_a_url_is_not_asked_for_its_folders() -> None:
    with pytest.raises(InputError, match=r"data:dir/A\.zarr"):
        Client("http://127.0.0.1:1").submit("A.zarr", "data:B", "data:C")


@pytest.mark.parametrize("array", [np.eye(2), [[1.0]]])
def test_arrays_in_memory_are_refused(client: Client, array: Any) -> None:
    with pytest.raises(InputError, match="a job takes paths"):
        client.submit("data:A", array, "data:C")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"alpha": 2}, {"alpha": 2.0}),
        ({"alpha": float("nan"), "beta": float("-inf")}, {"alpha": "nan", "beta": "-inf"}),
        ({"alpha": np.float32(0.5)}, {"alpha": 0.5}),
        ({"trans_a": True, "trans_b": "C"}, {"trans_a": "T", "trans_b": "C"}),
        ({"out_dtype": np.dtype("int32")}, {"out_dtype": "int32"}),
        ({"device_memory": np.int64(5), "verify": True}, {"device_memory": 5, "verify": True}),
    ],
)
def test_options_become_plain_data(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain_options(options) == expected


def test_an_option_that_a_job_cannot_have_is_named() -> None:
    with pytest.raises(InputError, match="option progress"):
        plain_options({"progress": print})
    with pytest.raises(InputError, match="option alpha"):
        plain_options({"alpha": "much"})
