"""Centers that are subtracted from the exact product of int8: a correction of rank one."""

import shutil
from ctypes import c_longlong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import Transform
from oocgemm.errors import InputError
from oocgemm.planning import Op
from tests.support.backends_here import BACKENDS, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.native import launcher
from tests.support.suite import examples
from tests.support.unfinished_runs import failing_after

TRIANGLES: dict[str, Any] = {"lower": np.tril, "upper": np.triu, "full": np.asarray}


@given(
    data=st.data(),
    m=st.integers(0, 40),
    n=st.integers(0, 40),
    k=st.integers(0, 40),
    tile=st.sampled_from([None, "16x16x8", "33x20x30"]),
    beta=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=12), deadline=None)
def test_centers_are_subtracted_exactly_from_products_of_int8(
    data: st.DataObject, m: int, n: int, k: int, tile: str | None, beta: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    trans_a, trans_b = (data.draw(st.sampled_from([Op.N, Op.T]), x) for x in "AB")
    a, b = rng.integers(-3, 4, (m, k)).astype(np.int8), rng.integers(-3, 4, (k, n)).astype(np.int8)
    both, wide = dict[str, Any](), []
    for name, x, along in (("transform_a", a, (1, -1)), ("transform_b", b, (-1, 1))):
        center: Any = data.draw(st.sampled_from([None, rng.integers(-9, 9, k), rng.integers(-9, 9, k) / 4]))
        code = data.draw(st.sampled_from([None, -3]), name)
        if center is not None or code is not None:
            both[name] = Transform(missing=code, impute=0, center=center, cast="int8")
        kept = np.where(x == code, 0.0, x) if code is not None else x.astype(np.float64)
        wide.append(kept if center is None else kept - np.reshape(center, along))
    old = rng.integers(-5, 5, (m, n)).astype(np.float64)
    corrects = any(change.corrects for change in both.values())
    c = old.copy() if corrects else old.astype(np.int32)
    options: Any = {"trans_a": trans_a, "trans_b": trans_b, "alpha": 2, "beta": beta, **both}
    a, b = a.T if trans_a.swaps else a, b.T if trans_b.swaps else b
    if data.draw(st.booleans(), "on the host"):
        oocgemm.gemm(a, b, c, backend="host", tile=tile, **options)
    else:
        with fake_cuda(seed) as device:
            oocgemm.gemm(a, b, c, backend="cuda", tile=tile, **options)
            device.check()
    np.testing.assert_array_equal(c, 2 * (wide[0] @ wide[1]) + beta * old)
    checked = oocgemm.verify(a, b, c, c_before=old.astype(c.dtype) if beta else None, **options)
    assert checked, checked.message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, "32x32x64"])
def test_a_centred_gram_matrix_of_int8_has_the_precision_of_float64(backend: str, tile: str | None) -> None:
    x = np.random.default_rng(9).binomial(2, 0.3, (90, 400)).astype(np.int8)
    z = x - x.mean(0)
    change = Transform(center="k", cast="int8")
    for uplo, kept in TRIANGLES.items():
        with running_on(backend) as options:
            found = oocgemm.gram(x, uplo=uplo, transform=change, tile=tile, alpha=1 / 400, **options)
        assert (found.out.dtype, found.plan.problem.expanded_itemsize) == (np.float64, 0)
        np.testing.assert_allclose(kept(found.out), kept(z @ z.T / 400), atol=1e-13)
        if uplo == "full":
            np.testing.assert_array_equal(found.out, found.out.T)
    small = np.iinfo(np.int8).max * np.ones((3, 200), np.int8)
    np.testing.assert_array_equal(oocgemm.gram(small, transform=change, backend="host").out, 0)


def test_a_correction_is_part_of_the_identity_and_of_the_footprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(9).binomial(2, 0.3, (48, 64)).astype(np.int8)
    zarr.create_array("x", data=x, chunks=(16, 16))
    change = Transform(center="k", cast="int8")
    options: Any = {"backend": "host", "tile": "16x16x16"}
    right = oocgemm.gram("x", "right", transform=change, **options)
    assert right.plan.footprint.device["transform"] >= 2 * 8 * 48
    with failing_after(2), pytest.raises(oocgemm.ExecutionError):
        oocgemm.gram("x", "c", transform=change, **options)
    with pytest.raises(InputError, match="elements_a is  and was correct cols streamed k"):
        oocgemm.gram("x", "c", resume=True, out_dtype="float64", **options)
    other = Transform(center=x.mean(0) + 1, cast="int8")
    with pytest.raises(InputError, match=r"the transform of A is center=64 numbers .* and was center=k"):
        oocgemm.gram("x", "c", resume=True, transform=other, **options)
    resumed = oocgemm.gram("x", "c", resume=True, transform=change, **options)
    assert len(resumed.plan.done) == 2
    np.testing.assert_array_equal(resumed.out[:], right.out[:])
    np.testing.assert_array_equal(
        oocgemm.gram("x", transform=change, verify=True, **options).out, right.out[:]
    )
    with pytest.raises(InputError, match="C cannot have dtype int32: centers are subtracted"):
        oocgemm.gram("x", transform=change, out_dtype="int32", **options)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_kernel_subtracts_a_matrix_of_rank_one() -> None:
    run = launcher("rank_one", "rank_one", ())
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (7, 130), (130, 7)):
        c, rows, cols = rng.integers(-9, 9, shape).astype(float), rng.random(shape[0]), rng.random(shape[1])
        found = c.copy()
        pointers = [c_void_p(x.ctypes.data) for x in (rows, cols, found)]
        run((2, 1, 1), (256, 1, 1), c_longlong(c.size), c_longlong(shape[1]), *pointers)
        np.testing.assert_array_equal(found, c - rows[:, None] - cols)
