"""List oocgemm's own GEMM kernels (the ladder), and choose one for a product.

To add a kernel, add its CUDA source to `kernels/plain` or `kernels/fast`, and one `Kernel` to `plain.py` or
`fast.py` in this package. This module needs no GPU and does not import cupy. Plans and tests can therefore
list the kernels on any machine.
"""

from itertools import product

from oocgemm.errors import InputError
from oocgemm.kernels.fast import FAST
from oocgemm.kernels.plain import PLAIN
from oocgemm.kernels.selection import check_sink
from oocgemm.kernels.spec import H200, Call, Device, Kernel, Params
from oocgemm.planning import Plan

LADDER: tuple[Kernel, ...] = (*PLAIN, *FAST)


def names() -> tuple[str, ...]:
    """Return the names that `--kernel` accepts for oocgemm's own kernels, simplest first."""
    return tuple(dict.fromkeys(kernel.name for kernel in LADDER))


def choose(name: str, call: Call, wanted: Params | None = None) -> tuple[Kernel, Params]:
    """Return a kernel named `name` that can run a call, and the parameters to run it with.

    Several kernels can have the same name. First, those that have the parameters `wanted` (one of their
    `Kernel.variants`) are tried with them. Then all are tried with their default parameters. The first kernel
    that can run the call is returned.

    Raises:
        InputError: no kernel with this name accepts the call; the message has the reasons.
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
    """Raise `InputError` if the kernel `name` cannot run all steps of a plan.

    So does a plan that selects more elements per row than any kernel can.

    The smaller steps at the edges of the matrices are checked too. If `name` is not a kernel of the ladder,
    for example "cublas", nothing is checked. `device` is the GPU that shall run the plan.
    """
    problem, tile = plan.problem, plan.tile
    check_sink(problem.sink)
    if name not in names():
        return
    extents = ((problem.m, tile.m), (problem.n, tile.n), (problem.depth, tile.k))
    sizes = [{min(extent, nominal), extent % nominal or nominal} for extent, nominal in extents]
    for m, n, k in product(*sizes):
        lda, ldb = (m if problem.trans_a.swaps else k), (k if problem.trans_b.swaps else n)
        shape = problem.a_dtype, problem.trans_a, problem.trans_b, m, n, k
        if k:
            choose(name, Call(*shape, 1.0, 0, lda, 0, ldb, 1.0, 0, n, problem.compute, device))
