"""scripts/bench/check_timeline.py accepts timelines that match a tracer, and finds differences."""

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import oocgemm
from tests.support import TOP
from tests.support.backends_here import staged

SCRIPT = TOP / "scripts/bench/check_timeline.py"
OFFSET = 123_456_789_012


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("check_timeline", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "check_timeline", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def result() -> oocgemm.Result:
    a = np.ones((50, 70))
    with staged():
        return oocgemm.gemm(a, np.ones((70, 60)), backend="host", tile="30x30x20")


def seen(check: Any, result: oocgemm.Result) -> list[list[Any]]:
    """Return the activities that a tracer would report for a run.

    The tracer has another clock, and reports each copy in two parts.
    """
    streams: dict[str, list[Any]] = {}
    for span in result.timeline.spans:
        if span.lane not in check.LANES:
            continue
        middle = (span.start + span.end) // 2
        times = [(span.start, middle), (middle, span.end)] if span.bytes else [(span.start, span.end)]
        for number, (start, end) in enumerate(times):
            size = span.bytes // 2 + number * (span.bytes % 2)
            streams.setdefault(span.stream, []).append(
                check.Activity(span.lane, start + OFFSET, end + OFFSET, size)
            )
    return list(reversed(streams.values()))


def test_what_is_the_same_but_for_its_clock_passes(check: Any, result: oocgemm.Result) -> None:
    found = check.compare(result, seen(check, result))
    assert (found["pass"], found["failing"], found["clock_offset_ns"]) == (True, 0, -OFFSET)


def test_one_operation_that_is_late_fails_and_is_named(check: Any, result: oocgemm.Result) -> None:
    streams = seen(check, result)
    last = streams[0][-1]
    streams[0][-1] = replace(last, end=last.end + 10_000_000)
    found = check.compare(result, streams)
    assert (found["pass"], found["failing"]) == (False, 1)
    assert found["worst"][0]["end_us"] == pytest.approx(-10_000)


def test_a_small_share_of_failing_operations_passes(
    check: Any, result: oocgemm.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run is so short that 100 us change its figures by more than their tolerance, so only operations are
    # compared.
    monkeypatch.setattr(check, "FIGURES", ())
    streams = seen(check, result)
    streams[0][-1] = replace(streams[0][-1], end=streams[0][-1].end + 100_000)
    operations = check.compare(result, streams)["operations"]
    for allowed, passes in ((1.1 / operations, True), (0.9 / operations, False)):
        monkeypatch.setattr(check, "MAX_FAILING", allowed)
        found = check.compare(result, streams)
        assert (found["pass"], found["failing"]) == (passes, 1)


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_an_activity_that_is_missing_is_no_match(
    check: Any, result: oocgemm.Result, stream: int, where: int
) -> None:
    streams = seen(check, result)
    del streams[stream][where]
    with pytest.raises(ValueError, match="no stream"):
        check.compare(result, streams)
