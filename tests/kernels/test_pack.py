"""The kernels that compress chunks, run on the processor: what they write decodes to the same elements."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import Blosc, Zstd

from oocgemm.kernels.compile import compiled
from oocgemm.planning.cost import coding
from oocgemm.planning.cost.coding import BLOSC_STREAM, MIN_STREAM, Division
from oocgemm.stores.codecs import Codec
from tests.support.decoding import Array, Batch
from tests.support.nvrtc import Nvrtc
from tests.support.packing import packed
from tests.support.suite import slow
from tests.support.unpacking import unpacked

CODECS = "zstd", "blosc-lz4", "blosc-zstd"
CHUNK = 64, 96
rng = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small chunks."""
    monkeypatch.setattr(coding, "MIN_CHUNK", 1)
    monkeypatch.setattr(coding, "MIN_STREAM", 128)


def decoded(frame: bytes, codec: str) -> bytes:
    return bytes((Zstd() if codec == "zstd" else Blosc()).decode(frame))


def check(x: Array, codec: str, chunk: tuple[int, int] = CHUNK) -> float:
    """Compress a matrix, compare what decodes from it, and return the stored bytes per byte."""
    frames = packed(x, chunk, codec)
    for (i, j), frame in frames.items():
        part = x[i * chunk[0] : (i + 1) * chunk[0], j * chunk[1] : (j + 1) * chunk[1]]
        whole = np.zeros(chunk, x.dtype)  # beyond the edges, too
        whole[: part.shape[0], : part.shape[1]] = part
        assert decoded(frame, codec) == whole.tobytes()
        if codec == "zstd":
            assert frame[5] == 0x30  # whoever decodes it as a stream needs a window of 64 KiB only
        if codec.startswith("blosc"):
            assert int.from_bytes(frame[12:16], "little") == len(frame) <= whole.nbytes + 16
    return sum(map(len, frames.values())) / (len(frames) * chunk[0] * chunk[1] * x.itemsize)


def matrices(dtype: str, shape: tuple[int, int] = (128, 192)) -> dict[str, Array]:
    """Return elements that compress well, less well, and not at all."""
    count = shape[0] * shape[1]
    size = np.dtype(dtype).itemsize
    text = " ".join(str(i * i) for i in range(count * size // 4))[: count * size].ljust(count * size).encode()
    found = {
        "equal": np.zeros(shape, dtype),
        "few": rng.integers(0, 3, shape).astype(dtype),
        "many": rng.integers(-100, 100, shape).astype(dtype),
        "skewed": np.minimum(rng.geometric(0.1, shape), 127).astype(dtype),
        "sparse": ((rng.random(shape) < 0.01) * rng.integers(1, 100, shape)).astype(dtype),
        "text": np.frombuffer(text, dtype).reshape(shape),
        "noise": np.frombuffer(rng.bytes(count * size), dtype).reshape(shape),
    }
    if np.dtype(dtype).kind in "fc":
        found["normal"] = rng.standard_normal(shape).astype(dtype)
        found["smooth"] = np.cumsum(rng.standard_normal(shape), axis=1).astype(dtype)
    return found


@pytest.mark.parametrize("dtype", ["int8", "float64", *slow(("float16",), ("float32",), ("complex128",))])
@pytest.mark.parametrize("codec", CODECS)
def test_frames_decode_to_the_same_elements(codec: str, dtype: str) -> None:
    shares = {name: check(x, codec) for name, x in matrices(dtype).items()}
    assert shares["equal"] < 0.05
    assert shares["noise"] < 1.005
    assert max(shares["few"], shares["sparse"]) < 0.7


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_at_edges_and_of_odd_shapes_decode(codec: str) -> None:
    for shape, chunk in (((70, 100), CHUNK), ((1, 1), CHUNK), ((65, 97), (65, 97)), ((30, 700), (7, 333))):
        check(rng.integers(0, 50, shape).astype(np.float32), codec, chunk)


@pytest.mark.parametrize("codec", CODECS)
def test_long_streams_decode(codec: str) -> None:
    """Streams have the largest size, and long runs and matches."""
    x = np.zeros((512, 512))
    x[100:130] = rng.standard_normal((30, 512))
    x[300:330] = x[100:130]
    x[400:, 500:] = 7
    assert check(x, codec, (512, 512)) < 0.15


@given(st.data())
@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_decode(codec: str, data: Any) -> None:
    """Runs, repetitions and bytes of skewed distributions, in any order, in streams of any length."""
    count = data.draw(st.integers(200, 6000))
    found, numbers = b"", np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    while len(found) < count:
        size = data.draw(st.sampled_from([1, 3, 8, 20, 130, 700, 3000]))
        match data.draw(st.integers(0, 4)):
            case 0:
                found += bytes([data.draw(st.integers(0, 255))]) * size
            case 1:
                found += numbers.bytes(size)
            case 2:
                found += bytes(np.minimum(numbers.geometric(0.2, size), 255).astype(np.uint8))
            case 3:
                found += bytes((numbers.integers(0, data.draw(st.integers(2, 256)), size)).astype(np.uint8))
            case 4:
                start = data.draw(st.integers(0, len(found)))
                found += found[start : start + size]
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    dtype = {1: "i1", 2: "f2", 8: "f8"}[itemsize]
    x = np.frombuffer(found[: count - count % itemsize], dtype)
    if codec == "zstd" or Division.of(codec, (1, x.size), itemsize) is not None:
        check(x.reshape(1, -1), codec, (1, x.size))


@pytest.mark.parametrize("codec", CODECS)
def test_tensorstore_reads_the_frames(codec: str, tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    x = rng.integers(0, 50, (100, 150)).astype(np.float64)
    compressor: Any = zarr.codecs.ZstdCodec()
    if codec != "zstd":
        name = zarr.codecs.BloscCname(codec.removeprefix("blosc-"))
        compressor = zarr.codecs.BloscCodec(cname=name, clevel=1, shuffle="shuffle", typesize=8)
    zarr.create_array(tmp_path, shape=x.shape, dtype=x.dtype, chunks=CHUNK, compressors=compressor)
    for (i, j), frame in packed(x, CHUNK, codec).items():
        file = tmp_path / f"c/{i}/{j}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(frame)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path)}}
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), x)
    np.testing.assert_array_equal(zarr.open_array(tmp_path)[:], x)


def test_the_decoder_of_a_gpu_decodes_what_the_encoder_writes() -> None:
    for codec in CODECS:
        for x in matrices("float64").values():
            frames = [np.frombuffer(frame, np.uint8) for frame in packed(x, CHUNK, codec).values()]
            size = np.array([frame.size for frame in frames], np.int64)
            chunks = [
                x[i : i + CHUNK[0], j : j + CHUNK[1]].copy()
                for i in range(0, x.shape[0], CHUNK[0])
                for j in range(0, x.shape[1], CHUNK[1])
            ]
            start = np.cumsum(size) - size
            given = Batch(np.concatenate(frames), start, size, chunks, Codec.of(codec, 8))
            for found, chunk in zip(unpacked(given), chunks, strict=True):
                assert found is not None, codec
                np.testing.assert_array_equal(found, chunk.reshape(-1).view(np.uint8))


def test_what_decodes_is_as_short_as_the_hosts_for_shuffled_floats() -> None:
    x = rng.standard_normal((256, 256))
    host = len(Blosc("zstd", 1).encode(x)) / x.nbytes
    assert check(x, "blosc-zstd", (256, 256)) < host


def test_chunks_are_divided_evenly() -> None:
    division = Division.of("blosc-lz4", (1000, 1050), 8)
    assert division is not None
    assert division.length <= BLOSC_STREAM
    assert division.streams * division.length == 1000 * 1050 * 8 == division.block * division.streams // 8
    assert Division.of("blosc-lz4", (1, 1_000_003), 8) is None  # a prime number of elements
    assert Division.of("zstd", (1, 1_000_003), 8) is not None
    assert Division.of("gzip", (1000, 1000), 8) is None
    assert division.length >= MIN_STREAM


@pytest.mark.parametrize("name", ["shuffle", "lz4_compress", "zstd_compress", "locate", "assemble"])
@pytest.mark.parametrize("arch", ["sm_90a", *slow(["sm_80"])])
def test_the_kernels_compile_for_gpus(name: str, arch: str) -> None:
    assert compiled(Nvrtc(), name, arch, ())
