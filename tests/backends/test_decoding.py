"""Products of compressed arrays that the (fake) GPU decodes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

import oocgemm
from oocgemm.errors import ExecutionError
from oocgemm.jobs.prepare import codings
from oocgemm.planning import Kind, Plan
from oocgemm.planning.cost import coding
from oocgemm.reports.exports import page
from oocgemm.stores.codecs import NO_ROOM, Fetched
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.timeline import Span
from tests.support.fake_cuda import Device, fake_cuda
from tests.support.problems import integers
from tests.support.suite import each_value, examples

rng = np.random.default_rng(0)
SHAPE = (230, 310)
CODECS: dict[str, Any] = {
    "blosc-zstd": [BloscCodec(cname="zstd", shuffle="shuffle")],
    "blosc-lz4": [BloscCodec(cname="lz4", shuffle="bitshuffle")],
    "zstd": [ZstdCodec(level=3)],
    "checksum": [BloscCodec(cname="zstd", shuffle="shuffle"), Crc32cCodec()],
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the GPU decode small arrays, in small batches."""
    for name, value in {
        "DECODED_BATCH": 128 << 10,
        "MIN_DECODED_BATCH": 64 << 10,
        "START_SECONDS": 0,
    }.items():
        monkeypatch.setattr(coding, name, value)
    monkeypatch.setattr(coding, "STORED_RATE", 1e12)
    fast = dict.fromkeys(("zstd", "lz4"), coding.CodedStreams(1e12, 1e12))
    monkeypatch.setattr(coding, "DECODED", coding.DECODED | fast)
    coding.decoding_shape.cache_clear()
    yield
    coding.decoding_shape.cache_clear()


@contextmanager
def decoding_gpu(seed: int = 0) -> Iterator[Device]:
    with fake_cuda(seed) as device:
        yield device
        device.check()


def stored(folder: Path, values: Any, codec: str = "blosc-zstd", **options: Any) -> str:
    place = str(folder / "A.zarr")
    given = {"chunks": (40, 64), "compressors": CODECS[codec], "fill_value": 3} | options
    zarr.create_array(place, data=values, **given)
    return place


def decodes(plan: Any, operand: str = "A") -> bool:
    kinds = {(op.kind, op.operand) for op in plan.schedule()}
    assert ((Kind.READ, operand) in kinds) == (not plan.layouts.coding(operand))
    return (Kind.READ, operand) not in kinds


@each_value
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("trans", ["N", "T"])
def test_products_are_exact(tmp_path: Path, codec: str, trans: Any) -> None:
    values = integers(rng, SHAPE, "float64")
    values[40:80, 64:128] = 3  # zarr does not store this chunk
    a = values.T if trans == "T" else values
    b = integers(rng, (a.shape[1], 70), "float64")
    place = stored(tmp_path, values, codec)
    for seed in range(examples(3, quick=1)):
        with decoding_gpu(seed):
            result = oocgemm.gemm(place, b, trans_a=trans, tile="70x40x90", backend="cuda", kernel="cublas")
        np.testing.assert_array_equal(result.out, a @ b)
        assert decodes(result.plan)


def test_both_operands_shards_and_parts_of_chunks(tmp_path: Path) -> None:
    a, b = integers(rng, SHAPE, "float32"), integers(rng, (SHAPE[1], 90), "float32")
    (tmp_path / "b").mkdir()
    left = stored(tmp_path, a, shards=(80, 128))
    right = stored(tmp_path / "b", b, "zstd", chunks=(50, 33))
    with decoding_gpu():
        result = oocgemm.gemm(left, right, tile="64x45x77", backend="cuda", kernel="cublas")
    np.testing.assert_array_equal(result.out, a @ b)
    assert decodes(result.plan, "A")
    assert decodes(result.plan, "B")
    for tier in ("device", "host"):
        assert getattr(result.plan.footprint, tier)["decode"] > 0


def test_several_devices_decode_their_panels(tmp_path: Path) -> None:
    a, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 190), "float64")
    (tmp_path / "b").mkdir()
    places = stored(tmp_path, a), stored(tmp_path / "b", b, "zstd")
    with decoding_gpu():
        result = oocgemm.gemm(*places, backend="cuda", kernel="cublas", devices="0,0", tile="64x64x100")
    np.testing.assert_array_equal(result.out, a @ b)
    assert result.plan.decoded == "A (blosc-zstd), B (zstd)"
    shape = coding.decoding_shape(result.plan.setting)
    assert shape is not None
    assert result.plan.footprint.host["decode"] == 2 * shape.host_bytes


def test_a_transform_and_a_gram_matrix(tmp_path: Path) -> None:
    values = rng.integers(-1, 3, SHAPE).astype(np.int8)
    place = stored(tmp_path, values, "blosc-lz4")
    transform = oocgemm.Transform(missing=-1, impute=0, cast="float32")
    with decoding_gpu():
        result = oocgemm.gram(place, transform=transform, uplo="full", backend="cuda", kernel="cublas")
    x = np.where(values == -1, 0, values).astype(np.float32)
    np.testing.assert_array_equal(result.out, x @ x.T)
    assert decodes(result.plan)
    assert result.plan.decoded == "A (blosc-lz4)"


def test_batches_that_need_more_room_than_expected_are_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "DECODED_BATCH", 1 << 20)
    monkeypatch.setattr(coding, "FRAMES_MARGIN", 0.01)
    a, b = rng.integers(0, 1 << 20, SHAPE).astype(float), integers(rng, (SHAPE[1], 70), "float64")
    place, shards = stored(tmp_path, a), tmp_path / "shards"
    shards.mkdir()
    right = stored(shards, b, shards=(80, 128))
    fetched = []
    monkeypatch.setattr(ZarrMatrix, "fetch", lambda self, *given: noted(self.direct.fetch(*given)))

    def noted(found: list[Fetched]) -> list[Fetched]:
        fetched.append([each.size for each in found])
        return found

    with decoding_gpu():
        result = oocgemm.gemm(place, right, backend="cuda", kernel="cublas")
    np.testing.assert_array_equal(result.out, a @ b)
    assert any(NO_ROOM in sizes for sizes in fetched)
    assert any(len(sizes) > 1 and NO_ROOM not in sizes for sizes in fetched)


def test_plans_and_reports_say_what_the_gpu_decodes(tmp_path: Path) -> None:
    place = stored(tmp_path, integers(rng, SHAPE, "float64"))
    with decoding_gpu():
        plan = oocgemm.plan(place, np.ones((SHAPE[1], 70)), device_memory="128MiB", backend="cuda")
        result = oocgemm.gemm(place, np.ones((SHAPE[1], 70)), backend="cuda", kernel="cublas")
    assert "decoded by the GPU: A (blosc-zstd)" in str(plan)
    assert "decoded by the GPU" in page([("run", result.timeline)])


@pytest.mark.parametrize("why", ["verify", "slow", "codec", "frames with checksums", "small budget", "large"])
def test_the_host_decodes_what_the_gpu_cannot_or_should_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    values, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    codecs = {"codec": BloscCodec(cname="zlib"), "frames with checksums": ZstdCodec(checksum=True)}
    options: dict[str, Any] = {"compressors": [codecs[why]]} if why in codecs else {}
    place = stored(tmp_path, values, **options)
    if why == "slow":
        monkeypatch.setattr(coding, "DECODED", {"zstd": coding.CodedStreams(1e6, 1e6)})
    if why == "large":
        monkeypatch.setattr("oocgemm.stores.files.MAX_CACHED_SHARE", 0)
    budget: dict[str, Any] = {"host_memory": "3MiB"} if why == "small budget" else {}
    with decoding_gpu():
        result = oocgemm.gemm(place, b, verify=why == "verify", backend="cuda", kernel="cublas", **budget)
    np.testing.assert_array_equal(result.out, values @ b)
    assert not decodes(result.plan)


@pytest.mark.parametrize("damage", ["truncated", "header", "stream", "checksum"])
def test_a_damaged_chunk_ends_in_the_error_of_the_host(tmp_path: Path, damage: str) -> None:
    place = stored(tmp_path, integers(rng, SHAPE, "float64"), "checksum" if damage == "checksum" else "zstd")
    path = Path(place) / "c" / "2" / "3"
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        os.truncate(path, 100)
    else:
        end = len(content)
        for i in {"header": range(4), "stream": range(end - 60, end), "checksum": range(50, 51)}[damage]:
            content[i] ^= 0x5A
        path.write_bytes(content)
    with decoding_gpu(), pytest.raises(ExecutionError, match=r"c/2/3.*damaged") as raised:
        oocgemm.gemm(place, np.ones((SHAPE[1], 70)), backend="cuda", kernel="cublas")
    assert "A[80:120, 192:256]" in str(raised.value)
    assert ("checksum" in str(raised.value)) == (damage == "checksum")


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_resumed_with_and_without_decoding_by_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The blocks of the product are the same, whoever decodes."""
    a, b = integers(rng, SHAPE, "float64"), integers(rng, (SHAPE[1], 70), "float64")
    place, out, has = stored(tmp_path, a, "blosc-lz4"), str(tmp_path / "C.zarr"), [first]
    right = str(tmp_path / "b.npy")
    np.save(right, b)
    monkeypatch.setattr("oocgemm.jobs.prepare.codings", lambda *given: codings(*given) if has[0] else {})
    options: dict[str, Any] = {"tile": "70x10x90", "backend": "cuda", "kernel": "cublas"}
    writes = 0

    def stop(plan: Plan) -> Any:
        def observe(span: Span) -> None:
            nonlocal writes
            writes += span.kind == "write"
            if writes > plan.tiles.count // 2:
                raise KeyboardInterrupt

        return observe

    with decoding_gpu():
        with pytest.raises(KeyboardInterrupt):
            oocgemm.gemm(place, right, out, progress=stop, **options)
        has[0] = not first
        result = oocgemm.gemm(place, right, out, resume=True, trust_operands=True, **options)
    assert result.plan.done
    np.testing.assert_array_equal(zarr.open_array(out, mode="r")[:], a @ b)
    assert ((Kind.READ, "A") in {(op.kind, op.operand) for op in result.plan.schedule()}) != first
