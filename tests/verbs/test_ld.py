"""Correlations of near variants, equal to NumPy's on every executor."""

import random
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.jobs import output
from oocgemm.jobs.windows import Places
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.plink import write_bed
from tests.support.suite import examples

RNG = np.random.default_rng(14)
GENOTYPES = RNG.integers(0, 3, (40, 90)).astype(np.int8)
Array = Any


def coefficients(x: Array) -> Array:
    """Return plink's r of each pair of columns: Pearson's correlations of dosages, one by one."""
    z = x - x.mean(axis=0, dtype=np.float64)
    r = np.full((x.shape[1],) * 2, np.nan)
    for i, j in np.ndindex(r.shape):
        squares = (z[:, i] ** 2).sum() * (z[:, j] ** 2).sum()
        r[i, j] = (z[:, i] * z[:, j]).sum() / np.sqrt(squares) if squares else np.nan
    return r


def near(chromosomes: Array, positions: Array, window: float) -> Array:
    """Return which pairs of variants are on one chromosome and within the window, the later one second."""
    later = np.triu(np.ones((len(positions),) * 2, bool), 1)
    return later & (chromosomes[:, None] == chromosomes) & (positions - positions[:, None] <= window)


def dense(found: oocgemm.LD, fill: float = np.nan) -> Array:
    count = len(found.indptr) - 1
    c = np.full((count, count), fill)
    c[np.repeat(np.arange(count), np.diff(found.indptr)), found.indices] = found.r
    return c


@given(data=st.data(), variants=st.integers(2, 40), seed=st.integers(0, 999))
@settings(max_examples=examples(150, quick=40), deadline=None)
def test_pairs_are_those_of_a_loop(data: st.DataObject, variants: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 3, (data.draw(st.integers(2, 20)), variants)).astype(
        data.draw(st.sampled_from(["int8", "float32", "float64"]))
    )
    chromosomes = np.sort(rng.integers(0, data.draw(st.integers(1, 4)), variants))
    positions = rng.integers(0, 3000, variants)[np.lexsort((rng.random(variants), chromosomes))]
    positions = positions[np.lexsort((positions, chromosomes))]
    unit = data.draw(st.sampled_from(["variants", "kb", "cm"]))
    window = data.draw(st.one_of(st.none(), st.integers(0, 45)))
    options: Any = {"window": window, "unit": unit, "chromosomes": chromosomes, "backend": "host"}
    at: Array = np.arange(variants)
    if unit != "variants":
        at = positions if unit == "kb" else positions / 100
        options["positions"] = at
    reach = np.inf if window is None else window * (1000 if unit == "kb" else 1)
    min_r2 = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    options["tile"] = data.draw(st.sampled_from([None, "3x3x4", "8x8x30", "16x16x7"]))
    constant = x.min(axis=0) == x.max(axis=0)
    options["constant"] = "drop" if constant.any() else "raise"
    if constant.all():
        with pytest.raises(oocgemm.InputError, match="equal elements"):
            oocgemm.ld(x, **options)
        return
    r, used = coefficients(x), near(chromosomes, at, reach)
    if unit == "variants":  # variants that are left out do not count
        number = np.cumsum(~constant)
        used = near(chromosomes, number, reach)
    used &= ~(constant[:, None] | constant)
    with pytest.warns(oocgemm.DataWarning) if constant.any() else nullcontext():
        found = oocgemm.ld(x, min_r2=min_r2, verify=True, **options)
        scores = oocgemm.ld_scores(x, **options | {"window": 3 if window is None else window})
    right = np.where(used, r, np.nan)
    sure = abs(np.nan_to_num(right) ** 2 - min_r2) > 1e-9
    c = dense(found)
    kept = np.where(used & (np.nan_to_num(r) ** 2 >= min_r2), right, np.nan)
    np.testing.assert_allclose(c[sure], kept[sure], atol=2e-6)
    assert np.isnan(c[~used]).all()
    assert all((np.diff(found.indices[a:b]) > 0).all() for a, b in pairwise(found.indptr))
    if window is not None:
        both = np.where(used | used.T, r, 0)
        np.testing.assert_allclose(scores.scores[~constant], ((both**2).sum(1) + 1)[~constant], rtol=1e-5)
        assert np.isnan(scores.scores[constant]).all()


@given(
    positions=st.lists(st.floats(0, 300, allow_subnormal=False), min_size=1, max_size=40),
    window=st.floats(0, 9),
)
@settings(max_examples=examples(300), deadline=None)
def test_the_difference_of_positions_decides(positions: list[float], window: float) -> None:
    at = np.sort(positions)
    at = np.sort(np.append(at, at + window))
    firsts = Places(np.zeros(len(at), np.int64), at, window).firsts()
    np.testing.assert_array_equal(firsts, ((at[:, None] - at) <= window).argmax(axis=1))


@pytest.mark.parametrize("how", ["host", "0,0", "0,0,0", "cuda", "cuda 0,0"])
def test_every_executor_finds_the_same_pairs(how: str, tmp_path: Path) -> None:
    x = RNG.standard_normal((30, 70)).astype(np.float32)
    positions, r = np.sort(RNG.integers(0, 9000, 70)), np.corrcoef(x.T)
    options: Any = {"window": 2, "unit": "kb", "positions": positions, "min_r2": 0.02, "tile": "8x8x16"}
    devices = how.rpartition(" ")[2]
    options["devices"] = devices if "," in devices else None
    if "cuda" in how:
        with fake_cuda():
            found = oocgemm.ld(x, backend="cuda", kernel="cublas", verify=True, **options)
    else:
        found = oocgemm.ld(x, backend="host", verify=True, **options)
    wanted = near(np.zeros(70), positions, 2000) & (r * r >= 0.02)
    np.testing.assert_allclose(dense(found), np.where(wanted, r, np.nan), atol=1e-6)
    assert found.r.dtype == np.float32


@pytest.mark.parametrize("devices", [None, "0,0"])
def test_integers_are_multiplied_as_they_are_on_a_gpu(devices: str | None, tmp_path: Path) -> None:
    x = RNG.integers(-1, 3, (50, 80)).astype(np.int8)
    x[:, 7] = 1
    x[:, 40] = x[:, 41]
    options: Any = {"window": 9, "tile": "16x16x20", "constant": "drop", "devices": devices}
    options |= {"backend": "cuda", "kernel": "cublas", "verify": True}
    with fake_cuda():
        with pytest.warns(oocgemm.DataWarning, match="left out"):
            found = oocgemm.ld(x, min_r2=0.02, **options)
        with pytest.warns(oocgemm.DataWarning, match="left out"):
            scores = oocgemm.ld_scores(x, **options)
    assert found.run.plan.problem.exact
    assert found.r.dtype == np.float32
    used = np.delete(np.arange(80), 7)
    r = coefficients(x[:, used])
    wanted = near(np.zeros(79), np.arange(79), 9)
    right = np.full((80, 80), np.nan)
    right[np.ix_(used, used)] = np.where(wanted & (r * r >= 0.02), r, np.nan)
    np.testing.assert_array_equal(dense(found), right.astype(np.float32))
    np.testing.assert_allclose(
        scores.scores[used], 1 + (np.where(wanted | wanted.T, r, 0) ** 2).sum(1), rtol=1e-12
    )


def test_equal_genotypes_are_refused_on_a_gpu() -> None:
    x = GENOTYPES.copy()
    x[:, 3] = 1
    with (
        fake_cuda(),
        pytest.raises(oocgemm.InputError, match=r"1 of 90 columns of X has equal elements \(3\)"),
    ):
        oocgemm.ld(x, window=4, backend="cuda", kernel="cublas")


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_perfectly_correlated_variants_are_kept(backend: str) -> None:
    x = np.repeat(RNG.integers(0, 3, (53, 20)).astype(np.int8), 3, axis=1)
    x[:, 1::3] = 2 - x[:, 1::3]
    with fake_cuda():
        found = oocgemm.ld(x, window=2, min_r2=1.0, backend=backend, verify=True)
    assert np.diff(found.indptr).tolist() == [2, 1, 0] * 20
    assert found.r.tolist() == [-1, 1, -1] * 20


@pytest.mark.parametrize("kind", ["int8", "float32"])
@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_other_elements_than_genotypes_are_compared(backend: str, kind: str) -> None:
    x = (
        (RNG.integers(-127, 128, (1500, 30)) + 20 * RNG.integers(-3, 4, (1500, 1)))
        .clip(-127, 127)
        .astype(kind)
    )
    with fake_cuda():
        found = oocgemm.ld(x, window=30, min_r2=0.01, backend=backend, verify=True)
    r = coefficients(x)
    wanted = near(np.zeros(30), np.arange(30), 30) & (r * r >= 0.01)
    np.testing.assert_allclose(dense(found), np.where(wanted, r, np.nan), atol=1e-6)


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_pairs_are_compared_by_the_individuals_that_both_know(backend: str, tmp_path: Path) -> None:
    x = RNG.integers(-1, 3, (40, 30)).astype(np.int8)
    x[:, 4] = np.where(np.arange(40) < 3, [0, 1, -1][0], -1)
    r = np.full((30, 30), np.nan)
    for i, j in np.ndindex(30, 30):
        both = (x[:, i] >= 0) & (x[:, j] >= 0)
        pair = x[both][:, [i, j]].astype(float)
        if len(pair) and (pair.std(axis=0) > 0).all():
            r[i, j] = np.corrcoef(pair.T)[0, 1]
    wanted = near(np.zeros(30), np.arange(30), 9) & (r * r >= 0.02)
    nan = np.where(x < 0, np.nan, x).astype(np.float32)
    for operand in (str(write_bed(tmp_path / "x.bed", x)), nan):
        with fake_cuda():
            found = oocgemm.ld(operand, window=9, min_r2=0.02, pairwise=True, backend=backend)
        np.testing.assert_allclose(dense(found), np.where(wanted, r, np.nan), atol=1e-6)
    with pytest.raises(oocgemm.InputError, match="'drop' is about whole variants"):
        oocgemm.ld(nan, window=9, pairwise=True, constant="drop", backend="host")


def test_only_tiles_with_a_pair_in_the_window_are_computed() -> None:
    x, positions = np.zeros((20, 640)), np.arange(640) * 10
    positions[320:] += 10**9
    options: Any = {"unit": "kb", "positions": positions, "tile": "16x16x20", "backend": "host"}
    plan = oocgemm.ld(x, window=0.1, dry_run=True, **options)
    assert plan.steps == 2 * (20 * 2 - 1)
    assert "lower windows" in str(plan)
    assert len(str(plan)) < 700
    assert oocgemm.ld_scores(x, window=0.1, dry_run=True, **options).steps == 2 * (20 * 3 - 2)
    assert oocgemm.ld(x, window=10, tile="16x16x20", backend="host", dry_run=True).steps == 40 * 2 - 1
    every = oocgemm.ld(x, tile="16x16x20", backend="host", dry_run=True)
    assert every.steps == 40 * 41 // 2


def test_a_stored_result_is_an_operand(tmp_path: Path) -> None:
    path = tmp_path / "ld.zarr"
    found = oocgemm.ld(GENOTYPES, window=9, min_r2=0.01, out=path, backend="host")
    group: Any = zarr.open_group(path)
    assert dict(group.attrs) == {
        "encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [90, 90],
    }  # fmt: skip
    assert (group["indptr"].dtype, group["indices"].dtype) == (np.int64, np.int64)
    c = dense(found, 0.0)
    product = oocgemm.matmul(str(path), np.eye(90, dtype=np.float32), backend="host")
    np.testing.assert_array_equal(np.asarray(product), c.astype(np.float32))
    with pytest.raises(oocgemm.InputError, match="something exists"):
        oocgemm.ld(GENOTYPES, window=9, out=path, backend="host")
    scipy = pytest.importorskip("scipy.sparse")
    assert isinstance(found.to_scipy(), scipy.csr_matrix)
    np.testing.assert_array_equal(found.to_scipy().toarray(), c)


@pytest.mark.parametrize("kind", ["int8", "float32"])
def test_pairs_that_do_not_fit_in_memory_are_stored(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = GENOTYPES.astype(kind)
    x[:, 5] = 1
    x[:, 31] = x[:, 30]
    options: Any = {"window": 20, "min_r2": 0.02, "constant": "drop", "tile": "16x16x40", "backend": "host"}
    with pytest.warns(oocgemm.DataWarning, match="left out"):
        right = oocgemm.ld(x, **options)
    monkeypatch.setattr(output, "SPARSE_SHARE", 1e-9)
    with (
        pytest.warns(oocgemm.DataWarning, match="left out"),
        pytest.raises(oocgemm.ExecutionError, match="pass out, a larger min_r2, or a smaller window"),
    ):
        oocgemm.ld(x, **options)
    with pytest.warns(oocgemm.DataWarning, match="left out"):
        found = oocgemm.ld(x, out=tmp_path / "ld.zarr", verify=True, **options)
    assert isinstance(found.r, zarr.Array)
    np.testing.assert_array_equal(found.indptr, right.indptr)
    np.testing.assert_array_equal(found.indices[:], right.indices)
    np.testing.assert_array_equal(found.r[:], right.r)
    assert [path.name for path in tmp_path.iterdir()] == ["ld.zarr"]


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Kill 20 runs, most of them while they store pairs. The next run needs no cleaning up."""
    x = np.random.default_rng(3).integers(0, 3, (50, 4000)).astype(np.int8)
    np.save(tmp_path / "x.npy", x)
    out, unfinished = tmp_path / "ld.zarr", tmp_path / "ld.zarr.unfinished"
    given = f"{str(tmp_path / 'x.npy')!r}, window=900, out={str(out)!r}, backend='host'"
    call = f"import oocgemm; oocgemm.ld({given})"
    right, delays, killed = oocgemm.ld(x, window=900, backend="host"), random.Random(5), 0
    for number in range(20):
        run = subprocess.Popen([sys.executable, "-c", call])
        while run.poll() is None and not unfinished.exists() and not out.exists() and number % 5:
            time.sleep(0.0005)
        time.sleep(delays.uniform(0, 0.05 if number % 5 else 1.5))
        killed += run.poll() is None
        run.kill()
        run.wait()
        if out.exists():
            group: Any = zarr.open_group(out)
            np.testing.assert_array_equal(group["data"][:], right.r)
            np.testing.assert_array_equal(group["indices"][:], right.indices)
            np.testing.assert_array_equal(group["indptr"][:], right.indptr)
            shutil.rmtree(out)
    assert killed >= 15
    oocgemm.ld(x, window=900, out=out, backend="host")
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("min_r2 = 1.5 is not a squared correlation", {"min_r2": 1.5}),
        ("min_r2 = True is not", {"min_r2": True}),
        ("window = -1 is not a number of variants", {"window": -1}),
        ("axis = 2", {"axis": 2}),
        ("ld.npy file|several arrays in a zarr group", {"out": "ld.npy"}),
        ("does not take the option resume", {"resume": True}),
    ],
)
def test_wrong_options_are_named(message: str, options: Any) -> None:
    with pytest.raises(oocgemm.InputError, match=message):
        oocgemm.ld(GENOTYPES, backend="host", **options)


def test_a_bim_file_gives_chromosomes_and_positions(tmp_path: Path) -> None:
    x = RNG.integers(-1, 3, (40, 30)).astype(np.int8)
    write_bed(tmp_path / "x.bed", x)
    names, at = np.repeat(["1", "chrX"], 15), np.tile(np.arange(15) * 400, 2)
    lines = (
        f"{name}\tv{i}\t{p / 1e4}\t{p}\tA\tC\n" for i, (name, p) in enumerate(zip(names, at, strict=True))
    )
    (tmp_path / "x.bim").write_text("".join(lines))
    known = np.ma.masked_equal(x, -1)
    filled = np.where(x < 0, known.mean(axis=0), x)
    r = np.corrcoef(filled.T)
    wanted = near(names, at, 1000) & (r * r >= 0.01)
    out, scores = tmp_path / "ld.zarr", tmp_path / "l2.npy"
    words = "ld", tmp_path / "x.bed", out, "--window", "1", "--unit", "kb", "--min-r2", "0.01"
    shown = command(*words, "--backend", "host", "--dry-run")
    assert (shown.code, "lower windows" in shown.out) == (0, True), shown.err
    shown = command(*words, "--backend", "host", "--scores", scores)
    assert shown.code == 0, shown.err
    group: Any = zarr.open_group(out)
    c = np.full(r.shape, np.nan)
    c[np.repeat(np.arange(30), np.diff(group["indptr"][:])), group["indices"][:]] = group["data"][:]
    np.testing.assert_allclose(c, np.where(wanted, r, np.nan), atol=1e-6)
    both = near(names, at, 1000)
    np.testing.assert_allclose(np.load(scores), (np.where(both | both.T, r, 0) ** 2).sum(1) + 1, rtol=1e-5)
    found = oocgemm.ld(str(tmp_path / "x.bed"), window=0.1, unit="cm", min_r2=0.01, backend="host")
    np.testing.assert_array_equal(~np.isnan(dense(found)), ~np.isnan(c))
    (tmp_path / "x.bim").write_text("".join(f"1\tv{i}\t0\t{i}\tA\tC\n" for i in range(30)))
    with pytest.raises(oocgemm.InputError, match=r"centimorgans.*column 3"):
        oocgemm.ld(str(tmp_path / "x.bed"), window=1, unit="cm", backend="host")
    (tmp_path / "x.bim").write_text("1\tv\tx\t7\tA\tC\n" * 30)
    with pytest.raises(oocgemm.InputError, match="line 1 of"):
        oocgemm.ld(str(tmp_path / "x.bed"), window=1, unit="kb", backend="host")
