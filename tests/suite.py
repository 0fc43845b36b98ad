"""What the quick suite leaves to `--all`: most examples of properties, and slow cases of tables."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL = 100  # examples of hypothesis's default profile
MIN_EXAMPLES = 5


def examples(count: int) -> int:
    """Return how many of `count` examples to try, in proportion to the profile that conftest has loaded."""
    return min(count, max(MIN_EXAMPLES, count * settings().max_examples // ALL))


def slow(*cases: Sequence[Any]) -> list[Any]:
    """Mark rows of a parametrised test as slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
