"""Products of int8 matrices are exact. If a result does not fit its dtype, the run fails."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Budgets, GemmProblem, Op, default_model, make_plan
from oocgemm.planning.emulation import EXACT_LIMIT, MAX_FLOAT64_DEPTH, MAX_INT32_DEPTH, workspace_layout
from tests.support.backends_here import BACKENDS, ENGINES, Engine, running_on, staged
from tests.support.command import command, contents
from tests.support.problems import Array, applied, stored
from tests.support.products import changed, product_of
from tests.support.suite import each_value, examples

GENOTYPES = 3  # the number of values that a genotype can have: 0, 1 and 2


def numbers(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return random int8 values, of which -128 is more frequent."""
    x = rng.integers(-128, 128, shape, np.int8)
    x[rng.random(shape) < 0.2] = -128
    return x


def exact(a: Array, b: Array, op_a: Op = Op.N, op_b: Op = Op.N) -> Array:
    return np.asarray(applied(op_a, a.astype(np.int64)) @ applied(op_b, b.astype(np.int64)))


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_product_is_that_of_integers(engine: Engine, data: st.DataObject) -> None:
    """Vary transposes, extents, tiles, scalars and the dtype of C. C exists before the product."""
    m, n, k = (data.draw(st.integers(1, 70), x) for x in "mnk")
    op_a, op_b = (data.draw(st.sampled_from(list(Op))) for _ in "AB")
    out_dtype = data.draw(st.sampled_from(["int32", "int64", "float32", "float64"]))
    integer = out_dtype.startswith("int")
    scalars = st.sampled_from([1, 0, -3, 1000]) if integer else st.sampled_from([1, 0, -0.7, 1 / 3])
    alpha, beta = data.draw(scalars), data.draw(scalars)
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    a, b = numbers(rng, stored(op_a, m, k)), numbers(rng, stored(op_b, k, n))
    c = rng.integers(-(2**20), 2**20, (m, n)).astype(out_dtype)
    expected = alpha * exact(a, b, op_a, op_b) + (
        beta * c.astype(np.float64 if beta % 1 else np.int64) if beta else 0
    )
    if beta == 0:
        c[...] = np.iinfo(out_dtype).max if integer else np.nan
    # Small tiles would take too long on a fake GPU.
    extents = st.integers(24 if engine[0] == "fake-cuda" else 1, 75)
    tile = data.draw(st.none() | st.builds("{}x{}x{}".format, *(extents,) * 3))
    fits = not integer or np.abs(expected).max() <= np.iinfo(out_dtype).max
    with running_on(engine, seed=seed) as options:
        options |= {"alpha": alpha, "beta": beta, "trans_a": op_a, "trans_b": op_b, "tile": tile}
        options |= {"out_dtype": out_dtype}
        if not fits:
            with pytest.raises(ExecutionError, match="int32 holds"):
                oocgemm.gemm(a, b, c, **options)
            return
        result = oocgemm.gemm(a, b, c, verify=data.draw(st.booleans()), **options)
    if integer:
        np.testing.assert_array_equal(c, expected)
    else:  # the sums are exact, and at most three operations round
        roundoff = float(np.finfo(c.dtype).eps)
        size = (
            abs(alpha) * exact(np.abs(a.astype(int)), np.abs(b.astype(int)), op_a, op_b) + abs(beta) * 2.0**20
        )
        assert (np.abs(c - expected) <= 2 * roundoff * size).all()
    assert result.plan.problem.c_dtype == out_dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_c_is_int32_unless_asked_otherwise(backend: str, tmp_path: Path) -> None:
    x = np.full((4, 5), -128, np.int8)
    for out in (None, tmp_path / "C.npy", tmp_path / "C.zarr"):
        with running_on(backend) as options:
            made = oocgemm.gemm(x, x, out, trans_b="T", **options).out
        assert made.dtype == np.int32
        np.testing.assert_array_equal(made[:], np.full((4, 4), 5 * 2**14))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_int32_holds_to_the_last_and_not_one_more(backend: str) -> None:
    """Multiply rows of the largest depth at which int32 cannot overflow, and rows with one more element."""
    x = np.full((3, MAX_INT32_DEPTH + 1), -128, np.int8)
    last = x[:, :MAX_INT32_DEPTH]
    said = r"larger than int32 holds .*out_dtype='int64' \(--out-dtype int64\)"
    with running_on(backend) as options:
        options |= {"trans_b": "T", "tile": "3x3x50000"}
        most = oocgemm.gemm(last, last, **options).out
        np.testing.assert_array_equal(most, np.full((3, 3), 2**31 - 2**14, np.int32))
        with pytest.raises(ExecutionError, match=said):
            oocgemm.gemm(x, x, **options)
        for out_dtype in ("int64", "float64", "float32"):
            wide = oocgemm.gemm(x, x, out_dtype=out_dtype, **options).out
            np.testing.assert_array_equal(wide, np.full((3, 3), 2**31, out_dtype))
        x[:, ::2] = 127  # with this, the sums are the smallest possible
        least = oocgemm.gemm(x, -(x // 2) * 2 - 1, out_dtype="int64", **options | {"tile": None}).out
    np.testing.assert_array_equal(least, exact(x, -(x // 2) * 2 - 1, op_b=Op.T))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_a_million_variants_sum_exactly(backend: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(0, GENOTYPES, (9, 500_000), np.int8)
    c = np.ones((9, 9), np.int32)
    with running_on(backend) as options:
        options |= {"tile": "6x9x100000", "verify": True}
        oocgemm.gemm(x, x, c, alpha=-1, beta=-5, trans_b="T", **options)
    np.testing.assert_array_equal(c, -(x.astype(float) @ x.T.astype(float)) - 5)
    assert c.min() < -(2**19)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("out_dtype", "alpha", "beta", "before", "said"),
    [
        ("int32", 1, 1, 2**31 - 1, "int32 holds"),
        ("int32", 1, -1, -(2**31) + 1, "int32 holds"),
        ("int32", -1, 1, -(2**31), "int32 holds"),
        ("int32", 2**31, 0, 0, "int32 holds"),
        ("int64", 2**53 - 1, 0, 0, "can be summed exactly"),
        ("int64", 1, 1, 2**60, "can be summed exactly"),
    ],
)
def test_a_sum_that_c_cannot_hold_ends_the_run(
    out_dtype: str, alpha: int, beta: int, before: int, said: str, backend: str, tmp_path: Path
) -> None:
    a, b = np.ones((40, 30), np.int8), np.zeros((30, 40), np.int8)
    b[:, 39] = 1  # results that do not fit are in the last column of tiles only
    old = np.zeros((40, 40), out_dtype)
    old[:, 39] = before
    zarr.create_array(tmp_path / "C", data=old, chunks=(20, 20))
    given: Any = {"alpha": alpha, "beta": beta, "overwrite": True, "tile": "20x20x10"}
    with running_on(backend) as options, pytest.raises(ExecutionError, match=said) as raised:
        oocgemm.gemm(a, b, tmp_path / "C", out_dtype=out_dtype, **given, **options)
    assert "pass out_dtype=" in str(raised.value)
    wrong = exact(a, b)[:, 39:]
    written: Any = zarr.open_array(tmp_path / "C")[:, 39:]
    np.testing.assert_array_equal(written, old[:, 39:])  # no tile with such results has been written
    assert (wrong != written).all() or before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"alpha": 0.5},
            r"product has dtype int32, so alpha must be an integer of magnitude below 2\^53, not 0.5: pass",
        ),
        ({"beta": float("nan"), "out_dtype": "int64"}, "beta must be an integer .*, not nan"),
        ({"alpha": 2**53}, r"below 2\^53, not 9007199254740992"),
        ({"alpha": 1j}, "alpha = 1j is complex"),
        (
            {"out_dtype": "int8"},
            "C cannot have dtype int8 with int8 operands: choose one of int32, int64",
        ),
        ({"out_dtype": "int16"}, "choose one of int32, int64, float32, float64"),
        ({"compute": "emulated"}, "int8 operands cannot be computed in 'emulated': choose one of native"),
    ],
)
def test_what_would_not_be_exact_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    x = np.ones((4, 4), np.int8)
    for act in (oocgemm.gemm, oocgemm.plan):
        with pytest.raises(InputError, match=said):
            act(x, x, tmp_path / "C.zarr", backend="host", **options)
    assert contents(tmp_path) == {}


def test_what_is_said_of_a_fraction_holds_for_any_c() -> None:
    x = np.ones((4, 4), np.int8)
    with pytest.raises(InputError) as raised:
        oocgemm.gemm(x, x, np.empty((4, 4)), alpha=0.5, backend="host")
    assert "C has dtype" not in str(raised.value)
    # The error says to pass this dtype.
    c = oocgemm.gemm(x, x, np.empty((4, 4)), alpha=0.5, out_dtype="float64", backend="host").out
    np.testing.assert_array_equal(c, np.full((4, 4), 2.0))


@pytest.mark.parametrize("compressor", ["none", "blosc-zstd"])
def test_the_command_multiplies_genotypes(
    compressor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiply chunks with a fill value into compressed chunks, then read and verify the product.

    It is verified as a whole and in part.
    """
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(6).integers(0, GENOTYPES, (50, 400), np.int8)
    array = zarr.create_array("X", shape=x.shape, chunks=(16, 64), dtype="int8", fill_value=-1)
    array[:, :300] = x[:, :300]
    x = np.asarray(array[:])
    assert (x == -1).any()
    line = "X", "X", "C", "--transpose-b", "--backend", "host"
    done = command("run", *line, "--compressor", compressor, "--verify", "--quiet", "--timeline", "log")
    assert (done.code, done.err) == (0, "")
    written = zarr.open_array("C", mode="r+")
    np.testing.assert_array_equal(written[:], exact(x, x, op_b=Op.T))
    assert command("report", "log").code == 0
    assert command("verify", *line[:-2]).code == 0
    written[7, 9] += 1  # type: ignore[operator]
    found = command("verify", *line[:-2])
    assert found.code != 0
    assert "C[7:8, 9:10]" in found.out + found.err
    assert "in sums by up to 1, where nothing is rounded" in (found.out + found.err).replace("\n", " ")
    assert "int8 into int32" in command("plan", *line).out


def test_a_resumed_run_comes_to_the_same_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.unfinished_runs import failing_after

    monkeypatch.chdir(tmp_path)
    x = numbers(np.random.default_rng(7), (40, 90))
    np.save("X.npy", x)
    options: dict[str, Any] = {"trans_b": "T", "backend": "host", "tile": "16x16x32", "out_dtype": "int64"}
    with failing_after(3), pytest.raises(ExecutionError, match="Input/output"):
        oocgemm.gemm("X.npy", "X.npy", "C.zarr", **options)
    with pytest.raises(InputError, match=r"alpha is 2\.0 and was 1\.0"):
        oocgemm.gemm("X.npy", "X.npy", "C.zarr", resume=True, alpha=2, **options)
    result = oocgemm.gemm("X.npy", "X.npy", "C.zarr", resume=True, **options)
    np.testing.assert_array_equal(result.out[:], exact(x, x, op_b=Op.T))


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_a_sum_that_is_off_by_one_is_computed_again(engine: Any) -> None:
    """Checksums of floating-point tiles would tolerate a difference of one."""
    from oocgemm.planning import Kind
    from tests.support.tampering import tampering

    def change(held: Array) -> None:
        held.reshape(-1)[5] += 1

    rng = np.random.default_rng(8)
    a, b = numbers(rng, (150, 90)), numbers(rng, (90, 160))
    with (
        staged() if engine[0] == "host-staged" else nullcontext(),
        tampering(change, Kind.MULTIPLY, (1, 0), 1),
    ):
        result = oocgemm.gemm(a, b, backend="host", verify=True, tile="80x80x32")
    assert result.timeline.header["checks"]["recomputed"] == [[1, 0]]
    np.testing.assert_array_equal(result.out, exact(a, b))


def of_int8(m: int, n: int, k: int, acc: str) -> GemmProblem:
    return product_of(m, n, k, "int8", "int8", acc, "int32")


def test_a_device_sums_in_int32_what_it_holds() -> None:
    x = np.zeros((8, MAX_INT32_DEPTH), np.int8)
    y = np.zeros((8, MAX_INT32_DEPTH + 1), np.int8)
    for operand, held in ((x, "int32"), (y, "float64")):
        options: dict[str, Any] = {"trans_b": "T", "device_memory": "4GiB"}
        planned = oocgemm.plan(operand, operand, backend="cuda", **options).problem
        assert (planned.acc_dtype, planned.c_dtype) == (held, "int32")
        assert planned.finishes == (held == "float64")
        # With alpha = 2, sums that fit into int32 may have results that do not.
        assert changed(planned, alpha=2).finishes
        assert changed(planned, beta=1).finishes
        assert oocgemm.plan(operand, operand, backend="host", **options).problem.acc_dtype == "float64"


def test_panels_are_no_deeper_than_int32_holds() -> None:
    deep = of_int8(1000, 1000, 10 * MAX_INT32_DEPTH, "float64")
    for backend in ("cuda", "host"):
        plan = make_plan(deep, Budgets(64 << 30, 64 << 30), default_model(backend, 16))
        assert plan.tile.k <= MAX_INT32_DEPTH
    x = np.zeros((2, MAX_INT32_DEPTH + 1), np.int8)
    with pytest.raises(
        InputError, match=f"would sum {MAX_INT32_DEPTH + 1} int8 products .* sums of {MAX_INT32_DEPTH}:"
    ):
        oocgemm.gemm(x, x, trans_b="T", backend="host", tile=f"2x2x{MAX_INT32_DEPTH + 1}")


def test_the_bounds_are_those_of_the_numbers() -> None:
    largest = (-128) ** 2
    assert MAX_INT32_DEPTH * largest < 2**31 <= (MAX_INT32_DEPTH + 1) * largest
    assert MAX_FLOAT64_DEPTH * largest < EXACT_LIMIT <= (MAX_FLOAT64_DEPTH + 1) * largest


@each_value
@pytest.mark.parametrize("gib", [1, 16, 120])
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_genotypes_of_many_samples_are_planned_within_memory(gib: int, backend: str) -> None:
    """Panels leave enough memory for tiles so large that uploads are hidden behind compute.

    Their copies in the layout that cuBLAS needs are counted.
    """
    samples, variants = 100_000, 500_000
    problem = of_int8(samples, samples, variants, "float64")
    plan = make_plan(problem, Budgets(gib << 30, 32 << 30), default_model(backend, 16))
    assert plan.footprint.device_total <= gib << 30
    least = problem.flops / plan.machine.kernels["int8"].peak, 4 * samples**2 / plan.machine.write
    assert plan.prediction.total < 1.4 * max(least)


def test_the_room_of_a_step_holds_its_parts() -> None:
    for m, n, k in ((1, 1, 1), (17, 33, 5), (5000, 70, 100)):
        held = workspace_layout(m, n, k)
        assert held.b >= m * k
        assert held.sums - held.b >= n * k
        assert held.end - held.sums >= 4 * min(m, 4096) * n
        assert (held.b % 16, held.sums % 16, held.end % 16) == (0, 0, 0)
