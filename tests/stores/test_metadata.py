"""The metadata of local zarr arrays is read and written without zarr, as zarr itself reads and writes it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

import oocgemm
from oocgemm import InputError, stores
from oocgemm.stores import open_matrix, zarr_through
from oocgemm.stores.base import NewArray
from oocgemm.stores.zarr_matrix import COMPRESSORS, UNFINISHED, ZarrMatrix
from oocgemm.stores.zarr_metadata import create, read_metadata
from tests.support.sparse_files import parts_of, write
from tests.support.suite import each_value

READ: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "default": {},
    "zstd": {"compressors": ZstdCodec(level=3, checksum=True)},
    "gzip": {"compressors": GzipCodec(level=2)},
    "checksums": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "blosc": {"compressors": BloscCodec(cname="zstd", clevel=2, shuffle="bitshuffle")},
    "big-endian": {"serializer": BytesCodec(endian="big"), "compressors": None},
    "transposed": {"filters": TransposeCodec(order=(1, 0)), "compressors": None},
    "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "keys of format 2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "named dimensions": {"dimension_names": ("y", None)},
    "attributes": {"attributes": {"a": [1, None]}},
    "fill 7": {"fill_value": 7},
    "format 2": {"zarr_format": 2},
    "format 2, raw": {"zarr_format": 2, "compressors": None, "fill_value": None},
    "format 2, lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "format 2, blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc("lz4", 3), "order": "F"},
    "format 2, folders": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
}
LEFT: dict[str, dict[str, Any]] = {
    "shards": {"shards": (8, 8)},
    "shards in a codec": {"serializer": ShardingCodec(chunk_shape=(2, 2)), "compressors": None},
    "format 2, a filter": {"zarr_format": 2, "filters": [numcodecs.Delta("<f4")]},
    "another dtype": {"dtype": "uint64"},
    "no rows": {"shape": (0, 10)},
}


def _make(folder: Path, options: dict[str, Any]) -> Any:
    settings = {"shape": (9, 10), "chunks": (4, 4), "dtype": "float32"} | options
    return zarr.create_array(folder / "A", **settings)


@each_value
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128", "int8", "int32"])
@pytest.mark.parametrize("options", READ.values(), ids=READ)
def test_metadata_is_read_as_zarr_reads_it(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    array = _make(tmp_path, options | {"dtype": dtype})
    array[:] = np.arange(90).reshape(9, 10)
    found = read_metadata(str(tmp_path / "A"))
    assert found is not None
    ours, zarrs = ZarrMatrix("A", found), ZarrMatrix("A", zarr.open_array(str(tmp_path / "A"), mode="r"))
    assert ours.describe() == zarrs.describe()
    assert ours.layout == zarrs.layout
    assert ours.fingerprint() == zarrs.fingerprint()
    assert ours.identities() == zarrs.identities()
    assert ours.direct is not None
    assert zarrs.direct is not None
    assert ours.direct.encoding == zarrs.direct.encoding
    assert ours.direct.fill == zarrs.direct.fill
    assert ours.files_fingerprint() == zarrs.files_fingerprint()
    out = np.empty((9, 10), ours.dtype)
    ours.read((0, 9), (0, 10), out)
    np.testing.assert_array_equal(out, array[:])
    np.testing.assert_array_equal(ours.array[:], array[:])


FOLDED: dict[str, dict[str, Any]] = {
    "one": {"shape": (50,), "chunks": (8,)},
    "three": {"shape": (9, 4, 5), "chunks": (2, 4, 5), "dimension_names": ("t", "y", "x")},
    "dots": {"shape": (9, 4, 5), "chunks": (2, 2, 5), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "format 2": {"shape": (9, 4, 5), "chunks": (2, 4, 5), "zarr_format": 2},
    "format 2, Fortran": {"shape": (9, 4, 5), "chunks": (2, 4, 5), "zarr_format": 2, "order": "F"},
    "reversed": {"shape": (4, 5, 6), "chunks": (4, 5, 6), "filters": TransposeCodec(order=(2, 1, 0))},
    "turned": {"shape": (4, 5, 6), "chunks": (4, 5, 6), "filters": TransposeCodec(order=(1, 0, 2))},
}


@pytest.mark.parametrize("rows", [[0], []])
@pytest.mark.parametrize("options", FOLDED.values(), ids=FOLDED)
def test_arrays_of_other_dimensions_are_folded_as_those_of_zarr(
    tmp_path: Path, options: dict[str, Any], rows: list[int]
) -> None:
    array = _make(tmp_path, options)
    array[:] = np.arange(array.size).reshape(array.shape)
    ours, zarrs = (
        open_matrix("A", oocgemm.as_matrix(given, rows=rows)) for given in (str(tmp_path / "A"), array)
    )
    assert ours.layout == zarrs.layout
    assert ours.fingerprint() == zarrs.fingerprint()
    out = np.empty(ours.shape, ours.dtype)
    ours.read((0, ours.shape[0]), (0, ours.shape[1]), out)
    np.testing.assert_array_equal(out, np.asarray(array[:]).reshape(ours.shape))


def test_folded_and_sparse_arrays_are_opened_without_zarr(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "A", shape=(9, 4, 5), chunks=(2, 4, 5), dtype="float32")
    paths = [
        write(tmp_path / name, (5, 5), "csr", parts_of(np.eye(5), "csr")) for name in ("v2.zarr", "raw.zarr")
    ]
    code = (
        "import sys, oocgemm; from oocgemm.stores import open_matrix, load; "
        "given = sys.argv[1:]; load(*given); "
        "open_matrix('A', oocgemm.as_matrix(given[0], rows=[0])); [open_matrix('A', x) for x in given[1:]]; "
        "assert 'zarr' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "A"), *paths], check=True)


@pytest.mark.parametrize("fill", [np.nan, -np.inf, 0.1, 2])
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_missing_chunks_have_the_fill_value(tmp_path: Path, dtype: Any, fill: Any, zarr_format: Any) -> None:
    array = _make(tmp_path, {"dtype": dtype, "fill_value": fill, "zarr_format": zarr_format})
    found = read_metadata(str(tmp_path / "A"))
    assert found is not None
    out = np.empty((9, 10), dtype)
    ZarrMatrix("A", found).read((0, 9), (0, 10), out)
    np.testing.assert_array_equal(out, array[:])


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT)
def test_unusual_arrays_are_left_to_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    _make(tmp_path, options)
    assert read_metadata(str(tmp_path / "A")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [9, True]},
        {"shape": [9.0, 10]},
        {"shape": [9]},
        {"zarr_format": 4},
        {"node_type": "group"},
        {"data_type": "float33"},
        {"data_type": ["float32"]},
        {"fill_value": "zero"},
        {"fill_value": 0},
        {"fill_value": float("nan")},
        {"fill_value": None},
        {"codecs": []},
        {"codecs": [{"name": "bytes"}]},
        {"codecs": [{"name": "numcodecs.delta", "configuration": {"dtype": "<f4"}}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little", "more": 1}}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shape": [4, 4]}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}},
        {"storage_transformers": [{"name": "x"}]},
        {"attributes": []},
        {"dimension_names": ["x"]},
        {"unknown": {"must_understand": False}},
    ],
    ids=str,
)
def test_metadata_in_another_form_is_left_to_zarr(tmp_path: Path, change: dict[str, Any]) -> None:
    _make(tmp_path, {"compressors": None})
    path = tmp_path / "A" / "zarr.json"
    assert read_metadata(str(path.parent)) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_metadata(str(path.parent)) is None


def test_folders_without_usable_metadata_are_left_to_zarr(tmp_path: Path) -> None:
    assert read_metadata(str(tmp_path / "none")) is None
    _make(tmp_path, {})
    assert read_metadata(str(tmp_path / "A" / "zarr.json")) is None
    for content in ("", "[]", "1", '"text"', "{"):
        (tmp_path / "A" / "zarr.json").write_text(content)
        assert read_metadata(str(tmp_path / "A")) is None
    (tmp_path / "A" / "zarr.json").unlink()
    (tmp_path / "A" / "zarr.json").mkdir()
    assert read_metadata(str(tmp_path / "A")) is None


def test_an_array_in_both_formats_is_left_to_zarr(tmp_path: Path) -> None:
    _make(tmp_path, {"zarr_format": 2})
    assert read_metadata(str(tmp_path / "A")) is not None
    (tmp_path / "A" / "zarr.json").write_text("{}")
    assert read_metadata(str(tmp_path / "A")) is None


@each_value
@pytest.mark.parametrize("compressor", [None, *COMPRESSORS])
@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "complex64", "complex128", "int8", "int32", "int64"]
)
def test_new_arrays_are_those_of_zarr(tmp_path: Path, dtype: str, compressor: str | None) -> None:
    ours, zarrs = tmp_path / "in" / "ours", tmp_path / "zarrs"
    stated = (9, 10), np.dtype(dtype), (4, 4), compressor
    found = create(NewArray("C", str(ours), *stated), UNFINISHED)
    zarr_through.create_zarr(NewArray("C", str(zarrs), *stated))
    assert found is not None
    assert (ours / "zarr.json").read_bytes() == (zarrs / "zarr.json").read_bytes()
    matrix = ZarrMatrix("C", found)
    assert matrix.describe()["unfinished"]
    matrix.set_finished(True)
    zarr.open_array(zarrs).attrs.pop("oocgemm")
    assert (ours / "zarr.json").read_bytes() == (zarrs / "zarr.json").read_bytes()
    assert not matrix.describe()["unfinished"]
    matrix.set_finished(False)
    assert zarr.open_array(ours, mode="r").attrs.asdict() == UNFINISHED


def test_marking_an_array_keeps_its_other_attributes(tmp_path: Path) -> None:
    for number, zarr_format in enumerate((2, 3)):
        array = _make(tmp_path / str(number), {"zarr_format": zarr_format, "attributes": {"a": 1}})
        matrix = stores.open_matrix("C", array.store.root, writable=True)
        assert isinstance(matrix, ZarrMatrix)
        matrix.set_finished(False)
        assert zarr.open_array(array.store.root, mode="r").attrs.asdict() == {"a": 1} | UNFINISHED
        matrix.set_finished(True)
        assert zarr.open_array(array.store.root, mode="r").attrs.asdict() == {"a": 1}


def test_an_array_that_exists_is_not_replaced(tmp_path: Path) -> None:
    _make(tmp_path, {})
    before = (tmp_path / "A" / "zarr.json").read_bytes()
    with pytest.raises(InputError, match="cannot create"):
        stores.create_output("C", str(tmp_path / "A"), (9, 10), np.dtype("f4"), (4, 4), None)
    assert (tmp_path / "A" / "zarr.json").read_bytes() == before


@pytest.mark.parametrize(
    ("dtype", "options", "compressor", "loaded"),
    [
        ("float32", {"compressors": None}, "none", set()),
        ("float64", {"zarr_format": 2, "compressors": None}, "none", set()),
        ("float64", {}, "zstd", set()),
        ("float64", {}, "blosc-zstd", {"numcodecs"}),
        ("float32", {"shards": (8, 8)}, "none", {"zarr", "numcodecs"}),
    ],
)
def test_a_run_imports_zarr_only_for_arrays_that_need_it(
    tmp_path: Path, dtype: str, options: dict[str, Any], compressor: str, loaded: set[str]
) -> None:
    values = np.arange(81).reshape(9, 9).astype(dtype)
    for name in "AB":
        zarr.create_array(tmp_path / name, data=values, chunks=(4, 4), **options)
    code = (
        "import sys; from oocgemm.__main__ import main\n"
        "try: main()\n"
        "finally: print(*({'zarr', 'numcodecs'} & set(sys.modules)))"
    )
    command = ["run", "A", "B", "C", "--backend", "host", "--quiet", "--compressor", compressor]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == loaded
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C", mode="r")[:], values @ values)
    assert zarr.open_array(tmp_path / "C", mode="r").attrs.asdict() == {}


@pytest.mark.parametrize("size", [0.5, 1e300, [1], "7"])
def test_a_setting_of_another_type_is_left_to_zarr_at_once(tmp_path: Path, size: object) -> None:
    """A search of the range of allowed block sizes for a float would compare all of them."""
    path = tmp_path / "stored"
    zarr.create_array(path, shape=(4, 4), chunks=(2, 2), dtype="f8", compressors=BloscCodec(blocksize=0))
    document = json.loads((path / "zarr.json").read_bytes())
    assert read_metadata(str(path)) is not None
    document["codecs"][-1]["configuration"]["blocksize"] = size
    (path / "zarr.json").write_text(json.dumps(document))
    assert read_metadata(str(path)) is None
