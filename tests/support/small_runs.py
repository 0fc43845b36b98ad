"""Small products of stored matrices, which child processes compute with one thread each."""

from pathlib import Path
from typing import Any

import pytest

import oocgemm
from tests.support.clusters import content, environment, fresh, store_operands

EXTENT, TILE = 96, "24x16x16"
MEMORY = "400MiB"


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store operands in a folder, and set the environment of child processes. Return the folder."""
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    store_operands(folder, EXTENT)
    return folder


def multiply(folder: Path, c: str = "C.zarr", **options: Any) -> oocgemm.Result:
    defaults: dict[str, Any] = {"tile": TILE, "memory": MEMORY, "backend": "host"}
    if not (folder / c).exists() and c.endswith(".zarr"):
        defaults["chunks"] = (8, 8)
    operands = folder / "A.zarr", folder / "B.zarr", folder / c
    result: oocgemm.Result = oocgemm.gemm(*operands, **(defaults | options))
    return result


def content_of(folder: Path, **options: Any) -> bytes:
    fresh(folder, folder / "C.zarr", old=False)
    multiply(folder, **options)
    return content(folder / "C.zarr")
