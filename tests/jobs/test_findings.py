"""Passes over operands are made once, and their results are told apart by all arguments."""

from collections.abc import Callable

import numpy as np
import pytest

from oocgemm import Transform
from oocgemm.jobs.stats import Findings, keeping, once


@pytest.fixture
def calls() -> list[float]:
    return []


@pytest.fixture
def found(calls: list[float]) -> Callable[[Transform, int], np.ndarray]:
    @once
    def pass_over(change: Transform, memory: int) -> np.ndarray:
        total = float(np.sum(change.center))
        calls.append(total)
        return np.array([total])

    return pass_over


def test_long_arrays_are_told_apart_by_every_element(
    calls: list[float], found: Callable[[Transform, int], np.ndarray]
) -> None:
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1  # the text of such an array does not show it
    with keeping(Findings()):
        assert found(Transform(center=one), 1) == 0
        assert found(Transform(center=other), 1) == 1
        assert found(Transform(center=one.copy()), 2) == 0
    assert calls == [0, 1]


def test_a_caller_may_change_what_it_gets(found: Callable[[Transform, int], np.ndarray]) -> None:
    with keeping(Findings()):
        found(Transform(center=np.ones(3)), 1)[0] = 7
        assert found(Transform(center=np.ones(3)), 1) == 3
