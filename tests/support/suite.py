"""Reduce the quick test suite: fewer examples of properties, and no slow cases. `--all` runs all of them."""

from collections.abc import Container, Iterable, Sequence
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
