"""The ladder of GEMM kernels, and the choice of an entry for a call.

To add a kernel, add one file to the CUDA sources in `kernels/plain` or `kernels/fast`, and one `Kernel` to
`plain.py` or `fast.py` here. This module neither touches a device nor imports cupy, so plans, tests and
tuners can list the kernels without a GPU.
"""

from itertools import product

from oocgemm.errors import InputError
from oocgemm.kernels.fast import FAST
from oocgemm.kernels.plain import PLAIN
from oocgemm.kernels.spec import H200, Call, Device, Kernel, Params
from oocgemm.planning import Plan

LADDER: tuple[Kernel, ...] = (*PLAIN, *FAST)


def names() -> tuple[str, ...]:
    """Return the names of the rungs, from the bottom."""
    return tuple(dict.fromkeys(kernel.name for kernel in LADDER))


def choose(name: str, call: Call, wanted: Params | None = None) -> tuple[Kernel, Params]:
    """Choose the entry of a rung for a call, and its parameters.

    The entry that has the `wanted` parameters comes first, then each entry with its default parameters.

    Raises:
        InputError: every entry refuses the call; the message has the reasons.
    """
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
    """Raise `InputError` if a rung cannot run the steps of a plan, edge tiles and edge panels included.

    A name that is not a rung, such as "cublas", passes. `device` defaults to an H200 for a machine without a
    GPU.
    """
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
