"""How sinks say that results of different tiles become one."""

import pytest

from oocgemm.planning.sinks import DISJOINT, EXACT, ORDERED, REDUCTIONS, SINKS, Applied, Reduced, Stored


@pytest.mark.parametrize("kind", SINKS.values())
def test_only_sums_depend_on_the_order_of_tiles(kind: type) -> None:
    sums = kind in (Applied, Reduced)
    assert kind("float64").merge == (ORDERED if sums else DISJOINT if kind is Stored else EXACT)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_largest_elements_do_not_depend_on_the_order_of_tiles(reduction: str) -> None:
    assert Reduced("float64", reduction=reduction).merge == (EXACT if reduction == "max" else ORDERED)
