"""The diagnosis names what limits a run, and following the advice gains what was predicted.

Runs are simulated on a virtual clock.
"""

import io
import json
import os
import re
from contextlib import redirect_stdout
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given

from oocgemm.cli.display import print_report
from oocgemm.planning import Budgets, Chunked, InMemory, Layouts, TileShape, Writing, recorded_plan
from oocgemm.reports.advice import CONTENDED, MAX_FIT_ERROR, ONLY_KERNEL, Remedy, diagnosis_lines, fit, remedy
from oocgemm.reports.exports import page
from oocgemm.timeline import Span, Timeline, diagnose, report
from tests.support import suite
from tests.support.virtual_runs import CHUNKS, GIB, machine, run_of, virtual_plan
from tests.timeline.test_figures import timelines

CUBE = 16384, 16384, 16384
SMALL = Budgets(GIB, GIB)


def span(number: int, kind: str, lane: str, start: int, end: int, *waits: int, size: int = 100) -> Span:
    flops = 1000 if kind == "multiply" else 0
    return Span(number, kind, "A", lane, lane, 0, (0, 0), 0, start, end, 0 if flops else size, flops, waits)


def first(lane: str = "read") -> tuple[Span, Span]:
    """Return the spans of a panel's read and of its multiplication, from time 0 to 100."""
    return span(0, "read", lane, 0, 4), span(1, "multiply", "compute", 4, 100, 0)


def advice(timeline: Timeline) -> Remedy:
    figures = report(timeline)
    return remedy(timeline, figures, diagnose(timeline, figures), fit(timeline, figures))


@pytest.mark.parametrize(
    ("bound", "spans", "wall"),
    [
        ("compute", first(), 102),
        (
            "read",
            (*first(), span(2, "read", "read", 10, 350), span(3, "multiply", "compute", 350, 440, 2)),
            440,
        ),
        (
            "decode",
            (*first(), span(2, "read", "decode", 10, 350), span(3, "multiply", "compute", 350, 440, 2)),
            440,
        ),
        (
            "h2d",  # the panel was read early, so its upload was the cause of the wait
            (*first(), span(2, "upload", "h2d", 10, 350, 0), span(3, "multiply", "compute", 350, 440, 2)),
            440,
        ),
        (
            "read",  # the upload ended last, but it had waited longer for its read
            (
                *first(),
                span(2, "read", "read", 10, 320),
                span(3, "upload", "h2d", 320, 370, 2),
                span(4, "multiply", "compute", 370, 460, 3),
            ),
            460,
        ),
        (
            "accumulator",
            (*first(), span(2, "download", "d2h", 100, 300, 1), span(3, "multiply", "compute", 300, 390, 2)),
            390,
        ),
        (
            "write",
            (*first(), span(2, "write", "write", 100, 300, 1), span(3, "multiply", "compute", 300, 390, 2)),
            390,
        ),
        (
            "compute",  # the wait for a write is shorter than the multiplications
            (*first(), span(2, "write", "write", 100, 140, 1), span(3, "multiply", "compute", 140, 230, 2)),
            230,
        ),
        ("tail", (*first(), span(2, "write", "write", 100, 240, 1)), 240),
        ("start-up", (span(0, "read", "read", 130, 160), span(1, "multiply", "compute", 160, 200, 0)), 200),
        ("issue", (*first(), span(2, "multiply", "compute", 300, 390, 1)), 390),
        ("nothing", (span(0, "read", "read", 0, 10),), 100),
        ("nothing", (), 0),
    ],
)
def test_the_verdict_names_what_bounds_the_run(bound: str, spans: tuple[Span, ...], wall: int) -> None:
    found = diagnose(Timeline(spans, wall))
    assert found.verdict.bound == bound, found
    assert found.finding.endswith(".")
    assert 0 <= found.verdict.share <= 1


def test_the_finding_and_the_evidence_have_the_figures() -> None:
    spans = (*first(), span(2, "read", "read", 10, 350), span(3, "multiply", "compute", 350, 440, 2))
    header = {"rates": {"read": 1e9, "kernel": 2e10}, "plan": {"least": {"read": 100}}}
    found = diagnose(Timeline(spans, 440, header))
    assert found.verdict.share == pytest.approx(254 / 440)
    assert found.finding == "Read-bound, 57.7%: waiting for reads; compute 42.3%."
    assert found.evidence == (
        "Reading took 78% of the time, at 581 MB/s, 58% of the calibrated 1 GB/s; it moved 200 B, "
        "2.00 times the lower bound."
    )
    multiplying = diagnose(Timeline(first(), 102, header))
    assert multiplying.finding == "Compute-bound, 94.1%; largest stall: read 3.9%, waiting for reads."
    assert multiplying.evidence == "The kernel ran at 10.4 GFLOP/s, 52% of the calibrated 20 GFLOP/s."


@given(timelines())
def test_the_verdict_is_the_largest_share_of_the_tables(timeline: Timeline) -> None:
    """The text report and the HTML page show the same largest share as their tables of causes."""
    figures = report(timeline)
    with patch.dict(os.environ, COLUMNS="1000"), redirect_stdout(io.StringIO()) as out:
        print_report(figures, timeline)
    text = out.getvalue()
    shown = {"compute": re.findall(r"^compute share ([\d.]+)%", text, re.MULTILINE)}
    exposed = "".join(re.findall(r"^exposed .*?: (.*)", text, re.MULTILINE))
    shown |= {cause: [share] for cause, share in re.findall(r"([\w-]+) ([\d.]+)% \(", exposed)}
    cells = r"</i>([\w-]+)</td><td class=n>[^<]*</td><td class=n>([\d.]+)%</td>"
    tabled = {cause: [share] for cause, share in re.findall(cells, page([("x", timeline)]))}
    found = diagnose(timeline, figures)
    if not figures.compute:
        assert text.startswith("Nothing was multiplied.")
        return
    assert found.verdict.to_dict() == figures.to_dict()["verdict"]
    assert shown == tabled
    said = re.match(r"([\w-]+)-bound, ([\d.]+)%(?:;|: [^;]*;) (?:largest stall: )?([\w-]+) ([\d.]+)%", text)
    assert said or list(shown) == ["compute"], text
    if said:
        bound, share, beside, other = said.groups()
        numbers = {cause: float(one) for cause, (one,) in shown.items()}
        assert shown[bound.lower()] == [share]
        assert shown[beside] == [other]
        assert numbers[bound.lower()] == max(numbers.values())
        stalls = [one for cause, one in numbers.items() if cause != "compute"]
        assert max(stalls) == numbers[beside if bound == "Compute" else bound.lower()]


@pytest.mark.parametrize(
    ("backend", "cores", "own", "others", "contended"),
    [
        pytest.param("host", 2, 1.1, 0.9, True, id="half of the cores are used by others"),
        pytest.param("host", 2, 1.9, 0.1, False, id="others use next to nothing"),
        pytest.param("host", 16, 4.0, 4.0, False, id="cores are left"),
        pytest.param("cuda", 2, 1.1, 0.9, False, id="a kernel that needs no core"),
    ],
)
def test_contention_is_distinguished_from_a_slow_kernel(
    backend: str, cores: int, own: float, others: float, contended: bool
) -> None:
    second = 10**9
    spans = (span(0, "read", "read", 0, 1), span(1, "multiply", "compute", 1, second, 0))
    used = {"cores": cores, "own_seconds": own, "busy_seconds": own + others}
    run = Timeline(spans, second, {"backend": {"name": backend}, "cpu": used})
    said = diagnosis_lines(report(run), run, advise=True)
    assert (CONTENDED in said[-1], ONLY_KERNEL in said[-1]) == (contended, not contended)
    assert (f"Other programs used {others:.1f} of {cores} cores." in said[1]) == (others >= 0.1 * cores)


@pytest.mark.slow
def test_a_contended_run_gets_no_predicted_gain() -> None:
    slow = machine(read=1e9, read_scattered=1e9)
    run = run_of(virtual_plan(CUBE, SMALL, slow))
    assert advice(run).seconds is not None
    seconds = run.wall / 1e9
    used = {"cores": 2, "own_seconds": seconds, "busy_seconds": 2 * seconds}
    found = advice(Timeline(run.spans, run.wall, dict(run.header) | {"cpu": used}))
    assert (found.change, found.seconds) == (CONTENDED, None)


def test_a_short_run_says_nothing_of_other_programs() -> None:
    run = Timeline(first(), 102, {"cpu": {"cores": 2, "own_seconds": 0.0, "busy_seconds": 1.0}})
    assert "Other programs" not in diagnose(run).evidence


@pytest.mark.parametrize(
    ("slow", "bound"),
    [
        ({"read": 4e9, "read_scattered": 4e9}, "read"),
        ({"h2d": 4e9}, "h2d"),
        ({}, "compute"),
        ({"write": 5e7}, "write"),
        ({"decode": 1e9}, "decode"),
    ],
)
def test_a_planned_run_is_bound_by_its_slow_link(slow: dict[str, float], bound: str) -> None:
    coded = replace(CHUNKS, a=Chunked((512, 512), partial_reads=False, decode_bytes=1 << 21))
    deep, layouts = (16384, 16384, 131072), coded if bound == "decode" else CHUNKS
    plan = virtual_plan(deep, Budgets(4 * GIB, GIB), machine(**slow), layouts=layouts)
    # With two accumulators, most writes follow the last product.
    also = "tail" if bound == "write" else bound
    assert diagnose(run_of(plan)).verdict.bound in (bound, also)


@pytest.mark.parametrize(
    "slow", [{"h2d": 4e9}, *suite.slow(({"read": 4e9, "read_scattered": 4e9},), ({"read": 8e9},))]
)
def test_following_the_advice_gains_what_it_predicted(slow: dict[str, float]) -> None:
    """The plan was made for the default machine, and the run was simulated on one with a slower link."""
    usual, real = machine(), machine(**slow)
    planned = virtual_plan(CUBE, Budgets(GIB // 2, GIB // 2), usual)
    before = run_of(replace(planned, machine=real), believed=usual)
    found = advice(before)
    assert found.seconds is not None, found
    # The new plan is made with the original machine model, as it is when a user follows the advice.
    settings = dict(found.settings)
    tile = TileShape(*map(int, str(settings.pop("tile")).split("x"))) if "tile" in settings else None
    budgets = replace(
        planned.budgets, **{x.removesuffix("_memory"): int(size) for x, size in settings.items()}
    )
    after = replace(virtual_plan(CUBE, budgets, usual, tile), machine=real)
    promised = before.wall / 1e9 - found.seconds
    gained = (before.wall - run_of(after).wall) / 1e9
    assert promised > 0
    assert gained == pytest.approx(promised, rel=0.2)


def test_a_fitted_model_reproduces_the_time_of_a_slow_run() -> None:
    plan = virtual_plan(CUBE, SMALL, machine())
    slower = run_of(replace(plan, machine=machine(read=6e9, h2d=10e9)), believed=plan.machine, jitter=0.2)
    fitted = fit(slower, report(slower))
    assert fitted is not None
    assert plan.prediction.total < 0.7 * slower.wall / 1e9
    assert fitted.seconds(fitted.plan) == pytest.approx(slower.wall / 1e9, rel=0.15)
    assert fitted.machine.h2d == pytest.approx(10e9, rel=0.2)


@pytest.mark.slow
def test_time_outside_operations_is_kept_in_predictions() -> None:
    run = run_of(virtual_plan(CUBE, SMALL, machine(read=4e9, read_scattered=4e9)))
    idle = round(0.5 * run.wall)
    slow = Timeline(run.spans, run.wall + idle, run.header)
    before, after = advice(run).seconds, advice(slow).seconds
    assert before is not None
    assert after == pytest.approx(before + idle / 1e9, rel=0.02)


def test_no_gain_is_predicted_without_a_basis() -> None:
    plan = virtual_plan(CUBE, Budgets(64 * GIB, 64 * GIB), machine())
    run = run_of(plan)
    assert advice(run).seconds is None  # all matrices fit into memory already, so no change helps
    older = Timeline(run.spans, run.wall, {"plan": {"tile": run.header["plan"]["tile"]}})
    assert advice(older).why.startswith("this log does not contain the whole plan")
    lost, half = round(run.wall * 2 * MAX_FIT_ERROR), run.wall // 2  # idle time in the middle of the run
    late = [s._replace(start=s.start + lost, end=s.end + lost) if s.start > half else s for s in run.spans]
    assert "but the run took" in advice(Timeline(tuple(late), run.wall + lost, run.header)).why
    assert advice(Timeline((), 100)).seconds is None


def test_advice_keeps_to_the_memory_that_there_is() -> None:
    plan = virtual_plan(CUBE, SMALL, machine(h2d=4e9))
    run = run_of(plan)
    header = dict(run.header) | {"backend": {"memory": "1 GiB"}, "machine": {"memory": GIB}}
    assert advice(run).seconds is not None
    assert "-memory" not in advice(Timeline(run.spans, run.wall, header)).change


def test_rechunking_is_advised_where_chunks_straddle_panels() -> None:
    across = Chunked((16384, 64), partial_reads=False, decode_bytes=8 << 20)
    layouts = Layouts(across, Chunked((512, 512)), Chunked(writing=Writing((512, 512))))
    size = 16384, 4096, 16384
    # Storage is not calibrated, so the rate of reading uncompressed chunks is unknown.
    model = replace(machine(decode=4e9), storage_calibrated=False)
    plan = virtual_plan(size, Budgets(GIB // 4, GIB), model, layouts=layouts)
    run = run_of(plan)
    assert plan.amplification["A"] > 1.5
    header = dict(run.header) | {"backend": {}, "machine": {}}  # no budget can be raised
    found = advice(Timeline(run.spans, run.wall, header))
    assert "A stored in chunks that divide" in found.change


def test_a_plan_is_restored_from_its_header() -> None:
    plan = virtual_plan(CUBE, SMALL, machine())
    again = recorded_plan(json.loads(json.dumps(plan.to_dict())))
    assert again == replace(plan, considered=())
    assert recorded_plan({"problem": {}}) is None
    # The plan of a log is used only if this version predicts about the same time.
    data = json.loads(json.dumps(plan.to_dict()))
    for share, taken in ((1.02, True), (1.5, False)):
        data["predicted_seconds"] = {"total": share * plan.prediction.total}
        assert (recorded_plan(data) is not None) is taken


def test_a_resumed_run_is_advised_by_the_tiles_it_computed() -> None:
    whole = virtual_plan(CUBE, SMALL, machine(h2d=4e9))
    done = frozenset([(0, 0), (0, 1)])
    run = run_of(replace(whole, done=done))
    computed = frozenset(s.tile for s in run.spans)
    assert recorded_plan(run.header["plan"], computed) == replace(whole, considered=(), done=done)
    assert recorded_plan(run.header["plan"], computed - {min(computed)}) is None
    anew, rest = advice(run_of(whole)), advice(run)
    assert anew.seconds is not None
    assert rest.seconds is not None
    assert rest.settings == anew.settings
    assert rest.seconds / run.wall == pytest.approx(anew.seconds / run_of(whole).wall, rel=0.05)


def test_cublas_is_advised_where_its_calibrated_rate_is_higher() -> None:
    plan = virtual_plan(CUBE, Budgets(2 * GIB, 2 * GIB), machine())
    kernels = {d: replace(rate, peak=rate.peak / 8) for d, rate in plan.machine.kernels.items()}
    run = run_of(replace(plan, machine=replace(plan.machine, kernels=kernels)), believed=plan.machine)
    plain = Timeline(run.spans, run.wall, dict(run.header) | {"backend": {"kernel": "tiled"}})
    found = advice(plain)
    assert found.settings == {"kernel": "cublas"}
    assert found.seconds == pytest.approx(run_of(plan).wall / 1e9, rel=0.1)
    believed = dict(plain.header["plan"]) | {
        "model": dict(plain.header["plan"]["model"]) | {"calibrated": False}
    }
    unknown = Timeline(run.spans, run.wall, dict(plain.header) | {"plan": believed})
    assert "kernel" not in advice(unknown).settings


def test_a_lane_that_nothing_waits_for_is_not_slow() -> None:
    """On the host of a GPU, reader threads are often idle. The measured rate of reads is then too low."""
    believed = machine()
    budgets = Budgets(4 * GIB, 4 * GIB)
    plan = virtual_plan(CUBE, budgets, believed, TileShape(4096, 8192, 1024))
    kernels = {d: replace(rate, peak=rate.peak / 8) for d, rate in believed.kernels.items()}
    slow = replace(
        believed, kernels=kernels, read=believed.read / 3, read_scattered=believed.read_scattered / 3
    )
    run = run_of(replace(plan, machine=slow), believed=believed)
    assert report(run).exposed.get("read", 0) < 0.02 * run.wall / 1e9
    found = advice(Timeline(run.spans, run.wall, dict(run.header) | {"backend": {"kernel": "tiled"}}))
    assert found.settings == {"kernel": "cublas"}
    best = virtual_plan(CUBE, budgets, believed)
    assert found.seconds == pytest.approx(run_of(best).wall / 1e9, rel=0.1)


@pytest.mark.parametrize("unified", [False, True])
def test_arrays_in_memory_are_not_called_storage(unified: bool) -> None:
    """The host backend copies C out of slots. A GPU copies it from the device to the array."""
    layouts = Layouts(*(InMemory() for _ in "ABC"))
    model = replace(machine(memory=20e9), unified=unified)
    run = run_of(virtual_plan((16384, 16384, 512), Budgets(GIB, GIB), model, layouts=layouts))
    header = dict(run.header) | {"operands": {x: {"store": "memory"} for x in "ABC"}}
    found = diagnose(Timeline(run.spans, run.wall, header))
    bound, said, stored = (
        ("write", "Copying C out of slots took", "Writing took")
        if unified
        else ("accumulator", "Copying from the device took", "Copying from the device took")
    )
    assert found.verdict.bound == bound
    assert found.evidence.startswith(said)
    assert diagnose(run).evidence.startswith(stored)
    assert ("write" in report(run).lanes) == unified


def test_the_text_report_says_the_same() -> None:
    run = run_of(virtual_plan(CUBE, SMALL, machine(read=4e9, read_scattered=4e9)))
    figures = report(run)
    found = diagnose(run)
    assert diagnosis_lines(figures, run) == [found.finding, found.evidence]
    advised = diagnosis_lines(figures, run, advise=True)
    assert advised[:2] == [found.finding, found.evidence]
    assert "predicted" in advised[2]


def test_a_slow_write_that_only_the_drain_shows_is_fitted() -> None:
    plan = virtual_plan((8192, 8192, 16384), Budgets(2 * GIB, 4 * GIB), machine())
    late = run_of(replace(plan, machine=machine(write=0.4e9)), believed=plan.machine)
    figures = report(late)
    assert figures.exposed["tail"] > 0.1 * figures.wall
    fitted = fit(late, replace(figures, exposed={"tail": figures.exposed["tail"]}))
    assert fitted is not None
    assert fitted.machine.write == pytest.approx(0.4e9, rel=0.1)


def test_a_slow_download_that_blocks_the_accumulator_is_fitted() -> None:
    plan = virtual_plan((16384, 16384, 512), Budgets(GIB, 4 * GIB), machine())
    late = run_of(replace(plan, machine=machine(d2h=2e9)), believed=plan.machine)
    figures = report(late)
    assert figures.verdict.bound == "accumulator"
    fitted = fit(late, replace(figures, exposed={"accumulator": figures.exposed["accumulator"]}))
    assert fitted is not None
    assert fitted.machine.d2h == pytest.approx(2e9, rel=0.1)
