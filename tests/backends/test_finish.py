"""Finish on the host applies alpha, beta and the cast to C's dtype, exactly and in bounded memory.

The number of Python steps does not depend on the shape.
"""

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.backends.base import known_dtypes, numpy_dtype
from oocgemm.backends.host.finish import finish
from oocgemm.errors import ExecutionError
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE, MIN_FINISH_PIECE
from tests.support.problems import Array
from tests.support.suite import each_value

COUNT = 2 * FINISH_PIECE + 77
SHAPES = [(COUNT, 1), (1, COUNT), (COUNT // 3, 3)]
RESULTS = {"float32": ["float16", "float32"], "float64": ["int32", "int64", "float32", "float64"]}
if "bfloat16" in known_dtypes():
    RESULTS["float32"].append("bfloat16")


def workspace(dtype: str, elements: int = FINISH_PIECE) -> Array:
    return np.empty(FINISH_ARRAYS * elements * np.dtype(dtype).itemsize, np.uint8)


def strips(shape: tuple[int, int], sums: str, c_dtype: str) -> tuple[Array, Array]:
    """Return sums and an old C. Some sums are nonfinite, if C can store that."""
    rng = np.random.default_rng(0)
    held = rng.integers(-(2**20), 2**20, shape).astype(sums)
    if not c_dtype.startswith("int"):
        held *= rng.standard_normal(shape).astype(sums)
        held.reshape(-1)[[3, 70, shape[0] * shape[1] - 1]] = np.nan, np.inf, -np.inf
    return held, rng.integers(-100, 100, shape).astype(numpy_dtype(c_dtype))


@each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("sums", "c_dtype"), [(acc, c) for acc, found in RESULTS.items() for c in found])
@pytest.mark.parametrize("beta", [0, 3, -0.7])
@pytest.mark.parametrize("room", [FINISH_PIECE, 100])
def test_a_finished_strip_is_that_of_the_formula(
    shape: tuple[int, int], sums: str, c_dtype: str, beta: float, room: int
) -> None:
    """Results are equal bit for bit.

    Operations round to the dtype of the sums, and the cast rounds to C's.
    """
    if c_dtype.startswith("int"):
        beta = round(beta)
    held, result = strips(shape, sums, c_dtype)
    kind = np.dtype(sums).type
    with np.errstate(all="ignore"):
        wanted = kind(-3) * held
        if beta:
            wanted += kind(beta) * result.astype(sums)
        expected = wanted.astype(result.dtype)
    finish(held, -3, beta, result, workspace(sums, room))
    np.testing.assert_array_equal(result.view(np.uint8), expected.view(np.uint8))


def test_an_integer_that_c_cannot_hold_is_found_in_any_piece() -> None:
    for at in (0, FINISH_PIECE, COUNT - 1):
        held, result = strips((COUNT, 1), "float64", "int32")
        held[at] = 2.0**31
        with pytest.raises(ExecutionError, match="int32 holds"):
            finish(held, 1, 0, result, workspace("float64"))


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of Python a call executes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(("sums", "c_dtype"), [("float64", "int32"), ("float32", "float16")])
def test_a_tall_strip_takes_the_steps_of_a_wide_one(sums: str, c_dtype: str) -> None:
    counts = []
    for shape in SHAPES[:2]:
        held, result = strips(shape, sums, c_dtype)
        counts.append(lines_run(partial(finish, held, 1, 2, result, workspace(sums))))
    assert counts[0] == counts[1]


def test_finishing_a_wide_strip_takes_no_memory_of_its_width() -> None:
    held, result = np.ones((1, 1 << 20)), np.zeros((1, 1 << 20), np.int32)
    room = workspace("float64")
    tracemalloc.start()
    try:
        finish(held, 2, 3, result, room)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < held.nbytes / 16


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_the_device_budget_covers_the_temporaries(dtype: str) -> None:
    """The device budget includes the temporary arrays of Finish, for deep panels and for k = 0."""
    for k in (0, 1, 300):
        plan = oocgemm.plan(
            np.ones((70, k), dtype), np.ones((k, 50), dtype), backend="host", tile="70x50x300"
        )
        itemsize = plan.problem.itemsizes["acc"]
        assert plan.footprint.device["work"] >= FINISH_ARRAYS * MIN_FINISH_PIECE * itemsize
