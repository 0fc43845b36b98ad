"""Sizes that errors, notes and reports name can be added to the command, and make a product fast."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numcodecs import Blosc, GZip

import oocgemm
from oocgemm import BudgetError
from oocgemm.jobs import prepare
from oocgemm.planning import Budgets, Chunked, Layouts, Plan
from oocgemm.planning.cost.machine import default_model
from oocgemm.planning.units import ceil_size, parse_size
from oocgemm.reports.advice import fit, remedy
from oocgemm.timeline import report
from oocgemm.timeline.metrics import diagnose
from tests.support.command import command
from tests.support.suite import slow, thinned
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan

M, K, N = 4000, 3000, 900


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with arrays in one compressed chunk. They have no elements, since they are only planned."""
    monkeypatch.chdir(tmp_path)
    for name, shape, dtype, codec in (
        ("a", (M, K), "f8", GZip(1)),
        ("b", (K, N), "f8", GZip(1)),
        ("half", (M, K), "f4", Blosc("zstd")),
        ("code", (M, K), "i1", GZip(1)),
        ("swapped", (M, K), ">c16", GZip(1)),
        ("c", (M, N), "f8", GZip(1)),
    ):
        zarr.create_array(
            name, shape=shape, chunks=shape, dtype=dtype, compressors=codec, filters=None, zarr_format=2
        )
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", (M, K), "f8", chunks=(M, K), compression="gzip")
    return tmp_path


CASES: dict[str, dict[str, Any]] = {
    "memory": {"memory": "1MiB"},
    "host": {"device_memory": "1GiB", "host_memory": "1MiB"},
    "device": {"device_memory": "1MiB", "host_memory": "1GiB"},
    "both": {"device_memory": "1MiB", "host_memory": "1MiB"},
    "cuda": {"backend": "cuda", "device_memory": "1MiB", "host_memory": "1MiB"},
    "cuda memory": {"backend": "cuda", "device_memory": "8GiB", "memory": "1MiB"},
}
OPERANDS: dict[str, dict[str, Any]] = {
    "gzip": {"a": "a", "b": "b"},
    "gzip from both sides": {"a": "b", "b": "b", "trans_a": "T"},
    "blosc float32": {"a": "half", "b": np.ones((K, N), "f4")},
    "int8": {"a": "code", "b": np.ones((K, N), "i1")},
    "big-endian complex": {"a": "swapped", "b": np.ones((K, N), "c16")},
    "HDF5": {"a": "x.h5::/a", "b": "b"},
    "C in one chunk": {"a": np.ones((M, K)), "b": np.ones((K, N)), "c": "c", "beta": 1},
    "tile": {"a": "a", "b": "b", "tile": f"{M}x{N}x{K}"},
}
PLENTY = "16GiB"
QUICK = [("gzip", "memory"), ("gzip", "both"), ("HDF5", "host"), ("int8", "cuda"), ("tile", "cuda memory")]


def check(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError) as raised:
        oocgemm.plan(**options)
    named, said = dict(raised.value.named), str(raised.value)
    for name, size in named.items():
        assert f"{name}='{ceil_size(size)}'" in said
        assert f"--{name.replace('_', '-')} {ceil_size(size)}" in said
        assert size > parse_size(options[name])
    seconds = oocgemm.plan(**options | named).prediction.total
    plenty = oocgemm.plan(**options | dict.fromkeys(named, PLENTY)).prediction.total
    assert seconds <= 2.02 * plenty, (said, seconds, plenty)


@pytest.mark.parametrize(
    ("operands", "case"),
    [
        *QUICK,
        *slow(*((x, case) for x in OPERANDS for case in CASES if (x, case) not in QUICK)),
    ],
)
def test_with_the_sizes_of_an_error_a_product_is_not_slow(here: Path, operands: str, case: str) -> None:
    check({"backend": "host"} | OPERANDS[operands] | CASES[case])


def test_the_sizes_of_an_error_are_not_much_larger_than_needed(here: Path) -> None:
    options: dict[str, Any] = {"a": "a", "b": "b", "backend": "host"}
    with pytest.raises(BudgetError) as raised:
        oocgemm.plan(**options, memory="1MiB")
    named, least = raised.value.named["memory"], raised.value.least
    assert least is not None
    plenty = oocgemm.plan(**options, memory=PLENTY).prediction.total
    assert named > least  # the smallest plan is slow
    assert oocgemm.plan(**options, memory=least).prediction.total > 2 * plenty
    assert oocgemm.plan(**options, memory=int(0.9 * named)).prediction.total > 2 * plenty


@pytest.mark.parametrize("verb", thinned(["gram", "similarity", "pca"], ["gram"]))
def test_errors_of_other_verbs_name_such_sizes_too(here: Path, verb: str) -> None:
    x = np.random.default_rng(0).random((2000, 300)) - 0.5
    zarr.create_array("x", data=x, chunks=(2000, 300), compressors=GZip(1), zarr_format=2)
    line = {"gram": (), "similarity": ("--topk", "3"), "pca": ("--components", "3")}[verb]
    done = command(verb, "x", "out", *line, "--backend", "host", "--memory", "1MiB")
    assert done.code == 3, done.err
    found = re.search(r"\(--memory (\w+)\)", done.err)
    assert found is not None, done.err
    done = command(verb, "x", "out", *line, "--backend", "host", "--memory", "1MiB", "--memory", found[1])
    assert done.code == 0, done.err


def test_no_larger_sizes_are_searched_for_plans_that_fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "usable", lambda *_: pytest.fail("the plan fits"))
    oocgemm.plan("a", "b", backend="host", memory="1GiB")


# Notes.


@pytest.mark.parametrize(
    "given",
    [
        ("--backend", "host", "--memory", "LEAST"),
        ("--backend", "host", "--device-memory", "16785408", "--host-memory", "600MiB"),
        ("--backend", "cuda", "--memory", "130MiB", "--device-memory", "84MiB"),
    ],
    ids=["memory", "two budgets", "cuda"],
)
def test_the_options_of_a_note_can_be_added_to_the_command(here: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(BudgetError) as raised:
        oocgemm.plan("a", "b", backend="host", memory="1MiB")
    line = "plan", "a", "b", *(str(raised.value.least) if word == "LEAST" else word for word in given)
    before = command(*line, "--json").json()
    note = " ".join(command(*line).out.split())
    found = re.search(r"with ((?:--[\w-]+ \w+ ?)+) ?it would take", note)
    assert found is not None, note
    fast = command(*line, *found[1].split(), "--json").json()
    assert 9 * fast["predicted_seconds"]["total"] < before["predicted_seconds"]["total"]
    assert fast["predicted_seconds"]["total"] < 1.1 * before["faster"]["seconds"]


def test_a_note_names_no_more_memory_than_there_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError) as raised:
        oocgemm.plan("a", "b", backend="host", memory="1MiB")
    least = raised.value.least
    assert least is not None
    assert oocgemm.plan("a", "b", backend="host", memory=least).faster is not None
    monkeypatch.setattr(prepare, "available_memory", lambda *_: least + (1 << 20))
    assert oocgemm.plan("a", "b", backend="host", memory=least).note == ""


# Reports.


@pytest.mark.parametrize("unified", [True, False])
def test_a_report_names_memory_if_the_run_was_given_it(unified: bool) -> None:
    size = GIB // 2
    real = machine(h2d=4e9) if not unified else replace(default_model("host", 2), read=2e8)
    believed = machine() if not unified else default_model("host", 2)
    device, host = (size - size // 4, size // 4) if unified else (GIB // 2, size)
    stored = Layouts(*(Chunked((512, 512)),) * 3)
    plan = virtual_plan((8192, 8192, 8192), Budgets(device, host, size), believed, layouts=stored)
    timeline = run_of(replace(plan, machine=real), believed=believed)
    figures = report(timeline)
    found = remedy(timeline, figures, diagnose(timeline, figures), fit(timeline, figures))
    assert "host_memory" not in found.settings
    if unified:
        assert {*found.settings} == {"memory"}, found
        assert "--memory of " in found.change


# Workers.


@pytest.mark.slow
def test_sizes_for_workers_are_those_of_all_workers(tmp_path: Path) -> None:
    from tests.distributed.test_distributed_errors import Edited

    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.ones((64, 64)))

    def multiply(memory: Any) -> oocgemm.Result:
        with Edited() as executor:
            paths = (tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c")
            return oocgemm.gemm(*paths, executor=executor, backend="host", memory=memory)

    with pytest.raises(BudgetError, match="each worker gets 1/2") as raised:
        multiply("1MiB")
    found = re.search(r"memory='(\w+)'", str(raised.value))
    assert found is not None
    plan: Plan = multiply(found[1]).plan
    assert plan.budgets.device + plan.budgets.host <= parse_size(found[1]) // 2
