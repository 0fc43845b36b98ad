"""The figures of a report follow their definitions, and the causes of exposed time add up to all of it."""

import errno
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import InputError
from oocgemm.planning import Budgets, TileShape
from oocgemm.reports.charts import gantt
from oocgemm.timeline import Recorder, Span, Timeline, log, read_log, report
from oocgemm.timeline.activities import exposed_intervals, spans_by_stream, stream_predecessors
from oocgemm.timeline.spans import MAX_INTERVALS, BusyTime, intersection, length, union
from tests.support.suite import slow
from tests.support.virtual_runs import machine, run_of, virtual_plan, write_log


def exposed(spans: Sequence[Span], wall: int) -> dict[str, int]:
    """Return the exposed time of each cause, in nanoseconds."""
    causes: defaultdict[str, int] = defaultdict(int)
    for start, end, cause in exposed_intervals(spans, wall):
        causes[cause] += end - start
    return dict(causes)


def span(
    number: int, kind: str, lane: str, start: int, end: int, *waits: int, size: int = 0, flops: int = 0
) -> Span:
    return Span(number, kind, "A", lane, lane, 0, (0, 0), 0, start, end, size, flops, waits)


# Times of operations: read 0-10, upload 10-14, multiply 15-40. The second read, 10-44, is late, so the upload
# 44-50 and the multiplication 50-70 are, too. Then download and write.
RUN = (
    span(0, "read", "read", 0, 10, size=100),
    span(1, "upload", "h2d", 10, 14, 0, size=100),
    span(2, "multiply", "compute", 15, 40, 1, flops=1000),
    span(3, "read", "read", 10, 44, size=100),
    span(4, "upload", "h2d", 44, 50, 3, size=100),
    span(5, "multiply", "compute", 50, 70, 4, 2, flops=1000),
    span(6, "download", "d2h", 70, 80, 5, size=50),
    span(7, "write", "write", 80, 90, 6, size=50),
)


def test_the_figures_of_a_run_worked_out_by_hand() -> None:
    figures = report(Timeline(RUN, 100))
    assert figures.compute == pytest.approx(45e-9)
    assert figures.compute_share == pytest.approx(0.45)
    assert figures.copy_overlap == 0  # h2d at 10-14 and 44-50, d2h at 70-80: no copy overlaps compute
    # Storage is busy at 0-44 and 80-90. Compute overlaps it at 15-40.
    assert figures.storage_overlap == pytest.approx(25 / 54)
    assert figures.exposed == {
        "start-up": pytest.approx(1e-9),  # at 14-15 nothing ran
        "read": pytest.approx(14e-9),  # at 0-10 and 40-44
        "h2d": pytest.approx(10e-9),  # at 10-14 and 44-50
        "tail": pytest.approx(30e-9),
    }
    assert figures.flop_rate == pytest.approx(2000 / 100e-9)
    assert figures.efficiency is None  # there are no calibrated rates


@pytest.mark.parametrize(
    ("rates", "seconds", "why"),
    [
        ({"kernel": 5e10}, 40e-9, "2000 flops at 50 Gflop/s"),
        ({"kernel": 5e10, "read": 2e9, "write": 1e9}, 50e-9, "100 bytes at least are read at 2 GB/s"),
        ({"kernel": 5e10, "h2d": 1e9, "d2h": 1e12}, 80e-9, "80 bytes at least go up at 1 GB/s"),
        ({"kernel": 5e10, "decode": 2e9}, 75e-9, "100 bytes of A are read, in chunks half as large again"),
        (None, None, "never calibrated"),
    ],
)
def test_efficiency_is_the_longest_least_time_over_the_whole(
    rates: dict[str, float] | None, seconds: float | None, why: str
) -> None:
    operands = [RUN[0]._replace(operand="A"), *RUN[1:3], RUN[3]._replace(operand="B"), *RUN[4:]]
    plan = {"least": {"read": 100, "h2d": 80, "d2h": 0, "write": 30}, "read_amplification": {"A": 1.5}}
    header = {"rates": rates, "plan": plan, "operands": {"A": {"direct": False}, "B": {"direct": True}}}
    efficiency = report(Timeline(tuple(operands), 100, header)).efficiency
    assert efficiency == (None if seconds is None else pytest.approx(seconds / 100e-9)), why


def test_a_lane_that_decodes_says_how_much() -> None:
    decoding = span(8, "read", "decode", 5, 9, size=300)
    header = {"rates": {"decode": 5e9}, "operands": {"A": {"direct": False}}}
    assert report(Timeline((*RUN, decoding), 100, header)).efficiency == pytest.approx(0.6)


def test_a_wait_for_a_download_is_named_accumulator() -> None:
    spans = (
        span(0, "multiply", "compute", 0, 10),
        span(1, "download", "d2h", 10, 18, 0),
        span(2, "multiply", "compute", 20, 30, 1),
    )
    assert exposed(spans, 30) == {"accumulator": 8, "issue": 2}


def test_a_wait_for_a_finish_is_not_counted_as_compute() -> None:
    """Finish runs on the lane compute, but compute is Multiply alone. The shares still add up to 1."""
    spans = (
        span(0, "multiply", "compute", 0, 10),
        span(1, "finish", "compute", 10, 18, 0),
        span(2, "multiply", "compute", 20, 30, 1),
    )
    figures = report(Timeline(spans, 30))
    assert exposed(spans, 30) == {"accumulator": 8, "issue": 2}
    assert sum(figures.shares.values()) == pytest.approx(1)


def test_a_gap_is_followed_back_along_its_predecessors() -> None:
    """The download had to wait for a write, so the write is the cause of most of the gap."""
    spans = (
        span(0, "multiply", "compute", 0, 10),
        span(1, "write", "write", 5, 30),
        span(2, "download", "d2h", 30, 35, 1),
        span(3, "multiply", "compute", 36, 50, 2),
    )
    assert exposed(spans, 50) == {"write": 20, "accumulator": 5, "issue": 1}


def test_ratios_over_nothing_are_none() -> None:
    empty = report(Timeline((), 0))
    assert empty.compute_share is None
    assert empty.copy_overlap is None
    assert report(Timeline((), 50)).exposed == {"tail": pytest.approx(50e-9)}


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    lanes = {"read": "read", "upload": "h2d", "multiply": "compute", "download": "d2h", "write": "write"}
    spans = []
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(sorted(lanes)))
        start = draw(st.integers(0, 1000))
        waits = draw(st.lists(st.integers(0, max(0, number - 1)), max_size=3)) if number else []
        spans.append(span(number, kind, lanes[kind], start, start + draw(st.integers(0, 200)), *waits))
    return Timeline(tuple(spans), max((s.end for s in spans), default=0) + draw(st.integers(0, 50)))


@given(timelines())
def test_exposed_time_and_compute_add_up_to_the_whole(timeline: Timeline) -> None:
    compute = union((s.start, s.end) for s in timeline.spans if s.kind == "multiply")
    causes = exposed(timeline.spans, timeline.wall)
    assert all(ns > 0 for ns in causes.values())
    assert sum(causes.values()) + length(compute) == timeline.wall


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
)
def test_unions_and_intersections_are_those_of_sets(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    def instants(intervals: list[tuple[int, int]]) -> set[int]:
        return {t for start, end in intervals for t in range(start, end)}

    assert instants(union(one)) == instants(one)
    assert length(union(one)) == len(instants(one))
    assert instants(intersection(union(one), union(other))) == instants(one) & instants(other)


@given(timelines())
def test_a_log_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline
) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    write_log(path, timeline)
    again = read_log(path)
    assert (again.spans, again.wall, again.unfinished) == (timeline.spans, timeline.wall, False)
    assert report(again) == report(timeline)


@given(timelines(), st.data())
def test_a_log_cut_anywhere_reads_as_far_as_it_goes(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    write_log(path, timeline)
    whole = path.read_bytes()
    # The log is cut before its last newline, because a log that lacks only that is complete.
    cut = data.draw(st.integers(whole.index(b"\n"), len(whole) - 2))
    path.write_bytes(whole[:cut])
    read = read_log(path)
    # The spans of all complete lines are read. Their rows are lists, and lines of shared fields are objects.
    rows = [row for row in map(parsed, whole[:cut].split(b"\n")[1:]) if isinstance(row, list)]
    assert read.unfinished
    assert {span.id for span in read.spans} == {row[0] for row in rows}
    assert set(read.spans) <= set(timeline.spans)
    assert read.wall == max((span.end for span in read.spans), default=0)
    assert sum(report(read).exposed.values()) + report(read).compute == pytest.approx(read.wall / 1e9)


def parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_a_log_grows_as_the_run_goes_on_and_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "FLUSH_SECONDS", 1e9)
    recorder = Recorder({}, tmp_path / "run.jsonl")
    tracemalloc.start()
    for number in range(10 * log.FLUSH_LINES):
        recorder.add(span(number, "read", "read", 1000 * number, 1000 * number + 900, size=4096))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    so_far = read_log(tmp_path / "run.jsonl")
    assert so_far.unfinished
    assert recorder.spans - len(so_far.spans) < log.FLUSH_LINES
    assert kept / recorder.spans < 60  # bytes per span; a `Span` object takes more than 200
    recorder.finish(10**12, {"facts": {}})
    recorder.close()
    assert read_log(tmp_path / "run.jsonl") == recorder.timeline()
    assert len(recorder.timeline().spans) == recorder.spans


def test_a_hundred_thousand_steps_take_less_than_50_mb(tmp_path: Path) -> None:
    """Every panel is loaded, and most panels are read again. No step can have more operations."""
    size, tile = (8 * 512, 8 * 512, 25 * 512), TileShape(512, 512, 512)
    plan = virtual_plan(size, Budgets(92 << 20, 64 << 20), machine(), tile)
    timeline = run_of(plan)
    assert sum(span.kind == "upload" for span in timeline.spans) > 1.8 * plan.steps
    write_log(tmp_path / "run.jsonl", timeline)
    size_of_log = (tmp_path / "run.jsonl").stat().st_size
    # The limit is 40 MB and not 50 MB, because in longer runs the numbers have more digits.
    assert 100_000 * size_of_log / plan.steps < 40e6


def test_a_slow_run_is_logged_without_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "FLUSH_SECONDS", 0.0)
    recorder = Recorder({}, tmp_path / "run.jsonl")
    for one in RUN:
        recorder.add(one)
        assert read_log(tmp_path / "run.jsonl").spans[-1] == one
    recorder.close()


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, Timeline(RUN, 100))
    path.write_text(path.read_text().replace('"version":3', '"version":9', 1))
    with pytest.raises(InputError, match="version 9"):
        read_log(path)


def test_the_gantt_picture_shades_by_share() -> None:
    lanes = dict(gantt(Timeline(RUN, 100), width=10))
    assert list(lanes) == ["read", "h2d", "compute", "d2h", "write"]
    assert lanes["read"] == "████▃     "
    assert lanes["write"] == "        █ "


def test_a_span_follows_the_one_that_freed_its_thread() -> None:
    reads = [span(0, "read", "read", 0, 10), span(1, "read", "read", 0, 30)]
    reads += [span(2, "read", "read", 10, 40), span(3, "read", "read", 30, 50)]
    assert stream_predecessors(spans_by_stream(reads)) == {1: 0, 2: 0, 3: 1}
    # The upload waits for the third read, which started when the first read ended. All of the wait is for
    # reads.
    late = [*reads[:3], span(4, "upload", "h2d", 40, 45, 2), span(5, "multiply", "compute", 45, 60, 4)]
    begun = span(6, "multiply", "compute", 0, 1)
    assert exposed([begun, *late], 60) == {"read": 39, "h2d": 5}


def test_a_stream_that_copies_other_blocks_is_the_cause_of_a_wait() -> None:
    """Copies of several blocks overlap. The second Multiply waits for the third copy."""
    copies = [(2, 0, 8), (3, 5, 20), (4, 16, 30), (5, 25, 50)]
    spans = [span(number, "upload", "h2d", start, end) for number, start, end in copies]
    spans += [span(0, "multiply", "compute", 0, 2), span(6, "multiply", "compute", 30, 33, 4)]
    assert exposed(spans, 33) == {"h2d": 28}
    later = spans[2]._replace(start=22)
    assert exposed([*spans[:2], later, *spans[4:]], 33) == {"issue": 2, "h2d": 26}


@pytest.mark.parametrize("room", [True, *slow((False,))])
def test_a_log_larger_than_its_memory_reads_back_whole(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(log, "MAX_IN_MEMORY", 20_000)
    if not room:
        monkeypatch.setattr(log, "TemporaryFile", full)
    recorder = Recorder({})
    tracemalloc.start()
    traced = []
    for number in range(20 * log.FLUSH_LINES):
        recorder.add(span(number, "read", "read", 1000 * number, 1000 * number + 900, size=4096))
        if number in (10 * log.FLUSH_LINES, 20 * log.FLUSH_LINES - 1):
            traced.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (traced[1] < traced[0] + 20_000) == room
    recorder.finish(10**12, {})
    recorder.close()
    spans = recorder.timeline().spans
    assert [one.id for one in spans] == list(range(recorder.spans))
    assert recorder.timeline().spans == spans


def test_busy_time_is_added_up_in_little_memory() -> None:
    busy, intervals = BusyTime(), []
    for number in range(20_000):
        for start in (10 * number, 10 * number + 2):  # two threads at the same time
            intervals.append((start, start + 5))
            busy.append(intervals[-1])
    assert busy.total == length(intervals)
    assert busy.covered == length(union(intervals))
    assert len(busy._recent) < MAX_INTERVALS
