"""The logs of a distributed run become one timeline, and its figures follow their definitions."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import InputError
from oocgemm.timeline import Recorder, Span, Timeline, read_log, report
from oocgemm.timeline.activities import Attempt, Unit, Worker, activities, attempts_of, units_of, workers_of
from oocgemm.timeline.log import WorkerLog, merge
from oocgemm.timeline.spans import length, union
from tests.support.logged_parts import GRID, K, M, N, Part, distributed_run, merged, operands
from tests.support.products import product_of

PARTS = [
    Part("first", (0, 3), (0, 2), kill_after=3),
    Part("second", (0, 2), (2, 4)),
    Part("first", (0, 3), (0, 2)),
    Part("second", (2, 3), (2, 4)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, list[WorkerLog]]:
    folder = tmp_path_factory.mktemp("parts")
    operands(folder)
    return distributed_run(folder, PARTS)


def busy(spans: Sequence[Span], lane: str) -> int:
    return length(union((span.start, span.end) for span in spans if span.lane == lane))


def test_the_whole_has_the_operations_of_all_logs(run: tuple[Timeline, list[WorkerLog]]) -> None:
    timeline, logs = run
    children = [read_log(log.path) for log in logs]
    figures = report(timeline)
    for lane in ("decode", "compute", "write"):
        found = figures.lanes[lane]
        assert found["operations"] == sum(span.lane == lane for child in children for span in child.spans)
        # The attempts of a worker do not overlap, and the busy time of a lane is the mean over the workers.
        assert round(2e9 * found["busy"]) == sum(busy(child.spans, lane) for child in children)
    assert figures.flops == sum(span.flops for child in children for span in child.spans)
    assert figures.traffic["write"]["bytes"] == sum(
        report(log.path).traffic["write"]["bytes"] or 0 for log in logs
    )
    spread = figures.distribution
    assert spread is not None
    assert [unit.worker for unit in spread.units] == ["first", "second"]
    assert (spread.workers, spread.hosts, spread.lost["attempts"]) == (2, 2, 1)


def test_waits_are_those_of_the_logs(run: tuple[Timeline, list[WorkerLog]]) -> None:
    timeline, logs = run
    merged_waits = [
        [tuple(span.id - w for w in span.waits) for span in own] for _, _, own in attempts_of(timeline)
    ]
    own_waits = {
        number: [
            tuple(s.id - w for w in s.waits) for s in sorted(read_log(log.path).spans, key=lambda s: s.id)
        ]
        for number, log in enumerate(logs)
    }
    order = [part.part for worker in workers_of(timeline.header) for part in worker.parts]
    assert merged_waits == [own_waits[number] for number in order]


def test_what_each_worker_did_covers_the_whole_time(run: tuple[Timeline, list[WorkerLog]]) -> None:
    timeline, _ = run
    for unit, did in activities(timeline).items():
        assert did[0][0] == 0
        assert did[-1][1] == timeline.wall
        assert all(one[1] == other[0] for one, other in pairwise(did))
        own = [(s.start, s.end) for s in timeline.spans if s.worker == unit.worker and s.kind == "multiply"]
        assert sum(end - start for start, end, cause in did if cause == "compute") == length(union(own))
        # Before, between and after its two parts the worker has none.
        assert sum(cause == "part-wait" for _, _, cause in did) == 3
    assert sum(report(timeline).shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("offset", [12_345, 50_000_000])
def test_clock_offsets_shift_the_spans(run: tuple[Timeline, list[WorkerLog]], offset: int) -> None:
    timeline, logs = run
    moved = [replace(log, offset_ns=-offset if log.worker == "second" else 0) for log in logs]
    shifted = merged(dict(timeline.header), moved, timeline.wall)
    for one, other in zip(timeline.spans, shifted.spans, strict=True):
        by = offset if one.worker == 1 else 0
        assert (other.id, other.start, other.end) == (one.id, one.start + by, one.end + by)
    assert [worker["clock_offset_ns"] for worker in shifted.header["workers"]] == [0, -offset]


def test_every_tile_counts_once(run: tuple[Timeline, list[WorkerLog]]) -> None:
    """The killed process finished three tiles. The attempt after it computed them again in vain."""
    timeline, _ = run
    counted: defaultdict[tuple[int, int], int] = defaultdict(int)
    for _, part, spans in attempts_of(timeline):
        for tile in {span.tile for span in spans} - {(i, j) for i, j in part.thrown_away}:
            counted[tile] += 1
    assert counted == dict.fromkeys(product(range(GRID[0]), range(GRID[1])), 1)
    figures = report(timeline)
    spread = figures.distribution
    assert spread is not None
    flops = 2 * M * N * K
    assert figures.flops - spread.lost["flops"] == flops
    assert spread.lost["flops"] >= 3 * 2 * 80 * 50 * 160
    assert spread.lost["seconds"] > 0
    assert figures.flop_rate == pytest.approx(flops / figures.wall)


def test_a_merged_log_reads_back_as_it_was_written(
    run: tuple[Timeline, list[WorkerLog]], tmp_path: Path
) -> None:
    timeline, logs = run
    header = {"started": timeline.header["started"], "plan": timeline.header["plan"]}
    again = merged(header, logs, timeline.wall, tmp_path / "whole.jsonl")
    assert again == timeline
    assert read_log(tmp_path / "whole.jsonl") == timeline
    assert report(tmp_path / "whole.jsonl") == report(timeline)


def test_a_log_of_another_version_is_refused(run: tuple[Timeline, list[WorkerLog]], tmp_path: Path) -> None:
    _, logs = run
    (tmp_path / "old.jsonl").write_text(
        Path(logs[1].path).read_text().replace('"version":3', '"version":2', 1)
    )
    with pytest.raises(InputError, match="has format version 2; this program reads version 3"):
        read_log(tmp_path / "old.jsonl")


STARTED = 1_790_000_000.0
PLAN = {
    "problem": product_of(4, 6, 10, "float64", "float64", "float64", "float64").record()
    | {"alpha": 1.0, "beta": 0.0},
    **{"tile": {"m": 4, "n": 3, "k": 10}, "required": {"read": 800}, "least": {"read": 800}},
    "budget": {"device": 1 << 20, "host": 1 << 20},
}


def child(
    folder: Path,
    name: str,
    delay: int,
    spans: Sequence[Span],
    wall: int | None,
    **header: Any,
) -> WorkerLog:
    """Write the log of an attempt that began `delay` ns after the run. Without a `wall` it was killed."""
    path = folder / f"{name}{len(list(folder.iterdir()))}.jsonl"
    log = Recorder({"started": STARTED + delay / 1e9, "plan": PLAN, "rates": {"kernel": 4e12}} | header, path)
    for span in spans:
        log.add(span)
    if wall is not None:
        log.finish(wall, {})
    log.close()
    return WorkerLog(name, "here", "a GPU", 0, 500, str(path), 0, 0, wall is None)


def op(number: int, kind: str, start: int, end: int, *waits: int, tile: int = 0, device: int = 0) -> Span:
    lane = {"multiply": "compute", "upload": "h2d", "download": "d2h"}.get(kind, kind)
    size, flops = (0, 240) if kind == "multiply" else (96, 0)
    return Span(number, kind, "A", lane, lane, device, (0, tile), 0, start, end, size, flops, waits)


def whole(logs: Sequence[WorkerLog], wall: int, **more: Any) -> Timeline:
    return merged({"started": STARTED, "plan": PLAN} | more, list(logs), wall)


MS = 1_000_000
PART = (
    op(0, "read", 0, 10 * MS),
    op(1, "multiply", 15 * MS, 40 * MS, 0),
    op(2, "write", 40 * MS, 50 * MS, 1),
)


def rounded(did: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return intervals in milliseconds. ``started`` is only accurate to a microsecond."""
    return [(round(start / MS), round(end / MS), cause) for start, end, cause in did]


def test_part_wait_and_reduce_worked_out_by_hand(tmp_path: Path) -> None:
    """`a` computes at 10-60 and adds partial products at 80-100. `b` computes at 20-75 and then waits."""
    slow = [*PART[:2], op(2, "write", 40 * MS, 55 * MS, 1)]
    logs = [
        child(tmp_path, "a", 10 * MS, PART, 50 * MS),
        child(tmp_path, "b", 20 * MS, [s._replace(tile=(0, 1)) for s in slow], 55 * MS),
        child(tmp_path, "a", 80 * MS, [op(0, "read", 0, 5 * MS), op(1, "write", 9 * MS, 20 * MS)], 20 * MS,
              task="reduce"),
    ]  # fmt: skip
    timeline = whole(logs, 120 * MS)
    did = activities(timeline)
    assert rounded(did[Unit(0)]) == [
        *(
            (0, 10, "part-wait"),
            (10, 20, "read"),
            (20, 25, "start-up"),
            (25, 50, "compute"),
            (50, 60, "tail"),
        ),
        *((60, 80, "part-wait"), (80, 100, "reduce"), (100, 120, "part-wait")),
    ]
    assert rounded(did[Unit(1)]) == [
        *(
            (0, 20, "part-wait"),
            (20, 30, "read"),
            (30, 35, "start-up"),
            (35, 60, "compute"),
            (60, 75, "tail"),
        ),
        *((75, 80, "part-wait"), (80, 100, "reduce"), (100, 120, "part-wait")),
    ]
    figures = report(timeline)
    assert figures.compute == pytest.approx(0.025)
    assert figures.exposed["reduce"] == pytest.approx(0.02, rel=1e-4)
    assert figures.exposed["part-wait"] == pytest.approx((50 + 45) / 2e3, rel=1e-4)
    spread = figures.distribution
    assert spread is not None
    assert spread.balance == pytest.approx(1)
    assert [spread.first_end, spread.last_end] == pytest.approx([0.075, 0.1])
    assert spread.scaling_efficiency == pytest.approx(480 / (2 * 4e12 * 0.12))


@pytest.mark.parametrize(("backend", "hosts"), [("cuda", 2), ("host", 1)])
def test_workers_that_share_the_cores_of_a_host_count_once(tmp_path: Path, backend: str, hosts: int) -> None:
    logs = [
        child(tmp_path, name, 0, PART, 50 * MS, backend={"name": backend}, k_slice=q)
        for q, name in enumerate("ab")
    ]
    spread = report(whole(logs, 100 * MS)).distribution
    assert spread is not None
    assert spread.scaling_efficiency == pytest.approx(480 / (hosts * 4e12 * 0.1))


def test_a_worker_that_only_adds_is_no_unit(tmp_path: Path) -> None:
    adding = [op(0, "read", 0, 5 * MS), op(1, "write", 9 * MS, 20 * MS)]
    logs = [
        child(tmp_path, "a", 0, PART, 50 * MS),
        child(tmp_path, "sum", 60 * MS, adding, 20 * MS, task="reduce"),
    ]
    timeline = whole(logs, 90 * MS)
    assert units_of(timeline) == [Unit(0)]
    assert rounded(activities(timeline)[Unit(0)])[-3:] == [
        (50, 60, "part-wait"),
        (60, 80, "reduce"),
        (80, 90, "part-wait"),
    ]
    assert report(timeline).lanes["write"]["operations"] == 2


def test_the_tile_of_the_first_to_finish_counts(tmp_path: Path) -> None:
    """A stopped process and its replacement both finish a tile. A killed one does not finish another."""
    cut = [s._replace(tile=(0, 1)) for s in PART[:2]]
    half = [*PART[:2], PART[2]._replace(bytes=95)]
    logs = [
        child(tmp_path, "stopped", 30 * MS, PART, 50 * MS),
        child(tmp_path, "next", 0, PART, 50 * MS),
        child(tmp_path, "killed", 0, cut, None),
        child(tmp_path, "half", 0, half, None),
    ]
    timeline = whole(logs, 120 * MS)
    thrown = {worker.name: worker.parts[0].thrown_away for worker in workers_of(timeline.header)}
    assert thrown == {"stopped": [[0, 0]], "next": [], "killed": [[0, 1]], "half": [[0, 0]]}
    figures = report(timeline)
    spread = figures.distribution
    assert spread is not None
    # Reads and multiplications, without the gap of 5 ms between them, and one write of 10 ms in two cases.
    seconds = pytest.approx((45 + 35 + 45) / 1e3, rel=1e-4)
    assert spread.lost == {"flops": 720, "seconds": seconds, "attempts": 2}
    assert figures.flop_rate == pytest.approx(240 / 0.12)
    lost = {unit.worker: unit.lost_flops for unit in spread.units}
    assert lost == {"half": 240, "killed": 240, "next": 0, "stopped": 240}


def test_a_killed_process_that_wrote_all_of_a_tile_has_finished_it(tmp_path: Path) -> None:
    timeline = whole([child(tmp_path, "a", 0, PART, None)], 60 * MS)
    assert workers_of(timeline.header)[0].parts[0].thrown_away == []
    assert workers_of(timeline.header)[0].parts[0].lost


def test_slices_of_k_are_different_tiles(tmp_path: Path) -> None:
    logs = [child(tmp_path, f"w{q}", 0, PART, 50 * MS, k_slice=q) for q in range(3)]
    spread = report(whole(logs, 60 * MS)).distribution
    assert spread is not None
    assert spread.lost["flops"] == 0


def test_a_log_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    good = child(tmp_path, "a", 0, PART, 50 * MS)
    (tmp_path / "empty.jsonl").write_text("")
    bad = [replace(good, worker="b", path=str(tmp_path / name)) for name in ("none.jsonl", "empty.jsonl")]
    timeline = whole([good, *bad], 60 * MS)
    assert len(timeline.spans) == len(PART)
    assert len(timeline.header["unread"]) == 2
    assert all(text.startswith("worker b, part 0, attempt 0: ") for text in timeline.header["unread"])


def test_no_attempt_leaves_an_empty_report() -> None:
    figures = report(whole([], 60 * MS))
    assert figures.distribution is None
    assert figures.exposed == {"tail": pytest.approx(0.06)}


def test_devices_of_one_process_have_figures_of_their_own() -> None:
    """Device 1 waits for a read that device 0 issued: its gap has that cause."""
    spans = (
        op(0, "read", 0, 10),
        op(1, "multiply", 10, 40, 0),
        op(2, "multiply", 15, 55, 0, device=1),
        op(3, "write", 60, 70, 2, device=1),
    )
    timeline = Timeline(spans, 100, {"devices": ["GPU a", "GPU b"], "rates": {"kernel": 1e10}})
    one, other = (report(timeline, device=device) for device in (0, 1))
    assert one.exposed == {"read": pytest.approx(10e-9), "tail": pytest.approx(60e-9)}
    assert other.exposed == {
        **{"read": pytest.approx(10e-9), "start-up": pytest.approx(5e-9)},
        "tail": pytest.approx(45e-9),
    }
    both = report(timeline)
    assert both.compute_share == pytest.approx(0.35)
    spread = both.distribution
    assert spread is not None
    assert spread.balance == pytest.approx(30 / 40)
    assert [unit.described for unit in spread.units] == ["GPU a", "GPU b"]
    assert spread.scaling_efficiency == pytest.approx(480 / (2e10 * 100e-9))
    assert (spread.first_end, spread.last_end) == (40e-9, 70e-9)


def test_a_gpu_that_is_two_devices_counts_once() -> None:
    spans = (op(0, "multiply", 10, 40), op(1, "multiply", 15, 55, device=1))
    for numbers, count in (("00", 1), ("01", 2)):
        devices = [{"number": number, "device": "a GPU"} for number in numbers]
        timeline = Timeline(spans, 100, {"devices": devices, "rates": {"kernel": 1e10}})
        spread = report(timeline).distribution
        assert spread is not None
        assert spread.scaling_efficiency == pytest.approx(480 / (count * 1e10 * 100e-9))
        assert spread.units[1].described == "a GPU"


@st.composite
def attempts(draw: st.DrawFn) -> Timeline:
    """Return a timeline of random attempts, which may overlap and end after the run."""
    parts: defaultdict[int, list[Attempt]] = defaultdict(list)
    spans: list[Span] = []
    for number in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 900))
        end = start + draw(st.integers(0, 400))
        own: list[Span] = []
        for _ in range(draw(st.integers(0, 5))):
            kind = draw(st.sampled_from(["read", "multiply", "upload", "write"]))
            begin = draw(st.integers(start, end))
            waits = tuple(span.id for span in own[-1:] if draw(st.booleans()))
            one = op(len(spans) + len(own), kind, begin, draw(st.integers(begin, end)), *waits)
            own.append(one._replace(device=draw(st.integers(0, 1))))
        worker = draw(st.integers(0, 2))
        reduces = draw(st.booleans())
        parts[worker].append(Attempt(number, 0, start, end, len(spans), len(own), False, reduces, []))
        spans += [span._replace(worker=worker) for span in own]
    workers = [Worker(f"w{w}", "h", "d", 2, 0, 0, 0, None, parts[w]) for w in range(3)]
    return Timeline(tuple(spans), 1000, {"workers": [asdict(worker) for worker in workers]})


@given(attempts())
def test_the_causes_of_each_worker_add_up_to_the_whole_time(timeline: Timeline) -> None:
    found = activities(timeline)
    assert set(found) == set(units_of(timeline))
    for did in found.values():
        assert [did[0][0], *(end for _, end, _ in did)] == [start for start, _, _ in did] + [timeline.wall]
    figures = report(timeline)
    if found:
        assert sum(figures.exposed.values()) + figures.compute == pytest.approx(timeline.wall / 1e9)


def test_the_facts_of_merged_logs_are_plain_data(tmp_path: Path) -> None:
    recorder = Recorder({"started": STARTED})
    facts = merge(recorder, [child(tmp_path, "a", 0, PART, 50 * MS)])
    assert recorder.spans == len(PART)
    assert json.loads(json.dumps(facts)) == facts
