"""Problems of the tests of schedules and traversals."""

from hypothesis import strategies as st

from oocgemm.planning import GemmProblem, Op
from oocgemm.planning.schedule.traversal import Traversal
from tests.support.products import product_of


def problem(
    m: int, n: int, k: int, *, alpha: float = 1, beta: float = 0, finishes: bool = False
) -> GemmProblem:
    stored = "float16" if finishes else "float64"
    accumulated = "float32" if finishes else "float64"
    return product_of(m, n, k, stored, stored, accumulated, stored, alpha, beta, Op.N, Op.N)


traversals = st.builds(Traversal, st.integers(0, 1), st.integers(1, 4), st.booleans())
