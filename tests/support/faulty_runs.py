"""Runs that are to fail: operands, how they are stored, and what must hold after a failure."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

import oocgemm
from oocgemm import InputError, OocGemmError
from oocgemm.jobs import resume
from oocgemm.planning import Plan
from tests.support.built import copy_built
from tests.support.faults import nothing_left

M, N, K, CHUNK = 40, 50, 30, 10
_rng = np.random.default_rng(0)
A, B = (_rng.integers(-3, 4, shape).astype(float) for shape in ((M, K), (K, N)))
PRODUCT = A @ B
TILE = "20x20x10"
# How A is stored. oocgemm reads "filtered" chunks with zarr, and all others by itself.
STORES: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zstd": {"compressors": ZstdCodec(checksum=True)},
    "blosc": {"compressors": BloscCodec(cname="lz4")},
    "crc32c": {"compressors": Crc32cCodec()},
    "shards": {
        "chunks": (20, 10),
        "serializer": ShardingCodec(chunk_shape=(10, 10), codecs=[BytesCodec()]),
        "compressors": None,
    },
    "filtered": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")], "compressors": numcodecs.Zstd()},
}
DIRECT = [kind for kind in STORES if kind != "filtered"]


def store(place: Path, kind: str, values: Any = A) -> Path:
    options = {"chunks": (CHUNK, CHUNK)} | STORES[kind]
    digest = sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]

    def build(folder: Path) -> None:
        zarr.create_array(folder, shape=values.shape, dtype="f8", **options)[:] = values

    copy_built(f"{kind}-{'x'.join(map(str, values.shape))}-{digest}", build, place)
    return place


def saved(folder: Path, a: Any = A, b: Any = B, *, by_columns: bool = False) -> tuple[Path, Path]:
    """Save A and B as .npy files in a folder, and return their paths.

    Files `by_columns` (Fortran order) are read into host slots, even where a device copies from the others.
    """
    paths = folder / "A.npy", folder / "B.npy"
    for path, values in zip(paths, (a, b), strict=True):
        np.save(path, np.asfortranarray(values) if by_columns else values)
    return paths


def chunk(a: Path) -> Path:
    """Return the path of a chunk file of A that the second row of tiles uses."""
    return next(place for place in (a / "c" / "2" / "1", a / "c" / "1" / "1", a / "2.1") if place.is_file())


def multiply(folder: Path, a: Any, b: Any = B, **options: Any) -> oocgemm.Result:
    """Multiply A and B into a new array in a folder."""
    return oocgemm.gemm(a, b, folder / "C", **({"backend": "host", "tile": TILE} | options))


def failure(folder: Path, a: Any, b: Any = B, **options: Any) -> str:
    """Multiply, and return the text of the error. Checks that the failed run leaves nothing behind."""
    with nothing_left(folder):
        try:
            multiply(folder, a, b, **options)
        except OocGemmError as error:
            said = str(error)
        else:
            pytest.fail("nothing failed")
    assert_not_whole(folder / "C")
    return said


def assert_not_whole(c: Path) -> None:
    """Check that there is no C, or that it is marked as unfinished and can be resumed."""
    if c.exists():
        assert zarr.open_array(c).attrs["oocgemm"] == {"complete": False}
        assert "with --resume" in resume.resume_hint(c)
        with pytest.raises(InputError, match="A is the result of an unfinished run"):
            oocgemm.matmul(c, np.eye(zarr.open_array(c).shape[1]), backend="host")


def once_planned(act: Callable[[], object]) -> Callable[[Plan], Callable[[object], None]]:
    """Return a `progress` argument that calls `act` between planning and the first read."""

    def progress(plan: Plan) -> Callable[[object], None]:
        act()
        return lambda span: None

    return progress
