"""Plans fit their budgets, move at least as many bytes as the lower bound, and explain the choice."""

import importlib
import itertools
import json
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning import (
    DTYPES,
    OPERANDS,
    Budgets,
    GemmProblem,
    Kind,
    Layout,
    Layouts,
    Op,
    Plan,
    Schedule,
    Setting,
    Slots,
    TileGrid,
    TileShape,
    Traversal,
    default_model,
    make_plan,
    resumed_plan,
)
from oocgemm.planning.cost.by_tile import drain_end, shares, tile_seconds
from oocgemm.planning.cost.footprint import min_bytes
from oocgemm.planning.cost.machine import DIGEST_SECONDS_PER_BYTE
from oocgemm.planning.cost.predict import predict
from oocgemm.planning.cost.price import strip_rate
from oocgemm.planning.cost.simulate import simulate
from oocgemm.planning.schedule.eviction import SlotCache
from oocgemm.planning.schedule.hazards import verify
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.traversal import walk
from oocgemm.planning.search import depths, planner
from oocgemm.planning.setting import CHUNK_BYTES
from oocgemm.planning.units import parse_size
from tests.suite import examples, slow

plan_module: Any = importlib.import_module("oocgemm.planning.plan")
bench_traffic: Any = importlib.import_module("bench_traffic")
traffic_oracle: Any = importlib.import_module("traffic_oracle")

GIB = 1 << 30
MIB = 1 << 20


def problem(m: int, n: int, k: int, dtype: str = "float64", beta: float = 0) -> GemmProblem:
    d = DTYPES[dtype]
    return GemmProblem(m, n, k, d.name, d.name, d.accumulator, d.results[0], 1.0, beta, Op.N, Op.N)


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
        return Layout(read_chunk=chunk, write_chunk=chunk, partial_reads=raw, decode_bytes=scratch)

    c = Layout(free_chunks=True, encode_bytes=CHUNK_BYTES) if draw(st.booleans()) else one()
    return Layouts(one(), one(), c)


@given(
    *(EXTENTS, EXTENTS, EXTENTS, st.sampled_from(OPERANDS), st.sampled_from([0, 1]), layouts()),
    *(st.integers(1 * MIB, 600 * MIB), st.integers(1 * MIB, 600 * MIB), st.sampled_from(["cuda", "host"])),
)
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


def test_tiles_fill_the_memory_and_panels_are_thin() -> None:
    plan = make_plan(problem(100_000, 100_000, 900_000), Budgets(8 * GIB, 8 * GIB), default_model("cuda", 16))
    accumulators = plan.slots.c * plan.tile.m * plan.tile.n * 8
    assert accumulators > 0.3 * plan.budgets.device
    assert plan.traffic["h2d"] < 2.2 * plan.least["h2d"]


def test_counting_traffic_does_not_walk_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = SlotCache.acquire, 0

    def counted(self: SlotCache, key: tuple[int, int], next_use: int) -> tuple[int, bool]:
        nonlocal calls
        calls += 1
        return original(self, key, next_use)

    monkeypatch.setattr(SlotCache, "acquire", counted)
    case = problem(400_000, 400_000, 400_000, "float32")
    plan = make_plan(case, Budgets(GIB, 8 * GIB), default_model("cuda", 16))
    assert plan.steps > 50_000
    assert plan.traffic["h2d"] > 0
    assert calls < plan.steps


def test_the_lower_bound_holds_for_a_brute_force_oracle() -> None:
    """No tile with panels of depth 1 moves fewer bytes than the lower bound."""
    p = problem(60, 50, 40)
    for memory in (200, 800, 3000, 20_000):
        elements = memory // 8
        best = min(
            (p.m * p.k * -(-p.n // n) + p.k * p.n * -(-p.m // m)) * 8
            for m in range(1, p.m + 1)
            for n in range(1, p.n + 1)
            if m * n + m + n <= elements
        )
        assert min_bytes(p, memory) <= best


def fewest_by_simulation(p: GemmProblem, k: int, memory: int) -> float:
    """Return the fewest bytes of panels that must be uploaded, by simulating every plan.

    Every tiling, traversal and division of the memory into buffers is simulated.
    """
    best = float("inf")
    for down, across in itertools.product(range(1, p.m + 1), range(1, p.n + 1)):
        tile = TileShape(-(-p.m // down), -(-p.n // across), k)
        grid = TileGrid.of(p, tile)
        free = memory // 8 - tile.m * tile.n
        for axis, a in itertools.product((0, 1), range(2, max(2, free // (tile.m * k)) + 1)):
            b = (free - a * tile.m * k) // (tile.n * k)
            if b < 2 or a > grid.shape[0] * grid.steps + 2:
                continue
            for band in range(1, grid.shape[axis] + 1):
                tiles = walk(Traversal(axis, band), *grid.shape)
                loads = Schedule(p, grid, tiles, Slots(a, b, host_a=1, host_b=1)).loads()
                best = min(best, loads.a_up + loads.b_up)
    return best


@pytest.mark.parametrize(
    ("m", "n", "k", "memory"),
    [
        (8, 3, 4, 250),
        *slow((6, 6, 6, 200), (5, 5, 5, 250), (4, 9, 3, 240), (5, 4, 9, 300)),
    ],
)
def test_the_traffic_oracle_agrees_with_simulation(m: int, n: int, k: int, memory: int) -> None:
    least, _ = traffic_oracle.min_panels(traffic_oracle.Case(m, n, k, 8, 1, memory))
    found = fewest_by_simulation(problem(m, n, k), 1, memory)
    assert 0.93 * found <= least <= found


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (4096, 4096, 4096),
        (10_007, 10_009, 10_037),
        *slow((2048, 100_003, 8192), (32_768, 32_768, 1024)),
    ],
)
@pytest.mark.parametrize("link", ["h2d", "read", "unified"])
def test_traffic_is_near_the_minimum_that_a_search_finds(m: int, n: int, k: int, link: str) -> None:
    p = problem(m, n, k)
    plan = make_plan(p, Budgets(256 * MIB, GIB), bench_traffic.machine(link, p))
    moved = plan.traffic["h2d" if link == "h2d" else "read"]
    assert moved <= 1.02 * bench_traffic.oracle(plan, link, moved)[0]


@pytest.mark.parametrize(
    ("extent", "beta", "device", "host"),
    [(4096, 1, 3 * GIB, 8 * GIB), (10_007, 0, 3 * GIB, 8 * GIB), (16_384, 0, 8 * GIB, 64 * GIB)],
)
@pytest.mark.parametrize("link", ["h2d", "read"])
def test_a_slow_link_carries_once_what_a_tier_can_cache(
    extent: int, beta: int, device: int, host: int, link: str
) -> None:
    """The first panels are as deep as all others.

    Otherwise the link would carry them twice: also as parts of the whole panels that other tiles use.
    """
    p = problem(extent, extent, extent, beta=beta)
    plan = make_plan(p, Budgets(device, host), bench_traffic.machine(link, p))
    assert plan.traffic[link] == plan.required[link]


def test_the_host_caches_panels_not_c_where_the_store_is_fast() -> None:
    p = problem(24_576, 24_576, 24_576)
    plan = make_plan(p, Budgets(128 * MIB, 128 * MIB), bench_traffic.machine("read", p))
    assert plan.slots.host_c <= 3


@pytest.mark.parametrize("beta", [0, 1])
def test_operands_that_fit_are_moved_once(beta: int) -> None:
    p, tile = problem(2000, 2000, 2000, beta=beta), TileShape(2000, 2000, 500)
    plan = make_plan(p, Budgets(4 * GIB, 4 * GIB), default_model("cuda", 16), tile=tile)
    assert plan.traffic == plan.required


def test_tiles_and_strips_never_share_a_chunk_of_c() -> None:
    for chunk in ((1000, 700), (333, 4096)):
        on = Layouts(c=Layout(write_chunk=chunk, encode_bytes=8 * chunk[0] * chunk[1]))
        plan = make_plan(
            problem(9001, 9001, 3000), Budgets(300 * MIB, 300 * MIB), default_model("cuda", 4), on
        )
        verify(plan.schedule(), chunk)


def test_a_new_c_gets_chunks_that_divide_the_tile() -> None:
    on = Layouts(c=Layout(free_chunks=True, encode_bytes=2 * CHUNK_BYTES))
    plan = make_plan(
        problem(30_000, 30_000, 3000), Budgets(800 * MIB, 800 * MIB), default_model("cuda", 4), on
    )
    rows, cols = plan.chunks
    assert plan.tile.m >= plan.problem.m or plan.tile.m % rows == 0
    assert plan.tile.n >= plan.problem.n or plan.tile.n % cols == 0
    assert CHUNK_BYTES / 8 <= rows * cols * 8 <= CHUNK_BYTES * 4


def test_panels_follow_the_chunks_of_compressed_operands() -> None:
    on = Layouts(*(Layout(read_chunk=(1000, 1000), partial_reads=False, decode_bytes=16_000_000),) * 2)
    plan = make_plan(
        problem(20_000, 20_000, 20_000), Budgets(2 * GIB, 8 * GIB), default_model("cuda", 16), on
    )
    assert plan.tile.k % 1000 == 0
    assert all(factor < 1.1 for factor in plan.amplification.values())
    # Depths that are a part of an operand's chunk are tried last.
    on = Layouts(on.a, replace(on.b, read_chunk=(1500, 1500)))
    assert all(
        depth == 20_000 or all(depth % chunk == 0 or chunk % depth == 0 for chunk in (1000, 1500))
        for depth in depths._usual_depths(replace(plan.setting, layouts=on), 2 * GIB)[: depths.BEST_DEPTHS]
    )


def test_a_tile_passed_by_the_caller_is_used_or_refused() -> None:
    p, machine = problem(1000, 1000, 1000), default_model("host", 2)
    assert make_plan(p, Budgets(GIB, GIB), machine, tile=TileShape(300, 200, 70)).tile == TileShape(
        300, 200, 70
    )
    with pytest.raises(BudgetError, match="tile 300x200x70"):
        make_plan(p, Budgets(16 * MIB + MIB // 2, GIB), machine, tile=TileShape(300, 200, 70))
    with pytest.raises(InputError, match="multiple of 64"):
        make_plan(
            p, Budgets(GIB, GIB), machine, Layouts(c=Layout(write_chunk=(64, 64))), TileShape(300, 128, 70)
        )


def test_a_chunk_too_large_to_decode_is_refused_with_the_remedy() -> None:
    on = Layouts(a=Layout(read_chunk=(8192, 8192), partial_reads=False, decode_bytes=GIB))
    with pytest.raises(BudgetError, match="rechunk"):
        make_plan(problem(9000, 9000, 9000), Budgets(GIB, GIB // 2), default_model("cuda", 16), on)


def test_explanations_name_what_each_candidate_loses() -> None:
    plan = make_plan(problem(24_576, 24_576, 24_576), Budgets(3 * GIB, 8 * GIB), default_model("cuda", 16))
    rows: list[dict[str, Any]] = plan.explain()
    assert rows[0]["why"] == "chosen"
    assert rows[0]["tile"] == str(plan.tile)
    assert len(rows) > 2
    assert all(row["why"] for row in rows)


@pytest.mark.parametrize(
    ("backend", "size", "budgets"),
    [
        ("cuda", 24_576, Budgets(2 * GIB, 8 * GIB)),  # all other work is hidden behind writing C
        ("host", 7_000, Budgets(640 * MIB, 64 * MIB)),
    ],
)
def test_of_equally_fast_plans_the_one_with_least_work_wins(
    backend: str, size: int, budgets: Budgets
) -> None:
    stored = Layout((1000, 1000))
    layouts = Layouts(stored, stored, Layout(free_chunks=True))
    plan = make_plan(problem(size, size, size, "float32"), budgets, default_model(backend, 2), layouts)
    chosen, *others = (s.prediction for s in plan.considered)
    fastest = min(other.total for other in (chosen, *others))
    assert chosen.total <= 1.011 * fastest
    assert any(other.total < chosen.total for other in others)
    assert all(other.serial >= chosen.serial for other in others if other.total <= 1.009 * fastest)


STORED = Layouts(Layout((2048, 2048)), Layout((2048, 2048)), Layout(free_chunks=True))


def test_the_last_tile_is_smaller_where_c_drains_slowly() -> None:
    """While the last tile is written, nothing else runs.

    A smaller last tile may therefore make the run faster.
    """
    p, budgets = problem(32_768, 32_768, 524_288), Budgets(8 * GIB, 24 * GIB)
    machine = default_model("cuda", 16)
    plan = make_plan(p, budgets, machine, STORED)
    i, j = plan.schedule().tiles[-1]
    ends = [rows[1] - rows[0] for rows in (plan.grid.rows(i), plan.grid.cols(j))]
    assert ends[0] * ends[1] < plan.tile.m * plan.tile.n
    alike = make_plan(p, budgets, machine, STORED, TileShape(16_384, 16_384, plan.tile.k))
    assert plan.prediction.tail < 0.8 * alike.prediction.tail
    assert plan.prediction.total < alike.prediction.total
    quick = make_plan(p, budgets, replace(machine, write=1e12), STORED)
    assert quick.grid.rows(0)[1] * quick.grid.shape[0] == p.m


def test_the_last_tile_is_smaller_to_shorten_the_tail() -> None:
    """Without the time to write the last tile, one tile would be fastest here, and next two equal tiles."""
    p = replace(problem(32_768, 32_768, 524_288), compute="emulated")
    plan = make_plan(p, Budgets(120 * GIB, 32 * GIB), default_model("cuda", 16), STORED)
    i, j = plan.schedule().tiles[-1]
    ends = [rows[1] - rows[0] for rows in (plan.grid.rows(i), plan.grid.cols(j))]
    assert plan.grid.shape in ((1, 2), (2, 1))
    assert ends[0] * ends[1] < 0.6 * plan.tile.m * plan.tile.n


def test_the_last_steps_run_by_strips_where_the_tail_is_long() -> None:
    """The last steps multiply the tile row block by row block, so that its first rows can be written early.

    The panels of these steps must stay in memory, which leaves fewer buffers for panels that are used again.
    """
    p, machine, budgets = (
        problem(32_768, 32_768, 524_288),
        default_model("cuda", 16),
        Budgets(8 * GIB, 24 * GIB),
    )
    plan = make_plan(p, budgets, machine, STORED)
    slots = plan.slots
    assert slots.last_steps > 2
    assert slots.turn_steps == 1  # the host has room for a whole tile
    kept = replace(plan.candidate, slots=replace(slots, a=slots.a + slots.b - 2, b=2, drain=1))
    other = replace(plan, candidate=kept)
    assert max(plan.footprint.device_total, other.footprint.device_total) <= budgets.device
    mine, others = (simulate(x.schedule(), x.setting) for x in (plan, other))
    assert mine < others - 0.02  # seconds saved; three steps of the last tile take 0.06 s
    quick = make_plan(p, budgets, replace(machine, write=1e12), STORED)
    assert quick.slots.last_steps == 1


def test_taking_digests_counts_as_time_of_reading() -> None:
    p, budgets = problem(24_576, 24_576, 393_216), Budgets(8 * GIB, 24 * GIB)
    machine, shape = default_model("cuda", 16), TileShape(16_384, 12_288, 2048)
    plain, checked = (
        make_plan(replace(p, checked=tier), budgets, machine, STORED, shape) for tier in ("", "device")
    )
    assert plain.traffic["read"] == checked.traffic["read"]
    more = checked.prediction.lanes["read"] - plain.prediction.lanes["read"]
    assert more == pytest.approx(DIGEST_SECONDS_PER_BYTE * plain.traffic["read"], rel=0.02)


@pytest.mark.parametrize("write", [0.3e9, 1.6e9])
@pytest.mark.parametrize(
    "tile", ["16384x16384x4096", "16384x22528x4096", "20480x24576x2048", "28672x16384x4096"]
)
def test_tiles_of_unlike_size_take_as_long_as_their_schedule(tile: str, write: float) -> None:
    """The formula and the simulation predict about the same time."""
    p, machine = problem(32_768, 32_768, 262_144), replace(default_model("cuda", 16), write=write)
    shape = TileShape(*map(int, tile.split("x")))
    plan = make_plan(p, Budgets(8 * GIB, 24 * GIB), machine, STORED, shape)
    seconds = simulate(plan.schedule(), plan.setting)
    # With one accumulator and no host memory for a whole tile, the formula assumes that nothing runs while a
    # tile is downloaded.
    excess = 0.14 if plan.slots.c == 1 and plan.slots.host_c * plan.slots.strip < shape.m else 0.04
    assert seconds * 0.98 < plan.prediction.total < seconds * (1 + excess)


def test_no_plan_ends_in_a_thin_tile_that_waits_for_panels() -> None:
    p, machine = problem(32_768, 32_768, 524_288), default_model("cuda", 16)
    budgets = Budgets(8 * GIB, 24 * GIB)
    plan = make_plan(p, budgets, machine, STORED)
    thin = make_plan(p, budgets, machine, STORED, TileShape(28_672, 16_384, 4096))
    assert plan.prediction.total < 0.95 * thin.prediction.total
    assert simulate(plan.schedule(), plan.setting) < 0.95 * simulate(thin.schedule(), thin.setting)


def test_shares_of_a_tile_count_its_loads_and_flops() -> None:
    """The second tile of a row reuses the panels of A. Panels of B are loaded for each row of tiles."""
    p = problem(300, 400, 100, "float32")
    loads = Loads(0, 0, 4 * 300 * 100, 2 * 4 * 400 * 100)
    parts = shares(p, TileGrid.of(p, TileShape(200, 300, 10)), Traversal(), loads)
    assert [part.computed for part in parts] == pytest.approx([0.5, 1 / 6, 1 / 12, 0.25])
    assert [part.loaded * 1100 for part in parts] == pytest.approx([200 + 300, 100, 100 + 100, 300])
    # The third tile waits for its panels unless they are prefetched while the second one is computed.
    assert tile_seconds(parts, 12, 11, prefetch=False) == pytest.approx([6, 2, 2, 3])
    assert tile_seconds(parts, 12, 11, prefetch=True) == pytest.approx([6, 2, 1, 3])
    assert tile_seconds(parts, 12, 33, prefetch=True) == pytest.approx([15, 3, 6, 9])
    # C is downloaded and written tile by tile, starting when the first tile is computed.
    assert drain_end(parts, [6, 2, 1, 3], 12, 24, 0, 4) == pytest.approx(6 + 24)
    assert drain_end(parts, [6, 2, 1, 3], 12, 0, 0, 4) == 12
    assert drain_end(parts, [6, 2, 1, 3], 12, 4, 0, 1) == pytest.approx(12 + 1)
    assert drain_end(parts, [6, 2, 1, 3], 12, 1, 0.5, 10) == pytest.approx(12 + 0.025)


@pytest.mark.parametrize(
    ("size", "k", "budgets"),
    [
        (8192, 16_384, Budgets(320 * MIB, 384 * MIB)),
        (24_576, 24_576, Budgets(3 * GIB, 8 * GIB)),
        (12_288, 32_768, Budgets(GIB, 8 * GIB)),
    ],
)
def test_every_operation_takes_time_under_the_gil(size: int, k: int, budgets: Budgets) -> None:
    p, machine = problem(size, size, k), default_model("cuda", 16)
    plan = make_plan(p, budgets, machine, STORED)
    schedule = plan.schedule()
    count = sum(1 for _ in schedule)
    lanes = predict(plan.setting, plan.candidate, schedule.loads()).lanes
    assert lanes["issue"] == pytest.approx(machine.issue * count, rel=0.1)
    # Issuing operations is not the bottleneck. Smaller tiles might move fewer bytes, but have more
    # operations.
    assert lanes["issue"] < plan.prediction.total
    free = make_plan(p, budgets, replace(machine, issue=0.0), STORED)
    slow = replace(machine, issue=0.1)
    assert simulate(schedule, replace(plan.setting, machine=slow)) >= 0.1 * count
    assert make_plan(p, budgets, slow, STORED).steps < free.steps


def test_predicted_time_of_a_tile_follows_whole_blocks() -> None:
    """`measured` is the milliseconds of one step 4096 deep in float32 on an H200, each a median of 28.

    The GPU computes whole blocks of C, so a slightly wider tile may take less time.
    """
    measured = {
        (9472, 9472): 14.594,
        (9728, 9728): 15.183,
        (9832, 9832): 15.945,
        (9984, 9984): 16.596,
        (10240, 10240): 17.278,
        (9856, 12288): 19.844,
        (12288, 9856): 19.293,
        (9984, 12288): 20.051,
        (12288, 9984): 20.053,
        (12288, 10112): 20.082,
    }
    machine = default_model("cuda", 16)
    over = []
    for (m, n), milliseconds in measured.items():
        even = machine.multiply_seconds("float32", 2 * m * n * 4096, m, n, 4096)
        over.append(even * machine.wave_quantization("float32", m, n) / milliseconds)
    assert max(over) / min(over) < 1.015


def test_a_tile_fills_the_multiprocessors() -> None:
    memory = Layout(in_memory=True, zero_copy_width=8192, pinned=True)
    plan = make_plan(
        problem(49_152, 49_152, 49_152, "float32"),
        Budgets(2 * GIB, 8 * GIB),
        default_model("cuda", 16),
        Layouts(memory, memory, memory),
    )
    assert plan.machine.wave_quantization("float32", plan.tile.m, plan.tile.n) < 1.005
    assert plan.tile.m % 32 == plan.tile.n % 32 == 0  # so that rows begin at multiples of 128 bytes


@pytest.mark.parametrize(
    ("pinned", "checked", "width", "copied"),
    [(True, "", 8192, False), (False, "", 8192, True), (True, "device", 8192, True), (True, "", 1024, True)],
)
def test_a_pinned_c_is_downloaded_in_place(pinned: bool, checked: str, width: int, copied: bool) -> None:
    """The device writes to a pinned C itself if blocks of rows are wide and the host need not check them."""
    memory = Layout(in_memory=True, zero_copy_width=4096, pinned=pinned)
    p = replace(problem(8192, width, 8192), checked=checked)
    machine, on = default_model("cuda", 16), Layouts(memory, memory, memory)
    plan = make_plan(p, Budgets(GIB, GIB), machine, on)
    assert any(plan.is_zero_copy(op) for op in plan.schedule() if op.kind is Kind.WRITE) is not copied
    least = p.m * p.n * 8 / machine.memory
    assert (plan.prediction.lanes["write"] > least) is copied


def test_a_tile_is_not_divided_into_many_strips() -> None:
    """A tile is downloaded in few blocks of rows, since each needs several operations.

    This holds although the host has room for few rows.
    """
    plan = make_plan(problem(8192, 8192, 16_384), Budgets(GIB, 384 * MIB), default_model("cuda", 16), STORED)
    assert -(-plan.tile.m // plan.slots.strip) <= 32


def test_a_plan_is_the_same_every_time() -> None:
    def once() -> Plan:
        planner._planned.cache_clear()
        return make_plan(problem(5000, 7000, 3000), Budgets(GIB, GIB), default_model("cuda", 16))

    assert once() == once()


@pytest.mark.parametrize("c", [Layout(free_chunks=True), Layout(in_memory=True)])
def test_scarce_memory_gets_shallow_panels_not_tiny_tiles(c: Layout) -> None:
    """Deep panels suit the chunks better, but would leave room for tiny tiles only."""
    stored = Layout((400, 400))
    budgets = Budgets(18 * MIB, 24 * MIB)
    plan = make_plan(
        problem(2400, 2400, 2400, "float32"), budgets, default_model("host", 2), Layouts(stored, stored, c)
    )
    assert plan.steps < 1000


def test_partial_reads_of_raw_chunks_cost_more_the_less_is_read() -> None:
    machine = replace(default_model("cuda", 16), read=16e9, read_scattered=12e9)
    raw = Layout((2048, 2048))
    whole, half, fifth = (machine.store_rate(raw, (4096, width)) for width in (4096, 1024, 400))
    # Whole chunks are as wide as this panel, so whole rows of a chunk are read, however few.
    assert whole == machine.store_rate(raw, (100, 2048))
    assert whole == pytest.approx(16e9)
    assert half == pytest.approx(12e9)
    assert fifth < 0.6 * half
    assert machine.store_rate(replace(raw, in_memory=True), (4096, 400)) == machine.memory


def npy(rows: int, cols: int, op: Op = Op.N) -> Layout:
    return Layout(line=cols, itemsize=8).oriented(op)


def test_segments_of_files_and_raw_chunks_cost_time() -> None:
    machine = replace(default_model("host", 2), read=16e9, read_scattered=12e9, segment=4e-6)
    file, raw = npy(4000, 40_000), Layout((4000, 40_000))
    assert machine.store_rate(file, (64, 40_000)) == pytest.approx(machine.read)
    assert 1 / machine.store_rate(file, (64, 256)) == pytest.approx(1 / 16e9 + 4e-6 / (256 * 8))
    assert machine.store_rate(npy(4000, 40_000, Op.T), (256, 64)) == machine.store_rate(file, (64, 256))
    # Panels of 3000 columns are not aligned to chunks. A row of a panel is therefore read in 1.05 parts on
    # average.
    assert 1 / machine.store_rate(raw, (64, 3000)) == pytest.approx(1 / 16e9 + 1.05 * 4e-6 / (3000 * 8))


@pytest.mark.parametrize(
    ("trans_a", "trans_b", "cut"),
    [(Op.N, Op.T, "both along k"), (Op.N, Op.N, "B along n"), (Op.T, Op.T, "A along m")],
)
def test_panels_of_files_take_long_parts_of_rows(trans_a: Op, trans_b: Op, cut: str) -> None:
    m, n, k = 4000, 4000, 40_000
    p = replace(problem(m, n, k, "float64"), trans_a=trans_a, trans_b=trans_b)
    a = npy(k, m, trans_a) if trans_a.swaps else npy(m, k)
    b = npy(n, k, trans_b) if trans_b.swaps else npy(k, n)
    budgets, machine = Budgets(64 * MIB, 64 * MIB), default_model("host", 2)
    memory = Layout(in_memory=True)
    there, here = (make_plan(p, budgets, machine, Layouts(*of, memory)) for of in ((a, b), (memory, memory)))

    def reading(plan: Plan) -> float:
        tile, panels = plan.tile, plan.loads
        return sum(
            loaded / machine.store_rate(layout, panel)
            for loaded, layout, panel in (
                (panels.a_read, a, (tile.m, tile.k)),
                (panels.b_read, b, (tile.k, tile.n)),
            )
        )

    assert reading(there) < 0.6 * reading(here), cut


def test_strips_of_a_file_cost_time_per_partial_row() -> None:
    machine, layouts = default_model("host", 2), Layouts(c=npy(4000, 4000))
    setting = Setting(problem(4000, 4000, 4000), machine, layouts, Budgets(GIB, GIB))
    whole, part = (strip_rate(setting, (100, width)) for width in (4000, 64))
    assert whole == pytest.approx(machine.write)
    assert part < 0.2 * whole


def test_few_compressed_chunks_are_not_decoded_by_all_cores() -> None:
    machine = default_model("cuda", 16)
    packed = Layout((1024, 1024), partial_reads=False, decode_bytes=8 << 20)
    one, two, many = (machine.store_rate(packed, (1024, width)) for width in (1024, 2048, 16_384))
    assert (
        one == machine.decode * 4 / 16
    )  # four panels of one chunk each are read at a time, so 4 of 16 cores decode
    assert two == 2 * one
    assert many == machine.decode


def test_no_schedule_is_run_on_the_virtual_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is simulated only if there is another one to compare its time with."""
    calls = []

    def counted(*arguments: Any) -> float:
        calls.append(arguments)
        return simulate(*arguments)

    monkeypatch.setattr(planner, "simulate", counted)
    counts = set()
    for k in (131_072, 262_144, 524_288, 1 << 20, 1 << 21):
        make_plan(problem(32_768, 32_768, k), Budgets(9 * GIB, 24 * GIB), default_model("cuda", 16), STORED)
        counts.add(len(calls))
        calls.clear()
    assert 1 not in counts
    assert max(counts) > 1


def test_threads_that_decode_leave_a_core_to_those_that_launch() -> None:
    packed = Layout(read_chunk=(1024, 1024), decode_bytes=16 << 20)
    on = Layouts(packed, packed, Layout(free_chunks=True))
    plans = (
        make_plan(problem(8192, 8192, 65_536), Budgets(GIB, 8 * GIB), default_model(backend, 16), on)
        for backend in ("cuda", "host")
    )
    assert [plan.candidate.io_threads for plan in plans] == [15, 16]


def test_a_walk_ends_in_the_smaller_tile_where_the_tail_is_long() -> None:
    """If the traversal alternated its direction, it would end in the larger of two tiles."""
    p, machine = problem(32_768, 32_768, 524_288), default_model("cuda", 16)
    plan = make_plan(p, Budgets(8 * GIB, 60 * GIB), machine, STORED)
    sizes = [plan.grid.elements(tile) for tile in plan.schedule().tiles]
    assert sizes[-1] == min(sizes) < max(sizes)
    turning = replace(plan.candidate, traversal=replace(plan.candidate.traversal, turns=True))
    other = replace(plan, candidate=turning)
    assert plan.prediction.total < other.prediction.total - 1
    mine, others = (simulate(x.schedule(), x.setting) for x in (plan, other))
    assert mine < others - 1


@pytest.mark.parametrize("gibibytes", [16, 24, 40, 60, 100, 200])
def test_page_faults_of_fresh_memory_take_time(gibibytes: int) -> None:
    """The formula and the simulation predict about the same time, and more memory makes no plan slower."""
    p, machine = problem(32_768, 32_768, 524_288), default_model("cuda", 16)
    plan, more = (
        make_plan(p, Budgets(8 * GIB, x * GIB), machine, STORED) for x in (gibibytes, 2 * gibibytes)
    )
    simulated = simulate(plan.schedule(), plan.setting)
    assert abs(plan.prediction.total / simulated - 1) < 0.02
    assert more.prediction.total < 1.01 * plan.prediction.total
    assert more.footprint.host_total < 130 * GIB


def test_pruning_tile_shapes_never_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = default_model("cuda", 16)
    cases = [
        (problem(m, n, k), Budgets(device * GIB, 3 * device * GIB))
        for m, n, k in ((32_768, 32_768, 524_288), (50_000, 9_000, 20_000), (16_384, 16_384, 16_384))
        for device in (1, 8)
    ]
    plans = [make_plan(p, budgets, machine, STORED) for p, budgets in cases]
    monkeypatch.setattr(planner, "PRUNE_FACTOR", float("inf"))
    planner._planned.cache_clear()
    for plan, (p, budgets) in zip(plans, cases, strict=True):
        every = make_plan(p, budgets, machine, STORED)
        assert every.candidate == plan.candidate


@pytest.mark.parametrize(
    ("extents", "budgets", "backend"),
    [
        ((10**7, 10**7, 10**7), (64 * MIB, 64 * MIB), "host"),
        *slow(
            ((10**7, 10**7, 3), (64 * MIB, 64 * MIB), "host"),
            ((10**6, 10**6, 10**7), (GIB, 200 * GIB), "cuda"),  # one operand has 28,867 buffers
        ),
    ],
)
def test_planning_is_bounded_however_many_tiles_there_are(
    extents: tuple[int, int, int], budgets: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = SlotCache.acquire, 0

    def counted(self: SlotCache, key: tuple[int, int], next_use: int) -> tuple[int, bool]:
        nonlocal calls
        calls += 1
        return right(self, key, next_use)

    monkeypatch.setattr(SlotCache, "acquire", counted)
    monkeypatch.setattr(plan_module, "MAX_COUNTED", 20_000)
    p = problem(*extents, "float32")
    tracemalloc.start()
    plan = make_plan(p, Budgets(*budgets), default_model(backend, 2))
    plan.to_dict()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.steps > 10**7
    assert calls < 100_000
    assert peak < 50 * MIB


@pytest.mark.parametrize("device", [64 * MIB, 200 * MIB])
def test_loads_too_many_to_count_are_nearly_as_counted(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(problem(100_000, 100_000, 100_000), Budgets(device, 200 * MIB), default_model("host", 2))
    half = frozenset(tile for tile in plan.schedule().tiles if tile[0] < plan.grid.shape[0] // 2)
    for p in (plan, replace(plan, done=half)):
        counted = p.schedule().loads()
        monkeypatch.setattr(plan_module, "MAX_COUNTED", 0)
        assert p.loads.a_read == pytest.approx(counted.a_read, rel=0.01)
        assert p.loads.b_read == pytest.approx(counted.b_read, rel=0.01)


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
    chunk = Layout(read_chunk=(500, 500), partial_reads=not zipped, decode_bytes=4 * MIB * zipped)
    p, machine, on = problem(3000, 3000, 3000), default_model(backend, 4), Layouts(chunk, chunk)
    begun = make_plan(p, Budgets(200 * MIB, 200 * MIB), machine, on)
    with pytest.raises(BudgetError, match="cannot hold the plan that the run was begun with") as raised:
        resumed_plan(p, Budgets(device, host), machine, on, begun.candidate, frozenset())
    budgets = advised(raised.value, Budgets(device, host))
    footprint = resumed_plan(p, budgets, machine, on, begun.candidate, frozenset()).footprint
    assert footprint.device_total <= budgets.device
    assert footprint.host_total <= budgets.host


@pytest.mark.parametrize(
    "on",
    [
        Layouts(*(Layout(in_memory=True),) * 3),
        Layouts(Layout(read_chunk=(1, 1000)), Layout(read_chunk=(1000, 1), contiguous=0)),
    ],
)
@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("m", [1, 16])
def test_panels_of_few_rows_are_deep(m: int, backend: str, on: Layouts) -> None:
    """Issuing operations is not the bottleneck, and panels are no deeper than that requires."""
    machine = default_model(backend, 2)
    plan = make_plan(problem(m, 1, 1 << 26, "float32"), Budgets(4 * GIB, 4 * GIB), machine, on)
    lanes = plan.prediction.lanes
    assert lanes["issue"] <= max(lanes[lane] for lane in lanes if lane != "issue")
    assert plan.grid.steps >= 4
    assert plan.footprint.device_total - machine.device_reserve < GIB / 2


def test_chunks_are_read_whole_by_deep_panels() -> None:
    chunk = Layout(read_chunk=(4, 3000), partial_reads=False, decode_bytes=4 * 3000 * 4)
    on = Layouts(chunk, replace(chunk, read_chunk=(3000, 4)))
    plan = make_plan(problem(4, 4, 10**8, "float32"), Budgets(GIB, GIB), default_model("host", 2), on)
    assert plan.tile.k > max(depths.DEPTHS)
    assert plan.tile.k % 3000 == 0


@pytest.mark.parametrize("extent", [100, 1000, 10_000, 100_000])
@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_only_few_rows_and_columns_need_deep_panels(extent: int, backend: str) -> None:
    p, machine = problem(extent, extent, 10**6), default_model(backend, 16)
    found = depths._deep_depths(Setting(p, machine, Layouts(), Budgets(GIB, GIB)))
    assert (found != []) == (backend == "cuda" and extent == 100)


def slow_case() -> tuple[GemmProblem, Layouts, Budgets]:
    """Return a slow case: compressed operands in tiles of 16 x 16 x 16 that decode whole chunks."""
    chunk = Layout(read_chunk=(100, 100), partial_reads=False, decode_bytes=80_000)
    on = Layouts(chunk, chunk, Layout(free_chunks=True))
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
