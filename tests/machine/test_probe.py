"""The probe of a machine: it is taken once, kept, and scales the rates that plans are made with."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.machine import info as rates
from oocgemm.planning import default_model
from oocgemm.system import cache

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache folder, and allow probes of this process."""
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    monkeypatch.setenv("OOCGEMM_PROBE", "1")
    monkeypatch.setattr(rates, "_tried", set())
    monkeypatch.setattr(rates, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(rates, "MAX_OTHERS", 1e9)
    return tmp_path / "probes"


def counted(monkeypatch: pytest.MonkeyPatch, found: dict[str, float]) -> list[dict[str, float]]:
    """Let probes find some factors, and return a list that grows with each probe."""
    taken: list[dict[str, float]] = []

    def measure(*_: Any) -> dict[str, float]:
        taken.append(found)
        return found

    monkeypatch.setattr(rates, "measure_probe", measure)
    return taken


def multiply() -> oocgemm.Result:
    return oocgemm.gemm(np.ones((64, 64)), np.ones((64, 64)), backend="host")


def store(folder: Path, found: Any, name: str | None = None) -> None:
    device = backends.identity(backends.open_backend("host", 0))
    path = folder / (name or cache.file_name(cache.machine_key(), "host", device))
    facts = {"format": rates.FORMAT, "version": rates.VERSION, "device": device, "factors": found}
    cache.write_whole(path, json.dumps(found if isinstance(found, list) else facts).encode())


def test_a_long_run_probes_the_machine_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch, {"float32": 2.0, "float64": 0.5, "memory": 3.0})
    machine = multiply().plan.machine
    default = default_model("host", CORES, machine.compiled)
    assert machine.kernels["float64"].peak == 0.5 * default.kernels["float64"].peak
    assert machine.kernels["float16"].peak == 2.0 * default.kernels["float16"].peak
    assert (machine.memory, machine.read) == (3.0 * default.memory, 3.0 * default.read)
    assert "probe" in machine.name
    assert multiply().plan.machine.kernels == machine.kernels
    assert len(taken) == 1


def test_a_probe_measures_all_rates_of_the_host(folder: Path) -> None:
    machine = multiply().plan.machine
    assert len(list(folder.iterdir())) == 1
    found = rates.probe_factors("host", None)
    assert set(found) == {rate for name in ("float32", "float64", "memory") for rate in rates.MEASURED[name]}
    assert all(1 / rates.MAX_FACTOR <= factor <= rates.MAX_FACTOR for factor in found.values())
    assert rates.models("host").best.kernels == machine.kernels


@pytest.mark.parametrize("why", ["short", "disabled", "busy", "read-only"])
def test_no_probe_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    taken = counted(monkeypatch, {"float64": 0.5})
    if why == "short":
        monkeypatch.setattr(rates, "MIN_SECONDS", 1e9)
    elif why == "disabled":
        monkeypatch.setenv("OOCGEMM_PROBE", "0")
    elif why == "busy":
        busy = {"cores": 2, "own_seconds": 0.1, "busy_seconds": 0.5}
        monkeypatch.setattr(rates, "MAX_OTHERS", 0.1)
        monkeypatch.setattr(rates, "used_since", lambda _: busy)
    else:
        monkeypatch.setattr(rates, "_keepable", lambda: False)
    assert "probe" not in multiply().plan.machine.name
    assert rates.probe_factors("host", None) == {}
    assert len(taken) == (why == "busy")


@pytest.mark.parametrize(
    "found",
    [[], {"float64": "fast"}, {"float64": 0.0}, {"float64": 1e9}, {"float64": float("nan")}, {"x": 1}],
)
def test_an_invalid_probe_is_ignored(folder: Path, found: Any) -> None:
    store(folder, found)
    assert rates.probe_factors("host", None) == {}


def test_the_probe_of_another_machine_is_ignored(folder: Path) -> None:
    store(folder, {"float64": 0.5}, "0123456789ab-host-cpu.json")
    assert rates.probe_factors("host", None) == {}
    store(folder, {"float64": 0.5})
    assert rates.probe_factors("host", None)["float64"] == 0.5
    assert rates.probe_factors("host", "another device") == {}


def test_a_probe_that_fails_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(rates, "measure_probe", fail)
    assert np.array_equal(multiply(), np.full((64, 64), 64.0))
    assert not list(folder.glob("*.json"))
