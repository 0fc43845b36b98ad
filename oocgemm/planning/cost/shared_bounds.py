"""A lower bound on the bytes that several workers read from storage together.

Each worker reads into a memory of its own. A worker that computes `products` multiplications for `elements`
elements of C, with room for M elements, reads at least

- a + b elements of A and B with ``a * b >= products**2 / elements`` (Loomis and Whitney, 1949), where a is at
  most m k and b at most k n;
- ``2 products / sqrt(M) - 2 M`` elements, less `elements` if beta = 0, as for one memory (`min_bytes`).

For equal parts of a grid with p_k slices of k, the first bound is ``2 k sqrt(m n P / p_k)`` elements in all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from oocgemm.planning.problem import GemmProblem


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a worker in a product: its memory in bytes, elements of C, and multiplications."""

    memory: int
    elements: int
    products: int


def min_bytes_of_workers(problem: GemmProblem, shares: Iterable[Share], required: int = 0) -> int:
    """Return a lower bound on the bytes that workers read from storage together, with these shares.

    `required` are the bytes if each element was read once. They are the bound for one large memory.
    """
    least = sum(max(_panel_bytes(problem, s), _streaming_bytes(problem, s)) for s in shares)
    return max(required, int(least))


def _panel_bytes(problem: GemmProblem, share: Share) -> float:
    """Return the least bytes of A and B that contain the operands of a worker's multiplications."""
    if not share.elements or not share.products:
        return 0.0
    sizes = problem.itemsizes
    pairs = share.products**2 / share.elements
    most = problem.m * problem.depth
    # a sizes[A] + b sizes[B] with a b = pairs is least at a = sqrt(pairs sizes[B] / sizes[A]).
    a = sqrt(pairs * sizes["B"] / sizes["A"])
    a = min(most, max(a, pairs / (problem.depth * problem.n)))
    return a * sizes["A"] + pairs / a * sizes["B"]


def _streaming_bytes(problem: GemmProblem, share: Share) -> float:
    """Return the bytes that a worker reads at least because its memory is small; negative if it is not."""
    narrowest = min(problem.itemsizes.values())
    memory = max(1, share.memory // narrowest)
    elements = 2 * share.products / sqrt(memory) - 2 * memory
    return (elements - (0 if problem.reads_c else share.elements)) * narrowest
