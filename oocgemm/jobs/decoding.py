"""Find out which operands a GPU could decode, and whether it could compress C."""

from collections.abc import Callable
from contextlib import suppress

from oocgemm.errors import BudgetError
from oocgemm.jobs.request import Destination
from oocgemm.jobs.transforms import as_read
from oocgemm.planning import Coding, GemmProblem, Plan, division_of
from oocgemm.stores import Coded, Matrix


def codings(problem: GemmProblem, a: Matrix, b: Matrix) -> dict[str, Coding]:
    """Return how the chunks of A and B are compressed, by operand, if a GPU can decode them."""
    found = {}
    for operand, matrix in zip("AB", (a, b), strict=True):
        read = as_read(problem, matrix)
        coding = read.coding() if isinstance(read, Coded) else None
        if coding is not None:
            found[operand] = coding
    return found


def codec_of_c(c: Destination, existing: Matrix | None, dtype: str, compressor: str | None) -> str:
    """Return how a GPU could compress chunks of C, such as "blosc-zstd"; "" if it could not.

    `dtype` and `compressor` are those of a new C, if there is no `existing` one.
    """
    if existing is not None:
        return existing.codec() if isinstance(existing, Coded) else ""
    return compressor or "" if c.has_chunks and dtype != "bfloat16" else ""


def encoding_if_possible(planned: Callable[[str], Plan], codec: str) -> Plan:
    """Return a plan in which a GPU compresses C, if there is one, or else one in which the host does.

    `planned` makes a plan in which the GPU compresses C in a codec if that pays; with "", the host does.
    Raises what `planned` raises.
    """
    if codec:
        with suppress(BudgetError):  # without the memory for this, there may be a plan
            found = planned(codec)
            # A GPU cannot compress chunks of every shape, which may follow from the tile.
            if not found.layouts.codings.c or division_of(found.setting, found.tile) is not None:
                return found
    return planned("")
