"""When a GPU compresses C, and within which memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.kernels.launches import DeviceStrip, batches
from oocgemm.planning import (
    Budgets,
    Chunked,
    Coding,
    Division,
    InMemory,
    Layout,
    Layouts,
    Setting,
    TileShape,
    Writing,
    default_model,
    make_plan,
    with_encoding,
)
from oocgemm.planning.cost.coding import (
    COMPRESSORS,
    ITEM_BYTES,
    MIN_CHUNK,
    encoding_bytes,
    frames_bytes,
    slot_frames,
)
from tests.support.products import changed, product_of

GIB, MIB = 1 << 30, 1 << 20
MACHINE = default_model("cuda", 16)
NEW = Chunked(writing=Writing(free=True, encodes=True, encode_bytes=MIB))


def setting(c: Layout = NEW, device: int = 40 * GIB, m: int = 16384) -> Setting:
    problem = product_of(m, 16384, 4096, "float64", "float64", "float64", "float64")
    a = InMemory()
    return Setting(problem, MACHINE, Layouts(a, a, c), Budgets(device, 20 * GIB))


def test_the_gpu_compresses_a_large_c() -> None:
    layouts = with_encoding(setting(), "blosc-zstd")
    assert layouts.codings.c == Coding("blosc-zstd")
    assert not layouts.c.writing.encodes
    plan = make_plan(setting().problem, Budgets(40 * GIB, 20 * GIB), MACHINE, layouts)
    assert plan.footprint.device["encode"] == encoding_bytes(plan.setting) > 128 * MIB
    raw = min(plan.slots.strip, 16384) * min(plan.tile.n, 16384) * 8
    assert plan.footprint.host["C"] > plan.slots.host_c * raw


@pytest.mark.parametrize("why", ["small", "codec", "device", "chunks", "odd", "gram", "unified"])
def test_the_host_compresses_otherwise(why: str) -> None:
    given, codec = setting(), "blosc-lz4"
    match why:
        case "small":
            given = setting(m=256)
        case "codec":
            codec = "gzip"
        case "device":
            given = setting(device=4 * GIB)
        case "chunks":
            given = setting(Chunked(writing=Writing((100, 100))))
        case "odd":
            given = setting(Chunked(writing=Writing((1, 1_000_003))))
        case "gram":
            given = replace(given, problem=changed(given.problem, gram="lower"))
        case "unified":
            given = replace(given, machine=default_model("host", 16))
    assert with_encoding(given, codec) == given.layouts


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from(sorted(COMPRESSORS)),
    st.sampled_from(ITEM_BYTES),
    st.integers(1, 40),
)
def test_batches_fit_their_memory(height: int, width: int, codec: str, item: int, chunks: int) -> None:
    division = Division.of(codec, (height, width), item)
    if division is None:
        return
    assert division.chunk == height * width * item >= MIN_CHUNK
    assert (division.streams - 1) * division.length < division.chunk <= division.streams * division.length
    if codec != "zstd":
        assert division.streams * division.length == division.chunk
        assert division.block == item * division.length
    c = Chunked(itemsize=item, writing=Writing((height, width)))
    given = setting(c, m=2 * height)
    dtype = {1: "int8", 2: "float16", 4: "float32", 8: "float64", 16: "complex128"}[item]
    kinds = (dtype, "int32", "int32") if item == 1 else (dtype, dtype, dtype)
    problem = product_of(2 * height, chunks * width, 64, *kinds, kinds[-1])
    if problem.itemsizes["C"] != item:
        return
    given = replace(given, problem=problem, layouts=given.layouts.encoded(Coding(codec)))
    work = encoding_bytes(given)
    strip = DeviceStrip(0, (2 * height, chunks * width), (height, width))
    seen = 0
    for batch in batches(division, strip, (0, work), 0):
        assert batch.first == seen
        seen += batch.count
        names = "content", "encoded", "sequences", "literals", "sizes", "places"
        starts = [getattr(batch, name) for name in names]
        streams = batch.count * division.streams
        needed = [batch.count * division.chunk, *3 * [streams * division.room], 4 * streams]
        needed.append(8 * (streams + batch.count))
        for begin, end, size in zip(starts, [*starts[1:], work], needed, strict=True):
            assert begin + size + 8 <= end
    assert seen == 2 * chunks
    tile = TileShape(2 * height, chunks * width, 64)
    assert slot_frames(given, tile, 2 * height) == frames_bytes(division, 2 * chunks)
