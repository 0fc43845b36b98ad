"""Products of arrays in random stores are those that NumPy computes from what independent readers find."""

from pathlib import Path

import pytest

from tests.support.store_cases import WARNINGS, run_all
from tests.support.suite import thinned

CASES, QUICK_CASES, BATCH = 2000, 50, 50


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("first", thinned(range(0, CASES, BATCH), range(QUICK_CASES)))
def test_products_of_random_stores_are_exact(tmp_path: Path, first: int) -> None:
    for error in run_all(range(first, first + BATCH), tmp_path):
        raise error
