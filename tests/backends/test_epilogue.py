"""The steps of an epilogue change C as NumPy does, on all backends, before C is stored or reduced."""

import shutil
from collections.abc import Sequence
from ctypes import c_double, c_longlong, c_void_p
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm import Add, Cast, Correlation, Divide, Gaussian, RankOne, Scale, Transform
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.host import finish
from oocgemm.backends.host.finish import COMPILED, reduce_rows, run_chain, run_compiled
from oocgemm.errors import InputError
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import ChainNumbers, chain_grid, chain_options, reduce_grid, reduce_options
from oocgemm.planning import GemmProblem
from oocgemm.planning.sinks import MAX_STEPS, REDUCTIONS, STEPS, Step
from oocgemm.system import installed
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.products import product_of
from tests.support.suite import each_value, examples, slow
from tests.support.unfinished_runs import failing_after

Array = NDArray[Any]
RNG = np.random.default_rng(30)
M, N, K = 61, 47, 13


def integers(*shape: int) -> Array:
    return RNG.integers(-3, 4, shape).astype(np.float64)


def whole(a: Array, b: Array, alpha: float, beta: float, old: Array, steps: Sequence[Any]) -> Array:
    """Return C in float64: the definition of each step, on whole matrices."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    c: Array = alpha * (a @ b) + (beta * old if beta else 0)
    for step in steps:
        match step:
            case Scale() | RankOne():
                rows = 1.0 if step.rows is None else np.asarray(step.rows)[:, None]
                factors = step.value * rows * (1.0 if step.cols is None else np.asarray(step.cols))
                c = c * factors if isinstance(step, Scale) else c + factors
            case Add():
                c = c + step.value * step.d
            case Divide():
                with np.errstate(all="ignore"):
                    c = c / step.d
            case Correlation():
                norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)
                c = np.clip(c / norms, -1, 1)
            case Gaussian():
                d2 = np.square(a).sum(1)[:, None] + np.square(b).sum(0) - 2 * c
                c = np.exp(-step.gamma * np.maximum(d2, 0))
            case Cast():
                c = c.astype(numpy_dtype(str(step.dtype)))
    return c


U, V, D = integers(M), integers(N), integers(M, N)
POWERS = 2.0 ** RNG.integers(-2, 3, (M, N))
# Chains that are exact on small integers in all dtypes, with their alpha and beta.
EXACT: dict[str, tuple[list[Any], float, float]] = {
    "scale": ([Scale(U, V)], 1, 0),
    "scale by a number": ([Scale(value=0.5)], 2, 0),
    "rank one": ([RankOne(U, V, 2)], -1, 0),
    "bias": ([RankOne(cols=V)], 1, 0),
    "add": ([Add(D, -2)], 1, 0),
    "divide": ([Divide(POWERS)], 1, 0),
    "beta": ([Scale(rows=U)], 1, 2),
    "chain": ([Scale(U), RankOne(cols=V), Divide(POWERS), RankOne(U, value=3), Scale(cols=V)], 2, 0),
    "cast": ([Scale(value=0.25), Cast("float32")], 1, 0),
}


def as_dtype(steps: Sequence[Any], dtype: Any) -> list[Any]:
    """Return the steps with D in a dtype."""
    made: list[Any] = []
    for step in steps:
        match step:
            case Add():
                made.append(Add(step.d.astype(dtype), step.value))
            case Divide():
                made.append(Divide(step.d.astype(dtype)))
            case _:
                made.append(step)
    return made


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
@pytest.mark.parametrize("chain", EXACT)
def test_chains_of_integers_are_exact(engine: Engine, dtype: str, chain: str) -> None:
    if engine[1] == "tiled" and dtype in ("float16", "int8"):
        pytest.skip("the kernel tiled is slow, and has no int8")
    steps, alpha, beta = EXACT[chain]
    out: Any = {"float16": "float32", "int8": "float64"}.get(dtype, dtype)
    a, b = integers(M, K), integers(K, N)
    old = integers(M, N)
    right = whole(a, b, alpha, beta, old, steps)
    for tile in (None, "32x16x5"):
        c = old.astype(out) if beta else None
        given: Any = {"tile": tile, "alpha": alpha, "beta": beta}
        if chain != "cast":
            given["out_dtype"] = out
        with running_on(engine) as options:
            found = oocgemm.gemm(
                a.astype(dtype), b.astype(dtype), c, epilogue=as_dtype(steps, out), **given, **options
            )
        assert found.out.dtype == ("float32" if chain == "cast" else out)
        np.testing.assert_array_equal(found.out, right)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
def test_chains_of_gram_matrices_are_exact(engine: Engine, uplo: str) -> None:
    x = integers(M, K)
    powers = 2.0 ** RNG.integers(-2, 3, (M, M))
    powers = np.tril(powers) + np.tril(powers, -1).T
    steps: list[Any] = [RankOne(U, U), Scale(U, U), Divide(powers)]
    right = whole(x, x.T, 1, 0, D, steps)
    for tile in (None, "16x16x5"):
        with running_on(engine) as options:
            found = oocgemm.gram(x, uplo=uplo, epilogue=steps, tile=tile, **options).out
        kept: Any = {"lower": np.tril, "upper": np.triu, "full": np.asarray}[uplo]
        np.testing.assert_array_equal(kept(found), kept(right))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_correlations_and_kernels_are_those_of_numpy(engine: Engine, dtype: str) -> None:
    a, b = RNG.standard_normal((M, K)).astype(dtype), RNG.standard_normal((K, N)).astype(dtype)
    chains: list[list[Any]] = [
        [Correlation()],
        [Gaussian(0.1)],
        [Gaussian(0.1), Scale(U, V), Cast("float16")],
    ]
    for steps in chains:
        with running_on(engine) as options:
            found = oocgemm.gemm(a, b, epilogue=steps, tile="32x16x5", **options).out
        tolerance = 2e-2 if len(steps) > 1 else 1e-12 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(found, whole(a, b, 1, 0, D, steps), rtol=tolerance, atol=tolerance)
    with running_on(engine) as options:
        x = (a - a.mean(1, keepdims=True)).astype(dtype)
        found = oocgemm.gram(x, uplo="full", epilogue=[Correlation()], **options).out
    np.testing.assert_allclose(found, np.corrcoef(a), atol=1e-12 if dtype == "float64" else 1e-5)
    assert (np.abs(found) <= 1).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_are_those_of_transformed_rows(engine: Engine) -> None:
    x = RNG.integers(0, 3, (M, N)).astype(np.int8)
    change = Transform(center="k", cast="float64")
    centered = x - x.mean(0)
    for step in (Correlation(), Gaussian(0.01)):
        with running_on(engine) as options:
            found = oocgemm.gram(x, uplo="full", transform=change, epilogue=[step], **options).out
        np.testing.assert_allclose(found, whole(centered, centered.T, 1, 0, D, [step]), rtol=1e-9, atol=1e-12)


def test_division_by_zero_is_that_of_numpy() -> None:
    a, d = np.array([[1.0, -1.0, 0.0]]).T, np.zeros((3, 1))
    found = oocgemm.gemm(a, np.ones((1, 1)), epilogue=[Divide(d)], backend="host").out
    np.testing.assert_array_equal(found, [[np.inf], [-np.inf], [np.nan]])


@settings(max_examples=examples(25, quick=8), deadline=None)
@given(
    seed=st.integers(0, 99),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9)),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4)),
    kinds=st.lists(st.sampled_from(["scale", "rank one"]), max_size=4),
    merge=st.sampled_from([None, Add, Divide]),
)
def test_any_chain_is_exact_in_any_order_of_operations(
    seed: int, shape: tuple[int, int, int], tile: tuple[int, int, int], kinds: list[str], merge: Any
) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = shape
    a, b = (rng.integers(-2, 3, x).astype(float) for x in ((m, k), (k, n)))
    steps: list[Any] = [
        (Scale if kind == "scale" else RankOne)(
            rng.choice([-1.0, 2.0], m) if rng.random() < 0.5 else None, rng.choice([-1.0, 2.0], n)
        )
        for kind in kinds
    ]
    if merge is not None:
        steps.insert(rng.integers(len(steps) + 1), merge(2.0 ** rng.integers(-1, 2, (m, n))))
    with fake_cuda(seed) as device:
        how: Any = {"backend": "cuda", "kernel": "cublas", "tile": "x".join(map(str, tile))}
        found = oocgemm.gemm(a, b, epilogue=steps, **how).out
        device.check()
    np.testing.assert_array_equal(found, whole(a, b, 1, 0, a, steps))


@pytest.mark.parametrize("suffix", ["c.zarr", "c.npy"])
def test_an_interrupted_run_is_resumed_with_its_own_numbers(tmp_path: Path, suffix: str) -> None:
    a, b = integers(M, K), integers(K, N)
    zarr.create_array(f"{tmp_path}/a", data=a, chunks=(7, 5))
    zarr.create_array(f"{tmp_path}/b", data=b, chunks=(5, 7))
    zarr.create_array(f"{tmp_path}/d", data=POWERS, chunks=(10, 30))
    shutil.copytree(tmp_path / "d", tmp_path / "d2")
    steps: list[Any] = [RankOne(U, V), Divide(f"{tmp_path}/d")]
    call: Any = partial(oocgemm.gemm, f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/{suffix}")
    given: Any = {"backend": "host", "tile": "16x16x5"}
    with failing_after(3), pytest.raises(oocgemm.ExecutionError):
        call(epilogue=steps, **given)
    for other, message in (
        ([RankOne(U, 2 * V), steps[1]], "the numbers of the epilogue have changed"),
        ([steps[0], Divide(f"{tmp_path}/d2")], "D is at .* and was at"),
        (steps[:1], "epilogue is"),
        ([], "epilogue is"),
    ):
        with pytest.raises(InputError, match=message):
            call(epilogue=other, resume=True, **given)
    found = call(epilogue=steps, resume=True, **given)
    assert found.plan.done
    right = whole(a, b, 1, 0, D, [steps[0], Divide(POWERS)])
    np.testing.assert_array_equal(np.asarray(found), right)


def test_a_plan_counts_the_further_matrix() -> None:
    a, b, d = integers(M, K), integers(K, N), integers(M, N)
    plain, merged = (
        oocgemm.plan(a, b, epilogue=steps, backend="cuda", device_memory="1GiB")
        for steps in ([Scale(U)], [Add(d)])
    )
    assert merged.traffic["h2d"] - plain.traffic["h2d"] == 8 * M * N
    made = oocgemm.plan(a, b, epilogue=[Add(d)], backend="host")
    np.testing.assert_array_equal(made.run().out, a @ b + d)


def test_bad_input_is_refused() -> None:
    a, b = integers(M, K), integers(K, N)
    call: Any = oocgemm.gemm
    for message, steps, options in (
        ("is no step of an epilogue", [3], {}),
        ("pass 61 real numbers", [Scale(rows=V)], {}),
        ("pass 47 real numbers", [RankOne(cols=V.astype(complex))], {}),
        ("contain Inf or NaN", [Scale(rows=np.where(U > 2, np.nan, U))], {}),
        ("epilogue is of type Scale: pass a list", Scale(U), {}),
        ("rows of .* are one number, 2.0: pass it as value", [Scale(2.0)], {}),
        (r"value of epilogue\[0\] is nan", [Scale(value=np.nan)], {}),
        ("gamma = 0: pass a positive number", [Gaussian(0)], {}),
        ("gamma = inf is not finite", [Gaussian(np.inf)], {}),
        ("cannot be cast to 'int8'", [Cast("int8")], {}),
        ("cannot be cast to 'f8,nothing'", [Cast("f8,nothing")], {}),
        ("make it the last one", [Cast("float32"), Scale(U)], {}),
        ("9 steps, and 8 are allowed", [Scale()] * 9, {}),
        ("one further matrix can be read", [Add(D), Divide(D)], {}),
        ("with beta = 0", [Add(D)], {"c": D.copy(), "beta": 1}),
        (r"D has shape \(47, 61\)", [Divide(D.T)], {}),
        ("D has shape .* and dtype float32", [Divide(D.astype(np.float32))], {}),
        ("Gaussian is not the first step", [Scale(value=2), Gaussian(0.1)], {}),
        ("Correlation is not the first step", [RankOne(U), Correlation(), Scale(U)], {}),
        ("make it the first step, and the only", [Correlation(), Gaussian(0.1)], {}),
        ("alpha = 2.0 and beta = 0.0, but Gaussian", [Gaussian(0.1)], {"alpha": 2.0}),
        ("alpha = 1.0 and beta = 1.0, but Correlation", [Correlation()], {"c": D.copy(), "beta": 1}),
        (
            "row 2 of A has elements that are Inf or NaN.* drop Correlation",
            [Correlation()],
            {"a": np.where(np.arange(M)[:, None] == 2, np.inf, a)},
        ),
        (
            "column 1 of B has elements that are Inf or NaN",
            [Correlation()],
            {"b": np.where(np.arange(N) == 1, np.nan, b)},
        ),
        ("changes real numbers", [Scale(U)], {"a": a.astype(complex), "b": b.astype(complex)}),
    ):
        with pytest.raises(InputError, match=message):
            call(**{"a": a, "b": b, "epilogue": steps, "backend": "host"} | options)
    small = a.astype(np.int8), b.astype(np.int8)
    with pytest.raises(InputError, match="C has dtype int32, and an epilogue gives"):
        call(*small, epilogue=[Scale(U)], out_dtype="int32", backend="host")


@pytest.mark.parametrize("step", [RankOne(cols=U), Scale(rows=U), Scale(U, U + 1)])
def test_steps_that_are_not_symmetric_are_refused_where_triangles_are_mirrored(step: Any) -> None:
    x = integers(M, K)
    found = oocgemm.gram(x, uplo="lower", epilogue=[step], backend="host").out
    np.testing.assert_array_equal(np.tril(found), np.tril(whole(x, x.T, 1, 0, D, [step])))
    with pytest.raises(InputError, match="other numbers for rows than for columns"):
        oocgemm.gram(x, uplo="full", epilogue=[step], backend="host")
    same = Scale(U, U.copy())
    found = oocgemm.gram(x, uplo="full", epilogue=[same], backend="host").out
    np.testing.assert_array_equal(found, whole(x, x.T, 1, 0, D, [same]))


def test_further_matrix_of_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    a, b = integers(M, K), integers(K, N)
    with failing_after(1), pytest.raises(oocgemm.ExecutionError):
        oocgemm.gemm(a, b, f"{tmp_path}/d", backend="host", tile="16x16x5")
    with pytest.raises(InputError, match="D is the result of an unfinished run"):
        oocgemm.gemm(a, b, epilogue=[Add(f"{tmp_path}/d")], backend="host")


def test_a_cast_may_be_the_only_step() -> None:
    a, b = integers(M, K), integers(K, N)
    for dtype in ("float16", "float32", "float64"):
        for operands in ("float32", "float64"):
            left, right = a.astype(operands), b.astype(operands)
            found = oocgemm.gemm(left, right, epilogue=[Cast(dtype)], backend="host").out
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, (left @ right).astype(dtype))


def test_further_matrix_is_not_overwritten() -> None:
    a, b, d = integers(M, K), integers(K, N), integers(M, N)
    with pytest.raises(InputError, match="C is the same array as D or overlaps it"):
        oocgemm.gemm(a, b, d, epilogue=[Add(d)], backend="host")


CHAIN = tuple(
    Step(kind, rows, cols, value)
    for kind, rows, cols, value in (
        ("gaussian", True, True, 0.2),
        ("identical", True, True, 1.0),
        ("scale", True, True, 2.0),
        ("rank_one", False, True, -1.0),
        ("correlation", True, False, 0.7),
        ("divide", False, False, 1.0),
        ("scale", False, False, 0.5),
    )
)
CHAINS = {
    "divide": CHAIN,
    "divide_or_zero": tuple(replace(x, kind="divide_or_zero") if x.kind == "divide" else x for x in CHAIN),
    "squared": (
        Step("correlation", True, True, 0.7),
        Step("squared", value=0.25),
        Step("within", True, True, 0.0),
    ),
    "near": (Step("correlation", True, True, 0.7), Step("within", True, True, 1.0)),
    "distance": (Step("distance", True, True, 0.3), Step("identical", True, True, 0.0), Step("root")),
    "nearness": (Step("distance", True, True, -1.0),),
    "jaccard": (Step("jaccard", True, True), Step("scale", value=-1.0)),
    "hamming": (Step("hamming", True, True, 7.0),),
}


def drawn(step: Step, count: int) -> NDArray[Any]:
    """Draw the numbers of a step: some are equal if they are compared."""
    compared = step.kind in ("identical", "within")
    return RNG.integers(4, size=count).astype(float) if compared else RNG.random(count)


def chain_problem(accumulated: str, steps: tuple[Step, ...], reduction: str = "") -> GemmProblem:
    return product_of(
        9, 9, 9, *(accumulated, accumulated, accumulated, accumulated), epilogue=steps, reduction=reduction
    )


@each_value
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_cuda_kernel_gives_the_numbers_of_numpy(dtype: str, name: str) -> None:
    steps = CHAINS[name]
    given = chain_problem(dtype, steps)
    reads = given.reads_c
    run = launcher("chain", "chain", chain_options(given, dtype))
    for shape in ((1, 1), (7, 530), (130, 7)):
        sums, d = (RNG.standard_normal(shape).astype(dtype) for _ in range(2))
        sums[0, 0] = np.nan
        d[:, 3::5] = 0
        numbers = [
            (drawn(step, shape[0]) if step.rows else None, drawn(step, shape[1]) if step.cols else None)
            for step in steps
        ]
        found, right = d.copy(), d.copy()
        run_chain(steps, numbers, sums, (1.5, 0.0), right, reads=reads)
        chain = ChainNumbers()
        for number, (step, pair) in enumerate(zip(steps, numbers, strict=True)):
            at = [None if x is None else x.ctypes.data for x in pair]
            chain.steps[number] = (*at, step.value)
        run(
            chain_grid(*shape),
            (256, 1, 1),
            *map(c_longlong, shape),
            c_void_p(sums.ctypes.data),
            *map(c_double, (1.5, 0.0)),
            chain,
            c_void_p(found.ctypes.data),
        )
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(installed.compiled() is None, reason="the host code is not compiled")
@pytest.mark.parametrize("kinds", [*COMPILED, COMPILED])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float32"), ("float32", "float64")])
def test_compiled_code_gives_the_bits_of_numpy(
    kinds: Any, dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    for shape in ((1, 1), (7, 2530), (300, 257), (0, 3)):
        sums = (3 * RNG.standard_normal(shape)).astype(dtypes[0])
        sums[:1, :1] = np.nan
        for rows, cols, value in ((True, True, 0.3), (False, True, 0.0), (True, False, -1.5)):
            steps = [Step(kind, rows, cols, value) for kind in kinds]
            numbers = [
                (RNG.random(shape[0]) if rows else None, RNG.random(shape[1]) if cols else None)
                for _ in kinds
            ]
            found, right = (np.empty(shape, dtypes[1]) for _ in range(2))
            assert run_compiled(steps, numbers, sums, 0.7, found)
            with monkeypatch.context() as patch:
                patch.setattr(finish, "compiled", lambda: None)
                run_chain(steps, numbers, sums, (0.7, 0.0), right, reads=False)
            np.testing.assert_array_equal(found, right)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_cuda_kernel_reduces_rows_as_numpy_does(reduction: str) -> None:
    run = launcher("reduce", "reduce", reduce_options(chain_problem("float32", (), reduction)))
    for shape in ((1, 1), (3, 530), (5, 7)):
        strip = RNG.integers(-9, 9, shape).astype(np.float32)
        if reduction == "max":
            strip[-1, 0] = np.nan
        for begins in (True, False):
            found = integers(shape[0]) if begins else np.full(shape[0], 2.0)
            right = found.copy()
            reduce_rows(reduction, strip, right, begins=begins)
            given = map(c_longlong, (*shape, begins))
            ends = c_void_p(strip.ctypes.data), c_void_p(found.ctypes.data)
            run(reduce_grid(shape[0]), (256, 1, 1), ends[0], *given, ends[1])
            np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernels_compile_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    every = [Step(kind, True, True, 0.5) for kind in STEPS]
    chains = tuple(every[:MAX_STEPS]), tuple(every[-MAX_STEPS:])
    sources = [
        ("chain", chain_options(chain_problem(accumulated, steps), stored))
        for steps in chains
        for accumulated, stored in (
            *(("float32", "float32"), ("float64", "float64")),
            *(("float32", "float16"), ("float32", "bfloat16")),
        )
    ]
    sources += [("reduce", reduce_options(chain_problem("float32", (), kind))) for kind in REDUCTIONS]
    for name, options in sources:
        cubin = tmp_path / "code.cubin"
        cubin.write_bytes(compiled(Nvrtc(), name, arch, options))
        assert resources(cubin, name).local == 0, f"{options} for {arch}"
