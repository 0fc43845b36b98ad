"""Runs whose operands are in an object store: arrays to multiply, and processes that multiply them."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import zarr
from zarr.storage import ObjectStore

from oocgemm.stores.objects import Bucket
from tests.support import TOP
from tests.support.object_server import BUCKET

_rng = np.random.default_rng(31)
A, B, C = (_rng.integers(-4, 5, shape).astype(np.float64) for shape in ((24, 32), (32, 20), (24, 20)))
TILE = ("--tile", "8x10x16", "--backend", "host")


def url(name: str) -> str:
    return f"s3://{BUCKET}/{name}.zarr"


def store(name: str, array: Any, chunks: tuple[int, int] = (8, 5), **options: Any) -> str:
    """Store an array in the bucket. Return its URL."""
    place = ObjectStore(Bucket(url(name)).store)
    zarr.create_array(place, data=array, chunks=chunks, **{"compressors": None} | options)
    return url(name)


def stored(name: str) -> Any:
    """Return the content of an array in the bucket, as zarr reads it. It must not be marked as unfinished."""
    array = zarr.open_array(ObjectStore(Bucket(url(name)).store, read_only=True), mode="r")
    assert "oocgemm" not in array.attrs
    return array[:]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "oocgemm", "run", *arguments, *TILE]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own."""
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(TOP)},
    )
