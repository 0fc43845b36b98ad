"""Which operands a GPU decodes, and within which budgets."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.planning import (
    Budgets,
    Chunked,
    Coding,
    Layout,
    Layouts,
    Setting,
    TileShape,
    Writing,
    default_model,
    make_plan,
    with_decoding,
)
from oocgemm.planning.cost.coding import DecodingShape, decoding_rate, decoding_shape, describe
from tests.support.products import changed, product_of

GIB, MIB = 1 << 30, 1 << 20
MACHINE = default_model("cuda", 16)
BLOSC = Coding("blosc-zstd", 256 << 10, 0.12)
CHUNK = 1024, 1024


def setting(k: int = 1 << 20, device: int = 40 * GIB, host: int = 20 * GIB, decode: float = 9e9) -> Setting:
    problem = product_of(4096, 4096, k, "float64", "float64", "float64", "float64")
    x = Chunked(CHUNK, partial_reads=False, decode_bytes=8 * MIB, writing=Writing(CHUNK))
    return Setting(problem, replace(MACHINE, decode=decode), Layouts(x, x, Layout()), Budgets(device, host))


def chosen(given: Setting, coding: Coding = BLOSC) -> str:
    return describe(with_decoding(given, {"A": coding, "B": coding}))


def test_the_gpu_decodes_many_streams_of_large_operands() -> None:
    assert chosen(setting()) == "A (blosc-zstd), B (blosc-zstd)"
    assert describe(with_decoding(setting(), {"B": BLOSC})) == "B (blosc-zstd)"
    assert chosen(setting(), Coding("zstd", MIB, 0.2)) == "A (zstd), B (zstd)"


def test_batches_of_long_streams_are_larger() -> None:
    """Zarr writes one stream of zstd per chunk by default. A device decodes hundreds of them at once."""
    long = Coding("zstd", 8 * MIB, 0.2)
    given = setting(device=128 * GIB, host=60 * GIB, decode=5e9)
    assert chosen(given, long) == "A (zstd), B (zstd)"
    shape = decoding_shape(replace(given, layouts=given.layouts.decoded("A", long)))
    assert shape is not None
    assert shape.lanes * shape.batch // long.stream_bytes == 512
    assert chosen(given, replace(long, stored_share=0.95)) == ""  # each stream is decoded slowly


@pytest.mark.parametrize(
    "why", ["few streams", "small", "fast host", "incompressible", "device", "host", "checked"]
)
def test_the_host_decodes_otherwise(why: str) -> None:
    given, coding = setting(), BLOSC
    match why:
        case "few streams":
            coding = Coding("zstd", 32 * MIB, 0.2)
        case "small":
            given = setting(k=16384)
        case "fast host":
            given = setting(decode=50e9)
        case "incompressible":
            given, coding = setting(decode=40e9), replace(BLOSC, stored_share=1.0)
        case "device":
            given = setting(device=GIB // 4)
        case "host":
            given = setting(host=64 * MIB)
        case "checked":
            given = replace(given, problem=changed(given.problem, checked="device"))
    found = with_decoding(given, {"A": coding, "B": coding})
    assert found == given.layouts
    assert describe(found) == ""


def test_an_operand_that_is_decoded_needs_no_host_slots() -> None:
    given = setting()
    found = replace(given, layouts=with_decoding(given, {"A": BLOSC}))
    assert found.routes["A"].streams
    assert not found.routes["B"].streams
    assert describe(found.layouts.cached_as(a=False, b=False)) == ""


@given(
    st.integers(MIB, 100 * GIB),
    st.integers(MIB, 100 * GIB),
    st.integers(1, 4096),
    st.sampled_from(["zstd", "blosc-lz4"]),
)
def test_the_lanes_fit_the_budgets_and_a_batch_has_room_for_a_chunk(
    device: int, host: int, side: int, decoded: str
) -> None:
    given = setting(device=device, host=host)
    layouts = replace(given.layouts, a=given.layouts.a.changed(read_chunk=(side, side)))
    coding = Coding(decoded, stream_bytes=MIB)
    given = replace(given, layouts=layouts.decoded("A", coding))
    shape = decoding_shape(given)
    rate = decoding_rate(given, coding, 8 << 30)
    assert (shape is None) == (rate == 0)
    if shape is not None:
        assert min(shape.batch, shape.frames) >= side * side * 8
        assert shape.device_bytes <= device // 4
        assert shape.host_bytes <= host // 4


def test_the_parts_of_a_lane_do_not_overlap() -> None:
    shape = DecodingShape(4, 128 * MIB, 32 * MIB)
    assert shape.frames + shape.batch + shape.temporary + shape.tables == shape.lane_bytes
    assert shape.device_bytes == 4 * shape.lane_bytes


@pytest.mark.parametrize(("memory", "slots"), [(10, 4), (60, 6)])
def test_more_panels_are_decoded_at_the_same_time_if_there_is_memory(memory: int, slots: int) -> None:
    given = setting(1 << 18, memory * GIB, 40 * GIB)
    problem = replace(given.problem, m=8192, n=8192)
    found = replace(given, problem=problem)
    layouts = with_decoding(found, {"A": BLOSC, "B": BLOSC})
    tile = TileShape(8192, 8192, 4096)
    plan = make_plan(problem, found.budgets, found.machine, layouts, tile)
    assert plan.decoded
    assert min(plan.slots.a, plan.slots.b) == slots
