"""Which route the blocks of an operand take, and what follows from it."""

from dataclasses import replace
from typing import Any

import pytest

from oocgemm.planning import (
    Budgets,
    Chunked,
    Coding,
    InMemory,
    Layout,
    Layouts,
    Lines,
    Setting,
    Writing,
    default_model,
)
from oocgemm.planning.cost.footprint import ring_shape
from oocgemm.planning.cost.machine import INSTANT
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Decoded, Direct, Encoded, InPlace, Ringed, Route, Slotted
from tests.support.plan_cases import GIB, problem
from tests.support.products import changed

GPU, HOST = default_model("cuda", 16), default_model("host", 4)
BUDGETS = Budgets(GIB, GIB)
PACKED = Chunked((512, 512), partial_reads=False, decode_bytes=1 << 22, writing=Writing((512, 512)))
FILE, CACHED = Lines(4096), Lines(4096, page_cached=True)
ARRAY, PINNED = InMemory(zero_copy_width=1024), InMemory(zero_copy_width=1024, pinned=True)


def setting(x: Layout, machine: Any = GPU, checked: str = "") -> Setting:
    product = changed(problem(4096, 4096, 4096), checked=checked)
    return Setting(product, machine, Layouts(x, x, x), BUDGETS)


@pytest.mark.parametrize(
    ("layout", "operand", "checked", "route"),
    [
        (FILE, "A", "", Slotted(FILE)),
        (FILE, "A", "device", Slotted(FILE, digests=True)),
        (CACHED, "A", "", Ringed(CACHED)),
        (CACHED, "C", "", Slotted(CACHED)),  # writes to files go through slots
        (CACHED, "A", "device", Slotted(CACHED, digests=True)),
        (ARRAY, "A", "", Ringed(ARRAY)),
        (ARRAY, "A", "device", Ringed(ARRAY)),
        (ARRAY, "A", "host", Slotted(ARRAY)),
        (ARRAY, "C", "device", Slotted(ARRAY)),
        (PINNED, "B", "", Direct(PINNED)),
        (PINNED, "C", "", Direct(PINNED)),
    ],
)
def test_routes_of_a_gpu(layout: Layout, operand: str, checked: str, route: Route) -> None:
    assert setting(layout, checked=checked).routes[operand] == route


def test_a_cpu_multiplies_in_place_or_from_slots() -> None:
    placed = InMemory(in_place=True)
    assert setting(placed, HOST).routes == {x: InPlace(placed) for x in "ABC"}
    assert setting(ARRAY, HOST).routes == {x: Slotted(ARRAY) for x in "ABC"}
    assert setting(CACHED, HOST).routes["A"] == Slotted(CACHED)


def test_a_gpu_decodes_and_encodes_what_the_plan_says() -> None:
    coding = Coding("blosc-zstd", 1 << 18, 0.2)
    given = setting(PACKED)
    found = replace(given, layouts=given.layouts.decoded("B", coding).encoded(coding)).routes
    assert found["A"] == given.routes["A"] == Slotted(PACKED)
    assert found["B"] == Decoded(PACKED.changed(page_cached=True), coding)
    assert isinstance(found["C"], Encoded)


@pytest.mark.parametrize("layout", [FILE, CACHED, ARRAY, PINNED])
def test_only_reads_into_host_slots_take_time(layout: Layout) -> None:
    given = setting(layout)
    prices, streams = Prices(given), given.routes["A"].streams
    assert (prices.rate("read", "A", 1024, 1024) == INSTANT) is streams
    # The host stages blocks, unless they are in its slots already or the device copies them by itself.
    assert (prices.staged("A", 1024, 1024) > 0) is (layout in (CACHED, ARRAY))
    assert (prices.staged("A", 1024, 16) > 0) is streams
    assert (ring_shape(given) is not None) is any(x.rings for x in given.routes.values())
