"""Reduce the quick test suite: fewer examples of properties, and no slow cases. `--all` runs all of them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL = 100  # examples in hypothesis's default profile
MIN_EXAMPLES = 5


def examples(count: int) -> int:
    """Return how many of `count` examples to try, in proportion to the loaded hypothesis profile."""
    return min(count, max(MIN_EXAMPLES, count * settings().max_examples // ALL))


def slow(*cases: Sequence[Any]) -> list[Any]:
    """Mark cases of a parametrised test as slow, so that only `--all` runs them."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
