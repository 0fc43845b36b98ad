"""The ladder of GEMM kernels, and which of them does a call.

Adding a kernel is one file in `kernels/` and one `Kernel` in `rungs_plain.py` or `rungs_fast.py`. Nothing here touches a
device or imports cupy, so that plans, tests and tuners can enumerate kernels without one.
"""

from itertools import product

from oocgemm.errors import InputError
from oocgemm.kernels.fast import FAST
from oocgemm.kernels.plain import PLAIN
from oocgemm.kernels.spec import H200, Call, Device, Kernel, Params
from oocgemm.planning import Plan

LADDER: tuple[Kernel, ...] = (*PLAIN, *FAST)


def names() -> tuple[str, ...]:
    """The rungs, from the bottom."""
    return tuple(dict.fromkeys(kernel.name for kernel in LADDER))


def choose(name: str, call: Call, wanted: Params | None = None) -> tuple[Kernel, Params]:
    """The entry of a rung for a call, and its parameters: the entry that has the parameters wanted if it can do the call,
    else the first that can, with its default ones. Raises `InputError` with the reasons if none can."""
    entries = [kernel for kernel in LADDER if kernel.name == name]
    candidates = [(kernel, wanted) for kernel in entries if wanted is not None and wanted in kernel.variants]
    reasons: list[str] = []
    for kernel, params in (*candidates, *((kernel, kernel.variants[0]) for kernel in entries)):
        refusal = kernel.refusal(call, params)
        if refusal is None:
            return kernel, params
        reasons.append(refusal)
    raise InputError(f"kernel {name} cannot do this product: {'; or '.join(dict.fromkeys(reasons))}")


def check_plan(name: str, plan: Plan, device: Device = H200) -> None:
    """Raise `InputError` if a rung cannot do the steps of a plan: those of whole tiles and panels, and of the last ones.
    What is no rung, such as cuBLAS, can do any. The device is an H200 where none is known."""
    if name not in names():
        return
    problem, tile = plan.problem, plan.tile
    extents = ((problem.m, tile.m), (problem.n, tile.n), (problem.depth, tile.k))
    sizes = [{min(extent, nominal), extent % nominal or nominal} for extent, nominal in extents]
    for m, n, k in product(*sizes):
        lda, ldb = (m if problem.trans_a.swaps else k), (k if problem.trans_b.swaps else n)
        shape = problem.a_dtype, problem.trans_a, problem.trans_b, m, n, k
        if k:
            choose(name, Call(*shape, 1.0, 0, lda, 0, ldb, 1.0, 0, n, problem.compute, device))
