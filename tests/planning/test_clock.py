"""The virtual clock computes the times that a simulation of the schedule takes, far faster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.planning import (
    Budgets,
    Candidate,
    Chunked,
    InMemory,
    Layouts,
    MachineModel,
    Op,
    Setting,
    Slots,
    TileShape,
    Traversal,
    Writing,
    default_model,
)
from oocgemm.planning.cost.clock import predict
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.streams import Streams
from oocgemm.planning.plan import schedule_of
from tests.support.plan_cases import GIB, problem
from tests.support.products import product_of
from tests.support.simulate import simulate, timed

BUDGETS = Budgets(GIB, GIB)
TILE = TileShape(512, 1024, 256)
FILES = Layouts(Chunked((64, 64)), Chunked((64, 64)), Chunked(writing=Writing(free=True)))
PINNED = Layouts(*(InMemory(pinned=True, zero_copy_width=100),) * 3)
PAGEABLE = Layouts(*(InMemory(zero_copy_width=100),) * 3)


@st.composite
def machines(draw: st.DrawFn) -> MachineModel:
    model = default_model("host", 2) if draw(st.integers(0, 3)) == 0 else default_model("cuda", 16)
    factor = 10 ** draw(st.floats(-3, 1))
    kernels = {name: replace(rate, peak=factor * rate.peak) for name, rate in model.kernels.items()}
    return replace(
        model,
        kernels=kernels,
        issue=draw(st.sampled_from((0.0, 1e-5, 2e-3))),
        write=10 ** draw(st.floats(8, 11)),
        read=10 ** draw(st.floats(9, 11)),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Setting, Candidate]:
    """Draw a run whose panels are either never used again while they are in slots, or all stay in slots."""
    machine, layouts = draw(machines()), draw(st.sampled_from((FILES, PINNED, PAGEABLE)))
    counts = st.sampled_from((1, 2, 3, 9, 14))
    steps = draw(st.sampled_from((1, 2, 3, 5, 40, 200)))
    # A turn of one row of tiles reuses panels, of which some are cached. Short of that, all tiles are alike.
    down, across = draw(
        st.one_of(st.tuples(st.just(1), counts), st.tuples(counts, st.just(1)), st.just((3, 2)))
    )
    cut = [draw(st.sampled_from((0, 100))) for _ in range(3)]
    dtype, beta = draw(st.sampled_from(("float64", "float16"))), draw(st.sampled_from((0, 1)))
    p = problem(down * TILE.m - cut[0], across * TILE.n - cut[1], steps * TILE.k - cut[2], dtype, beta)
    setting = Setting(p, machine, layouts, BUDGETS)
    drain = min(draw(st.integers(1, 3)), steps)
    few = st.integers(max(2, drain), 5)
    a, b = draw(few), draw(few)
    host = draw(st.integers(1, 4))
    if draw(st.booleans()):
        a, b, host = a + steps, b + steps * across, steps * across + 5
    of_a, of_b = (0 if setting.routes[x].streams or machine.unified else host for x in "AB")
    of_c = 0 if setting.routes["C"].streams or machine.unified else draw(st.integers(1, 4))
    strip = draw(st.sampled_from((512, 128, 171)))
    c, finish = draw(st.integers(1, 2)), 2 if p.finishes else 0
    slots = Slots(a, b, c, of_a, of_b, of_c, finish, strip, drain, unified=machine.unified)
    return setting, Candidate(TILE, slots, Traversal(draw(st.integers(0, 1))))


@given(runs())
def test_the_clock_agrees_with_the_simulated_schedule(run: tuple[Setting, Candidate]) -> None:
    """The clock may take another slot for a panel than the schedule does if some panels are cached."""
    setting, candidate = run
    seconds = simulate(schedule_of(setting, candidate), setting)
    assert predict(setting, candidate).total == pytest.approx(seconds, rel=0.1)


@st.composite
def squares(draw: st.DrawFn) -> tuple[Setting, Candidate]:
    """Draw a run of a Gram matrix."""
    machine, layouts = draw(machines()), draw(st.sampled_from((FILES, PINNED, PAGEABLE)))
    side, k = 512, 256
    n = draw(st.integers(1, 9)) * side - draw(st.sampled_from((0, 100)))
    dtype, steps = draw(st.sampled_from(("float64", "float16"))), draw(st.sampled_from((1, 3, 40)))
    names = dtype, dtype, "float32" if dtype == "float16" else dtype, dtype
    uplo = draw(st.sampled_from(("lower", "upper", "full")))
    p = product_of(n, n, steps * k, *names, trans_b=Op.T, gram=uplo)
    setting = Setting(p, machine, layouts, BUDGETS)
    of_a, of_c = (
        0 if setting.routes[x].streams or machine.unified else draw(st.integers(least, 5))
        for x, least in (("A", 2), ("C", 1))
    )
    a, c = draw(st.sampled_from((6, 9, 3 * steps + 2))), draw(st.integers(1, 2))
    finish = 2 if p.finishes else 0
    slots = Slots(a, 0, c, of_a, 0, of_c, finish, draw(st.sampled_from((512, 128))), unified=machine.unified)
    return setting, Candidate(TileShape(side, side, k), slots, Traversal(band=draw(st.integers(1, 3))))


@given(squares())
def test_the_clock_nearly_agrees_with_the_simulated_schedule_of_a_triangle(
    run: tuple[Setting, Candidate],
) -> None:
    """The clock runs a strip of a staircase as if it came alone, and evicts panels line by line."""
    setting, candidate = run
    seconds = simulate(schedule_of(setting, candidate), setting)
    assert predict(setting, candidate).total == pytest.approx(seconds, rel=0.35)


@given(runs())
def test_no_run_is_shorter_than_its_busiest_lane(run: tuple[Setting, Candidate]) -> None:
    """The old C shares the link and the storage with panels, although it has streams of its own."""
    found = predict(*run)
    assert found.total >= (1 - 1e-9) * max(found.lanes.values())


@given(
    machines(),
    st.sampled_from((FILES, PINNED, PAGEABLE)),
    st.integers(2, 7),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_steps_of_a_tile_take_exactly_as_long(
    machine: MachineModel, layouts: Layouts, slots: int, strips: int, adds: bool
) -> None:
    """400 steps are many enough to be collapsed."""
    setting = Setting(problem(512, 1024, 400 * 256 - 40, beta=adds), machine, layouts, BUDGETS)
    a, b, c = (0 if x.streams or machine.unified else 2 for x in setting.routes.values())
    candidate = Candidate(TILE, Slots(slots, 2, 1, a, b, c, 0, 512 // strips, unified=machine.unified))
    schedule = schedule_of(setting, candidate)
    prediction = predict(setting, candidate)
    assert prediction.total == pytest.approx(simulate(schedule, setting), rel=1e-9)
    lanes = dict.fromkeys(prediction.lanes, 0.0)
    for operation, seconds in timed(schedule, setting):
        lanes[operation.lane] += seconds
    assert {**lanes, "issue": prediction.lanes["issue"]} == pytest.approx(prediction.lanes, rel=1e-9)
    parts = prediction.start_up, prediction.lanes["compute"], prediction.bubbles, prediction.tail
    assert sum(parts) == pytest.approx(prediction.total)


def test_repeated_steps_and_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = Streams._run, 0

    def counted(self: Streams, count: int, *others: Any, **options: Any) -> None:
        nonlocal steps
        steps += count
        run(self, count, *others, **options)

    monkeypatch.setattr(Streams, "_run", counted)
    tile = TileShape(4096, 4096, 1024)
    setting = Setting(problem(100 * 4096, 100 * 4096, 1 << 20), default_model("cuda", 16), FILES, BUDGETS)
    predict(setting, Candidate(tile, Slots(strip=1024)))
    assert 0 < steps < 20_000  # of 10 million


def test_panels_that_stay_in_more_host_slots_than_device_slots_are_read_once() -> None:
    machine = replace(default_model("cuda", 16), read=1e9)
    setting = Setting(problem(8192, 8192, 2048), machine, FILES, Budgets(4 * GIB, 4 * GIB))
    slots = Slots(a=256, b=12, c=1, host_a=1152, host_b=12, host_c=2, finish=0, strip=512, drain=1)
    run = setting, Candidate(TileShape(512, 2752, 16), slots, Traversal(1))
    assert predict(*run).total == pytest.approx(simulate(schedule_of(*run), setting), rel=0.02)


def test_rows_of_pinned_arrays_that_are_too_short_pass_through_the_ring() -> None:
    layout = InMemory(pinned=True, zero_copy_width=4096)
    setting = Setting(
        problem(8192, 8192, 65_536), default_model("cuda", 16), Layouts(layout, layout, layout), BUDGETS
    )
    prices, machine = Prices(setting), setting.machine
    whole, wide, narrow = (prices.rate("h2d", "A", 8192, k) for k in (65_536, 16_384, 2048))
    assert machine.h2d == whole == wide > narrow
    assert prices.rate("h2d", "A", 8192, 1024) == layout.copy_rate(machine, (8192, 1024))
    assert prices.staged("A", 8192, 1024) > 0 == prices.staged("A", 8192, 2048)
