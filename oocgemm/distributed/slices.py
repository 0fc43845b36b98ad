"""Products whose k is divided into slices: compute the partial product of each slice, then add them.

The partial products are one array in the folder of C's journal, with a journal of its own. It is computed
like any other product, by the same workers, and it can be resumed. The result has the same bits for any
number of workers, since the slices follow from the plan.
"""

from collections.abc import Callable
from dataclasses import replace

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.jobs import output
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.journal import PARTIAL
from oocgemm.jobs.prepare import Job, prepare
from oocgemm.planning import Plan
from oocgemm.planning.parts.part import Part, divide
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.tiling import ceil_div
from oocgemm.stores import Matrix

Compute = Callable[[Job, output.Journaled, tuple[Part, ...]], None]


def partial_products(
    job: Job, engine: Backend, parts: tuple[Part, ...], compute: Compute
) -> tuple[Matrix, Slicing]:
    """Compute the partial products of all slices of k; return them, stacked, and the slices.

    Args:
        job: the whole product.
        engine: the backend for which it is planned.
        parts: its parts. Each belongs to one slice.
        compute: computes parts of a job, and moves their tiles into its C.
    """
    plan = job.plan
    slicing = Slicing.of(plan.grid, 1 + max(part.k_slice for part in parts))
    assert job.output.earlier is not None
    path = str(job.output.earlier.local / PARTIAL)
    request = replace(
        job.request,
        c=Destination.parse(path),
        alpha=1.0,
        beta=0.0,
        out_dtype=plan.problem.acc_dtype,
        memory=None,
        device_memory=plan.budgets.device,
        host_memory=plan.budgets.host,
        tile=plan.tile,
        chunks=None,
        compressor=None,
        overwrite=False,
        resume=True,
        timeline=None,
        slicing=slicing,
    )
    stacked = prepare(request, engine, running=True)
    stacked = replace(stacked, output=replace(stacked.output, noted={**job.output.noted, "k_slices": 1}))
    with output.open_target(stacked) as target:
        if isinstance(target, output.Journaled):
            compute(stacked, target, tuple(slicing.stacked(part, plan.grid) for part in parts))
        target.seal()
    return stores.open_matrix("C", path), slicing


def parts_again(plan: Plan, workers: int, k_slices: int) -> tuple[Part, ...]:
    """Divide the plan of an interrupted run into about as many parts as there are workers.

    The tiles and the slices of k are those of the plan, from which the bits of C follow. Of the divisions of
    each slice, the one is chosen whose parts read least of A and B.
    """
    rows, cols = plan.grid.shape
    each = ceil_div(workers, k_slices)
    pairs = [(down, min(cols, ceil_div(each, down))) for down in range(1, min(rows, each) + 1)]
    down, across = min(
        pairs,
        key=lambda pair: (-min(each, pair[0] * pair[1]), pair[1] * plan.problem.m + pair[0] * plan.problem.n),
        default=(1, 1),
    )
    return divide(plan.grid, down, across, k_slices)
