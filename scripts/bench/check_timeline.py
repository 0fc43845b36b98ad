#!/usr/bin/env python
"""Check timelines against CUPTI, which times kernels and copies on the device.

torch.profiler runs CUPTI. The script matches the operations of a run with the kernels and copies that CUPTI
reports, stream by stream and in order. The copies of an operation must have exactly its bytes, so that a
match shifted by one is noticed. Every operation of a compute stream must have the same number of kernels. The
two clocks differ by a constant, which is estimated as the median of all differences and subtracted.

An operation passes if its start and its end differ from CUPTI's by at most 50 us or 2% of its duration. The
figures of a case, which are shares, pass within 0.02. Failing operations are listed. Occasionally an event is
recorded about 100 us away from its work, because the recording thread or the device was delayed. One
operation in 200 may therefore fail. If more fail, or a figure fails, the exit code is 1.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click

import oocgemm
from oocgemm.timeline import Span, report

T = TypeVar("T")

LANES = ("h2d", "d2h", "compute")
NANOSECONDS, PART = 50_000, 0.02
MAX_FAILING = 1 / 200  # largest share of the operations of a case that may fail
FIGURES = ("copy_overlap", "compute_share")


@dataclass(frozen=True)
class Case:
    """A product of square matrices in memory."""

    size: int
    dtype: str
    options: dict[str, Any]


CASES = {
    # The usual case: steps take milliseconds, and the device is always busy.
    "large steps": Case(16384, "float64", {"device_memory": "1GiB"}),
    # Steps are shorter than the time to issue them, so that streams are often idle. The old C is read too.
    "small steps": Case(8192, "float32", {"device_memory": "128MiB", "tile": "2048x2048x256", "beta": 1.0}),
    # The kernel is slow, so that the run is long enough for the device's and the host's clock to be compared
    # again.
    "seconds": Case(20480, "float64", {"device_memory": "2GiB", "kernel": "naive"}),
}


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy that CUPTI reports.

    Times are in nanoseconds of CUPTI's clock. `bytes` is 0 for kernels.
    """

    lane: str
    start: int
    end: int
    bytes: int


def traced(work: Callable[[], T]) -> tuple[T, list[list[Activity]]]:
    """Run `work`. Return its result, and the kernels and copies of each stream in order."""
    from torch.profiler import ProfilerActivity, profile  # imported here, so that tests need no torch

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    streams: defaultdict[int, list[Activity]] = defaultdict(list)
    for event in events:
        category, name, details = event.get("cat"), event.get("name", ""), event.get("args", {})
        if category in ("kernel", "gpu_memset"):
            lane = "compute"
        elif category == "gpu_memcpy":
            lane = "h2d" if "HtoD" in name else "d2h" if "DtoH" in name else "other"
        else:
            continue
        start = round(event["ts"] * 1e3)
        end = round((event["ts"] + event["dur"]) * 1e3)
        streams[details["stream"]].append(Activity(lane, start, end, details.get("bytes", 0)))
    return result, [sorted(stream, key=lambda a: a.start) for stream in streams.values()]


def matched(spans: Sequence[Span], streams: Sequence[Sequence[Activity]]) -> dict[int, tuple[int, int]]:
    """Return the start and end that CUPTI reports for each operation on the device, by the operation's id.

    Raises `ValueError` if the operations do not match what CUPTI reports.
    """
    ours: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.id):
        if span.lane in LANES:
            ours[span.stream].append(span)
    left = list(streams)
    found: dict[int, tuple[int, int]] = {}
    for name, mine in ours.items():
        for stream in left:
            times = _paired(mine, stream)
            if times is not None:
                found |= times
                left.remove(stream)
                break
        else:
            counts = [(stream[0].lane, len(stream), sum(a.bytes for a in stream)) for stream in left]
            total = len(mine), sum(span.bytes for span in mine)
            raise ValueError(
                f"{name}: no stream of the tracer has these operations and bytes {total}: {counts}"
            )
    if left:
        raise ValueError(f"the tracer has {len(left)} more streams, one with {left[0][:3]}")
    return found


def _paired(spans: Sequence[Span], stream: Sequence[Activity]) -> dict[int, tuple[int, int]] | None:
    """Return, by the id of each span, the start of its first and the end of its last kernel or copy.

    Returns None if the kernels and copies of the stream do not match the spans.
    """
    if any(activity.lane != spans[0].lane for activity in stream):
        return None
    each, rest = divmod(len(stream), len(spans))
    found, at = {}, 0
    for span in spans:
        first, moved = at, 0
        if span.lane == "compute":
            at += each
        else:
            while at < len(stream) and moved < span.bytes:
                moved += stream[at].bytes
                at += 1
        if first == at or moved != span.bytes:
            return None
        found[span.id] = stream[first].start, stream[at - 1].end
    whole = at == len(stream) and not (rest and spans[0].lane == "compute")
    return found if whole else None


def compare(result: oocgemm.Result, streams: Sequence[Sequence[Activity]]) -> dict[str, Any]:
    """Compare the timeline of a run with CUPTI's. Return the differences and whether they pass."""
    timeline = result.timeline
    theirs = matched(timeline.spans, streams)
    spans = sorted((s for s in timeline.spans if s.id in theirs), key=lambda s: s.start)
    offset = round(median(x for s in spans for x in (s.start - theirs[s.id][0], s.end - theirs[s.id][1])))
    traced_times = {i: (start + offset, end + offset) for i, (start, end) in theirs.items()}
    differences: dict[str, dict[int, int]] = {"start": {}, "end": {}, "length": {}}
    failing = []
    for span in spans:
        start, end = traced_times[span.id]
        found = {"start": span.start - start, "end": span.end - end}
        found["length"] = found["end"] - found["start"]
        for what, value in found.items():
            differences[what][span.id] = value
        allowed = max(NANOSECONDS, PART * (end - start))
        if max(abs(found["start"]), abs(found["end"])) > allowed:
            failing.append((span, found, end - start))
    quarter = max(1, len(spans) // 4)
    early, late = (
        median(differences["end"][s.id] for s in part) for part in (spans[:quarter], spans[-quarter:])
    )
    other = replace(
        timeline,
        spans=tuple(
            s._replace(start=traced_times[s.id][0], end=traced_times[s.id][1]) if s.id in traced_times else s
            for s in timeline.spans
        ),
    )
    figures = {
        name: {"timeline": getattr(result.report, name), "tracer": getattr(report(other), name)}
        for name in FIGURES
    }
    agree = all(abs(f["timeline"] - f["tracer"]) <= PART for f in figures.values())
    return {
        "pass": agree and len(failing) <= MAX_FAILING * len(spans),
        "operations": len(spans),
        "activities": sum(map(len, streams)),
        "seconds": result.report.wall,
        "clock_offset_ns": offset,
        "drift_us": (late - early) / 1e3,
        "differences_us": {
            f"{stream} {what}": _summary([values[s.id] for s in spans if s.stream == stream])
            for stream in sorted({s.stream for s in spans})
            for what, values in differences.items()
        },
        "figures": figures,
        "failing": len(failing),
        "worst": [
            {
                "operation": f"{s.kind} {s.operand} {s.tile} {s.step}",
                "stream": s.stream,
                "at_us": s.start / 1e3,
            }
            | {"takes_us": length / 1e3}
            | {f"{what}_us": value / 1e3 for what, value in found.items()}
            for s, found, length in sorted(failing, key=lambda f: -max(abs(f[1]["start"]), abs(f[1]["end"])))[
                :20
            ]
        ],
    }


def _summary(differences: Sequence[int]) -> dict[str, float]:
    """Summarise differences in microseconds.

    The median is signed, the other figures are of absolute values.
    """
    far = sorted(abs(d) for d in differences)
    return {
        "median": median(differences) / 1e3,
        "p99": far[int(0.99 * (len(far) - 1))] / 1e3,
        "worst": far[-1] / 1e3,
    }


def run(case: Case) -> Callable[[], oocgemm.Result]:
    """Create A and B of a case, and return a function that runs the product."""
    import torch

    kind = getattr(torch, case.dtype)
    a, b, c = (torch.randn(case.size, case.size, dtype=kind, device="cuda").cpu().numpy() for _ in range(3))
    torch.cuda.empty_cache()
    # When first used, cuBLAS loads kernels, which CUPTI reports although they belong to no operation. Load
    # them now.
    kernel = {name: value for name, value in case.options.items() if name == "kernel"}
    oocgemm.matmul(a[:256, :256], b[:256, :256], backend="cuda", **kernel)
    return lambda: oocgemm.gemm(a, b, c, backend="cuda", host_memory="4GiB", **case.options)


@click.command()
@click.option(
    "--output", type=click.Path(), default="scripts/bench/results/check_timeline.json", show_default=True
)
def main(output: str) -> None:
    import torch

    traced(lambda: torch.zeros(1, device="cuda"))  # start CUPTI before the timed run
    found: dict[str, Any] = {
        "tolerance": {"us": NANOSECONDS / 1e3, "part": PART, "odd": MAX_FAILING},
        "cases": {},
    }
    for name, case in CASES.items():
        result, streams = traced(run(case))
        header = result.timeline.header
        found["machine"] = header["machine"] | header["backend"]
        found["versions"] = header["versions"] | {"torch": torch.__version__}
        try:
            figures = compare(result, streams)
        except ValueError as error:
            figures = {"pass": False, "error": str(error)}
        what = f"{case.size}^3 {case.dtype}, " + ", ".join(f"{k} {v}" for k, v in case.options.items())
        found["cases"][name] = {"what": what} | figures
        print(f"{name}: {'PASS' if figures['pass'] else 'FAIL'}, {what}")
        print(json.dumps(figures, indent=1))
    found["verdict"] = "PASS" if all(case["pass"] for case in found["cases"].values()) else "FAIL"
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(found["verdict"])
    sys.exit(found["verdict"] != "PASS")


if __name__ == "__main__":
    main()
