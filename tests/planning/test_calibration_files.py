"""Calibrations are saved, loaded and replaced. Unreadable ones are ignored."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import InputError
from oocgemm.planning import RATES, Calibration, KernelRate, StoreRates
from oocgemm.planning.cost.machine import MAX_LINK, VERSION
from oocgemm.system import cache
from tests.support.calibrations import STORES, folder_of_matrices, known
from tests.support.command import command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder_of_matrices(tmp_path, monkeypatch)


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
