"""The quick suite keeps cases with all pairs of values."""

from itertools import combinations, product

import pytest

from tests.support.suite import sample


@pytest.mark.parametrize(("extents", "most"), [((2, 2, 2), 5), ((3, 4, 5), 25), ((2, 3, 2, 4), 16)])
def test_few_cases_hold_all_pairs_of_values(extents: tuple[int, ...], most: int) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, extents))]
    kept = sample(cases)
    assert len(kept) <= most
    for one, other in combinations("abcd"[: len(extents)], 2):
        assert {(cases[i][one], cases[i][other]) for i in kept} == {
            (case[one], case[other]) for case in cases
        }


def test_fewer_cases_hold_all_values() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(7)]
    kept = [cases[number] for number in sample(cases, 1)]
    assert len(kept) == 7
    assert {case["a"] for case in kept} == set(range(3))
