"""Any change of an operand's files ends with the right product, or with one line that says what is wrong."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from tests.support.fuzzing import A, B, delete_results, ended, folder_of_operands, fuzz, garbled, mutated
from tests.support.suite import thinned


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of_operands(tmp_path_factory.mktemp("fuzz")) as folder:
        yield folder


STORES: dict[str, dict[str, Any]] = {
    "v3 raw": {"compressors": None},
    "v3 zstd": {"compressors": ZstdCodec()},
    "v3 blosc, transposed": {"compressors": BloscCodec(cname="lz4"), "filters": [TransposeCodec(order=(1, 0))]},  # noqa: E501
    "v3 shards": {"chunks": (8, 6), "serializer": ShardingCodec(chunk_shape=(4, 3), codecs=[BytesCodec(), Crc32cCodec()]), "compressors": None},  # noqa: E501
    "v2 raw": {"zarr_format": 2, "compressors": None},
    "v2 lz4, Fortran": {"zarr_format": 2, "compressors": numcodecs.LZ4(), "order": "F"},
    "v2 delta": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")], "compressors": numcodecs.Zlib()},
}  # fmt: skip


@pytest.fixture(scope="module", params=thinned(STORES, ("v3 raw", "v3 shards", "v2 delta")))
def stored(here: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Store A in one of the formats of STORES, and return its path."""
    options = {"chunks": (4, 3)} | STORES[request.param]
    zarr.create_array(here / "stored", shape=A.shape, dtype="f8", **options)[:] = A
    yield here / "stored"
    shutil.rmtree(here / "stored")


def product_of(stored: Path, *options: str, must: bool = False) -> Any:
    """Return the product with B, or None if the command refuses it. With `must` it may not refuse."""
    delete_results(stored.parent)
    done = ended("run", stored.name, "b.npy", "new.npy", "--backend", "host", *options)
    assert done.code == 0 or not must, done
    if done.code == 0:
        return np.load(stored.parent / "new.npy")
    assert not (stored.parent / "new.npy").exists()
    return None


def metadata(stored: Path) -> Path:
    return next(stored / name for name in ("zarr.json", ".zarray") if (stored / name).exists())


@fuzz(180)
@given(data=st.data())
def test_any_metadata_ends_well(stored: Path, data: st.DataObject) -> None:
    place = metadata(stored)
    whole = place.read_bytes()
    try:
        place.write_text(json.dumps(mutated(data, json.loads(whole))))
        product_of(stored)
    finally:
        place.write_bytes(whole)


@fuzz(40)
@given(data=st.data())
def test_metadata_that_is_no_document_ends_well(stored: Path, data: st.DataObject) -> None:
    place = metadata(stored)
    whole = place.read_bytes()
    deep = data.draw(st.sampled_from([None, 500, 100_000]))
    try:
        place.write_bytes(b"[" * deep + b"]" * deep if deep else garbled(data, whole))
        product_of(stored)
    finally:
        place.write_bytes(whole)


CHECKED: dict[str, dict[str, Any]] = STORES | {
    "v3 crc32c": {"compressors": Crc32cCodec()},
    "v3 zstd, checked": {"compressors": ZstdCodec(checksum=True)},
    "v3 gzip": {"compressors": GzipCodec()},
    "v3 zstd, crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "v2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "v2 blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc(cname="zstd", shuffle=2)},
    "v2 lzma": {"zarr_format": 2, "compressors": numcodecs.LZMA()},
    "v2 bz2": {"zarr_format": 2, "compressors": numcodecs.BZ2()},
}
# Formats that notice every change of their bytes: the product is right, or the command fails.
FINDING = ("v3 crc32c", "v3 zstd, checked", "v3 zstd, crc32c", "v3 shards", "v2 zlib", "v2 bz2")


# One format for each way of reading: raw, shards, with a checksum, zarr 2, and by zarr.
QUICK = ("v3 raw", "v3 shards", "v3 zstd, checked", "v2 zlib", "v2 delta")


@pytest.fixture(scope="module", params=thinned(CHECKED, QUICK))
def chunked(here: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    options = {"chunks": (4, 3)} | CHECKED[request.param]
    zarr.create_array(here / "chunked", shape=A.shape, dtype="f8", **options)[:] = A
    yield request.param, here / "chunked"
    shutil.rmtree(here / "chunked")


@fuzz(60)
@given(data=st.data())
def test_any_chunk_ends_well(chunked: tuple[str, Path], data: st.DataObject) -> None:
    kind, folder = chunked
    files = sorted(
        place
        for place in folder.rglob("*")
        if place.is_file() and not place.name.endswith((".json", ".zarray", ".zattrs"))
    )
    one, other = (data.draw(st.sampled_from(files)) for _ in range(2))
    whole = one.read_bytes()
    changed = other.read_bytes() if data.draw(st.integers(0, 7)) == 0 else garbled(data, whole)
    try:
        one.write_bytes(changed)
        product = product_of(folder, "--tile", "4x5x3")
    finally:
        one.write_bytes(whole)
    if product is not None and (changed == whole or (kind in FINDING and one == other)):
        np.testing.assert_array_equal(product, A @ B)


@fuzz(500)
@given(data=st.data())
def test_any_npy_file_ends_well(here: Path, data: st.DataObject) -> None:
    whole = (here / "a.npy").read_bytes()
    if data.draw(st.booleans()):
        described = mutated(data, {"descr": "<f8", "fortran_order": False, "shape": [7, 6]})
        header = repr(described).replace("[", "(").replace("]", ")").encode("utf-8", "replace")
        header += b" " * (118 - len(header)) if len(header) < 118 else b""
        content = whole[:8] + len(header).to_bytes(2, "little") + header + whole[128:]
    else:
        content = garbled(data, whole[: data.draw(st.sampled_from([20, 128, 10_000]))]) + whole[128:]
    (here / "odd.npy").write_bytes(content)
    product = product_of(here / "odd.npy", must=content == whole)
    if content == whole:
        np.testing.assert_array_equal(product, A @ B)
