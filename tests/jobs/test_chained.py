"""Two chained products, by one read of X: equal to NumPy's in every bit, on every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocgemm.errors import BudgetError, InputError
from oocgemm.jobs.request import Chain, Destination, Request
from oocgemm.jobs.run import Result, plan_request, run_request
from oocgemm.stores.transform import Transform
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.schedule_check import verify
from tests.support.suite import each_value, examples

Array = NDArray[Any]


def drawn(seed: int, rows: int, cols: int, columns: int, dtype: str = "float32") -> tuple[Array, Chain]:
    """Draw small integers, whose sums are exact: X, and a chain with one more column than Q has."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (rows, cols)).astype(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    factor = rng.integers(-2, 3, (cols, columns + 1)).astype(wide)
    return x, Chain(columns, rng.integers(-2, 3, columns + 1).astype(wide), factor)


def request(x: Any, chain: Chain, **options: Any) -> Request:
    made = Request.of(x, x, Destination.parse(None), into=chain, **options)
    return made.with_operands(of_lines=True)


def expected(x: Array, chain: Chain) -> Array:
    assert chain.factor is not None
    q = chain.factor.astype(np.float64)
    q[:, chain.columns :] = 0
    wide = x.astype(np.float64)
    return wide.T @ (wide @ q + chain.row)


def check(found: Result, x: Array, chain: Chain) -> None:
    np.testing.assert_array_equal(found.out, expected(x, chain))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_products_are_exact(engine: Engine, dtype: str, order: Any) -> None:
    x, chain = drawn(0, 61, 23, 6, dtype)
    x = np.asarray(x, order=order)
    for tile in (None, "23x7x16", "23x7x1", "23x7x61"):
        with running_on(engine) as options:
            check(run_request(request(x, chain, tile=tile, **options)), x, chain)


@pytest.mark.parametrize("engine", ENGINES)
def test_narrow_elements_are_expanded(engine: Engine) -> None:
    for dtype in ("int8", "float16"):
        x, chain = drawn(1, 50, 32, 5, dtype)
        with running_on(engine) as options:
            given = {"transform_a": Transform(cast="float32"), "tile": "32x6x11"} | options
            check(run_request(request(x, chain, **given)), x, chain)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_transform_has_one_center_per_column(engine: Engine, order: Any) -> None:
    x, chain = drawn(2, 40, 12, 3, "int8")
    center, scale = np.arange(12) % 5 - 2.0, 2.0 ** (np.arange(12) % 3)
    changed = (x - center) / scale
    changed[x == -2] = (0 - center[np.nonzero(x == -2)[1]]) / scale[np.nonzero(x == -2)[1]]
    given = Transform(missing=-2, impute=0, center=center, scale=scale, cast="float32")
    with running_on(engine) as options:
        found = run_request(
            request(np.asarray(x, order=order), chain, transform_a=given, tile="12x4x7", **options)
        )
    check(found, changed, chain)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_transform_may_have_one_scale_per_row(engine: Engine, order: Any) -> None:
    x, chain = drawn(4, 40, 12, 3, "float32")
    scale = 2.0 ** (np.arange(40) % 3)
    given = Transform(scale=scale, cast="float64")
    wide = Chain(chain.columns, chain.row.astype(float), np.asarray(chain.factor).astype(float))
    with running_on(engine) as options:
        asked = request(np.asarray(x, order=order), wide, transform_a=given, tile="12x4x7", **options)
        check(run_request(asked.with_operands(of_lines=False)), x / scale[:, None], wide)


@settings(max_examples=examples(25, quick=8), deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 40),
    cols=st.integers(1, 20),
    columns=st.integers(1, 9),
    depth=st.integers(1, 40),
)
def test_no_operation_overtakes_another(seed: int, rows: int, cols: int, columns: int, depth: int) -> None:
    x, chain = drawn(seed, rows, cols, columns)
    with fake_cuda(seed) as device:
        options: dict[str, Any] = {
            "backend": "cuda",
            "kernel": "cublas",
            "tile": f"{cols}x{columns + 1}x{depth}",
        }
        check(run_request(request(x, chain, **options)), x, chain)
        device.check()


@pytest.mark.parametrize("compressor", [None, "auto"])
def test_panels_consist_of_whole_chunks(tmp_path: Path, compressor: Any) -> None:
    x, chain = drawn(3, 500, 40, 4)
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(32, 20), compressors=compressor)
    for backend in ("host", "fake-cuda"):
        with running_on(backend) as options:
            found = run_request(request(f"{tmp_path}/x.zarr", chain, **options))
        check(found, x, chain)
        assert found.plan.tile.k == 500
        # The device copies files in the page cache without reads to host slots.
        link = "read" if backend == "host" else "h2d"
        assert found.plan.traffic[link] == x.nbytes + 500 * 5 * 4  # X once, and the row that is added


def test_scarce_memory_gives_thin_panels(tmp_path: Path) -> None:
    x, chain = drawn(4, 4096, 300, 4)
    np.save(tmp_path / "x.npy", x)
    depths = []
    for memory in ("32MiB", "20MiB", "17MiB"):
        given = {"backend": "host", "device_memory": memory, "host_memory": "12MiB"}
        found = run_request(request(tmp_path / "x.npy", chain, **given))
        check(found, x, chain)
        depths.append(found.plan.tile.k)
        assert found.plan.footprint.device_total <= found.plan.budgets.device
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < depths[0] < 4096
    with pytest.raises(BudgetError, match="the smallest plan"):
        run_request(request(tmp_path / "x.npy", chain, **given | {"device_memory": "16MiB"}))


def test_the_schedule_is_correct_and_the_flops_count_both_products() -> None:
    x, chain = drawn(5, 64, 24, 7)
    for backend in ("host", "cuda"):
        memory = {} if backend == "host" else {"device_memory": "1GiB"}
        plan = plan_request(request(x, chain, backend=backend, tile="24x8x10", **memory))
        verify(plan.schedule())
        assert plan.flops == 2 * 64 * 24 * (8 + 7)
        assert sum(op.flops for op in plan.schedule()) == plan.flops


def test_a_tile_that_divides_the_result_is_refused() -> None:
    x, chain = drawn(6, 64, 24, 7)
    with pytest.raises(InputError, match="write 24x8xK"):
        run_request(request(x, chain, backend="host", tile="12x8x8"))
