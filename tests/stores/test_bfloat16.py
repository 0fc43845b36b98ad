"""bfloat16 in zarr arrays, stored as TensorStore and other programs do. zarr itself lacks the type."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs

import oocgemm
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from tests.support.command import command, contents
from tests.support.problems import Array, integers
from tests.support.suite import each_value

BFLOAT16 = numpy_dtype("bfloat16")
RNG = np.random.default_rng(1)


def store(path: Path, x: Array, zarr_format: int, **options: Any) -> None:
    """Store bfloat16 as another program would: elements of 16 bits, and metadata that name bfloat16."""
    zarr.create_array(path, data=x.view(np.uint16), chunks=(16, 16), zarr_format=zarr_format, **options)  # type: ignore[arg-type]
    metadata = path / ("zarr.json" if zarr_format == 3 else ".zarray")
    said = json.loads(metadata.read_text())
    said["data_type" if zarr_format == 3 else "dtype"] = "bfloat16"
    metadata.write_text(json.dumps(said))


def product(x: Array) -> Array:
    wide = x.astype(np.float32)
    return np.asarray((wide @ wide.T).astype(BFLOAT16))


@each_value
@pytest.mark.parametrize(
    ("zarr_format", "options"),
    [
        (3, {"compressors": None}),
        (3, {}),
        (3, {"shards": (32, 32)}),
        (2, {"compressors": None}),
        (2, {"order": "F"}),
    ],
)
@pytest.mark.parametrize("compressor", ["none", "blosc-lz4"])
def test_bfloat16_zarr_is_read_and_written_as_bfloat16(
    zarr_format: int, options: dict[str, Any], compressor: str, tmp_path: Path
) -> None:
    x = integers(RNG, (50, 70), "bfloat16", most=60)
    store(tmp_path / "X", x, zarr_format, **options)
    given = str(tmp_path / "X"), str(tmp_path / "X"), str(tmp_path / "C")
    done = command(
        "run", *given, "--transpose-b", "--backend", "host", "--compressor", compressor, "--verify", "--quiet"
    )
    assert (done.code, done.err) == (0, "")
    assert json.loads((tmp_path / "C" / "zarr.json").read_text())["data_type"] == "bfloat16"
    written: Any = zarr.open_array(tmp_path / "C")
    assert written.dtype == BFLOAT16
    np.testing.assert_array_equal(written[:], product(x))
    assert command("verify", *given, "--transpose-b").code == 0
    # Run again with beta = 1, which adds the product to the C that exists now.
    oocgemm.gemm(*given, trans_b="T", beta=1, backend="host")
    np.testing.assert_array_equal(written[:], (product(x).astype(np.float32) * 2).astype(BFLOAT16))
    wide = oocgemm.gemm(*given[:2], trans_b="T", out_dtype="float32", backend="host").out
    np.testing.assert_array_equal(wide, x.astype(np.float32) @ x.astype(np.float32).T)


@pytest.mark.parametrize(
    ("fill", "value"), [(0, 0), (1.5, 1.5), ("0x4040", 3), ("NaN", np.nan), ("-Infinity", -np.inf)]
)
def test_chunks_that_are_missing_are_its_fill_value(fill: object, value: float, tmp_path: Path) -> None:
    store(tmp_path / "X", np.zeros((20, 20), BFLOAT16), 3)
    said = json.loads((tmp_path / "X" / "zarr.json").read_text()) | {"fill_value": fill}
    (tmp_path / "X" / "zarr.json").write_text(json.dumps(said))
    identity = np.eye(20).astype(BFLOAT16)
    for through_zarr in (False, True):
        source = zarr.open_array(tmp_path / "X") if through_zarr else tmp_path / "X"
        made = oocgemm.matmul(identity, source, backend="host", out_dtype="float32")
        assert made.shape == (20, 20)
        if np.isfinite(value):
            np.testing.assert_array_equal(made, np.full((20, 20), value))
        else:
            assert not np.isfinite(made).any()


@pytest.mark.parametrize("shards", [None, (32, 32)])
def test_bytes_that_would_have_to_be_swapped_are_refused(
    tmp_path: Path, shards: tuple[int, int] | None
) -> None:
    x = integers(RNG, (20, 20), "bfloat16")
    big = zarr.codecs.BytesCodec(endian="big")
    store(tmp_path / "X", x, 3, serializer=big, compressors=None, shards=shards)
    before = contents(tmp_path)
    for place in (tmp_path / "X", zarr.open_array(tmp_path / "X")):
        for act in (oocgemm.gemm, oocgemm.plan):
            with pytest.raises(
                InputError, match=r"A: big-endian bfloat16 is not supported: store it with endian = little"
            ):
                act(place, x, tmp_path / "C", backend="host")
    assert contents(tmp_path) == before


def test_what_brings_it_to_numpy_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path / "X", np.zeros((20, 20), BFLOAT16), 3)
    right, before = importlib.import_module, contents(tmp_path)

    def missing(name: str, *package: Any) -> Any:
        if name == "ml_dtypes":
            raise ModuleNotFoundError(name)
        return right(name, *package)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr("oocgemm.backends.base.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"A at .*X: bfloat16 needs .* ml_dtypes: pip install 'oocgemm\[bfloat16\]'"
    ):
        oocgemm.matmul(tmp_path / "X", tmp_path / "X", backend="host")
    with pytest.raises(InputError, match=r"ml_dtypes: pip install 'oocgemm\[bfloat16\]'"):
        numpy_dtype("bfloat16")
    assert contents(tmp_path) == before


def test_a_npy_file_cannot_hold_it(tmp_path: Path) -> None:
    x = np.ones((4, 4), BFLOAT16)
    with pytest.raises(
        InputError, match=r"C at .* would have dtype bfloat16, .*out_dtype='float32'.* zarr array"
    ):
        oocgemm.matmul(x, x, out=tmp_path / "C.npy", backend="host")
    assert contents(tmp_path) == {}
    wide = oocgemm.gemm(x, x, tmp_path / "C.npy", out_dtype="float32", backend="host")
    np.testing.assert_array_equal(wide.out[:], np.full((4, 4), 4))
    np.save(tmp_path / "X.npy", x)
    with pytest.raises(
        InputError, match=r"A is of dtype .V2, supported are .*: .*\.view\(ml_dtypes\.bfloat16\)"
    ):
        oocgemm.matmul(tmp_path / "X.npy", x, backend="host")
