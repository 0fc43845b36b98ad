"""The rates that runs observe are stored safely, and can be turned off and deleted."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from time import sleep

import numpy as np
import pytest

import oocgemm
from oocgemm import backends
from oocgemm.errors import InputError
from oocgemm.jobs.journal import read
from oocgemm.machine import models as module
from oocgemm.machine.models import models
from oocgemm.planning import default_model
from oocgemm.planning.cost.learned import SAMPLES, Learned
from oocgemm.planning.serialize import recorded_candidate
from oocgemm.system import cache, learning
from oocgemm.timeline import observed
from tests.command import command
from tests.test_learning import run_with
from tests.unfinished_runs import store_operands, unfinished


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Turn learning on, with an empty folder of rates, for runs of any size on a busy machine."""
    monkeypatch.setenv("OOCGEMM_LEARN", "1")
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_WALL_NS", 0)
    monkeypatch.setattr(module, "MAX_OTHERS", inf)
    monkeypatch.setattr(module, "TEACHES_AGAIN", 0)
    monkeypatch.setattr(observed, "MIN_BUSY", 0)
    monkeypatch.setattr(observed, "MIN_EFFICIENCY", 0)
    monkeypatch.setattr("oocgemm.planning.cost.learned.MIN_KERNEL_RATIO", 0)
    monkeypatch.setattr("oocgemm.planning.cost.learned.MIN_HOST_KERNEL_RATIO", 0)
    return tmp_path / "cache" / "learned"


A, B = (np.arange(300 * 300.0).reshape(300, 300) % 7 for _ in range(2))


def product(**options: object) -> oocgemm.Result:
    result = oocgemm.gemm(A, B, backend="host", tile="50x60x70", **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.asarray(result), A @ B)
    return result


def test_files_are_read_again_if_one_is_saved_or_after_a_while(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "RECENT", 1e9)
    product()
    found = models("host")
    assert found.learned is not None
    assert models("host") is found
    sleep(0.02)  # file systems count modification times in steps of up to 10 ms
    learning.update("host", found.learned.device, lambda learned: replace(learned, rates={}))
    emptied = models("host").learned
    assert emptied is not None
    assert emptied.rates == {}
    monkeypatch.setattr(cache, "RECENT", 1e-9)
    assert models("host") is not models("host")


def test_a_run_is_planned_with_the_rates_of_the_one_before(store: Path) -> None:
    first = product()
    assert "learned" not in first.plan.machine.name
    (kept,) = store.iterdir()
    learned = Learned.from_dict(json.loads(kept.read_text()))
    assert {"float64"} <= learned.rates.keys()
    second = product()
    assert second.plan.machine.name.endswith("learned from runs: float64")
    assert second.plan.machine.kernels["float64"].peak == pytest.approx(learned.rates["float64"].value)
    shown = command("info", "--json").json()["host_backend"]
    sources = shown["sources"]["float64"]
    assert sources["assumed"] == default_model("host", len(os.sched_getaffinity(0))).kernels["float64"].peak
    assert sources["learned"] == pytest.approx(shown["kernels"]["float64"])
    assert "float64" not in shown["assumed"]
    text = command("info").out
    assert all(word in text for word in ("assumed", "measured", "learned", "in use"))


def test_short_runs_and_disturbed_runs_teach_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OTHERS", -1.0)
    assert not product().log.sample.spans()  # a result keeps no spans
    assert not store.exists()
    monkeypatch.setattr(module, "MAX_OTHERS", inf)
    monkeypatch.setattr(module, "MIN_WALL_NS", 10**15)
    product()
    assert not store.exists()


def test_learning_can_be_switched_off_and_undone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOCGEMM_LEARN", "0")
    product()
    assert not store.exists()
    monkeypatch.setenv("OOCGEMM_LEARN", "1")
    product()
    assert models("host").learned is not None
    monkeypatch.setenv("OOCGEMM_LEARN", "0")
    assert models("host").learned is None
    monkeypatch.setenv("OOCGEMM_LEARN", "1")
    done = command("calibrate", "--forget")
    assert (done.code, done.err) == (0, "")
    assert list(store.iterdir()) == []
    assert models("host").learned is None
    assert command("calibrate", "--forget").code == 0


def test_runs_of_one_plan_teach_once_in_a_while(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates that the plan is made with do not change here: no learned rate differs enough."""
    monkeypatch.setattr("oocgemm.planning.cost.learned.MIN_CHANGE", inf)
    monkeypatch.setattr(module, "TEACHES_AGAIN", 60)
    product()
    (kept,) = store.iterdir()
    first = kept.read_bytes()
    product()
    assert kept.read_bytes() == first
    monkeypatch.setattr(module, "TEACHES_AGAIN", 0)
    product()
    assert kept.read_bytes() != first


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"format": "oocgemm-learned-rates", "version": 1}']
)
def test_a_damaged_file_is_ignored_and_replaced(store: Path, content: bytes) -> None:
    product()
    (kept,) = store.iterdir()
    kept.write_bytes(content)
    assert models("host").learned is None
    product()
    assert models("host").learned is not None
    assert list(store.iterdir()) == [kept]


@pytest.mark.parametrize("change", [{"machine": "another"}, {"rates": {"h2d": {"value": 0, "samples": [1]}}}])
@pytest.mark.usefixtures("store")
def test_rates_of_another_machine_and_bad_rates_are_ignored(change: dict[str, object]) -> None:
    learning.update("cuda", "NVIDIA H200", lambda one: run_with(one, 30e9))
    found = learning.load("cuda", None)
    assert found is not None
    path = learning._folder() / cache.file_name(found.machine, "cuda", found.device)
    path.write_text(json.dumps(found.to_dict() | change))
    assert learning.load("cuda", None) is None


def test_a_run_does_not_fail_where_rates_cannot_be_stored(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.parent.touch()  # a file where the folder should be
    product()

    def full(path: Path, contents: bytes) -> None:
        raise OSError(28, "No space left on device")

    store.parent.unlink()
    monkeypatch.setattr(cache, "write_whole", full)
    product()
    assert not store.exists()
    monkeypatch.setattr(learning, "update", lambda *_: 1 / 0)
    product()


def _add_runs(number: int) -> None:
    for _ in range(20):
        learning.update("cuda", "NVIDIA H200", lambda one: run_with(one, 30e9 + number))


def test_concurrent_processes_leave_a_whole_file(store: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_add_runs, range(4)))
    found = learning.load("cuda", "NVIDIA H200")
    assert found is not None
    assert len(found.rates["h2d"].samples) == SAMPLES
    assert len(list(store.iterdir())) == 1


def test_a_file_that_cannot_be_deleted_is_an_error(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(InputError, match="cannot be deleted: Permission denied"):
        learning.forget()


def test_a_resumed_run_keeps_its_plan(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store_operands()
    assert not store.exists()
    unfinished("c")
    header = read(Path("c/.oocgemm"))
    assert header is not None
    begun = recorded_candidate(header.header["candidate"])
    device = backends.identity(backends.open_backend("host"))
    slow = {("float64", ""): (3e9, 1.0)}  # multiplications so slow that other plans are better
    host = default_model("host", 2)
    learning.update("host", device, lambda learned: learned.with_run(slow, host, host, None))
    asked: list[object] = []
    monkeypatch.setattr("oocgemm.jobs.prepare.guarded_plan", lambda *a: asked.append(a))
    resumed = oocgemm.gemm("a", "b", "c", tile="4x4x4", backend="host", resume=True)
    assert asked == []
    assert "learned" in resumed.plan.machine.name
    assert resumed.plan.candidate == begun
    assert len(resumed.plan.done) == 2
