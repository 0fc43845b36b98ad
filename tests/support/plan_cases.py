"""Problems, layouts and units of the tests of plans."""

from oocgemm.planning import DTYPES, Chunked, GemmProblem, Layouts, Op, Writing
from tests.support.products import product_of

GIB = 1 << 30
MIB = 1 << 20


def problem(m: int, n: int, k: int, dtype: str = "float64", beta: float = 0) -> GemmProblem:
    d = DTYPES[dtype]
    return product_of(m, n, k, d.name, d.name, d.accumulator, d.results[0], 1.0, beta, Op.N, Op.N)


STORED = Layouts(Chunked((2048, 2048)), Chunked((2048, 2048)), Chunked(writing=Writing(free=True)))
