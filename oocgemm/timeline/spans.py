"""Spans and timelines. A span records where and when one operation ran, and what it waited for.

A timeline is the list of all spans of a run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oocgemm.planning import Operation

# Lanes, in the order in which data flows through them.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of a run, with the times at which it started and ended.

    `start` and `end` are in nanoseconds since `gemm` was called. `waits` lists the ids of the operations
    that had to end before this one could start. `device` and `worker` are numbers that count from 0; the
    worker of a run in one process is 0.
    """

    id: int
    kind: str
    operand: str
    lane: str
    stream: str
    device: int
    tile: tuple[int, int]
    step: int
    start: int
    end: int
    bytes: int
    flops: int
    waits: tuple[int, ...] = ()
    worker: int = 0

    @classmethod
    def of(cls, number: int, op: Operation, start: int, end: int, waits: Iterable[int]) -> "Span":
        """Return the span of a scheduled operation that ran from `start` to `end`."""
        return cls(
            *(number, op.kind.value, op.operand, op.lane.value, op.stream, op.device, op.tile, op.step),
            *(start, end, op.bytes, op.flops, tuple(waits)),
        )


@dataclass(frozen=True)
class Timeline:
    """All spans of a run in program order.

    `wall` is the wall time of the run in nanoseconds. `header` describes the run: its plan, machine and
    operands. `unfinished` is set if the run was stopped or is still running. `wall` is then the end of the
    last recorded span.
    """

    spans: tuple[Span, ...]
    wall: int
    header: Mapping[str, Any] = field(default_factory=dict)
    unfinished: bool = False
