"""Rates are measured while the device is busy, by the device's clock, and outliers are measured again."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from oocgemm.backends.base import Array, Stream, Token
from oocgemm.errors import BackendError
from oocgemm.machine import calibrate, workbench
from oocgemm.machine.calibrate import Sizes
from oocgemm.machine.workbench import QUEUED, Workbench, explained
from oocgemm.planning import Kind, MachineModel, Operation, Plan, TileShape, default_model, fit_link

ROWS, COLS = 512, 64
PANEL = ROWS * COLS * 8
RATE, LATENCY = PANEL / 4e-3, 5e-6  # copying a panel takes 4 ms
SUBMIT = 100_000  # nanoseconds that issuing an operation takes, far longer than a short copy


@dataclass(frozen=True)
class Queued:
    """An operation on the device, timed as `oocgemm.backends.cuda.events.Work` times operations."""

    device: "Device"
    began: int
    ended: int
    issued: int

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.ended)

    def interval(self) -> tuple[int, int]:
        start, end = self.began + self.device.skew, self.ended + self.device.skew
        return min(max(start, self.issued), end), end


class Device:
    """A device with streams on a virtual clock. The host believes this clock to be `skew` nanoseconds off.

    The time of an operation is its bytes or flops over `RATE`. Nothing is computed.
    """

    asynchronous: Collection[Kind] = (Kind.UPLOAD, Kind.MULTIPLY, Kind.DOWNLOAD)
    checksums = pinner = None

    def __init__(self, skew: int = 0) -> None:
        self.now, self.skew, self.issues = 0, skew, 0
        self._free: dict[str, int] = {}

    def open(self, plan: Plan, kernel: str) -> "Device":
        return self

    def close(self) -> None:
        pass

    def link_limit(self) -> float:
        return 1.1 * RATE

    def perf_counter_ns(self) -> int:
        return self.now

    @contextmanager
    def worker(self, stream: Stream) -> Iterator[None]:
        yield

    def submit(self, operation: Operation, host: Sequence[Array], after: Sequence[Token]) -> Queued:
        self.issues += 1
        # On an idle stream an operation may end while the host is still issuing it.
        earliest = max([self.now, *(token.ended for token in after if isinstance(token, Queued))])
        began = max(earliest, self._free.get(operation.stream, 0))
        seconds = LATENCY + (operation.bytes or operation.flops) / RATE
        self._free[operation.stream] = began + int(seconds * 1e9)
        self.now += SUBMIT
        return Queued(self, began, self._free[operation.stream], self.now)


def machine() -> MachineModel:
    return replace(default_model("host", 2), unified=False)


@pytest.fixture(params=[0, -60_000, 60_000], ids=["exact", "early", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return a device whose clock is exact, or wrong by more than the duration of a short copy."""
    made = Device(request.param)
    monkeypatch.setattr(workbench, "perf_counter_ns", made.perf_counter_ns)
    return made


def bench(device: Any) -> Workbench:
    return Workbench(device, machine(), "float64", TileShape(ROWS, COLS, COLS))


@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_copies_shorter_than_their_issuing_are_timed(device: Device, rows: int) -> None:
    with bench(device) as held:
        for copy in (held.load(Kind.UPLOAD, "A", rows), held.download(rows)):
            assert held.seconds(copy) == pytest.approx(LATENCY + copy.bytes / RATE, rel=1e-3)


def test_short_multiplications_are_timed_behind_copies(device: Device) -> None:
    with bench(device) as held:
        multiply = held.multiply(1)._replace(flops=1000)
        assert held.seconds(multiply) == pytest.approx(LATENCY + 1000 / RATE, rel=1e-3)


def test_more_copies_are_queued_where_one_is_too_short(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Issuing four copies takes as long as three copies of a panel.
    monkeypatch.setitem(globals(), "SUBMIT", 3_000_000)
    with bench(device) as held:
        copy = held.download(1)
        assert held.seconds(copy) == pytest.approx(LATENCY + copy.bytes / RATE, rel=1e-3)
    assert device.issues > 3 * QUEUED


def test_a_device_that_outruns_the_host_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the 4 ms of a copy, so that the device is always idle.
    monkeypatch.setitem(globals(), "SUBMIT", 5_000_000)
    with bench(device) as held, pytest.raises(BackendError, match=r"64 panel copies .* ended earlier"):
        held.seconds(held.download(1))


def test_links_come_to_the_rates_of_the_device(device: Device) -> None:
    sizes = Sizes(side=COLS, depths=(8, 16), block=(ROWS, COLS), copies=(1, 8, 64, ROWS), seconds=0.0)
    source = np.zeros((ROWS, COLS))
    engine: Any = device
    rates, samples = calibrate._links(engine, machine(), sizes, source, lambda doing: None)
    assert rates["h2d"] == pytest.approx(RATE, rel=1e-3)
    assert rates["d2h"] == pytest.approx(RATE, rel=1e-3)
    assert rates["copy_latency"] == pytest.approx(LATENCY, rel=1e-2)
    for link in ("h2d", "d2h"):
        for size, rate in samples[link].items():
            assert rate == pytest.approx(int(size) / (LATENCY + int(size) / RATE), rel=1e-3)


def test_outliers_are_measured_again_until_a_fit_explains_them() -> None:
    right = {size: size / (1e-5 + size / 5e10) for size in (1 << 20, 1 << 24, 1 << 28)}
    for bad in (1.05e15, float("inf"), 1e9):
        taken: list[int] = []

        def measure(size: int, bad: float = bad, taken: list[int] = taken) -> float:
            taken.append(size)
            return bad if taken == [1 << 20] else right[size]

        (latency, rate), rates = explained(measure, right, partial(fit_link, "d2h"))
        assert rates[1 << 24] == right[1 << 24]
        assert rate == pytest.approx(5e10, rel=0.3)
        assert latency < 1e-4


def test_rates_that_stay_impossible_are_refused_with_what_to_do() -> None:
    for bad, part in ((1.05e15, "d2h of 1 MiB came to 1.05 PB/s"), (float("inf"), "no measurable time")):
        rates = {1 << 20: bad, 1 << 28: 5e10}
        with pytest.raises(BackendError, match=f"{part}.*run oocgemm calibrate again"):
            explained(rates.__getitem__, rates, partial(fit_link, "d2h"))
