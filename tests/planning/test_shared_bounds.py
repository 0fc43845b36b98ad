"""No division of a product among workers reads less from storage than the lower bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.planning.cost.bound import WorkerShare, min_bytes_of_workers
from tests.support.products import product_of


@given(
    st.tuples(*[st.integers(1, 6)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from(["float32", "int8"]),
)
def test_no_grid_of_parts_reads_less_than_the_bound(
    size: tuple[int, int, int], grid: tuple[int, int, int], dtype: str
) -> None:
    """A worker of the grid reads the panels of its block once, into a memory that holds them all."""
    m, n, k = (4 * x * pieces for x, pieces in zip(size, grid, strict=True))
    p_m, p_n, p_k = grid
    problem = product_of(m, n, k, dtype, dtype, "float64", "float64")
    shares = [WorkerShare(1 << 40, m // p_m * (n // p_n), m // p_m * (n // p_n) * (k // p_k))] * (
        p_m * p_n * p_k
    )
    read = (p_n * m * k + p_m * k * n) * problem.itemsizes["A"]
    assert min_bytes_of_workers(problem, shares) <= read
    if m // p_m == n // p_n:
        assert min_bytes_of_workers(problem, shares) == pytest.approx(read, abs=1)


def test_small_memories_raise_the_bound() -> None:
    problem = product_of(4096, 4096, 4096, "float64", "float64", "float64", "float64")
    shares = [WorkerShare(8 * 10_000, 4096 * 1024, 4096 * 1024 * 4096)] * 4
    elements = 4 * (2 * 4096 * 1024 * 4096 / 100 - 2 * 10_000 - 4096 * 1024)
    assert min_bytes_of_workers(problem, shares, required=5) == pytest.approx(8 * elements)
    assert min_bytes_of_workers(problem, [], required=5) == 5
