"""Calibrations are measured, shown and used by plans, runs and reports."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oocgemm
from oocgemm import backends
from oocgemm.backends.host.backend import HostBackend
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.errors import BackendError
from oocgemm.machine import calibrate as module
from oocgemm.machine.calibrate import Sizes, calibrate
from oocgemm.planning import RATES, Calibration, KernelRate, MachineModel, default_model
from oocgemm.planning.cost.machine import MAX_LINK
from oocgemm.planning.units import format_rate
from oocgemm.reports.charts import BOTTOM, LEFT, LINE, roofline
from oocgemm.system import cache
from tests.support.backends_here import needs_gpu
from tests.support.calibrations import MEASURED, STORES, folder_of_matrices, known
from tests.support.command import command, contents, own_threads


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_of_matrices(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("reads", "writes", "read", "write", "measured"),
    [
        ((), (), 8e9, 5e8, True),
        (("8:1",), ("8:2",), 4e9, 5e8, True),
        (("8:1", "8:2"), ("8:1",), 4e9, 1e9, True),
        (("8:9",), ("8:1",), 8e9, 1e9, False),  # an unknown file system counts as the one measured last
    ],
)
def test_storage_rates_are_those_of_the_file_systems_used(
    reads: tuple[str, ...], writes: tuple[str, ...], read: float, write: float, measured: bool
) -> None:
    model = MEASURED.model(default_model("cuda", 16), reads, writes)
    assert (model.read, model.write, model.storage_calibrated) == (read, write, measured)
    assert ("--path" in model.name) is not measured
    assert model.calibrated


def test_what_is_not_measured_is_as_by_default() -> None:
    defaults = default_model("cuda", 16)
    model = MEASURED.model(defaults)
    assert model.kernels["float64"] == MEASURED.kernels["float64"]
    assert model.kernels["complex64"] == defaults.kernels["complex64"]
    assert (model.h2d, model.device_reserve) == (MEASURED.rates["h2d"], defaults.device_reserve)
    assert model.multiprocessors == MEASURED.multiprocessors != defaults.multiprocessors


def test_a_calibration_is_used_by_plans_runs_and_info(here: Path) -> None:
    before = contents(here)
    rough = command("plan", "raw", "raw", "--backend", "host").out
    assert "host defaults" in rough
    assert "run `oocgemm calibrate`" in rough
    assert oocgemm.gemm("raw", "raw", backend="host").report.efficiency is None

    shown = command("calibrate", "--backend", "host")
    assert (shown.code, shown.err) == (0, "")
    (kept,) = (here.parent / "cache").iterdir()
    for part in (*RATES, "read, disk", "decode, zstd", "write", str(here), str(kept)):
        assert part in shown.out.replace("\n", "")
    assert contents(here) == before  # temporary files are deleted
    assert not own_threads()

    found = Calibration.from_dict(json.loads(kept.read_text()))
    assert set(found.kernels) == set(RATES)
    assert found.backend == "host"
    plan = oocgemm.plan("raw", "raw", backend="host")
    assert plan.machine.kernels == found.kernels
    assert plan.machine.prepare == found.rates["prepare"]
    assert plan.machine.read == found.stores[cache.file_system(here)].read
    assert f"calibrated on {found.date}" in command("plan", "raw", "raw", "--backend", "host").out
    assert f"calibrated on {found.date}" in command("info").out
    ran = command("run", "raw", "raw", "C", "--backend", "host", "--timeline", "log")
    assert f"calibrated on {found.date}" in ran.out
    assert "efficiency - " not in ran.out
    assert command("report", "log", "--json").json()["efficiency"] > 0


@pytest.mark.parametrize(
    ("operand", "out", "expected"),
    [
        ("raw", "C", {"kernel", "read", "write"}),
        ("zstd", "C", {"kernel", "decode", "write"}),
        ("zstd", None, {"kernel", "decode"}),
        (np.eye(40), None, {"kernel"}),
    ],
)
@pytest.mark.usefixtures("here")
def test_only_what_a_run_uses_counts_for_its_efficiency(
    operand: Any, out: str | None, expected: set[str]
) -> None:
    cache.save(known(backend="host", device=_host(), stores={cache.file_system("raw"): STORES["8:1"]}))
    result = oocgemm.gemm(operand, operand, c=out, backend="host")
    assert set(result.timeline.header["rates"]) == expected
    assert result.report.efficiency is not None


@pytest.mark.usefixtures("here")
def test_storage_that_was_never_measured_leaves_no_efficiency() -> None:
    cache.save(known(backend="host", device=_host()))
    on_disk, in_memory = (oocgemm.gemm(x, x, backend="host") for x in ("raw", np.eye(40)))
    assert on_disk.report.efficiency is None
    assert "--path" in on_disk.plan.machine.name
    assert in_memory.report.efficiency is not None


def test_links_are_measured_where_there_are_any(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host backend gets separate host and device memory, as a GPU has, so there are links to measure."""

    def staged(backend: str, cores: int, compiled: bool) -> MachineModel:
        return replace(default_model(backend, cores, compiled), unified=False)

    monkeypatch.setattr(module, "default_model", staged)
    found = calibrate("host", path=here)
    assert {"h2d", "d2h", "copy_latency", "issue"} <= set(found.rates)
    assert 1e-6 < found.rates["issue"] < 1
    assert set(found.samples["copies"]) == {"h2d", "d2h", "both ways"}
    assert Calibration.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.fixture
def one_byte_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the host backend a link to a device that can carry at most one byte per second."""
    monkeypatch.setattr(module, "default_model", lambda *given: replace(default_model(*given), unified=False))
    monkeypatch.setattr(HostBackend, "link_limit", lambda self: 1.0)


@pytest.mark.usefixtures("one_byte_link")
def test_a_calibration_with_impossible_rates_keeps_the_last_one(here: Path) -> None:
    path = cache.save(known(backend="host", device=_host()))
    kept = contents(here.parent / "cache")
    done = command("calibrate", "--backend", "host")
    assert done.code not in (0, EXIT_USAGE)
    said = " ".join(done.err.split())
    assert re.search(
        r"h2d of 512 B came to .*/s, which is impossible: the link of this device carries at most 1 B/s", said
    )
    assert "this calibration was not saved: end other programs" in said
    assert contents(here.parent / "cache") == kept
    assert path.is_file()


def test_a_kernel_whose_fit_is_far_off_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelRate, "fitted", lambda rates: KernelRate(1.0, 0.0))
    with pytest.raises(
        BackendError, match=r"what was measured of float16 \(panels 8 deep: .*the best fit expects 1 FLOP/s"
    ):
        calibrate("host", path=here)


@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu)])
def test_a_gpu_is_measured_by_the_same_code(here: Path, backend: str) -> None:
    # Copies of a panel must take longer than it takes to issue them. Otherwise the device's queue is always
    # empty and the copies cannot be timed.
    small = Sizes(side=4096, depths=(256, 1024, 4096), block=(4096, 2048), copies=(1, 32, 4096), seconds=0.01)
    found = calibrate(backend, path=here, sizes=small)
    assert set(found.kernels) == set(RATES)
    assert set(found.samples["copies"]) == {"h2d", "d2h", "both ways"}
    cache.save(found)
    model = oocgemm.plan("raw", "raw", backend="cuda", device_memory="1GiB").machine
    assert found.date in model.name
    assert model.multiprocessors == found.multiprocessors > 1
    result = oocgemm.gemm("raw", "raw", c="C", backend="cuda")
    assert set(result.timeline.header["rates"]) == {"kernel", "read", "h2d", "d2h", "write"}
    assert result.report.efficiency is not None


def test_what_is_measured_is_said_with_the_backend(here: Path) -> None:
    said: list[str] = []
    calibrate("host", path=here, say=said.append)
    assert [what for what in said if not what.startswith("host: ")] == []
    assert {"host: memory", f"host: writing in {here}", "host: decoding zstd"} <= set(said)


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_gpu)])
def test_a_gpu_calibrates_to_the_same_rates_each_time(here: Path, backend: str) -> None:
    """No copy is faster than the link's limit or far slower, and the fits of three calibrations agree."""
    found = [calibrate(backend, path=here) for _ in range(3)]
    for calibration in found:
        limit = calibration.samples["link_limit"] or MAX_LINK
        for link in ("h2d", "d2h"):
            copies = calibration.samples["copies"][link]
            assert all(rate <= limit for rate in (*copies.values(), calibration.rates[link]))
            least, most = min(copies.values()), max(copies.values())
            assert most < 10 * least, "a copy of 1 MiB takes ten times its share"
            # It is the rate while copies in the other direction take place.
            assert 0.5 * most <= calibration.rates[link] <= 1.15 * most
        assert 0 <= calibration.rates["copy_latency"] < 1e-3
        assert most < calibration.samples["copies"]["both ways"] <= 2 * limit
    # In a virtual machine, these rates vary, because others share the memory of the host.
    for name in ("h2d", "d2h", "memory"):
        assert _spread(calibration.rates[name] for calibration in found) < 2, name
    for kernel in found[0].kernels:
        for depth in found[0].samples["kernels"][kernel]:
            same = [calibration.samples["kernels"][kernel].get(depth) for calibration in found]
            assert _spread(rate for rate in same if rate) < 1.3, f"{kernel}, panels {depth} deep"


def _spread(rates: Iterable[float]) -> float:
    found = list(rates)
    return max(found) / min(found)


def test_json_is_the_calibration_and_where_it_is_kept(here: Path) -> None:
    found = command("calibrate", "--backend", "host", "--path", here, "--json").json()
    assert Path(found.pop("kept")).is_file()
    assert Calibration.from_dict(found).samples["path"] == str(here)
    assert {"float64", "emulated_float64"} <= set(found["kernels"])
    assert set(Calibration.from_dict(found).kernels) <= set(RATES)


def test_info_tells_a_gpu_with_what_was_measured_of_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend is replaced by one that only describes a GPU."""
    said = {"device": "NVIDIA H200", "memory": "140 GiB", "cupy": "14.2", "cuda": "13000", "driver": "13020"}
    gpu = SimpleNamespace(name="cuda", describe=lambda: said, free_memory=lambda: 120 << 30)
    opened = backends.open_backend
    monkeypatch.setattr(backends, "missing_for_cuda", lambda: None)
    monkeypatch.setattr(
        backends, "open_backend", lambda name, device=0: gpu if name == "cuda" else opened(name)
    )
    cache.save(known())
    found = command("info", "--json").json()["cuda_backend"]
    assert found["free"] == 120 << 30
    assert found["links"]["h2d"] == MEASURED.rates["h2d"]
    rates = {name.replace(" ", "_") for name in MEASURED.kernels} | set(MEASURED.rates)
    measured = rates & {*found["kernels"], *found["links"]}
    assert {*found["kernels"], *found["links"]} - set(found["assumed"]) == measured
    text = " ".join(command("info").out.split())
    assert "NVIDIA H200, 140 GiB of memory, 120 GiB free; cupy 14.2, CUDA 13.0, driver for CUDA 13.2" in text
    assert "calibrated on 2026-11-21" in text
    assert "oocgemm calibrate --backend cuda" in text
    cache.save(known(stores={cache.file_system("."): STORES["8:1"]}))
    assert command("info", "--json").json()["cuda_backend"]["links"]["read_cold"] == STORES["8:1"].read_cold


def test_the_roofline_shows_what_was_measured(here: Path, tmp_path: Path) -> None:
    picture = tmp_path / "roofline.svg"
    found = command("calibrate", "--backend", "host", "--svg", picture, "--json").json()
    shown = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    for dtype, rate in found["kernels"].items():
        assert f"{dtype.replace('_', ' ')} {format_rate(rate['peak'], 'FLOP')}" in shown
    (storage,) = found["stores"].values()
    for link, rate in (("disk", "read_cold"), ("page cache", "read")):
        assert f"read, {link} {format_rate(storage[rate])}" in shown
    # The device is the host, so there is no link to a device.
    assert not any(str(text).startswith("h2d") for text in shown)


def test_an_unwritable_svg_is_refused_before_measuring(here: Path) -> None:
    done = command("calibrate", "--backend", "host", "--svg", here / "nowhere" / "roofline.svg")
    assert (done.code, done.out) == (EXIT_USAGE, "")
    assert "--svg" in done.err
    assert cache.load("host", None)[0] is None


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(1e6, 1e12), min_size=1),
    st.dictionaries(st.sampled_from("uvwxyz"), st.floats(1e6, 1e15), min_size=1),
    st.integers(1 << 20, 1 << 45),
)
def test_a_roofline_bends_where_link_and_kernel_are_as_fast(
    links: dict[str, float], roofs: dict[str, float], budget: int
) -> None:
    """Read rates back from the picture, by means of the numbers at its axes."""
    drawn = ElementTree.fromstring(roofline("", links, roofs, budget))
    across: dict[float, float] = {}
    up: dict[float, float] = {}
    for text in drawn.iter("{http://www.w3.org/2000/svg}text"):
        said, x, y = str(text.text), float(text.get("x", "")), float(text.get("y", ""))
        if y == BOTTOM + 18:
            across[x] = log10(float(said.replace("\u202f", "")))
        if x == 91:
            number, unit = said.split()
            up[y - 4] = log10(float(number)) + 3 * " kMGTP".index(unit.removesuffix("FLOP/s") or " ")
    assume(len(across) > 1 and len(up) > 1)

    def read(ticks: dict[float, float], place: float) -> float:
        (first, one), *_, (last, other) = ticks.items()
        return float(10 ** (one + (other - one) * (place - first) / (last - first)))

    paths = [e.get("d", "")[1:].split("L") for e in drawn.iter() if e.get("class") == "link"]
    ends = [tuple(map(float, path[1].split())) for path in paths]
    assert len(ends) == len(links)
    for (x, y), rate in zip(ends, sorted(links.values(), reverse=True), strict=True):
        assert read(up, y) == pytest.approx(max(roofs.values()), rel=0.02)
        assert read(across, x) == pytest.approx(max(roofs.values()) / rate, rel=0.02)
    labels = [
        float(e.get("y", ""))
        for e in drawn.iter()
        if e.get("class") == "over" and e.get("x") == f"{LEFT - 25:.1f}"
    ]
    assert all(b - a > LINE - 0.2 for a, b in pairwise(labels))


@pytest.mark.usefixtures("here")
def test_a_folder_that_is_not_there_is_refused() -> None:
    done = command("calibrate", "--backend", "host", "--path", "nowhere")
    assert (done.code, done.err.count("\n")) == (EXIT_USAGE, 1)
    assert "--path" in done.err


@pytest.mark.usefixtures("here")
def test_a_calibrated_plan_for_a_gpu_leaves_cupy_out() -> None:
    cache.save(known())
    code = (
        "import sys; from oocgemm.cli.main import cli; "
        "cli(standalone_mode=False); print('cupy' in sys.modules)"
    )
    plan = ("plan", "raw", "raw", "--backend", "cuda", "--device-memory", "1GiB")
    done = subprocess.run([sys.executable, "-c", code, *plan], check=True, capture_output=True, text=True)
    assert "NVIDIA H200, calibrated on 2026-11-21" in done.stdout
    assert done.stdout.endswith("False\n")


def _host() -> str:
    return backends.identity(backends.open_backend("host"))
