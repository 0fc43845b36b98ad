"""Lower bounds on the time of candidates are not above the times that the virtual clock predicts.

Bounds count panels at the edges by their bytes, so that they may be above by a fraction of a percent.
"""

from hypothesis import given, settings

from oocgemm.planning import Candidate, Setting
from oocgemm.planning.cost.bound import bound, shape_bound
from oocgemm.planning.cost.clock import predict
from oocgemm.planning.cost.price import Prices
from tests.planning.test_clock import runs
from tests.support.suite import examples


@settings(max_examples=examples(300, quick=30))
@given(runs())
def test_no_run_is_faster_than_its_bound(run: tuple[Setting, Candidate]) -> None:
    setting, candidate = run
    prices = Prices(setting)
    seconds = predict(setting, candidate, prices).total * 1.01
    assert shape_bound(prices, candidate.tile) <= seconds
    assert bound(prices, candidate) <= seconds
