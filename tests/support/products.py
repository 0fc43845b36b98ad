"""Products from their flat fields, as records have them: shorter than the classes that they consist of."""

from typing import Any

from oocgemm.planning import GemmProblem, Op

_SINKS = {"topk": "largest", "threshold": "at least", "reduction": "reduced", "applied": "applied"}


def product_of(
    m: int,
    n: int,
    k: int,
    a_dtype: str,
    b_dtype: str,
    acc_dtype: str,
    c_dtype: str,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    trans_a: Op = Op.N,
    trans_b: Op = Op.N,
    **how: Any,
) -> GemmProblem:
    """Describe a product. `how` are other fields of `GemmProblem.record`, and those of a sink."""
    given = {"m": m, "n": n, "k": k, "a_dtype": a_dtype, "b_dtype": b_dtype, "acc_dtype": acc_dtype}
    given |= {"c_dtype": c_dtype, "alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b}
    names = dict.fromkeys(("checked", "gram", "stored_a", "stored_b"), "")
    rest = {"compute": "native", "chained": 0, "elements_a": "", "elements_b": "", "epilogue": ()}
    chosen = [_SINKS[name] for name in how if name in _SINKS]
    own = {"scaled": False, "excludes_self": False, "absolute": False, "sink": (*chosen, "stored")[0]}
    return GemmProblem.recorded(names | rest | own | given | how)


def changed(problem: GemmProblem, **how: Any) -> GemmProblem:
    """Return a product with other values of some fields of its record."""
    return GemmProblem.recorded(problem.record() | how)
