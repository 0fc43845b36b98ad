"""Emulated products are as accurate as native ones on difficult data.

This runs `scripts/bench/accuracy_emulated.py` on small matrices.
"""

import importlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.suite import slow

accuracy: Any = importlib.import_module("accuracy_emulated")
AGAINST, Size, error, judge, reference = (
    getattr(accuracy, name) for name in ("AGAINST", "Size", "error", "judge", "reference")
)

Array = NDArray[Any]


@pytest.mark.parametrize("dtype", ["float64", *slow(("float32",))])
@pytest.mark.parametrize(
    ("k", "tile"),
    # k in one step, and k in three steps.
    [(100, "40x33x100"), pytest.param(600, "40x33x200", marks=pytest.mark.slow)],
)
def test_no_kind_of_data_has_more_than_a_native_product_s_error(k: int, tile: str, dtype: str) -> None:
    # Checks of the emulated product have the tolerance of a native one.
    checked = {"emulated": True, "native": False}
    ways = (accuracy.streamed("host", how, tile=tile, verify=verify) for how, verify in checked.items())
    found = {one["data"]: one for one in judge(Size(40, 33, k, 10), dtype, *ways)}
    assert [name for name, one in found.items() if not one["bounded"]] == []
    assert {name for name, one in found.items() if not one["as_good"]} <= {AGAINST}
    # Such data may have more than twice the native error, but not far more.
    assert found[AGAINST]["error"] < 4
    natively = {name for name, one in found.items() if "natively" in str(one["multiplied by"])}
    assert {
        "inf",
        "nan",
        "one-hot",
        "along k, D and 1/D 2^60",
        "halves against 2^4",
        "lognormal 10",
    } <= natively
    assert {"normal", "rows and columns 2^60", f"huge and tiny rows in {dtype}"}.isdisjoint(natively)
    assert found["normal"]["error"] < found["normal"]["native"]


def test_what_measures_tells_errors() -> None:
    """The error of a result is measured correctly.

    The results are off by one unit in the last place, lack a value, or have an Inf or NaN too many or too
    few.
    """
    a, b = np.full((2, 16), 1.0), np.full((16, 3), 1.0)
    wanted = reference(a, b)
    c = a @ b
    assert error(c, *wanted) == 0
    assert error(np.nextafter(c, np.inf), *wanted) == pytest.approx(2, rel=1e-12)
    assert error(c * 0, *wanted) == pytest.approx(2.0**53)
    for value in (np.inf, np.nan):
        broken, a_broken = c.copy(), a.copy()
        broken[1, 2], a_broken[1, 2] = value, value
        assert error(broken, *wanted) == np.inf
        assert error(c, *reference(a_broken, b)) == np.inf
        assert error(np.where([[False], [True]], value, c), *reference(a_broken, b)) == 0


@pytest.mark.slow
def test_the_scalings_are_graded() -> None:
    """A product in fixed point that scales only rows of A and columns of B fails on the scaling along k."""

    def fixed(a: Array, b: Array) -> tuple[Array, list[str]]:
        cut = []
        for x, axis in ((a, 1), (b, 0)):
            low = np.frexp(np.abs(x).max(axis=axis, keepdims=True))[1] - 60
            cut.append(np.ldexp(np.rint(np.ldexp(x, -low)), low))
        return np.asarray(cut[0] @ cut[1]), []

    with np.errstate(all="ignore"):
        found = {
            one["data"]: one
            for one in judge(Size(20, 20, 100, 10), "float64", fixed, accuracy.streamed("host", "native"))
        }
    assert found["rows and columns 2^60"]["as_good"]
    for name in ("along k, D and 1/D 2^20", "halves against 2^20", "rows, columns, D and 1/D 2^40"):
        assert not found[name]["as_good"]
    assert not found["along k, D and 1/D 2^60"]["bounded"]


def test_every_kind_is_another() -> None:
    seen = [name for name, _, _ in accuracy.panels(Size(4, 5, 20, 2), "float32")]
    assert len(seen) == len(set(seen))
