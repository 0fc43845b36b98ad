"""Decide whether the device finds the means and scales of a transform in one pass, with the product.

It can if one tile is the whole triangle of a Gram matrix: each panel is then uploaded once, with all rows of
X. Otherwise a pass over X before the product finds them (`oocgemm.jobs.stats`).
"""

from collections.abc import Callable
from dataclasses import replace

from oocgemm.jobs.budgets import budgets_of
from oocgemm.jobs.journal import read
from oocgemm.jobs.request import Request
from oocgemm.planning import GemmProblem, TileGrid, TileShape
from oocgemm.planning.cost.machine import default_model
from oocgemm.planning.expansion import measure_room, vector_bytes
from oocgemm.planning.setting import GRAM_STRIPS
from oocgemm.planning.tiling import ceil_div
from oocgemm.stores import Matrix
from oocgemm.stores.transformed import TransformedMatrix

# The triangle and the numbers per index along k take at most this part of the device memory. Panels need the
# rest.
SHARE = 1 / 2


def measured(
    request: Request, problem: GemmProblem, x: Matrix, tile: TileShape | None, free: Callable[[], int] | None
) -> GemmProblem:
    """Return the problem, `measured` if the device finds the statistics that its transform needs.

    Args:
        request: what is computed.
        problem: the product. The device transforms its panels, if they are transformed.
        x: op(X), if the problem is a Gram matrix.
        tile: the tile that the user chose.
        free: returns the free device memory in bytes; None if it is unknown.
    """
    if not (problem.b.shares and isinstance(x, TransformedMatrix) and _is_measurable(problem, x)):
        return problem
    return replace(problem, measured=_decided(request, problem, tile, free))


def _is_measurable(problem: GemmProblem, x: TransformedMatrix) -> bool:
    """Tell whether the kernels can measure X: small integers, whose sums are exact.

    They cannot if an epilogue needs the norms of rows of X, which must be known before the product.
    """
    transform = x.transform
    read_as_stored = problem.expands or x.is_copy
    by_word = isinstance(transform.center, str) or not transform.corrects
    small = problem.depth > 0 and x.stored.dtype.name == "int8" and not transform.log1p
    known = problem.checked or any(step.derives for step in problem.epilogue)
    return bool(small and transform.needs_stats and by_word and read_as_stored and not known)


def _decided(
    request: Request, problem: GemmProblem, tile: TileShape | None, free: Callable[[], int] | None
) -> bool:
    if request.planned is not None:
        return request.planned.problem.measured
    folder = request.c.journal_folder if request.durability.resume else None
    record = read(folder) if folder is not None else None
    if record is not None:
        return bool(record.header["identity"]["problem"].get("measured") == "True")
    if tile is not None and tile.m < problem.m:
        return False
    whole = TileShape(problem.m, problem.m, 1)
    grid = TileGrid.of(problem, whole, strip=ceil_div(problem.m, GRAM_STRIPS))
    of_k = measure_room(replace(problem, measured=True)).end + sum(vector_bytes(problem).values())
    budget = budgets_of("cuda", free, request.budgets.device_memory, request.budgets.all_host_memory).device
    room = SHARE * (budget - default_model("cuda", 1).device_reserve)
    return grid.elements((0, 0)) * problem.itemsizes["acc"] + of_k <= room
