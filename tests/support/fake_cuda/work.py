"""What the scheduler of the fake device needs to know about a launch of a kernel."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.support.fake_cuda.memory import Block

# The macros that a kernel is compiled with, and the size of the launch's grid as "grid x" and "grid y".
Macros = Mapping[str, str]


class Work(NamedTuple):
    """A launch that is ready to run, with the memory that it reads and writes."""

    run: Callable[[], None]
    reads: list[Block]
    writes: list[Block]


def values(kinds: tuple[Any, ...], pointers: list[int]) -> tuple[Any, ...]:
    """Return the arguments of a launch, given the C types of the kernel's parameters."""
    return tuple(kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True))
