"""Merge the logs of a distributed run into one.

Each attempt of a worker at a part runs in a process of its own, which writes an ordinary log. The times in
such a log count from its field ``started``, the wall clock of the worker's host. `merge` shifts them by the
clock offset of the worker. All times then count from the start of the whole run, on the coordinator's clock.

A worker that is restarted under the same name on the same host remains one worker. If a process dies, its log
has no last line, and may lack the last second. The tiles that it finished count: those of which all bytes
have been written. If several attempts finished a tile, the tile of the first one counts. All other work on
tiles is listed in `Attempt.thrown_away`.

Three fields of the header of an attempt's log describe a k-split. ``k_slice`` is the number of the slice of k
(default 0). Partial products are stacked, so the slice has other rows than C: ``first_tile_row`` is its first
row of tiles (default 0). ``task`` is ``reduce`` if the process added partial products instead of multiplying.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from oocgemm.errors import InputError
from oocgemm.planning.problem import DTYPES
from oocgemm.timeline.log import Recorder, read_log
from oocgemm.timeline.spans import Timeline
from oocgemm.timeline.units import Attempt, Worker
from oocgemm.timeline.worker_log import WorkerLog

# A tile of a slice of k: the number of the slice, then row and column of the tile. The slice of a sum of
# partial products is -1.
SliceTile = tuple[int, int, int]


def merge(log: Recorder, attempts: Iterable[WorkerLog]) -> dict[str, Any]:
    """Add the spans of all attempts of a distributed run to the log of the run.

    Workers are numbered in the order of their hosts and names. One log at a time is held in memory. The
    header of `log` must have the field ``started``: the wall clock of the coordinator at the start of the
    run, in seconds since 1970. The sample of spans in `log` is cleared, because rates of several machines
    together say nothing about one machine.

    Returns the fields to pass to `log.finish`:

    - ``workers``: the workers with their attempts (`oocgemm.timeline.units`).
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
    """What `merge` keeps of an attempt's log after it has added the spans.

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
            replace(
                span,
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

    If the process has ended normally, these are all its tiles. Otherwise, they are those whose bytes have all
    been written.
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
    """Describe a worker by its attempts, of which `reads` have a log that could be read."""
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


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
