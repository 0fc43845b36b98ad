"""Spans: what ran, where, when, and what it had waited for. The timeline is their list."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oocgemm.errors import InputError
from oocgemm.plan import Operation

FORMAT = "oocgemm-timeline"
VERSION = 1
COLUMNS = (
    *("id", "kind", "operand", "lane", "stream", "device", "tile_i", "tile_j", "step"),
    *("start_ns", "end_ns", "bytes", "flops", "waits"),
)


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

    def row(self) -> list[Any]:
        """The span as a row of the log, in the order of `COLUMNS`."""
        return [
            *(self.id, self.kind, self.operand, self.lane, self.stream, self.device, *self.tile, self.step),
            *(self.start, self.end, self.bytes, self.flops, list(self.waits)),
        ]


@dataclass(frozen=True)
class Timeline:
    """A run: its spans in program order, the wall time T in nanoseconds, and a header that says what it was."""

    spans: tuple[Span, ...]
    wall: int
    header: Mapping[str, Any] = field(default_factory=dict)


def write_log(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write a timeline as JSON lines: a header that names the columns, a row a span, a footer with T."""
    with open(path, "w", encoding="utf-8") as file:
        header = {"format": FORMAT, "version": VERSION, "columns": COLUMNS} | dict(timeline.header)
        file.write(json.dumps(header) + "\n")
        file.writelines(json.dumps(span.row(), separators=(",", ":")) + "\n" for span in timeline.spans)
        file.write(json.dumps({"wall_ns": timeline.wall, "spans": len(timeline.spans)}) + "\n")


def read_log(path: str | os.PathLike[str]) -> Timeline:
    """Read what `write_log` wrote. Raises `InputError` for anything else, and for a log cut short."""
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline() or "{}")
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise InputError(f"{path} is not a timeline written by oocgemm run --timeline")
            if header["version"] != VERSION:
                raise InputError(
                    f"{path} has timeline version {header['version']}, this program reads {VERSION}"
                )
            names = [*header["columns"]]
            spans, footer = [], None
            for line in file:
                row = json.loads(line)
                if isinstance(row, dict):
                    footer = row
                else:
                    spans.append(_span(dict(zip(names, row, strict=True))))
    except OSError as error:
        raise InputError(f"cannot read the timeline {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a whole timeline: {error}") from error
    if footer is None or footer.get("spans") != len(spans) or "wall_ns" not in footer:
        raise InputError(f"{path} is cut short: it ends after {len(spans)} spans")
    return Timeline(tuple(spans), footer["wall_ns"], header)


def _span(row: dict[str, Any]) -> Span:
    return Span(
        *(row["id"], row["kind"], row["operand"], row["lane"], row["stream"], row["device"]),
        *((row["tile_i"], row["tile_j"]), row["step"], row["start_ns"], row["end_ns"]),
        *(row["bytes"], row["flops"], tuple(row["waits"])),
    )
