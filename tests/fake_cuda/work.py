"""What a launch of a kernel is to the scheduler."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.fake_cuda.memory import Block

# Of a launch: those that the kernel is compiled with, and "grid x" and "grid y".
Macros = Mapping[str, str]


class Work(NamedTuple):
    """A launch that is ready to run."""

    run: Callable[[], None]
    reads: list[Block]
    writes: list[Block]
