"""Good operands, and files that users could mistake for operands."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.command import Finished

A, B = np.arange(96.0).reshape(12, 8), np.arange(80.0).reshape(8, 10)
SQUARE = np.arange(64.0).reshape(8, 8)
UNSUPPORTED = ("uint64", "U3", "S4", "M8[ns]")


def assert_one_line(done: Finished, code: int, part: str) -> None:
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), done.err
    assert done.err.startswith("Error: ")
    assert part in done.err


def create_everything(folder: Path) -> Path:
    """Create good operands in a folder, and files that users could mistake for operands."""
    raw: dict[str, Any] = {"chunks": (4, 4), "compressors": None}
    for name, array in (("a", A), ("b", B), ("square", SQUARE), ("c", A @ B)):
        zarr.create_array(folder / name, data=array, **raw)
        np.save(folder / f"{name}.npy", array)
    (folder / "c-short.npy").write_bytes((folder / "c.npy").read_bytes()[:200])
    zarr.create_array(folder / "a-zstd", data=A, chunks=(4, 4))
    zarr.create_array(folder / "vector", data=A[0])
    zarr.create_array(folder / "cube", data=A[None])
    np.save(folder / "vector.npy", A[0])
    np.save(folder / "number.npy", np.float64(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns that strings have no final specification
        for dtype in UNSUPPORTED:
            values = A.astype("int64").astype(dtype)
            zarr.create_array(folder / f"a-{dtype}", data=values)
            np.save(folder / f"a-{dtype}.npy", values)
    zarr.create_array(folder / "c-float32", data=(A @ B).astype("float32"))
    np.save(folder / "records.npy", np.zeros((12, 8), [("x", "f8")]))
    np.save(folder / "objects.npy", np.array([[None]]), allow_pickle=True)
    with open(folder / "archive.npy", "wb") as file:
        np.savez(file, A)
    zarr.create_group(folder / "group")
    zarr.create_array(folder / "group" / "inner", data=A)
    (folder / "group" / "stray").write_text("no part of the group")
    (folder / "empty").mkdir()
    (folder / "plain").write_text("text")
    for name, text in (
        ("garbage", b"{nope"),
        ("list", b"[]"),
        ("bytes", b"\xff\xfe\x00"),
        ("half", b'{"zarr_format": 3, "node_type": "array"}'),
    ):
        (folder / name).mkdir()
        (folder / name / "zarr.json").write_bytes(text)
    whole = (folder / "a.npy").read_bytes()
    (folder / "short.npy").write_bytes(whole[:200])
    (folder / "header.npy").write_bytes(whole[:20])
    (folder / "nothing.npy").write_bytes(b"")
    (folder / "text.npy").write_text("no numbers\n" * 20)
    for link, target in (("link", "square"), ("link.npy", "square.npy"), ("dangling", "nowhere")):
        (folder / link).symlink_to(target)
    return folder


def copy_of(everything: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folder `everything`, and make the copy the working directory."""
    monkeypatch.delenv("OOCGEMM_DEBUG", raising=False)
    shutil.copytree(everything, folder, symlinks=True)
    os.link(folder / "square.npy", folder / "hard.npy")
    monkeypatch.chdir(folder)
    return folder
