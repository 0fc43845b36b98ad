"""Spans: what ran, where, when, and what it had waited for. The timeline is their list."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oocgemm.planning import Operation

# Lanes in the order in which data flow through them.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran. Times in nanoseconds since the API call; `waits` are ids of operations that
    had to end before it could start."""

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

    @classmethod
    def of(cls, number: int, op: Operation, start: int, end: int, waits: Iterable[int]) -> "Span":
        return cls(
            *(number, op.kind.value, op.operand, op.lane.value, op.stream, op.device, op.tile, op.step),
            *(start, end, op.bytes, op.flops, tuple(waits)),
        )


@dataclass(frozen=True)
class Timeline:
    """A run: its spans in program order, the wall time T in nanoseconds, and a header that says what it was.

    Of a run that was stopped, or still goes on, T is the end of the last span that was recorded, and `unfinished` says so.
    """

    spans: tuple[Span, ...]
    wall: int
    header: Mapping[str, Any] = field(default_factory=dict)
    unfinished: bool = False
