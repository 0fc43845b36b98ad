"""Several products of the same panels for each element of C: the terms.

A *map* is a chain of element steps without numbers. It makes a panel that is multiplied from the elements of
a panel as the steps of its operand leave them. A *term* is the product of one map of op(A) and one map of
op(B). Panels are read and uploaded once. The Prepare of a step makes all maps of its two panels, and its
Multiply adds each term to an accumulator of its own. In a row of an accumulator slot, the sums of the first
term come first, then those of the second term, and so on.

When a tile is finished, the first step of the epilogue combines the sums of all terms to one element of C
(`oocgemm.planning.sinks.COMBINING`). The other steps and the sink go on from there.
"""

from collections.abc import Mapping
from typing import Any

from oocgemm.planning.elements import ElementStep, parsed_steps
from oocgemm.values import dataclass

Map = tuple[ElementStep, ...]


@dataclass(frozen=True)
class Terms:
    """The terms of a product.

    Attributes:
        a, b: the maps of op(A), and those of op(B).
        pairs: for each term, the number of its map in `a`, and that in `b`.
        largest: the largest magnitude of a product of two elements after their maps; 0 if it is unknown. If
            it is known, elements are small integers, and sums are exact.
    """

    a: tuple[Map, ...] = ((),)
    b: tuple[Map, ...] = ((),)
    pairs: tuple[tuple[int, int], ...] = ((0, 0),)
    largest: int = 0

    @property
    def count(self) -> int:
        """The number of terms, and of accumulators."""
        return len(self.pairs)

    @property
    def maps(self) -> int:
        """The number of maps of the operand that has the most."""
        return max(len(self.a), len(self.b))

    @property
    def changes(self) -> bool:
        """Whether any map changes elements."""
        return any(self.a) or any(self.b)

    def of(self, role: str) -> tuple[Map, ...]:
        """Return the maps of the panels in a role, "A" or "B"."""
        return self.a if role == "A" else self.b

    def record(self) -> dict[str, Any]:
        """Return the terms as text for records; nothing for a product of one term."""
        if self == ONE:
            return {}
        a, b = (" | ".join(", ".join(map(str, each)) for each in maps) for maps in (self.a, self.b))
        pairs = " ".join(f"{i}x{j}" for i, j in self.pairs)
        return {"terms": pairs, "maps_a": a, "maps_b": b, "largest": self.largest}

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> "Terms":
        """Rebuild terms from the `record` of a product."""
        if not data.get("terms"):
            return ONE
        a, b = (tuple(map(parsed_steps, data[name].split("|"))) for name in ("maps_a", "maps_b"))
        numbers = (pair.partition("x") for pair in data["terms"].split())
        return cls(a, b, tuple((int(i), int(j)) for i, _, j in numbers), data["largest"])


# The terms of an ordinary product.
ONE = Terms()
