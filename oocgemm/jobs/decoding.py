"""Find out which operands a GPU could decode."""

from oocgemm.jobs.transforms import as_read
from oocgemm.planning import Coding, GemmProblem
from oocgemm.stores import Matrix
from oocgemm.stores.zarr.matrix import ZarrMatrix


def codings(problem: GemmProblem, a: Matrix, b: Matrix) -> dict[str, Coding]:
    """Return how the chunks of A and B are compressed, by operand, if a GPU can decode them."""
    found = {}
    for operand, matrix in zip("AB", (a, b), strict=True):
        read = as_read(problem, matrix)
        coding = read.coding if isinstance(read, ZarrMatrix) else None
        if coding is not None:
            found[operand] = coding
    return found
