"""Spans: what ran, where, when, and what it had waited for. The timeline is their list."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oocgemm.errors import InputError
from oocgemm.plan import Kind, Lane, Operation

FORMAT = "oocgemm-timeline"
VERSION = 1
COLUMNS = (
    *("id", "kind", "operand", "lane", "stream", "device", "tile_i", "tile_j", "step"),
    *("start_ns", "end_ns", "bytes", "flops", "waits"),
)
_TEXTS = ("kind", "operand", "lane", "stream")
_COUNTS = [name for name in COLUMNS if name not in (*_TEXTS, "waits")]
_LARGEST = 2**63


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
            _check(header)
            names = [*header["columns"]]
            spans, footer = [], None
            for line in file:
                row = json.loads(line)
                if isinstance(row, dict):
                    footer = row
                else:
                    spans.append(_span(dict(zip(names, row, strict=True))))
                    if len(spans) > 1 and spans[-1].id <= spans[-2].id:
                        raise ValueError(f"span {spans[-1].id} is out of order")
    except OSError as error:
        raise InputError(f"cannot read the timeline {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a whole timeline: {error}") from error
    if footer is None or footer.get("spans") != len(spans) or not _is_count(footer.get("wall_ns")):
        raise InputError(f"{path} is cut short: it ends after {len(spans)} spans")
    return Timeline(tuple(spans), footer["wall_ns"], header)


def _span(row: dict[str, Any]) -> Span:
    """A row of the log. Raises `ValueError` for one that no run writes."""
    counts, texts = [row[name] for name in _COUNTS] + row["waits"], [row[name] for name in _TEXTS]
    if not all(map(_is_count, counts)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"span {row['id']} is damaged")
    Kind(row["kind"]), Lane(row["lane"])
    if row["start_ns"] > row["end_ns"] or any(wait >= row["id"] for wait in row["waits"]):
        raise ValueError(f"span {row['id']} ends before it starts, or waits for what comes after it")
    return Span(
        *(row["id"], row["kind"], row["operand"], row["lane"], row["stream"], row["device"]),
        *((row["tile_i"], row["tile_j"]), row["step"], row["start_ns"], row["end_ns"]),
        *(row["bytes"], row["flops"], tuple(row["waits"])),
    )


def _check(header: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a header whose parts are not what reports take them for."""
    plan, rates, operands = header.get("plan", {}), header.get("rates") or {}, header.get("operands", {})
    tables = [plan, rates, operands, *operands.values()] if isinstance(operands, dict) else [None]
    if all(isinstance(table, dict) for table in tables):
        figures = [plan.get(name, {}) for name in ("required", "least", "read_amplification")]
        names, retried = [plan.get("machine", "")], header.get("retried", [])
        if (
            all(isinstance(table, dict) and all(map(_is_number, table.values())) for table in figures)
            and all(_is_number(rate) and rate > 0 for rate in rates.values())
            and isinstance(retried, list)
            and all(isinstance(name, str) for name in [*names, *retried])
        ):
            return
    raise ValueError("its header is damaged")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST  # type: ignore[operator]
