"""The log of a run: written span by span as the run goes on, and read back as a timeline.

JSON lines: a header that says what was run and names the columns; a row a span, in the order in which they were seen to end;
a footer with T and what is known at the end only. What spans have in common, such as their lane, is a line of its own
before the first of them, and they give its number. A span gives its length, and how far back each span lies that it
waited for: with that a span takes some 60 bytes. A log without a footer is that of a run which was stopped, or still goes on.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import RawIOBase
from itertools import pairwise
from math import inf
from tempfile import TemporaryFile
from time import monotonic
from typing import Any
from weakref import finalize

from oocgemm.errors import InputError
from oocgemm.planning import Kind, Lane
from oocgemm.timeline.spans import Span, Timeline

FORMAT = "oocgemm-timeline"
VERSION = 2
COMMON = ("kind", "operand", "lane", "stream", "device")
COLUMNS = (
    *("id", "common", "tile_i", "tile_j", "step", "start_ns", "length_ns", "bytes", "flops"),
    "waits_back",
)
# Lines go out together, when there are that many or the first of them is that old in seconds: a run that is killed
# loses no more of its log.
TOGETHER, SOON = 1000, 1.0
# Compressed bytes of a log that a run holds in memory: those of about 50,000 operations.
MAX_KEPT = 1 << 20
_SIZE_BYTES = 4  # of a compressed chunk's length in the temporary file
_LARGEST = 2**63
# What a checked run says of it, in numbers.
_CHECKED = ("tiles", "blocks", "undecided", "seconds", "thread_seconds")
# Of the cores that it could use: how many, and the seconds that it used of them, and that all programs together did.
_CPU = ("cores", "own_seconds", "busy_seconds")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """Record the spans of a run as they end, compressed to some 20 bytes per span.

    At most `MAX_KEPT` bytes of them are held in memory; the rest goes to a temporary file. With a `path` the log is written
    there too and replaces what is there. Only one thread at a time may call a recorder.

    Raises `OSError` if the file at `path` cannot be begun. If it cannot be continued, `failure` says why and the run goes
    on. If the temporary file cannot be written, everything stays in memory.
    """

    def __init__(self, header: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
        self.spans = 0
        self.header = dict(header)  # once the run has finished, with the facts that are known then
        self.wall = 0
        self.failure: OSError | None = None
        self._common: dict[tuple[Any, ...], int] = {}
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._max_kept: float = MAX_KEPT
        self._spilled: RawIOBase | None = None
        self._spilled_bytes = 0
        self._lines = [_encode({"format": FORMAT, "version": VERSION, "columns": COLUMNS} | dict(header))]
        self._since = monotonic()
        self._file = open(path, "wb") if path is not None else None  # noqa: SIM115 - until `close`
        self._flush()

    def add(self, span: Span) -> None:
        """Write a span down."""
        key = span.kind, span.operand, span.lane, span.stream, span.device
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = len(self._common)
            self._lines.append(_encode(dict(zip(COMMON, key, strict=True))))
        times = span.start, span.end - span.start
        back = [span.id - wait for wait in span.waits]
        self._lines.append(
            _encode([span.id, common, *span.tile, span.step, *times, span.bytes, span.flops, back])
        )
        self.spans += 1
        if len(self._lines) >= TOGETHER or monotonic() - self._since > SOON:
            self._flush()

    def finish(self, wall: int, facts: Mapping[str, Any]) -> None:
        """The run has ended, after `wall` nanoseconds; `facts` join the header, or replace what is there."""
        self.header |= facts
        self.wall = wall
        self._lines.append(_encode({"wall_ns": wall, "spans": self.spans} | dict(facts)))

    def close(self) -> None:
        """Bring what is left to the file and let go of it."""
        self._flush()
        if self._file is not None:
            with suppress(OSError):  # `failure` has it
                self._file.close()

    def timeline(self) -> Timeline:
        """Return what was recorded, once the recorder is closed."""
        return _parse(
            line for chunk in self._chunks() for line in zlib.decompress(chunk).decode().splitlines(True)
        )

    def _chunks(self) -> Iterator[bytes]:
        """The compressed chunks in order, those in the temporary file first."""
        at = 0
        while self._spilled is not None and at < self._spilled_bytes:
            self._spilled.seek(at)
            size = int.from_bytes(_exactly(self._spilled, _SIZE_BYTES), "little")
            yield _exactly(self._spilled, size)
            at += _SIZE_BYTES + size
        yield from self._kept

    def _keep(self, chunk: bytes) -> None:
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        if self._kept_bytes <= self._max_kept:
            return
        text = b"".join(len(chunk).to_bytes(_SIZE_BYTES, "little") + chunk for chunk in self._kept)
        try:
            if self._spilled is None:
                self._spilled = TemporaryFile(buffering=0, prefix="oocgemm-timeline-")  # noqa: SIM115
                finalize(self, self._spilled.close)
            left = memoryview(text)
            while left:
                left = left[self._spilled.write(left) or 0 :]
        except OSError:  # no room for temporary files
            self._max_kept = inf
            return
        self._spilled_bytes += len(text)
        self._kept.clear()
        self._kept_bytes = 0

    def _flush(self) -> None:
        if not self._lines:
            return
        text = "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        self._since = monotonic()
        self._keep(zlib.compress(text, 1))
        if self._file is not None and self.failure is None:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self.failure = error


def _exactly(file: RawIOBase, size: int) -> bytes:
    """Read so many bytes that the file is known to hold."""
    found = b""
    while len(found) < size:
        found += file.read(size - len(found)) or b""
    return found


def read_log(path: str | os.PathLike[str]) -> Timeline:
    """Read a log, that of a run which did not end as far as it goes. Raises `InputError` for anything else."""
    try:
        with open(path, encoding="utf-8") as file:
            return _parse(file)
    except OSError as error:
        raise InputError(f"cannot read the timeline {path}: {error.strerror}") from error
    except _NoTimeline as error:
        raise InputError(f"{path} {error}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a timeline, or a damaged one: {error}") from error


class _NoTimeline(Exception):  # noqa: N818 - becomes an `InputError`
    """What is wrong with a file as a whole."""


def _parse(lines: Iterable[str]) -> Timeline:
    """The timeline of a log. Raises `ValueError`, `LookupError` or `TypeError` if it is none."""
    parts = _values(lines)
    header: dict[str, Any] = next(parts, {})
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _NoTimeline("is not a timeline written by oocgemm run --timeline")
    if header["version"] != VERSION:
        raise _NoTimeline(f"has timeline version {header['version']}, this program reads {VERSION}")
    spans: list[Span] = []
    common: list[tuple[Any, ...]] = []
    footer: dict[str, Any] | None = None
    for part in parts:
        if footer is not None:
            raise ValueError("it goes on after its end")
        if isinstance(part, list):
            spans.append(_span(part, common))
        elif "wall_ns" in part:
            footer = part
        else:
            common.append(_common(part))
    spans.sort(key=lambda span: span.id)
    if any(one.id == other.id for one, other in pairwise(spans)):
        raise ValueError("it has a span twice")
    wall = max((span.end for span in spans), default=0)
    if footer is not None:
        wall, header = footer.pop("wall_ns"), header | footer
        if header.pop("spans") != len(spans) or not _is_count(wall):
            raise ValueError(f"it has {len(spans)} spans, and not those that its end tells of")
    _check(header)
    return Timeline(tuple(spans), wall, header, unfinished=footer is None)


def _values(lines: Iterable[str]) -> Iterator[Any]:
    """Each line's value; of a line that was not written to its end there is none."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            if line.endswith("\n"):
                raise
            return
        yield value


def _common(part: dict[str, Any]) -> tuple[Any, ...]:
    """What spans have in common. Raises `ValueError` if no run writes that."""
    *texts, device = found = tuple(part[name] for name in COMMON)
    if not all(isinstance(text, str) for text in texts) or not _is_count(device):
        raise ValueError(f"{part} is damaged")
    Kind(part["kind"]), Lane(part["lane"])
    return found


def _span(row: list[Any], common: list[tuple[Any, ...]]) -> Span:
    """A row of the log. Raises `ValueError` for one that no run writes."""
    *counts, back = row
    number, which, i, j, step, start, length, size, flops = counts
    if not all(map(_is_count, counts)) or not all(_is_count(b) and 0 < b <= number for b in back):
        raise ValueError(f"span {number} is damaged")
    waits = tuple(number - b for b in back)
    kind, operand, lane, stream, device = common[which]
    place = kind, operand, lane, stream, device, (i, j), step
    return Span(number, *place, start, start + length, size, flops, waits)


def _check(header: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a header whose parts are not what reports take them for."""
    tables = [header.get(name, {}) for name in ("plan", "operands", "backend", "machine", "versions")]
    tables += [header.get(name) or {} for name in ("rates", "checks", "cpu")]
    plan, operands, backend, machine, _, rates, checks, cpu = tables
    if all(isinstance(table, dict) for table in tables) and all(
        isinstance(x, dict) for x in operands.values()
    ):
        figures = [plan.get(name, {}) for name in ("required", "least", "read_amplification")]
        names, retried = [plan.get("machine", "")], header.get("retried", [])
        kernels = backend.get("multiplied by", [])
        if (
            all(isinstance(table, dict) and all(map(_is_number, table.values())) for table in figures)
            and all(_is_number(rate) and rate > 0 for rate in rates.values())
            and all(_is_number(machine.get(name, 1)) for name in ("cores", "memory"))
            and all(_is_number(checks.get(name)) for name in _CHECKED if checks)
            and all(_is_number(cpu.get(name)) for name in _CPU if cpu)
            and isinstance(checks.get("recomputed", []), list)
            and isinstance(backend.get("memory", ""), str)
            and isinstance(retried, list)
            and isinstance(kernels, list)
            and all(isinstance(name, str) for name in [*names, *retried, *kernels])
        ):
            return
    raise ValueError("its header is damaged")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST  # type: ignore[operator]
