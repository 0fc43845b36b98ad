"""Write the log of a run while it goes on, read the log back as a timeline, and merge the logs of workers.

The format is JSON lines:

- The header, the first line, describes the run and names the columns (`COLUMNS`).
- A row, a JSON array, stores one span. Rows are written as operations end. ``length_ns`` is the end minus the
  start. ``waits_back`` has, for each id in `Span.waits`, the span's own id minus that id.
- An object with the keys `COMMON` stores values that many spans share. The column ``common`` of a row is the
  number of its object, counted from 0 in the order of the file. The object is written before its first row.
- The footer, the last line, stores T and the facts known only at the end. A log without it belongs to a run
  that was stopped or is still running.

In a distributed run, each attempt of a worker at a part runs in a process of its own, which writes such a
log. Its times count from its field ``started``, the wall clock of the worker's host. `merge` shifts them by
the clock offset of the worker. All times then count from the start of the whole run, on the coordinator's
clock.

A worker that is restarted under the same name on the same host remains one worker. If a process dies, its log
has no last line, and may lack the last second. The tiles that it finished count: those of which all bytes
have been written. If several attempts finished a tile, the tile of the first one counts. All other work on
tiles is listed in `Attempt.thrown_away`.

Three fields of the header of an attempt's log describe a k-split. ``k_slice`` is the number of the slice of k
(default 0). Partial products are stacked, so the slice has other rows than C: ``first_tile_row`` is its first
row of tiles (default 0). ``task`` is ``reduce`` if the process added partial products instead of multiplying.
"""

import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from io import RawIOBase
from itertools import pairwise
from math import inf
from tempfile import TemporaryFile
from time import monotonic
from typing import Any
from weakref import finalize

from oocgemm.errors import InputError, OocGemmError
from oocgemm.planning import Kind, Lane
from oocgemm.planning.problem import DTYPES
from oocgemm.timeline.activities import Attempt, Worker, workers_of
from oocgemm.timeline.spans import Span, Timeline
from oocgemm.values import dataclass

FORMAT = "oocgemm-timeline"
VERSION = 3
COMMON = ("kind", "operand", "lane", "stream", "device", "worker")
COLUMNS = (
    *("id", "common", "tile_i", "tile_j", "step", "start_ns", "length_ns", "bytes", "flops"),
    "waits_back",
)
# Lines are collected before they are written. They are written when there are FLUSH_LINES of them, or when a
# span is added more than FLUSH_SECONDS seconds after the last write. A killed run loses the collected lines.
FLUSH_LINES, FLUSH_SECONDS = 1000, 1.0
# Maximum bytes of compressed log in memory; 1 MiB holds about 50,000 operations. A larger log is moved to a
# temporary file.
MAX_IN_MEMORY = 1 << 20
# In the temporary file, each compressed text is preceded by its length, an integer of this many bytes.
_SIZE_BYTES = 4
_LARGEST = 2**63
# Fields that the objects "checks" and "cpu" of the header must have, as numbers, if the objects exist.
_CHECK_FIELDS = ("tiles", "blocks", "undecided", "seconds", "thread_seconds")
_CPU_FIELDS = ("cores", "own_seconds", "busy_seconds")
_encode = json.JSONEncoder(separators=(",", ":")).encode
# A tile of a slice of k: the number of the slice, then row and column of the tile. The slice of a sum of
# partial products is -1.
SliceTile = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """Where the timeline log of an attempt is, and how its clock relates to that of the coordinator.

    `offset_ns` is the wall clock of the worker minus that of the coordinator, in nanoseconds, and `error_ns`
    its maximum error. `part` and `attempt` are numbers. `lost` is set if the process died or failed. Then
    only the tiles that it had finished count.
    """

    worker: str
    host: str
    device: str
    offset_ns: int
    error_ns: int
    path: str
    part: int
    attempt: int
    lost: bool


class Recorder:
    """Record the spans of a run as they end, compressed to about 20 bytes per span.

    If `path` is given, the log is also written to that file, uncompressed. An existing file is replaced. The
    constructor raises `OSError` if the file cannot be created. If a later write fails, the run continues:
    `failure` is set to the error, and nothing more is written to the file.

    Without a path, up to `FLUSH_LINES` spans are kept as they are: encoding them would take a large part of
    the time of a small product. `timeline` encodes them. `later` has fields of the header, each with a
    function that returns its value, which is called when the header is encoded. `sample` keeps some spans.

    A recorder is not thread-safe.
    """

    def __init__(
        self,
        header: Mapping[str, Any],
        path: str | os.PathLike[str] | None = None,
        later: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.spans = 0
        self.header = dict(header)  # a copy, because `finish` adds fields
        self.wall = 0
        self.failure: OSError | None = None
        self._footer: dict[str, Any] | None = None
        self._common: dict[tuple[Any, ...], int] = {}
        self._in_memory: list[bytes] = []
        self._in_memory_bytes = 0
        self._max_in_memory: float = MAX_IN_MEMORY
        self._spilled: RawIOBase | None = None
        self._spilled_bytes = 0
        self._later: Mapping[str, Callable[[], Any]] | None = later or {}  # None: the header is encoded
        self._waiting: list[Span] = []  # recorded, not yet encoded
        self._lines: list[str] = []
        self._since = monotonic()
        self._file = open(path, "wb") if path is not None else None  # noqa: SIM115 - open until `close`
        if self._file is not None:
            self._flush()

    def add(self, span: Span) -> None:
        """Record a span."""
        self._waiting.append(span)
        self.spans += 1
        if len(self._waiting) >= FLUSH_LINES or monotonic() - self._since > FLUSH_SECONDS:
            self._flush()

    def _encode_header(self) -> None:
        """Add the header to the lines, unless it has been added before."""
        if self._later is not None:
            self.header |= {name: value() for name, value in self._later.items()}
            self._later = None
            fields = {"format": FORMAT, "version": VERSION, "columns": COLUMNS}
            self._lines.append(_encode(fields | self.header))

    def _encode_span(self, span: Span) -> None:
        key = span.kind, span.operand, span.lane, span.stream, span.device, span.worker
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = len(self._common)
            self._lines.append(_encode(dict(zip(COMMON, key, strict=True))))
        times = span.start, span.end - span.start
        back = [span.id - wait for wait in span.waits]
        self._lines.append(
            _encode([span.id, common, *span.tile, span.step, *times, span.bytes, span.flops, back])
        )

    def finish(self, wall: int, facts: Mapping[str, Any]) -> None:
        """Record the end of the run after `wall` nanoseconds.

        `facts` are fields that are added to the header. They replace fields of the same names.
        """
        self.header |= facts
        self.wall = wall
        self._footer = {"wall_ns": wall, "spans": self.spans} | dict(facts)

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        if self._file is not None or self._in_memory or self._spilled is not None:
            self._flush()
        if self._file is not None:
            with suppress(OSError):  # if a write failed, `failure` already has its error
                self._file.close()

    def timeline(self) -> Timeline:
        """Return the recorded timeline. Close the recorder first."""
        self._flush()
        return _parse(
            line for chunk in self._chunks() for line in zlib.decompress(chunk).decode().splitlines(True)
        )

    def _chunks(self) -> Iterator[bytes]:
        """Yield the compressed texts, the oldest first."""
        at = 0
        while self._spilled is not None and at < self._spilled_bytes:
            self._spilled.seek(at)
            size = int.from_bytes(_read_exactly(self._spilled, _SIZE_BYTES), "little")
            yield _read_exactly(self._spilled, size)
            at += _SIZE_BYTES + size
        yield from self._in_memory

    def _keep(self, chunk: bytes) -> None:
        self._in_memory.append(chunk)
        self._in_memory_bytes += len(chunk)
        if self._in_memory_bytes <= self._max_in_memory:
            return
        text = b"".join(len(chunk).to_bytes(_SIZE_BYTES, "little") + chunk for chunk in self._in_memory)
        try:
            if self._spilled is None:
                self._spilled = TemporaryFile(buffering=0, prefix="oocgemm-timeline-")  # noqa: SIM115
                finalize(self, self._spilled.close)
            left = memoryview(text)
            while left:
                left = left[self._spilled.write(left) or 0 :]
        except OSError:  # no space for temporary files: the log stays in memory
            self._max_in_memory = inf
            return
        self._spilled_bytes += len(text)
        self._in_memory.clear()
        self._in_memory_bytes = 0

    def _flush(self) -> None:
        self._encode_header()
        for span in self._waiting:
            self._encode_span(span)
        self._waiting.clear()
        if self._footer is not None:
            self._lines.append(_encode(self._footer))
            self._footer = None
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


def _read_exactly(file: RawIOBase, size: int) -> bytes:
    """Read `size` bytes, with several calls if a call returns fewer. The file must contain that many."""
    found = b""
    while len(found) < size:
        found += file.read(size - len(found)) or b""
    return found


def read_log(path: str | os.PathLike[str]) -> Timeline:
    """Return the timeline in a log file. The log of an unfinished run is read up to its last complete line.

    Raises `InputError` if the file cannot be read or is not a log.
    """
    with damage(path):
        try:
            with open(path, encoding="utf-8") as file:
                return _parse(file)
        except OSError as error:
            raise InputError(f"cannot read the timeline {path}: {error.strerror}") from error
        except _NotATimeline as error:
            raise InputError(f"{path} {error}") from error


@contextmanager
def damage(*paths: str | os.PathLike[str]) -> Iterator[None]:
    """Raise `InputError` if the `with` block, which reads logs or reports on them, fails on a damaged log.

    A header has hundreds of fields, and any may be missing or have another type. `paths` are the logs.
    """
    try:
        yield
    except OocGemmError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        what = " or ".join(map(os.fsdecode, paths))
        found = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise InputError(f"{what} is not a timeline, or it is damaged: {found}") from error


class _NotATimeline(Exception):  # noqa: N818 - becomes an `InputError`
    """Raised for a file that is not a log, or one of another format version.

    The message lacks its subject: `read_log` puts the file's name before it.
    """


def _parse(lines: Iterable[str]) -> Timeline:
    """Return the timeline that the lines of a log contain.

    Raises `ValueError`, `LookupError` or `TypeError` if the log is damaged, and `_NotATimeline` if the lines
    are not a log of this format version.
    """
    parts = _values(lines)
    header: dict[str, Any] = next(parts, {})
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _NotATimeline("is not a timeline written by oocgemm run --timeline")
    version = header["version"]
    if version != VERSION:
        raise _NotATimeline(f"has format version {version}; this program reads version {VERSION}")
    spans: list[Span] = []
    common: list[tuple[Any, ...]] = []
    footer: dict[str, Any] | None = None
    for part in parts:
        if footer is not None:
            raise ValueError("there are lines after the footer")
        if isinstance(part, list):
            spans.append(_span(part, common))
        elif "wall_ns" in part:
            footer = part
        else:
            common.append(_common(part))
    spans.sort(key=lambda span: span.id)
    if any(one.id == other.id for one, other in pairwise(spans)):
        raise ValueError("two of its operations have the same id")
    wall = max((span.end for span in spans), default=0)
    if footer is not None:
        wall, header = footer.pop("wall_ns"), header | footer
        announced = header.pop("spans")
        if announced != len(spans) or not _is_count(wall):
            raise ValueError(f"it has {len(spans)} spans, but the footer says {announced}")
    _check(header)
    return Timeline(tuple(spans), wall, header, unfinished=footer is None)


def _values(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the JSON value of each line. If the last line was not written completely, it is left out."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            if line.endswith("\n"):
                raise
            return
        yield value


def _common(part: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of the fields in `COMMON` from their line. Raises an error if the line is damaged."""
    *texts, device, worker = found = tuple(part[name] for name in COMMON)
    if not all(isinstance(text, str) for text in texts) or not (_is_count(device) and _is_count(worker)):
        raise ValueError(f"{part} is damaged")
    Kind(part["kind"]), Lane(part["lane"])
    return found


def _span(row: list[Any], common: list[tuple[Any, ...]]) -> Span:
    """Return the span that a row stores. Raises an error if the row is damaged."""
    *counts, back = row
    number, which, i, j, step, start, length, size, flops = counts
    if not all(map(_is_count, counts)) or not all(_is_count(b) and 0 < b <= number for b in back):
        raise ValueError(f"span {number} is damaged")
    waits = tuple(number - b for b in back)
    kind, operand, lane, stream, device, worker = common[which]
    place = kind, operand, lane, stream, device, (i, j), step
    return Span(number, *place, start, start + length, size, flops, waits, worker)


def _check(header: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a field of a log's header does not have the type that reports expect."""
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
            and all(_is_number(checks.get(name)) for name in _CHECK_FIELDS if checks)
            and all(_is_number(cpu.get(name)) for name in _CPU_FIELDS if cpu)
            and isinstance(checks.get("recomputed", []), list)
            and isinstance(backend.get("memory", ""), str)
            and isinstance(retried, list)
            and isinstance(kernels, list)
            and all(isinstance(name, str) for name in [*names, *retried, *kernels])
            and isinstance(header.get("devices") or [], list)
            and _is_interval(header.get("sampling", [0, 0]))
            and _is_problem(plan.get("problem") or {})
            and _has_kernels(plan.get("model") or {})
        ):
            with suppress(ValueError, LookupError, TypeError):
                workers_of(header)
                return
    raise ValueError("its header is damaged")


def _is_problem(problem: object) -> bool:
    """Return whether the extents and dtypes of a plan's problem have the right types. Any may be missing."""
    if not isinstance(problem, dict):
        return False
    names = [problem.get(f"{x}_dtype", "") for x in ("a", "b", "acc", "c")] + [problem.get("compute", "")]
    return all(_is_count(problem.get(x, 0)) for x in "mnk") and all(isinstance(x, str) for x in names)


def _has_kernels(model: object) -> bool:
    """Return whether the kernels of a plan's machine model, if there are any, are objects."""
    kernels = model.get("kernels", {}) if isinstance(model, dict) else None
    return isinstance(kernels, dict) and all(isinstance(kernel, dict) for kernel in kernels.values())


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST  # type: ignore[operator]


def merge(log: Recorder, attempts: Iterable[WorkerLog]) -> dict[str, Any]:
    """Add the spans of all attempts of a distributed run to the log of the run.

    Workers are numbered in the order of their hosts and names. One log at a time is held in memory. The
    header of `log` must have the field ``started``: the wall clock of the coordinator at the start of the
    run, in seconds since 1970. The sample of spans in `log` is cleared, because rates of several machines
    together say nothing about one machine.

    Returns the fields to pass to `log.finish`:

    - ``workers``: the workers with their attempts (`oocgemm.timeline.activities`).
    - ``unread``: texts that name the logs that could not be read. Their spans are missing.
    - ``backend``, ``rates``, ``checks``, ``retried``: from the headers of the attempts.
    - ``cpu``: None, since the coordinator does not know how busy the cores of the workers were.
    """
    attempts = list(attempts)
    names = sorted({(one.host, one.worker) for one in attempts}, key=_natural)
    found: defaultdict[int, list[_Read]] = defaultdict(list)
    unread: list[str] = []
    first = 0
    for one in attempts:
        try:
            timeline = read_log(one.path)
            shift = round(1e9 * (timeline.header["started"] - log.header["started"])) - one.offset_ns
            read = _Read.of(one, timeline, shift, first)
        except (InputError, LookupError, TypeError, ValueError) as error:
            unread.append(f"worker {one.worker}, part {one.part}, attempt {one.attempt}: {error}")
            continue
        number = names.index((one.host, one.worker))
        _add(log, timeline, read.part, shift, number)
        found[number].append(read)
        first += read.part.ids
    every = [read for reads in found.values() for read in reads]
    winners = _winners(every)
    workers = [
        asdict(_worker([a for a in attempts if (a.host, a.worker) == name], found[number], winners))
        for number, name in enumerate(names)
    ]
    facts: dict[str, Any] = {"workers": workers, "unread": unread, "cpu": None}
    return facts | _shared([read.header for read in every])


@dataclass(frozen=True)
class _Read:
    """The data that `merge` keeps of an attempt's log after it has added the spans.

    `worked` are the tiles that the attempt worked on. `finished` maps each tile that it finished to the time
    at which the last Write ended.
    """

    log: WorkerLog
    header: Mapping[str, Any]
    part: Attempt
    devices: int
    worked: frozenset[SliceTile]
    finished: Mapping[SliceTile, int]

    @classmethod
    def of(cls, log: WorkerLog, timeline: Timeline, shift: int, first: int) -> "_Read":
        header, spans = timeline.header, timeline.spans
        reduces = header.get("task") == "reduce"
        k_slice = -1 if reduces else int(header.get("k_slice", 0))
        window = max(0, shift), max(0, shift + timeline.wall)
        ids = 1 + max((span.id for span in spans), default=-1)
        part = Attempt(log.part, log.attempt, *window, first, ids, log.lost, reduces, [])
        devices = max([1, len(header.get("devices") or ()), *(span.device + 1 for span in spans)])
        top = _first_tile_row(timeline)
        worked = frozenset((k_slice, span.tile[0] - top, span.tile[1]) for span in spans)
        finished = {(k_slice, i - top, j): shift + end for (i, j), end in _finished(timeline).items()}
        return cls(log, header, part, devices, worked, finished)


def _add(log: Recorder, timeline: Timeline, part: Attempt, shift: int, worker: int) -> None:
    """Add the spans of an attempt to the log of the run, with the ids, tiles and on the clock of the run."""
    top = _first_tile_row(timeline)
    for span in timeline.spans:
        start = max(0, span.start + shift)
        log.add(
            span._replace(
                id=part.first + span.id,
                tile=(span.tile[0] - top, span.tile[1]),
                start=start,
                end=max(start, span.end + shift),
                waits=tuple(part.first + wait for wait in span.waits),
                worker=worker,
            )
        )


def _first_tile_row(timeline: Timeline) -> int:
    return int(timeline.header.get("first_tile_row", 0))


def _finished(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return the tiles that an attempt finished, each with the end of its last Write.

    If the process has ended normally, it finished all its tiles. Otherwise, it finished the tiles whose bytes
    have all been written.
    """
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)
    left: dict[tuple[int, int], int] = {}
    for span in timeline.spans:
        if span.tile not in left:
            left[span.tile] = 0 if not timeline.unfinished else _tile_bytes(timeline.header, span.tile)
        if span.kind == "write":
            left[span.tile] -= span.bytes
            ends[span.tile] = max(ends[span.tile], span.end)
    return {tile: ends[tile] for tile, missing in left.items() if missing <= 0}


def _tile_bytes(header: Mapping[str, Any], tile: tuple[int, int]) -> int:
    """Return the bytes of a tile of the C that an attempt wrote."""
    problem, shape = header["plan"]["problem"], header["plan"]["tile"]
    rows, cols = (
        max(0, min(shape[name], problem[name] - index * shape[name]))
        for name, index in zip("mn", tile, strict=True)
    )
    return int(rows * cols * DTYPES[problem["c_dtype"]].itemsize)


def _winners(reads: Sequence[_Read]) -> dict[SliceTile, int]:
    """Map each finished tile to the first id of the attempt that finished it first."""
    found: dict[SliceTile, tuple[int, int]] = {}
    for read in reads:
        for tile, end in read.finished.items():
            found[tile] = min((end, read.part.first), found.get(tile, (end, read.part.first)))
    return {tile: first for tile, (_, first) in found.items()}


def _worker(
    attempts: Sequence[WorkerLog], reads: Sequence[_Read], winners: Mapping[SliceTile, int]
) -> Worker:
    """Describe a worker by its attempts. Only the logs in `reads` could be read."""
    parts = []
    for read in reads:
        lost = sorted(tile for tile in read.worked if winners.get(tile) != read.part.first)
        parts.append(replace(read.part, thrown_away=[[i, j] for _, i, j in lost]))
    last, header = attempts[-1], reads[-1].header if reads else {}
    clock = max(attempts, key=lambda one: one.error_ns)
    devices = max((read.devices for read in reads), default=1)
    budget = header.get("plan", {}).get("budget", {})
    return Worker(
        *(last.worker, last.host, last.device, devices, clock.offset_ns, clock.error_ns),
        memory=int(budget.get("host", 0) + devices * budget.get("device", 0)),
        kernel_rate=(header.get("rates") or {}).get("kernel"),
        parts=parts,
    )


def _natural(name: tuple[str, str]) -> list[list[str | int]]:
    """Return a sort key that puts "gpu-9" before "gpu-10"."""
    return [[int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)] for text in name]


def _shared(headers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the headers of all attempts that describe the whole run."""
    facts: dict[str, Any] = {"retried": [text for header in headers for text in header.get("retried", [])]}
    if headers:
        kernels = [header.get("backend", {}).get("multiplied by", []) for header in headers]
        used = [*dict.fromkeys(kernel for names in kernels for kernel in names)]
        facts["backend"] = dict(headers[0].get("backend", {})) | {"multiplied by": used}
        facts["rates"] = headers[0].get("rates")
    checks = [header["checks"] for header in headers if header.get("checks")]
    if checks:
        numbers = {
            name: sum(one[name] for one in checks) for name in checks[0] if _is_number(checks[0][name])
        }
        recomputed = [tile for one in checks for tile in one.get("recomputed", [])]
        facts["checks"] = dict(checks[0]) | numbers | {"recomputed": recomputed}
    return facts
