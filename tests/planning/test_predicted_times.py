"""Predicted times agree with simulated schedules and with measured times."""

from dataclasses import replace

import pytest

from oocgemm.planning import (
    Budgets,
    Chunked,
    InMemory,
    Layout,
    Layouts,
    Lines,
    Op,
    Setting,
    TileShape,
    Writing,
    default_model,
    make_plan,
)
from oocgemm.planning.cost.clock import predict
from oocgemm.planning.cost.machine import DIGEST_SECONDS_PER_BYTE
from oocgemm.planning.cost.price import Prices
from tests.support.plan_cases import GIB, MIB, STORED, problem
from tests.support.products import changed
from tests.support.simulate import simulate
from tests.support.suite import slow, thinned


def test_taking_digests_counts_as_time_of_reading() -> None:
    p, budgets = problem(24_576, 24_576, 393_216), Budgets(8 * GIB, 24 * GIB)
    machine, shape = default_model("cuda", 16), TileShape(16_384, 12_288, 2048)
    plain, checked = (
        make_plan(changed(p, checked=tier), budgets, machine, STORED, shape) for tier in ("", "device")
    )
    checked = replace(plain, problem=checked.problem, considered=())
    assert plain.traffic["read"] == checked.traffic["read"]
    more = checked.prediction.lanes["read"] - plain.prediction.lanes["read"]
    assert more == pytest.approx(DIGEST_SECONDS_PER_BYTE * plain.traffic["read"], rel=0.02)


@pytest.mark.parametrize("write", [0.3e9, 1.6e9])
@pytest.mark.parametrize(
    "tile",
    ["16384x16384x4096", *slow(("16384x22528x4096",)), "20480x24576x2048", *slow(("28672x16384x4096",))],
)
def test_tiles_of_unlike_size_take_as_long_as_their_schedule(tile: str, write: float) -> None:
    """The clock and the simulation predict about the same time."""
    p, machine = problem(32_768, 32_768, 262_144), replace(default_model("cuda", 16), write=write)
    shape = TileShape(*map(int, tile.split("x")))
    plan = make_plan(p, Budgets(8 * GIB, 24 * GIB), machine, STORED, shape)
    seconds = simulate(plan.schedule(), plan.setting)
    assert plan.prediction.total == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("size", "k", "budgets"),
    [
        *slow((8192, 16_384, Budgets(320 * MIB, 384 * MIB))),
        (24_576, 24_576, Budgets(3 * GIB, 8 * GIB)),
        *slow((12_288, 32_768, Budgets(GIB, 8 * GIB))),
    ],
)
def test_every_operation_takes_time_under_the_gil(size: int, k: int, budgets: Budgets) -> None:
    p, machine = problem(size, size, k), default_model("cuda", 16)
    plan = make_plan(p, budgets, machine, STORED)
    schedule = plan.schedule()
    count = sum(1 for _ in schedule)
    lanes = predict(plan.setting, plan.candidate).lanes
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


def test_partial_reads_of_raw_chunks_cost_more_the_less_is_read() -> None:
    machine = replace(default_model("cuda", 16), read=16e9, read_scattered=12e9)
    raw = Chunked((2048, 2048))
    whole, half, fifth = (raw.read_rate(machine, (4096, width)) for width in (4096, 1024, 400))
    # Whole chunks are as wide as this panel, so whole rows of a chunk are read, however few.
    assert whole == raw.read_rate(machine, (100, 2048))
    assert whole == pytest.approx(16e9)
    assert half == pytest.approx(12e9)
    assert fifth < 0.6 * half
    assert InMemory().read_rate(machine, (4096, 400)) == machine.memory


def npy(rows: int, cols: int, op: Op = Op.N) -> Layout:
    return Lines(cols).oriented(op)


def test_segments_of_files_and_raw_chunks_cost_time() -> None:
    machine = replace(default_model("host", 2), read=16e9, read_scattered=12e9, segment=4e-6)
    file, raw = npy(4000, 40_000), Chunked((4000, 40_000))
    assert file.read_rate(machine, (64, 40_000)) == pytest.approx(machine.read)
    assert 1 / file.read_rate(machine, (64, 256)) == pytest.approx(1 / 16e9 + 4e-6 / (256 * 8))
    assert npy(4000, 40_000, Op.T).read_rate(machine, (256, 64)) == file.read_rate(machine, (64, 256))
    # Panels of 3000 columns are not aligned to chunks. A row of a panel is therefore read in 1.05 parts on
    # average.
    assert 1 / raw.read_rate(machine, (64, 3000)) == pytest.approx(1 / 16e9 + 1.05 * 4e-6 / (3000 * 8))


def test_strips_of_a_file_cost_time_per_partial_row() -> None:
    machine, layouts = default_model("host", 2), Layouts(c=npy(4000, 4000))
    setting = Setting(problem(4000, 4000, 4000), machine, layouts, Budgets(GIB, GIB))
    whole, part = (Prices(setting).rate("write", "C", 100, width) for width in (4000, 64))
    assert whole == pytest.approx(machine.write)
    assert part < 0.2 * whole


def test_few_compressed_chunks_are_not_decoded_by_all_cores() -> None:
    machine = default_model("cuda", 16)
    packed = Chunked((1024, 1024), partial_reads=False, decode_bytes=8 << 20)
    one, two, many = (packed.read_rate(machine, (1024, width)) for width in (1024, 2048, 16_384))
    assert (
        one == machine.decode * 4 / 16
    )  # four panels of one chunk each are read at a time, so 4 of 16 cores decode
    assert two == 2 * one
    assert many == machine.decode


def test_threads_that_decode_leave_a_core_to_those_that_launch() -> None:
    packed = Chunked((1024, 1024), decode_bytes=16 << 20)
    on = Layouts(packed, packed, Chunked(writing=Writing(free=True)))
    plans = (
        make_plan(problem(8192, 8192, 65_536), Budgets(GIB, 8 * GIB), default_model(backend, 16), on)
        for backend in ("cuda", "host")
    )
    assert [plan.candidate.io_threads for plan in plans] == [15, 16]


@pytest.mark.parametrize("gibibytes", thinned((16, 24, 40, 60, 100, 200), (16, 60, 200)))
def test_page_faults_of_fresh_memory_take_time(gibibytes: int) -> None:
    """The clock and the simulation predict about the same time, and more memory makes no plan slower."""
    p, machine = problem(32_768, 32_768, 524_288), default_model("cuda", 16)
    plan, more = (
        make_plan(p, Budgets(8 * GIB, x * GIB), machine, STORED) for x in (gibibytes, 2 * gibibytes)
    )
    simulated = simulate(plan.schedule(), plan.setting)
    assert abs(plan.prediction.total / simulated - 1) < 0.02
    assert more.prediction.total < 1.01 * plan.prediction.total
    assert more.footprint.host_total < 130 * GIB
