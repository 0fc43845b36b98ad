"""Calibrations are measured, fitted, saved, loaded and used. Unreadable ones are ignored."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from math import log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st

import oocgemm
from oocgemm import backends
from oocgemm.backends.host.backend import HostBackend
from oocgemm.cli.output import EXIT_USAGE
from oocgemm.errors import BackendError, InputError
from oocgemm.machine.measure import calibrate as module
from oocgemm.machine.measure.calibrate import SIZES, Sizes, calibrate
from oocgemm.planning import (
    RATES,
    Calibration,
    KernelRate,
    MachineModel,
    StoreRates,
    default_model,
    fit_line,
    fit_link,
)
from oocgemm.planning.cost import fits
from oocgemm.planning.cost.calibration import VERSION
from oocgemm.planning.cost.fits import MAX_LINK
from oocgemm.planning.units import format_rate
from oocgemm.reports.roofline import BOTTOM, LEFT, LINE, roofline
from oocgemm.system import cache
from tests.backends_here import needs_gpu
from tests.command import command, contents, own_threads

TINY = Sizes(side=64, depths=(8, 16, 32), block=(64, 64), copies=(1, 8, 64), seconds=0.002)
LAX = 1e5  # allowed residual of fits: tiny workloads measure the scheduler rather than the hardware
STORES = {"8:1": StoreRates(4e9, 3e9, 2e9, 1e9), "8:2": StoreRates(8e9, 2e9, 1e9, 5e8)}
MEASURED = Calibration(
    machine="another",
    backend="cuda",
    device="NVIDIA H200",
    date="2026-11-21",
    multiprocessors=114,
    kernels={"float64": KernelRate(5.3e13, 80.5), "float32": KernelRate(5.1e13, 0.0)},
    rates={
        "h2d": 5.5e10,
        "d2h": 5.4e10,
        "memory": 3e10,
        "decode": 9e9,
        "arena_seconds_per_byte": 0.0,
        "issue": 1e-4,
    },
    stores=STORES,
    samples={"kernels": {"float64": {"256": 4.6e13}}, "copies": {}, "path": "/data", "seconds": 30.5},
)

positive = st.floats(1e-12, 1e15)
possible = st.floats(1e-12, MAX_LINK)
rates = st.builds(StoreRates, positive, positive, positive, positive)
calibrations = st.builds(
    Calibration,
    *(st.text(), st.text(), st.text(), st.text(), st.integers(1, 1000)),
    st.dictionaries(st.sampled_from(list(RATES)), st.builds(KernelRate, positive, st.floats(0, 1e6))),
    st.fixed_dictionaries(
        {}, optional={"h2d": possible, "d2h": possible, "memory": positive, "decode": positive}
    ),
    st.dictionaries(st.text(), rates),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create two small matrices in a new working directory. The cache folder is another one, and empty."""
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SIZES, "host", TINY)
    monkeypatch.setattr(fits, "MAX_RESIDUAL", LAX)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    zarr.create_array("raw", data=np.eye(40), chunks=(10, 10), compressors=None)
    zarr.create_array("zstd", data=np.eye(40), chunks=(10, 10))
    return work


def known(**changes: Any) -> Calibration:
    """Return `MEASURED` as a calibration of this machine."""
    return replace(MEASURED, machine=cache.machine_key(), **changes)


@given(st.floats(1e9, 1e15), st.floats(0, 2000), st.sets(st.integers(16, 8192), min_size=2))
def test_a_fit_recovers_the_rate_it_was_made_from(peak: float, half_depth: float, depths: set[int]) -> None:
    deepest = max(depths)
    fitted = KernelRate.fitted({r: peak / (1 + half_depth / r) for r in depths})
    # A fitted peak above four times the fastest measured rate is not believed.
    believed = half_depth < 3 * deepest
    if believed:
        apart = 1 / min(depths) - 1 / deepest
        assert fitted.peak == pytest.approx(peak, rel=1e-3 if apart > 1e-4 else 0.5)
    for r in depths:
        assert fitted.peak / (1 + fitted.half_depth / r) == pytest.approx(
            peak / (1 + half_depth / r), rel=0.1 if believed else 0.2
        )


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 1e3)), min_size=1))
def test_a_line_never_falls_nor_begins_below_its_least(points: list[tuple[float, float]]) -> None:
    intercept, slope = fit_line(points)
    assert intercept >= 0
    assert slope >= 0


@given(
    st.floats(0, 1e-3),
    st.floats(1e6, 0.99 * MAX_LINK),
    st.sets(st.integers(2**10, 2**30), min_size=2, max_size=6),
)
def test_a_link_is_fitted_by_latency_and_rate(latency: float, rate: float, sizes: set[int]) -> None:
    measured = {size: size / (latency + size / rate) for size in sizes}
    found_latency, found_rate = fit_link("h2d", measured)
    for size in sizes:
        assert size / (found_latency + size / found_rate) == pytest.approx(measured[size], rel=0.01)


LINK = {1 << 20: 40e9, 1 << 22: 50e9, 1 << 25: 54e9, 1 << 28: 55e9}


@pytest.mark.parametrize(
    ("changed", "limit", "part"),
    [
        (
            {1 << 20: 1.05e15},
            None,
            "d2h of 1 MiB came to 1.05 PB/s, which is impossible: any link carries at most 500 GB/s",
        ),
        (
            {1 << 20: 70e9},
            64e9,
            "70 GB/s, which is impossible: the link of this device carries at most 64 GB/s",
        ),
        ({1 << 20: float("nan")}, None, "d2h of 1 MiB came to nan"),
        ({1 << 22: 150e9}, None, "no fit explains what was measured of d2h (1 MiB: 40 GB/s, 4 MiB: 150 GB/s"),
        ({1 << 28: 5e9}, None, "no fit explains what was measured of d2h"),
        ({}, 54.9e9, "the link of this device carries at most 54.9 GB/s"),
    ],
)
def test_rates_that_a_link_cannot_have_are_refused(
    changed: dict[int, float], limit: float | None, part: str
) -> None:
    assert fit_link("d2h", LINK)[1] == pytest.approx(55e9, rel=0.02)
    with pytest.raises(ValueError, match=re.escape(part)):
        fit_link("d2h", LINK | changed, limit)


@given(calibrations)
def test_a_calibration_reads_back_as_it_was_written(calibration: Calibration) -> None:
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {name: value for name, value in data.items() if name != key}


def _with_copies(d2h: dict[str, Any], limit: float | None = None) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data | {"samples": {"copies": {"d2h": d2h}, "link_limit": limit}}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: [], id="no object"),
        pytest.param(lambda data: data | {"format": "x"}, id="another format"),
        pytest.param(lambda data: data | {"version": VERSION + 1}, id="a later version"),
        pytest.param(lambda data: data | {"kernels": []}, id="kernels of another type"),
        pytest.param(lambda data: data | {"kernels": {"float64": {"peak": 1}}}, id="half a rate"),
        pytest.param(lambda data: data | {"kernels": {"int16": {"peak": 1, "half_depth": 0}}}, id="no dtype"),
        pytest.param(lambda data: data | {"rates": {"h2d": 0}}, id="a rate of zero"),
        pytest.param(lambda data: data | {"rates": {"h2d": "fast"}}, id="a rate in words"),
        pytest.param(lambda data: data | {"rates": {"h2d": float("nan")}}, id="no number"),
        pytest.param(lambda data: data | {"rates": {"io_threads": 3}}, id="no rate"),
        pytest.param(lambda data: data | {"machine": "another"}, id="another machine"),
        pytest.param(lambda data: data | {"rates": {"d2h": 1e15}}, id="a link faster than any"),
        pytest.param(_with_copies({}, limit=5e10), id="a link faster than itself"),
        pytest.param(_with_copies({"1048576": 1e15, "67108864": 5e10}), id="a sample faster than any link"),
        pytest.param(_with_copies({"1048576": "fast"}), id="a sample in words"),
        *(
            pytest.param(_without(key), id=f"no {key}")
            for key in ("machine", "multiprocessors", "kernels", "stores", "samples")
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_calibration_of_another_machine_is_ignored(spoil: Callable[[Any], Any]) -> None:
    path = cache.save(known())
    assert cache.load("cuda", None)[0] == known()
    path.write_text(json.dumps(spoil(known().to_dict())))
    found, note = cache.load("cuda", None)
    assert found is None
    assert str(path) in note
    shown = command("plan", "raw", "raw", "--backend", "cuda", "--device-memory", "1GiB")
    assert (shown.code, shown.err) == (0, "")
    assert f"{path} is ignored" in shown.out
    assert "run `oocgemm calibrate`" in shown.out


def test_samples_that_no_fit_explains_are_no_calibration() -> None:
    long = {"67108864": 5e10, "268435456": 5e10}
    fine, spoilt = (_with_copies({"1048576": rate} | long)(known().to_dict()) for rate in (6e10, 2e11))
    assert Calibration.from_dict(fine).samples == fine["samples"]
    with pytest.raises(ValueError, match=r"no fit explains what was measured of d2h \(1 MiB: 200 GB/s"):
        Calibration.from_dict(spoilt)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.usefixtures("here")
def test_a_damaged_file_is_ignored_and_replaced(content: bytes) -> None:
    path = cache.save(known())
    path.write_bytes(content)
    assert cache.load("cuda", None)[0] is None
    assert cache.save(known()) == path
    assert cache.load("cuda", None) == (known(), "")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("here")
def test_each_device_has_its_own() -> None:
    assert cache.load("cuda", None) == (None, "")
    cache.save(known())
    later = known(device="NVIDIA L4")
    newest = cache.save(later)
    os.utime(newest, ns=(2**62, 2**62))
    assert cache.load("cuda", "NVIDIA H200")[0] == known()
    assert cache.load("cuda", None)[0] == later
    assert cache.load("cuda", "NVIDIA A100")[0] is None
    assert cache.load("host", None)[0] is None


@pytest.mark.usefixtures("here")
def test_file_systems_measured_before_are_kept() -> None:
    cache.save(known())
    again = StoreRates(1e9, 1e9, 1e9, 1e9)
    cache.save(known(stores={"8:1": again}))
    found, _ = cache.load("cuda", None)
    assert found is not None
    assert list(found.stores.items()) == [("8:2", STORES["8:2"]), ("8:1", again)]


def test_a_cache_that_cannot_be_written_says_what_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "file"))
    assert cache.load("cuda", None) == (None, "")
    with pytest.raises(InputError, match="OOCGEMM_CACHE"):
        cache.save(known())


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

    def staged(backend: str, cores: int) -> MachineModel:
        return replace(default_model(backend, cores), unified=False)

    monkeypatch.setattr(module, "default_model", staged)
    found = calibrate("host", path=here)
    assert {"h2d", "d2h", "copy_latency", "issue"} <= set(found.rates)
    assert 1e-6 < found.rates["issue"] < 1
    assert set(found.samples["copies"]) == {"h2d", "d2h", "both ways"}
    assert Calibration.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.fixture
def one_byte_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the host backend a link to a device that can carry at most one byte per second."""
    monkeypatch.setattr(
        module, "default_model", lambda name, cores: replace(default_model(name, cores), unified=False)
    )
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
            assert calibration.rates[link] == pytest.approx(most, rel=0.15)
        assert 0 <= calibration.rates["copy_latency"] < 1e-3
        assert most < calibration.samples["copies"]["both ways"] <= 2 * limit
    # The rate of host memory varies more, because other virtual machines share it.
    for name, limit in (("h2d", 1.3), ("d2h", 1.3), ("memory", 2.0)):
        assert _spread(calibration.rates[name] for calibration in found) < limit, name
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
