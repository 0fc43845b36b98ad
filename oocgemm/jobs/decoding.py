"""Find out which operands a GPU could decode, and whether it could compress C."""

from oocgemm.jobs.destination import Destination, Kind
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


def codec_of_c(c: Destination, existing: Matrix | None, dtype: str, compressor: str | None) -> str:
    """Return how a GPU could compress chunks of C, such as "blosc-zstd"; "" if it could not.

    `dtype` and `compressor` are those of a new C, if there is no `existing` one.
    """
    if existing is not None:
        return existing.codec if isinstance(existing, ZarrMatrix) else ""
    return compressor or "" if c.kind is Kind.ZARR and dtype != "bfloat16" else ""
