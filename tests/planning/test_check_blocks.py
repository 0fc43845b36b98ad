"""How tiles are divided into blocks that are checked one by one, and the memory of their checksums."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.integrity.host_checksums import runs
from oocgemm.planning import DTYPES, Budgets, Layouts, Tier, TileShape, default_model, make_plan
from oocgemm.planning.cost.footprint import payload_bytes, slot_bytes
from oocgemm.planning.device_memory import HEAD, Blocking, PanelOffsets, StripOffsets, borders, checksum_bytes
from tests.support.problems import Array
from tests.support.products import product_of
from tests.support.suite import examples
from tests.support.summing import FLOATS


@given(extent=st.integers(1, 2000), strip=st.integers(1, 2000))
def test_no_block_crosses_the_border_of_a_strip(extent: int, strip: int) -> None:
    cuts = borders(extent, strip)
    assert cuts[0] == 0
    assert cuts[-1] == extent
    assert all(0 < b - a <= 128 for a, b in pairwise(cuts))
    assert set(range(0, extent, strip)) <= set(cuts)


@given(extent=st.integers(1, 2000), strip=st.integers(1, 2000))
def test_a_strip_is_divided_as_it_is_in_its_tile(extent: int, strip: int) -> None:
    """Each strip of a tile is divided into the same blocks as these rows of the tile.

    This includes the last strip, which may be shorter.
    """
    cuts = borders(extent, strip)
    for top in range(0, extent, strip):
        bottom = min(top + strip, extent)
        assert borders(bottom - top, strip) == [cut - top for cut in cuts if top <= cut <= bottom]


@given(extent=st.integers(1, 500), strip=st.integers(1, 300), data=st.data())
def test_pieces_are_divided_at_block_borders(extent: int, strip: int, data: st.DataObject) -> None:
    cuts = borders(extent, strip)
    top = data.draw(st.integers(0, extent - 1))
    stop = data.draw(st.integers(top + 1, extent))
    piece = np.arange(top, stop)[:, None] * np.ones(2)
    found: list[Array] = []
    for first, blocks, offset in runs(piece, top, cuts):
        assert np.shares_memory(blocks, piece)
        for number, block in enumerate(blocks, first):
            assert cuts[number] <= block.min()
            assert block.max() < cuts[number + 1]
        assert blocks[0, 0, 0] == top + offset
        found += list(blocks)
    np.testing.assert_array_equal(np.concatenate(found), piece)


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_checksum_workspaces_follow_panels_without_overlap(data: st.DataObject) -> None:
    m, n, k, tile_m, tile_n, tile_k, strip = (data.draw(st.integers(1, 700)) for _ in range(7))
    dtype = data.draw(st.sampled_from(FLOATS))
    names = dtype, dtype, DTYPES[dtype].accumulator, dtype
    beta = data.draw(st.sampled_from([0, 1]))
    problem, tile = (
        product_of(m, n, k, *names, beta=beta, checked="device"),
        TileShape(tile_m, tile_n, tile_k),
    )
    wide = 16 if DTYPES[dtype].is_complex else 8
    for extent, own in ((min(tile_m, m), strip), (min(tile_n, n), min(tile_n, n))):
        blocks, depth = len(borders(extent, own)) - 1, min(tile_k, k)
        assert Blocking.of(extent, own).blocks == blocks
        room = PanelOffsets.of(problem, extent, depth, own)
        assert HEAD + extent <= room.norms + (room.flags - HEAD)
        assert room.norms + 8 * blocks * -(-depth // 128) <= room.sums
        assert room.sums + wide * blocks * depth <= room.end
        # Checksums of a tile at the edge of C, or of a panel that is less deep, take no more memory.
        assert PanelOffsets.of(problem, max(1, extent // 2), max(1, depth // 2), own).end <= room.end
    strips = StripOffsets.of(problem, tile, strip)
    parts = [strips.found, strips.made] + [strips.old] * problem.reads_c
    for part, then in zip(parts, [*(part.begin for part in parts[1:]), strips.end], strict=True):
        assert part.begin + HEAD <= part.rows <= part.cols <= part.sums
        assert part.sums + wide * strips.down * strips.across <= part.norms
        assert part.norms + 8 * strips.down * strips.across <= part.end
        assert part.end == then
        assert all(x % 16 == 0 for x in (part.begin, part.sums, part.end))
        assert part.norms % 8 == 0
    data_bytes, whole_slots = payload_bytes(problem, tile, strip), slot_bytes(problem, tile, strip)
    for slot, more in checksum_bytes(problem, tile, strip).items():
        assert data_bytes[slot] + more <= whole_slots[slot]


@pytest.mark.parametrize("dtype", ["float64", "float16", "complex128"])
def test_a_plan_has_memory_for_checksums_within_its_budgets(dtype: str) -> None:
    budgets, machine = Budgets(3 << 30, 4 << 30), default_model("cuda", 16)
    names = dtype, dtype, DTYPES[dtype].accumulator, dtype
    plans = {
        checked: make_plan(
            product_of(24576, 24576, 24576, *names, checked=checked), budgets, machine, Layouts()
        )
        for checked in ("", "device")
    }
    plain, checked = plans[""], plans["device"]
    assert checked.footprint.device_total <= budgets.device
    assert checked.footprint.host_total <= budgets.host
    assert checked.prediction.total <= 1.02 * plain.prediction.total
    assert checked.slots.count(Tier.DEVICE, "S") == checked.slots.c
    assert not checksum_bytes(plain.problem, plain.tile, plain.slots.strip)
