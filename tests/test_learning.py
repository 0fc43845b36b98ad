"""Rates that runs observe improve later plans, and never make a plan slower than the first one."""

from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import pytest
from grid_cases import CUDA, HOST  # type: ignore
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.planning import (
    Budgets,
    Layout,
    Layouts,
    MachineModel,
    Plan,
    Setting,
    TileShape,
    default_model,
    guarded_plan,
    make_plan,
)
from oocgemm.planning.cost.learned import SAMPLES, Learned, LearnedRate, bounds
from oocgemm.planning.cost.rates import scaled, value_of
from oocgemm.planning.search import guarded
from oocgemm.system import cache
from oocgemm.timeline import Span
from oocgemm.timeline.observed import observed_rates
from oocgemm.timeline.sample import MAX_SPANS, Sample
from tests.plan_cases import GIB, STORED, problem
from tests.suite import examples, thinned
from tests.virtual_machines import PLACES, VirtualMachine, setting_of, true_machine, virtual_spans

GPU = default_model("cuda", 16)
# Products of the tests of plans, beside those of the benchmark grid.
STORED_SETTINGS = [
    Setting(problem(m, n, k, dtype, beta), GPU, STORED, Budgets(device * GIB, host * GIB))
    for m, n, k, dtype, beta, device, host in (
        (24576, 24576, 24576, "float64", 0, 3, 8),
        (40000, 20000, 30000, "float32", 1, 6, 16),
        (100000, 3000, 5000, "float64", 0, 16, 24),
        (8192, 8192, 131072, "float32", 0, 8, 8),
    )
]


def settings_of(machine: MachineModel) -> list[Setting]:
    if machine.unified:
        return [setting_of(case, machine) for case in HOST]
    return [setting_of(case, machine) for case in CUDA] + STORED_SETTINGS


@pytest.mark.parametrize(("backend", "cores"), [("cuda", 16), ("host", 2)])
@pytest.mark.parametrize(
    "seed", [4, 9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 40))]
)
def test_no_product_becomes_slower_on_a_machine_unlike_the_assumed_one(
    backend: str, cores: int, seed: int
) -> None:
    """Each product is planned, run and learned from, three times. Rates are 0.3 to 3 times the assumed."""
    assumed, ratios = default_model(backend, cores), []
    for setting in settings_of(assumed):
        machine = VirtualMachine(assumed, true_machine(assumed, seed))
        plan = machine.plan(setting)
        first = machine.seconds(plan)
        for _ in range(3):
            machine.learn(plan)
            plan = machine.plan(setting)
            assert machine.seconds(plan) <= 1.02 * first, setting.problem
        ratios.append(machine.seconds(plan) / first)
    assert geometric_mean(ratios) <= 1


# With the seeds 4 and 6, the rates of the virtual machine differ so much from the assumed ones that plans
# change and become faster.
@pytest.mark.parametrize("seed", thinned(range(1, 8), {4}))
def test_a_product_is_planned_with_what_other_products_taught(seed: int) -> None:
    machine = VirtualMachine(GPU, true_machine(GPU, seed))
    first, ratios = {}, {}
    for _ in range(2):
        for number, setting in enumerate(settings_of(GPU)):
            if number not in first:
                first[number] = machine.seconds(
                    make_plan(setting.problem, setting.budgets, GPU, setting.layouts)
                )
            plan = machine.plan(setting)
            ratios[number] = machine.seconds(plan) / first[number]
            assert ratios[number] <= 1.02, setting.problem
            machine.learn(plan)
    mean = geometric_mean(ratios.values())
    assert mean < 1 if seed in (4, 6) else mean <= 1
    # Pageable arrays are copied no faster than the link, so that a faster memory does not show.
    shown = () if machine.true.h2d < machine.true.memory else ("memory",)
    for name in ("h2d", "d2h", "float64", "float32", *shown):
        assert machine.learned.rates[name].value == pytest.approx(value_of(machine.true, name), rel=0.1)


@given(st.integers(0, 1000))
@settings(max_examples=examples(10))
def test_the_rates_of_a_run_are_those_of_its_machine(seed: int) -> None:
    true = true_machine(GPU, seed)
    for setting in STORED_SETTINGS:
        plan = make_plan(setting.problem, setting.budgets, GPU, setting.layouts)
        spans = virtual_spans(plan.candidate, replace(plan.setting, machine=true))
        found = observed_rates(plan, spans, PLACES)
        assert {("h2d", ""), (setting.problem.rate, "")} <= found.keys()
        for (name, _), one in found.items():
            rate = value_of(true, name)
            # The old C is read while panels are. On the virtual machine, both have the whole rate.
            together = 2 if name == "read" and setting.problem.reads_c else 1
            assert 0.9 * rate <= one.rate <= 1.1 * together * rate, name


def test_a_disturbance_of_a_run_does_not_change_its_rates() -> None:
    setting = STORED_SETTINGS[0]
    plan = make_plan(setting.problem, setting.budgets, GPU, setting.layouts)
    spans = list(virtual_spans(plan.candidate, plan.setting))
    uploads = [span for span in spans if span.kind == "upload"]
    slow = {span.id for span in uploads[: len(uploads) // 5]}
    disturbed = [
        replace(span, end=span.start + 10 * (span.end - span.start)) if span.id in slow else span
        for span in spans
    ]
    right, found = (observed_rates(plan, one, PLACES)["h2d", ""].rate for one in (spans, disturbed))
    assert found == pytest.approx(right, rel=0.1)


TILE = TileShape(2048, 2048, 2048)
PANEL = 2048 * 2048 * 8  # bytes


def spans_of(*times: tuple[str, str, int, int], size: int = PANEL) -> list[Span]:
    """Return spans (kind, lane, start, end in ms) of `size` bytes of A. Reads wait for something."""
    return [
        Span(i, kind, "A", lane, lane, 0, (0, 0), 0, start * 10**6, end * 10**6, size, 0, (0,))
        for i, (kind, lane, start, end) in enumerate(times)
    ]


def test_operations_that_show_no_capability_are_left_out() -> None:
    plan = make_plan(problem(8192, 8192, 8192), Budgets(GIB, GIB), GPU, STORED, TILE)
    reads = [("read", "read", 10 * i, 10 * i + 10) for i in range(8)]
    rate = PANEL / 0.01
    assert observed_rates(plan, spans_of(*reads), PLACES)["read", "8:1"].rate == pytest.approx(rate, rel=0.01)
    assert observed_rates(plan, spans_of(*reads[:3]), PLACES) == {}  # too few
    first = [replace(span, waits=()) for span in spans_of(*reads)]
    assert observed_rates(plan, first, PLACES) == {}  # these fault pages in
    short = [replace(span, bytes=100) for span in spans_of(*reads)]
    assert observed_rates(plan, short, PLACES) == {}  # parts of panels
    tiny = [("download", "d2h", i, i + 1) for i in range(99)]
    tiny_spans = [replace(span, operand="C", bytes=100) for span in spans_of(*tiny)]
    assert observed_rates(plan, tiny_spans, PLACES) == {}  # these are latencies
    # Two reads at a time have half of the rate each.
    pairs = [("read", "read", 10 * (i // 2), 10 * (i // 2) + 10) for i in range(16)]
    assert observed_rates(plan, spans_of(*pairs), PLACES)["read", "8:1"].rate == pytest.approx(
        2 * rate, rel=0.01
    )


def test_lanes_that_share_cores_are_observed_one_at_a_time() -> None:
    host = default_model("host", 2)
    plan = make_plan(problem(8192, 8192, 8192), Budgets(GIB, GIB), host, STORED, TILE)
    alone = [("read", "read", 10 * i, 10 * i + 10) for i in range(8)]
    beside = [("read", "read", 100 + 10 * i, 140 + 10 * i) for i in range(8)] + [
        ("multiply", "compute", 100, 250)
    ]
    found = observed_rates(plan, spans_of(*alone, *beside), PLACES)
    assert found["read", "8:1"].rate == pytest.approx(PANEL / 0.01, rel=0.01)
    assert observed_rates(plan, spans_of(*beside), PLACES) == {}


def test_copies_in_both_directions_at_once_do_not_count() -> None:
    plan = make_plan(problem(8192, 8192, 8192), Budgets(GIB, GIB), GPU, STORED, TILE)
    alone = [("upload", "h2d", 10 * i, 10 * i + 10) for i in range(8)]
    beside = [("upload", "h2d", 100 + 20 * i, 120 + 20 * i) for i in range(8)]
    back = [("download", "d2h", 100, 250)]
    found = observed_rates(plan, spans_of(*alone, *beside, *back), PLACES)
    assert found["h2d", ""].rate == pytest.approx(PANEL / 0.01, rel=0.01)
    assert observed_rates(plan, spans_of(*beside, *back), PLACES) == {}


def test_copies_of_pinned_arrays_count_all_the_same() -> None:
    """Their rate with the other direction at work is the one that most runs see."""
    pinned = Layout(in_memory=True, zero_copy_width=1024, pinned=True, itemsize=8)
    layouts = Layouts(pinned, pinned, pinned)
    plan = make_plan(problem(8192, 8192, 8192), Budgets(GIB, GIB), GPU, layouts, TILE)
    assert plan.is_direct("A")
    beside = [("upload", "h2d", 100 + 20 * i, 120 + 20 * i) for i in range(8)]
    found = observed_rates(plan, spans_of(*beside, ("download", "d2h", 100, 250)), PLACES)
    assert PANEL / 0.02 <= found["h2d", ""].rate < 1.2 * PANEL / 0.02  # short rows are copied more slowly


def test_prepares_beside_multiplies_do_not_count() -> None:
    emulated = replace(problem(8192, 8192, 8192), compute="emulated")
    plan = make_plan(emulated, Budgets(4 * GIB, GIB), GPU, STORED, TILE)
    size, flops = emulated.prepared_bytes(2048, 2048, 2048), emulated.step_flops(2048, 2048, 2048)
    alone = [("prepare", "prepare", 10 * i, 10 * i + 5) for i in range(8)]
    alone += [("multiply", "compute", 10 * i + 5, 10 * i + 10) for i in range(8)]
    beside = [(kind, lane, start + 100, end + 105) for kind, lane, start, end in alone]

    def rates(*times: tuple[str, str, int, int]) -> dict[tuple[str, str], float]:
        spans = [replace(s, flops=flops if s.kind == "multiply" else 0) for s in spans_of(*times, size=size)]
        return {key: one.rate for key, one in observed_rates(plan, spans, PLACES).items()}

    found = rates(*alone)
    assert found == {("prepare", ""): pytest.approx(size / 0.005, rel=0.05)}
    assert rates(*alone, *beside) == pytest.approx(found)
    assert rates(*beside) == {}


def nothing_learned() -> Learned:
    return Learned(cache.machine_key(), "cuda", "NVIDIA H200", {})


def run_with(learned: Learned, rate: float, name: str = "h2d", place: str = "", busy: float = 1.0) -> Learned:
    return learned.with_run({(name, place): (rate, busy)}, GPU, GPU, 64e9)


def test_impossible_and_implausible_rates_are_rejected() -> None:
    for rate in (65e9, 0.5e9):  # above the limit of the link, far below the default
        assert run_with(nothing_learned(), rate).rates == {}
    assert run_with(nothing_learned(), 2e9, "read", "8:1").rates == {}  # a disk, not the page cache
    assert run_with(nothing_learned(), 5 * value_of(GPU, "float64"), "float64").rates == {}
    # A CPU that other programs use is no slow CPU. The kernels of a GPU are timed by the device.
    host, seen = default_model("host", 2), {("float64", ""): (0.004 * 110e9, 1.0)}
    assert Learned("", "host", "", {}).with_run(seen, host, host, None).rates == {}
    assert run_with(nothing_learned(), 0.004 * value_of(GPU, "float64"), "float64").rates != {}
    kept = run_with(nothing_learned(), 30e9)
    assert run_with(kept, 1e15) == kept
    for name in ("h2d", "read", "memory", "float32"):
        lowest, highest = bounds(name, GPU)
        assert 0 < lowest < value_of(GPU, name) < highest


def test_an_idle_lane_is_not_believed_to_be_slow() -> None:
    assert run_with(nothing_learned(), 20e9, "read", "8:1", busy=0.2).rates == {}
    assert run_with(nothing_learned(), 20e9, "read", "8:1").rates["read @ 8:1"].value == 20e9
    assert run_with(nothing_learned(), 60e9, "read", "8:1", busy=0.2).rates["read @ 8:1"].value == 60e9


@given(st.lists(st.floats(0.95, 1.04), min_size=1, max_size=20))
def test_noise_does_not_change_the_rate_in_use(noise: list[float]) -> None:
    learned = run_with(nothing_learned(), 30e9)
    for factor in noise:
        learned = run_with(learned, 30e9 * factor)
        assert learned.rates["h2d"].value == 30e9
        assert learned.apply(GPU)[0].h2d == pytest.approx(30e9)
    assert len(learned.rates["h2d"].samples) == min(SAMPLES, 1 + len(noise))


def test_a_lasting_change_is_learned_and_one_outlier_is_not() -> None:
    learned = nothing_learned()
    for rate in (30e9, 30e9, 10e9, 30e9, 30e9):
        learned = run_with(learned, rate)
        assert learned.rates["h2d"].value == 30e9
    for _ in range(3):
        learned = run_with(learned, 15e9)
    assert learned.rates["h2d"].value == 15e9


def test_a_rate_replaces_another_only_where_they_differ_by_more_than_the_spread() -> None:
    assert run_with(nothing_learned(), 0.95 * GPU.h2d).apply(GPU) == (GPU, [])
    wide = replace(nothing_learned(), rates={"h2d": LearnedRate(40e9, (25e9, 40e9, 55e9))})
    assert wide.apply(GPU) == (GPU, [])
    narrow = replace(nothing_learned(), rates={"h2d": LearnedRate(40e9, (39e9, 40e9, 41e9))})
    assert narrow.apply(GPU)[1] == ["h2d"]


def test_rates_apply_to_their_file_system_and_codec() -> None:
    learned = run_with(run_with(nothing_learned(), 20e9, "read", "8:1"), 60e9, "read", "8:2")
    model, names = learned.apply(GPU, {"read": ["8:1"]})
    assert (model.read, names) == (20e9, ["read"])
    assert model.read_scattered == pytest.approx(GPU.read_scattered * 20e9 / GPU.read)
    assert learned.apply(GPU, {"read": ["8:1", "8:2"]})[0].read == 20e9
    assert learned.apply(GPU, {"read": ["8:2"]})[0].read == 60e9
    assert learned.apply(GPU, {"read": ["8:2", "8:3"]})[0].read == GPU.read  # 8:3 is assumed to be slower
    assert learned.apply(GPU, {"read": []})[0].read == GPU.read
    assert learned.known({"read": ["8:1"]}) == {"read"}
    assert learned.known({"read": ["8:1", "8:3"]}) == set()


def test_a_plan_does_not_rely_on_rates_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rates are known but that of host memory, which is slower than assumed."""
    monkeypatch.setattr(guarded, "_kept", lambda *_: None)
    monkeypatch.setattr(guarded, "MARGIN", 0.05)
    case = next(c for c in CUDA if c.name == "16384x16384x16384 float64 pageable")
    setting = setting_of(case, GPU)
    true = true_machine(GPU, 28)
    informed = scaled(true, {"memory": GPU.memory / true.memory})
    free, careful = (
        guarded_plan(setting.problem, setting.budgets, (GPU, informed), assumed, setting.layouts)
        for assumed in (frozenset[str](), frozenset({"memory"}))
    )
    machine = VirtualMachine(GPU, true)
    assert machine.seconds(careful) < machine.seconds(free)


@given(st.sampled_from(STORED_SETTINGS), st.integers(0, 1000))
@settings(max_examples=examples(20))
def test_a_plan_that_is_kept_has_the_measured_rates(setting: Setting, seed: int) -> None:
    true = true_machine(GPU, seed)
    plan = guarded_plan(setting.problem, setting.budgets, (GPU, true), frozenset(), setting.layouts)
    assert plan.machine == true
    assert plan.setting == replace(setting, machine=true)
    chosen = next(s for s in plan.considered if s.candidate == plan.candidate)
    assert chosen.prediction.total == pytest.approx(plan.prediction.total, rel=0.05)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("size", "h2d", "planned"), [(32768, 0.9, 1), (32768, 0.3, 2), (65536, 0.9, 2)])
def test_a_short_product_is_planned_again_only_if_that_may_save_time(
    size: int, h2d: float, planned: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines: list[MachineModel] = []

    def counted(*given: Any) -> Plan:
        machines.append(given[2])
        return make_plan(*given)

    monkeypatch.setattr(guarded, "make_plan", counted)
    gram = replace(problem(size, size, size, "float64"), gram="lower")
    measured = scaled(GPU, {"h2d": h2d, "float64": 1.01})
    x = Layout(in_memory=True, itemsize=8, zero_copy_width=4096, pinned=pinned)
    given = Budgets(60 << 30, 60 << 30), (GPU, measured), frozenset[str](), Layouts(x, x, x)
    plan = guarded.guarded_plan(gram, *given)
    assert machines == [GPU, measured][:planned]
    assert plan.machine == make_plan(gram, given[0], measured, given[-1]).machine
    assert pinned or plan.machine == measured


@given(st.integers(0, 5 * MAX_SPANS), st.integers(0, 5))
@settings(max_examples=examples(20))
def test_a_sample_is_bounded_and_keeps_the_latest(count: int, others: int) -> None:
    sample = Sample()
    spans = spans_of(*[("read", "read", i, i + 1) for i in range(count)])
    for span in spans:
        sample.add(span)
    for span in spans_of(*[("upload", "h2d", i, i + 1) for i in range(others)]):
        sample.add(span)
    kept = sample.spans()
    assert [span for span in kept if span.kind == "read"] == spans[-MAX_SPANS:]
    together = sample.spans(together=True)
    assert {s.kind for s in together} <= {s.kind for s in kept}
    if count > MAX_SPANS + 5:
        assert {s.kind for s in together} == {"read"}


def test_products_by_other_kernels_and_precisions_teach_no_kernel_rate() -> None:
    plan = make_plan(problem(300, 300, 300), Budgets(GIB, GIB), default_model("host", 2))
    spans = spans_of(*[("multiply", "compute", 10 * i, 10 * i + 10) for i in range(9)])
    spans = [replace(span, operand="C", bytes=0, flops=10**9) for span in spans]
    assert observed_rates(plan, spans, PLACES).keys() == {("float64", "")}
    assert observed_rates(plan, spans, PLACES, kernel=False) == {}
    rounded = replace(plan, problem=replace(plan.problem, compute="tf32"))
    assert observed_rates(rounded, spans, PLACES) == {}
