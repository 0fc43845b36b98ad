"""Results of small integers are those that `results.json` keeps, bit for bit."""

import json

from tests.nets.results import KEPT, integers, record


def test_results_of_small_integers_have_not_changed() -> None:
    kept = json.loads(KEPT.read_text())
    found = record(integers, "host", rounded=False)
    assert {name: one for name, one in found.items() if kept.get(name) != one} == {}
    assert [name for name in kept if name not in found] == []
