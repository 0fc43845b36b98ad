"""What happens to each element of an operand between storage and product: a chain of steps.

Each step replaces every element x. A step may have a number u per row or per column of the stored array, and
constants. All steps are computed in float64. The result of the last one is rounded once, to the dtype in
which the operand is multiplied.

This module only describes the steps. `oocgemm.stores.transformed` does them for NumPy arrays, and
kernels/transforms/steps.cuh in CUDA.
"""

from collections.abc import Sequence
from math import isnan, nan
from typing import NamedTuple

from oocgemm.values import dataclass

# Maximum number of steps in a chain: their numbers are an argument of the kernel.
MAX_STEPS = 8

# Where the numbers of a step come from: from the caller, from a pass over the operand before the run, or from
# the panels that the device transforms (`oocgemm.jobs.prepare`).
GIVEN, STREAMED, IN_PANEL = "given", "streamed", "in_panel"


class StepKind(NamedTuple):
    """A kind of step: what becomes of x, and whether it has a number u per row or column.

    If a step is `deferred`, elements are not changed. Instead, C is corrected when it is finished. Steps that
    `decode` come first. For the other steps, what they make is the stored element.
    """

    formula: str
    has_numbers: bool = True
    deferred: bool = False
    decodes: bool = False


KINDS = {
    "absent": StepKind("NaN where x is the constant; x elsewhere", has_numbers=False, decodes=True),
    "unsigned": StepKind("x, plus the constant if x is below 0", has_numbers=False, decodes=True),
    "normalize": StepKind("x u", decodes=True),
    "unpack": StepKind("the first constant times x, plus the second one", has_numbers=False, decodes=True),
    "log1p": StepKind("log(1 + x)", has_numbers=False),
    "impute": StepKind("u where the stored element is the constant, or NaN if that is NaN; x elsewhere"),
    "center": StepKind("x - u"),
    "scale": StepKind("x u"),
    "clip": StepKind("x, but at least the first constant and at most the second one", has_numbers=False),
    "known": StepKind("1, but 0 where x is the constant, or NaN if that is NaN", has_numbers=False),
    "or_zero": StepKind("x, but 0 where it is the constant, or NaN if that is NaN", has_numbers=False),
    "equal": StepKind("1 where x is the constant; 0 elsewhere", has_numbers=False),
    "shift": StepKind("x plus the constant", has_numbers=False),
    "square": StepKind("x^2", has_numbers=False),
    "correct": StepKind("x. The product is that of x - u, of integers x: C is corrected", deferred=True),
}


@dataclass(frozen=True, slots=True)
class ElementStep:
    """A step of a chain.

    Attributes:
        kind: one of `KINDS`.
        axis: "rows" or "cols" if the step has a number per row or per column of the stored array, else "".
        source: where the numbers come from: `GIVEN`, `STREAMED` or `IN_PANEL`.
        rule: which numbers these are, if they are not given: "mean", "std", "hwe" or "raise"
            (`oocgemm.Transform`).
        constants: the constants of the step.
    """

    kind: str
    axis: str = ""
    source: str = GIVEN
    rule: str = ""
    constants: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # All NaN are one object, so that equal steps compare equal.
        object.__setattr__(self, "constants", tuple(nan if isnan(x) else x for x in self.constants))

    @property
    def is_deferred(self) -> bool:
        """Whether C is corrected instead of elements."""
        return KINDS[self.kind].deferred

    @property
    def decodes(self) -> bool:
        return KINDS[self.kind].decodes

    @property
    def in_panel(self) -> bool:
        """Whether the device finds the numbers in panels."""
        return self.source == IN_PANEL

    def __str__(self) -> str:
        """Return the step as text, which `parsed_steps` reads."""
        words = self.kind, self.axis or "-", self.source, self.rule or "-", *map(repr, self.constants)
        return " ".join(words)


def parsed_steps(text: str) -> tuple[ElementStep, ...]:
    """Return the steps whose texts are joined by commas.

    >>> parsed_steps("impute cols given - -1.0, center cols streamed k")[0].constants
    (-1.0,)
    """
    found = list[ElementStep]()
    for part in filter(None, text.split(",")):
        kind, axis, source, rule, *constants = ("" if word == "-" else word for word in part.split())
        found.append(ElementStep(kind, axis, source, rule, tuple(map(float, constants))))
    return tuple(found)


def missing_code(steps: Sequence[ElementStep]) -> float | None:
    """Return the value that stands for a missing element in storage; None if no element is missing."""
    return next((step.constants[0] for step in steps if step.kind == "impute"), None)
