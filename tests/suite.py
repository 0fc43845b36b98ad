"""The size of properties: all examples with `--all`, fewer in the quick suite."""

from hypothesis import settings

ALL = 100  # examples of hypothesis's default profile
MIN_EXAMPLES = 5


def examples(count: int) -> int:
    """Return how many of `count` examples to try, in proportion to the profile that conftest has loaded."""
    return min(count, max(MIN_EXAMPLES, count * settings().max_examples // ALL))
