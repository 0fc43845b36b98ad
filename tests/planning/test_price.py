"""What operations cost on the modelled machine."""

import pytest

from oocgemm.planning import Budgets, Layouts, Op, Setting, default_model
from oocgemm.planning.cost.price import Prices
from tests.support.plan_cases import GIB, problem
from tests.support.products import changed


@pytest.mark.parametrize(("op", "least", "most"), [(Op.N, 1.4, 2.0), (Op.T, 1.0, 1.3)])
def test_strips_of_int8_copy_panels_of_b_that_are_not_contiguous_along_k(
    op: Op, least: float, most: float
) -> None:
    p = changed(problem(13_112, 16_384, 32_768, "int8"), trans_b=op)
    prices = Prices(Setting(p, default_model("cuda", 16), Layouts(), Budgets(GIB, GIB)))
    strip, whole = (prices.multiply(rows, 13_112, 16_384, 32_768) for rows in (1408, 13_112))
    assert least < strip / whole * 13_112 / 1408 < most
