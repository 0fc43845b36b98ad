"""Plans fit their budgets, and errors and notes name budgets that suffice or are faster."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.errors import BudgetError
from oocgemm.planning import (
    OPERANDS,
    Budgets,
    Chunked,
    GemmProblem,
    Layout,
    Layouts,
    Lines,
    TileShape,
    Writing,
    default_model,
    make_plan,
    resumed_plan,
)
from oocgemm.planning.setting import CHUNK_BYTES
from oocgemm.planning.units import parse_size
from tests.support.plan_cases import GIB, MIB, problem
from tests.support.products import changed
from tests.support.schedule_check import verify
from tests.support.suite import examples


def advised(error: BudgetError, budgets: Budgets) -> Budgets:
    """Return the budgets that an error recommends. Check that it names only budgets that are too small."""
    options = dict(re.findall(r"--(device|host)-memory (\w+)", str(error)))
    assert options == dict(re.findall(r"(device|host)_memory='(\w+)'", str(error)))
    raised = {tier: parse_size(size) for tier, size in options.items()}
    assert all(size > getattr(budgets, tier) for tier, size in raised.items())
    assert error.least is not None
    assert f"({error.least} bytes" in str(error)
    return replace(budgets, **raised)


EXTENTS = st.one_of(st.integers(0, 3), st.integers(1, 3000), st.sampled_from([4096, 10_007, 100_000]))
CHUNKS = st.tuples(st.integers(1, 600), st.integers(1, 600))


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    def one() -> Layout:
        chunk = draw(CHUNKS)
        raw = draw(st.booleans())
        scratch = 0 if raw else 2 * 8 * chunk[0] * chunk[1]
        return Chunked(chunk, partial_reads=raw, decode_bytes=scratch, writing=Writing(chunk))

    c = Chunked(writing=Writing(free=True, encode_bytes=CHUNK_BYTES)) if draw(st.booleans()) else one()
    return Layouts(one(), one(), c)


@given(
    *(EXTENTS, EXTENTS, EXTENTS, st.sampled_from(OPERANDS), st.sampled_from([0, 1]), layouts()),
    *(st.integers(1 * MIB, 600 * MIB), st.integers(1 * MIB, 600 * MIB), st.sampled_from(["cuda", "host"])),
)
@settings(max_examples=examples(300, quick=12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_fits_its_budgets_or_the_error_names_larger_ones(
    m: int, n: int, k: int, dtype: str, beta: int, on: Layouts, device: int, host: int, backend: str
) -> None:
    p, machine = problem(m, n, k, dtype, beta), default_model(backend, 2)
    budgets = Budgets(device, host)
    try:
        plan = make_plan(p, budgets, machine, on)
    except BudgetError as error:
        budgets = advised(error, budgets)
        plan = make_plan(p, budgets, machine, on)
    assert plan.footprint.device_total <= budgets.device
    assert plan.footprint.host_total <= budgets.host
    if plan.steps <= 200_000:
        assert all(plan.traffic[link] >= plan.least[link] for link in plan.traffic)
    if plan.steps <= 2000:
        verify(plan.schedule(), plan.chunks)
        # The JSON must be standard, since the HTML report reads it.
        json.dumps(plan.to_dict(), allow_nan=False)


def test_a_chunk_too_large_to_decode_is_refused_with_the_remedy() -> None:
    on = Layouts(a=Chunked((8192, 8192), partial_reads=False, decode_bytes=GIB))
    with pytest.raises(BudgetError, match="rechunk"):
        make_plan(problem(9000, 9000, 9000), Budgets(GIB, GIB // 2), default_model("cuda", 16), on)


def test_an_error_names_both_budgets_that_are_too_small() -> None:
    p, machine = problem(300, 300, 300), default_model("host", 2)
    with pytest.raises(BudgetError, match="device memory 1 B and host memory 1 B cannot hold") as raised:
        make_plan(p, Budgets(1, 1), machine)
    assert make_plan(p, advised(raised.value, Budgets(1, 1)), machine).steps


@given(
    *(st.sampled_from([1, 1 * MIB, 20 * MIB]), st.sampled_from([1, 1 * MIB, 20 * MIB]), st.booleans()),
    st.sampled_from(["cuda", "host"]),
)
@settings(max_examples=examples(50), deadline=None)
def test_a_run_resumes_with_the_budgets_an_error_names(
    device: int, host: int, zipped: bool, backend: str
) -> None:
    chunk = Chunked((500, 500), partial_reads=not zipped, decode_bytes=4 * MIB * zipped)
    p, machine, on = problem(3000, 3000, 3000), default_model(backend, 4), Layouts(chunk, chunk)
    begun = make_plan(p, Budgets(200 * MIB, 200 * MIB), machine, on)
    with pytest.raises(BudgetError, match="cannot hold the plan that the run was begun with") as raised:
        resumed_plan(p, Budgets(device, host), machine, on, begun.candidate, frozenset())
    budgets = advised(raised.value, Budgets(device, host))
    footprint = resumed_plan(p, budgets, machine, on, begun.candidate, frozenset()).footprint
    assert footprint.device_total <= budgets.device
    assert footprint.host_total <= budgets.host


def slow_case() -> tuple[GemmProblem, Layouts, Budgets]:
    """Return a slow case: compressed operands in tiles of 16 x 16 x 16 that decode whole chunks."""
    chunk = Chunked((100, 100), partial_reads=False, decode_bytes=80_000)
    on = Layouts(chunk, chunk, Chunked(writing=Writing(free=True)))
    p = problem(997, 1009, 1013)
    with pytest.raises(BudgetError) as raised:
        make_plan(p, Budgets(1, 1), default_model("host", 2), on)
    assert raised.value.least is not None
    return p, on, Budgets(raised.value.least, 16 * MIB)


def test_a_slow_plan_names_budgets_that_speed_it_up_tenfold() -> None:
    p, on, budgets = slow_case()
    machine = default_model("host", 2)
    plan = make_plan(p, budgets, machine, on)
    assert plan.faster is not None
    larger = plan.faster.budgets
    assert larger.device <= 4 * budgets.device + MIB
    assert larger.host <= 4 * budgets.host + MIB
    options = dict(re.findall(r"--(device|host)-memory (\w+)", plan.note))
    assert replace(budgets, **{tier: parse_size(size) for tier, size in options.items()}) == larger
    fast = make_plan(p, larger, machine, on)
    assert 10 * fast.prediction.total < plan.prediction.total
    assert (fast.faster, fast.note) == (None, "")
    square = make_plan(problem(20_000, 20_000, 20_000), Budgets(64 * MIB, 64 * MIB), machine)
    assert square.faster is None  # all plans of this product are slow, so no other budget is suggested


def test_a_little_more_memory_makes_no_plan_slower() -> None:
    p, on, budgets = slow_case()
    seconds = [
        make_plan(
            p, replace(budgets, device=budgets.device + more), default_model("host", 2), on
        ).prediction.total
        for more in (0, 5000, 10_000, 20_000, 40_000, 100_000, 400_000)
    ]
    assert all(after <= 1.01 * before for before, after in itertools.pairwise(seconds))


@pytest.mark.parametrize("host", [32.3, 32.5, 32.7])
def test_smaller_strips_need_less_memory_for_checksums(host: float) -> None:
    m, n, k = 200_000, 8, 200
    p = changed(problem(m, n, k), checked="device")
    stored = Layouts(*(Lines(width) for width in (k, n, n)))
    plan = make_plan(
        p, Budgets(4 * GIB, int(host * MIB)), default_model("cuda", 16), stored, TileShape(m, n, 16)
    )
    assert plan.footprint.host_total <= plan.budgets.host
