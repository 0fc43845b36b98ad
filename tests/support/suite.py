"""Reduce the quick test suite: fewer examples of properties, fewer combinations of parameters, no slow cases.

`--all` runs all of them.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings

ALL = 100  # examples in hypothesis's default profile
MIN_EXAMPLES = 5


def examples(count: int, quick: int | None = None) -> int:
    """Return how many of `count` examples to try, in proportion to the loaded hypothesis profile.

    `quick` is the number for the quick suite, if the proportion would be too many or too few.
    """
    share = settings().max_examples
    if quick is not None and share < ALL:
        return quick
    return min(count, max(MIN_EXAMPLES, count * share // ALL))


def slow(*cases: Sequence[Any]) -> list[Any]:
    """Mark cases of a parametrised test as slow, so that only `--all` runs them."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def thinned(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Mark the values of one parameter as slow, except those in `quick`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


# The quick suite runs few cases of such a test, in which each value of each parameter occurs.
each_value = pytest.mark.each_value


def leave_samples(items: Iterable[pytest.Item]) -> None:
    """Mark combinations of parameters as slow, except a sample.

    The sample of a test with three or more parameters has all pairs of their values. Arguments that one
    `parametrize` lists together are one parameter. That of a test with the mark `each_value` has all values.
    """
    by_test = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        # Tests on a GPU are skipped without one, so they stand for no others.
        marked = any(item.iter_markers("slow")) or any(item.iter_markers("gpu"))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not marked:
            by_test[item.nodeid.partition("[")[0]].append(item)
    for items_of_test in by_test.values():
        cases = [_values(item) for item in items_of_test]
        together = 1 if any(items_of_test[0].iter_markers("each_value")) else 2
        if len(cases[0]) > together:
            for number in set(range(len(cases))) - sample(cases, together):
                items_of_test[number].add_marker(pytest.mark.slow)


def _values(item: pytest.Function) -> dict[str, Any]:
    """Return what identifies the value of each parameter of a test."""
    values: dict[str, Any] = {name: id(value) for name, value in item.callspec.params.items()}
    listed = (mark.args[0] for mark in item.iter_markers("parametrize"))
    together = [names.replace(",", " ").split() if isinstance(names, str) else names for names in listed]
    for names in together:
        values[" ".join(names)] = tuple(values.pop(name) for name in names)
    return values


def sample(cases: Sequence[dict[str, Any]], together: int = 2) -> set[int]:
    """Return the numbers of few cases in which any `together` values occur that occur together in any case.

    The choice is greedy: next is the case with the most that is new, the first one of several.
    """
    found = [set(combinations(sorted(case.items()), together)) for case in cases]
    missing = set().union(*found)
    kept = set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(found[number] & missing), -number))
        kept.add(best)
        missing -= found[best]
    return kept
