"""Contractions of arrays of any number of dimensions, beside those of NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from tests.support.suite import examples

rng = np.random.default_rng(0)
A, B = rng.integers(-9, 10, (4, 5, 6)).astype("f8"), rng.integers(-9, 10, (6, 5, 3, 2)).astype("f8")


@st.composite
def contractions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, Any]]:
    """Draw the shapes of two arrays, and the axes of both that are summed."""
    summed = draw(st.lists(st.integers(1, 4), max_size=2))
    shapes, axes = [], []
    for _ in range(2):
        free = draw(st.lists(st.integers(1, 4), min_size=not summed, max_size=2))
        order = draw(st.permutations(range(len(summed) + len(free))))
        extents = [*summed, *free]
        shapes.append(tuple(extents[order.index(at)] for at in range(len(order))))
        axes.append(tuple(order[: len(summed)]))
    return shapes[0], shapes[1], (axes[0], axes[1])


@settings(max_examples=examples(40))
@given(contractions())
def test_any_axes_are_summed_as_numpy_does(
    drawn: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, Any]],
) -> None:
    a, b = (rng.integers(-9, 10, shape).astype("f8") for shape in drawn[:2])
    found = oocgemm.tensordot(a, b, drawn[2], backend="host")
    np.testing.assert_array_equal(found, np.tensordot(a, b, drawn[2]))


@pytest.mark.parametrize("axes", [((1, 2), (1, 0)), (2, 0), 1, 0, ((-1,), (0,))])
def test_stored_arrays_are_read_where_they_are(tmp_path: Path, axes: Any) -> None:
    a, b = f"{tmp_path}/a.zarr", f"{tmp_path}/b.zarr"
    zarr.create_array(a, data=A, chunks=(2, 5, 3))
    zarr.create_array(b, data=B, chunks=(6, 2, 3, 1))
    found = oocgemm.tensordot(a, b, axes, backend="host", memory="64MiB")
    np.testing.assert_array_equal(found, np.tensordot(A, B, axes))


def test_axes_have_names(tmp_path: Path) -> None:
    a, b = f"{tmp_path}/a.zarr", f"{tmp_path}/b.zarr"
    zarr.create_array(a, data=A, dimension_names=["t", "y", "x"])
    zarr.create_array(b, data=B, dimension_names=["x", "y", "p", "q"])
    found = oocgemm.tensordot(a, b, (("y", "x"), ("y", "x")), backend="host")
    np.testing.assert_array_equal(found, np.tensordot(A, B, ((1, 2), (1, 0))))


def test_all_axes_may_be_summed() -> None:
    assert oocgemm.tensordot(A, A, 3, backend="host") == np.tensordot(A, A, 3)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (2, r"\[-2, -1\] of A have the extents \[5, 6\], and \[0, 1\] of B \[6, 5\]: pass axes"),
        (-1, "axes = -1: pass 0 or more"),
        (((7,), (0,)), "A has 3 dimensions .* and no axis 7: pass names or positions"),
        (((1,), (1, 0)), r"\[5\], and \[1, 0\] of B \[5, 6\]: pass axes of equal extents"),
    ],
)
def test_axes_that_do_not_agree_are_refused(axes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.tensordot(A, B, axes, backend="host")
